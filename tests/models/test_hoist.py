"""Hoisted text and times: the network's own numbers, whatever the batch, with one row for each thing that is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import randomise, relative
from test_controlnet import control_raw
from test_dit import TEXT, TINY
from test_ip_adapter import file_of, flat, states_of
from test_unet import CONFIGS, inputs_of
from torch import Tensor, nn

from pellucid import PellucidError
from pellucid.models import hoist as hoisting
from pellucid.models import inputs as trees
from pellucid.models.attention import Attention
from pellucid.models.blocks import ResnetBlock
from pellucid.models.controlnet import ControlledUNet, ControlNet
from pellucid.models.dit import DiT, DiTConfig, PixArt, PixArtConfig
from pellucid.models.hoist import HoistedInputs
from pellucid.models.ip_adapter import from_state
from pellucid.models.lora import view
from pellucid.models.unet import UNet
from pellucid.models.unet_config import read

TIMES = torch.tensor([999.0, 261.37, 0.0, 0.25])
EXACT = 2e-6  # float32, relative to the largest value: products of another height may add in another order


def unet(name: str, seed: int = 0) -> UNet:
    return randomise(UNet(read(CONFIGS[name])), seed)  # type: ignore[return-value]


def given(name: str, batch: int) -> tuple[Tensor, dict[str, Any]]:
    inputs = inputs_of(CONFIGS[name], batch=batch)
    x = inputs.pop("x")
    del inputs["time"]
    return x, inputs


def hoisted(network: nn.Module, inputs: dict[str, Any]) -> HoistedInputs:
    made = network.hoist(TIMES, inputs)  # type: ignore[operator]
    assert isinstance(made, HoistedInputs)
    return made


def called(network: nn.Module, x: Tensor, made: HoistedInputs, sources: list[int], time: int, **more: Any) -> Tensor:
    """The network for some call sources at one of the times."""
    assert made.table is not None
    assert made.index is not None
    index = made.index.expand(max(sources) + 1, -1) if len(made.index) == 1 else made.index
    rows = made.table[index[sources, time]]
    return network(x, hoisted=rows, **trees.pick(made.inputs, sources), **more)


@torch.no_grad()
def compare(network: nn.Module, x: Tensor, inputs: dict[str, Any], **more: Any) -> HoistedInputs:
    """At every time: all sources at once in another order, and each alone."""
    made = hoisted(network, inputs)
    order = list(reversed(range(len(x))))
    for u, time in enumerate(TIMES):
        wanted = network(x, time.expand(len(x)), **inputs, **more)
        assert relative(called(network, x[order], made, order, u, **more), wanted[order]) <= EXACT
        for n in range(len(x)):
            assert relative(called(network, x[n : n + 1], made, [n], u, **more), wanted[n : n + 1]) <= EXACT
    return made


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_unet_is_itself(name: str, batch: int) -> None:
    x, inputs = given(name, batch)
    made = compare(unet(name), x, inputs)
    assert "context" not in made.inputs
    assert not made.inputs.keys() & UNet.CONDITIONS
    conditions = bool(inputs.keys() & UNet.CONDITIONS)
    assert made.table is not None
    assert len(made.table) == len(TIMES) * (batch if conditions else 1)


@torch.no_grad()
def test_in_the_same_batch_the_text_is_bit_for_bit_the_networks() -> None:
    network = unet("sd1")
    x, inputs = given("sd1", 2)
    made = hoisted(network, inputs)
    time = TIMES[:1].expand(2)
    assert torch.equal(network(x, time, text=made.inputs["text"]), network(x, time, **inputs))


@torch.no_grad()
def test_perturbed_skipped_and_masked_too() -> None:
    for name in ("sd1", "cross_only"):
        network = unet(name)
        x, inputs = given(name, 2)
        place = network.cross_attentions()[0][1]
        mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1] * 7]).bool()
        inputs["context_mask"] = mask
        more = [{"skipped": (place,)}] + ([] if name == "cross_only" else [{"perturbed": (place,)}])
        for extra in more:
            compare(network, x, inputs, **extra)


@pytest.mark.parametrize("name", ["sd1", "sdxl", "labels"])
@torch.no_grad()
def test_controlnets_have_parts_of_their_own(name: str) -> None:
    nets = [randomise(ControlNet(read(control_raw(name))), seed) for seed in (5, 6)]
    network = ControlledUNet(unet(name), nets)  # type: ignore[arg-type]
    x, inputs = given(name, 2)
    image = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    hints = [net.hint(image, [0.7, 1.1]) for net in nets]  # type: ignore[operator]
    for control in ((hints[0], hints[1]), (None, hints[1])):
        compare(network, x, {**inputs, "control": control})


@torch.no_grad()
def test_an_image_prompt_stays_as_it_is() -> None:
    network = unet("sdxl")
    adapter = from_state(flat(file_of(network, "plus"))).eval()
    tokens = adapter.tokens(network, states_of("plus"), scale=0.6, size=(8, 8))
    x, inputs = given("sdxl", 2)
    made = compare(network, x, {**inputs, "image": tokens})
    assert made.inputs["image"] is tokens


def test_a_dit_has_one_row_for_each_label_and_time() -> None:
    network = randomise(DiT(DiTConfig(**TINY, sample_size=8, num_embeds_ada_norm=10)))
    x = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    made = compare(network, x, {"labels": torch.tensor([3, 10, 3])})
    assert made.inputs == {}
    assert made.table is not None
    assert made.index is not None
    assert len(made.table) == 2 * len(TIMES)
    assert torch.equal(made.index[0], made.index[2])
    assert not set(made.index[0].tolist()) & set(made.index[1].tolist())


@pytest.mark.parametrize("name", TEXT)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_pixart_is_itself(name: str, batch: int) -> None:
    network = randomise(PixArt(PixArtConfig(**TEXT[name])))
    g = torch.Generator().manual_seed(2)
    inputs: dict[str, Any] = {"context": torch.randn(batch, 5, 32, generator=g)}
    inputs["context_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0]])[:batch]
    if network.config.takes_sizes:
        inputs["sizes"] = torch.tensor([[512.0, 768, 0.66], [1024, 1024, 1], [64, 8, 8]])[:batch]
    compare(network, torch.randn(batch, 4, 8, 8, generator=g), inputs)


def test_a_network_without_inputs_has_one_row_of_the_index() -> None:
    made = hoisted(unet("ddpm"), {})
    assert made.index is not None
    assert made.index.shape == (1, len(TIMES))


def test_text_lies_as_attention_reads_it() -> None:
    network = unet("uneven")
    _, inputs = given("uneven", 3)
    text = hoisted(network, inputs).inputs["text"]
    assert text.is_contiguous()
    assert text.shape[:2] == inputs["context"].shape[:2]
    ends = [0, *(attention.columns.stop for attention in network.text_attentions())]
    assert [attention.columns.start for attention in network.text_attentions()] == ends[:-1]
    assert ends[-1] == text.shape[2]
    for attention in network.text_attentions():
        keys, values = text[..., attention.columns].chunk(2, dim=-1)
        assert torch.equal(keys, attention.to_k(inputs["context"]))
        assert torch.equal(values, attention.to_v(inputs["context"]))


def test_a_large_table_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    network = unet("sdxl")
    x, inputs = given("sdxl", 2)
    size = 2 * len(TIMES) * sum(network.row_widths) * 4
    monkeypatch.setattr(hoisting, "MOST_BYTES", size)
    assert hoisted(network, inputs).table is not None
    monkeypatch.setattr(hoisting, "MOST_BYTES", size - 1)
    made = hoisted(network, inputs)
    assert made.table is None
    assert made.index is None
    with torch.no_grad():  # the text is there all the same, and the conditions are told with the time again
        time = TIMES[1:2].expand(2)
        assert torch.equal(network(x, time, **made.inputs), network(x, time, **inputs))


def test_what_is_watched_inside_is_not_hoisted() -> None:
    network = unet("sd1")
    _, inputs = given("sd1", 1)
    outside = network.register_forward_hook(lambda *_: None)
    assert network.hoist(TIMES, inputs) is not None
    inside = network.down_blocks[0].resnets[0].register_forward_pre_hook(lambda *_: None)  # type: ignore[index,union-attr]
    assert network.hoist(TIMES, inputs) is None
    inside.remove()
    assert network.hoist(TIMES, inputs) is not None
    outside.remove()


def test_weights_that_are_elsewhere_are_not_hoisted() -> None:
    network = unet("sd1")
    network.mid_block.to("meta")  # type: ignore[union-attr]
    assert network.hoist(TIMES, given("sd1", 1)[1]) is None


@torch.no_grad()
def test_a_view_hoists_with_its_own_weights() -> None:
    base = unet("sd1")
    x, inputs = given("sd1", 2)
    names = [name for name, m in base.named_modules() if name.endswith(("attn2.to_k", "attn2.to_v", "time_emb_proj"))]
    swaps = {name: {"weight": base.get_submodule(name).weight * 1.5} for name in names}  # type: ignore[dict-item,operator]
    twin = view(base, swaps)
    compare(twin, x, inputs)
    ours, theirs = hoisted(twin, inputs), hoisted(base, inputs)
    assert ours.table is not None
    assert theirs.table is not None
    assert relative(ours.table, theirs.table) > 0.1
    assert relative(ours.inputs["text"], theirs.inputs["text"]) > 0.1


def test_gradients_reach_the_times() -> None:
    network = unet("sd1").requires_grad_(False)
    x, inputs = given("sd1", 2)
    whole, apart = (TIMES.clone().requires_grad_() for _ in range(2))
    made = network.hoist(whole, inputs)
    assert made is not None
    called(network, x, made, [0, 1], 1).square().sum().backward()
    network(x, apart[1].expand(2), **inputs).square().sum().backward()
    assert whole.grad is not None
    assert apart.grad is not None
    assert relative(whole.grad, apart.grad) < 1e-4
    assert whole.grad[1] != 0


@pytest.mark.parametrize("name", CONFIGS)
def test_every_part_that_is_told_something_is_found(name: str) -> None:
    network = unet(name)
    assert {*network.timed_blocks()} == {m for m in network.modules() if isinstance(m, ResnetBlock)}
    crossed = {m for m in network.modules() if isinstance(m, Attention) and m.crossed}
    assert {*network.text_attentions()} == crossed


def test_columns_cover_a_row_without_a_gap() -> None:
    network = unet("scale_shift")
    spans = [block.columns for block in network.timed_blocks()]
    ends = [0, *(span.stop for span in spans)]
    assert [span.start for span in spans] == ends[:-1]
    assert ends[-1] == sum(network.row_widths) == sum(2 * m.conv1.out_channels for m in network.timed_blocks())


@pytest.mark.parametrize(
    "network", [unet("sd1"), DiT(DiTConfig(**TINY)), PixArt(PixArtConfig(**TEXT["plain captions"]))]
)
def test_a_call_without_any_time_is_refused(network: nn.Module) -> None:
    more = {"labels": torch.tensor([1])} if isinstance(network, DiT) else {"context": torch.zeros(1, 5, 32)}
    more = {"context": torch.zeros(1, 7, 24)} if isinstance(network, UNet) else more
    with pytest.raises(PellucidError, match="time must be given, or hoisted in its place; got nothing"):
        network(torch.zeros(1, 4, 8, 8), **more)
