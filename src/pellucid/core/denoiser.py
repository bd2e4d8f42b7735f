"""From a network to a denoiser: scale the input as the schedule trained it, tell the time, read the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pellucid.core import schedule as schedules
from pellucid.core import target as targets
from pellucid.core.batch import BatchLevel
from pellucid.core.errors import PellucidError, rule
from pellucid.core.filters import Filter
from pellucid.core.schedule import EDM, Level, Schedule, Target


def sigma_data_of(schedule: Schedule) -> float:
    return schedule.sigma_data if isinstance(schedule, EDM) else targets.SIGMA_DATA


def input_scale(schedule: Schedule, level: Level) -> float:
    """What x is multiplied by before the network sees it: back to the frame, and the size, of training."""
    if isinstance(schedule, EDM):
        return 1.0 / targets.root(level.sigma**2 + (schedule.sigma_data * level.alpha) ** 2)
    if schedule.frame == "flow":
        return 1.0 / (level.alpha + level.sigma)
    return 1.0 / targets.length(level.alpha, level.sigma)


def read_output(
    schedule: Schedule, target: schedules.Target, to: schedules.Target, level: Level
) -> tuple[float, float]:
    """(k_x, k_out) with `to` = k_x·x + k_out·out, for x at a level in any frame and the raw output of a network.

    The score alone depends on the frame: the network's is that of the frame in which it was trained.
    """
    k_x, k_out = targets.convert(target, to, level, sigma_data_of(schedule))
    if target == "score":
        k_out *= level.to(schedule.frame).sigma / level.sigma
    return k_x, k_out


@dataclass(frozen=True)
class NetworkDenoiser:
    """network(x, time) → out, as an x0 denoiser on a schedule, for a target; `x0_filter` clips the prediction."""

    network: Callable[[Tensor, Tensor], Tensor]
    schedule: Schedule
    target: Target
    x0_filter: Filter | None = None
    dtype: torch.dtype | None = None
    gradients: bool = False

    @property
    def unclipped(self) -> bool:
        """Whether nothing holds x0 in the range of the data."""
        return self.x0_filter is None

    def __call__(self, x: Tensor, level: Any, time: Any) -> Tensor:
        with torch.set_grad_enabled(self.gradients and torch.is_grad_enabled()):
            return self.x0(x, level, time)

    def x0(self, x: Tensor, level: Any, time: Any) -> Tensor:
        levels = split(level) if isinstance(level, BatchLevel) else [level]
        scale = self.numbers([input_scale(self.schedule, lv) for lv in levels], x)
        told = time if isinstance(time, Tensor) else torch.full((len(x),), float(time), dtype=torch.float64)
        kind = self.dtype or x.dtype
        out = self.network((x * scale).to(kind), told.to(device=x.device, dtype=x.dtype))
        pairs = [read_output(self.schedule, self.target, "x0", lv) for lv in levels]
        x0 = x * self.numbers([p[0] for p in pairs], x) + out.to(x.dtype) * self.numbers([p[1] for p in pairs], x)
        return x0 if self.x0_filter is None else self.x0_filter(x0)

    @staticmethod
    def numbers(values: list[float], like: Tensor) -> Any:
        if len(values) == 1:
            return values[0]
        return torch.tensor(values, dtype=like.dtype, device=like.device).reshape(-1, *([1] * (like.ndim - 1)))


def split(level: BatchLevel) -> list[Level]:
    if level.levels:
        return list(level.levels)
    pairs = zip(level.alpha.reshape(-1).tolist(), level.sigma.reshape(-1).tolist(), strict=True)
    return [Level(alpha, sigma) for alpha, sigma in pairs]


def denoiser(
    network: Callable[[Tensor, Tensor], Tensor],
    schedule: str | Schedule = "scaled_linear",
    target: str = "eps",
    x0_filter: Filter | None = None,
    dtype: torch.dtype | None = None,
    gradients: bool = False,
) -> NetworkDenoiser:
    """Wraps a network that takes (x, time) for `run`; `dtype` is what the network works in, x stays float32.

    The network is called without gradients unless `gradients` asks for them.
    """
    curve, kind = schedules.make(schedule), targets.named(target)
    if kind not in curve.carries:
        raise PellucidError(
            rule("target", f"one that schedule {curve.name} carries ({', '.join(curve.carries)})", target),
            "target-schedule",
        )
    return NetworkDenoiser(network, curve, kind, x0_filter, dtype, gradients)
