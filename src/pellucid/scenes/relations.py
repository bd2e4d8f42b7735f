"""What "left of", "inside" or "in front of" mean, as exact rules on boxes and silhouettes.

A rule has two margins. Captions speak only of what holds by the narrow one; a finished image is right when it holds
by the wide one, so that a pixel more or less decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pellucid.scenes import shapes
from pellucid.scenes.scene import Scenes
from pellucid.scenes.words import RELATION_NAMES, SHAPE_NAMES


@dataclass(frozen=True)
class Margins:
    """Shares of the image's side, but for `slope` and `share`."""

    gap: float  # between the boxes of things that stand apart
    slope: float  # how far off the axis: |dy| / |dx| for left and right
    near: float  # the widest gap of neighbours
    within: float  # how far a contained thing's middle may lie from its container's, in the container's radii
    overlap: float  # the smaller thing's share that must be shared by two that overlap


NARROW = Margins(gap=0.02, slope=0.40, near=0.075, within=0.12, overlap=0.08)
WIDE = Margins(gap=-0.02, slope=0.75, near=0.11, within=0.35, overlap=0.03)
# Fat enough to hold a small thing whole, and to stay readable behind another one; and what may stand before them.
BACKS = ("circle", "square", "pentagon")

FRONTS = ("circle", "square", "star", "heart", "pentagon", "diamond")


def members(names: tuple[str, ...], device: torch.device) -> Tensor:
    """(10,) bool over the shapes."""
    return torch.tensor([name in names for name in SHAPE_NAMES], device=device)


def shared(shape: Tensor, x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    """(P, 2): the share of each of two silhouettes that the other covers, for P pairs, on 48 × 48 points."""
    axis = (torch.arange(48, device=x.device, dtype=torch.float32) + 0.5) / 24 - 1  # of the smaller one's box
    reach = 1.25 * radius.amin(1)
    small = radius.argmin(1, keepdim=True)
    px = x.gather(1, small) + axis * reach[:, None]  # (P, 48)
    py = y.gather(1, small) + axis * reach[:, None]
    qx = ((px[:, None] - x[..., None]) / radius[..., None])[:, :, None, :].expand(-1, -1, 48, -1)  # (P, 2, 48, 48)
    qy = ((py[:, None] - y[..., None]) / radius[..., None])[:, :, :, None].expand(-1, -1, -1, 48)
    away = shapes.distance(shape.flatten(), qx.flatten(0, 1), qy.flatten(0, 1))
    inside = (away < 0).unflatten(0, (-1, 2)).unbind(1)
    both = (inside[0] & inside[1]).float().mean((1, 2)) * (2 * reach) ** 2
    return both[:, None] / _areas(shape, radius)


def _areas(shape: Tensor, radius: Tensor) -> Tensor:
    """Areas of silhouettes, in squares of the image's side."""
    return _unit_areas().to(radius)[shape] * radius**2


@cache  # when it is first asked for: it takes a second
def _unit_areas() -> Tensor:
    """(10,): areas of the shapes at radius 1, on 400 × 400 points."""
    axis = (torch.arange(400) + 0.5) / 400 * 3 - 1.5
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    every = torch.arange(len(SHAPE_NAMES))
    many = (len(every), 400, 400)
    inside = shapes.distance(every, x.expand(many).contiguous(), y.expand(many).contiguous()) < 0
    return inside.float().mean((1, 2)) * 9


def holding(scenes: Scenes, margins: Margins = NARROW) -> Tensor:
    """(N, 3, 3, 9) bool: whether thing i stands to thing j in each relation of RELATION_NAMES.

    Of two that overlap, the later one is in front.
    """
    half = shapes.halves(scenes.x.device).float()[scenes.shape] * scenes.radius[..., None]  # (N, 3, 2)
    dx, dy = (v[:, None, :] - v[:, :, None] for v in (scenes.x, scenes.y))  # to j from i
    reach = half[:, None, :] + half[:, :, None]  # (N, 3, 3, 2)
    gap_x, gap_y = dx.abs() - reach[..., 0], dy.abs() - reach[..., 1]
    beside = (gap_x >= margins.gap) & (dy.abs() <= margins.slope * dx.abs())
    stacked = (gap_y >= margins.gap) & (dx.abs() <= margins.slope * dy.abs())
    over, within = _crossing(scenes, torch.maximum(gap_x, gap_y) < 0, margins)
    rules = {
        "left of": beside & (dx > 0),
        "right of": beside & (dx < 0),
        "above": stacked & (dy > 0),
        "below": stacked & (dy < 0),
        "next to": beside & (gap_x <= margins.near),
        "inside": within,
        "around": within.transpose(1, 2),
        "in front of": over & ~within,
        "behind": (over & ~within).transpose(1, 2),
    }
    both = scenes.present[:, :, None] & scenes.present[:, None, :]
    return torch.stack([rules[name] for name in RELATION_NAMES], -1) & both[..., None]


def _crossing(scenes: Scenes, touching: Tensor, margins: Margins) -> tuple[Tensor, Tensor]:
    """(N, 3, 3) bool each: i lies over j, and i lies within j. Silhouettes are compared only where boxes touch."""
    over = torch.zeros_like(touching)
    within = torch.zeros_like(touching)
    both = scenes.present[:, :, None] & scenes.present[:, None, :]
    later = torch.ones(touching.shape[1:], dtype=torch.bool, device=touching.device).tril(-1)
    row, i, j = (touching & both & later).nonzero(as_tuple=True)
    if len(row):
        pair = [torch.stack([v[row, i], v[row, j]], 1) for v in (scenes.shape, scenes.x, scenes.y, scenes.radius)]
        shares = shared(*pair)
        _, x, y, radius = pair
        off = torch.hypot(x[:, 0] - x[:, 1], y[:, 0] - y[:, 1]) / radius[:, 1]
        over[row, i, j] = shares.amax(1) >= margins.overlap
        within[row, i, j] = (shares[:, 0] >= 0.97) & (off <= margins.within)
    return over, within
