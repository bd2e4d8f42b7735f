"""Random numbers addressed by (seed, index, slot), in whole-number arithmetic that every device does alike."""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9


def mix(x: Tensor) -> Tensor:
    """A 32-bit hash in int64 lanes. Both factors are below 2³¹, so that no product overflows.

    The rounds are those of C. Wellons' hash prospector (0x21f0aaad, 0x735a2d97).
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK
    return x ^ (x >> 15)


def words(indices: Tensor, seed: int, slots: int, stream: int = 0) -> Tensor:
    """(N, slots) int64 below 2³², of indices (N,) int64 not negative. Each stream is its own set of numbers."""
    seed = (seed ^ (seed >> 64)) & (2**64 - 1)
    keys = torch.tensor([seed & MASK, seed >> 32, stream & MASK], dtype=torch.int64, device=indices.device)
    low, high = indices & MASK, indices >> 32
    first = mix(mix(mix(low ^ mix(keys[0])) + high & MASK) ^ mix(keys[1] + GOLDEN & MASK))
    second = mix(mix(mix(low + GOLDEN & MASK) ^ mix(keys[1] ^ GOLDEN)) + mix(keys[0] + high & MASK) & MASK)
    address = (torch.arange(1, slots + 1, device=indices.device) * GOLDEN + mix(keys[2])) & MASK
    return mix(mix(first[:, None] ^ address) + second[:, None] & MASK)


def uniform(indices: Tensor, seed: int, slots: int, stream: int = 0) -> Tensor:
    """(N, slots) float64 in [0, 1): 24 bits, exact in float32 too."""
    return (words(indices, seed, slots, stream) >> 8).double() * 2.0**-24
