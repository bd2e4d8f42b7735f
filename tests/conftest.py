"""Hypothesis draws the same examples in every run, so that a run that passes here passes in CI.

To look for new ones: `HYPOTHESIS_PROFILE=search pytest`.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))
