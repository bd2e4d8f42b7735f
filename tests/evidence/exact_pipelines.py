"""Pipelines whose network is exact: the best denoiser of a mixture, in pixels or in the latents of an exact VAE.

Its data are draws of the mixture, so that the truth about target, schedule and scale is known without training.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from believers import Believer
from torch import Tensor, nn

from pellucid.core import schedule as schedules
from pellucid.core.oracle import Mixture
from pellucid.core.schedule import Target
from pellucid.evidence.doctor.subject import KnownImages, Subject, of_pipeline
from pellucid.interop.components import Components
from pellucid.models.vae import Posterior
from pellucid.pipeline.pipeline import Pipeline

SIDE, SPREAD, FACTOR = 16, 0.15, 0.27  # of images in [−1, 1]; FACTOR is the VAE's scale of training
MUCH = 8.0  # sigma / alpha


class Exact(nn.Module):
    """The believer as a network of ours; `gain` multiplies what it says of much noise, `deaf` makes it say noise."""

    def __init__(self, believer: Believer, channels: int, side: int, gain: float = 1.0, deaf: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))  # it has a dtype and a device, as all networks
        self.believer, self.gain, self.deaf = believer, gain, deaf
        self.config = SimpleNamespace(in_channels=channels, out_channels=channels, sample_size=side)

    def forward(self, x: Tensor, time: Tensor, **told: Any) -> Tensor:
        if self.deaf:
            return torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
        much = self.believer.schedule.level(float(time[0])).ratio > MUCH
        return self.believer(x, time) * (self.gain if much else 1.0)


class Shuffle(nn.Module):
    """A VAE that loses nothing: every 2 × 2 pixels are 12 channels, FACTOR⁻¹ times as large."""

    def __init__(self, scaling_factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        names = {"scaling_factor": scaling_factor, "shift_factor": None, "latents_mean": None, "latents_std": None}
        self.config = SimpleNamespace(**names, factor=2, latent_channels=12, in_channels=3, sample_size=SIDE)

    def encode(self, x: Tensor) -> Posterior:
        return Posterior(F.pixel_unshuffle(x, 2) / FACTOR, None)

    def decode(self, latents: Tensor) -> Tensor:
        return F.pixel_shuffle(latents * FACTOR, 2)


def world(seed: int = 3, count: int = 4) -> Mixture:
    """Smooth images, and grain about them."""
    generator = torch.Generator().manual_seed(seed)
    coarse = 0.3 * torch.randn(count, 3, 2, 2, generator=generator, dtype=torch.float64)
    means = F.interpolate(coarse, (SIDE, SIDE), mode="bilinear").flatten(1).clamp(-0.7, 0.7)
    return Mixture(means, torch.full((count,), SPREAD).double(), torch.full((count,), 1 / count).double())


def sized(mixture: Mixture, size: float) -> Mixture:
    """The same mixture, `size` times as large."""
    return Mixture(mixture.means * size, mixture.spreads * size, mixture.weights)


def as_latents(mixture: Mixture, size: float) -> Mixture:
    """The mixture as the VAE sees it, `size` times as large."""
    means = F.pixel_unshuffle(mixture.means.reshape(-1, 3, SIDE, SIDE), 2).flatten(1)
    return sized(Mixture(means, mixture.spreads, mixture.weights), size)


def subject(
    schedule: str = "scaled_linear",
    target: Target = "eps",
    *,
    said_schedule: str | None = None,
    said_target: Target | None = None,
    latent: bool = False,
    said_factor: float = 1.0,
    trained_on: float = 1.0,
    gain: float = 1.0,
    deaf: bool = False,
) -> Subject:
    """A model that was trained on a schedule for a target, and whose files may say something else.

    `said_factor` is the VAE's scaling factor in its config, where 1 is that of training; `trained_on` is how large
    the pixels of training were, where 1 is [−1, 1]."""
    mixture = world()
    pixels = mixture.sample(64, torch.Generator().manual_seed(7)).reshape(-1, 3, SIDE, SIDE).float()
    known = as_latents(mixture, 1 / FACTOR) if latent else sized(mixture, trained_on)
    believer = Believer(known, schedules.make(schedule), target)
    channels, side = (12, SIDE // 2) if latent else (3, SIDE)
    parts = Components(
        name="exact",
        pipeline_class="DDPMPipeline",
        network=Exact(believer, channels, side, gain, deaf),
        vae=Shuffle(said_factor) if latent else None,  # type: ignore[arg-type]
        text_encoders=(),
        tokenizers=(),
        image_encoder=None,
        controlnets=(),
        scheduler={},
        schedule=schedules.make(said_schedule or schedule),
        target=said_target or target,
    )
    return of_pipeline(Pipeline(parts), data=KnownImages((pixels / 2 + 0.5).clamp(0, 1)))
