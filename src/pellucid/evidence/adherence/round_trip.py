"""What a VAE leaves of true images: their signal-to-noise ratio, and whether they can still be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from pellucid import scenes
from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.adherence.shares import Share
from pellucid.evidence.adherence.verdict import Verdict, judge
from pellucid.evidence.metrics.bootstrap import Interval, mean_interval
from pellucid.pipeline import images
from pellucid.scenes.query import Query
from pellucid.scenes.sampling import OBJECTS

WORST = 0.01  # the share of images that are called the worst
MOST = 1_000_000


@dataclass(frozen=True)
class RoundTrip:
    """Decibels over `count` images: the mean with its interval, and the mean of the worst hundredth. `before` and
    `after`: the share that is read right in all attributes, of the true images and of what the VAE made of them."""

    count: int
    psnr: float
    interval: Interval
    worst: float
    before: Share
    after: Share
    by_style: dict[str, float]

    def plain(self) -> dict[str, Any]:
        shares = {"before": self.before.plain(), "after": self.after.plain()}
        return {**asdict(self), "interval": [self.interval.low, self.interval.high], **shares}


def round_trip(
    vae: Any,
    count: int = 1000,
    *,
    size: int = 128,
    batch: int = 50,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> RoundTrip:
    """True renders of held-out scenes, through the mean of the encoder's posterior and back, in 8 bits as a person
    would see them."""
    if not 2 <= count <= MOST:
        raise PellucidError(rule("count", f"from 2 to {MOST:,}", count), "round-trip")
    psnr, manner, before, after = [], [], [], []
    for first in range(0, count, batch):
        indices = torch.arange(first, min(first + batch, count))
        drawn = scenes.sample(indices, seed, "held_out", scenes.TRAIN_STYLES, OBJECTS)
        queries = [query for _, query in scenes.described(drawn, seed, full=True, style=False)]
        true = scenes.render(drawn.to(device), size)
        made = through(vae, true)
        psnr.append(decibels(true, made).cpu())
        manner += [scene.style for scene in drawn.scenes()]
        before += judged(true, queries)
        after += judged(made, queries)
    values = torch.cat(psnr).double()
    least = values.sort().values[: max(1, round(WORST * count))]
    return RoundTrip(
        count=count,
        psnr=float(values.mean()),
        interval=mean_interval(values, seed=seed),
        worst=float(least.mean()),
        before=Share.of(verdict.right for verdict in before),
        after=Share.of(verdict.right for verdict in after),
        by_style={name: mean_of(values, manner, name) for name in dict.fromkeys(scenes.TRAIN_STYLES) if name in manner},
    )


def judged(images: Tensor, queries: Sequence[Query]) -> list[Verdict]:
    return [judge(reading, query) for reading, query in zip(scenes.read(images), queries, strict=True)]


@torch.no_grad()
def through(vae: Any, images: Tensor) -> Tensor:
    """(B, 3, H, W) in [−1, 1], encoded and decoded again, in steps of 8 bits."""
    weight = next(vae.parameters())
    made = vae.decode(vae.encode(images.to(weight)).mean).float().clamp(-1, 1)
    return (made.add(1).mul(127.5).round() / 127.5 - 1).to(images.device)


def decibels(true: Tensor, made: Tensor) -> Tensor:
    """(B,): 10·log₁₀(peak² / mean square error), the peak being the whole range of pixels."""
    error = ((true - made) / 2).square().flatten(1).mean(1).clamp(min=1e-12)
    return -10 * error.log10()


def mean_of(values: Tensor, manner: Sequence[str], name: str) -> float:
    own = torch.tensor([one == name for one in manner])
    return float(values[own].mean())


def pairs(vae: Any, count: int = 12, *, size: int = 128, device: str = "cpu") -> list[Image.Image]:
    """True images and what the VAE made of each, in turn, to look at."""
    true = scenes.render(scenes.sample(torch.arange(count), 0, "held_out").to(device), size)
    both = torch.stack([true, through(vae, true)], 1).flatten(0, 1)
    return images.to_images(both)
