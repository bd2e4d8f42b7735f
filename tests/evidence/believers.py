"""Networks that truly believe in a target and a schedule: the exact posterior of a mixture, told only a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pellucid.core import schedule as schedules
from pellucid.core.denoiser import input_scale, sigma_data_of
from pellucid.core.oracle import Mixture
from pellucid.core.schedule import Schedule, Target
from pellucid.core.target import from_x0
from pellucid.evidence.doctor.probe import Probe

SHAPE = (3, 16, 16)


def images_of(count: int = 4, spread: float = 0.3, seed: int = 3) -> Mixture:
    """Blobs of colour with much variation about them, so that the level matters to whoever denoises."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 2, 2, generator=generator, dtype=torch.float64) * 0.8
    means = torch.nn.functional.interpolate(coarse, SHAPE[1:], mode="bilinear").flatten(1)
    return Mixture(means, torch.full((count,), spread).double(), torch.full((count,), 1 / count).double())


@dataclass(frozen=True)
class Believer:
    """The best denoiser of a mixture, seen from outside as a network: x as trained, a told time, a target."""

    mixture: Mixture
    schedule: Schedule
    target: Target

    def __call__(self, x: Tensor, time: Tensor, **told: Any) -> Tensor:
        low, high = self.schedule.span
        level = self.schedule.level(min(max(float(time[0]), low), high))  # a real network has no other times either
        own = x.double() / input_scale(self.schedule, level)  # x of the level that it believes in
        x0 = self.mixture(own, level)
        c_x, c_0 = from_x0(self.target, level, sigma_data_of(self.schedule))
        return (own * c_x + x0 * c_0).to(x.dtype)


def probe(
    believes: tuple[str | Schedule, Target],
    says: tuple[str | Schedule, Target] | None = None,
    count: int = 32,
    scale: float = 1.0,
) -> Probe:
    """A probe of a believer whose config says something, by default the truth; its data are `scale` times too large."""
    data = images_of()
    truth, declared = (schedules.make(pair[0]) for pair in (believes, says or believes))
    clean = data.sample(count, torch.Generator().manual_seed(11)).reshape(count, *SHAPE).float()
    target = (says or believes)[1]
    return Probe(Believer(data, truth, believes[1]), declared, target, clean * scale)
