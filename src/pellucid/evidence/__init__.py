"""Evidence: what a model and its images are worth, measured.

Each folder is a room in this one and names what it offers: `adherence`, `doctor`, `drawing`, `metrics`, `report`,
`study`, `trace`, `tune`. Beside them: `statistics` (estimates and their intervals), `qualities` (measures of images
without a reference), `plan_diff` (two plans, row by row), `demo`, and `public`, whose names `pellucid` exports.
"""
