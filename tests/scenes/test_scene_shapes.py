"""Signed distances against outlines that are drawn independently, point by point."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pellucid.scenes import shapes
from pellucid.scenes.words import SHAPE_NAMES

DENSE = 600  # points of a side or an arc


def side(a, b):
    along = np.linspace(0, 1, DENSE, endpoint=False)[:, None]
    return np.array(a) + along * (np.array(b) - np.array(a))


def polygon(corners):
    return np.concatenate([side(a, b) for a, b in zip(corners, corners[1:] + corners[:1], strict=True)])


def arc(middle, radius, start, stop):
    angle = np.linspace(start, stop, DENSE)
    return np.array(middle) + radius * np.stack([np.cos(angle), np.sin(angle)], 1)


def regular(radii, up=0.0):
    """Corners at these radii in turn, the first of them up, moved down by `up`."""
    turn = 2 * math.pi / len(radii)
    return [(r * math.sin(i * turn), -r * math.cos(i * turn) + up) for i, r in enumerate(radii)]


def square():
    inner, corner = 0.8, 0.1
    turns = [(inner, inner, 0), (-inner, inner, 1), (-inner, -inner, 2), (inner, -inner, 3)]
    corners = [arc((x, y), corner, k * math.pi / 2, (k + 1) * math.pi / 2) for x, y, k in turns]
    joined = []
    for a, b in zip(corners, corners[1:] + corners[:1], strict=True):
        joined += [a, side(a[-1], b[0])]
    return [np.concatenate(joined)]


def heart():
    scale, lobe = 1.72, math.sqrt(2) / 4
    right = arc((0.25, 0.75), lobe, -math.pi / 4, 3 * math.pi / 4)  # y upwards: from the right side to the dent
    left = right[::-1] * [-1, 1]
    points = np.concatenate([side((0, 0), right[0]), right, left, side(left[-1], (0, 0))])
    return [(points - [0, (0.75 + lobe) / 2]) * [scale, -scale]]


def crescent():
    big, bite, shift = 1.12, 0.86, 0.56
    x = (shift**2 + big**2 - bite**2) / (2 * shift)
    y = math.sqrt(big**2 - x**2)
    outer = arc((0, 0), big, math.atan2(y, x), 2 * math.pi - math.atan2(y, x))
    inner = arc((shift, 0), bite, 2 * math.pi - math.atan2(y, x - shift), math.atan2(y, x - shift))
    return [np.concatenate([outer, inner]) - [(x - big) / 2, 0]]


def cross():
    a, b = 0.40, 1.04
    corners = [
        (a, b),
        (a, a),
        (b, a),
        (b, -a),
        (a, -a),
        (a, -b),
        (-a, -b),
        (-a, -a),
        (-b, -a),
        (-b, a),
        (-a, a),
        (-a, b),
    ]
    return [polygon(corners)]


def lifted(outer):
    """How far the middle of five corners lies below the middle of their box."""
    return outer - outer * (1 + math.cos(math.pi / 5)) / 2


OUTLINES = {
    "circle": lambda: [arc((0, 0), 1, 0, 2 * math.pi)],
    "square": square,
    "triangle": lambda: [polygon(regular([1.25] * 3, 1.25 - 0.75 * 1.25))],
    "star": lambda: [polygon(regular([1.16, 0.56] * 5, lifted(1.16)))],
    "heart": heart,
    "pentagon": lambda: [polygon(regular([1.14] * 5, lifted(1.14)))],
    "cross": cross,
    "ring": lambda: [arc((0, 0), r, 0, 2 * math.pi) for r in (1.08, 0.44)],
    "crescent": crescent,
    "diamond": lambda: [polygon([(0.82, 0), (0, 1.2), (-0.82, 0), (0, -1.2)])],
}


def inside(points, curve):
    """Even-odd rule."""
    a, b = curve, np.roll(curve, -1, 0)
    x, y = points[:, :1], points[:, 1:]
    crossed = (a[:, 1] > y) != (b[:, 1] > y)
    with np.errstate(divide="ignore", invalid="ignore"):
        at = a[:, 0] + (y - a[:, 1]) / (b[:, 1] - a[:, 1]) * (b[:, 0] - a[:, 0])
    return (crossed & (x < at)).sum(1) % 2 == 1


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_distance_is_that_to_the_outline(name):
    points = np.random.default_rng(0).uniform(-1.7, 1.7, (400, 2))
    curves = OUTLINES[name]()
    near = np.min([np.hypot(*(points[:, None] - curve).transpose(2, 0, 1)).min(1) for curve in curves], 0)
    within = np.sum([inside(points, curve) for curve in curves], 0) % 2 == 1
    x, y = torch.from_numpy(points).T
    found = shapes.FUNCTIONS[name](x, y).numpy()
    np.testing.assert_allclose(np.abs(found), near, atol=4e-3)  # the outline's points are 3e-3 apart
    clear = near > 1e-2
    assert ((found < 0) == within)[clear].all()


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_box_and_core(name):
    axis = torch.linspace(-1.5, 1.5, 1501, dtype=torch.float64)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    filled = shapes.FUNCTIONS[name](x, y) < 0
    box = [(float(v[filled].min()), float(v[filled].max())) for v in (x, y)]
    for (low, high), half in zip(box, shapes.HALF[name], strict=True):
        assert low == pytest.approx(-half, abs=5e-3)  # a grid step and what a sharp corner hides
        assert high == pytest.approx(half, abs=5e-3)
    middle = float(shapes.FUNCTIONS[name](torch.zeros(1), torch.zeros(1)))
    assert shapes.CORE[name] <= max(0.0, -middle) + 1e-6


def test_grouped_distances_are_those_of_each_shape():
    shape = torch.tensor([3, 0, 3, 9, 7])
    x, y = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    whole = shapes.distance(shape, x, y)
    for i, s in enumerate(shape.tolist()):
        torch.testing.assert_close(whole[i], shapes.FUNCTIONS[SHAPE_NAMES[s]](x[i], y[i]))
