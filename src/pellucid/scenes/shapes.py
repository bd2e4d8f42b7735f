"""Signed distances of the ten shapes at radius one, y downwards, the middle of the bounding box at the origin.

Negative inside, and exact everywhere. By folding along symmetries, as in I. Quilez' collection of 2D distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from pellucid.scenes.words import SHAPE_NAMES

CPU = torch.device("cpu")
CIRCLE = 1.0
SQUARE, SQUARE_CORNER = 0.9, 0.1
TRIANGLE = 1.25  # from its middle to a corner
STAR, STAR_INNER = 1.16, 0.56
HEART, LOBE = 1.72, math.sqrt(2) / 4  # lobes of this radius about (±1/4, 3/4), the tip at the origin, times HEART
PENTAGON = 1.14
CROSS, CROSS_ARM = 1.04, 0.40
RING_OUT, RING_IN = 1.08, 0.44
MOON, MOON_BITE, MOON_SHIFT = 1.12, 0.86, 0.56
MOON_TIP_X = (MOON_SHIFT**2 + MOON**2 - MOON_BITE**2) / (2 * MOON_SHIFT)  # where the two circles meet
MOON_TIP_Y = math.sqrt(MOON**2 - MOON_TIP_X**2)
DIAMOND_X, DIAMOND_Y = 0.82, 1.2

# Half width and half height of the bounding box, in radii.
HALF = {
    "circle": (CIRCLE, CIRCLE),
    "square": (SQUARE, SQUARE),
    "triangle": (TRIANGLE * math.sqrt(0.75), TRIANGLE * 0.75),
    "star": (STAR * math.sin(math.radians(72)), STAR * (1 + math.cos(math.radians(36))) / 2),
    "heart": ((0.25 + LOBE) * HEART, (0.75 + LOBE) * HEART / 2),
    "pentagon": (PENTAGON * math.sin(math.radians(72)), PENTAGON * (1 + math.cos(math.radians(36))) / 2),
    "cross": (CROSS, CROSS),
    "ring": (RING_OUT, RING_OUT),
    "crescent": ((MOON + MOON_TIP_X) / 2, MOON),
    "diamond": (DIAMOND_X, DIAMOND_Y),
}
# The largest disc about the origin that the shape holds, in radii; 0 where the origin is outside.
CORE = {
    "circle": 1.0,
    "square": 0.9,
    "triangle": 0.46,
    "star": 0.47,
    "heart": 0.67,
    "pentagon": 0.81,
    "cross": 0.56,
    "ring": 0.0,
    "crescent": 0.0,
    "diamond": 0.67,
}


def box(x: Tensor, y: Tensor, half_x: float, half_y: float) -> Tensor:
    qx, qy = x.abs() - half_x, y.abs() - half_y
    return torch.hypot(qx.clamp(min=0), qy.clamp(min=0)) + torch.maximum(qx, qy).clamp(max=0)


def circle(x: Tensor, y: Tensor) -> Tensor:
    return torch.hypot(x, y) - CIRCLE


def square(x: Tensor, y: Tensor) -> Tensor:
    return box(x, y, SQUARE - SQUARE_CORNER, SQUARE - SQUARE_CORNER) - SQUARE_CORNER


def triangle(x: Tensor, y: Tensor) -> Tensor:
    """Equilateral, a corner up. Inside, the nearest of three sides; outside, of three segments."""
    half, top, foot = HALF["triangle"][0], -HALF["triangle"][1], HALF["triangle"][1]
    x = x.abs()
    side = segment(x, y, (0.0, top), (half, foot))
    base = segment(x, y, (0.0, foot), (half, foot))
    slope_x, slope_y = foot - top, -half  # the outward normal of the right side
    outside = torch.maximum((x * slope_x + (y - top) * slope_y) / math.hypot(slope_x, slope_y), y - foot)
    return torch.minimum(side, base) * outside.sign()


def segment(x: Tensor, y: Tensor, a: tuple[float, float], b: tuple[float, float]) -> Tensor:
    """Distance to the segment from a to b."""
    dx, dy = b[0] - a[0], b[1] - a[1]
    along = (((x - a[0]) * dx + (y - a[1]) * dy) / (dx * dx + dy * dy)).clamp(0, 1)
    return torch.hypot(x - a[0] - along * dx, y - a[1] - along * dy)


def five(x: Tensor, y: Tensor, outer: float, inner: float) -> Tensor:
    """Five corners at one radius, one of them up, five at another: folded into one half of one point."""
    fold = math.radians(36)
    x, y = x.abs(), outer * (1 - math.cos(fold)) / 2 - y  # upwards, from its own middle
    for nx in (math.cos(fold), -math.cos(fold)):  # mirror twice: the plane becomes a wedge of 36° on either side of up
        away = 2 * (nx * x - math.sin(fold) * y).clamp(min=0)
        x, y = x - away * nx, y + away * math.sin(fold)
    x = x.abs()
    tip, dent = (0.0, outer), (inner * math.sin(fold), inner * math.cos(fold))
    side = x * (tip[1] - dent[1]) - (tip[1] - y) * dent[0]
    return segment(x, y, tip, dent) * side.sign()


def star(x: Tensor, y: Tensor) -> Tensor:
    return five(x, y, STAR, STAR_INNER)


def pentagon(x: Tensor, y: Tensor) -> Tensor:
    return five(x, y, PENTAGON, PENTAGON * math.cos(math.radians(36)))


def heart(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs() / HEART, (0.75 + LOBE) / 2 - y / HEART
    lobe = torch.hypot(x - 0.25, y - 0.75) - LOBE
    half = 0.5 * (x + y).clamp(min=0)
    near = torch.minimum(torch.hypot(x, y - 1), torch.hypot(x - half, y - half)) * (x - y).sign()
    return torch.where(x + y > 1, lobe, near) * HEART


def cross(x: Tensor, y: Tensor) -> Tensor:
    flat = box(x, y, CROSS, CROSS_ARM)
    tall = box(x, y, CROSS_ARM, CROSS)
    inner = torch.hypot(x.abs() - CROSS_ARM, y.abs() - CROSS_ARM)  # inside, the nearest point may be the inner corner
    union = torch.minimum(flat, tall)
    deep = (x.abs() < CROSS_ARM) & (y.abs() < CROSS_ARM)
    return torch.where(deep, -inner, union)


def ring(x: Tensor, y: Tensor) -> Tensor:
    return (torch.hypot(x, y) - (RING_OUT + RING_IN) / 2).abs() - (RING_OUT - RING_IN) / 2


def crescent(x: Tensor, y: Tensor) -> Tensor:
    """A disc with a bite from the right; tips by their own distance."""
    x, y = x + HALF["crescent"][0] - MOON, y.abs()
    arcs = torch.maximum(torch.hypot(x, y) - MOON, MOON_BITE - torch.hypot(x - MOON_SHIFT, y))
    # Seen from the disc's middle the tip is the last of the outer arc, seen from the bite's the first of the inner one.
    past_outer = x * MOON_TIP_Y > y * MOON_TIP_X
    past_inner = (x - MOON_SHIFT) * MOON_TIP_Y < y * (MOON_TIP_X - MOON_SHIFT)
    tip = torch.hypot(x - MOON_TIP_X, y - MOON_TIP_Y)
    return torch.where(past_outer & ~past_inner, tip, arcs)


def diamond(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs(), y.abs()
    outside = (x * DIAMOND_Y + y * DIAMOND_X - DIAMOND_X * DIAMOND_Y).sign()
    return segment(x, y, (DIAMOND_X, 0.0), (0.0, DIAMOND_Y)) * outside


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": circle,
    "square": square,
    "triangle": triangle,
    "star": star,
    "heart": heart,
    "pentagon": pentagon,
    "cross": cross,
    "ring": ring,
    "crescent": crescent,
    "diamond": diamond,
}


def distance(shape: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Signed distance (M, …) of shapes (M,) at points (M, …), all in radii: grouped by shape, no loop over objects."""
    out = torch.empty_like(x)
    for index, name in enumerate(SHAPE_NAMES):
        rows = (shape == index).nonzero()[:, 0]
        if len(rows):
            out[rows] = FUNCTIONS[name](x[rows], y[rows])
    return out


@lru_cache(maxsize=16)
def halves(device: torch.device = CPU) -> Tensor:
    """(10, 2) float64: half width and half height."""
    return torch.tensor([HALF[name] for name in SHAPE_NAMES], dtype=torch.float64, device=device)


@lru_cache(maxsize=16)
def cores(device: torch.device = CPU) -> Tensor:
    """(10,) float64"""
    return torch.tensor([CORE[name] for name in SHAPE_NAMES], dtype=torch.float64, device=device)
