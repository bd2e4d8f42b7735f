"""The doctor: what is wrong with a model, a config, a run or its images, with numbers, cause and fix."""
