"""Training: objectives, data, the loop, checkpoints and the tasks that a config can name.

`config` and `kinds` (tasks and data by name), `trainer`, `ranks`, `checkpoint`, `journal`, `explain` (the cost before
the run). Data: `source`, `cifar10`, `image_folder`, `scenes_source`, `latent_cache`, `latent_recipe`. Objectives and
tasks: `objective`, `denoiser`, `draws`. The rest is this room's own.
"""
