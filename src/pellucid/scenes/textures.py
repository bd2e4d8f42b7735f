"""The five textures: how much of the light tone stands where, from 0 (the colour) to 1 (its tint)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pellucid.scenes.words import TEXTURE_NAMES

# The period grows with the thing, less than in proportion: small things keep a visible pattern, large ones a fine one.
PERIOD, PERIOD_PER_RADIUS = 0.054, 0.22
RIM = 0.0145  # a texture stops before the outline, which stays in the colour
DOT = 0.31  # a dot's radius, in periods
SLANT = 0.5 * math.sqrt(2)


def period(radius: Tensor) -> Tensor:
    """The distance from one stripe to the next, as a share of the image's side."""
    return PERIOD + PERIOD_PER_RADIUS * radius


def wave(along: Tensor) -> Tensor:
    """Distance to the nearest change of a square wave of period 1; positive where it is high: in [−1/4, 1/4]."""
    return 0.25 - (along - torch.floor(along + 0.5)).abs()


def striped(x: Tensor, y: Tensor, pixel: Tensor) -> Tensor:
    """Slanted stripes, a light one through the middle."""
    return cover(wave((x + y) * SLANT), pixel)


def checkered(x: Tensor, y: Tensor, pixel: Tensor) -> Tensor:
    """Squares of half a period, a corner in the middle."""
    across, down = (2 * cover(wave(v + 0.25), pixel) - 1 for v in (x, y))
    return 0.5 + 0.5 * across * down


def dotted(x: Tensor, y: Tensor, pixel: Tensor) -> Tensor:
    """Light dots; every second row is shifted by half a period."""
    row = torch.floor(y / 0.9 + 0.5)
    shifted = x + 0.5 * (row - 2 * torch.floor(row / 2))
    return cover(DOT - torch.hypot(shifted - torch.floor(shifted + 0.5), y - 0.9 * row), pixel)


def cover(distance: Tensor, pixel: Tensor) -> Tensor:
    """The share of a pixel on the positive side."""
    return (0.5 + distance / pixel).clamp(0, 1)


def lightness(texture: Tensor, x: Tensor, y: Tensor, radius: Tensor, pixel: float) -> Tensor:
    """(M, …): of textures (M,) at points (M, …) from each thing's middle; shares of the side, as is a pixel."""
    out = torch.zeros_like(x)
    steps = period(radius)
    for index, name in enumerate(TEXTURE_NAMES):
        rows = (texture == index).nonzero()[:, 0]
        if name == "solid" or not len(rows):
            continue
        tall = (len(rows), *[1] * (x.ndim - 1))
        scale = (radius if name == "gradient" else steps)[rows].reshape(tall)
        if name == "gradient":  # the colour at the top, its tint at the foot
            out[rows] = (0.5 + 0.5 * y[rows] / scale).clamp(0, 1)
        else:
            pattern = {"striped": striped, "checkered": checkered, "dotted": dotted}[name]
            out[rows] = pattern(x[rows] / scale, y[rows] / scale, pixel / scale)
    return out
