"""Tuning: the grid, the weights and the times of a plan, by gradient descent against the converged teacher."""
