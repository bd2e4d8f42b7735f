"""Drawings that the command line, the studio and the docs share: schedules, plans, pipelines, memory."""
