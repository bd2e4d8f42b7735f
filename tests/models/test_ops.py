"""The fused forms of operations against the plain ones, over kernels in plain torch; packed weights are never stale."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from live_memory import live_peak
from oracles import randomise, relative
from plain_kernels import PlainKernels, fused_on_cpu
from test_controlnet import control_raw
from test_dit import CLASS_CONDITIONAL, TEXT, class_inputs, text_inputs
from test_hoist import compare
from test_ip_adapter import file_of, flat, states_of
from test_unet import CONFIGS, inputs_of
from test_vae import CONFIGS as VAES
from test_vae import FULL
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid.models import attention, ops
from pellucid.models import config as configs
from pellucid.models.attention import Attention
from pellucid.models.controlnet import ControlledUNet, ControlNet
from pellucid.models.dit import DiT, DiTConfig, PixArt, PixArtConfig
from pellucid.models.ip_adapter import from_state
from pellucid.models.lora import view
from pellucid.models.tiles import decode_tiled, encode_tiled
from pellucid.models.unet import UNet
from pellucid.models.unet_config import read
from pellucid.models.vae import AutoencoderKL, VAEConfig

CLOSE = 5e-6  # float32, relative to the largest value: the same sums in another order
Q = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


def unet(name: str) -> UNet:
    return randomise(UNet(read(CONFIGS[name])))  # type: ignore[return-value]


def vae(name: str) -> AutoencoderKL:
    return randomise(AutoencoderKL(configs.read(VAEConfig, VAES[name])))  # type: ignore[return-value]


@torch.no_grad()
def agree(network: nn.Module, call: Callable[[], Tensor]) -> dict[str, int]:
    """Plain and fused, with weights in either order and packed; returns the calls of the kernels."""
    want = call()
    for order in (torch.contiguous_format, torch.channels_last):
        network.to(memory_format=order)
        for _ in range(2):
            with fused_on_cpu() as kernels:
                assert relative(call(), want) <= CLOSE
            assert kernels.calls
            attention.pack(network)
    return dict(kernels.calls)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_unet_fused_is_the_plain_one(name: str) -> None:
    network, given = unet(name), inputs_of(CONFIGS[name])
    calls = agree(network, lambda: network(**given))
    blocks = len(network.timed_blocks())
    pixel = sum(isinstance(m, nn.GroupNorm) for m in network.modules()) - 2 * blocks  # of attentions, and the last one
    assert calls["group_norm"] == 2 * blocks + pixel
    assert calls.get("add_layer_norm", 0) == 3 * len(network.cross_attentions())


@pytest.mark.parametrize("size", [(9, 11), (1, 1), (8, 2)])
def test_odd_sizes(size: tuple[int, int]) -> None:
    network, given = unet("sdxl"), inputs_of(CONFIGS["sdxl"], size=size, batch=3)
    agree(network, lambda: network(**given))


def test_perturbed_skipped_and_masked() -> None:
    network, given = unet("sd1"), inputs_of(CONFIGS["sd1"])
    place = network.cross_attentions()[0][1]
    mask = torch.tensor([[1] * 7, [1, 1, 1, 0, 0, 0, 0]])
    for more in ({"perturbed": (place,)}, {"skipped": (place,)}, {"context_mask": mask}):
        agree(network, lambda more=more: network(**given, **more))


@pytest.mark.parametrize("name", ["sd1", "sdxl"])
def test_controlnets_and_image_prompts(name: str) -> None:
    nets = [randomise(ControlNet(read(control_raw(name))), seed) for seed in (5, 6)]
    base = unet(name)
    network = ControlledUNet(base, nets)  # type: ignore[arg-type]
    given = inputs_of(CONFIGS[name])
    image = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    adapter = from_state(flat(file_of(base, "plus"))).eval()
    with torch.no_grad():
        hints = [net.hint(image, [0.7, 1.1]) for net in nets]  # type: ignore[operator]
        tokens = adapter.tokens(base, states_of("plus"), scale=0.6, size=(8, 8))
    agree(network, lambda: network(**given, control=tuple(hints), image=tokens))


@pytest.mark.parametrize("name", CLASS_CONDITIONAL)
def test_a_dit_fused_is_the_plain_one(name: str) -> None:
    network = randomise(DiT(DiTConfig(**CLASS_CONDITIONAL[name])))
    torch.manual_seed(0)
    x, time, labels = class_inputs(network.config, 8, 12)
    calls = agree(network, lambda: network(x, time, labels=labels))
    assert calls == {"add_layer_norm": 2 * 3 + 1, "product_gelu": 3, "add_bias": 1}


@pytest.mark.parametrize("name", TEXT)
def test_a_pixart_fused_is_the_plain_one(name: str) -> None:
    network = randomise(PixArt(PixArtConfig(**TEXT[name])))
    torch.manual_seed(0)
    given = text_inputs(network.config, 8, 12)
    agree(network, lambda: network(**given))


@pytest.mark.parametrize("name", ["sd1", "sdxl", "scale_shift", "cross_only"])
@torch.no_grad()
def test_hoisted_and_fused(name: str) -> None:
    given = inputs_of(CONFIGS[name], batch=3)
    x = given.pop("x")
    del given["time"]
    with fused_on_cpu() as kernels:
        compare(unet(name), x, given)
    assert kernels.calls["group_norm"]


@pytest.mark.parametrize("name", VAES)
def test_a_vae_fused_is_the_plain_one(name: str) -> None:
    network = vae(name)
    torch.manual_seed(0)
    latents = torch.randn(2, network.config.latent_channels, 5, 11)
    images = torch.randn(2, network.config.in_channels, 3 * network.config.factor, 5 * network.config.factor)
    agree(network, lambda: network.decode(latents))
    agree(network, lambda: network.encode(images).mean)
    agree(network, lambda: decode_tiled(network, latents, 8))
    agree(network, lambda: encode_tiled(network, images, 8).mean)


class Copies(TorchDispatchMode):
    """The operations that only move numbers, with what they move."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            self.seen.append((str(func), tuple(out.shape)))
        return out


@pytest.mark.parametrize("name", ["sd1", "sd2", "sdxl", "ddpm"])
@torch.no_grad()
def test_no_feature_map_is_copied_into_another_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention aside, whose kernel on a CPU may make its operands contiguous."""
    network = unet(name).to(memory_format=torch.channels_last)
    attention.pack(network)
    given = inputs_of(CONFIGS[name])
    given["x"] = given["x"].to(memory_format=torch.channels_last)
    monkeypatch.setattr(attention, "attend", lambda q, k, v, mask=None: q if q.shape == v.shape else q * v.mean())
    monkeypatch.setattr(attention, "join_heads", lambda x: x.new_zeros(x.shape[0], x.shape[2], x.shape[1] * x.shape[3]))
    with fused_on_cpu(), Copies() as copies:
        out = network(**given)
    assert out.is_contiguous(memory_format=torch.channels_last)
    large = [one for one in copies.seen if len(one[1]) == 4 or len(one[1]) == 3]
    assert large == []


# --- which form -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_fused_form_can_be_switched_off_in_a_thread() -> None:
    x = torch.randn(1, 4, 8, 8)
    seen: list[bool] = []
    with fused_on_cpu():
        assert ops.fused(x)
        with ops.using(fused=False):
            assert not ops.fused(x)
            with ops.using(fused=True):
                assert ops.fused(x)
            other = threading.Thread(target=lambda: seen.append(torch.no_grad()(ops.fused)(x)))
            other.start()
            other.join()
        assert ops.fused(x)
    assert seen == [True]
    assert not ops.fused(x)


def test_what_trains_is_plain() -> None:
    network, given = unet("sd1"), inputs_of(CONFIGS["sd1"])
    with fused_on_cpu() as kernels:
        network(**given).square().sum().backward()
    assert not kernels.calls
    assert all(weight.grad is not None for weight in network.parameters())


@torch.no_grad()
def test_other_dtypes_are_plain() -> None:
    network, given = unet("ddpm").double(), inputs_of(CONFIGS["ddpm"])
    with fused_on_cpu() as kernels:
        network(**{name: value.double() for name, value in given.items()})
    assert not kernels.calls


@torch.no_grad()
def test_without_the_kernels_all_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_DEVICE", "cpu")
    monkeypatch.setattr(ops, "kernels", lambda: None)
    network, given = unet("sd1"), inputs_of(CONFIGS["sd1"])
    want = network(**given)
    monkeypatch.undo()
    assert torch.equal(network(**given), want)


@torch.no_grad()
def test_every_layer_that_is_watched_is_called() -> None:
    """Hooks on all modules, as the doctor sets them, see what they see in the plain form."""
    network, given = unet("sdxl"), inputs_of(CONFIGS["sdxl"])
    met: dict[str, int] = {}
    for name, module in network.named_modules():
        module.register_forward_hook(lambda *_, name=name: met.update({name: met.get(name, 0) + 1}))
    with ops.using(fused=False):
        want = network(**given)
    plain, met = met, {}
    with fused_on_cpu():
        assert relative(network(**given), want) <= CLOSE
    assert met == plain


@torch.no_grad()
def test_one_watched_layer_leaves_the_others_fused() -> None:
    network, given = unet("sd1"), inputs_of(CONFIGS["sd1"])
    seen: list[Tensor] = []
    conv = network.get_submodule("mid_block.resnets.0.conv1")
    want = network(**given)
    conv.register_forward_hook(lambda module, args, out: seen.append(out))
    with fused_on_cpu() as kernels:
        assert relative(network(**given), want) <= CLOSE
    assert len(seen) == 1
    norms = sum(isinstance(m, nn.GroupNorm) for m in network.modules())
    assert kernels.calls["group_norm"] == norms - 1  # the norm after it is one operation with it


# --- packed weights -------------------------------------------------------------------------------------------------


class Products:
    """Counts matrix products by the height of their weight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heights: list[int] = []
        linear = F.linear

        def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            self.heights.append(len(weight))
            return linear(x, weight, bias)

        monkeypatch.setattr(F, "linear", counted)


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_packed_projections_are_one_product(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = randomise(Attention(24, 2, 8, bias=bias))
    x = torch.randn(2, 5, 24)
    want, before = layer(x), {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    attention.pack(layer)
    assert ops.packed(*layer.projections)
    assert len({p.untyped_storage().data_ptr() for p in (layer.to_q.weight, layer.to_k.weight, layer.to_v.weight)}) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    products = Products(monkeypatch)
    assert torch.equal(layer(x), want)
    assert products.heights == [16, 16, 16, 24]
    with fused_on_cpu():
        assert relative(layer(x), want) <= CLOSE
    assert products.heights[4:] == [48, 24]


@torch.no_grad()
def test_cross_attentions_are_left_as_they_are() -> None:
    layer = Attention(24, 2, 8, context=24)
    attention.pack(layer)
    assert not ops.packed(*layer.projections)


def exchange(layer: Attention) -> None:
    """Queries and values change places: still in one storage, in another order."""
    layer.to_q._parameters, layer.to_v._parameters = layer.to_v._parameters, layer.to_q._parameters


@torch.no_grad()
def test_weights_that_were_taken_apart_are_never_stale() -> None:
    layer = randomise(Attention(24, 2, 8, bias=True))
    attention.pack(layer)
    x = torch.randn(2, 5, 24)
    with fused_on_cpu():
        for change in (
            lambda m: m.to_q.weight.mul_(2.0),  # in place, as a merge does it
            lambda m: setattr(m.to_k, "weight", nn.Parameter(m.to_k.weight * -1.5)),
            lambda m: setattr(m.to_v, "bias", nn.Parameter(m.to_v.bias + 1.0)),
            exchange,
            lambda m: m.load_state_dict({name: tensor + 0.1 for name, tensor in m.state_dict().items()}),
        ):
            twin = copy.deepcopy(layer)
            attention.pack(twin)
            before = twin(x)
            change(twin)
            with ops.using(fused=False):
                want = twin(x)
            assert relative(twin(x), want) <= CLOSE
            assert relative(want, before) > 1e-3


@torch.no_grad()
def test_a_loras_view_of_a_packed_network_has_its_own_weights() -> None:
    base, given = unet("sd1"), inputs_of(CONFIGS["sd1"])
    attention.pack(base)
    swaps = {Q: {"weight": base.get_submodule(Q).weight * -2.0}}  # type: ignore[operator]
    twin = view(base, swaps)
    block = twin.get_submodule(Q.removesuffix(".to_q"))
    assert isinstance(block, Attention)
    assert ops.packed(*block.projections)
    with fused_on_cpu():
        ours, theirs = twin(**given), base(**given)
    assert relative(ours, twin(**given)) <= CLOSE
    assert relative(theirs, base(**given)) <= CLOSE
    assert relative(ours, theirs) > 1e-3
    untouched = [m for name, m in twin.named_modules() if name.endswith("attn1") and m is not block]
    assert all(
        m.to_q.weight is base.get_submodule(name).to_q.weight for name, m in twin.named_modules() if m in untouched
    )


@torch.no_grad()
def test_packing_holds_nothing_twice_and_what_is_packed_stays() -> None:
    network = unet("sd2")
    count = sum(p.numel() for p in network.parameters())
    attention.pack(network)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in network.parameters()}
    assert sum(storages.values()) == count * 4
    held = [id(p) for p in network.parameters()]
    attention.pack(network)
    assert [id(p) for p in network.parameters()] == held


# --- layers that are not what their weights say -------------------------------------------------------------------


class Wrapper(nn.Module):
    """A layer and something beside it, as LoRA training and PEFT put in a layer's place."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 1.25


def wrapped(network: nn.Module) -> nn.Module:
    for name, layer in list(network.named_modules()):
        if type(layer) in (nn.Linear, nn.Conv2d):
            owner, _, leaf = name.rpartition(".")
            network.get_submodule(owner)._modules[leaf] = Wrapper(layer)
    return network


@pytest.mark.parametrize("name", ["sd1", "sdxl"])
def test_a_wrapped_layer_is_called_and_not_read(name: str) -> None:
    """Every linear layer and convolution wrapped: the plain and the fused form call what stands in their places."""
    network = unet(name)
    inputs = inputs_of(CONFIGS[name])
    with torch.no_grad():
        before = network(**inputs)
        wrapped(network)
        plain = network(**inputs)
        with fused_on_cpu():
            fused = network(**inputs)
    assert relative(plain, before) > 0.01
    assert relative(fused, plain) < 1e-5


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2),
        nn.Conv2d(8, 8, 3, padding=1, groups=4),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
    ],
    ids=["circular", "dilated", "grouped", "strided"],
)
def test_a_convolution_of_any_kind_is_itself(layer: nn.Conv2d) -> None:
    x = torch.randn(2, 8, 9, 7)
    with torch.no_grad():
        wanted = layer(x)
        with fused_on_cpu():
            assert relative(ops.conv(x, layer), wanted) < 1e-5


def test_weights_of_another_dtype_are_called_plainly() -> None:
    with torch.no_grad(), fused_on_cpu():
        x = torch.randn(2, 8, 4, 4)
        assert ops.fused(x, nn.Conv2d(8, 8, 1))
        assert not ops.fused(x, nn.Conv2d(8, 8, 1).bfloat16())
        assert not ops.fused(x, nn.Linear(8, 8).half())
        assert ops.fused(x, nn.GroupNorm(2, 8).bfloat16())  # norms read theirs as float32


class Shapes(PlainKernels):
    """Kernels of which only what they make and what they write over counts."""

    def group_norm(self, x: Tensor, *_: Any, out: Tensor | None = None, **more: Any) -> Tensor:
        return torch.empty_like(x) if out is None else out

    def add_bias(self, x: Tensor, h: Tensor | None, *_: Any, out: Tensor | None = None) -> Tensor:
        return torch.empty_like(x) if out is None else out

    def enlarge(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3])
        return torch.empty(shape, device=x.device, memory_format=torch.channels_last)


@pytest.mark.parametrize("call", ["decode", "encode"])
def test_the_peak_of_a_vae_is_not_above_that_of_the_plain_form(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        network = AutoencoderKL(VAEConfig(**FULL))
        given = torch.empty(1, 4, 32, 32) if call == "decode" else torch.empty(1, 3, 256, 256)
    plain = live_peak(lambda: getattr(network, call)(given))
    network.to(memory_format=torch.channels_last)
    given = given.to(memory_format=torch.channels_last)
    monkeypatch.setattr(ops, "_DEVICE", "meta")
    monkeypatch.setattr(ops, "kernels", lambda: Shapes())
    monkeypatch.setattr(ops, "_channels_last", lambda x: x)  # what a convolution of the meta device makes is never so
    assert live_peak(lambda: getattr(network, call)(given)) <= 1.01 * plain
