"""A right answer to lab 13."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def question(x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    a, s = (value.reshape(-1, 1, 1, 1) for value in (alpha, sigma))
    return a * x0 + s * noise, a * noise - s * x0


def min_snr_on_v(alpha: float, sigma: float, gamma: float = 5.0) -> float:
    return min((alpha / sigma) ** 2, gamma) * sigma**2


def share_below(lams: Sequence[float], limit: float) -> float:
    return sum(lam < limit for lam in lams) / len(lams)


def mean_gradient(gradients: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    return sum(gradient * count for gradient, count in zip(gradients, counts, strict=True)) / sum(counts)
