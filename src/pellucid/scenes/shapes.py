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

_CPU = torch.device("cpu")
_CIRCLE = 1.0
_SQUARE, _SQUARE_CORNER = 0.9, 0.1
_TRIANGLE = 1.25  # from its middle to a corner
_STAR, _STAR_INNER = 1.16, 0.56
_HEART, _LOBE = 1.72, math.sqrt(2) / 4  # lobes of this radius about (±1/4, 3/4), the tip at the origin, times HEART
_PENTAGON = 1.14
_CROSS, _CROSS_ARM = 1.04, 0.40
_RING_OUT, RING_IN = 1.08, 0.44
_MOON, _MOON_BITE, _MOON_SHIFT = 1.12, 0.86, 0.56
_MOON_TIP_X = (_MOON_SHIFT**2 + _MOON**2 - _MOON_BITE**2) / (2 * _MOON_SHIFT)  # where the two circles meet
_MOON_TIP_Y = math.sqrt(_MOON**2 - _MOON_TIP_X**2)
_DIAMOND_X, _DIAMOND_Y = 0.82, 1.2

# Half width and half height of the bounding box, in radii.
HALF = {
    "circle": (_CIRCLE, _CIRCLE),
    "square": (_SQUARE, _SQUARE),
    "triangle": (_TRIANGLE * math.sqrt(0.75), _TRIANGLE * 0.75),
    "star": (_STAR * math.sin(math.radians(72)), _STAR * (1 + math.cos(math.radians(36))) / 2),
    "heart": ((0.25 + _LOBE) * _HEART, (0.75 + _LOBE) * _HEART / 2),
    "pentagon": (_PENTAGON * math.sin(math.radians(72)), _PENTAGON * (1 + math.cos(math.radians(36))) / 2),
    "cross": (_CROSS, _CROSS),
    "ring": (_RING_OUT, _RING_OUT),
    "crescent": ((_MOON + _MOON_TIP_X) / 2, _MOON),
    "diamond": (_DIAMOND_X, _DIAMOND_Y),
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


def _box(x: Tensor, y: Tensor, half_x: float, half_y: float) -> Tensor:
    qx, qy = x.abs() - half_x, y.abs() - half_y
    return torch.hypot(qx.clamp(min=0), qy.clamp(min=0)) + torch.maximum(qx, qy).clamp(max=0)


def _circle(x: Tensor, y: Tensor) -> Tensor:
    return torch.hypot(x, y) - _CIRCLE


def _square(x: Tensor, y: Tensor) -> Tensor:
    return _box(x, y, _SQUARE - _SQUARE_CORNER, _SQUARE - _SQUARE_CORNER) - _SQUARE_CORNER


def _triangle(x: Tensor, y: Tensor) -> Tensor:
    """Equilateral, a corner up. Inside, the nearest of three sides; outside, of three segments."""
    half, top, foot = HALF["triangle"][0], -HALF["triangle"][1], HALF["triangle"][1]
    x = x.abs()
    side = _segment(x, y, (0.0, top), (half, foot))
    base = _segment(x, y, (0.0, foot), (half, foot))
    slope_x, slope_y = foot - top, -half  # the outward normal of the right side
    outside = torch.maximum((x * slope_x + (y - top) * slope_y) / math.hypot(slope_x, slope_y), y - foot)
    return torch.minimum(side, base) * outside.sign()


def _segment(x: Tensor, y: Tensor, a: tuple[float, float], b: tuple[float, float]) -> Tensor:
    """Distance to the segment from a to b."""
    dx, dy = b[0] - a[0], b[1] - a[1]
    along = (((x - a[0]) * dx + (y - a[1]) * dy) / (dx * dx + dy * dy)).clamp(0, 1)
    return torch.hypot(x - a[0] - along * dx, y - a[1] - along * dy)


def _five(x: Tensor, y: Tensor, outer: float, inner: float) -> Tensor:
    """Five corners at one radius, one of them up, five at another: folded into one half of one point."""
    fold = math.radians(36)
    x, y = x.abs(), outer * (1 - math.cos(fold)) / 2 - y  # upwards, from its own middle
    for nx in (math.cos(fold), -math.cos(fold)):  # mirror twice: the plane becomes a wedge of 36° on either side of up
        away = 2 * (nx * x - math.sin(fold) * y).clamp(min=0)
        x, y = x - away * nx, y + away * math.sin(fold)
    x = x.abs()
    tip, dent = (0.0, outer), (inner * math.sin(fold), inner * math.cos(fold))
    side = x * (tip[1] - dent[1]) - (tip[1] - y) * dent[0]
    return _segment(x, y, tip, dent) * side.sign()


def _star(x: Tensor, y: Tensor) -> Tensor:
    return _five(x, y, _STAR, _STAR_INNER)


def _pentagon(x: Tensor, y: Tensor) -> Tensor:
    return _five(x, y, _PENTAGON, _PENTAGON * math.cos(math.radians(36)))


def _heart(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs() / _HEART, (0.75 + _LOBE) / 2 - y / _HEART
    lobe = torch.hypot(x - 0.25, y - 0.75) - _LOBE
    half = 0.5 * (x + y).clamp(min=0)
    near = torch.minimum(torch.hypot(x, y - 1), torch.hypot(x - half, y - half)) * (x - y).sign()
    return torch.where(x + y > 1, lobe, near) * _HEART


def _cross(x: Tensor, y: Tensor) -> Tensor:
    flat = _box(x, y, _CROSS, _CROSS_ARM)
    tall = _box(x, y, _CROSS_ARM, _CROSS)
    inner = torch.hypot(x.abs() - _CROSS_ARM, y.abs() - _CROSS_ARM)  # inside, the nearest point may be the inner corner
    union = torch.minimum(flat, tall)
    deep = (x.abs() < _CROSS_ARM) & (y.abs() < _CROSS_ARM)
    return torch.where(deep, -inner, union)


def _ring(x: Tensor, y: Tensor) -> Tensor:
    return (torch.hypot(x, y) - (_RING_OUT + RING_IN) / 2).abs() - (_RING_OUT - RING_IN) / 2


def _crescent(x: Tensor, y: Tensor) -> Tensor:
    """A disc with a bite from the right; tips by their own distance."""
    x, y = x + HALF["crescent"][0] - _MOON, y.abs()
    arcs = torch.maximum(torch.hypot(x, y) - _MOON, _MOON_BITE - torch.hypot(x - _MOON_SHIFT, y))
    # Seen from the disc's middle the tip is the last of the outer arc, seen from the bite's the first of the inner one.
    past_outer = x * _MOON_TIP_Y > y * _MOON_TIP_X
    past_inner = (x - _MOON_SHIFT) * _MOON_TIP_Y < y * (_MOON_TIP_X - _MOON_SHIFT)
    tip = torch.hypot(x - _MOON_TIP_X, y - _MOON_TIP_Y)
    return torch.where(past_outer & ~past_inner, tip, arcs)


def _diamond(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs(), y.abs()
    outside = (x * _DIAMOND_Y + y * _DIAMOND_X - _DIAMOND_X * _DIAMOND_Y).sign()
    return _segment(x, y, (_DIAMOND_X, 0.0), (0.0, _DIAMOND_Y)) * outside


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "heart": _heart,
    "pentagon": _pentagon,
    "cross": _cross,
    "ring": _ring,
    "crescent": _crescent,
    "diamond": _diamond,
}


def distance(shape: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Signed distance (M, …) of shapes (M,) at points (M, …), all in radii: grouped by shape, no loop over objects."""
    out = torch.empty_like(x)
    for index, name in enumerate(SHAPE_NAMES):
        rows = (shape == index).nonzero()[:, 0]
        if len(rows):
            out[rows] = FUNCTIONS[name](x[rows], y[rows])
    return out


def on_pixels(
    shape: Tensor, x: Tensor, y: Tensor, radius: Tensor, size: int, shift: tuple[float, float] = (0.0, 0.0)
) -> Tensor:
    """(M, S, S): signed distance of every pixel to M shapes (M,) whose middles are moved by `shift`; in sides."""
    middle = (torch.arange(size, device=x.device) + 0.5) / size
    x, y, radius = (values[:, None, None] for values in (x, y, radius))
    wide = (len(shape), size, size)
    across = ((middle - shift[0])[None, None, :] - x).expand(wide) / radius
    down = ((middle - shift[1])[None, :, None] - y).expand(wide) / radius
    return distance(shape, across, down) * radius


@lru_cache(maxsize=16)
def halves(device: torch.device = _CPU) -> Tensor:
    """(10, 2) float64: half width and half height."""
    return torch.tensor([HALF[name] for name in SHAPE_NAMES], dtype=torch.float64, device=device)


@lru_cache(maxsize=16)
def cores(device: torch.device = _CPU) -> Tensor:
    """(10,) float64"""
    return torch.tensor([CORE[name] for name in SHAPE_NAMES], dtype=torch.float64, device=device)
