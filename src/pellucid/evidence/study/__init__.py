"""Studies: the same question asked of many set-ups, with every answer kept as soon as it is known."""
