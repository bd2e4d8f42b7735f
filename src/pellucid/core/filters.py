"""Filters on x0: the two non-linear things that samplers do. They act on the prediction; the table stays linear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule

Filter = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Clip:
    """x0 clipped to [−limit, limit]."""

    limit: float = 1.0

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise PellucidError(rule("limit", "positive", self.limit), "filter")

    def __call__(self, x0: Tensor) -> Tensor:
        return x0.clamp(-self.limit, self.limit)


@dataclass(frozen=True)
class DynamicThreshold:
    """Each image clipped at its own quantile of |x0|, then scaled back to [−1, 1] (Saharia et al. 2022).

    The quantile is taken as at least 1 and at most `most`; a `most` below 1 clips every image there, as in diffusers.
    """

    quantile: float = 0.995
    most: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.quantile <= 1 or not self.most > 0:
            raise PellucidError(rule("quantile, most", "in [0, 1] and positive", (self.quantile, self.most)), "filter")

    def __call__(self, x0: Tensor) -> Tensor:
        wide = x0.to(torch.float64 if x0.dtype == torch.float64 else torch.float32)
        size = torch.quantile(wide.reshape(len(wide), -1).abs(), self.quantile, dim=1).clamp(1.0, self.most)
        size = size.reshape(-1, *([1] * (x0.ndim - 1)))
        return (wide.clamp(-size, size) / size).to(x0.dtype)
