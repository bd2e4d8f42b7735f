"""fp8: the numbers of e4m3, the layer against float32, which layers it replaces, and LoRA over it."""

from __future__ import annotations

import copy

import pytest
import tiny_models as tiny
import tiny_networks
import torch
from plain_kernels import fused_on_cpu
from torch import Tensor, nn

from pellucid.core.errors import PellucidError
from pellucid.models import attention, lora, ops, quantize
from pellucid.models.kernels import E4M3, QuantizedRows
from pellucid.models.lora import Adapter
from pellucid.models.lora_delta import LoRA, Product
from pellucid.models.quantize import Fp8Linear, dithered, quantize_rows
from pellucid.train.initial import fresh

DIT = {
    "_class_name": "DiTTransformer2DModel",
    "sample_size": 8,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_embeds_ada_norm": 10,
}
DDPM = {
    "_class_name": "UNet2DModel",
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [16, 32],
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "attention_head_dim": 8,
}
HALF_STEP = 2.0**-4  # of a number's magnitude: e4m3 has three bits behind the leading one
SMALLEST = 2.0**-10  # half of the least number above zero, in units of a row's scale


def layer(seed: int, features: int, outputs: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(seed)
    made = nn.Linear(features, outputs, bias=bias).to(torch.bfloat16)
    return made.requires_grad_(False)


def wide(rows: QuantizedRows) -> Tensor:
    flat = rows.values.float().flatten(0, -2) * rows.scale
    return flat.reshape(rows.values.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_within_half_a_step(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = (torch.randn(3, 5, 48) * torch.logspace(-3, 3, 5)[None, :, None]).to(dtype)
    x[0, 0] = 0
    rows = quantize_rows(x)
    assert rows.values.dtype == E4M3
    assert rows.scale.shape == (15, 1)
    assert rows.scale.dtype == torch.float32
    bound = HALF_STEP * x.float().abs() + SMALLEST * 1.001 * rows.scale.reshape(3, 5, 1)
    assert ((wide(rows) - x.float()).abs() <= bound).all()
    assert (wide(rows)[0, 0] == 0).all()
    most = x.float().abs().amax(-1)
    assert torch.allclose(wide(rows).abs().amax(-1), most, rtol=1e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_is_the_float32_product_within_the_rounding_of_e4m3(seed: int, bias: bool) -> None:
    """|Δy| ≤ Σ |Δx||w| + |x||Δw| + |Δx||Δw|, each Δ half a step at most, and y's own rounding to bfloat16."""
    plain = layer(seed, 64, 32, bias)
    made = Fp8Linear(plain)
    x = torch.randn(2, 7, 64).to(torch.bfloat16) * 3
    y = made(x)
    assert y.dtype == torch.bfloat16
    assert y.shape == (2, 7, 32)
    expected = nn.functional.linear(x.float(), plain.weight.float(), plain.bias.float() if bias else None)
    rows = quantize_rows(x)
    dx = HALF_STEP * x.float().abs() + SMALLEST * rows.scale.reshape(2, 7, 1)
    dw = HALF_STEP * plain.weight.float().abs() + SMALLEST * made.scale[:, None]
    linear = nn.functional.linear
    bound = linear(dx, plain.weight.float().abs()) + linear(x.float().abs(), dw) + linear(dx, dw)
    assert ((y.float() - expected).abs() <= 1.001 * bound + 2**-8 * expected.abs() + 1e-6).all()
    error = (y.float() - expected).norm() / expected.norm()
    assert error < 0.06  # two roundings of about 2.6 % each, in the mean


def test_rows_that_come_rounded_give_the_same() -> None:
    made, x = Fp8Linear(layer(1, 32, 16)), torch.randn(2, 3, 32).to(torch.bfloat16)
    assert torch.equal(made(x), made(quantize_rows(x)))
    assert torch.equal(ops.linear(x, made), made(x))


def test_another_dtype_or_place_leaves_the_numbers() -> None:
    made = Fp8Linear(layer(1, 32, 16))
    before = made.weight.view(torch.int8).clone(), made.scale.clone()
    made.to(torch.float32)
    assert made.weight.dtype == E4M3
    assert torch.equal(made.weight.view(torch.int8), before[0])
    assert torch.equal(made.scale, before[1])
    made.half().to(memory_format=torch.channels_last)
    assert torch.equal(made.scale, before[1])
    assert made.to("meta").weight.is_meta
    assert made.scale.is_meta


def test_gradients_are_refused() -> None:
    made = Fp8Linear(layer(1, 32, 16))
    with pytest.raises(PellucidError, match=r"dtype must be another one where gradients are needed; got 'fp8'\."):
        made(torch.randn(2, 32, requires_grad=True))


# --- which layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [tiny_networks.UNET, tiny_networks.PIXART, DIT, DDPM])
def test_what_stays_as_it_is(config: dict) -> None:
    network = fresh(config, seed=1).to(torch.bfloat16)
    names = {name for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    count = quantize.quantize(network, least=16)
    found = {name for name, module in network.named_modules() if isinstance(module, Fp8Linear)}
    assert count == len(found) > 0
    assert quantize.dtype_name(network) == "fp8"
    for name in names - found:
        text = "attn2.to_k" in name or "attn2.to_v" in name
        first_or_last = any(part in name for part in ("proj_in", "proj_out"))
        assert text or first_or_last or any(part in name for part in ("time", "emb", "norm", "adaln", "caption")), name
    for name in found:
        assert any(part in name for part in ("to_q", "to_k", "to_v", "to_out", "ff.net")), name
        assert "attn2.to_k" not in name


def test_small_layers_and_odd_ones_stay() -> None:
    network = fresh(tiny_networks.UNET, seed=1)
    assert quantize.quantize(network) == 0
    assert quantize.quantize(network, least=32) > 0
    small = [m for m in network.modules() if isinstance(m, Fp8Linear) and min(m.in_features, m.out_features) < 32]
    assert not small
    block = nn.ModuleDict({"attn1": attention.Attention(40, 1, 40)})
    assert quantize.quantize(nn.ModuleDict({"transformer_blocks": nn.ModuleList([block])}), least=16) == 0


# --- operations ---------------------------------------------------------------------------------------------------


def quantized(config: dict, seed: int = 1) -> tuple[nn.Module, nn.Module]:
    """A network in bfloat16, and the same in fp8."""
    plain = tiny.randomised(fresh(config, seed=seed)).to(torch.bfloat16).eval().requires_grad_(False)
    made = copy.deepcopy(plain)
    quantize.quantize(made, least=16)
    return plain, made


def call(network: nn.Module, config: dict) -> Tensor:
    torch.manual_seed(2)
    size, channels = config["sample_size"], config.get("in_channels", 4)
    x = torch.randn(2, channels, size, size).to(torch.bfloat16)
    more: dict = {}
    if config.get("cross_attention_dim"):
        more["context"] = torch.randn(2, 5, 32).to(torch.bfloat16)
    if config["_class_name"] == "DiTTransformer2DModel":
        more["labels"] = torch.tensor([1, 2])
    with torch.no_grad():
        return network(x, torch.tensor([10.0, 500.0]), **more).float()


NETWORKS = {"unet": tiny_networks.UNET, "pixart": tiny_networks.PIXART, "dit": DIT, "ddpm": DDPM}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_near_itself_in_bfloat16(name: str) -> None:
    plain, made = (call(network, NETWORKS[name]) for network in quantized(NETWORKS[name]))
    assert made.isfinite().all()
    assert 0 < (made - plain).norm() / plain.norm() < 0.1


@pytest.mark.parametrize("name", NETWORKS)
def test_fused_operations_round_in_the_kernels(name: str) -> None:
    """The same network over the fused kernels: packed, and without a row rounded by any other code."""
    _, made = quantized(NETWORKS[name])
    plain = call(made, NETWORKS[name])
    attention.pack(made)
    assert torch.equal(call(made, NETWORKS[name]), plain)
    with fused_on_cpu() as kernels, pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "quantize_rows", None)  # the kernels' own is another name
        fused = call(made, NETWORKS[name])
    assert (fused - plain).norm() / plain.norm() < 0.05
    layers = [m for m in made.modules() if isinstance(m, Fp8Linear)]
    assert kernels.calls["quantize"] > 0
    if name in ("unet", "pixart", "dit"):
        assert kernels.calls["add_layer_norm fp8"] > 0
        assert kernels.calls["quantize"] < len(layers)


def test_a_hook_sees_what_comes_in_plain() -> None:
    _, made = quantized(tiny_networks.UNET)
    seen: list[object] = []
    for module in made.modules():
        if isinstance(module, Fp8Linear | attention.Attention):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with fused_on_cpu():
        call(made, tiny_networks.UNET)
    assert seen
    assert all(isinstance(one, Tensor) for one in seen)


# --- LoRA ---------------------------------------------------------------------------------------------------------

LAYER = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_v"


def adapter(network: nn.Module, size: float, seed: int = 3) -> Adapter:
    torch.manual_seed(seed)
    weight = network.get_submodule(LAYER).weight
    up, down = torch.randn(weight.shape[0], 2), torch.randn(2, weight.shape[1])
    norm = (up @ down).norm()
    base = network.get_submodule(LAYER)
    wanted = (base.wide() if isinstance(base, Fp8Linear) else base.weight.float()).norm() * size
    return Adapter("a", {LAYER: LoRA(product=Product(up * (wanted / norm), down))})


def test_small_differences_survive_the_rounding() -> None:
    """Half a step of e4m3 is 6 %: rounded to the nearest, most of a difference of 1 % would be lost."""
    torch.manual_seed(5)
    base = Fp8Linear(nn.Linear(256, 256)).wide()
    delta = torch.randn(256, 2) @ torch.randn(2, 256)
    delta *= 0.01 * base.norm() / delta.norm()

    def kept(weight: Tensor) -> float:
        return float((weight - base).flatten() @ delta.flatten() / delta.norm() ** 2)

    made = dithered(base + delta)
    assert kept(wide(quantize_rows(base + delta))) < 0.7
    assert kept(made["weight"].float() * made["scale"][:, None]) == pytest.approx(1, abs=0.1)
    step = 2 * HALF_STEP * (base + delta).abs() + 2 * SMALLEST * made["scale"][:, None]
    assert ((made["weight"].float() * made["scale"][:, None] - base - delta).abs() <= 1.01 * step).all()
    again = dithered(base + delta)
    assert torch.equal(made["weight"].view(torch.int8), again["weight"].view(torch.int8))


def test_a_view_with_an_adapter_has_weights_of_its_own() -> None:
    _, base = quantized(tiny_networks.UNET)
    attention.pack(base)
    before = {name: t.view(torch.int8).clone() for name, t in base.state_dict().items()}
    mine, receipt = lora.apply(base, [(adapter(base, 0.5), 1.0)])
    assert receipt.change[LAYER] == pytest.approx(0.5, rel=0.01)
    made = mine.get_submodule(LAYER)
    assert isinstance(made, Fp8Linear)
    expected = base.get_submodule(LAYER).wide() + adapter(base, 0.5).layers[LAYER].weight(torch.empty(32, 32))
    assert (made.wide() - expected).norm() / expected.norm() < 0.06
    assert ops.packed(*mine.get_submodule(LAYER.rpartition(".")[0]).projections)
    out, plain = call(mine, tiny_networks.UNET), call(base, tiny_networks.UNET)
    assert not torch.equal(out, plain)
    assert torch.equal(call(lora.apply(base, [(adapter(base, 0.5), 1.0)])[0], tiny_networks.UNET), out)
    other = call(lora.apply(base, [(adapter(base, 0.5, seed=4), 1.0)])[0], tiny_networks.UNET)
    assert not torch.equal(other, out)
    for name, tensor in base.state_dict().items():
        assert torch.equal(tensor.view(torch.int8), before[name]), name
    with fused_on_cpu():
        packed = call(mine, tiny_networks.UNET)
    assert (packed - out).norm() / out.norm() < 0.05


def test_a_merge_is_undone_bit_for_bit() -> None:
    _, base = quantized(tiny_networks.UNET)
    plain = call(base, tiny_networks.UNET)
    view, _ = lora.apply(base, [(adapter(base, 0.5), 1.0)])
    with lora.merge(base, [(adapter(base, 0.5), 1.0)]):
        assert torch.equal(call(base, tiny_networks.UNET), call(view, tiny_networks.UNET))
    assert torch.equal(call(base, tiny_networks.UNET), plain)


def test_the_bias_of_an_adapter_is_in_bfloat16() -> None:
    _, base = quantized(tiny_networks.UNET)
    made = adapter(base, 0.5).layers[LAYER]
    shifted = Adapter("b", {LAYER: LoRA(product=made.product, bias=torch.ones(32))})
    view, _ = lora.apply(base, [(shifted, 1.0)])
    assert view.get_submodule(LAYER).bias.dtype == torch.bfloat16
