"""Scenes to images by signed distances, antialiased over a pixel: for any device, and for a compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.scenes import painting, shapes
from pellucid.scenes.scene import MOST, Scenes, one_of
from pellucid.scenes.words import SHAPE_NAMES, STYLE_NAMES, TEXTURE_NAMES

# --- Any device -----------------------------------------------------------------------------------------------------

SIZES = (16, 2048)
CELLS = 8  # squares along the side of a checkered background
FADE = 0.13  # how much darker a gradient background is at its foot
_LIFT = 0.03  # and how much lighter at its top
CHECK = 0.055  # how much darker every second square is


@dataclass(frozen=True)
class _Field:
    """The M things of a batch on the pixels: where each stands, and how far each pixel is from its outline."""

    row: Tensor  # (M,) int64: its scene
    slot: Tensor  # (M,) int64: 0 is the backmost
    distance: Tensor  # (M, H, W): signed, shares of the side; negative inside
    x: Tensor  # (M, H, W): from the thing's middle
    y: Tensor  # (M, H, W)
    pixel: float


def _axis(size: int, device: torch.device) -> Tensor:
    """(size,): the middles of pixels, from 0 to 1."""
    if not SIZES[0] <= size <= SIZES[1]:
        raise PellucidError(rule("size", f"from {SIZES[0]} to {SIZES[1]} pixels", size), "scenes-size")
    return (torch.arange(size, device=device, dtype=torch.float32) + 0.5) / size


def _field(scenes: Scenes, size: int) -> _Field:
    """Distances of all things of a batch, grouped by shape."""
    middle = _axis(size, scenes.x.device)
    row, slot = scenes.present.nonzero(as_tuple=True)
    wide = (len(row), size, size)
    x = (middle[None, None, :] - scenes.x[row, slot][:, None, None]).expand(wide)
    y = (middle[None, :, None] - scenes.y[row, slot][:, None, None]).expand(wide)
    radius = scenes.radius[row, slot][:, None, None]
    return _Field(row, slot, shapes.distance(scenes.shape[row, slot], x / radius, y / radius) * radius, x, y, 1 / size)


def _backdrop(scenes: Scenes, size: int) -> Tensor:
    """(N, 3, H, W): the background in its colour and kind."""
    middle = _axis(size, scenes.x.device)
    tone = torch.ones(3, size, size, device=middle.device)
    tone[1] += _LIFT - FADE * middle[:, None]
    cell = (middle * CELLS).floor()
    tone[2] -= CHECK * ((cell[:, None] + cell) % 2)
    colour = painting.backgrounds(middle.device)[scenes.background]
    return colour[:, :, None, None] * tone[scenes.kind][:, None]


def render(scenes: Scenes, size: int = 128) -> Tensor:
    """(N, 3, H, W) in [−1, 1]."""
    found = _field(scenes, size)
    light = painting.lightness(
        scenes.texture[found.row, found.slot], found.x, found.y, scenes.radius[found.row, found.slot], found.pixel
    )
    rim = (0.5 + (-found.distance - painting.RIM) / found.pixel).clamp(0, 1)
    light = light * rim
    image = painting.canvas(_backdrop(scenes, size), scenes.style)
    named = scenes.colour[found.row, found.slot]
    colour, tint = painting.objects(image.device)[named], painting.tints(image.device)[named]
    for slot in range(MOST):  # back to front
        mine = (found.slot == slot).nonzero()[:, 0]
        if len(mine):
            row = found.row[mine]
            layer = painting.Layer(image[row], colour[mine], tint[mine], found.distance[mine], light[mine], found.pixel)
            image[row] = painting.paint(layer, scenes, row, slot)
    return (image * 2 - 1).clamp(-1, 1)


def segmentation(scenes: Scenes, size: int = 128) -> Tensor:
    """(N, H, W) int64: 0 is background, i the i-th thing from the back; the frontmost that covers half a pixel."""
    found = _field(scenes, size)
    out = torch.zeros(len(scenes), size, size, dtype=torch.int64, device=scenes.x.device)
    for slot in range(MOST):
        mine = (found.slot == slot).nonzero()[:, 0]
        row = found.row[mine]
        out[row] = torch.where(found.distance[mine] < 0, slot + 1, out[row])
    return out


def edges(scenes: Scenes, size: int = 128) -> Tensor:
    """(N, 1, H, W) in [0, 1]: outlines, one pixel wide and antialiased, where nothing stands before them."""
    found = _field(scenes, size)
    out = torch.zeros(len(scenes), size, size, device=scenes.x.device)
    for slot in range(MOST):
        mine = (found.slot == slot).nonzero()[:, 0]
        row, distance = found.row[mine], found.distance[mine]
        line = (1 - distance.abs() / found.pixel).clamp(0, 1)
        hidden = (0.5 - distance / found.pixel).clamp(0, 1)
        out[row] = torch.maximum(out[row] * (1 - hidden), line)
    return out[:, None]


# --- Without a branch on data ---------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """One thing of each of N scenes, (N, 1, 1) each except the colours."""

    present: Tensor
    shape: Tensor
    texture: Tensor
    radius: Tensor
    x: Tensor
    y: Tensor
    style: Tensor
    colour: Tensor  # (N, 3)
    tint: Tensor  # (N, 3)


def _slot_of(scenes: Scenes, slot: int) -> Slot:
    """The things that stand at one depth, 0 the backmost."""
    own = (scenes.present, scenes.shape, scenes.texture, scenes.radius, scenes.x, scenes.y)
    device, named = scenes.x.device, scenes.colour[:, slot]
    return Slot(
        *(values[:, slot, None, None] for values in own),
        scenes.style[:, None, None],
        painting.objects(device)[named],
        painting.tints(device)[named],
    )


def _distance(shape: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(N, H, W): signed distances of shapes (N, 1, 1) at columns (N, 1, W) and rows (N, H, 1), in radii."""
    return _chosen(shape, [shapes.FUNCTIONS[name](x, y) for name in SHAPE_NAMES])


def _chosen(which: Tensor, values: Sequence[Tensor]) -> Tensor:
    """The value of each row's own number."""
    out = values[0]
    for index, value in enumerate(values[1:], 1):
        out = torch.where(which == index, value, out)
    return out


def _lightness(texture: Tensor, x: Tensor, y: Tensor, radius: Tensor, pixel: float) -> Tensor:
    """(N, H, W), as `textures.lightness`."""
    step = painting.period(radius)
    values = {"solid": torch.zeros_like(radius), "gradient": (0.5 + 0.5 * y / radius).clamp(0, 1)}
    for pattern in (painting.striped, painting.checkered, painting.dotted):
        values[pattern.__name__] = pattern(x / step, y / step, pixel / step)
    return _chosen(texture, [values[name] for name in TEXTURE_NAMES])


def stroke(below: Tensor, thing: Slot, middle: Tensor, names: tuple[str, ...]) -> Tensor:
    """(N, 3, H, W): the images with one more thing each, painted in a style of `names`."""
    pixel = 1 / len(middle)
    across, down = middle[None, None, :], middle[None, :, None]
    x, y = across - thing.x, down - thing.y
    away = _distance(thing.shape, x / thing.radius, y / thing.radius) * thing.radius
    rim = (0.5 + (-away - painting.RIM) / pixel).clamp(0, 1)
    light = _lightness(thing.texture, x, y, thing.radius, pixel) * rim
    layer = painting.Layer(below, thing.colour, thing.tint, away, light, pixel)
    out = below
    for name in names:
        if name == "soft":
            right, lower = painting.SHADOW_SHIFT
            moved = ((across - right - thing.x) / thing.radius, (down - lower - thing.y) / thing.radius)
            made = painting.shadowed(layer, _distance(thing.shape, *moved) * thing.radius)
        else:
            made = painting.BRUSHES[name](layer, None, 0)  # type: ignore[arg-type]  # only a shadow asks for the scenes
        mine = thing.present & (thing.style == STYLE_NAMES.index(name))
        out = torch.where(mine[:, None], made, out)
    return out


def _outlined(below: Tensor, thing: Slot, middle: Tensor) -> Tensor:
    """(N, H, W): the outlines so far with those of one more thing each, which hides what it covers."""
    pixel = 1 / len(middle)
    x, y = (v / thing.radius for v in (middle[None, None, :] - thing.x, middle[None, :, None] - thing.y))
    away = _distance(thing.shape, x, y) * thing.radius
    line, hidden = (1 - away.abs() / pixel).clamp(0, 1), (0.5 - away / pixel).clamp(0, 1)
    return torch.where(thing.present, torch.maximum(below * (1 - hidden), line), below)


@lru_cache(maxsize=16)
def compiled(work: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(work, fullgraph=True, dynamic=False)


def render_dense(
    scenes: Scenes, size: int = 128, names: Sequence[str] = STYLE_NAMES, *, compile: bool = False, most: int = MOST
) -> Tensor:
    """(N, 3, H, W) in [−1, 1], as `render` makes them, of scenes in styles of `names` with at most `most` things."""
    known = tuple(STYLE_NAMES[i] for i in sorted({one_of("style", name, STYLE_NAMES) for name in names}))
    middle, paint = _axis(size, scenes.x.device), compiled(stroke) if compile else stroke
    image = _backdrop(scenes, size)
    if {"neon", "sketch"} & set(known):
        image = painting.canvas(image, scenes.style)
    for slot in range(most):  # back to front
        image = paint(image, _slot_of(scenes, slot), middle, known)
    return (image * 2 - 1).clamp(-1, 1)


def edges_dense(scenes: Scenes, size: int = 128, *, compile: bool = False) -> Tensor:
    """(N, 1, H, W) in [0, 1], as `edges` makes them."""
    middle, draw = _axis(size, scenes.x.device), compiled(_outlined) if compile else _outlined
    out = torch.zeros(len(scenes), size, size, device=middle.device)
    for slot in range(MOST):
        out = draw(out, _slot_of(scenes, slot), middle)
    return out[:, None]
