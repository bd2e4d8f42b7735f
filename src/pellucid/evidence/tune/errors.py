"""How far a plan ends from the converged image of the same seed: one number a pair, and what of them is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from pellucid.core.loop import run
from pellucid.core.plan import Plan
from pellucid.evidence.metrics.bootstrap import mean_interval
from pellucid.evidence.tune.pairs import Pairs
from pellucid.evidence.tune.subject import Subject

NOISE_AT_ONCE = 256


@dataclass(frozen=True)
class Drawn:
    """Pairs with their unit noise (N, …), kept on the CPU."""

    pairs: Pairs
    noise: Tensor

    @staticmethod
    def of(subject: Subject, pairs: Pairs) -> Drawn:
        return Drawn(pairs, torch.cat([subject.noise(part).cpu() for _, part in pairs.parts(NOISE_AT_ONCE)]))

    def __len__(self) -> int:
        return len(self.pairs)

    def first(self, count: int) -> Drawn:
        return Drawn(self.pairs.first(count), self.noise[:count])


@dataclass(frozen=True)
class Truth:
    """Drawn pairs with their converged x0 (N, …), on the CPU."""

    drawn: Drawn
    x0: Tensor

    @property
    def pairs(self) -> Pairs:
        return self.drawn.pairs

    def __len__(self) -> int:
        return len(self.drawn)

    def first(self, count: int) -> Truth:
        return Truth(self.drawn.first(count), self.x0[:count])


@dataclass(frozen=True)
class Summary:
    """Of errors (N,): the mean with its 95 % interval, and what shows the tail."""

    mean: float
    low: float
    high: float
    median: float
    p90: float
    worst: float
    pairs: int

    @staticmethod
    def of(errors: Tensor) -> Summary:
        given = errors.double().cpu()
        middle, tail = torch.quantile(given, torch.tensor([0.5, 0.9], dtype=torch.float64)).tolist()
        interval = mean_interval(given)
        return Summary(float(given.mean()), interval.low, interval.high, middle, tail, float(given.max()), len(given))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def distance(x: Tensor, truth: Tensor) -> Tensor:
    """(N,): the root mean square of each pair's difference, in the units of x0."""
    return (x - truth).flatten(1).square().mean(1).sqrt()


@torch.no_grad()
def ends(
    plan: Plan, subject: Subject, drawn: Drawn, at_once: int, done: Callable[[int], object] | None = None
) -> Tensor:
    """x0 at the plan's end (N, …), through the loop that makes images."""
    found = []
    for where, part in drawn.pairs.parts(min(at_once, subject.most)):
        x = drawn.noise[where].to(subject.device) * plan.initial_scale
        found.append((run(plan, subject.denoiser(part), x) / plan.end.alpha).cpu())
        if done is not None:
            done(len(part))
    return torch.cat(found)


def errors(plan: Plan, subject: Subject, truth: Truth, at_once: int) -> Tensor:
    """(N,): how far each pair ends from its truth; infinite where it ends nowhere."""
    found = distance(ends(plan, subject, truth.drawn, at_once), truth.x0).double()
    return torch.nan_to_num(found, nan=math.inf, posinf=math.inf)
