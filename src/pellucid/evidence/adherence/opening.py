"""Which network of a bundle makes the images: its UNet, or the transformer that lies beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pellucid.core.errors import PellucidError, rule
from pellucid.interop import source
from pellucid.pipeline.load import load
from pellucid.pipeline.pipeline import Pipeline

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
