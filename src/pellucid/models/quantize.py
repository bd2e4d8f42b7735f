"""Large linear layers in e4m3: which they are, how numbers are rounded, and the matrix product.

A weight has a scale per output row, an input a scale per token (its largest magnitude over 448), both float32. The
first and last layers, times, modulations, convolutions, and the keys and values of a text, which are made once a
prompt, stay in bfloat16.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.models.kernels import E4M3, QuantizedRows

FP8 = "fp8"  # a dtype for `load`: e4m3 in the large linear layers of the denoising network, bfloat16 elsewhere
REST = torch.bfloat16
LEAST = 256  # features on either side: below, quantising the input costs what the product saves
STEP = 16  # what the product wants features to be a multiple of
LARGEST = 448.0  # of e4m3
_NO_ROW = 1e-12  # a row of zeros keeps a finite scale
_LAYERS = re.compile(
    r"(^|\.)(transformer_blocks\.\d+\.(attn\d\.(to_[qkv]|to_out\.0)|ff\.net\.(0\.proj|2))"
    r"|attentions\.\d+\.(to_[qkv]|to_out\.0))$"
)
_SEED = 0xE4A3  # of the rounding of sums
_NATIVE = (8, 9)  # the compute capability of the first GPUs that multiply e4m3


class Fp8Linear(nn.Linear):
    """A linear layer with an e4m3 weight (out, in); its input becomes QuantizedRows, its output is bfloat16."""

    scale: nn.Parameter  # (out,) float32; a parameter, so that whatever holds or compares weights counts it

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        values, scale = quantize_rows(layer.weight.detach())
        self.weight = nn.Parameter(values, requires_grad=False)
        self.scale = nn.Parameter(scale.flatten(), requires_grad=False)
        self.register_parameter("bias", layer.bias)
        self.emulated = False  # even where the device could multiply e4m3

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        rows = x if isinstance(x, QuantizedRows) else quantize_rows(x)
        return product(rows, self.weight, self.scale, self.bias, emulated=self.emulated)

    def wide(self) -> Tensor:
        """The weight in float32."""
        return self.weight.detach().float() * self.scale[:, None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves as every module does; another dtype is for the bias alone."""
        values, scale = self.weight.detach(), self.scale.detach()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight.dtype != E4M3:
            self.weight = nn.Parameter(values.to(self.weight.device), requires_grad=False)
        if self.scale.dtype != torch.float32:
            self.scale = nn.Parameter(scale.to(self.scale.device), requires_grad=False)
        return self


# --- numbers ------------------------------------------------------------------------------------------------------


def quantize_rows(x: Tensor) -> QuantizedRows:
    """Rows of (…, C) in e4m3, each divided by its largest magnitude over 448: what `kernels.quantize` computes."""
    if x.requires_grad and torch.is_grad_enabled():
        advice = "Load the model with dtype='bfloat16' or 'float32'."
        raise PellucidError(rule("dtype", "another one where gradients are needed", FP8, advice), "dtype")
    most = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True, dtype=torch.float32).clamp_min(_NO_ROW)
    values = (x * (LARGEST / most)).to(E4M3)
    return QuantizedRows(values, (most / LARGEST).reshape(-1, 1))


def dithered(weight: Tensor) -> dict[str, Tensor]:
    """A float32 weight as the tensors of an `Fp8Linear`, with each number rounded up or down at random.

    For sums of numbers on the grid of e4m3 and small differences, such as LoRA's: rounding to the nearest would lose
    what is below half a step; this keeps it in the mean. The draw is the same every time.
    """
    values, scale = quantize_rows(weight)
    exact, near = weight / scale, values.float()
    code, further = values.view(torch.int8) & 0x7F, exact.abs() > near.abs()
    code = torch.where(further, code + 1, code - 1).clamp(0, 0x7E)  # the neighbour on the other side: one code away
    other = torch.copysign(code.view(E4M3).float(), exact)
    chance = ((exact - near) / torch.where(other == near, 1.0, other - near)).clamp(0, 1)
    draw = torch.rand(weight.shape, device=weight.device, generator=torch.Generator(weight.device).manual_seed(_SEED))
    return {"weight": torch.where(draw < chance, other, near).to(E4M3), "scale": scale.flatten()}


def product(
    rows: QuantizedRows, weight: Tensor, scale: Tensor, bias: Tensor | None, *, emulated: bool = False
) -> Tensor:
    """rows · weightᵀ + bias in bfloat16, (…, out): one kernel where the device has it, else float32 products."""
    a = rows.values.flatten(0, -2)  # (M, K)
    if not emulated and native(a.device):
        y = torch._scaled_mm(
            a, weight.t(), scale_a=rows.scale, scale_b=scale[None], bias=bias, out_dtype=REST, use_fast_accum=True
        )
    else:
        wide = F.linear(a.float(), weight.float()).mul_(rows.scale).mul_(scale)
        y = (wide if bias is None else wide.add_(bias)).to(REST)
    return y.reshape(*rows.values.shape[:-1], -1)


def native(device: torch.device) -> bool:
    """Whether a device multiplies e4m3; `meta` stands for one that does."""
    return device.type == "meta" or (device.type == "cuda" and _capable(device.index))


@cache
def _capable(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= _NATIVE


# --- networks -----------------------------------------------------------------------------------------------------


def quantize(network: nn.Module, least: int | None = None) -> int:
    """Puts an `Fp8Linear` in the place of every large linear layer, one after another; says how many they are."""
    count = 0
    for name, layer in list(network.named_modules()):
        if _LAYERS.search(name) and type(layer) is nn.Linear and _is_large(layer, LEAST if least is None else least):
            parent, _, own = name.rpartition(".")
            holder = network.get_submodule(parent)
            if own in ("to_k", "to_v") and getattr(holder, "crossed", False):
                continue  # of a text
            holder._modules[own] = Fp8Linear(layer)
            count += 1
    return count


def _is_large(layer: nn.Linear, least: int) -> bool:
    sizes = layer.in_features, layer.out_features
    return min(sizes) >= least and not any(size % STEP for size in sizes)


def is_quantized(network: nn.Module) -> bool:
    return any(isinstance(module, Fp8Linear) for module in network.modules())


def dtype_name(network: nn.Module) -> str:
    """The dtype of a network in a word: that of its first weight, or fp8."""
    return FP8 if is_quantized(network) else str(next(network.parameters()).dtype).removeprefix("torch.")
