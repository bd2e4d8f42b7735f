"""True images of scenes, and ways to spoil them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid import scenes
from pellucid.pipeline.images import to_images
from pellucid.pipeline.recipe import Recipe, write_png
from pellucid.scenes.scene import Scenes

COUNT = 24


def drawn(count: int = COUNT, first: int = 0, objects: tuple[int, ...] = (1, 2, 3)) -> Scenes:
    return scenes.sample(torch.arange(first, first + count), 0, "any", ("flat",), objects)


def true(count: int = COUNT, first: int = 0) -> Tensor:
    """(N, 3, 128, 128) in [0, 1]."""
    return (scenes.render(drawn(count, first), 128) / 2 + 0.5).clamp(0, 1)


def as_bytes(pixels: Tensor) -> Tensor:
    return pixels.clamp(0, 1).mul(255).round().byte()


def blurred(pixels: Tensor, sigma: float) -> Tensor:
    reach = int(3 * sigma) + 1
    bell = torch.exp(-(torch.arange(-reach, reach + 1.0) ** 2) / (2 * sigma**2))
    bell = (bell / bell.sum()).reshape(1, 1, 1, -1).expand(3, 1, 1, -1)
    across = F.conv2d(F.pad(pixels, (reach, reach, 0, 0), "replicate"), bell, groups=3)
    return F.conv2d(F.pad(across, (0, 0, reach, reach), "replicate"), bell.transpose(2, 3), groups=3)


def noisy(pixels: Tensor, sigma: float) -> Tensor:
    return pixels + sigma * torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))


def clipped(pixels: Tensor) -> Tensor:
    return (pixels - 0.5) * 2.2 + 0.5


def tiled(pixels: Tensor) -> Tensor:
    made, generator = pixels.clone(), torch.Generator().manual_seed(0)
    for top in (0, 64):
        for left in (0, 64):
            made[..., top : top + 64, left : left + 64] += 0.03 * torch.randn(len(made), 3, 1, 1, generator=generator)
    return made


def write(folder: Path, shown: Scenes, told: Scenes, guidance: float) -> Path:
    """Pictures of some scenes whose files ask for others."""
    captions = [caption for caption, _ in scenes.described(told, 0, full=True, style=False)]
    for i, (image, caption) in enumerate(zip(to_images(scenes.render(shown, 128)), captions, strict=True)):
        write_png(image, folder / f"{i:03d}.png", Recipe(prompt=caption, guidance={"scale": guidance}))
    return folder


def swapped(told: Scenes) -> Scenes:
    """The same scenes with the colours of their first two objects exchanged."""
    colour = told.colour.clone()
    colour[:, 0], colour[:, 1] = told.colour[:, 1], told.colour[:, 0]
    return replace(told, colour=colour)
