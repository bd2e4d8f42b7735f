"""The order of the data: an endless shuffled stream that can be entered at any step, on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule


@dataclass(frozen=True)
class Order:
    """Which examples a step sees, by its number alone: nothing is to be saved, and a resumed run goes on as it was.

    Every example comes once an epoch; batches run over the ends of epochs. The order does not depend on how many ranks
    share a batch, so two ranks see together what one would.
    """

    count: int  # examples
    batch: int  # of all ranks together
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise PellucidError(rule("examples", "at least 1", self.count), "data-empty")
        if self.batch < 1:
            raise PellucidError(rule("batch", "at least 1", self.batch), "batch")

    def step(self, step: int, rank: int = 0, ranks: int = 1) -> Tensor:
        """Indices of one rank's share of a step, (batch / ranks,)."""
        if self.batch % ranks or not 0 <= rank < ranks:
            raise PellucidError(rule("batch", f"a multiple of {ranks} ranks", self.batch), "batch-ranks")
        share = self.batch // ranks
        first = step * self.batch + rank * share
        places = torch.arange(first, first + share)
        epochs = places // self.count
        found = [permuted(self.seed, int(e), self.count)[places[epochs == e] % self.count] for e in epochs.unique()]
        return torch.cat(found)

    def epoch(self, step: int) -> float:
        """How often the data has been seen before a step."""
        return step * self.batch / self.count


@lru_cache(maxsize=4)
def permuted(seed: int, epoch: int, count: int) -> Tensor:
    """The order of one epoch. Seed and epoch are mixed so that neighbours share nothing (splitmix64)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
    mixed ^= mixed >> 31
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed & (2**63 - 1)))
