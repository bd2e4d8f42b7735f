"""Whether an image-text encoder tells right captions from others: cosines, and finding one caption among 32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pellucid import scenes
from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.adherence.shares import Share
from pellucid.evidence.metrics.image_text import Judge
from pellucid.evidence.metrics.inception import to_bytes
from pellucid.scenes.sampling import OBJECTS

AMONG = 32
MOST = 1_000_000


@dataclass(frozen=True)
class Matching:
    """Mean cosines of true images with their own caption and with another image's; `told`: how often the own one is
    the nearer of the two; `by_picture`: how often an image's own caption is the nearest of 32, `by_text`: how often a
    caption's own image is."""

    count: int
    right: float
    shuffled: float
    told: Share
    by_image: Share
    by_text: Share

    def plain(self) -> dict[str, Any]:
        shares = {name: getattr(self, name).plain() for name in ("told", "by_picture", "by_text")}
        return {"count": self.count, "right": self.right, "shuffled": self.shuffled, **shares}


def matching(judge: Judge, count: int = 1024, *, seed: int = 0, device: torch.device | str = "cpu") -> Matching:
    """Over true images of scenes that no denoiser was trained on, in groups of 32."""
    if count < AMONG or count % AMONG or count > MOST:
        raise PellucidError(rule("count", f"a multiple of {AMONG}, at most {MOST:,}", count), "matching")
    cosines = []
    for first in range(0, count, AMONG):
        drawn = scenes.sample(torch.arange(first, first + AMONG), seed, "held_out", scenes.TRAIN_STYLES, OBJECTS)
        captions = scenes.captions(drawn, seed, full=True)
        images = to_bytes((scenes.render(drawn.to(device), judge.network.config.vision.image_size) + 1) / 2)
        cosines.append((judge.image(images) @ judge.text(captions)[0].T).cpu())
    return summed(torch.stack(cosines))


def summed(cosines: Tensor) -> Matching:
    """Of cosines (groups, images, texts), the own ones on the diagonal; another's caption is the next one's."""
    right = cosines.diagonal(dim1=1, dim2=2)  # (G, 32)
    other = cosines.roll(-1, dims=2).diagonal(dim1=1, dim2=2)
    place = torch.arange(cosines.shape[1])
    return Matching(
        count=right.numel(),
        right=float(right.double().mean()),
        shuffled=float(other.double().mean()),
        told=Share.of((right > other).flatten().tolist()),
        by_image=Share.of((cosines.argmax(2) == place).flatten().tolist()),
        by_text=Share.of((cosines.argmax(1) == place).flatten().tolist()),
    )
