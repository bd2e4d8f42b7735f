"""At which noise levels a network is trained: training times, drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.core.schedule import Array, Schedule, Tabled

Kind = Literal["uniform", "logit_normal", "edm"]
KINDS: tuple[Kind, ...] = ("uniform", "logit_normal", "edm")
USUAL = {"logit_normal": (0.0, 1.0), "edm": (-1.2, 1.2)}  # mean and std in the papers


@dataclass(frozen=True)
class Times:
    """A distribution of training times.

    uniform: every time alike; whole ones where the schedule is a table, as such networks are trained. logit_normal: the
    part of the run is sigmoid(mean + std·n) (Esser et al. 2024). edm: ln(sigma / alpha) is mean + std·n (Karras et al.
    2022). `stratified` draws one time from each of as many equal parts of the distribution as there are images, which
    lowers the variance of a step's loss and leaves its mean.
    """

    kind: Kind = "uniform"
    mean: float | None = None  # None: the kind's own, in `USUAL`
    std: float | None = None
    stratified: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PellucidError(rule("times", f"one of {', '.join(KINDS)}", self.kind), "times")
        mean, std = self.normal
        if not math.isfinite(mean) or not (math.isfinite(std) and std > 0):
            raise PellucidError(rule("mean, std", "finite, std above 0", (mean, std)), "times")

    @property
    def normal(self) -> tuple[float, float]:
        """Mean and std: those given, else the kind's."""
        mean, std = USUAL.get(self.kind, (0.0, 1.0))
        return mean if self.mean is None else self.mean, std if self.std is None else self.std

    def draw(self, count: int, schedule: Schedule, generator: torch.Generator | None = None) -> Array:
        """Times of `count` images, float64."""
        u = self.quantiles(count, generator)
        low, high = schedule.span
        if self.kind == "uniform":
            if isinstance(schedule, Tabled):
                return np.floor(u * schedule.num_train).clip(0, schedule.num_train - 1)
            return low + u * (high - low)
        mean, std = self.normal
        normal = torch.special.ndtri(torch.from_numpy(u)).numpy() * std + mean
        if self.kind == "logit_normal":
            return low + (high - low) / (1.0 + np.exp(-normal))
        least, most = (float(schedule.ratio_at(t)) for t in (low, high))
        return np.asarray(schedule.time_at(np.exp(normal).clip(least, most)))

    def quantiles(self, count: int, generator: torch.Generator | None) -> Array:
        """Parts of the distribution in (0, 1), one per image, in no order."""
        if count < 1:
            raise PellucidError(rule("count", "at least 1", count), "times")
        u: Tensor = torch.rand(count, generator=generator, dtype=torch.float64)
        if self.stratified:
            u = (torch.randperm(count, generator=generator) + u) / count
        return u.clamp(1e-12, 1 - 1e-12).numpy()
