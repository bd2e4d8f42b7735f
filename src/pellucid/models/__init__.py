"""The networks and what wraps them. Names of weights and configs are diffusers', so that its files load as they are."""
