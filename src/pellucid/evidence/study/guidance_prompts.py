"""The prompts of a guidance study: captions of scenes, whose truth is known, or the lines of a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pellucid import scenes
from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import whole
from pellucid.evidence.study.prompts import lines_of, queries
from pellucid.scenes.query import Query
from pellucid.scenes.sampling import OBJECTS
from pellucid.scenes.scene import Scenes

SCENES = "scenes"
COUNT = 64  # prompts of scenes when no number is given
MOST = 100_000


@dataclass(frozen=True)
class Asked:
    """What is asked for: `queries` where every prompt is a caption of a scene, `truth` where the scenes are known."""

    texts: tuple[str, ...]
    queries: tuple[Query, ...] | None = None
    truth: Scenes | None = None

    def __len__(self) -> int:
        return len(self.texts)


def of_world(where: str) -> bool:
    """Whether prompts are drawn from the world of scenes: `scenes` or `scenes:N`, unless a file has that name."""
    return where.partition(":")[0] == SCENES and not Path(where).exists()


def asked(where: str, seed: int) -> Asked:
    """`scenes`, `scenes:N`, or a text file with a prompt per line."""
    if of_world(where):
        _, colon, count = where.partition(":")
        if colon and not whole(count, MOST):
            raise PellucidError(rule("prompts", f"scenes:N, N from 1 to {MOST:,}", where), "prompts")
        return of_scenes(int(count) if colon else COUNT, seed)
    texts = lines_of(Path(where), "scenes:N")
    if len(texts) > MOST:
        raise PellucidError(rule(f"prompts in {where}", f"at most {MOST:,}", len(texts)), "prompts")
    return Asked(texts, queries(texts))


def of_scenes(count: int, seed: int) -> Asked:
    """Held-out captions that say all but the style, and their scenes in the styles of training."""
    pairs = scenes.prompts(count, OBJECTS, seed, split="held_out")
    drawn = scenes.sample(torch.arange(count), seed, "held_out", scenes.TRAIN_STYLES, OBJECTS)
    return Asked(tuple(text for text, _ in pairs), tuple(query for _, query in pairs), drawn)
