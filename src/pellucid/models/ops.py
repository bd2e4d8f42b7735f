"""The operations that networks are written in. Each has a plain torch form, and a fused form for CUDA.

The plain form runs anywhere, trains, and calls its layers as modules, so that hooks see them. The fused form uses the
kernels of `pellucid.models.kernels` and the epilogues of matrix products; it reads the weights of its layers directly,
keeps feature maps in channels-last order, where tokens are a view of pixels, and adds each bias where the result is
read next. An operation takes the plain form where a hook watches one of its layers. Names: x is the residual stream,
h what is added to it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pellucid.models import quantize
from pellucid.models.kernels import QuantizedRows
from pellucid.models.quantize import Fp8Linear

_DEVICE = "cuda"
_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_LAYERS = frozenset({nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm, Fp8Linear})
_PRODUCTS = frozenset({nn.Linear, nn.Conv2d})
_FEW_PIXELS = 512  # of a batch, up to which a convolution is a matrix product: docs/results/speed.md
_UNWATCHED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # hooks made until it was looked at
_WANTED: ContextVar[bool] = ContextVar("pellucid_fused_operations", default=True)

# --- which form ---------------------------------------------------------------------------------------------------


@contextmanager
def using(*, fused: bool) -> Iterator[None]:
    """Inside, in this thread, operations take their fused form where they can, or never."""
    token = _WANTED.set(fused)
    try:
        yield
    finally:
        _WANTED.reset(token)


def wanted() -> bool:
    """Whether fused forms are taken here where they can be."""
    return _WANTED.get()


@cache
def kernels() -> Any:
    """The module of the fused kernels, or None where it cannot run."""
    try:
        module = importlib.import_module("pellucid.models.kernels")  # needs triton, an optional import
    except ImportError:
        return None
    return module if module.available() else None


def fused(x: Tensor, *layers: nn.Module | None) -> bool:
    """Whether an operation on x with these layers takes its fused form."""
    return (
        x.device.type == _DEVICE
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and x.dtype in _DTYPES
        and wanted()
        and kernels() is not None
        and all(layer is None or _known(layer, x) for layer in layers)
    )


def _known(layer: nn.Module, x: Tensor) -> bool:
    """Whether a layer is what its weights say: no wrapper, nothing that watches it, and no other dtype than x's."""
    kind = type(layer)
    if kind not in _LAYERS or watched(layer):
        return False
    if kind is nn.Conv2d and layer.padding_mode != "zeros":
        return False
    return kind not in _PRODUCTS or layer.weight.dtype == x.dtype


def capturing() -> bool:
    """Whether a CUDA graph is being captured in this thread."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def parts_of(network: nn.Module) -> list[nn.Module]:
    """A network and all that is in it, level by level, as `modules()`, which also names them and takes far longer."""
    found = [network]
    for module in found:  # which grows
        found += [part for part in module._modules.values() if part is not None]
    return found


def weights_of(network: nn.Module) -> list[Tensor]:
    return [weight for part in parts_of(network) for weight in part._parameters.values() if weight is not None]


def watched(module: nn.Module) -> bool:
    """Whether hooks see the calls of this module, not counting those of its parts."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def watched_inside(network: nn.Module) -> bool:
    """Whether hooks see the calls of some part of a network.

    Looked for again only after a hook was made, anywhere: a part that brought one along is not seen.
    """
    made = RemovableHandle.next_id
    if _UNWATCHED.get(network) != made:
        if any(watched(part) for part in parts_of(network)[1:]):
            return True
        _UNWATCHED[network] = made
    return False


# --- pixels -------------------------------------------------------------------------------------------------------


def order(x: Tensor) -> torch.memory_format:
    """The order in memory in which the operations make feature maps from x: fused, with the channels innermost."""
    return torch.channels_last if fused(x) else torch.contiguous_format


def arrange(x: Tensor) -> Tensor:
    """A feature map in the order that fused operations want."""
    return _channels_last(x) if fused(x) else x


def silu(x: Tensor) -> Tensor:
    """SiLU that writes over its input where nobody trains: one activation less at the peak."""
    return F.silu(x, inplace=not torch.is_grad_enabled())


def group_norm(x: Tensor, norm: nn.GroupNorm) -> Tensor:
    return _group_norm(x, norm, silu=False) if fused(x, norm) else norm(x)


def norm_silu(x: Tensor, norm: nn.GroupNorm) -> Tensor:
    """silu(norm(x))"""
    return _group_norm(x, norm, silu=True) if fused(x, norm) else silu(norm(x))


def moments(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of each group of one image's channels, (groups,) each."""
    if fused(x):
        found: tuple[Tensor, Tensor] = kernels().moments(_channels_last(x), groups)
        return found
    grouped = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(groups, -1)
    variance, mean = torch.var_mean(grouped, dim=1, correction=0)
    return mean, variance


def known_norm_silu(x: Tensor, norm: nn.GroupNorm, mean: Tensor, variance: Tensor) -> Tensor:
    """silu(norm(x)), with the statistics (groups,) of another image, such as the one that x is a band of."""
    if fused(x, norm):
        return _group_norm(x, norm, silu=True, known=(mean, variance))
    mean, variance = (part.repeat_interleave(norm.num_channels // norm.num_groups) for part in (mean, variance))
    weight, bias = norm.weight.to(mean.dtype), norm.bias.to(mean.dtype)  # BatchNorm in evaluation
    return silu(F.batch_norm(x, mean, variance, weight, bias, eps=norm.eps))


def conv_norm_silu(
    x: Tensor,
    conv: nn.Conv2d,
    norm: nn.GroupNorm,
    *,
    shift: Tensor | None = None,  # (B, C): added before the norm
    film: tuple[Tensor, Tensor] | None = None,  # scale and offset (B, C): the norm · (1 + scale) + offset
) -> Tensor:
    """silu(norm(conv(x) + shift)), or with `film` silu(norm(conv(x)) · (1 + scale) + offset)."""
    if fused(x, conv, norm):
        x = _without_bias(x, conv)
        return _group_norm(x, norm, silu=True, add=conv.bias, shift=shift, film=film, out=x)
    x = conv(x)  # (B, C, H, W); the name is taken over, so that what came in is freed
    x = norm(x if shift is None else x + shift[:, :, None, None])
    if film is not None:
        scale, offset = (part[:, :, None, None] for part in film)  # (B, C, 1, 1) each
        x = x * (1 + scale) + offset
    return silu(x)


def conv_residual(
    x: Tensor, h: Tensor, conv: nn.Conv2d, *, shortcut: nn.Conv2d | None = None, output_scale: float = 1.0
) -> Tensor:
    """(x + conv(h)) / output_scale; x goes through the 1×1 convolution `shortcut` where the channels differ."""
    if fused(x, conv, shortcut):
        h = _without_bias(h, conv)
        x = x if shortcut is None else pointwise(x, shortcut)
        return kernels().add_bias(_channels_last(x), h, conv.bias, 1.0 / output_scale, out=h)
    h = conv(h)  # the shortcut only now, so that what came in is freed
    return _scaled((x if shortcut is None else shortcut(x)) + h, output_scale)


def pointwise(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """A 1×1 convolution; fused, it is a matrix product, which adds its bias on the way."""
    if fused(x, conv):
        return from_tokens(F.linear(tokens(_channels_last(x)), conv.weight.flatten(1), conv.bias), x)
    return conv(x)


def _group_norm(x: Tensor, norm: nn.GroupNorm, **more: Any) -> Tensor:
    return kernels().group_norm(_channels_last(x), norm.weight, norm.bias, norm.num_groups, norm.eps, **more)


def conv(x: Tensor, layer: nn.Conv2d) -> Tensor:
    """layer(x); fused, the bias is added by a pass of its own, since torch's is slow in channels-last order."""
    if not fused(x, layer):
        return layer(x)
    x = _without_bias(x, layer)  # the name is taken over, so that what came in is freed
    return x if layer.bias is None else kernels().add_bias(x, None, layer.bias, out=x)


def enlarge(x: Tensor, size: torch.Size | None = None) -> Tensor:
    """Twice the size, or the size given, by the nearest pixel."""
    twice = size is None or list(size) == [2 * side for side in x.shape[-2:]]
    if twice and fused(x):
        return kernels().enlarge(_channels_last(x))
    return F.interpolate(x, scale_factor=2.0) if size is None else F.interpolate(x, size=size)


def _without_bias(x: Tensor, conv: nn.Conv2d) -> Tensor:
    x = _channels_last(x)
    if _few_pixels(x, conv):
        h = F.linear(kernels().neighbours(x), conv.weight.permute(0, 2, 3, 1).flatten(1))  # a view of the weight
        return from_tokens(h, x)
    return _channels_last(F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups))


def _few_pixels(x: Tensor, conv: nn.Conv2d) -> bool:
    """Whether a convolution reads so few pixels that it is faster as one matrix product."""
    common = conv.kernel_size == (3, 3) and conv.stride == conv.padding == conv.dilation == (1, 1) and conv.groups == 1
    return (
        common
        and x.shape[0] * x.shape[2] * x.shape[3] <= _FEW_PIXELS
        and conv.weight.is_contiguous(memory_format=torch.channels_last)
    )


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)  # itself, where it is already


def _scaled(x: Tensor, output_scale: float) -> Tensor:
    return x if output_scale == 1.0 else x / output_scale


# --- from pixels to tokens and back -------------------------------------------------------------------------------


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)  # (B, C, H, W) → (B, H·W, C); a contiguous view where x is channels-last


def from_tokens(h: Tensor, like: Tensor) -> Tensor:
    """Tokens (B, H·W, C) as the pixels (B, C, H, W) of a feature map."""
    return h.transpose(1, 2).unflatten(2, like.shape[2:])  # type: ignore[no-untyped-call]


def project_in(x: Tensor, layer: nn.Linear | nn.Conv2d) -> Tensor:
    """Pixels as tokens (B, H·W, C') through a linear layer or a 1×1 convolution."""
    if fused(x, layer):
        return F.linear(tokens(_channels_last(x)), layer.weight.flatten(1), layer.bias)
    return tokens(layer(x)) if layer.weight.ndim == 4 else layer(tokens(x))


def project_out(x: Tensor, h: Tensor, layer: nn.Linear | nn.Conv2d) -> Tensor:
    """x + the tokens h as pixels, through a linear layer or a 1×1 convolution."""
    if fused(x, layer):
        h = F.linear(h, layer.weight.flatten(1))
        return from_tokens(kernels().add_bias(tokens(_channels_last(x)), h, layer.bias, out=h), x)
    if layer.weight.ndim == 4:  # a convolution, or what stands for one
        return x + layer(h.transpose(1, 2).reshape(x.shape))
    return x + layer(h).transpose(1, 2).reshape(x.shape)


def tokens_residual(x: Tensor, h: Tensor, output_scale: float = 1.0) -> Tensor:
    """(x + the tokens h as pixels) / output_scale"""
    if fused(x):
        total = kernels().add_bias(tokens(_channels_last(x)), h, None, 1.0 / output_scale)
        return from_tokens(total, x)
    return _scaled(x + h.transpose(1, 2).reshape(x.shape), output_scale)


# --- tokens -------------------------------------------------------------------------------------------------------


class Update(NamedTuple):
    """What is still to be added to the residual stream: h + bias, or gate · (h + bias)."""

    h: Tensor  # (B, L, D)
    gate: Tensor | None = None  # (B, D)
    bias: Tensor | None = None  # (D,), of the layer that made h


def update_of(module: Any, x: Tensor | QuantizedRows, *told: Any, gate: Tensor | None = None, **more: Any) -> Update:
    """gate · module(x, …), for a module that ends with the linear layer `last`; fused, the reader adds its bias."""
    if isinstance(x, Tensor) and not watched(module) and type(module.last) is nn.Linear and fused(x, module.last):
        return Update(F.linear(module.before_last(x, *told, **more), module.last.weight), gate, module.last.bias)
    return Update(module(x, *told, **more), gate)


def residual(x: Tensor, update: Update | None) -> Tensor:
    """The residual stream after an update; x where there is none."""
    if update is None:
        return x
    h, gate, bias = update
    if gate is None and fused(x):
        summed: Tensor = kernels().add_bias(x, h, bias)
        return summed
    h = h if bias is None else h + bias
    return x + h if gate is None else torch.addcmul(x, gate[:, None], h)


def residual_norm(
    x: Tensor, update: Update | None, norm: nn.LayerNorm, readers: Sequence[nn.Linear] = ()
) -> tuple[Tensor, Tensor | QuantizedRows]:
    """The residual stream after an update, and its layer norm; fused, in fp8 where the layers that read it are."""
    if fused(x, norm):
        return _add_layer_norm(x, update, norm.weight, norm.bias, norm.eps, readers)
    x = residual(x, update)
    return x, norm(x)


def residual_modulate(
    x: Tensor, update: Update | None, shift: Tensor, scale: Tensor, eps: float, readers: Sequence[nn.Linear] = ()
) -> tuple[Tensor, Tensor | QuantizedRows]:
    """The residual stream after an update, and its layer norm with gain and bias from a condition (B, D) each.

    Fused, the norm is in fp8 where the layers that read it are.
    """
    if fused(x):
        return _add_layer_norm(x, update, None, None, eps, readers, scale=scale, shift=shift)
    x = residual(x, update)
    return x, modulate(x, shift[:, None], scale[:, None], eps)


def _add_layer_norm(
    x: Tensor, update: Update | None, weight: Any, bias: Any, eps: float, readers: Sequence[nn.Linear], **more: Any
) -> tuple[Tensor, Tensor | QuantizedRows]:
    h = None
    if update is not None:
        h, more["gate"], more["add"] = update
    if in_fp8(*readers):
        more["fp8"] = True
    summed, normed = kernels().add_layer_norm(x, h, weight, bias, eps, **more)
    return summed, normed


def modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Layer norm whose gain and bias come from the condition: (B, L, D) with shift and scale (B, 1, D)."""
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=eps), 1 + scale)


def linear_gelu(
    x: Tensor | QuantizedRows, layer: nn.Linear, approximate: str, reader: nn.Linear | None = None
) -> Tensor | QuantizedRows:
    """gelu(layer(x)); fused, the product itself takes the tanh form, or in fp8 the rounding for `reader`."""
    if isinstance(x, QuantizedRows) or isinstance(layer, Fp8Linear):
        h = linear(x, layer)
        if approximate == "tanh" and in_fp8(reader) and fused(h):
            rows: QuantizedRows = kernels().quantize(h, gelu=True)
            return rows
        return F.gelu(h, approximate=approximate)
    if approximate == "tanh" and fused(x, layer) and layer.bias is not None:
        h = torch._addmm_activation(layer.bias, x.flatten(0, -2), layer.weight.t(), use_gelu=True)
        return h.reshape(*x.shape[:-1], -1)
    return F.gelu(layer(x), approximate=approximate)


def gated_gelu(x: Tensor | QuantizedRows, layer: nn.Linear, reader: nn.Linear | None = None) -> Tensor | QuantizedRows:
    """a · gelu(g), where a and g are the halves of layer(x); fused, in fp8 where `reader`, which reads it, is."""
    x = linear(x, layer)  # (B, L, 2 · inner); the name is taken over, so that what came in is freed
    if fused(x):
        gated: Tensor | QuantizedRows = kernels().gated_gelu(x, **({"fp8": True} if in_fp8(reader) else {}))
        return gated
    x, gate = x.chunk(2, dim=-1)
    return x * F.gelu(gate)


# --- in fp8 -------------------------------------------------------------------------------------------------------


def linear(x: Tensor | QuantizedRows, layer: nn.Module) -> Tensor:
    """layer(x); where the layer is in fp8, a kernel rounds the rows of x if they are not yet."""
    y: Tensor = layer(_rows_for(x, layer))
    return y


def in_fp8(*layers: nn.Module | None) -> bool:
    """Whether these layers take rows in fp8: all are of that kind, and no hook wants to see what comes in."""
    return len(layers) > 0 and all(isinstance(layer, Fp8Linear) and not watched(layer) for layer in layers)


def _rows_for(x: Tensor | QuantizedRows, *layers: nn.Module) -> Tensor | QuantizedRows:
    """x as the layers read it: rounded once, where all of them are in fp8."""
    if isinstance(x, QuantizedRows) or not in_fp8(*layers):
        return x
    rows: QuantizedRows = kernels().quantize(x) if fused(x) else quantize.quantize_rows(x)
    return rows


def few_keys(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    """Whether an attention is the fused one over few keys, as that on a text is."""
    return (
        fused(q)
        and q.dtype != torch.float32
        and k.shape[2] <= kernels().MOST_KEYS
        and q.shape[3] <= kernels().most_width(q.device)
        and k.shape[0] == q.shape[0]
        and (mask is None or (mask.dtype == torch.bool and mask.shape == (len(q), 1, 1, k.shape[2])))
    )


def attend_few(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q kᵀ / √d) v where `few_keys` says so; the heads of the result lie beside each other in memory."""
    attended: Tensor = kernels().attend_few(q, k, v, mask)
    return attended


def flash_is_wanted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether flash attention is taken where torch would take cuDNN's.

    cuDNN builds a plan for each shape in 50 ms, and compiles a kernel for each kind of shape in half a second or more.
    Where it gains a few microseconds, as on wide heads and few tokens, that would be most of the first image's time.
    """
    tokens, width = max(q.shape[2], k.shape[2]), q.shape[3]
    small = (width > 128 and tokens <= 256) or (width >= 80 and tokens <= 1024 and tokens % 128 != 0)
    if not (small and mask is None and width % 8 == 0 and q.dtype != torch.float32 and fused(q)):
        return False
    return torch.backends.cuda.can_use_flash_attention(torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, False))


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √d) v where `flash_is_wanted`; unlike torch's choice of a kernel, this one is no process's."""
    attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
    return attended


# --- several layers as one product --------------------------------------------------------------------------------


def linears(x: Tensor | QuantizedRows, *layers: nn.Linear) -> Sequence[Tensor]:
    """The layers' results for one x; fused, one product where `pack` has laid their weights one behind another.

    The weights that are there count: of a layer whose weight was replaced, as by LoRA, nothing old is read.
    """
    x = _rows_for(x, *layers)
    whole = _one_product(x, layers)
    if whole is None:
        return [layer(x) for layer in layers]
    return whole.split_with_sizes([layer.out_features for layer in layers], dim=-1)


def beside(x: Tensor, *layers: nn.Linear) -> Tensor:
    """The layers' results for one x as one tensor: (…, all of their features)."""
    whole = _one_product(x, layers)
    return torch.cat([layer(x) for layer in layers], dim=-1) if whole is None else whole


def _one_product(x: Tensor | QuantizedRows, layers: Sequence[nn.Linear]) -> Tensor | None:
    if isinstance(x, QuantizedRows) or fused(x, *layers):
        weight = _as_one([layer.weight for layer in layers])
        bias = _as_one([layer.bias for layer in layers])
        if weight is not None and (bias is not None or all(layer.bias is None for layer in layers)):
            return F.linear(x, weight, bias) if isinstance(x, Tensor) else _product(x, weight, bias, layers)
    return None


def _product(x: QuantizedRows, weight: Tensor, bias: Tensor | None, layers: Sequence[nn.Linear]) -> Tensor:
    """Several fp8 layers, whose weights and scales lie one behind another, as one product."""
    scales = _as_one([layer._parameters["scale"] for layer in layers])
    assert scales is not None, "weights are packed with their scales"
    emulated = any(isinstance(layer, Fp8Linear) and layer.emulated for layer in layers)
    return quantize.product(x, weight, scales, bias, emulated=emulated)


def pack(*layers: nn.Linear) -> None:
    """Gives layers that read the same input new parameters, which are views of one storage.

    To be done where the weights stay: moving or converting them takes them apart again.
    """
    for name in ("weight", "bias", "scale"):
        parts = [layer._parameters.get(name) for layer in layers]
        whole = [part for part in parts if part is not None]
        kinds = {(part.dtype, part.shape[1:]) for part in whole}
        if len(whole) < len(parts) or len(kinds) != 1 or _as_one(whole) is not None:
            continue
        pieces = torch.cat([part.detach() for part in whole]).split_with_sizes([len(part) for part in whole])
        for layer, part, piece in zip(layers, whole, pieces, strict=True):
            layer._parameters[name] = nn.Parameter(piece, requires_grad=part.requires_grad)


def packed(*layers: nn.Linear) -> bool:
    """Whether the weights of these layers lie one behind another."""
    return _as_one([layer.weight for layer in layers]) is not None


def _as_one(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Tensors that lie one behind another in one storage as the one that they make; None where they do not."""
    whole = [part for part in parts if part is not None]
    if len(whole) < len(parts) or not all(part.is_contiguous() for part in whole):
        return None
    for part, following in pairwise(whole):
        if part.untyped_storage().data_ptr() != following.untyped_storage().data_ptr():
            return None
        if part.dtype != following.dtype or part.storage_offset() + part.numel() != following.storage_offset():
            return None
    first = whole[0]
    return first.as_strided((sum(len(part) for part in whole), *first.shape[1:]), first.stride())
