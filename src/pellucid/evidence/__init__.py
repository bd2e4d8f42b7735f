"""Evidence: what a model and its images are worth, measured."""
