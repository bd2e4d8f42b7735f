"""The order of the data: an endless shuffled stream that can be entered at any step, on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.train.draws import mixed


@dataclass(frozen=True)
class Order:
    """Which examples a step sees, by its number alone: nothing is to be saved, and a resumed run goes on as it was.

    Every example comes once an epoch; batches run over the ends of epochs. The order does not depend on how many parts
    share a batch (ranks, micro-steps), so two ranks see together what one would. Examples that are made and not stored
    need no shuffling: without it the indices count up.
    """

    count: int  # examples
    batch: int  # of all ranks together
    seed: int = 0
    shuffled: bool = True

    def __post_init__(self) -> None:
        if self.count < 1:
            raise PellucidError(rule("examples", "at least 1", self.count), "data-empty")
        if self.batch < 1:
            raise PellucidError(rule("batch", "at least 1", self.batch), "batch")

    def step(self, step: int, part: int = 0, parts: int = 1) -> Tensor:
        """Indices of one part of a step, (batch / parts,)."""
        if self.batch % parts or not 0 <= part < parts:
            raise PellucidError(rule("batch", f"a multiple of its {parts} parts", self.batch), "batch-parts")
        share = self.batch // parts
        first = step * self.batch + part * share
        places = torch.arange(first, first + share)
        if not self.shuffled:
            return places % self.count
        epochs = places // self.count
        found = [permuted(self.seed, int(e), self.count)[places[epochs == e] % self.count] for e in epochs.unique()]
        return torch.cat(found)

    def epoch(self, step: int) -> float:
        """How often the data has been seen before a step."""
        return step * self.batch / self.count


@lru_cache(maxsize=4)
def permuted(seed: int, epoch: int, count: int) -> Tensor:
    """The order of one epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed(seed, epoch)))
