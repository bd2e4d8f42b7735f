"""Training: objectives, data, the loop, checkpoints and the tasks that a config can name."""
