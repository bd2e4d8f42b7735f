"""The doctor: what is wrong with a model, a config, a run or its images, with numbers, cause and fix.

`subject` (what is examined) and `checks` (findings, the report, and the registry of checks). A theme's checks are in
a file of their own, private to this room.
"""
