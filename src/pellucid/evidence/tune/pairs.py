"""Pairs: a seed and what is asked for with it. Three sets, and no seed and no prompt is in two of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pellucid import scenes
from pellucid.core.errors import PellucidError, rule
from pellucid.core.noise import check_seed
from pellucid.evidence.study.prompts import lines_of

FEWEST, MOST = 4, 100_000
WORLD = "scenes"
SHARES = (2, 1, 1)  # of the prompts of a file: to tune, to watch, to judge


@dataclass(frozen=True)
class Pairs:
    """Seeds, and one prompt or class a seed; neither for a model that takes none."""

    seeds: tuple[int, ...]
    prompts: tuple[str, ...] | None = None
    labels: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.seeds)

    def pick(self, chosen: Sequence[int]) -> Pairs:
        def of(values: tuple | None) -> tuple | None:
            return None if values is None else tuple(values[i] for i in chosen)

        return Pairs(tuple(self.seeds[i] for i in chosen), of(self.prompts), of(self.labels))

    def first(self, count: int) -> Pairs:
        return self.pick(range(min(count, len(self))))

    def parts(self, size: int) -> Iterator[tuple[slice, Pairs]]:
        for start in range(0, len(self), size):
            part = range(start, min(start + size, len(self)))
            yield slice(part.start, part.stop), self.pick(part)


@dataclass(frozen=True)
class Sets:
    """Pairs that gradients are taken on, pairs that stop the tuning, and pairs that only the evidence sees."""

    tune: Pairs
    watch: Pairs
    judge: Pairs


def check_count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not FEWEST <= value <= MOST:
        raise PellucidError(rule(name, f"a whole number from {FEWEST} to {MOST:,}", value), "pairs")
    return value


def make_sets(
    counts: tuple[int, int, int], seed: int, prompts: Sequence[str] | None = None, classes: int | None = None
) -> Sets:
    """Consecutive seeds from `seed`. Prompts are shuffled and shared out, and come round again where they are few."""
    check_seed(seed + sum(counts))
    own = [None] * 3 if prompts is None else shared_out(prompts, counts, seed)
    generator = torch.Generator().manual_seed(seed)
    made, first = [], seed
    for count, texts in zip(counts, own, strict=True):
        labels = None if classes is None else torch.randint(classes, (count,), generator=generator).tolist()
        asked = None if texts is None else tuple(texts[i % len(texts)] for i in range(count))
        made.append(Pairs(tuple(range(first, first + count)), asked, None if labels is None else tuple(labels)))
        first += count
    return Sets(*made)


def shared_out(prompts: Sequence[str], counts: tuple[int, int, int], seed: int) -> list[list[str]]:
    """Three lists of prompts without a common one."""
    distinct = list(dict.fromkeys(prompts))
    if len(distinct) < sum(SHARES):
        must = f"at least {sum(SHARES)} different ones, of which some are held out"
        raise PellucidError(rule("--prompts", must, len(distinct)), "prompts")
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed)).tolist()
    wanted = counts if len(distinct) >= sum(counts) else SHARES
    ends = [len(distinct) * sum(wanted[: k + 1]) // sum(wanted) for k in range(3)]
    return [[distinct[i] for i in order[a:b]] for a, b in zip([0, *ends], ends, strict=False)]


def read_prompts(asked: str, count: int, seed: int) -> list[str]:
    """`scenes`: captions of the world of scenes; else the lines of a file that are not empty."""
    if asked == WORLD:
        return [caption for caption, _ in scenes.prompts(count, seed=seed, split="train")]
    return list(lines_of(Path(asked), WORLD))
