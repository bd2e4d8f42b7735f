"""Lab 09: an image that steers. Fill in the four functions, then: pellucid lab 09 --check THIS_FILE"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def zero_convolution(channels: int) -> nn.Conv2d:
    """A 1×1 convolution of `channels` to `channels` that gives 0 for every input, and that can be trained."""
    raise NotImplementedError


def steered(skips: Sequence[Tensor], residuals: Sequence[Tensor], strength: float) -> list[Tensor]:
    """The UNet's skips with what a ControlNet adds to them. The given skips must stay as they are."""
    raise NotImplementedError


def acts_at(step: int, steps: int, start: float, end: float) -> bool:
    """Whether a ControlNet acts at a step (0 is the first): its whole share of the run must be in [start, end]."""
    raise NotImplementedError


def f1(seen: Tensor, exact: Tensor) -> float:
    """The F1 of an outline map `seen` (H, W) against the `exact` one, both bool, within one pixel (diagonals too).

    A pixel of one map is met where the other has a pixel at most one away. Precision is the share of `seen` that is
    met, recall that of `exact`; F1 is their harmonic mean, and 0 where nothing is met.
    """
    raise NotImplementedError
