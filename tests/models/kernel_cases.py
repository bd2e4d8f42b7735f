"""The kernels against plain torch in float64, over shapes drawn from a seed, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.core.noise import PATH, gaussian
from pellucid.core.table import COLUMNS
from pellucid.models import kernels
from pellucid.models.kernels import QuantizedRows

ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # half a unit in the last place, or more
SMALLEST = {torch.float16: 2**-24}  # subnormal steps that matter beside a scale
LARGEST = 448.0  # of e4m3


@dataclass
class Draw:
    """Shapes and numbers from a seed, on a device."""

    seed: int
    device: str
    large: bool  # sizes that an interpreter is too slow for
    choice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.choice = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.dtype = (torch.float32, torch.float16, torch.bfloat16)[self.seed % 3]

    def one(self, *few: object, more: tuple[object, ...] = ()) -> object:
        return self.choice.choice(few + more if self.large else few)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) + mean).to(self.device, dtype or self.dtype)

    def maybe(self, *shape: int) -> Tensor | None:
        return self.normal(*shape) if self.choice.random() < 0.5 else None

    def sliced(self, rows: int, width: int) -> Tensor:
        """(rows, width), cut from a wider tensor."""
        wide = self.normal(rows, width + self.choice.choice([0, 5, 64]))
        return wide[:, -width:]


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, slack: float = 4e-6) -> None:
    """Equal to the rounding of the dtype, and a few roundings of float32 relative to the whole tensor's scale."""
    assert found.dtype == dtype
    found, expected = found.double(), expected.double()
    allowed = 1.01 * ROUNDING[dtype] * expected.abs() + slack * (1 + expected.abs().mean())
    worst = ((found - expected).abs() / allowed).max().item()
    assert worst <= 1, f"{worst} times the rounding that is allowed"


def optional(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


def check_group_norm(draw: Draw) -> None:
    """Both forms of launch: whole groups in registers, and partial statistics."""
    width = draw.one(1, 3, 4, 8, 10, 20, 30, 40, 80, more=(60, 16, 96, 7))
    groups = draw.one(1, 3, 8, 32) if draw.large or width < 20 else draw.one(2, 5)
    height, across = draw.one(
        (1, 1), (3, 5), (8, 8), (17, 9), (1, 40), more=((64, 64), (33, 47), (32, 32), (16, 16), (128, 64))
    )
    images = draw.one(1, 2, 3, more=(5, 16, 33))
    channels = width * groups
    mean = draw.one(0.0, 100.0)
    x = draw.normal(images, channels, height, across, mean=mean).contiguous(memory_format=torch.channels_last)
    if draw.choice.random() < 0.3:  # a chunk that is unlike the others
        x[..., : height // 2, :] += 30
    weight, bias, add = draw.normal(channels), draw.normal(channels), draw.maybe(channels)
    shift = draw.sliced(images, channels) if draw.choice.random() < 0.5 else None
    film = None
    if draw.choice.random() < 0.5:
        both = draw.normal(images, 2 * channels)
        film = (both[:, :channels], both[:, channels:])
    silu, eps = draw.choice.random() < 0.5, 1e-5

    v = x.double()
    v = v if add is None else v + add.double()[None, :, None, None]
    v = v if shift is None else v + shift.double()[:, :, None, None]
    y = F.group_norm(v, groups, weight.double(), bias.double(), eps)
    if film is not None:
        y = y * (1 + film[0].double()[:, :, None, None]) + film[1].double()[:, :, None, None]
    y = F.silu(y) if silu else y

    tiles = [kernels.norm_tiles(images, height * across, width, groups)]
    lanes, per_program = kernels._lanes_of_groups(width, groups)
    for parts in (1, draw.one(2, 3, 5, more=(70, 300))):
        rows = draw.one(1, 4, 16) if height * across < 60 else 16
        loops = -(-height * across // (rows * parts))
        tiles.append(kernels.NormTiles(rows * loops, rows, lanes, per_program, 4))
    # What is lost with a large mean is the rounding of float32 itself, in the mean and in x - mean.
    slack = 4e-6 + 2e-6 * mean + (1e-4 if v.abs().max() > 25 else 0) + 1e-5 * float(y.abs().max())
    options = {"silu": silu, "add": add, "shift": shift, "film": film}
    for one in tiles:
        with patch.object(kernels, "norm_tiles", return_value=one):
            found = kernels.group_norm(x, weight, bias, groups, eps, **options)
            own = x.clone()
            kernels.group_norm(own, weight, bias, groups, eps, **options, out=own)
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(own, found)
        close(found, y, draw.dtype, slack)


def check_moments(draw: Draw) -> None:
    """Of a whole image, and a norm of one of its bands by them."""
    groups, width = draw.one(1, 4, more=(32,)), draw.one(1, 3, 8, more=(10, 16))
    height, across = draw.one((2, 5), (9, 7), more=((64, 64), (128, 96)))
    x = draw.normal(1, groups * width, height, across, mean=draw.one(0.0, 20.0))
    x = x.contiguous(memory_format=torch.channels_last)
    mean, variance = kernels.moments(x, groups)
    grouped = x.double().reshape(groups, -1)
    wanted, spread = grouped.mean(1), grouped.var(1, correction=0)
    assert torch.allclose(mean.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.allclose(variance.double(), spread, rtol=1e-4, atol=1e-6 + 1e-9 * float(wanted.square().max()))
    weight, bias = draw.normal(groups * width), draw.normal(groups * width)
    found = kernels.group_norm(x[:, :, height // 2 :], weight, bias, groups, 1e-5, silu=True, known=(mean, variance))
    expected = F.silu(F.group_norm(x.double(), groups, weight.double(), bias.double(), 1e-5))[:, :, height // 2 :]
    slack = 4e-6 + 4e-6 * float(x.abs().max()) / float(spread.min()) ** 0.5 + 1e-5 * float(expected.abs().max())
    close(found, expected, draw.dtype, slack)


def check_no_cancellation(draw: Draw) -> None:
    """A mean a thousand times the spread: E[x²] − E[x]² in float32 would be noise."""
    x = draw.normal(2, 24, 12, 12, dtype=torch.float32, mean=1000.0).contiguous(memory_format=torch.channels_last)
    one, zero = torch.ones(24, device=draw.device), torch.zeros(24, device=draw.device)
    expected = F.group_norm(x.double(), 4, eps=1e-6)
    for chunk in (0, 16, 48):
        tiles = kernels.NormTiles(chunk, 16 if chunk else 256, 128 if chunk else 8, 4 if chunk else 1, 4)
        with patch.object(kernels, "norm_tiles", return_value=tiles):
            found = kernels.group_norm(x, one, zero, 4, 1e-6, silu=False)
        assert (found.double() - expected).abs().max() < 1e-3
    rows = x.permute(0, 2, 3, 1).reshape(2, 144, 24).contiguous()
    _, y = kernels.add_layer_norm(rows, None, None, None, 1e-6)
    assert (y.double() - F.layer_norm(rows.double(), (24,), eps=1e-6)).abs().max() < 1e-3


def check_add_bias(draw: Draw) -> None:
    channels = draw.one(1, 7, 64, 72, 320, more=(640, 960, 1152))
    if draw.choice.random() < 0.5:
        shape = (draw.one(1, 3, more=(33,)), channels, draw.one(1, 5, more=(64,)), 9)
        x, h = (draw.normal(*shape).contiguous(memory_format=torch.channels_last) for _ in range(2))
        along = (1, -1, 1, 1)
    else:
        shape = (draw.one(1, 3, more=(33,)), draw.one(1, 11, more=(1000,)), channels)
        x, h, along = draw.normal(*shape), draw.normal(*shape), (1, 1, -1)
    bias, scale = draw.maybe(channels), draw.one(1.0, 0.5)
    total = x.double() + h.double() + (0 if bias is None else bias.double().reshape(along))
    found = kernels.add_bias(x, h, bias, scale)
    assert found.stride() == x.stride()
    close(found, total * scale, draw.dtype)
    close(kernels.add_bias(x, None, bias, scale), (total - h.double()) * scale, draw.dtype)
    kernels.add_bias(x, h, bias, scale, out=h)
    close(h, total * scale, draw.dtype)


def check_enlarge(draw: Draw) -> None:
    shape = (draw.one(1, 3, more=(33,)), draw.one(1, 7, 64, more=(640, 1280)), draw.one(1, 5, more=(32,)), 7)
    x = draw.normal(*shape).contiguous(memory_format=torch.channels_last)
    found = kernels.enlarge(x)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, F.interpolate(x, scale_factor=2.0))


def check_neighbours(draw: Draw) -> None:
    images, channels = draw.one(1, 3, more=(33,)), draw.one(1, 7, 64, more=(320, 1280))
    height, width = draw.one((1, 1), (2, 5), (7, 3), more=((8, 8), (9, 16)))
    x = draw.normal(images, channels, height, width).contiguous(memory_format=torch.channels_last)
    found = kernels.neighbours(x).unflatten(2, (9, channels))
    columns = F.unfold(x.float(), 3, padding=1).unflatten(1, (channels, 9)).permute(0, 3, 2, 1)
    assert torch.equal(found.float(), columns)


def check_attend_few(draw: Draw) -> None:
    """Keys and values of any layout, as those of packed projections, and masks."""
    images, heads = draw.one(1, 2, more=(5, 33)), draw.one(1, 3, more=(8, 20))
    length, keys = draw.one(1, 7, 40, more=(64, 256, 1024, 4096)), draw.one(1, 5, 77, more=(64, 128))
    width = draw.one(8, 16, 40, more=(64, 72, 80, 128, 160))
    dtype = torch.bfloat16 if draw.seed % 2 and draw.large else torch.float16  # the interpreter multiplies no bf16
    q, k, v = (draw.normal(images, n, heads, width, dtype=dtype).transpose(1, 2) for n in (length, keys, keys))
    if draw.choice.random() < 0.5:
        k, v = k.contiguous(), v.contiguous()
    elif draw.choice.random() < 0.5:  # some of the columns of a text
        text = draw.normal(images, keys, 3 * heads * width + 8, dtype=dtype)
        k, v = (part.unflatten(2, (heads, width)).transpose(1, 2) for part in text.split(heads * width, 2)[1:3])
    mask = None
    if draw.choice.random() < 0.5:
        mask = torch.rand(images, 1, 1, keys, generator=draw.generator).to(draw.device) < 0.6
        mask[..., 0] = True
    found = kernels.attend_few(q, k, v, mask)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask)
    assert found.transpose(1, 2).is_contiguous()
    shares = 2 * ROUNDING[dtype] * float(v.double().abs().max())  # which are rounded before they weigh the values
    close(found, expected, dtype, slack=4e-6 + shares)


def check_add_layer_norm(draw: Draw) -> None:
    images, length = draw.one(1, 2, 3, more=(16, 33)), draw.one(1, 6, 13, more=(77, 256, 1024))
    channels = draw.one(5, 72, 320, more=(640, 1152, 1280, 1536, 2432, 3072, 4096))
    x, h = draw.normal(images, length, channels, mean=draw.one(0.0, 20.0)), draw.maybe(images, length, channels)
    weight, bias = draw.maybe(channels), draw.maybe(channels)
    wide = draw.normal(images, 6 * channels)
    gate, scale, shift = wide[:, :channels], wide[:, channels : 2 * channels], wide[:, 3 * channels : 4 * channels]
    gate = gate if draw.choice.random() < 0.5 else None
    if draw.choice.random() < 0.5:
        scale = shift = None
    add = draw.maybe(channels)
    options = {"add": add, "gate": gate, "scale": scale, "shift": shift}
    x_next, y = kernels.add_layer_norm(x, h, weight, bias, 1e-6, **options)
    if h is None:
        assert x_next is x
    else:
        factor = 1 if gate is None else gate.double()[:, None]
        close(x_next, x.double() + factor * (h.double() + (0 if add is None else add.double())), draw.dtype)
    normed = F.layer_norm(x_next.double(), (channels,), optional(weight), optional(bias), 1e-6)
    if scale is not None:
        normed = normed * (1 + scale.double()[:, None]) + shift.double()[:, None]
    close(y, normed, draw.dtype, slack=1e-5 * (1 + float(normed.abs().max())) + 2e-6 * float(x.abs().max()))
    again, quantized = kernels.add_layer_norm(x, h, weight, bias, 1e-6, **options, fp8=True)
    assert torch.equal(again, x_next)
    same_quantized(quantized, kernels.quantize(y), dtype=draw.dtype)  # compiled apart: the last bit may differ


def check_gated_gelu(draw: Draw) -> None:
    inner, rows = draw.one(1, 9, 72, 320, more=(1280, 2560, 5120)), draw.one(1, 7, 33, more=(2048,))
    p = 3 * draw.normal(2, rows, 2 * inner)
    value, gate = p.double().chunk(2, -1)
    y = kernels.gated_gelu(p)
    close(y, value * F.gelu(gate), draw.dtype, slack=1e-5)
    same_quantized(kernels.gated_gelu(p, fp8=True), kernels.quantize(y), dtype=draw.dtype)


def check_quantize(draw: Draw) -> None:
    x = draw.normal(draw.one(1, 3), draw.one(1, 5, 33, more=(2048,)), draw.one(1, 72, 320, more=(1152, 5120)))
    x[0, 0] = 0
    x = x * torch.logspace(-3, 3, x.shape[1]).to(x)[None, :, None]
    found = kernels.quantize(x)
    rows = x.float().reshape(-1, x.shape[-1])
    most = rows.abs().amax(1, keepdim=True).clamp_min(1e-12)
    expected = (rows * torch.div(torch.full_like(most, LARGEST), most)).to(torch.float8_e4m3fn).reshape(x.shape)
    same_quantized(found, QuantizedRows(expected, most / LARGEST))
    assert found.values[0, 0].float().abs().max() == 0
    back = found.values.double().reshape(rows.shape) * found.scale.double()
    assert ((back - rows).abs() <= rows.abs() / 16 + most / LARGEST / 512).all()
    wide = x.double()  # by a sigmoid: 1 + tanh has lost the tail, in float64 too
    active = (wide * torch.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide**3))).to(x.dtype)
    same_quantized(kernels.quantize(x, gelu=True), kernels.quantize(active), dtype=x.dtype, apart=2e-5)


def same_quantized(
    found: QuantizedRows, expected: QuantizedRows, dtype: torch.dtype | None = None, apart: float = 0.0
) -> None:
    """Equal scales; values equal except for a neighbour in a tie, or where x itself is rounded, to `dtype`.

    `apart` is how far the numbers themselves may be from each other, relatively.
    """
    assert found.values.dtype == torch.float8_e4m3fn
    assert found.values.shape == expected.values.shape
    assert found.scale.shape == expected.scale.shape == (found.values.numel() // found.values.shape[-1], 1)
    slack = apart + (1e-6 if dtype is None else 2.02 * ROUNDING[dtype])
    assert torch.allclose(found.scale, expected.scale, rtol=slack, atol=0)
    a, b = found.values.float(), expected.values.float()
    assert (a != b).float().mean() <= max(1e-3, 16 * slack)
    step = 2.02 * SMALLEST.get(dtype, 0.0) / expected.scale.reshape(*a.shape[:-1], 1)  # of float16 near 0
    assert ((a - b).abs() <= b.abs() / 7 + 2**-9 + step).all()


def plain_update(table, cursor, active, x, anchor, p1, p2, p3, z, cond, cond_at, uncond_at) -> list[Tensor]:
    """The row of each slot in float64: (x, anchor, p1, p2, p3, x0) after it."""
    after = [r.double().clone() for r in (x, anchor, p1, p2, p3)] + [torch.zeros_like(x, dtype=torch.float64)]
    outputs = cond.double().reshape(cond.shape[0], -1)
    for i in torch.nonzero(active).flatten().tolist():
        row = {name: float(table[i, int(cursor[i]), k]) for name, k in COLUMNS.items()}
        xi, conditional = x[i].double(), outputs[int(cond_at[i])]
        guided = int(uncond_at[i]) >= 0
        unconditional = outputs[int(uncond_at[i])] if guided else conditional
        raw = unconditional + row["scale"] * (conditional - unconditional) if guided else conditional
        x0 = row["k_x"] * xi + row["k_out"] * raw
        u = row["k_x"] * xi + row["k_out"] * unconditional if guided else x0
        p0 = row["b_x"] * xi + row["b_0"] * x0
        registers = {"x": xi, "anchor": anchor[i], "p0": p0, "p1": p1[i], "p2": p2[i], "p3": p3[i], "u": u}
        registers["z"] = torch.zeros_like(xi) if z is None else z[i]
        for k, target in enumerate(("x", "anchor")):
            terms = [row[f"{target}.{name}"] * v.double() for name, v in registers.items() if row[f"{target}.{name}"]]
            after[k][i] = sum(terms, torch.zeros_like(xi))
        if not row["held"]:
            after[2][i], after[3][i], after[4][i] = p0, p1[i].double(), p2[i].double()
        after[5][i] = x0
    return after


def check_update_rows(draw: Draw) -> None:
    slots, rows = draw.one(1, 4, 7, more=(16, 33)), draw.one(1, 5)
    channels, height, width = draw.one((4, 3, 5), (1, 1, 1), (3, 8, 8), more=((4, 64, 64), (16, 31, 33)))
    calls, n = 2 * slots, channels * height * width
    table = draw.normal(slots, rows, len(COLUMNS), dtype=torch.float32)
    if draw.choice.random() < 0.5:  # as most rows are
        table[torch.rand(table.shape, generator=draw.generator) < 0.4] = 0
    table[..., COLUMNS["held"]] = (torch.rand(slots, rows, generator=draw.generator) < 0.3).to(table)
    cursor = torch.randint(rows, (slots,), generator=draw.generator).to(draw.device)
    active = (torch.rand(slots, generator=draw.generator) < 0.8).to(draw.device)
    cursor[~active] = rows + 3  # a finished slot's cursor points nowhere
    x, anchor, p1, p2, p3, z = (draw.normal(slots, n, dtype=torch.float32) for _ in range(6))
    z = z if draw.choice.random() < 0.7 else None
    table[..., COLUMNS["anchor.p3"]] = table[..., COLUMNS["x.p3"]] = 0
    p3.fill_(math.nan)  # used by no row
    cond = draw.normal(calls, channels, height, width)
    layout = draw.one("contiguous", "channels_last", "half", "flat")
    if layout == "channels_last":
        cond = cond.contiguous(memory_format=torch.channels_last)
    if layout == "half":  # a network that predicts its variance too
        cond = draw.normal(calls, 2 * channels, height, width).contiguous(memory_format=torch.channels_last)[
            :, :channels
        ]
    if layout == "flat":
        cond = cond.reshape(calls, n)
    order = torch.randperm(calls, generator=draw.generator).to(draw.device)
    cond_at, uncond_at = order[:slots].clone(), order[slots:].clone()
    uncond_at[torch.rand(slots, generator=draw.generator).to(draw.device) < 0.4] = -1
    cond_at[~active] = -1
    after = plain_update(table, cursor, active, x, anchor, p1, p2, p3, z, cond, cond_at, uncond_at)
    before = [r.clone() for r in (x, anchor, p1, p2, p3)]
    x0 = torch.zeros_like(x)
    kernels.update_rows(table, cursor, active, x, anchor, p1, p2, p3, z, cond, cond_at, uncond_at, x0)
    for found, expected in zip((x, anchor, p1, p2, x0), (*after[:4], after[5]), strict=True):
        close(found, expected, torch.float32, slack=2e-5)
    for found, held in zip((x, anchor, p1, p2, p3), before, strict=True):
        assert torch.equal(found[~active].nan_to_num(7), held[~active].nan_to_num(7))
    held = table[torch.arange(slots), cursor.clamp_max(rows - 1), COLUMNS["held"]] != 0
    assert torch.equal(p3[active & ~held], before[3][active & ~held])
    assert p3[active & held].isnan().all()


def check_scaled_input(draw: Draw) -> None:
    slots, rows = draw.one(1, 3, more=(16,)), draw.one(1, 4)
    x = draw.normal(
        slots, *draw.one((4, 3, 5), (1, 1, 1), (3, 30, 31), more=((4, 64, 64), (16, 128, 128))), dtype=torch.float32
    )
    table = draw.normal(slots, rows, len(COLUMNS), dtype=torch.float32)
    cursor = torch.randint(rows, (slots,), generator=draw.generator).to(draw.device)
    call_slot = torch.randint(slots, (draw.one(1, 5, more=(33,)),), generator=draw.generator).to(draw.device)
    found = kernels.scaled_input(x, table, cursor, call_slot, draw.dtype)
    scales = table[torch.arange(slots), cursor, COLUMNS["in_scale"]]
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, (x * scales[:, None, None, None])[call_slot].to(draw.dtype))


def check_normals(draw: Draw) -> None:
    images, count = draw.one(1, 3, more=(16, 33)), draw.one(1, 2, 5)
    n = draw.one(1, 30, 600, more=(16384, 65537))
    seeds = [draw.choice.randrange(2**64) for _ in range(images)]
    draws = torch.tensor(
        [[[draw.choice.randrange(2**31), draw.choice.randrange(40)] for _ in range(count)] for _ in seeds]
    )
    weights = torch.randn(images, count, generator=draw.generator)
    weights[torch.rand(images, count, generator=draw.generator) < 0.4] = 0
    out = torch.full((images, n), math.nan, device=draw.device)
    signed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in seeds])
    kernels.normals(signed.to(draw.device), draws.int().to(draw.device), weights.to(draw.device), n, out)
    for i, seed in enumerate(seeds):
        expected = torch.zeros(n)
        for (interval, visit), weight in zip(draws[i].tolist(), weights[i].tolist(), strict=True):
            if weight:
                expected += weight * gaussian(seed, (n,), (interval, visit, PATH), torch.empty(0))
        assert (out[i].cpu() - expected).abs().max() <= 1e-6 * (1 + float(weights[i].abs().sum()))


CHECKS = {
    name.removeprefix("check_"): function for name, function in list(globals().items()) if name.startswith("check_")
}
