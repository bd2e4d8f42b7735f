"""The code of the CUDA kernels, in Triton's language. `kernels` launches it, and nothing else imports this file.

All arithmetic is in float32. A tile has rows of neighbouring channels in its last axis, so that loads are contiguous.
Sizes that are a multiple of the vector width V come as units of V: the compiler then knows it and loads 16 bytes at
once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pellucid.core.table import COLUMNS

_IN_SCALE = tl.constexpr(COLUMNS["in_scale"])
_K_X, _K_OUT = tl.constexpr(COLUMNS["k_x"]), tl.constexpr(COLUMNS["k_out"])
_B_X, _B_0 = tl.constexpr(COLUMNS["b_x"]), tl.constexpr(COLUMNS["b_0"])
_HELD, _SCALE = tl.constexpr(COLUMNS["held"]), tl.constexpr(COLUMNS["scale"])
_X_NEXT, _ANCHOR_NEXT = tl.constexpr(COLUMNS["x.x"]), tl.constexpr(COLUMNS["anchor.x"])
_LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn
_LEAST = tl.constexpr(1e-12)  # a row of zeros keeps a finite scale
_TANH_GELU = tl.constexpr(1.5957691216057308)  # 2·√(2/π): tanh by a sigmoid
_TURN = tl.constexpr(6.283185307179586)
# Sizes that are no reason to compile again: those of an image, and what follows from them.
_SIZES = ("pixels", "rows", "height", "width", "per_program", "chunk", "parts", "length", "keys", "mask_stride")
_FREE = (*_SIZES, *(f"{part}_{step}" for part in "qkv" for step in ("image", "head", "row")))


@triton.jit
def _constant(add, shift, image, shift_stride, c, valid, LANES: tl.constexpr):
    """What is added to every pixel before the norm, per channel."""
    total = tl.zeros((LANES,), tl.float32)
    if add is not None:
        total += tl.load(add + c, mask=valid, other=0.0).to(tl.float32)
    if shift is not None:
        total += tl.load(shift + image * shift_stride + c, mask=valid, other=0.0).to(tl.float32)
    return total


@triton.jit
def _affine(weight, bias, film_scale, film_offset, image, film_stride, c, valid):
    """Weight and bias per channel, with those of the image folded in."""
    scale = tl.load(weight + c, mask=valid, other=0.0).to(tl.float32)
    offset = tl.load(bias + c, mask=valid, other=0.0).to(tl.float32)
    if film_scale is not None:
        factor = 1.0 + tl.load(film_scale + image * film_stride + c, mask=valid, other=0.0).to(tl.float32)
        scale *= factor
        offset = offset * factor + tl.load(film_offset + image * film_stride + c, mask=valid, other=0.0).to(tl.float32)
    return scale, offset


@triton.jit
def _activated(v, SILU: tl.constexpr):
    if SILU:
        v = v * tl.sigmoid(v)
    return v


@triton.jit(do_not_specialize=_FREE)
def norm_whole(
    x, weight, bias, add, shift, film_scale, film_offset, y, pixels, units, width_units, shift_stride, film_stride, eps,
    ROWS: tl.constexpr, LANES: tl.constexpr, V: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """GroupNorm of one group of one image, held in registers."""
    group, image = tl.program_id(0), tl.program_id(1)
    channels, width = units * V, width_units * V
    lane = tl.arange(0, LANES)
    row = tl.arange(0, ROWS)
    valid = lane < width
    c = group * width + lane
    inside = (row < pixels)[:, None] & valid[None, :]
    at = image.to(tl.int64) * pixels * channels + (row[:, None] * channels + c[None, :])
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.where(inside, v + _constant(add, shift, image, shift_stride, c, valid, LANES)[None, :], 0.0)
    count = pixels * width
    d = tl.where(inside, v - tl.sum(v) / count, 0.0)
    scale, offset = _affine(weight, bias, film_scale, film_offset, image, film_stride, c, valid)
    scale *= tl.rsqrt(tl.sum(d * d) / count + eps)
    out = _activated(d * scale[None, :] + offset[None, :], SILU)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_FREE)
def norm_partials(
    x, add, shift, partials, pixels, units, width, groups, per_program, block_units, chunk, shift_stride,
    ROWS: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of each group over one chunk of pixels, into partials (2, B, chunks, G).

    Deviations are from a pivot, the mean of the chunk's first tile. It is a part of what is summed, so the
    correction at the end loses no more than the number of tiles.
    """
    block, part, image = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channels = units * V
    lane = tl.arange(0, LANES)
    row = tl.arange(0, ROWS)
    c = block * block_units * V + lane
    valid = (lane < block_units * V) & (c < channels)
    first = part * chunk
    rows = tl.minimum(chunk, pixels - first)
    source = x + (image.to(tl.int64) * pixels + first) * channels
    at = row[:, None] * channels + c[None, :]
    inside = (row < rows)[:, None] & valid[None, :]
    v = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    pivot = tl.sum(v, 0) / tl.minimum(rows, ROWS)
    d = tl.where(inside, v - pivot[None, :], 0.0)
    deviations, squares = d, d * d
    for start in range(ROWS, rows, ROWS):
        source += ROWS * channels
        inside = (row < rows - start)[:, None] & valid[None, :]
        v = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.where(inside, v - pivot[None, :], 0.0)
        deviations += d
        squares += d * d
    moved = tl.sum(deviations, 0) / rows
    square = tl.sum(squares, 0) - moved * moved * rows
    mean = pivot + moved + _constant(add, shift, image, shift_stride, c, valid, LANES)

    group = tl.arange(0, GROUPS)
    member = group[:, None] == (lane // width)[None, :]
    group_mean = tl.sum(tl.where(member, mean[None, :], 0.0), 1) / width
    apart = mean[None, :] - group_mean[:, None]
    group_square = tl.sum(tl.where(member, square[None, :] + rows * apart * apart, 0.0), 1)
    g = block * per_program + group
    out = partials + (image * tl.num_programs(1) + part) * groups + g
    kept = (group < per_program) & (g < groups)
    tl.store(out, group_mean, mask=kept)
    tl.store(out + tl.num_programs(2) * tl.num_programs(1) * groups, group_square, mask=kept)


@triton.jit
def _merged(
    partials, image, g, kept, groups, parts, images, chunk, pixels, width, GROUPS: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Mean and variance of each group from its chunks (Chan, Golub and LeVeque 1983)."""
    count = 0.0
    mean = tl.zeros((GROUPS,), tl.float32)
    square = tl.zeros((GROUPS,), tl.float32)
    for start in range(0, parts, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)
        there = (part < parts)[:, None] & kept[None, :]
        at = partials + (image * parts + part)[:, None] * groups + g[None, :]
        means = tl.load(at, mask=there, other=0.0)
        squares = tl.load(at + images * parts * groups, mask=there, other=0.0)
        counts = tl.where(part < parts, tl.minimum(chunk, pixels - part * chunk) * width, 0).to(tl.float32)
        more = tl.sum(counts, 0)
        mean_here = tl.sum(means * counts[:, None], 0) / more
        apart = means - mean_here[None, :]
        square_here = tl.sum(squares + counts[:, None] * apart * apart, 0)
        step = mean_here - mean
        total = count + more
        mean += step * (more / total)
        square += square_here + step * step * (count * more / total)
        count = total
    return mean, square / count


@triton.jit(do_not_specialize=_FREE)
def norm_apply(
    x, partials, weight, bias, add, shift, film_scale, film_offset, y,
    pixels, units, width, groups, per_program, block_units, chunk, shift_stride, film_stride, eps,
    ROWS: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr, AT_ONCE: tl.constexpr, V: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """The norm of one chunk of pixels from the partials of all chunks."""
    # Backwards: what the statistics read last is still in the cache.
    block, part, image = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2)
    channels = units * V
    lane = tl.arange(0, LANES)
    row = tl.arange(0, ROWS)
    c = block * block_units * V + lane
    valid = (lane < block_units * V) & (c < channels)
    first = part * chunk
    rows = tl.minimum(chunk, pixels - first)
    start_at = (image.to(tl.int64) * pixels + first) * channels
    at = row[:, None] * channels + c[None, :]
    inside = (row < rows)[:, None] & valid[None, :]
    v = tl.load(x + start_at + at, mask=inside, other=0.0)  # on its way while the partials are merged

    group = tl.arange(0, GROUPS)
    g = block * per_program + group
    kept = (group < per_program) & (g < groups)
    mean, variance = _merged(
        partials, image, g, kept, groups, tl.num_programs(1), tl.num_programs(2), chunk, pixels, width, GROUPS, AT_ONCE
    )
    member = group[:, None] == (lane // width)[None, :]
    centre = tl.sum(tl.where(member, mean[:, None], 0.0), 0)
    spread = tl.sum(tl.where(member, tl.rsqrt(variance + eps)[:, None], 0.0), 0)
    centre -= _constant(add, shift, image, shift_stride, c, valid, LANES)
    scale, offset = _affine(weight, bias, film_scale, film_offset, image, film_stride, c, valid)
    scale *= spread
    for start in range(0, rows, ROWS):
        inside = (row < rows - start)[:, None] & valid[None, :]
        coming = start_at + ROWS * channels
        more = (row < rows - start - ROWS)[:, None] & valid[None, :]
        ahead = tl.load(x + coming + at, mask=more, other=0.0)
        out = _activated((v.to(tl.float32) - centre[None, :]) * scale[None, :] + offset[None, :], SILU)
        tl.store(y + start_at + at, out.to(y.dtype.element_ty), mask=inside)
        v = ahead
        start_at = coming


@triton.jit(do_not_specialize=_FREE)
def add_bias(x, h, bias, y, rows, units, scale, ROWS: tl.constexpr, LANES: tl.constexpr, V: tl.constexpr):
    """(x + h + bias) · scale."""
    channels = units * V
    c = tl.program_id(1) * LANES + tl.arange(0, LANES)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (c < channels)[None, :]
    at = row.to(tl.int64)[:, None] * channels + c[None, :]
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if h is not None:
        total += tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    tl.store(y + at, (total * scale).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_FREE)
def enlarge(x, y, rows, height, width, units, ROWS: tl.constexpr, LANES: tl.constexpr, V: tl.constexpr):
    """Every pixel four times; rows, height and width are those of the result."""
    channels = units * V
    c = tl.program_id(1) * LANES + tl.arange(0, LANES)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (c < channels)[None, :]
    line = row // width  # of all images, one below the other: each has an even number
    source = (line // 2) * (width // 2) + (row % width) // 2
    v = tl.load(x + source.to(tl.int64)[:, None] * channels + c[None, :], mask=inside, other=0.0)
    tl.store(y + row.to(tl.int64)[:, None] * channels + c[None, :], v, mask=inside)


@triton.jit(do_not_specialize=_FREE)
def neighbours(x, y, rows, height, width, units, ROWS: tl.constexpr, LANES: tl.constexpr, V: tl.constexpr):
    """The 3 × 3 pixels around each pixel, one behind another; zeros beyond the edge."""
    channels = units * V
    tap = tl.program_id(2)
    down, right = tap // 3 - 1, tap % 3 - 1
    c = tl.program_id(1) * LANES + tl.arange(0, LANES)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (c < channels)[None, :]
    line, column = row // width % height + down, row % width + right
    there = (line >= 0) & (line < height) & (column >= 0) & (column < width)
    source = (row + down * width + right).to(tl.int64)
    v = tl.load(x + source[:, None] * channels + c[None, :], mask=inside & there[:, None], other=0.0)
    tl.store(y + (row.to(tl.int64)[:, None] * 9 + tap) * channels + c[None, :], v, mask=inside)


@triton.jit(do_not_specialize=_FREE)
def attend_few(
    q, k, v, mask, out, length, keys, heads, factor,
    q_image, q_head, q_row, k_image, k_head, k_row, v_image, v_head, v_row, mask_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """softmax(q kᵀ · factor) v of one head over all of its keys at once; `factor` has log2(e) in it.

    Strides come as units of V.
    """
    image, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key, c = tl.arange(0, KEYS), tl.arange(0, LANES)
    wide, held, inside = (c < WIDTH)[None, :], (key < keys)[:, None], (row < length)[:, None]
    own = image.to(tl.int64)
    from_q = q + (own * q_image + head * q_head + row[:, None] * q_row) * V + c[None, :]
    from_k = k + (own * k_image + head * k_head + key[:, None] * k_row) * V + c[None, :]
    from_v = v + (own * v_image + head * v_head + key[:, None] * v_row) * V + c[None, :]
    asked = tl.load(from_q, mask=inside & wide, other=0.0)
    given = tl.load(from_k, mask=held & wide, other=0.0)
    value = tl.load(from_v, mask=held & wide, other=0.0)
    seen = key < keys
    if mask is not None:
        seen = seen & (tl.load(mask + own * mask_stride + key, mask=seen, other=0) != 0)
    logits = tl.where(seen[None, :], tl.dot(asked, tl.trans(given)) * factor, float("-inf"))
    share = tl.exp2(logits - tl.max(logits, 1)[:, None])
    total = tl.sum(share, 1)
    made = tl.dot(share.to(value.dtype), value) / total[:, None]
    to = ((own * length + row)[:, None] * heads + head) * WIDTH + c[None, :]
    tl.store(out + to, made.to(out.dtype.element_ty), mask=inside & wide)


@triton.jit
def _store_quantized(v, values, scales, at, row, rows, inside):
    """Rows of v in e4m3, each by its largest magnitude."""
    most = tl.maximum(tl.max(tl.abs(v), 1), _LEAST)
    inverse = tl.div_rn(tl.zeros_like(most) + _LARGEST, most)
    tl.store(scales + row, tl.div_rn(most, tl.zeros_like(most) + _LARGEST), mask=row < rows)
    tl.store(values + at, (v * inverse[:, None]).to(values.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_FREE)
def add_layer_norm(
    x, h, add, weight, bias, gate, scale, shift, x_next, y, scales,
    rows, length, units, gate_stride, scale_stride, eps,
    ROWS: tl.constexpr, LANES: tl.constexpr, V: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """x + gate·(h + add), and its LayerNorm with weight, bias and the modulation of the image; over whole rows."""
    channels = units * V
    c = tl.arange(0, LANES)[None, :]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    image = (row // length)[:, None]
    valid = c < channels
    inside = (row < rows)[:, None] & valid
    at = row.to(tl.int64)[:, None] * channels + c
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if h is not None:
        change = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
        if add is not None:
            change += tl.load(add + c, mask=valid, other=0.0).to(tl.float32)
        if gate is not None:
            change *= tl.load(gate + image * gate_stride + c, mask=inside, other=0.0).to(tl.float32)
        total = (v + change).to(x_next.dtype.element_ty)
        tl.store(x_next + at, total, mask=inside)
        v = total.to(tl.float32)  # the norm is of what is stored
    d = tl.where(inside, v - (tl.sum(v, 1) / channels)[:, None], 0.0)
    out = d * tl.rsqrt(tl.sum(d * d, 1) / channels + eps)[:, None]
    if weight is not None:
        out *= tl.load(weight + c, mask=valid, other=0.0).to(tl.float32)
    if bias is not None:
        out += tl.load(bias + c, mask=valid, other=0.0).to(tl.float32)
    if scale is not None:
        out *= 1.0 + tl.load(scale + image * scale_stride + c, mask=inside, other=0.0).to(tl.float32)
        out += tl.load(shift + image * scale_stride + c, mask=inside, other=0.0).to(tl.float32)
    if QUANTIZE:
        # Through x's dtype, and zeros beyond the row: the same numbers as those of the norm and `quantize` in turn.
        rounded = tl.where(inside, out.to(x.dtype.element_ty).to(tl.float32), 0.0)
        _store_quantized(rounded, y, scales, at, row, rows, inside)
    else:
        tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gelu(v):
    """The exact GELU to within 7e-7, at half of what erf costs.

    The polynomial is log2 of the normal distribution's lower tail, fitted on [-5.5, 0] with the least largest
    deviation; beyond, it falls faster than the tail. Unlike 1 + erf it cancels nothing: the relative error is below
    6e-6 down to -5.
    """
    a = tl.abs(v)
    p = -1.74814556e-06 * a + 5.99876257e-05
    p = p * a - 0.000918647391
    p = p * a + 0.00846367236
    p = p * a - 0.0538727604
    p = p * a - 0.458551854
    p = p * a - 1.15121293
    tail = tl.exp2(p * a - 1.0)
    return v * tl.where(v < 0, tail, 1.0 - tail)


@triton.jit(do_not_specialize=_FREE)
def gated_gelu(
    p, y, scales, rows, units, ROWS: tl.constexpr, LANES: tl.constexpr, V: tl.constexpr, QUANTIZE: tl.constexpr
):
    """The first half of each row times the GELU of the second; whole rows where the result is quantised."""
    inner = units * V
    c = tl.program_id(1) * LANES + tl.arange(0, LANES)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (c < inner)[None, :]
    at = row.to(tl.int64)[:, None] * (2 * inner) + c[None, :]
    value = tl.load(p + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(p + at + inner, mask=inside, other=0.0).to(tl.float32)
    out = value * _gelu(gate)
    to = row.to(tl.int64)[:, None] * inner + c[None, :]
    if QUANTIZE:
        _store_quantized(out.to(p.dtype.element_ty).to(tl.float32), y, scales, to, row, rows, inside)
    else:
        tl.store(y + to, out.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_FREE)
def quantize(
    x, values, scales, rows, units, ROWS: tl.constexpr, LANES: tl.constexpr, V: tl.constexpr, GELU: tl.constexpr
):
    """Rows of x in e4m3, or of its GELU in the tanh form."""
    channels = units * V
    c = tl.arange(0, LANES)[None, :]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (c < channels)
    at = row.to(tl.int64)[:, None] * channels + c
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        v *= tl.sigmoid((v + 0.044715 * v * v * v) * _TANH_GELU)
        v = v.to(x.dtype.element_ty).to(tl.float32)  # the same numbers as those of the GELU and this in turn
    _store_quantized(v, values, scales, at, row, rows, inside)


@triton.jit
def _term(weight, v):
    """weight · v, and 0 for a weight of 0 whatever v is: an unused register may hold anything."""
    return tl.where(weight != 0.0, weight * v, 0.0)


@triton.jit
def _combined(row, COLUMN: tl.constexpr, x, anchor, p0, p1, p2, p3, u, z):
    """The registers, weighted by eight cells of the row."""
    total = _term(tl.load(row + COLUMN), x) + _term(tl.load(row + COLUMN + 1), anchor)
    total += _term(tl.load(row + COLUMN + 2), p0) + _term(tl.load(row + COLUMN + 3), p1)
    total += _term(tl.load(row + COLUMN + 4), p2) + _term(tl.load(row + COLUMN + 5), p3)
    return total + _term(tl.load(row + COLUMN + 6), u) + _term(tl.load(row + COLUMN + 7), z)


@triton.jit
def _row_of(table, cursor, slot, rows, columns):
    """Where the slot's row begins; a cursor behind the end stays on the last row."""
    at = tl.load(cursor + slot)
    return table + (slot.to(tl.int64) * rows + tl.minimum(tl.maximum(at, 0), rows - 1)) * columns


@triton.jit(do_not_specialize=_FREE)
def update_rows(
    table, cursor, active, x, anchor, p1, p2, p3, z, cond, cond_at, uncond_at, x0_out,
    rows, columns, n, pixels, image_stride, channel_stride, pixel_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Guidance, prediction and the linear updates of one slot's row, in place."""
    slot = tl.program_id(1)
    row = _row_of(table, cursor, slot, rows, columns)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (e < n) & (tl.load(active + slot) != 0)
    at = slot.to(tl.int64) * n + e
    element = (e // pixels) * channel_stride + (e % pixels) * pixel_stride
    unconditional = tl.load(uncond_at + slot)
    guided = unconditional >= 0
    raw_cond = tl.load(cond + tl.load(cond_at + slot) * image_stride + element, mask=inside, other=0.0).to(tl.float32)
    raw_uncond = tl.load(cond + unconditional * image_stride + element, mask=inside & guided, other=0.0).to(tl.float32)
    vx = tl.load(x + at, mask=inside, other=0.0)
    va = tl.load(anchor + at, mask=inside, other=0.0)
    v1 = tl.load(p1 + at, mask=inside, other=0.0)
    v2 = tl.load(p2 + at, mask=inside, other=0.0)
    v3 = tl.load(p3 + at, mask=inside, other=0.0)
    vz = tl.zeros((BLOCK,), tl.float32)
    if z is not None:
        vz = tl.load(z + at, mask=inside, other=0.0)

    raw = tl.where(guided, raw_uncond + tl.load(row + _SCALE) * (raw_cond - raw_uncond), raw_cond)
    from_x, k_out = _term(tl.load(row + _K_X), vx), tl.load(row + _K_OUT)
    x0 = from_x + _term(k_out, raw)
    u = tl.where(guided, from_x + _term(k_out, raw_uncond), x0)
    p0 = _term(tl.load(row + _B_X), vx) + _term(tl.load(row + _B_0), x0)
    tl.store(x + at, _combined(row, _X_NEXT, vx, va, p0, v1, v2, v3, u, vz), mask=inside)
    tl.store(anchor + at, _combined(row, _ANCHOR_NEXT, vx, va, p0, v1, v2, v3, u, vz), mask=inside)
    if x0_out is not None:
        tl.store(x0_out + at, x0, mask=inside)
    enters = inside & (tl.load(row + _HELD).to(tl.int32) == 0)
    tl.store(p1 + at, p0, mask=enters)
    tl.store(p2 + at, v1, mask=enters)
    tl.store(p3 + at, v2, mask=enters)


@triton.jit(do_not_specialize=_FREE)
def scaled_input(x, table, cursor, call_slot, y, rows, columns, n, channels, pixels, BLOCK: tl.constexpr):
    """One call's input: its slot's x times the row's input scale, channels innermost."""
    call = tl.program_id(1)
    slot = tl.load(call_slot + call)
    scale = tl.load(_row_of(table, cursor, slot, rows, columns) + _IN_SCALE)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < n
    from_x = slot * n + (e % channels) * pixels + e // channels
    v = tl.load(x + from_x, mask=inside, other=0.0) * scale
    tl.store(y + call.to(tl.int64) * n + e, v.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _uniform(word):
    return (word.to(tl.float64) + 0.5) * (2.0**-32)


@triton.jit(do_not_specialize=("count",))
def normals(seeds, draws, weights, out, count, n, PATH: tl.constexpr, BLOCK: tl.constexpr):
    """Σ weight · gaussian(seed, (interval, visit, PATH)): Philox-4x32-10 by counter, then Box and Muller in float64."""
    image = tl.program_id(1)
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counter = block.to(tl.uint32)
    none = counter * 0
    seed = tl.load(seeds + image).to(tl.uint64, bitcast=True)
    z0 = tl.zeros((BLOCK,), tl.float32)
    z1, z2, z3 = z0, z0, z0
    for i in range(count):
        weight = tl.load(weights + image * count + i)
        if weight != 0.0:
            address = draws + (image * count + i) * 2
            interval = tl.load(address).to(tl.uint32, bitcast=True)
            visit = tl.load(address + 1).to(tl.uint32, bitcast=True)
            w0, w1, w2, w3 = tl.philox(seed, counter, none + interval, none + visit, none + PATH)
            near, far = tl.sqrt(-2.0 * tl.log(_uniform(w0))), tl.sqrt(-2.0 * tl.log(_uniform(w2)))
            turn, other = _uniform(w1) * _TURN, _uniform(w3) * _TURN
            z0 += weight * (near * tl.cos(turn)).to(tl.float32)
            z1 += weight * (far * tl.cos(other)).to(tl.float32)
            z2 += weight * (near * tl.sin(turn)).to(tl.float32)
            z3 += weight * (far * tl.sin(other)).to(tl.float32)
    at = out + image.to(tl.int64) * n + block * 4
    tl.store(at, z0, mask=block * 4 < n)
    tl.store(at + 1, z1, mask=block * 4 + 1 < n)
    tl.store(at + 2, z2, mask=block * 4 + 2 < n)
    tl.store(at + 3, z3, mask=block * 4 + 3 < n)
