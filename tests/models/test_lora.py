"""Adapters: the differences equal PEFT's or their papers' formulas; views and merges leave the base as it was."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from hypothesis import given
from hypothesis import strategies as st
from peft import LoHaConfig, LoKrConfig, LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from pellucid.core.errors import PellucidError
from pellucid.models import lora
from pellucid.models.lora import Adapter, AdapterSet
from pellucid.models.lora_delta import Delta, DoRA, Full, LoHa, LoKr, LoRA, Product
from pellucid.models.unet import UNet
from pellucid.models.unet_config import UNetConfig

Q = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
K = "mid_block.attentions.0.transformer_blocks.0.attn2.to_k"
CONV = "down_blocks.0.resnets.0.conv1"
PARITY = 1e-5  # of float32: the peer adds x·A·B where we add to W, so the two round differently


def tiny_unet() -> UNet2DConditionModel:
    """A UNet of which no two widths are equal, so that a wrong shape cannot pass for a right one."""
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=6,
        attention_head_dim=4,
        norm_num_groups=2,
    ).eval()


@pytest.fixture(scope="module")
def unet() -> UNet2DConditionModel:
    return tiny_unet()


@torch.no_grad()
def output(unet: nn.Module) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    x, context = torch.randn(2, 4, 8, 8, generator=draw), torch.randn(2, 5, 6, generator=draw)
    return unet(x, torch.tensor([3.0, 700.0]), context).sample


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def low_rank(shape: tuple[int, ...], rank: int = 2, seed: int = 0, factor: float = 1.0, size: float = 0.3) -> LoRA:
    draw = torch.Generator().manual_seed(seed)
    a = torch.randn(shape[0], rank, generator=draw) * size
    return LoRA(product=Product(a, torch.randn(rank, *shape[1:], generator=draw) * size), factor=factor)


def adapter(unet: nn.Module, layers: tuple[str, ...] = (Q, K, CONV), seed: int = 0, name: str = "style") -> Adapter:
    shapes = {layer: tuple(unet.get_submodule(layer).weight.shape) for layer in layers}
    return Adapter(name, {layer: low_rank(shape, seed=seed + i) for i, (layer, shape) in enumerate(shapes.items())})


def snapshot(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def same_bits(network: nn.Module, before: dict[str, Tensor]) -> bool:
    after = network.state_dict()
    return list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)


# The mathematics, against PEFT


def peft_lora(layer: Any) -> Delta:
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return LoRA(product=Product(b.flatten(1), a), factor=2.5 / 3)


def peft_dora(layer: Any) -> Delta:
    return DoRA(inner=peft_lora(layer), magnitude=layer.lora_magnitude_vector["default"].weight.flatten())


def peft_loha(layer: Any) -> Delta:
    sides = []
    for i in "12":
        a, b, t = (getattr(layer, f"hada_{name}").get("default") for name in (f"w{i}_a", f"w{i}_b", f"t{i}"))
        sides.append(Product(a, b) if t is None else Product(a.T, b, t))
    return LoHa(first=sides[0], second=sides[1], factor=2.5 / 3)


def peft_lokr(layer: Any) -> Delta:
    sides = []
    for i in "12":
        whole, a, b = (getattr(layer, f"lokr_w{i}{end}").get("default") for end in ("", "_a", "_b"))
        t = layer.lokr_t2.get("default") if i == "2" else None
        sides.append(Product(whole) if whole is not None else Product(a, b) if t is None else Product(a.T, b, t))
    return LoKr(left=sides[0], right=sides[1], factor=2.5 / 3)


MODULES = ["to_q", "to_k", "to_out.0", "ff.net.0.proj", "conv1", "conv_shortcut", "time_emb_proj", "proj_in"]
PLAIN = {"r": 3, "target_modules": MODULES}
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Delta]]] = {
    "lora": (lambda: LoraConfig(**PLAIN, lora_alpha=2.5, init_lora_weights=False), peft_lora),
    "dora": (lambda: LoraConfig(**PLAIN, lora_alpha=2.5, init_lora_weights=False, use_dora=True), peft_dora),
    "loha": (lambda: LoHaConfig(**PLAIN, alpha=2.5, init_weights=False), peft_loha),
    "loha tucker": (lambda: LoHaConfig(**PLAIN, alpha=2.5, init_weights=False, use_effective_conv2d=True), peft_loha),
    "lokr": (lambda: LoKrConfig(**PLAIN, alpha=2.5, init_weights=False), peft_lokr),
    "lokr small": (
        lambda: LoKrConfig(
            **PLAIN | {"r": 1}, alpha=2.5 / 3, init_weights=False, decompose_both=True, use_effective_conv2d=True
        ),
        peft_lokr,
    ),
    "lokr factor": (
        lambda: LoKrConfig(**PLAIN | {"r": 1}, alpha=2.5 / 3, init_weights=False, decompose_factor=2),
        peft_lokr,
    ),
}


@pytest.mark.parametrize("scale", [1.0, 0.4])
@pytest.mark.parametrize("case", CASES)
def test_a_view_equals_peft(unet: UNet2DConditionModel, case: str, scale: float) -> None:
    config, read = CASES[case]
    theirs = copy.deepcopy(unet)
    torch.manual_seed(2)
    inject_adapter_in_model(config(), theirs)
    layers = {name: module for name, module in theirs.named_modules() if isinstance(module, BaseTunerLayer)}
    with torch.no_grad():
        for module in layers.values():
            module.set_scale("default", scale)
            if case == "dora":  # made as the norm of W, which would leave W alone
                module.lora_magnitude_vector["default"].weight.mul_(1.3)
    deltas = {name: read(module) for name, module in layers.items()}
    products = [p for delta in deltas.values() for p in vars(delta).values() if isinstance(p, Product)]
    assert any(p.core is not None for p in products) == (case in ("loha tucker", "lokr small"))
    assert any(p.b is None for p in products) == case.startswith("lokr")
    ours, receipt = lora.apply(unet, [(Adapter(case, deltas), scale)])
    expected = output(theirs)
    assert relative(output(ours), expected) <= PARITY
    assert relative(expected, output(unet)) > 1e-3  # the adapter does something that a base would not
    assert set(receipt.change) == set(layers)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_lokr_is_the_kronecker_product_by_its_definition(a: int, b: int, c: int, d: int) -> None:
    left, right = torch.randn(a, b), torch.randn(c, d)
    delta = LoKr(left=Product(left), right=Product(right))
    blocks = torch.cat([torch.cat([left[i, j] * right for j in range(b)], 1) for i in range(a)])
    assert delta.shape == tuple(blocks.shape)
    assert torch.equal(delta.weight(torch.zeros(delta.shape)), blocks)


def test_a_tucker_core_is_three_convolutions_in_a_row() -> None:
    down, core, up = torch.randn(3, 5, 1, 1), torch.randn(4, 3, 3, 3), torch.randn(6, 4, 1, 1)
    delta = LoRA(product=Product(up.flatten(1), down, core), factor=0.5)
    x = torch.randn(1, 5, 7, 7)
    chain = F.conv2d(F.conv2d(F.conv2d(x, down), core, padding=1), up) * 0.5
    weight = delta.weight(torch.zeros(6, 5, 3, 3))
    assert delta.shape == (6, 5, 3, 3)
    assert relative(F.conv2d(x, weight, padding=1), chain) <= PARITY


def test_dora_over_inputs_gives_each_input_its_magnitude() -> None:
    base, magnitude = torch.randn(6, 5, 3, 3), torch.rand(5) + 0.5
    delta = DoRA(inner=low_rank((6, 5, 3, 3)), magnitude=magnitude, axis=1)
    moved = base + delta.weight(base, 0.7)
    assert torch.allclose(moved.pow(2).sum((0, 2, 3)).sqrt(), magnitude, rtol=1e-5)
    direction = base + delta.inner.weight(base, 0.7)
    cosine = F.cosine_similarity(moved.transpose(0, 1).flatten(1), direction.transpose(0, 1).flatten(1))
    assert torch.allclose(cosine, torch.ones(5), atol=1e-6)


def test_a_matrix_serves_a_convolution_of_one_pixel_and_a_flat_one_any() -> None:
    for shape in ((6, 5, 1, 1), (6, 5)):
        assert low_rank((6, 5)).misfit(shape) is None
        assert low_rank((6, 5, 1, 1)).misfit(shape) is None
    flat = LoHa(
        first=Product(torch.randn(6, 2), torch.randn(2, 45)), second=Product(torch.randn(6, 2), torch.randn(2, 45))
    )
    assert flat.misfit((6, 5, 3, 3)) is None
    assert low_rank((6, 5, 3, 3)).misfit((6, 9, 1, 5)) == (6, 5, 3, 3)
    assert low_rank((5, 6)).misfit((6, 5)) == (5, 6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Product(torch.zeros(4, 2), torch.zeros(3, 4)),
        lambda: Product(torch.zeros(4), torch.zeros(3, 4)),
        lambda: Product(torch.zeros(4, 2), torch.zeros(2, 4, 1, 1), torch.zeros(2, 3, 3, 3)),
        lambda: Product(torch.zeros(4, 2), torch.zeros(2, 4, 3, 3), torch.zeros(2, 2, 3, 3)),
        lambda: LoHa(first=Product(torch.zeros(4, 4)), second=Product(torch.zeros(4, 5))),
        lambda: LoKr(left=Product(torch.zeros(2, 2, 1)), right=Product(torch.zeros(4, 5))),
    ],
)
def test_factors_that_do_not_multiply_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(PellucidError) as caught:
        make()
    assert caught.value.code == "lora-shape"


# Laws of stacks


def test_a_lora_is_linear_in_its_scale(unet: UNet2DConditionModel) -> None:
    one = adapter(unet)
    base = unet.get_submodule(Q).weight
    half, whole = (lora.apply(unet, [(one, scale)])[0].get_submodule(Q).weight - base for scale in (0.5, 1.0))
    assert relative(2 * half, whole) <= PARITY


def test_a_stack_adds_up_in_any_order(unet: UNet2DConditionModel) -> None:
    base = unet.get_submodule(Q).weight
    dora = DoRA(inner=low_rank(tuple(base.shape), seed=9), magnitude=torch.rand(len(base)) + 0.5)
    one, other = adapter(unet, name="one"), Adapter("other", {Q: dora})
    single = [lora.apply(unet, [pair])[0].get_submodule(Q).weight - base for pair in ((one, 0.7), (other, 1.2))]
    for stack in ([(one, 0.7), (other, 1.2)], [(other, 1.2), (one, 0.7)]):
        view, receipt = lora.apply(unet, stack)
        assert relative(view.get_submodule(Q).weight - base, single[0] + single[1]) <= PARITY
        assert receipt.adapters == tuple(member.name for member, _ in stack)


def test_the_longest_prefix_decides_the_scale(unet: UNet2DConditionModel) -> None:
    one = adapter(unet)
    view, receipt = lora.apply(unet, [(one, {"": 0.25, "mid_block": 0.0, "down_blocks": 0.5, Q: 2.0})])
    assert set(receipt.change) == {Q, CONV}
    for layer, scale in ((Q, 2.0), (CONV, 0.5)):
        expected = lora.apply(unet, [(one, scale)])[0].get_submodule(layer).weight
        assert torch.equal(view.get_submodule(layer).weight, expected)
    assert view.get_submodule(K).weight is unet.get_submodule(K).weight
    assert lora.scale_at({"down_blocks.1": 3.0}, "down_blocks.10") == 1.0  # a prefix ends at a dot
    assert lora.scale_at({"down": 3.0}, "down_blocks.0") == 3.0  # or is a whole side


def test_a_receipt_tells_the_change_in_norm(unet: UNet2DConditionModel) -> None:
    one = Adapter("style", adapter(unet).layers, keys=("a", "b"))
    _, receipt = lora.apply(unet, [(one, 0.5)])
    for layer, delta in one.layers.items():
        weight = unet.get_submodule(layer).weight
        expected = delta.weight(weight, 0.5).norm() / weight.norm()
        assert receipt.change[layer] == pytest.approx(expected.item(), rel=1e-5)
    assert receipt.read == ("a", "b")
    assert "style: 2 keys read, 0 unused; 3 layers changed, most" in str(receipt)


def test_a_bias_moves_too_and_is_made_where_there_was_none() -> None:
    network = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2))
    shift = {"0": torch.randn(4), "1": torch.randn(2)}
    deltas = {
        name: Full(tensor=torch.randn_like(network.get_submodule(name).weight), bias=b) for name, b in shift.items()
    }
    view, receipt = lora.apply(network, [(Adapter("full", deltas), 0.5)])
    x = torch.randn(5, 3)
    first = F.linear(x, network[0].weight + deltas["0"].tensor / 2, shift["0"] / 2)
    second = F.linear(first, network[1].weight + deltas["1"].tensor / 2, network[1].bias + shift["1"] / 2)
    assert relative(view(x), second) <= PARITY
    assert set(receipt.change) == {"0", "0.bias", "1", "1.bias"}
    assert receipt.change["0.bias"] == math.inf  # there was nothing to be relative to
    before = snapshot(network)
    with lora.merge(network, [(Adapter("full", deltas), 0.5)]):
        assert torch.equal(network(x), view(x))
    assert same_bits(network, before)
    assert network[0].bias is None


# Views


def test_a_view_shares_what_it_does_not_touch_and_leaves_the_base(unet: UNet2DConditionModel) -> None:
    before, expected = snapshot(unet), output(unet)
    view, _ = lora.apply(unet, [(adapter(unet), 1.0)])
    ours, base = dict(view.named_parameters()), dict(unet.named_parameters())
    touched = {f"{layer}.weight" for layer in (Q, K, CONV)}
    assert list(ours) == list(base)
    for name in base:
        assert (ours[name].data_ptr() == base[name].data_ptr()) == (name not in touched)
    assert all(a is b for (_, a), (_, b) in zip(view.named_buffers(), unet.named_buffers(), strict=True))
    assert type(view) is type(unet)
    output(view)
    assert same_bits(unet, before)
    assert torch.equal(output(unet), expected)


def test_two_views_run_at_once_and_give_their_own_results(unet: UNet2DConditionModel) -> None:
    views = [lora.apply(unet, [(adapter(unet, seed=seed), 1.0)])[0] for seed in (10, 20)]
    alone = [output(network) for network in (*views, unet)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(output, (*views, unet)))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert relative(alone[0], alone[1]) > 1e-3


def test_a_view_of_a_view_is_a_stack(unet: UNet2DConditionModel) -> None:
    one, other = adapter(unet), adapter(unet, seed=30)
    twice = lora.apply(lora.apply(unet, [(one, 1.0)])[0], [(other, 1.0)])[0]
    assert relative(output(twice), output(lora.apply(unet, [(one, 1.0), (other, 1.0)])[0])) <= PARITY


def test_a_view_has_hooks_and_modes_of_its_own_and_keeps_shared_modules_shared() -> None:
    inner = nn.Linear(3, 3)
    network = nn.ModuleDict({"a": inner, "b": inner, "c": nn.Linear(3, 3)})
    view, _ = lora.apply(network, [(adapter(network, ("a",)), 1.0)])
    view.train(False)
    view["a"].register_forward_hook(lambda *_: None)
    assert view["a"] is view["b"]
    assert view["a"] is not inner
    assert network.training
    assert not inner._forward_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_view_keeps_dtype_memory_format_and_gradient_flag(dtype: torch.dtype) -> None:
    network = nn.Sequential(nn.Conv2d(4, 6, 3)).to(dtype).to(memory_format=torch.channels_last).requires_grad_(False)
    view, _ = lora.apply(network, [(adapter(network, ("0",)), 1.0)])
    weight = view[0].weight
    assert weight.dtype == dtype
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.requires_grad
    exact = network[0].weight.float() + adapter(network, ("0",)).layers["0"].weight(network[0].weight)
    assert torch.equal(weight, exact.to(dtype))  # float32 inside, rounded once


def test_a_view_compiles_to_one_graph(count_graphs: Callable[..., int]) -> None:
    torch.manual_seed(0)
    config = UNetConfig(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=6,
        attention_head_dim=4,
        norm_num_groups=2,
    )
    network = UNet(config).eval()
    view, _ = lora.apply(network, [(adapter(network), 1.0)])
    calls = [((torch.randn(2, 4, 8, 8), torch.tensor([t, t]), torch.randn(2, 5, 6)), {}) for t in (3.0, 9.0)]
    assert count_graphs(view, calls) == 1


# Merging


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_is_the_view_and_unmerge_is_exact(dtype: torch.dtype) -> None:
    unet = tiny_unet().to(dtype)
    before, places = snapshot(unet), {name: p.data_ptr() for name, p in unet.named_parameters()}
    stack = [(adapter(unet), 0.8), (adapter(unet, seed=40, name="other"), -0.3)]
    view, receipt = lora.apply(unet, stack)
    merged = lora.merge(unet, stack)
    assert merged.receipt == receipt
    assert same_bits(unet, snapshot(view))
    assert {name: p.data_ptr() for name, p in unet.named_parameters()} == places
    merged.unmerge()
    assert same_bits(unet, before)


def test_merges_are_undone_last_first() -> None:
    unet = tiny_unet()
    before = snapshot(unet)
    first = lora.merge(unet, [(adapter(unet), 1.0)])
    second = lora.merge(unet, [(adapter(unet, (Q,), seed=50), 1.0)])
    with pytest.raises(PellucidError, match="last merge first") as caught:
        first.unmerge()
    assert caught.value.code == "lora-unmerge"
    second.unmerge()
    first.unmerge()
    assert same_bits(unet, before)
    first.unmerge()  # nothing is left to undo
    assert same_bits(unet, before)


def test_a_merge_that_fails_leaves_the_base() -> None:
    unet = tiny_unet()
    before = snapshot(unet)
    good = adapter(unet)
    shape = tuple(unet.get_submodule(K).weight.shape)
    bad = Adapter("bad", {K: Full(tensor=torch.full(shape, math.nan))})
    with pytest.raises(PellucidError, match="finite"):
        lora.merge(unet, [(good, 1.0), (bad, 1.0)])
    assert same_bits(unet, before)


# Refusals


def refused(network: nn.Module, stack: list[tuple[Adapter, Any]]) -> PellucidError:
    with pytest.raises(PellucidError) as caught:
        lora.apply(network, stack)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("scale", [math.nan, math.inf, "1", True, None, {"mid_block": math.nan}])
def test_a_scale_is_a_finite_number(unet: UNet2DConditionModel, scale: Any) -> None:
    error = refused(unet, [(adapter(unet), scale)])
    assert error.code == "lora-scale"
    assert "scale of adapter style" in str(error)


def test_a_prefix_that_covers_nothing_is_refused(unet: UNet2DConditionModel) -> None:
    error = refused(unet, [(adapter(unet), {"mid_blok": 0.5})])
    assert error.code == "lora-scale"
    assert "Nearest: mid_block" in str(error)


def test_another_base_is_named_with_its_first_layer_and_both_shapes(unet: UNet2DConditionModel) -> None:
    layers = {K: low_rank((16, 7)), Q: low_rank((20, 16)), CONV: low_rank((8, 8, 3, 3))}
    error = refused(unet, [(Adapter("xl", layers), 1.0)])
    assert error.code == "lora-base"
    assert str(error).startswith(f"{Q} of adapter xl must be (16, 16) as in the base; got (20, 16).")


@pytest.mark.parametrize("delta", ["magnitude", "bias"])
def test_a_magnitude_or_bias_of_another_length_is_refused(unet: UNet2DConditionModel, delta: str) -> None:
    inner = low_rank((16, 16))
    bad = (
        DoRA(inner=inner, magnitude=torch.ones(9))
        if delta == "magnitude"
        else Full(tensor=torch.ones(16, 16), bias=torch.ones(9))
    )
    assert "got (9,)" in str(refused(unet, [(Adapter("bad", {Q: bad}), 1.0)]))


def test_a_layer_that_the_network_lacks_is_refused(unet: UNet2DConditionModel) -> None:
    error = refused(unet, [(Adapter("style", {Q.replace("to_q", "to_queue"): low_rank((16, 16))}), 1.0)])
    assert error.code == "lora-layer"
    assert Q in str(error)


def nothing(kind: str, unet: nn.Module) -> list[tuple[Adapter, Any]]:
    one, base = adapter(unet), unet.get_submodule(Q).weight
    zero = LoRA(product=Product(torch.zeros(16, 2), torch.randn(2, 16)))
    off = DoRA(inner=zero, magnitude=torch.linalg.vector_norm(base, dim=1))
    return {
        "empty": [],
        "no layers": [(Adapter("style", {}), 1.0)],
        "scale 0": [(one, 0)],
        "scale 0 by block": [(one, {"": 0.0, "mid_block": 0.0})],
        "zero": [(Adapter("style", {Q: zero}), 1.0)],
        "fresh dora": [(Adapter("style", {Q: off}), 1.0)],
        "second of two": [(Adapter("other", one.layers), 1.0), (Adapter("style", {Q: zero}), 1.0)],
        "cancelled": [(one, 1.0), (one, -1.0)],
    }[kind]


@pytest.mark.parametrize(
    "kind", ["empty", "no layers", "scale 0", "scale 0 by block", "zero", "fresh dora", "second of two", "cancelled"]
)
def test_an_adapter_that_changes_nothing_is_an_error(unet: UNet2DConditionModel, kind: str) -> None:
    error = refused(unet, nothing(kind, unet))
    assert error.code == "lora-nothing"
    assert kind == "empty" or "adapter style must change a layer" in str(error)


def test_a_change_that_the_dtype_rounds_away_is_an_error() -> None:
    network = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    small = Adapter("style", {"0": Full(tensor=network[0].weight.detach().float() * 1e-4)})
    assert refused(network, [(small, 1.0)]).code == "lora-nothing"
    assert lora.apply(network.float(), [(small, 1.0)])[1].change["0"] == pytest.approx(1e-4, rel=1e-4)


# Several components


def test_a_set_is_applied_by_component(unet: UNet2DConditionModel) -> None:
    networks = {"unet": unet, "text_encoder": nn.Sequential(nn.Linear(3, 3)), "vae": nn.Linear(2, 2)}
    text = Adapter("style", adapter(networks["text_encoder"], ("0",)).layers, ("t",))
    style = AdapterSet("style", {"unet": Adapter("style", adapter(unet).layers, ("u",)), "text_encoder": text}, ("x",))
    views, receipt = lora.apply_all(networks, [(style, {"text_encoder": 0.5, "unet.mid_block": 0.0})])
    assert views["vae"] is networks["vae"]
    assert torch.equal(
        views["text_encoder"][0].weight, lora.apply(networks["text_encoder"], [(text, 0.5)])[0][0].weight
    )
    assert set(receipt.change) == {"text_encoder.0", f"unet.{Q}", f"unet.{CONV}"}
    assert (receipt.read, receipt.unused) == (("u", "t"), ("x",))
    with pytest.raises(PellucidError, match="must change a layer"):
        lora.apply_all(networks, [(style, {"text_encoder": 0.0, "unet": 0.0})])
    with pytest.raises(PellucidError, match=r"scale of adapter style at vae"):
        lora.apply_all(networks, [(style, {"vae": 0.5})])
    with pytest.raises(PellucidError, match="component of adapter style must be one of unet; got 'text_encoder'"):
        lora.apply_all({"unet": unet}, [(style, 1.0)])
