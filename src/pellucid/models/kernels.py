"""Fused kernels for CUDA: what each computes, and how it is launched. Their code is in `triton_kernels`.

Triton is optional and is imported by the first launch. Accumulation is in float32, a result has the dtype of x, and
nothing here has a gradient. Block sizes follow from the shape by fixed rules: no tuning before the first image.
"""

from __future__ import annotations

import functools
import math
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pellucid.core.noise import PATH

E4M3 = torch.float8_e4m3fn
_VECTOR = 8  # channels in one load of 16 bytes, at 16 bits each
_PROGRAMS = 264  # of a norm's pass: two for each of an H200's 132 multiprocessors
_WHOLE = 32768  # padded elements of a group that one program holds in registers
_TILE = 4096  # padded elements of a tile that is streamed; the sizes here are those that were fastest on an H200
MOST_KEYS = 128  # that `attend_few` holds at once


class QuantizedRows(NamedTuple):
    """Rows in e4m3 with a float32 scale each: x ≈ values · scale."""

    values: Tensor  # (…, C) float8_e4m3fn
    scale: Tensor  # (rows, 1)


class NormTiles(NamedTuple):
    """How a GroupNorm is cut into programs. `chunk` 0: one program holds a group of an image in registers."""

    chunk: int  # pixels
    rows: int  # of a tile
    lanes: int  # channels of a tile, padded
    per_program: int  # groups
    warps: int


class Tiles(NamedTuple):
    """How a kernel over rows of channels is cut: rows and padded channels of a tile."""

    rows: int
    lanes: int
    warps: int


@functools.cache
def available() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


@functools.cache
def _code() -> Any:
    from pellucid.models import triton_kernels

    return triton_kernels


def _padded(n: int) -> int:
    """The power of two that holds n."""
    return 1 << (n - 1).bit_length()


def _cut(n: int, size: int) -> int:
    return -(-n // size)


def whole_rows(total: int, channels: int, fp8: bool = False) -> Tiles:
    """Tiles of whole rows, for what is computed over a row; in fp8 one row, whose largest number few threads find."""
    lanes = _padded(channels)
    if fp8:
        return Tiles(1, lanes, max(1, lanes // 2048))
    if lanes == 2048 and total >= 2048:
        return Tiles(4, lanes, 4)  # which share the weights that they read
    rows = max(1, 2048 // lanes)
    return Tiles(rows, lanes, 2 if lanes <= 512 else min(16, rows * lanes // 512))


def parts_of_rows(channels: int, tile: int = _TILE) -> Tiles:
    """Tiles of any part of the rows; as wide as wastes no more lanes than a narrow one."""
    lanes = min((512, 256, 128, 64), key=lambda n: _cut(channels, n) * n)
    return Tiles(tile // lanes, lanes, 4)


def _lanes_of_groups(width: int, groups: int) -> tuple[int, int]:
    """(lanes, groups) of a tile of whole groups: few idle lanes, and vector loads where the width allows them."""
    step = _VECTOR // math.gcd(_VECTOR, width)

    def within(lanes: int) -> int:
        most = min(lanes // width, groups, 32)
        return most // step * step or most

    lanes = min((128, 256, _padded(width)), key=lambda n: _cut(groups, within(n)) * n if n >= width else math.inf)
    return lanes, within(lanes)


def norm_tiles(images: int, pixels: int, width: int, groups: int) -> NormTiles:
    """The programs of a GroupNorm of (images, groups · width, pixels)."""
    rows, lanes = _padded(pixels), _padded(width)
    if rows * lanes <= _WHOLE:
        return NormTiles(0, rows, lanes, 1, min(16, max(1, rows * lanes // 1024)))
    return streamed_tiles(images, pixels, width, groups)


def streamed_tiles(images: int, pixels: int, width: int, groups: int) -> NormTiles:
    """The same, for two passes over chunks of pixels."""
    lanes, per_program = _lanes_of_groups(width, groups)
    tile, warps = (_TILE, 4) if pixels <= 4096 else (2 * _TILE, 8)
    rows = max(1, tile // lanes)
    programs = _PROGRAMS if images <= 4 else 2 * _PROGRAMS
    parts = max(1, programs // (images * _cut(groups, per_program)))
    return NormTiles(_cut(_cut(pixels, parts), rows) * rows, rows, lanes, per_program, warps)


class _Streamed(NamedTuple):
    """What the two passes of a streamed GroupNorm are launched with."""

    grid: tuple[int, int, int]
    sizes: tuple[int, ...]
    shape: dict[str, int]
    partials: Tensor  # (2, B, chunks, groups): mean and sum of squared deviations

    @staticmethod
    def of(x: Tensor, groups: int, tiles: NormTiles) -> _Streamed:
        images, channels, height, across = x.shape
        pixels, width = height * across, channels // groups
        parts, block = _cut(pixels, tiles.chunk), tiles.per_program * width
        vector = math.gcd(math.gcd(block, channels), _VECTOR)
        return _Streamed(
            (_cut(groups, tiles.per_program), parts, images),
            (pixels, channels // vector, width, groups, tiles.per_program, block // vector, tiles.chunk),
            {
                "ROWS": tiles.rows, "LANES": tiles.lanes, "GROUPS": max(8, _padded(tiles.per_program)), "V": vector,
                "num_warps": tiles.warps,
            },
            torch.empty(2, images, parts, groups, device=x.device, dtype=torch.float32),
        )  # fmt: skip

    @property
    def counts(self) -> Tensor:
        """(chunks, 1): the numbers of each group in each chunk."""
        pixels, _, width, *_, chunk = self.sizes
        first = torch.arange(0, pixels, chunk, device=self.partials.device)
        return ((pixels - first).clamp_max(chunk) * width).float()[:, None]


def moments(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of each group of one image (1, C, H, W) channels-last, (groups,) each."""
    _, channels, height, across = x.shape
    x = x.contiguous(memory_format=torch.channels_last)
    cut = _Streamed.of(x, groups, streamed_tiles(1, height * across, channels // groups, groups))
    _launch(_code().norm_partials, cut.grid, x, None, None, cut.partials, *cut.sizes, 0, **cut.shape)
    share = cut.counts / cut.counts.sum()
    means, squares = cut.partials[:, 0]
    mean = (share * means).sum(0)
    return mean, (share * (squares / cut.counts + (means - mean) ** 2)).sum(0)


def group_norm(
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
    """GroupNorm of x + add + shift, (B, C, H, W) channels-last; then film, y·(1 + scale) + offset; then SiLU.

    `add` is (C,), `shift` and both of `film` are (B, C) with any row stride. `known` are the mean and variance of each
    group, in place of x's own. `out` is x, where it is written over.
    """
    images, channels, height, across = x.shape
    x = x.contiguous(memory_format=torch.channels_last)
    assert out is None or out is x
    y = torch.empty_like(x, memory_format=torch.channels_last) if out is None else x  # a program writes what it read
    pixels, width = height * across, channels // groups
    tiles = (norm_tiles if known is None else streamed_tiles)(images, pixels, width, groups)
    by_image = _stride(shift)
    scale, offset = film or (None, None)
    by_film = _stride(scale, offset)
    code = _code()
    if tiles.chunk == 0:
        vector = math.gcd(width, _VECTOR)
        _launch(
            code.norm_whole, (groups, images), x, weight, bias, add, shift, scale, offset, y,
            pixels, channels // vector, width // vector, by_image, by_film, eps,
            ROWS=tiles.rows, LANES=tiles.lanes, V=vector, SILU=silu, num_warps=tiles.warps,
        )  # fmt: skip
        return y
    cut = _Streamed.of(x, groups, tiles)
    if known is None:
        _launch(code.norm_partials, cut.grid, x, add, shift, cut.partials, *cut.sizes, by_image, **cut.shape)
    else:  # chunks that all have this mean and variance merge to it
        cut.partials[0], cut.partials[1] = known[0], known[1] * cut.counts
    _launch(
        code.norm_apply, cut.grid, x, cut.partials, weight, bias, add, shift, scale, offset, y,
        *cut.sizes, by_image, by_film, eps, AT_ONCE=64, SILU=silu, **cut.shape,
    )  # fmt: skip
    return y


def add_bias(
    x: Tensor, h: Tensor | None, bias: Tensor | None = None, scale: float = 1.0, *, out: Tensor | None = None
) -> Tensor:
    """(x + h + bias) · scale; channels are innermost in memory: (B, C, H, W) channels-last, or (…, C).

    `out` is what it is written over, x or h.
    """
    x, h = _channels_innermost(x), None if h is None else _channels_innermost(h)
    y = torch.empty_like(x) if out is None else out
    assert out is None or _channels_innermost(out) is out
    channels = x.shape[1] if x.ndim == 4 else x.shape[-1]
    rows, vector = x.numel() // channels, math.gcd(channels, _VECTOR)
    tiles = parts_of_rows(channels)
    _launch(
        _code().add_bias, _grid(tiles, rows, channels), x, h, bias, y, rows, channels // vector, float(scale),
        **_constants(tiles, vector),
    )  # fmt: skip
    return y


def enlarge(x: Tensor) -> Tensor:
    """(B, C, H, W) channels-last to twice the height and width, by the nearest pixel."""
    images, channels, height, width = x.shape
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.empty(
        images, channels, 2 * height, 2 * width, device=x.device, dtype=x.dtype, memory_format=torch.channels_last
    )
    rows, vector, tiles = y.numel() // channels, math.gcd(channels, _VECTOR), parts_of_rows(channels)
    _launch(
        _code().enlarge, _grid(tiles, rows, channels), x, y, rows, 2 * height, 2 * width, channels // vector,
        **_constants(tiles, vector),
    )  # fmt: skip
    return y


def neighbours(x: Tensor) -> Tensor:
    """(B, C, H, W) channels-last to (B, H·W, 9·C): what a 3 × 3 convolution with padding 1 reads for each pixel."""
    images, channels, height, width = x.shape
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.empty(images, height * width, 9 * channels, device=x.device, dtype=x.dtype)
    rows, vector, tiles = images * height * width, math.gcd(channels, _VECTOR), parts_of_rows(channels)
    _launch(
        _code().neighbours, (*_grid(tiles, rows, channels), 9), x, y, rows, height, width, channels // vector,
        **_constants(tiles, vector),
    )  # fmt: skip
    return y


@functools.cache
def most_width(device: torch.device) -> int:
    """The widest heads whose keys and values, with 32 queries, fit into a multiprocessor's shared memory."""
    properties = torch.cuda.get_device_properties(device)
    return 160 if getattr(properties, "shared_memory_per_block_optin", 0) >= 2 * 256 * (32 + 2 * MOST_KEYS) else 128


def attend_few(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / √d) v over (batch, heads, length, d) for at most `MOST_KEYS` keys, in one pass.

    `mask` is bool, of shape (batch, 1, 1, keys); at least one key of each image is seen. The heads of the result lie
    beside each other in memory, as the layer after it reads them.
    """
    images, heads, length, width = q.shape
    keys, lanes = k.shape[2], _padded(max(width, 16))
    q, k, v = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, k, v))
    out = torch.empty(images, length, heads, width, device=q.device, dtype=q.dtype)
    roomy = lanes <= 64 or q.device.type != "cuda" or most_width(q.device) > 128  # for 128 queries of 128 lanes
    rows = min(32 if lanes > 128 else 128 if roomy else 64, max(16, _padded(length)))
    mask = None if mask is None else mask.reshape(images, keys).contiguous().view(torch.uint8)
    steps = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]]
    vector = math.gcd(_VECTOR, *steps)
    _launch(
        _code().attend_few, (_cut(length, rows), images * heads), q, k, v, mask, out, length, keys, heads,
        width**-0.5 * math.log2(math.e), *(step // vector for step in steps), keys,
        WIDTH=width, ROWS=rows, KEYS=max(16, _padded(keys)), LANES=lanes, V=vector, num_warps=8 if rows > 64 else 4,
    )  # fmt: skip
    return out.transpose(1, 2)


def add_layer_norm(
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
    """(x + gate·(h + add), its LayerNorm · (1 + scale) + shift), for x of shape (B, L, C).

    `add` is (C,), `gate`, `scale` and `shift` are (B, C) with any row stride. Without `h` the first result is x
    itself. With `fp8` the second is quantised by rows.
    """
    images, length, channels = x.shape
    x = x.contiguous()
    h = None if h is None else h.contiguous()
    rows, vector, tiles = images * length, math.gcd(channels, _VECTOR), whole_rows(images * length, channels, fp8)
    x_next = x if h is None else torch.empty_like(x)
    y = torch.empty_like(x, dtype=E4M3 if fp8 else x.dtype)
    scales = torch.empty(rows, 1, device=x.device, dtype=torch.float32) if fp8 else None
    _launch(
        _code().add_layer_norm, _grid(tiles, rows, channels),
        x, h, add, weight, bias, gate, scale, shift, x_next, y, scales,
        rows, length, channels // vector, _stride(gate), _stride(scale, shift), eps,
        QUANTIZE=fp8, **_constants(tiles, vector),
    )  # fmt: skip
    return x_next, y if scales is None else QuantizedRows(y, scales)


def gated_gelu(p: Tensor, *, fp8: bool = False) -> Tensor | QuantizedRows:
    """p[…, :I] · gelu(p[…, I:]), the exact GELU; with `fp8` quantised by rows."""
    p = p.contiguous()
    inner = p.shape[-1] // 2
    rows, vector = p.numel() // (2 * inner), math.gcd(inner, _VECTOR)
    y = torch.empty(*p.shape[:-1], inner, device=p.device, dtype=E4M3 if fp8 else p.dtype)
    scales = torch.empty(rows, 1, device=p.device, dtype=torch.float32) if fp8 else None
    tiles = whole_rows(rows, inner, fp8) if fp8 else parts_of_rows(inner, 1024)
    _launch(
        _code().gated_gelu, _grid(tiles, rows, inner), p, y, scales, rows, inner // vector,
        QUANTIZE=fp8, **_constants(tiles, vector),
    )  # fmt: skip
    return y if scales is None else QuantizedRows(y, scales)


def quantize(x: Tensor, *, gelu: bool = False) -> QuantizedRows:
    """Rows of (…, C) in e4m3, each divided by its largest magnitude over 448; with `gelu` of GELU(x), the tanh form."""
    x = x.contiguous()
    channels = x.shape[-1]
    rows, vector = x.numel() // channels, math.gcd(channels, _VECTOR)
    tiles = whole_rows(rows, channels, fp8=True)
    values = torch.empty_like(x, dtype=E4M3)
    scales = torch.empty(rows, 1, device=x.device, dtype=torch.float32)
    _launch(
        _code().quantize, _grid(tiles, rows, channels), x, values, scales, rows, channels // vector,
        GELU=gelu, **_constants(tiles, vector),
    )  # fmt: skip
    return QuantizedRows(values, scales)


def update_rows(
    table: Tensor,
    cursor: Tensor,
    active: Tensor,
    x: Tensor,
    anchor: Tensor,
    p1: Tensor,
    p2: Tensor,
    p3: Tensor,
    z: Tensor | None,
    cond: Tensor,
    cond_at: Tensor,
    uncond_at: Tensor,
    x0_out: Tensor | None = None,
) -> None:
    """Guidance and the row of every active slot, in place: registers (N, n) float32, table (N, R, K), cursor (N,).

    `cond` holds the network's outputs, (M, C, H, W) with any strides or (M, n); `cond_at` and `uncond_at` say which of
    them are a slot's, -1 for a row without an unconditional call. `x` has its churn already. The caller advances the
    cursor.
    """
    slots, rows, columns = table.shape
    n = x.numel() // slots
    for register in (table, x, anchor, p1, p2, p3):
        assert register.is_contiguous()
    block = 512
    _launch(
        _code().update_rows, (_cut(n, block), slots), table, cursor, active.view(torch.uint8), x, anchor, p1, p2, p3, z,
        cond, cond_at, uncond_at, x0_out, rows, columns, n, *_element_strides(cond), BLOCK=block, num_warps=4,
    )  # fmt: skip


def scaled_input(x: Tensor, table: Tensor, cursor: Tensor, call_slot: Tensor, dtype: torch.dtype) -> Tensor:
    """The packed list of calls, (M, C, H, W) channels-last: the x of each call's slot times its row's input scale."""
    _, channels, height, width = x.shape
    n, calls = channels * height * width, call_slot.shape[0]
    y = torch.empty(calls, channels, height, width, device=x.device, dtype=dtype, memory_format=torch.channels_last)
    block = 512
    _launch(
        _code().scaled_input, (_cut(n, block), calls), x, table, cursor, call_slot, y,
        table.shape[1], table.shape[2], n, channels, height * width, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return y


def normals(seeds: Tensor, draws: Tensor, weights: Tensor, n: int, out: Tensor) -> None:
    """out[i] = Σ weights[i, d] · gaussian(seeds[i], (interval, visit, PATH)), with the numbers of `core.noise`.

    seeds (N,) int64 with the bits of the seed, draws (N, D, 2) int32, weights (N, D) float32, out (N, n) float32.
    """
    block = 128
    _launch(
        _code().normals, (_cut(n, 4 * block), seeds.shape[0]), seeds, draws, weights, out, weights.shape[1], n,
        PATH=PATH, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _launch(kernel: Any, grid: tuple[int, ...], x: Tensor, *rest: Any, **options: Any) -> None:
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernel[grid](x, *rest, **options)


def _grid(tiles: Tiles, rows: int, channels: int) -> tuple[int, int]:
    return _cut(rows, tiles.rows), _cut(channels, tiles.lanes)


def _constants(tiles: Tiles, vector: int) -> dict[str, int]:
    return {"ROWS": tiles.rows, "LANES": tiles.lanes, "V": vector, "num_warps": tiles.warps}


def _stride(*rows: Tensor | None) -> int:
    """The common row stride of (B, C) tensors whose channels are contiguous; 0 without any."""
    strides = {(one.stride(0) if one.shape[0] > 1 else 0) for one in rows if one is not None}
    assert all(one is None or one.stride(-1) == 1 or one.shape[-1] == 1 for one in rows)
    assert len(strides) <= 1
    return strides.pop() if strides else 0


def _channels_innermost(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x.contiguous()


def _element_strides(cond: Tensor) -> tuple[int, int, int, int]:
    """(pixels, image stride, channel stride, pixel stride) of network outputs."""
    if cond.ndim == 2:
        return cond.shape[1], cond.stride(0), 0, cond.stride(1)
    _, _, height, width = cond.shape
    assert height == 1 or width == 1 or cond.stride(2) == width * cond.stride(3)
    return height * width, cond.stride(0), cond.stride(1), cond.stride(3) if width > 1 else cond.stride(2)
