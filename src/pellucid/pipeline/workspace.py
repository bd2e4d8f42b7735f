"""What a GPU's kernels borrow beside the tensors: convolutions' copies, and the matrix library's standing buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pellucid.pipeline.tracker import Scratch

GRAIN = 512  # bytes: the caching allocator rounds every tensor up to a multiple
MIB = 2**20
BLAS_HOPPER, BLAS_OLDER = 32 * MIB, 8 * MIB + 128 * 1024  # torch's default workspace of cuBLAS, by generation
HOPPER = 9


def scratch(channels_last: bool) -> Scratch:
    """The bytes that one operation borrows on a GPU."""

    def borrowed(func: Any, args: tuple[Any, ...], out: Any) -> int:
        if func is not torch.ops.aten.convolution.default or channels_last:
            return 0
        # cuDNN's tensor-core kernels want the channels innermost: it copies input, weights and result into that order.
        return sum(size_of(tensor) for tensor in (args[0], args[1], out))

    return borrowed


def size_of(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // GRAIN) * GRAIN


def standing(device: torch.device | str) -> int:
    """What is allocated once, with the first matrix product, and stays."""
    where = torch.device(device)
    if where.type != "cuda":
        return 0
    if not torch.cuda.is_available():
        return BLAS_HOPPER
    return BLAS_HOPPER if torch.cuda.get_device_capability(where)[0] >= HOPPER else BLAS_OLDER
