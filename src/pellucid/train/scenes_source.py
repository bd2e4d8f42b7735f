"""Scenes as training data: made on the device that trains, never twice the same, and no file is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pellucid import scenes as world
from pellucid.core.errors import PellucidError, rule
from pellucid.interop.tokenizer import Tokenizer
from pellucid.scenes.render import SIZES
from pellucid.scenes.sampling import OBJECTS
from pellucid.scenes.scene import RADII, Scenes
from pellucid.train.draws import Draws
from pellucid.train.source import Batch
from pellucid.train.tokenizer_training import train_tokenizer

COUNT = 2**40  # more than any run sees


@dataclass(frozen=True)
class ScenesConfig:
    """Names in `styles` and numbers in `objects` weigh by repetition. Hints: `edges`, the outlines of all things;
    `reference`, the backmost thing alone and large on a plain white ground. Without `name_style` captions are silent
    about the style, as a LoRA wants them."""

    size: int = 128
    seed: int = 0
    split: Literal["train", "held_out", "any"] = "train"
    styles: tuple[str, ...] = world.TRAIN_STYLES
    objects: tuple[int, ...] = OBJECTS
    hints: tuple[Literal["edges", "reference"], ...] = ()
    name_style: bool = True

    def __post_init__(self) -> None:
        if not SIZES[0] <= self.size <= SIZES[1]:
            raise PellucidError(rule("size", f"from {SIZES[0]} to {SIZES[1]} pixels", self.size), "scenes-size")
        self.sample(torch.zeros(0, dtype=torch.int64))  # refuses what it does not know

    def open(self) -> ScenesSource:
        return ScenesSource(self)

    def sample(self, indices: Tensor) -> Scenes:
        return world.sample(indices, self.seed, self.split, self.styles, self.objects)


class ScenesSource:
    """Scene number n is the same on every device and in every batch."""

    endless = True

    def __init__(self, config: ScenesConfig) -> None:
        self.config = config

    def __len__(self) -> int:
        return COUNT

    def batch(self, indices: Tensor, draws: Draws, device: torch.device | str = "cpu") -> Batch:
        """Pictures (B, 3, size, size) of scenes (B,), with their captions and hints."""
        c = self.config
        scenes = c.sample(indices.to(device))
        hints = {name: self.hint(name, scenes) for name in c.hints}
        told = world.captions(scenes.to("cpu"), c.seed, style=c.name_style)
        return Batch(world.render(scenes, c.size), captions=tuple(told), hints=hints)

    def hint(self, name: str, scenes: Scenes) -> Tensor:
        size = self.config.size
        return world.edges(scenes, size) if name == "edges" else world.render(alone(scenes), size)


def alone(scenes: Scenes) -> Scenes:
    """The first thing of each scene by itself: large, in the middle, flat, on plain white."""
    zero, middle = torch.zeros_like(scenes.count), torch.full_like(scenes.x, 0.5)
    return replace(
        scenes,
        count=torch.ones_like(scenes.count),
        x=middle,
        y=middle,
        radius=torch.full_like(scenes.radius, sum(RADII["large"]) / 2),
        background=zero,
        kind=zero,
        style=zero,
    )


def scenes_tokenizer(length: int = 64) -> Tokenizer:
    """The tokenizer of scenes-128: every word of the world is one entry, however often captions say it."""
    return train_tokenizer([" ".join(world.vocabulary())] * 2, length=length)
