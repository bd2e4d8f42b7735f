"""A maker of scenes that answers to guidance as models do, by a law that tests know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid import scenes
from pellucid.models.guidance import Guidance
from pellucid.models.rules import Rescale, Threshold
from pellucid.pipeline.images import to_images
from pellucid.scenes.scene import Scenes


class Killed(Exception):  # noqa: N818
    """What stands for the end of a process."""


@dataclass
class GuidedTruth:
    """Draws prompt n of a study of scenes. Below scale 2 it draws another prompt's scene in one of two images; above
    scale 5 contrast grows by a tenth a unit, half of it under rescale, none under a threshold, and clips; above 12
    colours go from one object to the next, and images blur."""

    drawn: Scenes
    seeds: int
    dies_after: int | None = None
    calls: int = 0

    def __call__(self, prompt: Sequence[str], /, *, seed: Sequence[int], guidance: Any, **_: Any) -> SimpleNamespace:
        self.calls += 1
        if self.dies_after is not None and self.calls > self.dies_after:
            raise Killed
        wish = Guidance.parse(guidance)
        scale = float(wish.scale)  # type: ignore[arg-type]
        which = [n // self.seeds for n in seed]
        if scale < 2:
            which = [i + (n % 2) for i, n in zip(which, seed, strict=True)]
        chosen = self.drawn[[i % len(self.drawn) for i in which]]
        if scale > 12:
            chosen = swapped(chosen)
        images = moved((scenes.render(chosen) + 1) / 2, seed)
        images = pushed(images, scale, wish)
        return SimpleNamespace(images=to_images((softened(images) if scale > 12 else images) * 2 - 1))


def swapped(drawn: Scenes) -> Scenes:
    """Colours of the first two objects change places, where there are two."""
    order = torch.tensor([[1, 0, 2], [0, 1, 2]])[(drawn.count == 1).long()]
    return Scenes(**{**vars(drawn), "colour": drawn.colour.gather(1, order)})


def moved(images: Tensor, seed: Sequence[int]) -> Tensor:
    """By a pixel or none, so that images of one prompt differ."""
    return torch.stack([one.roll(n % 2, 2) for one, n in zip(images, seed, strict=True)])


def pushed(images: Tensor, scale: float, wish: Guidance) -> Tensor:
    rate = 0.1
    if any(isinstance(one, Rescale) for one in wish.rules):
        rate = 0.05
    if any(isinstance(one, Threshold) for one in wish.rules):
        rate = 0.0
    return ((images - 0.5) * (1 + rate * max(0.0, scale - 5)) + 0.5).clamp(0, 1)


def softened(images: Tensor) -> Tensor:
    return F.avg_pool2d(images, 3, 1, 1, count_include_pad=False)
