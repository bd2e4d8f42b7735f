"""Drawings that the command line, the studio and the docs share.

`plan` (plans and schedules), `graph` (pipelines), `memory`.
"""
