"""Training: what a network is asked, on which data, and by whom.

`config` and `kinds` (tasks and data by name), `trainer`, `ranks`, `checkpoint`, `journal`, `explain` (the cost before
the run). Data: `source`, `cifar10`, `image_folder`, `scenes_source`, `latent_cache`, `latent_recipe`. What is asked
of a network: `objective`, `denoiser`, `draws`. The rest is this room's own.
"""
