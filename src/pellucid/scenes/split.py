"""Which combinations of shape, colour and texture training never sees: a Latin square, so that none is rarer.

A combination is held out when shape + 3·colour + 3·texture leaves 7 after division by ten: 50 of 500. Every shape,
colour and texture is held out equally often, and each pair of them is still seen in training with other thirds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.scenes.words import COLOUR_NAMES, SHAPE_NAMES, TEXTURE_NAMES

Split = Literal["train", "held_out", "any"]
SPLITS = ("train", "held_out", "any")


def held_out_combination(shape: Tensor, colour: Tensor, texture: Tensor) -> Tensor:
    """Bool, of indices of names."""
    return (shape + 3 * colour + 3 * texture) % 10 == 7


@lru_cache(maxsize=8)
def combinations(split: Split) -> Tensor:
    """(10, M, 2): for each colour, the (shape, texture) pairs of a split: 45 in training, 5 held out."""
    if split not in SPLITS:
        raise PellucidError(rule("split", " or ".join(SPLITS), split), "scenes-split")
    shape, texture = torch.meshgrid(torch.arange(len(SHAPE_NAMES)), torch.arange(len(TEXTURE_NAMES)), indexing="ij")
    pairs = torch.stack([shape, texture], -1).flatten(0, 1)  # (50, 2)
    rows = []
    for colour in range(len(COLOUR_NAMES)):
        out = held_out_combination(pairs[:, 0], torch.tensor(colour), pairs[:, 1])
        rows.append(pairs if split == "any" else pairs[out] if split == "held_out" else pairs[~out])
    return torch.stack(rows)
