"""Hypothesis draws the same examples in every run, so that a run that passes here passes in CI.

To look for new ones: `HYPOTHESIS_PROFILE=search pytest`. One thread a kernel: bitwise repeatable, and a tiny network is
much faster so on a busy machine.
"""

from __future__ import annotations

import logging
import os

import torch
from hypothesis import settings

settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))
torch.set_num_threads(1)
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)  # it notes each tensor of a checkpoint
