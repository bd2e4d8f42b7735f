"""Scenes drawn from (seed, index): the same on every machine, whatever the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.scenes import counter, layout
from pellucid.scenes.scene import MOST, Scenes, one_of
from pellucid.scenes.split import Split, combinations
from pellucid.scenes.words import BACKGROUND_NAMES, COLOUR_NAMES, STYLE_NAMES, TRAIN_STYLES

OBJECTS = (1, 2, 2, 3)  # how many, repeated by weight
KIND_STEPS = (0.5, 0.78)  # plain, gradient, checkered
WHAT, WHERE = 0, 1  # streams of numbers
SPAN = 2**62


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
    check(indices, seed, styles, objects)
    what = counter.uniform(indices, seed, 24, WHAT)  # (N, 24)
    device = indices.device
    count = torch.tensor(objects, device=device)[(what[:, 0] * len(objects)).long()]
    colour = what[:, 1 : 1 + len(COLOUR_NAMES)].argsort(dim=1, stable=True)[:, :MOST]  # three different ones
    pairs = combinations(split).to(device)[colour]  # (N, 3, M, 2)
    pick = (what[:, 11:14] * pairs.shape[2]).long()[..., None, None].expand(-1, -1, 1, 2)
    shape, texture = pairs.gather(2, pick)[:, :, 0].unbind(-1)
    where = layout.arrange(counter.uniform(indices, seed, 2 + layout.TRIES * layout.SLOTS, WHERE), count, shape)
    steps = torch.tensor(KIND_STEPS, dtype=torch.float64, device=device)
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


def check(indices: Tensor, seed: int, styles: Sequence[str], objects: Sequence[int]) -> None:
    if indices.ndim != 1 or indices.dtype != torch.int64:
        raise PellucidError(rule("indices", "(N,) int64", f"{tuple(indices.shape)} {indices.dtype}"), "scenes-indices")
    if not (isinstance(seed, int) and abs(seed) < SPAN):
        raise PellucidError(rule("seed", "a whole number below 2⁶²", seed), "scenes-seed")
    if not styles:
        raise PellucidError(rule("styles", "at least one name", tuple(styles)), "scenes-styles")
    if not objects or any(n not in range(1, MOST + 1) for n in objects):
        raise PellucidError(rule("objects", f"numbers from 1 to {MOST}", tuple(objects)), "scenes-objects")
