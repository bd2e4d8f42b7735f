"""The images of `render` without a branch on data: for a compiler, which makes few passes over the pixels of it.

Every shape, texture and style is computed at every pixel, and one of them is chosen. That is far more arithmetic and
far less memory traffic; nothing waits for the device, and all sizes are known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.scenes import palette, shapes, styles, textures
from pellucid.scenes.render import axis, backdrop
from pellucid.scenes.scene import MOST, Scenes, one_of
from pellucid.scenes.words import SHAPE_NAMES, STYLE_NAMES, TEXTURE_NAMES


class Things(NamedTuple):
    """One thing of each of N scenes, (N, 1, 1) each but for the colours."""

    present: Tensor
    shape: Tensor
    texture: Tensor
    radius: Tensor
    x: Tensor
    y: Tensor
    style: Tensor
    colour: Tensor  # (N, 3)
    tint: Tensor  # (N, 3)


def things(scenes: Scenes, slot: int) -> Things:
    """The things that stand at one depth, 0 the backmost."""
    own = (scenes.present, scenes.shape, scenes.texture, scenes.radius, scenes.x, scenes.y)
    device, named = scenes.x.device, scenes.colour[:, slot]
    return Things(
        *(values[:, slot, None, None] for values in own),
        scenes.style[:, None, None],
        palette.objects(device)[named],
        palette.tints(device)[named],
    )


def distance(shape: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(N, H, W): signed distances of shapes (N, 1, 1) at columns (N, 1, W) and rows (N, H, 1), in radii."""
    return chosen(shape, [shapes.FUNCTIONS[name](x, y) for name in SHAPE_NAMES])


def chosen(which: Tensor, values: Sequence[Tensor]) -> Tensor:
    """The value of each row's own number."""
    out = values[0]
    for index, value in enumerate(values[1:], 1):
        out = torch.where(which == index, value, out)
    return out


def lightness(texture: Tensor, x: Tensor, y: Tensor, radius: Tensor, pixel: float) -> Tensor:
    """(N, H, W), as `textures.lightness`."""
    step = textures.period(radius)
    values = {"solid": torch.zeros_like(radius), "gradient": (0.5 + 0.5 * y / radius).clamp(0, 1)}
    for pattern in (textures.striped, textures.checkered, textures.dotted):
        values[pattern.__name__] = pattern(x / step, y / step, pixel / step)
    return chosen(texture, [values[name] for name in TEXTURE_NAMES])


def stroke(below: Tensor, thing: Things, middle: Tensor, names: tuple[str, ...]) -> Tensor:
    """(N, 3, H, W): the images with one more thing each, painted in a style of `names`."""
    pixel = 1 / len(middle)
    across, down = middle[None, None, :], middle[None, :, None]
    x, y = across - thing.x, down - thing.y
    away = distance(thing.shape, x / thing.radius, y / thing.radius) * thing.radius
    rim = (0.5 + (-away - textures.RIM) / pixel).clamp(0, 1)
    light = lightness(thing.texture, x, y, thing.radius, pixel) * rim
    layer = styles.Layer(below, thing.colour, thing.tint, away, light, pixel)
    out = below
    for name in names:
        if name == "soft":
            moved = [(v - thing_v) / thing.radius for v, thing_v in moved_axes(across, down, thing)]
            made = styles.shadowed(layer, distance(thing.shape, *moved) * thing.radius)
        else:
            made = styles.BRUSHES[name](layer, None, 0)  # type: ignore[arg-type]  # only a shadow asks for the scenes
        mine = thing.present & (thing.style == STYLE_NAMES.index(name))
        out = torch.where(mine[:, None], made, out)
    return out


def moved_axes(across: Tensor, down: Tensor, thing: Things) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Where a shadow's thing would stand."""
    return (across - styles.SHADOW_X, thing.x), (down - styles.SHADOW_Y, thing.y)


def outlined(below: Tensor, thing: Things, middle: Tensor) -> Tensor:
    """(N, H, W): the outlines so far with those of one more thing each, which hides what it covers."""
    pixel = 1 / len(middle)
    x, y = (v / thing.radius for v in (middle[None, None, :] - thing.x, middle[None, :, None] - thing.y))
    away = distance(thing.shape, x, y) * thing.radius
    line, hidden = (1 - away.abs() / pixel).clamp(0, 1), (0.5 - away / pixel).clamp(0, 1)
    return torch.where(thing.present, torch.maximum(below * (1 - hidden), line), below)


@lru_cache(maxsize=16)
def compiled(work: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(work, fullgraph=True, dynamic=False)


def render(
    scenes: Scenes, size: int = 128, names: Sequence[str] = STYLE_NAMES, *, compile: bool = False, most: int = MOST
) -> Tensor:
    """(N, 3, H, W) in [−1, 1], as `render` makes them, of scenes in styles of `names` with at most `most` things."""
    known = tuple(STYLE_NAMES[i] for i in sorted({one_of("style", name, STYLE_NAMES) for name in names}))
    middle, paint = axis(size, scenes.x.device), compiled(stroke) if compile else stroke
    image = backdrop(scenes, size)
    if {"neon", "sketch"} & set(known):
        image = styles.canvas(image, scenes.style)
    for slot in range(most):  # back to front
        image = paint(image, things(scenes, slot), middle, known)
    return (image * 2 - 1).clamp(-1, 1)


def edges(scenes: Scenes, size: int = 128, *, compile: bool = False) -> Tensor:
    """(N, 1, H, W) in [0, 1], as `edges` makes them."""
    middle, draw = axis(size, scenes.x.device), compiled(outlined) if compile else outlined
    out = torch.zeros(len(scenes), size, size, device=middle.device)
    for slot in range(MOST):
        out = draw(out, things(scenes, slot), middle)
    return out[:, None]
