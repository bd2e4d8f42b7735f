"""What the tests of scenes share: an image spoiled as a VAE might, and what a reading has wrong."""

from __future__ import annotations

import io

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from pellucid.scenes import Reading, Scene, Scenes
from pellucid.scenes.relations import holding
from pellucid.scenes.words import RELATION_NAMES


def spoiled(images: Tensor, seed: int = 0) -> Tensor:
    """Blur of 0.7 pixels, noise of 0.02, JPEG of quality 60 with halved chroma: about 30 dB."""
    steps = torch.arange(-3, 4)
    kernel = torch.exp(-(steps**2) / (2 * 0.7**2))
    kernel = (kernel[:, None] * kernel) / kernel.sum() ** 2
    soft = F.conv2d(F.pad((images + 1) / 2, (3, 3, 3, 3), mode="reflect"), kernel.expand(3, 1, 7, 7), groups=3)
    soft = soft + 0.02 * torch.randn(soft.shape, generator=torch.Generator().manual_seed(seed))
    out = []
    for image in (soft.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1):
        held = io.BytesIO()
        Image.fromarray(image.numpy()).save(held, "JPEG", quality=60)
        data = bytearray(Image.open(held).convert("RGB").tobytes())
        out.append(torch.frombuffer(data, dtype=torch.uint8).reshape(image.shape))
    return torch.stack(out).permute(0, 3, 1, 2) / 127.5 - 1


def mistakes(scene: Scene, reading: Reading, holds: Tensor) -> list[tuple[object, ...]]:
    """Everything that a reading has otherwise than the scene: count, frame, each thing, and all relations that hold."""
    found: list[tuple[object, ...]] = [("trouble", reading.trouble)] if reading.trouble else []
    if len(reading.objects) != len(scene.things):
        found.append(("count", len(scene.things), len(reading.objects)))
    for what in ("background", "kind"):
        if getattr(scene, what) != getattr(reading, what):
            found.append((what, getattr(scene, what), getattr(reading, what)))
    colours = [seen.colour for seen in reading.objects]
    where = {}
    for i, thing in enumerate(scene.things):
        if thing.colour not in colours:
            found.append(("colour", thing.colour, colours))
            continue
        where[i] = colours.index(thing.colour)
        seen = reading.objects[where[i]]
        kinds = ["shape", "texture", "size"] + ["place"] * (len(scene.things) == 1)
        found += [(k, thing, getattr(seen, k)) for k in kinds if getattr(seen, k) != getattr(thing, k)]
    for i, j, k in holds.nonzero().tolist():
        if i in where and j in where and (where[i], RELATION_NAMES[k], where[j]) not in reading.relations:
            found.append(("relation", i, RELATION_NAMES[k], j))
    return found


def misread(scenes: Scenes, readings: list[Reading]) -> list[tuple[int, list[tuple[object, ...]]]]:
    """The images that were not read right in everything."""
    rows = zip(scenes.scenes(), readings, holding(scenes), strict=True)
    every = [(i, mistakes(scene, reading, holds)) for i, (scene, reading, holds) in enumerate(rows)]
    return [(i, wrong) for i, wrong in every if wrong]
