"""The objective: noise the data at drawn times, ask the network, weigh its error; and show it by noise level."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.core import target as targets
from pellucid.core.denoiser import input_scale, sigma_data_of
from pellucid.core.errors import PellucidError, rule
from pellucid.core.schedule import Array, Schedule, Tabled, Target
from pellucid.models import inputs as trees
from pellucid.train.draws import Draws
from pellucid.train.levels import columns
from pellucid.train.times import Times
from pellucid.train.weighting import Weighting

Network = Callable[..., Tensor]
DRAWN = ("x0", "noise", "numbers")  # what `pose` takes


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

    def ask(self, x0: Tensor, draws: Draws) -> Question:
        """Noised data and what is to be said of it, for the part of a batch that `draws` names."""
        return self.pose(**self.draw(x0, draws))

    def draw(self, x0: Tensor, draws: Draws) -> dict[str, Tensor]:
        """All chance of a batch, for `pose` and `loss`: its data, their noise and the numbers of their times."""
        return {"x0": x0, "noise": self.noise(x0, draws), "numbers": self.numbers(draws)}

    def noise(self, x0: Tensor, draws: Draws) -> Tensor:
        noise = draws.normal("noise", x0.shape[1:], x0.device)
        if self.noise_offset:
            flat = (x0.shape[1], *([1] * (x0.ndim - 2)))
            noise = noise + self.noise_offset * draws.normal("offset", flat, x0.device)
        return noise.to(x0.dtype)

    def numbers(self, draws: Draws) -> Tensor:
        """What `pose` needs of each image's drawn time, (9, B) float64 on the CPU, as `row` orders them."""
        times = self.times.draw(draws.batch, self.schedule, draws.generator("times"))
        if self.table is not None:
            return self.table[:, draws.mine(torch.from_numpy(times)).long()]
        return draws.mine(torch.from_numpy(self.rows(times))).T

    def rows(self, times: Array) -> Array:
        """`row` of many times, (B, 9). They are made for the whole batch, so that parts round as one."""
        made = columns(self.schedule, self.target, self.weighting, times).T
        for i in np.flatnonzero(~np.isfinite(made).all(1)):  # the ends of a schedule, which only limits describe
            made[i] = self.row(float(times[i]))
        return made

    @cached_property
    def table(self) -> Tensor | None:
        """The numbers of every whole time, where only whole times are drawn."""
        if self.times.kind != "uniform" or not isinstance(self.schedule, Tabled):
            return None
        rows = [self.row(float(time)) for time in range(self.schedule.num_train)]
        return torch.tensor(rows, dtype=torch.float64).T.contiguous()

    def row(self, time: float) -> tuple[float, ...]:
        """The numbers of one time. The answer is made from the noise where there is little of it, and from x0 where
        there is much: each is finite at its end."""
        level = self.schedule.level(time)
        data = sigma_data_of(self.schedule)
        c_x, c_noise, c_x0 = 0.0, 0.0, 0.0
        if self.target in ("x0", "eps"):
            c_noise, c_x0 = float(self.target == "eps"), float(self.target == "x0")
        elif level.alpha >= level.sigma:
            c_x, c_noise = targets.from_eps(self.target, level, data)
        else:
            c_x, c_x0 = targets.from_x0(self.target, level, data)
        scale, weight = input_scale(self.schedule, level), self.weighting.on(self.target, level, data)
        return (time, level.alpha, level.sigma, scale, c_x, c_noise, c_x0, weight, level.lam)

    def pose(self, x0: Tensor, noise: Tensor, numbers: Tensor) -> Question:
        """The question of given noise and numbers: tensors in, tensors out, so that it can be captured in a graph."""
        numbers = numbers.to(x0.device, x0.dtype, non_blocking=True)
        time, *columns, weight, lam = numbers
        alpha, sigma, scale, c_x, c_noise, c_x0 = (c.reshape(-1, *([1] * (x0.ndim - 1))) for c in columns)
        x = x0 * alpha + noise * sigma
        answer = x * c_x + noise * c_noise + x0 * c_x0
        return Question(x * scale, time.float(), answer, weight.float(), lam.float())

    def grade(self, question: Question, out: Tensor) -> Graded:
        """The weighted mean of squared errors, in float32 whatever the network's precision."""
        if out.ndim > 1 and out.shape[1] == 2 * question.answer.shape[1]:
            out = out[:, : question.answer.shape[1]]  # a learned variance is not trained here
        errors = (out.float() - question.answer.float()).square().flatten(1).mean(1)  # (B,)
        return Graded((errors * question.weights).mean(), errors.detach(), question.lam)

    def loss(self, network: Network, asked: Mapping[str, Tensor]) -> Graded:
        """Of what `draw` gave; all else in `asked` is told to the network by its name."""
        question = self.pose(*(asked[name] for name in DRAWN))
        told = {name: tensor for name, tensor in asked.items() if name not in DRAWN}
        return self.grade(question, network(question.x, question.time, **told))

    def __call__(
        self,
        network: Network,
        x0: Tensor,
        draws: Draws,
        inputs: Mapping[str, Any] | None = None,
        null: Mapping[str, Any] | None = None,
    ) -> Graded:
        """The loss of a batch; `null` are the inputs without the condition, for those images that drop it."""
        question = self.ask(x0, draws)
        told = dict(inputs or {})
        if self.dropout:
            if null is None:
                raise PellucidError("null must be given with dropout; got nothing.", "objective")
            told = dropped(told, null, draws.uniform("dropout") < self.dropout)
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
        self.inner = self.edges[1:-1]  # goes where the errors are, once: to send it at each step would wait for a GPU
        self.sums = torch.zeros(3, bins, dtype=torch.float64)  # of ones, of errors, of their squares

    def add(self, graded: Graded) -> None:
        """Takes a batch in, where it is: nothing waits for a GPU."""
        errors = graded.errors.double()
        self.sums, self.inner = self.sums.to(errors.device), self.inner.to(errors.device)
        which = torch.bucketize(graded.lam.to(errors), self.inner)
        self.sums.index_add_(1, which, torch.stack([torch.ones_like(errors), errors, errors**2]))

    def rows(self) -> list[dict[str, float]]:
        """Bins that saw something: their middle, count, mean error and its standard deviation."""
        found = []
        for i, (count, total, square) in enumerate(self.sums.T.tolist()):
            if count:
                mean = total / count
                spread = math.sqrt(max(square / count - mean**2, 0.0))
                middle = float((self.edges[i] + self.edges[i + 1]) / 2)
                found.append({"lam": middle, "count": count, "mean": mean, "std": spread})
        return found
