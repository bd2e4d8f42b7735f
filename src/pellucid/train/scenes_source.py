"""Scenes as training data: made on the device that trains, never twice the same, and no file is read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pellucid import scenes as world
from pellucid.core.errors import PellucidError, rule
from pellucid.interop.tokenizer import Tokenizer
from pellucid.scenes import renderer
from pellucid.scenes.grammar import phrasings
from pellucid.scenes.renderer import SIZES
from pellucid.scenes.sampling import OBJECTS
from pellucid.scenes.scene import RADII, Scenes
from pellucid.train.draws import Draws
from pellucid.train.source import Batch
from pellucid.train.text import train_tokenizer

_COUNT = 2**40  # more than any run sees
_MOST_CLOSEST = 64
_PROBES = 16  # scenes that stand for all of them in a fingerprint


@dataclass(frozen=True)
class ScenesConfig:
    """Names in `styles` and numbers in `objects` weigh by repetition. Hints: `edges`, the outlines of all things;
    `reference`, the backmost thing alone and large on a plain white ground. Without `name_style` captions do not
    mention the style, which suits the training of a LoRA.

    `closest` takes one scene of that many: the one whose objects are closest, so that they overlap more often.
    `count` limits the scenes, so that they repeat in another order; 0 means endless. `compile_render` renders with
    compiled kernels, which give the same images within rounding: for a GPU."""

    size: int = 128
    seed: int = 0
    split: Literal["train", "held_out", "any"] = "train"
    styles: tuple[str, ...] = world.TRAIN_STYLES
    objects: tuple[int, ...] = OBJECTS
    hints: tuple[Literal["edges", "reference"], ...] = ()
    name_style: bool = True
    closest: int = 1
    count: int = 0
    compile_render: bool = False

    def __post_init__(self) -> None:
        if not SIZES[0] <= self.size <= SIZES[1]:
            raise PellucidError(rule("size", f"from {SIZES[0]} to {SIZES[1]} pixels", self.size), "scenes-size")
        if not 0 <= self.count <= _COUNT:
            raise PellucidError(rule("count", f"from 0 to {_COUNT}", self.count), "scenes-count")
        if not 1 <= self.closest <= _MOST_CLOSEST:
            raise PellucidError(rule("closest", f"from 1 to {_MOST_CLOSEST}", self.closest), "scenes-closest")
        self.sample(torch.zeros(0, dtype=torch.int64))  # refuses what it does not know

    def open(self) -> ScenesSource:
        return ScenesSource(self)

    def sample(self, indices: Tensor) -> Scenes:
        if self.closest == 1:
            return world.sample(indices, self.seed, self.split, self.styles, self.objects)
        of = torch.arange(self.closest, device=indices.device)
        every = (indices[:, None] * self.closest + of).flatten()
        spread = spread_of(world.sample(every, self.seed, self.split, self.styles, self.objects))
        taken = every.view(-1, self.closest).gather(1, spread.view(-1, self.closest).argmin(1, keepdim=True))
        return world.sample(taken.flatten(), self.seed, self.split, self.styles, self.objects)


class ScenesSource:
    """Scene number n is the same on every device and in every batch."""

    def __init__(self, config: ScenesConfig) -> None:
        self.config, self.endless = config, config.count == 0

    def __len__(self) -> int:
        return self.config.count or _COUNT

    def batch(self, indices: Tensor, draws: Draws, device: torch.device | str = "cpu") -> Batch:
        """Images (B, 3, size, size) of scenes (B,), with their captions and hints."""
        return self.phrased(indices, 1, device)[0]

    def phrased(
        self, indices: Tensor, count: int, device: torch.device | str = "cpu"
    ) -> tuple[Batch, list[tuple[str, ...]]]:
        """A batch, and `count` phrasings of each of its captions; the first is the batch's own."""
        c = self.config
        scenes = c.sample(indices.to(device))
        facts = scenes.to("cpu")  # before the images, for which nothing then waits
        images, hints = self.painted(scenes), {name: self.hint(name, scenes) for name in c.hints}
        texts = phrasings(facts, range(c.seed, c.seed + count), style=c.name_style)
        return Batch(images, captions=tuple(texts[0]), hints=hints), list(zip(*texts, strict=True))

    def painted(self, scenes: Scenes) -> Tensor:
        c = self.config
        if not c.compile_render:
            return world.render(scenes, c.size)
        return renderer.render_dense(scenes, c.size, c.styles, compile=True, most=max(c.objects))

    def hint(self, name: str, scenes: Scenes) -> Tensor:
        c = self.config
        if name == "edges":
            return (
                renderer.edges_dense(scenes, c.size, compile=True) if c.compile_render else world.edges(scenes, c.size)
            )
        if c.compile_render:
            return renderer.render_dense(alone(scenes), c.size, ("flat",), compile=True, most=1)
        return world.render(alone(scenes), c.size)

    def inventory(self) -> dict[str, Any]:
        return {"parameters": asdict(replace(self.config, compile_render=False))}

    def fingerprint(self) -> str:
        """Of the config and of what the world makes of it today: captions, and the tones of images to 1/1000, which
        all machines agree on."""
        asked = torch.linspace(0, min(len(self), 2**24) - 1, _PROBES).round().long()
        plain = replace(self.config, compile_render=False)
        seen = ScenesSource(plain).batch(asked, Draws(0, 0, _PROBES))
        tones = seen.images.double().mean((2, 3)).mul(1000).round().long().tolist()
        said = [asdict(plain), seen.captions, tones]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def spread_of(scenes: Scenes) -> Tensor:
    """(N,): how far the first two things of each scene are from each other, in their radii; a thing alone is far."""
    (x, other_x), (y, other_y), (r, other_r) = (v[:, :2].unbind(1) for v in (scenes.x, scenes.y, scenes.radius))
    spread = torch.hypot(x - other_x, y - other_y) / (r + other_r)
    return torch.where(scenes.count > 1, spread, torch.inf)


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
