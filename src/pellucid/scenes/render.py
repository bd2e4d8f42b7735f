"""Scenes to images: signed distances, antialiased over a pixel, all objects of a batch at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.scenes import palette, shapes, styles, textures
from pellucid.scenes.scene import MOST, Scenes

SIZES = (16, 2048)
CELLS = 8  # squares along the side of a checkered background
FADE = 0.13  # how much darker a gradient background is at its foot
LIFT = 0.03  # and how much lighter at its top
CHECK = 0.055  # how much darker every second square is


@dataclass(frozen=True)
class Field:
    """The M things of a batch on the pixels: where each stands, and how far each pixel is from its outline."""

    row: Tensor  # (M,) int64: its scene
    slot: Tensor  # (M,) int64: 0 is the backmost
    distance: Tensor  # (M, H, W): signed, shares of the side; negative inside
    x: Tensor  # (M, H, W): from the thing's middle
    y: Tensor  # (M, H, W)
    pixel: float

    @property
    def cover(self) -> Tensor:
        """(M, H, W): the share of each pixel that a thing covers."""
        return (0.5 - self.distance / self.pixel).clamp(0, 1)


def axis(size: int, device: torch.device) -> Tensor:
    """(size,): the middles of pixels, from 0 to 1."""
    if not SIZES[0] <= size <= SIZES[1]:
        raise PellucidError(rule("size", f"from {SIZES[0]} to {SIZES[1]} pixels", size), "scenes-size")
    return (torch.arange(size, device=device, dtype=torch.float32) + 0.5) / size


def field(scenes: Scenes, size: int) -> Field:
    """Distances of all things of a batch, grouped by shape."""
    middle = axis(size, scenes.x.device)
    row, slot = scenes.present.nonzero(as_tuple=True)
    wide = (len(row), size, size)
    x = (middle[None, None, :] - scenes.x[row, slot][:, None, None]).expand(wide)
    y = (middle[None, :, None] - scenes.y[row, slot][:, None, None]).expand(wide)
    radius = scenes.radius[row, slot][:, None, None]
    return Field(row, slot, shapes.distance(scenes.shape[row, slot], x / radius, y / radius) * radius, x, y, 1 / size)


def backdrop(scenes: Scenes, size: int) -> Tensor:
    """(N, 3, H, W): the background in its colour and kind."""
    middle = axis(size, scenes.x.device)
    tone = torch.ones(3, size, size, device=middle.device)
    tone[1] += LIFT - FADE * middle[:, None]
    cell = (middle * CELLS).floor()
    tone[2] -= CHECK * ((cell[:, None] + cell) % 2)
    colour = palette.backgrounds(middle.device)[scenes.background]
    return colour[:, :, None, None] * tone[scenes.kind][:, None]


def render(scenes: Scenes, size: int = 128) -> Tensor:
    """(N, 3, H, W) in [−1, 1]."""
    found = field(scenes, size)
    light = textures.lightness(
        scenes.texture[found.row, found.slot], found.x, found.y, scenes.radius[found.row, found.slot], found.pixel
    )
    rim = (0.5 + (-found.distance - textures.RIM) / found.pixel).clamp(0, 1)
    light = light * rim
    image = styles.canvas(backdrop(scenes, size), scenes.style)
    named = scenes.colour[found.row, found.slot]
    colour, tint = palette.objects(image.device)[named], palette.tints(image.device)[named]
    for slot in range(MOST):  # back to front
        mine = (found.slot == slot).nonzero()[:, 0]
        if len(mine):
            row = found.row[mine]
            layer = styles.Layer(image[row], colour[mine], tint[mine], found.distance[mine], light[mine], found.pixel)
            image[row] = styles.paint(layer, scenes, row, slot)
    return (image * 2 - 1).clamp(-1, 1)


def segmentation(scenes: Scenes, size: int = 128) -> Tensor:
    """(N, H, W) int64: 0 is background, i the i-th thing from the back; the frontmost that covers half a pixel."""
    found = field(scenes, size)
    out = torch.zeros(len(scenes), size, size, dtype=torch.int64, device=scenes.x.device)
    for slot in range(MOST):
        mine = (found.slot == slot).nonzero()[:, 0]
        row = found.row[mine]
        out[row] = torch.where(found.distance[mine] < 0, slot + 1, out[row])
    return out


def edges(scenes: Scenes, size: int = 128) -> Tensor:
    """(N, 1, H, W) in [0, 1]: outlines, one pixel wide and antialiased, where nothing stands before them."""
    found = field(scenes, size)
    out = torch.zeros(len(scenes), size, size, device=scenes.x.device)
    for slot in range(MOST):
        mine = (found.slot == slot).nonzero()[:, 0]
        row, distance = found.row[mine], found.distance[mine]
        line = (1 - distance.abs() / found.pixel).clamp(0, 1)
        hidden = (0.5 - distance / found.pixel).clamp(0, 1)
        out[row] = torch.maximum(out[row] * (1 - hidden), line)
    return out[:, None]
