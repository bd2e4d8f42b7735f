"""Ghosts: networks whose weights have shapes and no data, so that a whole run can be rehearsed in no memory.

A ghost computes on torch's `meta` device. What reads numbers back from it, such as a check for NaN, reads zeros. With
offload, its weights wait as CPU tensors of stride 0, which take no memory either, and come to `meta` as real ones come
to a GPU: the rehearsal runs the pipeline's own code, offload included.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pellucid.models.lora import view
from pellucid.pipeline.tracker import Tracker

M = TypeVar("M", bound=nn.Module)
META = torch.device("meta")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")


def ghost(network: M, *, waits: bool = False, dtype: torch.dtype | None = None) -> M:
    """A copy of a network without data: on `meta`, or waiting on the CPU for offload to bring it there."""
    twin = view(network, {})
    seen: dict[int, Tensor] = {}
    for module in twin.modules():
        for name in HOOKS:
            setattr(module, name, OrderedDict())
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is not None:
                    registry[name] = seen.setdefault(id(tensor), shadow(tensor, waits, dtype))  # type: ignore
    return twin


def shadow(tensor: Tensor, waits: bool, dtype: torch.dtype | None) -> Tensor:
    """A tensor's shape, dtype and memory format."""
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    made = torch.zeros((), dtype=kind).expand(tensor.shape) if waits else torch.empty_like(tensor, dtype=kind, device=META)
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


class Rehearsal(Tracker):
    """A tracker under which ghosts run: zeros for who reads their numbers."""

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        aten = torch.ops.aten
        ghostly = any(isinstance(arg, Tensor) and arg.is_meta for arg in args)
        if ghostly and func is aten._local_scalar_dense.default:
            return 0
        if ghostly and func is aten._to_copy.default and kwargs.get("device", META).type != "meta":
            kind = kwargs.get("dtype") or args[0].dtype
            return torch.zeros((), dtype=kind).expand(args[0].shape)  # no memory
        return func(*args, **kwargs)


class Fused(TorchFunctionMode):
    """On `meta` torch takes attention apart and would hold its whole map; the fused kernels hold the result alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            return attended(args[0], args[2])
        return func(*args, **kwargs)


def attended(q: Tensor, v: Tensor) -> Tensor:
    """(B, H, L, D) in the memory order of the fused kernels, (B, L, H, D), so that joining the heads is a view."""
    batch, heads, length, _ = q.shape
    return q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
