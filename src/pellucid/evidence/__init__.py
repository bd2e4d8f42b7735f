"""Evidence: what a model and its pictures are worth, measured."""
