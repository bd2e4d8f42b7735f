"""The doctor: what is wrong with a model, a config, a run or its images: shown by numbers, with cause and fix."""
