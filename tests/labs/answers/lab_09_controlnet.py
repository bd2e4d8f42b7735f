"""A right answer to lab 09."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def zero_convolution(channels: int) -> nn.Conv2d:
    conv = nn.Conv2d(channels, channels, 1)
    nn.init.zeros_(conv.weight)
    nn.init.zeros_(conv.bias)
    return conv


def steered(skips: Sequence[Tensor], residuals: Sequence[Tensor], strength: float) -> list[Tensor]:
    return [skip + strength * residual for skip, residual in zip(skips, residuals, strict=True)]


def acts_at(step: int, steps: int, start: float, end: float) -> bool:
    return step / steps >= start and (step + 1) / steps <= end


def grown(edges: Tensor) -> Tensor:
    return nn.functional.max_pool2d(edges[None, None].float(), 3, stride=1, padding=1)[0, 0] > 0


def f1(seen: Tensor, exact: Tensor) -> float:
    met, found = seen & grown(exact), exact & grown(seen)
    if not met.any() or not found.any():
        return 0.0
    precision, recall = float(met.sum() / seen.sum()), float(found.sum() / exact.sum())
    return 2 * precision * recall / (precision + recall)
