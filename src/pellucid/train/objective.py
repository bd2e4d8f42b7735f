"""The objective: noise the data at drawn times, ask the network, weigh its error; and show it by noise level."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pellucid.core import target as targets
from pellucid.core.denoiser import input_scale, sigma_data_of
from pellucid.core.errors import PellucidError, rule
from pellucid.core.loop import column
from pellucid.core.schedule import Level, Schedule, Target
from pellucid.models import inputs as trees
from pellucid.train.times import Times
from pellucid.train.weighting import Weighting

Network = Callable[..., Tensor]


@dataclass(frozen=True)
class Question:
    """What a network is asked for one batch, and the right answer."""

    x: Tensor  # (B, …), scaled as the network takes it
    time: Tensor  # (B,)
    answer: Tensor  # (B, …)
    weights: Tensor  # (B,)
    lam: Tensor  # (B,): ln(alpha / sigma)


@dataclass(frozen=True)
class Graded:
    """The loss of a batch, and each image's own squared error and log-SNR, for the log."""

    loss: Tensor
    errors: Tensor  # (B,), without the weights
    lam: Tensor  # (B,)


@dataclass(frozen=True)
class Objective:
    """Denoising at drawn levels. `noise_offset` adds a noise that is one number a channel; `dropout` is the share of
    images that are trained without their condition."""

    schedule: Schedule
    target: Target
    times: Times = field(default_factory=Times)
    weighting: Weighting = field(default_factory=Weighting)
    noise_offset: float = 0.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.target not in self.schedule.carries:
            must = f"one that schedule {self.schedule.name} carries ({', '.join(self.schedule.carries)})"
            raise PellucidError(rule("target", must, self.target), "target-schedule")
        for name, high in (("noise_offset", 1.0), ("dropout", 1.0)):
            if not 0 <= getattr(self, name) <= high:
                raise PellucidError(rule(name, f"from 0 to {high:g}", getattr(self, name)), "objective")

    def ask(self, x0: Tensor, generator: torch.Generator | None = None) -> Question:
        """Noised data and what is to be said of it. The generator is the CPU's, whatever device the data is on."""
        times = self.times.draw(len(x0), self.schedule, generator)
        noise = torch.randn(x0.shape, generator=generator)
        if self.noise_offset:
            flat = torch.randn(*x0.shape[:2], *([1] * (x0.ndim - 2)), generator=generator)
            noise = noise + self.noise_offset * flat
        noise = noise.to(x0)
        levels = [self.schedule.level(float(time)) for time in times]
        x = x0 * column([lv.alpha for lv in levels], x0, False) + noise * column([lv.sigma for lv in levels], x0, False)
        return Question(
            x=x * column([input_scale(self.schedule, lv) for lv in levels], x0, False),
            time=torch.tensor(times, dtype=torch.float32, device=x0.device),
            answer=self.answer(x, x0, noise, levels),
            weights=torch.tensor([self.weight(lv) for lv in levels], dtype=torch.float32, device=x0.device),
            lam=torch.tensor([lv.lam for lv in levels], dtype=torch.float32),
        )

    def answer(self, x: Tensor, x0: Tensor, noise: Tensor, levels: list[Level]) -> Tensor:
        """The target, made from the noise where there is little of it and from x0 where there is much."""
        if self.target == "x0":
            return x0
        if self.target == "eps":
            return noise
        data = sigma_data_of(self.schedule)
        through_eps = [lv.alpha >= lv.sigma for lv in levels]
        ways = {True: targets.from_eps, False: targets.from_x0}
        pairs = [ways[way](self.target, lv, data) for way, lv in zip(through_eps, levels, strict=True)]
        clear = column([float(way) for way in through_eps], x0, False)
        known = noise * clear + x0 * (1 - clear)
        return x * column([p[0] for p in pairs], x0, False) + known * column([p[1] for p in pairs], x0, False)

    def weight(self, level: Level) -> float:
        return self.weighting.on(self.target, level, sigma_data_of(self.schedule))

    def grade(self, question: Question, out: Tensor) -> Graded:
        """The weighted mean of squared errors, in float32 whatever the network's precision."""
        if out.ndim > 1 and out.shape[1] == 2 * question.answer.shape[1]:
            out = out[:, : question.answer.shape[1]]  # a learned variance is not trained here
        errors = (out.float() - question.answer.float()).square().flatten(1).mean(1)  # (B,)
        return Graded((errors * question.weights).mean(), errors.detach(), question.lam)

    def __call__(
        self,
        network: Network,
        x0: Tensor,
        inputs: Mapping[str, Any] | None = None,
        null: Mapping[str, Any] | None = None,
        generator: torch.Generator | None = None,
    ) -> Graded:
        """The loss of a batch; `null` are the inputs without the condition, for those images that drop it."""
        question = self.ask(x0, generator)
        told = dict(inputs or {})
        if self.dropout:
            if null is None:
                raise PellucidError("null must be given with dropout; got None.", "objective")
            told = dropped(told, null, torch.rand(len(x0), generator=generator) < self.dropout)
        return self.grade(question, network(question.x, question.time, **told))


def dropped(inputs: Mapping[str, Any], null: Mapping[str, Any], without: Tensor) -> dict[str, Any]:
    """The inputs, with those of some images (`without`, (B,) bool) replaced by the null ones."""

    def choose(_: str, own: Tensor, empty: Tensor) -> Tensor:
        mask = without.to(own.device).reshape(-1, *([1] * (own.ndim - 1)))
        return torch.where(mask, empty.to(own), own)

    return trees.over(choose, "inputs", inputs, null)


class ByLevel:
    """The mean and the spread of the error in bins of log-SNR: where a schedule makes training easy or noisy."""

    def __init__(self, low: float = -8.0, high: float = 8.0, bins: int = 16) -> None:
        if not (low < high and bins >= 1):
            raise PellucidError(rule("low, high, bins", "low < high and at least one bin", (low, high, bins)), "bins")
        self.edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
        self.count, self.total, self.square = (torch.zeros(bins, dtype=torch.float64) for _ in range(3))

    def add(self, graded: Graded) -> None:
        which = torch.bucketize(graded.lam.double(), self.edges[1:-1])
        errors = graded.errors.double().cpu()
        for sums, values in ((self.count, torch.ones_like(errors)), (self.total, errors), (self.square, errors**2)):
            sums.index_add_(0, which, values)

    def rows(self) -> list[dict[str, float]]:
        """Bins that saw something: their middle, count, mean error and its standard deviation."""
        found = []
        for i in (int(i) for i in self.count.nonzero().flatten()):
            count, mean = float(self.count[i]), float(self.total[i] / self.count[i])
            spread = math.sqrt(max(float(self.square[i]) / count - mean**2, 0.0))
            middle = float((self.edges[i] + self.edges[i + 1]) / 2)
            found.append({"lam": middle, "count": count, "mean": mean, "std": spread})
        return found
