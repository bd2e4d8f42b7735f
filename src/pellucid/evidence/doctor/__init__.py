"""The doctor: what is wrong with a model, a config, a run or its pictures: shown by numbers, with cause and fix."""
