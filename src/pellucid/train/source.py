"""Where examples come from: a source gives any batch by its indices, and the same one every time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pellucid.train.draws import Draws


@dataclass(frozen=True)
class Batch:
    """Examples of one step, on the device that trains."""

    images: Tensor  # (B, C, H, W) float32 in [−1, 1]; or latents as the diffusion sees them
    labels: Tensor | None = None  # (B,) int64
    captions: tuple[str, ...] | None = None
    hints: Mapping[str, Tensor] = field(default_factory=dict)  # "edges" (B, 1, H, W) in [0, 1], …
    tokens: Tensor | None = None  # (B, L) int64: a window of each caption, where the source has them already


class Source(Protocol):
    """Examples 0 to len − 1. An `endless` source makes its examples, and its indices simply count up.

    A source may have `inventory`: see `inventory_of`."""

    endless: bool

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor, draws: Draws, device: torch.device) -> Batch: ...


def inventory_of(source: Source) -> dict[str, int | str]:
    """What a resumed run has to find again: how many examples, and the marks of what else the source says of them (the
    names and sizes of files, not their contents)."""
    own = getattr(source, "inventory", dict)()
    return {"count": len(source)} | {name: mark(held) for name, held in own.items()}


def mark(held: Any) -> str:
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()[:16]


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How two inventories differ, in words; empty where they do not."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return ", ".join(f"count {then.get(n)} → {now.get(n)}" if n == "count" else f"other {n}" for n in names)
