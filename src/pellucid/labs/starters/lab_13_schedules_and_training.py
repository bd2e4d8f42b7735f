"""Lab 13: what a schedule does to training. Fill in the four functions, then: pellucid lab 13 --check THIS_FILE

A level is (alpha, sigma) with alpha² + sigma² = 1. SNR = (alpha / sigma)², λ = ln(alpha / sigma).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def question(x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """What a network that predicts v is shown, and the right answer: both (B, C, H, W); the levels are (B,)."""
    raise NotImplementedError


def min_snr_on_v(alpha: float, sigma: float, gamma: float = 5.0) -> float:
    """min-SNR's weight on the squared error of v.

    On the squared error of x0 it is min(SNR, gamma). An error of x0 is 1 / sigma times as large as an error of v.
    """
    raise NotImplementedError


def share_below(lams: Sequence[float], limit: float) -> float:
    """The share of a schedule's training times, all equally likely, whose λ is below a limit."""
    raise NotImplementedError


def mean_gradient(gradients: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """The gradient of the mean loss over all images, from each rank's gradient of the mean loss over its own images.

    `counts` are the images of each rank; they may differ.
    """
    raise NotImplementedError
