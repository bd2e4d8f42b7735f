"""Colour bleeding: an object has the colour that was asked of another one. Only where the truth is known: scenes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pellucid import scenes
from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.adherence.verdict import bleeding
from pellucid.evidence.qualities.given import checked, unit
from pellucid.scenes.query import Query

__all__ = ["bled", "bleeding"]


def bled(pixels: Tensor, queries: Sequence[Query]) -> Tensor:
    """(N,) float64: 1 where colours bled, 0 where not, NaN where it cannot be told: `bleeding` of every reading."""
    known = checked(pixels)
    if len(queries) != len(known):
        raise PellucidError(rule("queries", f"one for each of {len(known)} images", len(queries)), "qualities")
    readings = scenes.read(2 * unit(known) - 1)
    found = [bleeding(reading, query) for reading, query in zip(readings, queries, strict=True)]
    return torch.tensor([math.nan if one is None else float(one) for one in found], dtype=torch.float64)
