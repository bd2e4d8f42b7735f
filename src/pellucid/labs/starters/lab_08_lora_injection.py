"""Lab 08: what a LoRA adds. Fill in the three functions, then: pellucid lab 08 --check THIS_FILE

A LoRA of a linear layer has `down` (rank, in), `up` (out, rank) and a number `alpha`. It is applied at a strength.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def merged_weight(weight: Tensor, down: Tensor, up: Tensor, alpha: float, strength: float) -> Tensor:
    """The weight (out, in) of a layer with its LoRA written into it. The given weight must stay as it is."""
    raise NotImplementedError


def beside(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, alpha: float, strength: float) -> Tensor:
    """The layer's output (batch, out) for x (batch, in) with the LoRA kept beside the weight.

    No matrix of the shape (out, in) may be made: x goes down to the rank, then up again.
    """
    raise NotImplementedError


def unmatched(keys: Iterable[str], layers: Iterable[str]) -> list[str]:
    """The keys of a file that fit no layer, in their order.

    A key is a layer's name and one of the endings `.lora_A.weight` and `.lora_B.weight`.
    """
    raise NotImplementedError
