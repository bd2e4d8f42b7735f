"""A right answer to lab 08."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def merged_weight(weight: Tensor, down: Tensor, up: Tensor, alpha: float, strength: float) -> Tensor:
    rank = down.shape[0]
    return weight + strength * alpha / rank * (up @ down)


def beside(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, alpha: float, strength: float) -> Tensor:
    factor = strength * alpha / down.shape[0]
    return x @ weight.T + factor * (x @ down.T) @ up.T


def unmatched(keys: Iterable[str], layers: Iterable[str]) -> list[str]:
    known = {layer + ending for layer in layers for ending in (".lora_A.weight", ".lora_B.weight")}
    return [key for key in keys if key not in known]
