"""The objective: noise the data at random times, run the network, weight its error; and report it by noise level."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pellucid.core import target as targets
from pellucid.core.denoiser import input_scale, sigma_data_of
from pellucid.core.errors import PellucidError, rule
from pellucid.core.schedule import EDM, Array, DiscreteVP, Level, Schedule, Target
from pellucid.models import inputs as trees
from pellucid.train.draws import Draws

# --- Training times -------------------------------------------------------------------------------------------------

TimesKind = Literal["uniform", "logit_normal", "edm"]
_TIMES: tuple[TimesKind, ...] = ("uniform", "logit_normal", "edm")
_USUAL = {"logit_normal": (0.0, 1.0), "edm": (-1.2, 1.2)}  # mean and std in the papers


@dataclass(frozen=True)
class Times:
    """A distribution of training times.

    uniform: every time alike; whole ones where the schedule is a table, as such networks are trained. logit_normal: the
    part of the run is sigmoid(mean + std·n) (Esser et al. 2024). edm: ln(sigma / alpha) is mean + std·n (Karras et al.
    2022). `stratified` draws one time from each of as many equal parts of the distribution as there are images, which
    lowers the variance of a step's loss and leaves its mean.
    """

    kind: TimesKind = "uniform"
    mean: float | None = None  # None: the kind's own, in `_USUAL`
    std: float | None = None
    stratified: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _TIMES:
            raise PellucidError(rule("times", f"one of {', '.join(_TIMES)}", self.kind), "times")
        mean, std = self.normal
        if not math.isfinite(mean) or not (math.isfinite(std) and std > 0):
            raise PellucidError(rule("mean, std", "finite, std above 0", (mean, std)), "times")

    @property
    def normal(self) -> tuple[float, float]:
        """Mean and std: those given, else the kind's."""
        mean, std = _USUAL.get(self.kind, (0.0, 1.0))
        return mean if self.mean is None else self.mean, std if self.std is None else self.std

    def draw(self, count: int, schedule: Schedule, generator: torch.Generator | None = None) -> Array:
        """Times of `count` images, float64."""
        u = self.quantiles(count, generator)
        low, high = schedule.span
        if self.kind == "uniform":
            if isinstance(schedule, DiscreteVP):
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


# --- Weights of noise levels ----------------------------------------------------------------------------------------

WeightingKind = Literal["uniform", "snr", "min_snr", "soft_min_snr", "edm", "sigmoid"]
WEIGHTINGS: tuple[WeightingKind, ...] = ("uniform", "snr", "min_snr", "soft_min_snr", "edm", "sigmoid")


@dataclass(frozen=True)
class Weighting:
    """The weight of a level. `uniform` is the plain squared error of what the network predicts.

    On the squared error of x0, with SNR = (alpha / sigma)²: snr: SNR. min_snr: min(SNR, gamma) (Hang et al. 2023).
    soft_min_snr: their harmonic meeting, SNR·gamma / (SNR + gamma) (Crowson et al. 2024). edm: (1 + sigma_data²·SNR) /
    sigma_data² (Karras et al. 2022). sigmoid: SNR·sigmoid(bias − ln SNR) (Kingma and Gao 2023).
    """

    kind: WeightingKind = "uniform"
    gamma: float = 5.0
    bias: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in WEIGHTINGS:
            raise PellucidError(rule("weighting", f"one of {', '.join(WEIGHTINGS)}", self.kind), "weighting")
        if not (math.isfinite(self.gamma) and self.gamma > 0) or not math.isfinite(self.bias):
            raise PellucidError(rule("gamma, bias", "finite, gamma above 0", (self.gamma, self.bias)), "weighting")

    def on_x0(self, level: Level, sigma_data: float = targets.SIGMA_DATA) -> float:
        """The weight on (x0 − its prediction)²; `uniform` has none of its own."""
        snr = (level.alpha / level.sigma) ** 2
        if self.kind == "snr":
            return snr
        if self.kind == "min_snr":
            return min(snr, self.gamma)
        if self.kind == "soft_min_snr":
            return snr * self.gamma / (snr + self.gamma)
        if self.kind == "edm":
            return snr + 1.0 / sigma_data**2
        return snr / (1.0 + snr * math.exp(-self.bias))

    def on(self, target: Target, level: Level, sigma_data: float = targets.SIGMA_DATA) -> float:
        """The weight on the squared error of a target. An error of x0 is one of the target, `slope` times as large."""
        if self.kind == "uniform":
            return 1.0
        _, slope = targets.from_x0(target, level, sigma_data)
        if slope == 0.0:  # eps at pure noise says nothing about x0: whatever it is costs nothing
            return 0.0
        return self.on_x0(level, sigma_data) / slope**2


# --- Many times at once ---------------------------------------------------------------------------------------------


def _columns(schedule: Schedule, target: Target, weighting: Weighting, times: Array) -> Array:
    """(9, B) float64, in the order of `Objective.row`; not finite where a time has no signal or no noise."""
    with np.errstate(all="ignore"):
        alpha, sigma = _alphas_sigmas(schedule, schedule.ratio_at(times))
        data, weight = sigma_data_of(schedule), np.ones_like(times)
        if weighting.kind != "uniform":
            weight = _on_x0(weighting, alpha, sigma, data) * _to_x0(target, alpha, sigma, data)[1] ** 2
        asked = _answers(target, alpha, sigma, data)
        return np.stack(
            [times, alpha, sigma, _input_scales(schedule, alpha, sigma), *asked, weight, np.log(alpha / sigma)]
        )


def _answers(target: Target, alpha: Array, sigma: Array, data: float) -> tuple[Array, Array, Array]:
    """(c_x, c_noise, c_x0): from the noise where there is little of it, and from x0 where there is much."""
    none, one = np.zeros_like(alpha), np.ones_like(alpha)
    if target in ("x0", "eps"):
        return (none, one, none) if target == "eps" else (none, none, one)
    (k_x, k_out), (e_x, e_out) = _to_x0(target, alpha, sigma, data), _to_eps(target, alpha, sigma, data)
    little = alpha >= sigma
    c_x = -np.where(little, e_x / e_out, k_x / k_out)
    return c_x, np.where(little, 1.0 / e_out, 0.0), np.where(little, 0.0, 1.0 / k_out)


def _alphas_sigmas(schedule: Schedule, ratio: Array) -> tuple[Array, Array]:
    """Alpha and sigma of sigma / alpha, in the schedule's frame."""
    norm = {"vp": np.hypot(1.0, ratio), "ve": np.ones_like(ratio), "flow": 1.0 + ratio}[schedule.frame]
    return 1.0 / norm, ratio / norm


def _input_scales(schedule: Schedule, alpha: Array, sigma: Array) -> Array:
    if isinstance(schedule, EDM):
        return 1.0 / np.hypot(sigma, schedule.sigma_data * alpha)
    return 1.0 / (alpha + sigma if schedule.frame == "flow" else np.hypot(alpha, sigma))


def _to_x0(target: Target, a: Array, s: Array, data: float) -> tuple[Array, Array]:
    """(k_x, k_out) with x0 = k_x·x + k_out·out, as `core.target` has it."""
    norm, edm = np.hypot(a, s), np.hypot(s, data * a)
    return {
        "x0": (np.zeros_like(a), np.ones_like(a)),
        "eps": (1.0 / a, -s / a),
        "score": (1.0 / a, s * s / a),
        "v": (a / norm**2, -s / norm),
        "flow": (1.0 / (a + s), -s / (a + s)),
        "edm": (data**2 * a / edm**2, s * data / edm),
    }[target]


def _to_eps(target: Target, a: Array, s: Array, data: float) -> tuple[Array, Array]:
    """(k_x, k_out) with eps = k_x·x + k_out·out."""
    norm, edm = np.hypot(a, s), np.hypot(s, data * a)
    return {
        "score": (np.zeros_like(a), -s),
        "v": (s / norm**2, a / norm),
        "flow": (1.0 / (a + s), a / (a + s)),
        "edm": (s / edm**2, -a * data / edm),
    }[target]


def _on_x0(weighting: Weighting, alpha: Array, sigma: Array, data: float) -> Array:
    """The weights on the squared error of x0."""
    if weighting.kind == "min_snr":
        return np.minimum((alpha / sigma) ** 2, weighting.gamma)
    return np.asarray(weighting.on_x0(Level(alpha, sigma), data))  # type: ignore[arg-type]  # plain arithmetic


# --- Objective ------------------------------------------------------------------------------------------------------

Network = Callable[..., Tensor]
_DRAWN = ("x0", "noise", "numbers")  # what `pose` takes


@dataclass(frozen=True)
class NoisyBatch:
    """The inputs of the network for one batch, and the right answer."""

    x: Tensor  # (B, …), scaled as the network takes it
    time: Tensor  # (B,)
    answer: Tensor  # (B, …)
    weights: Tensor  # (B,)
    lam: Tensor  # (B,): ln(alpha / sigma)


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch, and each image's own squared error and log-SNR, for the log."""

    loss: Tensor
    errors: Tensor  # (B,), without the weights
    lam: Tensor  # (B,)


@dataclass(frozen=True)
class Objective:
    """Denoising at random levels. `noise_offset` adds noise that is one number per channel; `dropout` is the share of
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

    def ask(self, x0: Tensor, draws: Draws) -> NoisyBatch:
        """Noised data and the right answer, for the part of a batch that `draws` selects."""
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
        made = _columns(self.schedule, self.target, self.weighting, times).T
        for i in np.flatnonzero(~np.isfinite(made).all(1)):  # the ends of a schedule, which only limits describe
            made[i] = self.row(float(times[i]))
        return made

    @cached_property
    def table(self) -> Tensor | None:
        """The numbers of every whole time, where only whole times are drawn."""
        if self.times.kind != "uniform" or not isinstance(self.schedule, DiscreteVP):
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

    def pose(self, x0: Tensor, noise: Tensor, numbers: Tensor) -> NoisyBatch:
        """The question of given noise and numbers: tensors in, tensors out, so that it can be captured in a graph."""
        numbers = numbers.to(x0.device, x0.dtype, non_blocking=True)
        time, *columns, weight, lam = numbers
        alpha, sigma, scale, c_x, c_noise, c_x0 = (c.reshape(-1, *([1] * (x0.ndim - 1))) for c in columns)
        x = x0 * alpha + noise * sigma
        answer = x * c_x + noise * c_noise + x0 * c_x0
        return NoisyBatch(x * scale, time.float(), answer, weight.float(), lam.float())

    def grade(self, question: NoisyBatch, out: Tensor) -> BatchLoss:
        """The weighted mean of squared errors, in float32 whatever the network's precision."""
        if out.ndim > 1 and out.shape[1] == 2 * question.answer.shape[1]:
            out = out[:, : question.answer.shape[1]]  # a learned variance is not trained here
        errors = (out.float() - question.answer.float()).square().flatten(1).mean(1)  # (B,)
        return BatchLoss((errors * question.weights).mean(), errors.detach(), question.lam)

    def loss(self, network: Network, asked: Mapping[str, Tensor]) -> BatchLoss:
        """The loss of what `draw` returned; everything else in `asked` is passed to the network by name."""
        question = self.pose(*(asked[name] for name in _DRAWN))
        conditions = {name: tensor for name, tensor in asked.items() if name not in _DRAWN}
        return self.grade(question, network(question.x, question.time, **conditions))

    def __call__(
        self,
        network: Network,
        x0: Tensor,
        draws: Draws,
        inputs: Mapping[str, Any] | None = None,
        null: Mapping[str, Any] | None = None,
    ) -> BatchLoss:
        """The loss of a batch; `null` are the inputs without the condition, for those images that drop it."""
        question = self.ask(x0, draws)
        conditions = dict(inputs or {})
        if self.dropout:
            if null is None:
                raise PellucidError("null must be given with dropout; got nothing.", "objective")
            conditions = dropped(conditions, null, draws.uniform("dropout") < self.dropout)
        return self.grade(question, network(question.x, question.time, **conditions))


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

    def add(self, graded: BatchLoss) -> None:
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
