"""One thread, and a counter of graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def count_graphs() -> Callable[..., int]:
    """How many graphs a network compiles to over several calls; fullgraph, so that a break raises."""
    from torch._dynamo.testing import CompileCounter

    def count(network: nn.Module | Callable[..., object], calls: list[tuple[tuple, dict]]) -> int:
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(network, backend=counter, fullgraph=True)
        with torch.no_grad():
            for args, kwargs in calls:
                compiled(*args, **kwargs)
        return counter.frame_count

    return count
