"""Prompts with what they ask for: captions of scenes that exist, so that each can be fulfilled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pellucid.core.errors import PellucidError, rule
from pellucid.scenes.grammar import described
from pellucid.scenes.query import Query
from pellucid.scenes.sampling import OBJECTS, sample
from pellucid.scenes.split import Split

MOST_PROMPTS = 1_000_000


def prompts(
    count: int, objects: int | Sequence[int] = OBJECTS, seed: int = 0, split: Split = "held_out"
) -> list[tuple[str, Query]]:
    """Prompts that say all attributes. In the held-out split every object is a combination that training never saw."""
    if not 1 <= count <= MOST_PROMPTS:
        raise PellucidError(rule("count", f"from 1 to {MOST_PROMPTS:,}", count), "scenes-count")
    numbers = (objects,) if isinstance(objects, int) else objects
    scenes = sample(torch.arange(count), seed, split, ("flat",), numbers)
    return described(scenes, seed, full=True, style=False)
