"""An exact network: the mixture's own prediction at the level that it is *told*, as a trained network would give it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.core import target as targets
from pellucid.core.denoiser import NetworkDenoiser, input_scale, sigma_data_of
from pellucid.core.oracle import Mixture
from pellucid.core.schedule import Schedule, Target
from pellucid.evidence.tune.subject import Subject
from pellucid.evidence.tune.table import TIME_STEP, SoftLevel, split_levels

MOST_POINTS = 8192  # of one call


@dataclass(frozen=True)
class ExactNetwork:
    """network(x, time) → the target of the mixture at the level of that time. One time for the whole batch."""

    mixture: Mixture
    schedule: Schedule
    target: Target

    def __call__(self, x: Tensor, time: Tensor) -> Tensor:
        level = self.level(time[0])
        own = x / input_scale(self.schedule, level)  # type: ignore[arg-type]
        x0 = self.mixture(own, level)
        c_x, c_0 = targets.from_x0(self.target, level, sigma_data_of(self.schedule))  # type: ignore[arg-type]
        return own * c_x + x0 * c_0

    def level(self, time: Tensor) -> SoftLevel:
        ratio = float(self.schedule.ratio_at(float(time.detach())))
        if np.isinf(ratio):
            return SoftLevel(*(torch.tensor(v, dtype=torch.float64) for v in (0.0, 1.0)), ratio)
        lam = Lam.apply(time.to(torch.float64), self.schedule)
        alpha, sigma = split_levels(lam, self.schedule.frame)
        return SoftLevel(alpha, sigma, ratio)


class Lam(torch.autograd.Function):
    """Time → λ of the schedule. Its derivative is a central difference."""

    @staticmethod
    def forward(ctx: Any, time: Tensor, schedule: Schedule) -> Tensor:
        low, high = schedule.span
        at, step = float(time), TIME_STEP * (high - low)
        a, b = max(at - step, low), min(at + step, high)
        ratios = schedule.ratio_at(np.array([a, at, b]))
        if np.isinf(ratios[2]):
            b, ratios[2] = at, ratios[1]
        lams = -np.log(ratios)
        ctx.slope = float((lams[2] - lams[0]) / (b - a))
        return torch.tensor(lams[1], dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.slope, None


def exact_denoiser(mixture: Mixture, schedule: Schedule, target: Target) -> NetworkDenoiser:
    return NetworkDenoiser(ExactNetwork(mixture, schedule, target), schedule, target, gradients=True)


def oracle_subject(name: str, mixture: Mixture, schedule: Schedule, target: Target | None = None) -> Subject:
    """A mixture under a schedule, as a model that is tuned for; in float64."""
    kind = schedule.carries[0] if target is None else target
    known = exact_denoiser(mixture, schedule, kind)
    return Subject(
        name=f"{name}, {schedule.name}",
        schedule=schedule,
        target=kind,
        shape=(mixture.means.shape[1],),
        denoiser=lambda pairs: known,
        dtype=torch.float64,
        most=MOST_POINTS,
    )
