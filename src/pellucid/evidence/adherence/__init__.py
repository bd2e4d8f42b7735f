"""Adherence: whether images of the world of scenes show what their prompts say. The truth is known, so it is counted.

`study` (the measurement from config to report), `samples` (images by the pipeline, in batches), `judging` (verdicts),
`sheets` (images with their verdicts).
"""
