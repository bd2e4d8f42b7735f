"""What captured graphs keep from run to run: registers, the inputs they read, and the pool of their activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pellucid.models import inputs as trees
from pellucid.models.captured import StepGraphs

_KNOWN: WeakKeyDictionary[StepGraphs, tuple[tuple[int, ...], tuple[int, int]]] = WeakKeyDictionary()


class GraphMemory(NamedTuple):
    """Bytes that stay on the device between runs. `idle` is what torch does not count as allocated: it is reserved."""

    graphs: int = 0  # how many are captured
    registers: int = 0  # with the inputs of the network's calls, text keys and values among them
    pool: int = 0  # that all graphs share: as large as the activations of the largest call
    idle: int = 0  # of the pool

    @property
    def total(self) -> int:
        return self.registers + self.pool


def held(graphs: StepGraphs) -> GraphMemory:
    """What the graphs of a model keep while none of them runs."""
    with graphs.lock:
        free = [(one, list(one.programs.values())) for one in graphs.free]
        pools = [capture.pool for capture in graphs.captures.values()]
    owners = [owner for one, programs in free for owner in (one, *programs)]
    storages = {held.untyped_storage()._cdata: held.untyped_storage() for held in _fixed(owners)}
    captured = tuple(id(p.graph) for _, programs in free for p in programs if p.graph is not None)
    known = _KNOWN.get(graphs)
    if known is None or known[0] != captured:  # to ask torch takes milliseconds, and only a capture changes the pool
        known = _KNOWN[graphs] = captured, _pool_bytes(pools)
    return GraphMemory(len(captured), sum(storage.nbytes() for storage in storages.values()), *known[1])


def bytes_of(tree: Any) -> int:
    """Of all tensors in a tree of inputs."""
    sizes: list[int] = []
    trees.over(lambda _, leaf: sizes.append(leaf.untyped_storage().nbytes()), "inputs", tree)
    return sum(sizes)


def _fixed(owners: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors that stay where they are, of registers and of their programs."""
    for owner in owners:
        for name, value in vars(owner).items():
            if name == "output":  # lies in the pool
                continue
            found: list[Tensor] = []
            if isinstance(value, Tensor):
                found.append(value)
            elif name in ("history", "whose", "inputs"):
                trees.over(lambda _, leaf, to=found: to.append(leaf), "inputs", value)
            yield from found


def _pool_bytes(pools: Sequence[Any]) -> tuple[int, int]:
    """(reserved, of it not allocated) bytes of the memory pools that graphs share."""
    if not pools:
        return 0, 0
    snapshot, own = torch.cuda.memory_snapshot(), {tuple(pool) for pool in pools}  # type: ignore[no-untyped-call]
    segments = [segment for segment in snapshot if tuple(segment.get("segment_pool_id", ())) in own]
    reserved = sum(segment["total_size"] for segment in segments)
    return reserved, reserved - sum(segment["allocated_size"] for segment in segments)
