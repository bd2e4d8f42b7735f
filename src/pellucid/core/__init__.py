"""The maths of noise: schedules, targets, grids, plans, samplers, noise and the loop. Imports torch and numpy only."""
