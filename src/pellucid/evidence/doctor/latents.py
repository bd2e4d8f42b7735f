"""Check of a VAE's scale on known images: what the diffusion sees must have a standard deviation of about 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pellucid.evidence.doctor.checks import check
from pellucid.evidence.doctor.finding import Finding
from pellucid.evidence.doctor.subject import Subject
from pellucid.models.vae import to_diffusion

BATCH = 8
RESAMPLES = 400
TINY = 1e-12
LEVEL = 0.99
# Factors by which the spread may be off: images of one kind differ by 15 %, those of another kind by more.
OFF, SEEN, FAR = 1.25, 1.6, 2.5  # worth a note, a warning, an error
SHIFTED = 0.5  # standard deviations by which the mean may be off


@check("scale of the VAE", needs=("vae", "data"))
def scale(subject: Subject) -> Iterator[Finding]:
    """The spread of encoded images against 1."""
    vae, data = subject.vae, subject.data
    assert data is not None
    latents = encoded(vae, data.pixels)
    spread, low, high = spread_of(latents)
    factor = float(vae.config.scaling_factor)
    right = factor / max(spread, TINY)
    facts = (
        ("standard deviation of the latents", spread), ("99 % interval", f"{low:.3g} to {high:.3g}"),
        ("images", len(data.pixels)), ("scaling_factor", factor), ("that makes it 1", right),
    )  # fmt: skip
    off = max(low, 1 / max(high, TINY))  # the end of the interval that is nearer to 1
    if off > OFF:
        yield Finding(
            "vae-scale",
            "error" if off > FAR else "warning" if off > SEEN else "note",
            f"encoded images have a standard deviation of {spread:.3g}, not 1",
            facts,
            "The scaling_factor is not the one of this VAE: noise of a schedule is measured against latents of "
            f"standard deviation 1, so every level is {max(spread, 1 / max(spread, TINY)):.2g} times too "
            f"{'clean' if spread > 1 else 'noisy'}.",
            f'"scaling_factor": {right:.4g} in vae/config.json, if these images are of the kind that was trained on',
        )
    mean = float(latents.mean())
    if abs(mean) > SHIFTED * spread:
        yield Finding(
            "vae-shift",
            "note",
            "encoded images are not centred",
            (("mean of the latents", mean), ("standard deviation", spread), ("shift_factor", shift_of(vae))),
            "The latents' mean is far from 0; VAEs of that kind name a shift_factor, which is taken off first.",
            "Compare shift_factor with that of the model's source.",
        )


def shift_of(vae: Any) -> float:
    return float(vae.config.shift_factor or 0.0)


@torch.no_grad()
def encoded(vae: Any, pixels: Tensor) -> Tensor:
    """(N, C, h, w) float32 on the CPU: the means of the posteriors, scaled for diffusion."""
    first = next(vae.parameters())
    multiple = vae.config.factor
    height, width = (side - side % multiple for side in pixels.shape[-2:])
    made = []
    for part in (pixels[..., :height, :width] * 2 - 1).split(BATCH):
        mean = vae.encode(part.to(first.device, first.dtype)).mean
        made.append(to_diffusion(vae.config, mean).float().cpu())
    return torch.cat(made)


def spread_of(latents: Tensor) -> tuple[float, float, float]:
    """The standard deviation over all images, and its interval over resampled ones."""
    flat = latents.double().flatten(1)
    moments = torch.stack((flat.mean(1), flat.square().mean(1)), 1)  # (N, 2)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(moments), (RESAMPLES, len(moments)), generator=generator)
    drawn = moments[rows].mean(1)  # (RESAMPLES, 2)
    spreads = (drawn[:, 1] - drawn[:, 0].square()).clamp_min(0).sqrt()
    low, high = torch.quantile(spreads, torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=spreads.dtype)).tolist()
    return float(flat.std(correction=0)), low, high
