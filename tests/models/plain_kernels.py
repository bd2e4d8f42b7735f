"""The fused kernels as plain torch functions, strict about layouts; every call is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import plain_update
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pellucid.core.noise import PATH, gaussian
from pellucid.core.table import COLUMNS
from pellucid.models import ops
from pellucid.models.kernels import QuantizedRows
from pellucid.models.quantize import quantize_rows


class PlainKernels:
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def group_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        groups: int,
        eps: float,
        *,
        silu: bool,
        add: Tensor | None = None,
        shift: Tensor | None = None,
        film: tuple[Tensor, Tensor] | None = None,
        known: tuple[Tensor, Tensor] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        self.calls["group_norm"] += 1
        assert x.is_contiguous(memory_format=torch.channels_last)
        wide = x.float()
        wide = wide if add is None else wide + add[:, None, None]
        wide = wide if shift is None else wide + shift[:, :, None, None]
        if known is None:
            y = F.group_norm(wide, groups, weight.float(), bias.float(), eps)
        else:
            mean, variance = (part.repeat_interleave(x.shape[1] // groups) for part in known)
            y = F.batch_norm(wide, mean, variance, weight.float(), bias.float(), eps=eps)
        if film is not None:
            assert film[0].stride() == film[1].stride()
            y = y * (1 + film[0][:, :, None, None]) + film[1][:, :, None, None]
        y = (F.silu(y) if silu else y).to(x.dtype).contiguous(memory_format=torch.channels_last)
        if out is None:
            return y
        assert out is x
        with _disable_current_modes():
            return out.copy_(y)

    def moments(self, x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        self.calls["moments"] += 1
        variance, mean = torch.var_mean(x.float().reshape(groups, -1), dim=1, correction=0)
        return mean, variance

    def add_bias(
        self, x: Tensor, h: Tensor | None, bias: Tensor | None = None, scale: float = 1.0, *, out: Tensor | None = None
    ) -> Tensor:
        self.calls["add_bias"] += 1
        last = torch.channels_last if x.ndim == 4 else torch.contiguous_format
        assert x.is_contiguous(memory_format=last)
        total = x.float()
        if h is not None:
            assert x.shape == h.shape
            assert h.is_contiguous(memory_format=last)
            total = total + h.float()
        if bias is not None:
            total = total + (bias[:, None, None] if x.ndim == 4 else bias)
        made = (total * scale).to(x.dtype)
        if out is None:
            return made
        assert out is x or out is h
        with _disable_current_modes():
            return out.copy_(made)

    def add_layer_norm(
        self,
        x: Tensor,
        h: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        *,
        add: Tensor | None = None,
        gate: Tensor | None = None,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        fp8: bool = False,
    ) -> tuple[Tensor, Tensor | QuantizedRows]:
        self.calls["add_layer_norm fp8" if fp8 else "add_layer_norm"] += 1
        assert x.is_contiguous()
        assert h is None or h.is_contiguous()
        assert (scale is None) == (shift is None)
        if h is not None:
            h = h.float() if add is None else h.float() + add
            x = (x.float() + (h if gate is None else gate[:, None] * h)).to(x.dtype)
        y = F.layer_norm(x.float(), x.shape[-1:], _wide(weight), _wide(bias), eps)
        if scale is not None and shift is not None:
            assert scale.stride() == shift.stride()
            y = y * (1 + scale[:, None]) + shift[:, None]
        return x, quantize_rows(y.to(x.dtype)) if fp8 else y.to(x.dtype)

    def gated_gelu(self, p: Tensor, *, fp8: bool = False) -> Tensor | QuantizedRows:
        self.calls["gated_gelu"] += 1
        a, gate = p.chunk(2, dim=-1)
        return quantize_rows(a * F.gelu(gate)) if fp8 else a * F.gelu(gate)

    def quantize(self, x: Tensor, *, gelu: bool = False) -> QuantizedRows:
        self.calls["quantize"] += 1
        return quantize_rows(F.gelu(x, approximate="tanh") if gelu else x)

    MOST_KEYS = 128

    def most_width(self, device: torch.device) -> int:
        return 160

    def enlarge(self, x: Tensor) -> Tensor:
        self.calls["enlarge"] += 1
        assert x.is_contiguous(memory_format=torch.channels_last)
        return F.interpolate(x, scale_factor=2.0).contiguous(memory_format=torch.channels_last)

    def neighbours(self, x: Tensor) -> Tensor:
        self.calls["neighbours"] += 1
        with _disable_current_modes():  # the copies are this kernel's own work
            columns = F.unfold(x, 3, padding=1).unflatten(1, (x.shape[1], 9))  # (B, C, 9, H·W)
            return columns.permute(0, 3, 2, 1).flatten(2)

    def normals(self, seeds: Tensor, draws: Tensor, weights: Tensor, n: int, out: Tensor) -> None:
        self.calls["normals"] += 1
        for i, seed in enumerate(seeds.tolist()):
            numbers = torch.zeros(n)
            for (interval, visit), weight in zip(draws[i].tolist(), weights[i].tolist(), strict=True):
                if weight:
                    numbers += weight * gaussian(seed % 2**64, (n,), (interval, visit, PATH), numbers)
            out[i] = numbers.reshape(out[i].shape)

    def scaled_input(self, x: Tensor, table: Tensor, cursor: Tensor, call_slot: Tensor, dtype: torch.dtype) -> Tensor:
        self.calls["scaled_input"] += 1
        scale = table[torch.arange(len(x)), cursor.clamp_max(table.shape[1] - 1), COLUMNS["in_scale"]]
        return (x * scale[:, None, None, None])[call_slot].to(dtype).contiguous(memory_format=torch.channels_last)

    def update_rows(
        self, table: Tensor, cursor: Tensor, active: Tensor, *registers: Any, x0_out: Tensor | None = None
    ) -> None:
        self.calls["update_rows"] += 1
        *state, z, cond, cond_at, uncond_at = registers
        flat = [register.flatten(1) for register in (*state, z)]
        made = plain_update(table, cursor, active, *flat, cond, cond_at, uncond_at)
        for register, value in zip((*state, x0_out), made, strict=True):
            on = active.reshape(-1, *([1] * (register.ndim - 1)))
            register.copy_(torch.where(on, value.to(register).reshape(register.shape), register))

    def attend_few(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        self.calls["attend_few"] += 1
        with _disable_current_modes():
            return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).contiguous().transpose(1, 2)


def _wide(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.float()


@contextmanager
def fused_on_cpu() -> Iterator[PlainKernels]:
    """Inside, operations on the CPU take their fused form, over these kernels."""
    kernels = PlainKernels()

    def product_gelu(bias: Tensor, x: Tensor, weight: Tensor, *, use_gelu: bool) -> Tensor:
        kernels.calls["product_gelu"] += 1
        return F.gelu(torch.addmm(bias, x, weight), approximate="tanh" if use_gelu else "none")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_DEVICE", "cpu")
        patch.setattr(ops, "kernels", lambda: kernels)
        patch.setattr(torch, "_addmm_activation", product_gelu)  # a CPU's takes the other GELU
        yield kernels
