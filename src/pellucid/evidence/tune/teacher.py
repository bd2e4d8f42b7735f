"""The converged images of the same seeds, and how far a plan ends from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.core.compile import compile_plan
from pellucid.core.grid import Grid
from pellucid.core.loop import run
from pellucid.core.plan import Plan
from pellucid.core.schedule import Schedule
from pellucid.evidence.statistics import mean_interval
from pellucid.evidence.tune.model import Pairs, TuningModel

_NOISE_AT_ONCE = 256


@dataclass(frozen=True)
class NoisePairs:
    """Pairs with their unit noise (N, …), kept on the CPU."""

    pairs: Pairs
    noise: Tensor

    @staticmethod
    def of(model: TuningModel, pairs: Pairs) -> NoisePairs:
        return NoisePairs(pairs, torch.cat([model.noise(part).cpu() for _, part in pairs.parts(_NOISE_AT_ONCE)]))

    def __len__(self) -> int:
        return len(self.pairs)


@dataclass(frozen=True)
class Truth(NoisePairs):
    """Pairs with their noise and their converged x0 (N, …), on the CPU."""

    x0: Tensor

    def first(self, count: int) -> Truth:
        return Truth(self.pairs.first(count), self.noise[:count], self.x0[:count])


# --- errors -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorSummary:
    """The mean of errors (N,) with its 95 % interval, and what shows the tail."""

    mean: float
    low: float
    high: float
    median: float
    p90: float
    worst: float
    pairs: int

    @staticmethod
    def of(errors: Tensor) -> ErrorSummary:
        values = errors.double().cpu()
        middle, tail = torch.quantile(values, torch.tensor([0.5, 0.9], dtype=torch.float64)).tolist()
        interval = mean_interval(values)
        mean, worst = float(values.mean()), float(values.max())
        return ErrorSummary(mean, interval.low, interval.high, middle, tail, worst, len(values))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def distance(x: Tensor, truth: Tensor) -> Tensor:
    """(N,): the root mean square of each pair's difference, in the units of x0."""
    return (x - truth).flatten(1).square().mean(1).sqrt()


@torch.no_grad()
def ends(
    plan: Plan, model: TuningModel, noisy: NoisePairs, at_once: int, done: Callable[[int], object] | None = None
) -> Tensor:
    """x0 at the plan's end (N, …), through the loop that makes images."""
    found = []
    for where, part in noisy.pairs.parts(min(at_once, model.most)):
        x = noisy.noise[where].to(model.device) * plan.initial_scale
        found.append((run(plan, model.denoiser(part), x) / plan.end.alpha).cpu())
        if done is not None:
            done(len(part))
    return torch.cat(found)


def errors(plan: Plan, model: TuningModel, truth: Truth, at_once: int) -> Tensor:
    """(N,): how far each pair ends from its truth; infinite where it does not end."""
    found = distance(ends(plan, model, truth, at_once), truth.x0).double()
    return torch.nan_to_num(found, nan=math.inf, posinf=math.inf)


# --- the teacher --------------------------------------------------------------------------------------------------

SAMPLER = "dpmpp_3m"
STEPS = 200
FEWEST_STEPS, MOST_STEPS = 20, 2000
_SIGNAL = 300.0  # sigma / alpha of the second call after pure noise
_JUDGED = 32  # pairs on which the teacher itself is judged


def teacher_plan(schedule: Schedule, target: str, steps: int) -> Plan:
    """Third order, even in λ. From pure noise, where λ is infinite, one step leads to where signal begins to tell."""
    low, high = schedule.ratio_at(schedule.span)
    if 0 < high < math.inf:
        grid = Grid("explicit", sigmas=tuple(schedule.sigma_of(np.geomspace(high, low, steps))))
    else:
        ratios = [math.inf, *np.geomspace(_SIGNAL, low, steps - 1)]
        grid = Grid("explicit", timesteps=tuple(np.clip(schedule.time_at(np.array(ratios)), *schedule.span)))
    return compile_plan(SAMPLER, schedule=schedule, target=target, grid=grid)


def teach(
    model: TuningModel, pairs: Pairs, steps: int, at_once: int, done: Callable[[int], object] | None = None
) -> Truth:
    """The converged x0 of every pair."""
    plan, noisy = teacher_plan(model.schedule, model.target, steps), NoisePairs.of(model, pairs)
    return Truth(pairs, noisy.noise, ends(plan, model, noisy, at_once, done))


def doubt(model: TuningModel, truth: Truth, steps: int, at_once: int) -> float:
    """The mean distance from a teacher of half the steps: an upper bound of the teacher's own error."""
    few = truth.first(_JUDGED)
    half = teacher_plan(model.schedule, model.target, steps // 2)
    return float(distance(ends(half, model, few, at_once), few.x0).mean())
