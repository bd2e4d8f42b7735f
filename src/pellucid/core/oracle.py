"""Exact denoisers: mixtures of Gaussians, in any dimension, under any schedule. Laws and studies rest on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.core.plan import Plan


@dataclass(frozen=True)
class Mixture:
    """Σ_k weight_k · N(mean_k, spread_k²·I). The posterior mean of x0 given x at any level is in closed form."""

    means: Tensor  # [K, D]
    spreads: Tensor  # [K]
    weights: Tensor  # [K]

    def __post_init__(self) -> None:
        if self.means.ndim != 2 or len(self.means) != len(self.spreads) or len(self.means) != len(self.weights):
            raise PellucidError(rule("means, spreads, weights", "[K, D], [K], [K]", tuple(self.means.shape)), "oracle")

    def __call__(self, x: Tensor, level: Any, time: Any = None) -> Tensor:
        """E[x0 | x] for x of shape [B, D] (or any shape of D numbers per image)."""
        flat = x.reshape(len(x), -1).to(torch.float64)  # [B, D]
        alpha, sigma = (_per_image(v, flat) for v in (level.alpha, level.sigma))  # [1, B], or [1, 1] for all
        means, spreads, weights = (v.to(flat) for v in (self.means, self.spreads[:, None], self.weights[:, None]))
        variance = alpha**2 * spreads**2 + sigma**2  # [K, B] of x under each component: the images last, for speed
        own = alpha**2 * (means**2).sum(1, keepdim=True) / variance + flat.shape[1] * torch.log(variance)
        near = alpha / variance * (means @ flat.T) - 0.5 / variance * (flat**2).sum(1)
        share = torch.softmax(torch.log(weights) - 0.5 * own + near, dim=0)
        from_means, from_x = share * (sigma**2 / variance), share * (alpha * spreads**2 / variance)
        x0 = from_means.T @ means + from_x.sum(0)[:, None] * flat  # a Wiener filter of each component, weighed
        return x0.reshape(x.shape).to(x.dtype)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """True draws, [count, D]."""
        which = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        noise = torch.randn(count, self.means.shape[1], generator=generator, dtype=self.means.dtype)
        return self.means[which] + self.spreads[which, None] * noise


def _per_image(value: Any, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(like).reshape(1, -1)
    return like.new_full((1, 1), float(value))


def ring(count: int = 8, radius: float = 1.5, spread: float = 0.12) -> Mixture:
    """Points on a circle: the two-dimensional density of the demonstration."""
    angle = torch.arange(count, dtype=torch.float64) * (2 * math.pi / count)
    means = radius * torch.stack([angle.cos(), angle.sin()], dim=1)
    return Mixture(
        means,
        torch.full((count,), spread, dtype=torch.float64),
        torch.full((count,), 1.0 / count, dtype=torch.float64),
    )


def smooth(dim: int = 4, count: int = 3, seed: int = 7) -> Mixture:
    """A mild mixture whose trajectories are smooth: the oracle on which orders are measured."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(count, dim, generator=generator, dtype=torch.float64) * 0.7
    spreads = torch.linspace(0.5, 0.9, count, dtype=torch.float64)
    weights = torch.linspace(1.0, 2.0, count, dtype=torch.float64)
    return Mixture(means, spreads, weights / weights.sum())


def sharp(dim: int = 8, count: int = 12, seed: int = 11) -> Mixture:
    """Narrow modes of unlike widths (0.05 to 0.25) and weights: a path must choose one, and a coarse step may choose
    another than the exact flow does."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(count, dim, generator=generator, dtype=torch.float64) * 0.7
    spreads = torch.logspace(math.log10(0.05), math.log10(0.25), count, dtype=torch.float64)
    weights = torch.rand(count, generator=generator, dtype=torch.float64) + 0.5
    return Mixture(means, spreads, weights / weights.sum())


def distance(a: Tensor, b: Tensor) -> float:
    """Root mean square difference, relative to b's root mean square."""
    return float((a - b).norm() / b.norm())


def start_of(plan: Plan, like: Mixture, count: int, seed: int = 0) -> Tensor:
    """The same starting points for any plan: alpha·(data) + sigma·noise at the plan's first level, float64."""
    generator = torch.Generator().manual_seed(seed)
    data = like.sample(count, generator)
    noise = torch.randn(data.shape, generator=generator, dtype=torch.float64)
    return plan.start.alpha * data + plan.start.sigma * noise
