"""What samplers are compared with on a mixture: the exact flow of the same noise, and the exact law of the data.

The flow is that of dx/dλ = alpha·x0(x, λ) − alpha²·x in the variance-preserving frame, where the slope vanishes at both
ends, by the classical rule of Runge and Kutta. It shares no code with the samplers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.core.oracle import Mixture
from pellucid.core.plan import Draw
from pellucid.core.schedule import Level, Schedule, in_frame

FLOW_PACE = 0.03  # the longest step of the exact flow in λ
FLOW_TOP = 1e5  # sigma / alpha where the flow of pure noise is begun
FLOW_BOTTOM = 1e-5  # and where it ends: what is left is x0 to 1e-9
DIRECTIONS = 16  # of sliced distances


def exact_flow(mixture: Mixture, noise: Tensor, top: float, pace: float = FLOW_PACE) -> Tensor:
    """Where the exact flow takes x = sigma·noise [N, D] from sigma / alpha = top; infinite: pure noise.

    From pure noise, x at a large ratio r is alpha·(mean of the data) + sigma·noise up to 1/r, of which the flow keeps
    1/r.
    """
    begin = in_frame(min(top, FLOW_TOP), "vp")
    x = begin.sigma * noise
    if top > FLOW_TOP:
        x = x + begin.alpha * (mixture.weights @ mixture.means)
    length = -math.log(FLOW_BOTTOM) - begin.lam
    steps = math.ceil(length / pace)
    h = length / steps

    def slope(x: Tensor, lam: float) -> Tensor:
        level = in_frame(math.exp(-lam), "vp")
        return level.alpha * mixture(x, level) - level.alpha**2 * x

    for i in range(steps):
        lam = begin.lam + i * h
        k1 = slope(x, lam)
        k2 = slope(x + h / 2 * k1, lam + h / 2)
        k3 = slope(x + h / 2 * k2, lam + h / 2)
        k4 = slope(x + h * k3, lam + h)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    end = in_frame(FLOW_BOTTOM, "vp")
    return mixture(x, end)


def top_of(schedule: Schedule) -> float:
    """sigma / alpha at the noisiest time."""
    return float(schedule.ratio_at(schedule.span[1]))


def starting_noise(mixture: Mixture, count: int, seed: int) -> Tensor:
    """[count, D], the same for all samplers, grids and schedules: normal, and whitened, so that the chance of the draw
    is not in its mean and covariance."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, mixture.means.shape[1], generator=generator, dtype=torch.float64)
    drawn = drawn - drawn.mean(0)
    root = torch.linalg.cholesky(drawn.T @ drawn / count)
    return torch.linalg.solve_triangular(root, drawn.T, upper=False).T.contiguous()


@dataclass(frozen=True)
class Cloud:
    """A mixture as the denoiser of one image that holds all points, [1, N, D]: the loop minds one image."""

    mixture: Mixture

    def __call__(self, x: Tensor, level: Level, time: Any) -> Tensor:
        return self.mixture(x[0], level)[None]


@dataclass(frozen=True)
class CloudNoise:
    """Noise by address for a cloud: torch's generator, seeded by (seed, interval, visit)."""

    seed: int

    def step(self, draws: Sequence[Draw], span: Any, like: Tensor, images: Any) -> Tensor:
        out = torch.zeros_like(like)
        for draw in draws:
            key = (self.seed * 1_000_003 + draw.interval) * 10_007 + draw.visit
            generator = torch.Generator().manual_seed(key)
            out.add_(torch.randn(like.shape, generator=generator, dtype=like.dtype), alpha=draw.weight)
        return out

    first = beside = None


@dataclass(frozen=True)
class LawSlices:
    """The law of a mixture along a few directions: its exact quantiles there, [R, N]."""

    directions: Tensor
    quantiles: Tensor

    @staticmethod
    def of(mixture: Mixture, count: int, directions: int = DIRECTIONS, seed: int = 5) -> LawSlices:
        """The quantiles of `count` points, at the middles of as many equal parts."""
        generator = torch.Generator().manual_seed(seed)
        found = torch.randn(directions, mixture.means.shape[1], generator=generator, dtype=torch.float64)
        found = found / found.norm(dim=1, keepdim=True)
        return LawSlices(found, torch.stack([quantiles(mixture, one, count) for one in found]))

    def distance(self, x: Tensor) -> float:
        """The sliced Wasserstein distance (the first) of points [N, D] from the law, in its standard deviations."""
        along = torch.from_numpy(np.sort((self.directions @ x.T).numpy(), axis=1))
        return float((along - self.quantiles).abs().mean() / self.quantiles.std(dim=1).mean())

    def floor(self, mixture: Mixture, repeats: int = 20, seed: int = 1) -> float:
        """What true draws, as many, measure on average: what no sampler can be told from being perfect below."""
        generator = torch.Generator().manual_seed(seed)
        count = self.quantiles.shape[1]
        return float(np.mean([self.distance(mixture.sample(count, generator)) for _ in range(repeats)]))


def quantiles(mixture: Mixture, direction: Tensor, count: int, cells: int = 20_000) -> Tensor:
    """Of the mixture along a direction, where it is a mixture in one dimension with a distribution in closed form."""
    means, spreads = mixture.means @ direction, mixture.spreads
    low, high = float((means - 9 * spreads).min()), float((means + 9 * spreads).max())
    at = torch.linspace(low, high, cells, dtype=torch.float64)
    below = torch.special.ndtr((at[:, None] - means) / spreads) @ mixture.weights
    middles = (np.arange(count) + 0.5) / count
    return torch.from_numpy(np.interp(middles, below.numpy(), at.numpy()))
