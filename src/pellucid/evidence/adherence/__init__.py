"""Adherence: whether images of the world of scenes show what was asked for. The truth is known, so it is counted."""
