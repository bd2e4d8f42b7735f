"""Random numbers and the order of data, by address: a resumed run and any number of ranks draw the same numbers."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule

# --- Random numbers -------------------------------------------------------------------------------------------------


def mixed(*numbers: int) -> int:
    """One seed of 63 bits from several numbers (splitmix64 over each in turn): neighbours share nothing."""
    state = 0
    for number in numbers:
        state = (state ^ (number & (2**64 - 1))) + 0x9E3779B97F4A7C15 & (2**64 - 1)
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
        state ^= state >> 31
    return state & (2**63 - 1)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch draws new weights from a seed; afterwards its own stream continues as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True)
class Draws:
    """The random numbers of one step, by name.

    They are drawn for the whole batch of all ranks from (seed, step, name), and a part takes its rows: so neither ranks
    nor accumulation change the random numbers of an image. CPUs and GPUs draw differently from the same seed.
    """

    seed: int
    step: int
    batch: int  # images of all ranks together
    part: int = 0  # rank · accumulate + micro-step
    parts: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1 or self.parts < 1 or self.batch % self.parts or not 0 <= self.part < self.parts:
            must = f"a multiple of its {self.parts} parts (ranks × accumulate)"
            raise PellucidError(rule("batch", must, self.batch), "batch-parts")

    def generator(self, name: str, device: torch.device | str = "cpu") -> torch.Generator:
        """A fresh stream for the whole batch; the caller keeps its part with `mine`."""
        return torch.Generator(device).manual_seed(mixed(self.seed, self.step, zlib.crc32(name.encode())))

    def mine(self, whole: Tensor) -> Tensor:
        """This part's rows of something of the whole batch, (batch, …)."""
        share = self.batch // self.parts
        return whole[self.part * share : (self.part + 1) * share]

    def normal(self, name: str, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Standard normal, (batch / parts, *shape)."""
        return self.mine(torch.randn(self.batch, *shape, generator=self.generator(name, device), device=device))

    def uniform(self, name: str, shape: Sequence[int] = (), device: torch.device | str = "cpu") -> Tensor:
        """In [0, 1), (batch / parts, *shape)."""
        return self.mine(torch.rand(self.batch, *shape, generator=self.generator(name, device), device=device))


# --- Order of the data ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """Which examples a step sees, from its number alone: nothing has to be saved, and a resumed run continues exactly.

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
        found = [_permuted(self.seed, int(e), self.count)[places[epochs == e] % self.count] for e in epochs.unique()]
        return torch.cat(found)


@lru_cache(maxsize=4)
def _permuted(seed: int, epoch: int, count: int) -> Tensor:
    """The order of one epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed(seed, epoch)))
