"""The images that a study judges: which network of a bundle makes them, with which settings, and from which seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.study.kernel import check_whole
from pellucid.interop import source
from pellucid.models.guidance import Guidance
from pellucid.pipeline.load import load
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.request import MAX_BATCH

# --- The network ----------------------------------------------------------------------------------------------------

Part = Literal["unet", "dit"]
PARTS: tuple[Part, ...] = ("unet", "dit")
DTYPE = "float32"  # what figures are measured in: half precision is a choice


def open_pipe(model: str | Path, part: Part = "unet", *, dtype: str = DTYPE, device: str | None = None) -> Pipeline:
    """A model ready to run: what `model` itself is, or for `dit` the pipeline in its folder of that name."""
    if part not in PARTS:
        raise PellucidError(rule("part", " or ".join(PARTS), part), "part")
    place = source.locate(model)
    if part == "dit":
        if not (place / part).is_dir():
            raise PellucidError(rule("part", f"unet for {place.name}, which has no folder {part}", part), "part")
        place = place / part
    return load(place, dtype=dtype, device=device)


# --- The images -----------------------------------------------------------------------------------------------------

_MOST_STEPS = 1000


Maker = Callable[..., Any]  # a pipeline, or what stands in for one: a call gives something with `images`


@dataclass(frozen=True)
class ImageSettings:
    """How images are made. Image n has the seed `seed` + n; `guidance` is a scale, or a text with rules."""

    sampler: str = "dpmpp_2m"
    steps: int = 20
    guidance: float | str = 4.0
    batch: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("steps", 1, _MOST_STEPS), ("batch", 1, MAX_BATCH), ("seed", 0, 2**53)):
            check_whole(name, getattr(self, name), low, high, "making")
        Guidance.parse(self.guidance)

    def firsts(self, count: int) -> range:
        """The number of the first image of every batch."""
        return range(0, count, self.batch)

    def images(self, pipe: Maker, prompts: Sequence[str], first: int, **extra: Any) -> list[Image.Image]:
        """One image a prompt; the first of them is image number `first`."""
        images: list[Image.Image] = pipe(
            list(prompts),
            seed=[self.seed + first + i for i in range(len(prompts))],
            sampler=self.sampler,
            steps=self.steps,
            guidance=self.guidance,
            **extra,
        ).images
        if len(images) != len(prompts):
            raise PellucidError(rule("images", f"{len(prompts)}, one per prompt", len(images)), "making")
        return images


@torch.no_grad()
def through(vae: Any, images: Tensor) -> Tensor:
    """(B, 3, H, W) in [−1, 1], encoded and decoded again, in steps of 8 bits."""
    weight = next(vae.parameters())
    decoded = vae.decode(vae.encode(images.to(weight)).mean).float().clamp(-1, 1)
    return (decoded.add(1).mul(127.5).round() / 127.5 - 1).to(images.device)
