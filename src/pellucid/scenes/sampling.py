"""Scenes drawn from (seed, index): the same on every machine, whatever the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.scenes import shapes
from pellucid.scenes.relations import BACKS, FRONTS, members
from pellucid.scenes.scene import MOST, RADII, Scenes, one_of
from pellucid.scenes.words import BACKGROUND_NAMES, COLOUR_NAMES, STYLE_NAMES, TRAIN_STYLES, Split, combinations

# --- Random numbers by address --------------------------------------------------------------------------------------

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def mix(x: Tensor) -> Tensor:
    """A 32-bit hash in int64 lanes. Both factors are below 2³¹, so that no product overflows.

    The rounds are those of C. Wellons' hash prospector (0x21f0aaad, 0x735a2d97).
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def random_words(indices: Tensor, seed: int, slots: int, stream: int = 0) -> Tensor:
    """(N, slots) int64 below 2³², of indices (N,) int64 not negative. Each stream is its own set of numbers."""
    seed = (seed ^ (seed >> 64)) & (2**64 - 1)
    keys = torch.tensor([seed & _MASK, seed >> 32, stream & _MASK], dtype=torch.int64, device=indices.device)
    low, high = indices & _MASK, indices >> 32
    first = mix(mix(mix(low ^ mix(keys[0])) + high & _MASK) ^ mix(keys[1] + _GOLDEN & _MASK))
    second = mix(mix(mix(low + _GOLDEN & _MASK) ^ mix(keys[1] ^ _GOLDEN)) + mix(keys[0] + high & _MASK) & _MASK)
    address = (torch.arange(1, slots + 1, device=indices.device) * _GOLDEN + mix(keys[2])) & _MASK
    return mix(mix(first[:, None] ^ address) + second[:, None] & _MASK)


def uniform(indices: Tensor, seed: int, slots: int, stream: int = 0) -> Tensor:
    """(N, slots) float64 in [0, 1): 24 bits, exact in float32 too."""
    return (random_words(indices, seed, slots, stream) >> 8).double() * 2.0**-24


# --- Places of things -----------------------------------------------------------------------------------------------

_TRIES = 16
_SLOTS = 16  # numbers a candidate takes
_EDGE = 0.012  # from a thing to the image's edge
_GAP = (0.025, 0.14)  # between things that stand apart
_NEAR = (0.025, 0.065)  # between neighbours
_SLOPE = 0.36
# How often a thing is small, and small or medium, by the number of things.
_SIZE_STEPS = ((0.34, 0.67), (0.40, 0.75), (0.55, 0.88))
# Bands of a single thing's middle: left, centre, right; the outer ones reach as far as the thing allows.
_BANDS = (0.40, 0.47, 0.53, 0.60)
_ARRANGEMENT_STEPS = (0.20, 0.40, 0.52, 0.76)  # of two things: horizontal, vertical, near, inside, in front


@dataclass(frozen=True)
class _Places:
    """Middles and radii, each (…, 3) float64."""

    x: Tensor
    y: Tensor
    radius: Tensor


def _arrange(u: Tensor, count: Tensor, shape: Tensor) -> _Places:
    """The places of things, from numbers u (N, 2 + TRIES · SLOTS) in [0, 1), counts (N,) and shapes (N, 3)."""
    kind = torch.bucketize(
        u[:, 0].contiguous(), torch.tensor(_ARRANGEMENT_STEPS, dtype=u.dtype, device=u.device), right=True
    )
    kind = torch.where(_possible(kind, shape), kind, (u[:, 1] * 2).long())
    tries = u[:, 2:].reshape(len(u), _TRIES, _SLOTS)
    radius = _radii(tries, count, kind)
    half = shapes.halves(u.device)[shape][:, None] * radius[..., None]  # (N, T, 3, 2)
    several, fits = _together(tries, kind, shape, count, radius, half)
    single = _alone(tries[:, 0], radius[:, 0], half[:, 0])
    taken = fits.double().argmax(1)  # the first that fits
    rows = torch.arange(len(u), device=u.device)
    spare = _fallback(u)
    ok = fits.any(1)[:, None]
    lonely = (count == 1)[:, None]
    return _Places(
        *(
            torch.where(lonely, getattr(single, name), torch.where(ok, getattr(several, name)[rows, taken], other))
            for name, other in (("x", spare.x), ("y", spare.y), ("radius", spare.radius))
        )
    )


def _possible(kind: Tensor, shape: Tensor) -> Tensor:
    """(N,) bool: only fat shapes hold others or stand behind them; the front one must cover its own middle."""
    inside = members(BACKS, shape.device)[shape[:, 0]]
    front = inside & members(FRONTS, shape.device)[shape[:, 1]]
    return torch.where(kind == 3, inside, torch.where(kind == 4, front, True))


def _radii(tries: Tensor, count: Tensor, kind: Tensor) -> Tensor:
    """(N, T, 3): a size, then a radius within it. What contains is large, what it contains small."""
    steps = torch.tensor(_SIZE_STEPS, dtype=tries.dtype, device=tries.device)[count - 1][
        :, None, None, :
    ]  # (N, 1, 1, 2)
    size = (tries[..., 0:3, None] >= steps).sum(-1)
    pair = size[..., :2]
    kind = kind[:, None, None]
    ordered = torch.stack([pair.amax(-1).clamp(min=1), pair.amin(-1)], -1)
    nested = torch.tensor([2, 0], device=size.device).expand_as(pair)
    pair = torch.where(kind == 3, nested, torch.where(kind == 4, ordered, pair))
    size = torch.where(count[:, None, None] > 1, torch.cat([pair, size[..., 2:]], -1), size)
    low, high = torch.tensor(list(RADII.values()), dtype=tries.dtype, device=tries.device).unbind(1)
    return low[size] + tries[..., 3:6] * (high - low)[size]


def _alone(u: Tensor, radius: Tensor, half: Tensor) -> _Places:
    """A single thing in one of nine places."""
    found = []
    for axis, (choice, within) in enumerate(((6, 7), (8, 9))):
        reach = half[:, 0, axis] + _EDGE
        low = torch.stack([reach, torch.full_like(reach, _BANDS[1]), torch.full_like(reach, _BANDS[3])], -1)
        high = torch.stack([torch.full_like(reach, _BANDS[0]), torch.full_like(reach, _BANDS[2]), 1 - reach], -1)
        band = (u[:, choice] * 3).long()[:, None]
        found.append(low.gather(1, band) + u[:, within : within + 1] * (high - low).gather(1, band))
    return _Places(found[0].expand(-1, MOST), found[1].expand(-1, MOST), radius[:, :1].expand(-1, MOST))


def _together(
    tries: Tensor, kind: Tensor, shape: Tensor, count: Tensor, radius: Tensor, half: Tensor
) -> tuple[_Places, Tensor]:
    """Two or three things by every candidate, and which candidates keep the margins (N, T)."""
    x, y = torch.zeros_like(radius), torch.zeros_like(radius)
    x[..., 1], y[..., 1] = _second(tries, kind, shape, radius, half)
    anchor = (tries[..., 10] * 2).long()
    own, rest = anchor[..., None], 1 - anchor[..., None]
    upright = tries[..., 11] < 0.5
    dx, dy = _apart(
        tries[..., 12:15], upright, half.gather(2, own[..., None].expand(*own.shape, 2))[..., 0, :], half[..., 2, :]
    )
    x[..., 2], y[..., 2] = x.gather(2, own)[..., 0] + dx, y.gather(2, own)[..., 0] + dy
    free = torch.zeros_like(upright)
    for axis, v in enumerate((x, y)):
        reach = half[..., 2, axis] + half[..., axis].gather(2, rest)[..., 0]
        free |= (v[..., 2] - v.gather(2, rest)[..., 0]).abs() >= reach + _GAP[0]
    drawn = torch.arange(MOST, device=x.device) < count[:, None, None]
    fits = free | (count == 2)[:, None]
    placed = []
    for axis, v in enumerate((x, y)):
        far = torch.tensor(9.0, dtype=v.dtype, device=v.device)
        low = torch.where(drawn, v - half[..., axis], far).amin(-1)
        high = torch.where(drawn, v + half[..., axis], -far).amax(-1)
        room = 1 - 2 * _EDGE - (high - low)
        fits = fits & (room >= 0)
        placed.append(v + (_EDGE - low + tries[..., 8 + axis] * room)[..., None])
    return _Places(placed[0], placed[1], radius), fits


def _apart(u: Tensor, upright: Tensor, half_a: Tensor, half_b: Tensor) -> tuple[Tensor, Tensor]:
    """The way from one thing to another that stands apart from it, along an axis and a little off it."""
    reach = half_a + half_b
    along = torch.where(upright, reach[..., 1], reach[..., 0]) + _GAP[0] + u[..., 0] * (_GAP[1] - _GAP[0])
    across = along * _SLOPE * (2 * u[..., 1] - 1)
    along = torch.where(u[..., 2] < 0.5, -along, along)
    return torch.where(upright, across, along), torch.where(upright, along, across)


def _second(tries: Tensor, kind: Tensor, shape: Tensor, radius: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    """The middle of the second thing, seen from the first (N, T each)."""
    kind = kind[:, None].expand(radius.shape[:2])
    u = tries[..., [7, 6, 15]]
    gap = torch.where(
        kind == 2, (_NEAR[0] - _GAP[0] + u[..., 0] * (_NEAR[1] - _NEAR[0])) / (_GAP[1] - _GAP[0]), u[..., 0]
    )
    dx, dy = _apart(torch.stack([gap, u[..., 1], u[..., 2]], -1), kind == 1, half[..., 0, :], half[..., 1, :])
    # Inside: nearly the same middle.
    off = 0.07 * radius[..., 0]
    dx = torch.where(kind == 3, off * (2 * u[..., 0] - 1), dx)
    dy = torch.where(kind == 3, off * (2 * u[..., 1] - 1), dy)
    # In front: discs within the two overlap by a part of the smaller disc's radius, on any side.
    core = shapes.cores(radius.device)[shape][:, None]
    disc = core[..., :2] * radius[..., :2]
    depth = disc.sum(-1) - (0.36 + 0.16 * u[..., 0]) * disc.amin(-1)
    run = 2 * u[..., 1] - 1  # a point of the unit square's rim, brought onto the circle
    rise = (1 + run * run).sqrt()
    sign = torch.where(u[..., 2] < 0.5, -1.0, 1.0).double()
    flip = tries[..., 14] < 0.5
    fx, fy = torch.where(flip, run, sign) * depth / rise, torch.where(flip, sign, run) * depth / rise
    return torch.where(kind == 4, fx, dx), torch.where(kind == 4, fy, dy)


def _fallback(u: Tensor) -> _Places:
    """Three small things in an L, which keeps every margin: for the few scenes whose candidates all fail."""
    row = torch.tensor([[0.25, 0.75, 0.25], [0.3, 0.3, 0.74], [0.11, 0.11, 0.11]], dtype=u.dtype, device=u.device)
    return _Places(*(v.expand(len(u), MOST) for v in row))


# --- Scenes ---------------------------------------------------------------------------------------------------------

OBJECTS = (1, 2, 2, 3)  # how many, repeated by weight
_KIND_STEPS = (0.5, 0.78)  # plain, gradient, checkered
_WHAT, _WHERE = 0, 1  # streams of numbers
_SPAN = 2**62


def sample(
    indices: Tensor,
    seed: int = 0,
    split: Split = "train",
    styles: Sequence[str] = TRAIN_STYLES,
    objects: Sequence[int] = OBJECTS,
) -> Scenes:
    """Scenes of indices (N,) int64, on their device. Names in `styles` and numbers in `objects` weigh by repetition.

    Training scenes hold no held-out combination; in held-out scenes every object is one.
    """
    _check(indices, seed, styles, objects)
    what = uniform(indices, seed, 24, _WHAT)  # (N, 24)
    device = indices.device
    count = torch.tensor(objects, device=device)[(what[:, 0] * len(objects)).long()]
    colour = what[:, 1 : 1 + len(COLOUR_NAMES)].argsort(dim=1, stable=True)[:, :MOST]  # three different ones
    pairs = combinations(split).to(device)[colour]  # (N, 3, M, 2)
    pick = (what[:, 11:14] * pairs.shape[2]).long()[..., None, None].expand(-1, -1, 1, 2)
    shape, texture = pairs.gather(2, pick)[:, :, 0].unbind(-1)
    where = _arrange(uniform(indices, seed, 2 + _TRIES * _SLOTS, _WHERE), count, shape)
    steps = torch.tensor(_KIND_STEPS, dtype=torch.float64, device=device)
    known = torch.tensor([one_of("style", name, STYLE_NAMES) for name in styles], device=device)
    drawn = torch.arange(MOST, device=device) < count[:, None]

    def own(values: Tensor) -> Tensor:
        return torch.where(drawn, values, values[:, :1])

    return Scenes(
        index=indices,
        count=count,
        shape=own(shape),
        colour=own(colour),
        texture=own(texture),
        radius=own(where.radius).float(),
        x=own(where.x).float(),
        y=own(where.y).float(),
        background=(what[:, 14] * len(BACKGROUND_NAMES)).long(),
        kind=torch.bucketize(what[:, 15].contiguous(), steps, right=True),
        style=known[(what[:, 16] * len(styles)).long()],
    )


def _check(indices: Tensor, seed: int, styles: Sequence[str], objects: Sequence[int]) -> None:
    if indices.ndim != 1 or indices.dtype != torch.int64:
        raise PellucidError(rule("indices", "(N,) int64", f"{tuple(indices.shape)} {indices.dtype}"), "scenes-indices")
    if not (isinstance(seed, int) and abs(seed) < _SPAN):
        raise PellucidError(rule("seed", "a whole number below 2⁶²", seed), "scenes-seed")
    if not styles:
        raise PellucidError(rule("styles", "at least one name", tuple(styles)), "scenes-styles")
    if not objects or any(n not in range(1, MOST + 1) for n in objects):
        raise PellucidError(rule("objects", f"numbers from 1 to {MOST}", tuple(objects)), "scenes-objects")
