"""From a bundle on disk to images: load, save, stages, memory policy."""
