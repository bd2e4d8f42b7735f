"""Tuning: the grid, the weights and the times of a plan, by gradient descent against the converged teacher.

`tuning` (from config to the tuned plan), `model` and `teacher` (what is tuned for, and against what), `table` (a plan
as numbers with gradients), `descent`. The sweep over untuned plans is this room's own.
"""
