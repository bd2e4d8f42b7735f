"""Ghosts: networks whose weights have shapes and no data, so that a whole run can be rehearsed in no memory.

A ghost computes on torch's `meta` device. Code that reads its numbers, such as a check for NaN, reads zeros. With
offload its weights wait as CPU tensors of stride 0, which take no memory either, and come to `meta` as real ones come
to a GPU: a rehearsal runs the pipeline's own code, offload included.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pellucid.interop.components import Components
from pellucid.models.lora import view
from pellucid.models.quantize import Fp8Linear
from pellucid.models.vae import FoldedUpsample
from pellucid.pipeline.model import map_networks
from pellucid.pipeline.stages import HOOKS
from pellucid.pipeline.tracker import Tracker

_M = TypeVar("_M", bound=nn.Module)
META = torch.device("meta")
_WIDEST_HEAD = 128  # above it the memory-efficient kernel sums into a float32 buffer of its own


class Shadows:
    """Makes ghosts that share what their networks share, of networks for a device ("cuda" or "cpu").

    With `waits` they wait on the CPU for offload to bring them to `meta`.
    """

    def __init__(self, device: str, *, waits: bool = False, dtype: torch.dtype | None = None) -> None:
        self.device, self.waits, self.dtype = device, waits, dtype
        self.made: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of a tensor, which is kept so that the id is its

    def ghost(self, network: _M) -> _M:
        """A copy of a network without data and without hooks."""
        twin = view(network, {})
        for module in twin.modules():
            for name in HOOKS:
                setattr(module, name, OrderedDict())
            if self.device == "cpu" and isinstance(module, FoldedUpsample):
                # what it does there; it cannot know that `meta` means the CPU
                module.forward = module.folded  # type: ignore[method-assign, assignment]
            if isinstance(module, Fp8Linear):
                module.emulated = module.emulated or self.device == "cpu"
            for registry in (module._parameters, module._buffers):
                for name, tensor in registry.items():
                    if tensor is not None:
                        registry[name] = self.shadow(tensor)  # type: ignore[assignment]
        return twin

    def of(self, parts: Components) -> Components:
        """The components of a model with ghosts for all their networks."""
        return map_networks(parts, self.ghost)

    def shadow(self, tensor: Tensor) -> Tensor:
        """A tensor's shape, dtype and memory format."""
        if id(tensor) not in self.made:
            floats = tensor.is_floating_point() and tensor.itemsize > 1  # what is quantised stays so
            kind = self.dtype if self.dtype is not None and floats else tensor.dtype
            if self.waits:
                made = torch.zeros((), dtype=kind).expand(tensor.shape)
            else:
                made = torch.empty_like(tensor, dtype=kind, device=META)
            made = nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made
            self.made[id(tensor)] = tensor, made
        return self.made[id(tensor)][1]


class Rehearsal(Tracker):  # type: ignore[no-untyped-call]
    """A tracker under which ghosts run: zeros where their numbers are read."""

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        aten = torch.ops.aten
        if any(isinstance(arg, Tensor) and arg.is_meta for arg in args):
            if func is aten._local_scalar_dense.default:
                return 0
            if func is aten._to_copy.default and (kwargs.get("device") or META).type != "meta":
                kind = kwargs.get("dtype") or args[0].dtype
                return torch.zeros((), dtype=kind).expand(args[0].shape)
        return func(*args, **kwargs)


class Kernels(TorchFunctionMode):
    """Functions that `meta` computes in other steps than the device whose memory is predicted."""

    def __init__(self, device: str, attention: str) -> None:
        super().__init__()
        self.device, self.attention = device, attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and args[0].is_meta and self.attention != "math":
            return self.attend(args[0], args[2])
        if func is F.group_norm and args[0].is_meta and self.device == "cpu":
            return torch.empty_like(args[0])  # `meta` first makes it contiguous, as a GPU does
        return func(*args, **(kwargs or {}))

    def attend(self, q: Tensor, v: Tensor) -> Tensor:
        """(B, H, L, D) of a fused kernel: no map is held. It lies as (B, L, H, D), so joining the heads is a view."""
        batch, heads, length, _ = q.shape
        shape = (batch, length, heads, v.shape[-1])
        out = q.new_empty(shape)
        if self.device == "cuda" and v.shape[-1] > _WIDEST_HEAD and q.dtype != torch.float32:
            q.new_empty(shape, dtype=torch.float32)
        return out.transpose(1, 2)
