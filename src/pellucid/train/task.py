"""What a run trains: a network, what it is asked, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from pellucid.train.draws import Draws
from pellucid.train.objective import Graded
from pellucid.train.source import Batch


class Task(Protocol):
    """`network` is what is trained: its parameters with requires_grad. All chance is in `prepare`, so that `loss` is a
    function of tensors alone, which can be compiled and captured; the network given to it may be wrapped (DDP,
    compiled), or hold running means.

    A task may have `frozen`, the networks that it holds beside the trained one, and `gathered`, the widths of
    the float32 embeddings that its loss gathers from all ranks, by name: `--explain` counts them."""

    network: nn.Module

    def prepare(self, batch: Batch, draws: Draws) -> dict[str, Tensor]: ...

    def loss(self, network: nn.Module, asked: Mapping[str, Tensor]) -> Graded: ...

    def images(self, network: nn.Module, count: int, seed: int) -> Tensor | None:
        """(N, 3, H, W) in [0, 1]: what the network can do by now."""
        ...

    def save(self, network: nn.Module, folder: Path) -> None:
        """In the form that `pellucid.load` reads, or `load_component` where it is but a part."""
        ...
