"""Hypothesis draws the same examples in every run, so that a run that passes here passes in CI.

To look for new ones: `HYPOTHESIS_PROFILE=search pytest`. One thread a kernel: bitwise repeatable, and a tiny network is
much faster so on a busy machine.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))
torch.set_num_threads(1)
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)  # it notes each tensor of a checkpoint


@pytest.fixture
def count_calls() -> Callable[..., AbstractContextManager[Counter[str]]]:
    """with count_calls(f, g) as calls: … `calls["f"]` is how often this thread called f, whatever name it went by."""

    @contextmanager
    def counting(*functions: Any) -> Iterator[Counter[str]]:
        names, calls = {function.__code__: function.__name__ for function in functions}, Counter[str]()

        def see(frame: Any, event: str, _: Any) -> None:
            if event == "call" and frame.f_code in names:
                calls[names[frame.f_code]] += 1

        before = sys.getprofile()
        sys.setprofile(see)
        try:
            yield calls
        finally:
            sys.setprofile(before)

    return counting
