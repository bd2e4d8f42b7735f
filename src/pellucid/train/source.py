"""Where examples come from: a source gives any batch by its indices, and the same one every time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

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
    """Examples 0 to len − 1. An `endless` source makes its examples, and its indices simply count up."""

    endless: bool

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor, draws: Draws, device: torch.device) -> Batch: ...
