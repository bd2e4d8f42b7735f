"""What this CPU computes faster, by measuring it: bfloat16, and channels innermost. A processor's name says neither."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_FASTER = 1.3  # times; less is noise here, and little of a whole network, which does more than convolve
_HOPELESS = 3.0  # times slower in a first, small convolution: the larger ones would take seconds
_ROUNDS = 5


@dataclass(frozen=True)
class CPUSpeed:
    """Gains in speed, as ratios of times: above 1 is faster."""

    bfloat16: float  # over float32: the lesser gain of a block of a UNet and of a matrix product
    channels_last: float  # over contiguous, of the block in bfloat16

    @property
    def dtype(self) -> torch.dtype:
        """What networks run in where nobody asks for a dtype of their own."""
        return torch.bfloat16 if self.bfloat16 > _FASTER else torch.float32

    @property
    def prefers_channels_last(self) -> bool:
        return self.channels_last > _FASTER


@cache
def measure() -> CPUSpeed:
    """Times one block (convolution, norm, SiLU) and one matrix product, once in a process: some 0.2 s."""
    with torch.no_grad():
        plain, half = torch.float32, torch.bfloat16
        first = _fastest([_block(16, 8, plain), _block(16, 8, half)])
        if first[1] > _HOPELESS * first[0]:
            return CPUSpeed(first[0] / first[1], 1.0)
        full, block, last = _fastest([_block(128, 32, plain), _block(128, 32, half), _block(128, 32, half, last=True)])
        product, half_product = _fastest([_product(plain), _product(half)])
    return CPUSpeed(min(full / min(block, last), product / half_product), block / last)


def _block(channels: int, side: int, dtype: torch.dtype, last: bool = False) -> Callable[[], Tensor]:
    """What a UNet does most with pixels, for two images."""
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.zeros(2, channels, side, side, dtype=dtype).contiguous(memory_format=layout)
    weight = torch.zeros(channels, channels, 3, 3, dtype=dtype).contiguous(memory_format=layout)
    return lambda: F.silu(F.group_norm(F.conv2d(x, weight, padding=1), 8))


def _product(dtype: torch.dtype) -> Callable[[], Tensor]:
    x, weight = torch.zeros(1024, 320, dtype=dtype), torch.zeros(1280, 320, dtype=dtype)
    return lambda: F.linear(x, weight)


def _fastest(calls: list[Callable[[], Tensor]]) -> list[float]:
    """Seconds of the fastest call of each, in turns: others on the machine only add."""
    took = [float("inf")] * len(calls)
    for call in calls:
        call()  # the kernel is chosen
    for _ in range(_ROUNDS):
        for k, call in enumerate(calls):
            began = time.perf_counter()
            call()
            took[k] = min(took[k], time.perf_counter() - began)
    return took
