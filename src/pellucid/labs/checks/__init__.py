"""What the labs ask of an answer: a module of checks for each lab."""
