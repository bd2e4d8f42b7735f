"""The maths of noise, from a schedule to the loop that runs a plan. Imports torch and numpy only.

What a run is made of: `schedule` (levels and training times), `target` (what a network predicts), `grid` (where it is
called), `plan` (the table), `compile` (schedule, grid and sampler → plan), `samplers` and its `registry`, `dialect`
and `dialect_diffusers` (other libraries' conventions). Running it: `loop`, `batch` (the state), `table` (plans as
numbers on a device), `denoiser`, `noise`, `filters` (of x0), `adaptive` (step sizes that are found on the way),
`oracle` (exact denoisers). For every room: `errors`, `reader` (the strict reader of outside files), `wording`. The
files of sampler families are this room's own.
"""
