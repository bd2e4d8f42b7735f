"""The policy, what it refuses, and offload: who is on the device when, and that all is as before afterwards.

There is no GPU here. `meta` is a second device that torch really has: weights move to it and back, and an operation on
tensors of both is refused, so what offload forgets to bring is found. For numbers, blocks are "moved" within the CPU.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import memory_gpu as bench
from pellucid.core.errors import PellucidError
from pellucid.models import dit, unet_config
from pellucid.models.controlnet import ControlledUNet
from pellucid.models.lora import view
from pellucid.models.unet import UNet
from pellucid.pipeline import memory
from pellucid.pipeline.ghost import Rehearsal
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.policy import EFFECTS, Policy
from pellucid.pipeline.stages import Guests, Stages, blocks_of, slots_of

META, CPU = torch.device("meta"), torch.device("cpu")
TINY = bench.TINY[0]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return bench.pipeline_of(TINY, CPU, torch.float32)


# --- the policy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention", "flush"), ("attention", 3), ("offload", "blocks"), ("vae_tile", 8), ("vae_tile", 32.0),
        ("vae_tile", True), ("vae_slicing", 1), ("channels_last", "yes"), ("compile", None),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(PellucidError, match=field) as error:
        Policy(**{field: value})
    assert error.value.code == "policy"


def test_a_compiled_network_cannot_come_in_blocks() -> None:
    with pytest.raises(PellucidError, match="offload='component'"):
        Policy(compile=True, offload="block")
    assert Policy(compile=True, offload="component").to_dict() == {"compile": True, "offload": "component"}


@pytest.mark.parametrize("changes", [{"offload": "component"}, {"offload": "block"}, {"attention": "cudnn"}])
def test_what_does_nothing_on_a_cpu_is_refused(pipe: Pipeline, changes: dict[str, Any]) -> None:
    Policy(**changes).check(torch.device("cuda"))
    with pytest.raises(PellucidError, match="CPU"):
        replace(pipe, policy=Policy(**changes)).run(memory.request_for(pipe))


def test_every_field_says_what_it_reduces_and_costs() -> None:
    assert set(EFFECTS) == {field.name for field in fields(Policy)} | {"dtype"}
    assert all(effect.reduces and effect.costs for effect in EFFECTS.values())
    policy = Policy(vae_tile=32, offload="block")
    assert list(policy.effects()) == ["vae_tile", "offload"]
    assert policy.text() == "vae_tile=32, offload=block"
    assert Policy().text() == "default"


def test_an_attention_that_cannot_is_one_clear_line() -> None:
    stages = Stages(Policy(attention="cudnn"), META)
    with pytest.raises(PellucidError, match="attention must be a kernel") as error, stages.run("denoise"):
        raise RuntimeError("No available kernel. Aborting execution.")
    assert error.value.code == "attention"
    with pytest.raises(RuntimeError, match="something else"), stages.run("denoise"):
        raise RuntimeError("something else")


# --- who comes and goes --------------------------------------------------------------------------------------------


def places(network: nn.Module) -> set[str]:
    return {tensor.device.type for tensor in network.parameters()}


def bits(network: nn.Module) -> dict[str, int]:
    """Where every parameter lies in memory: the same object, not a copy of it."""
    return {name: tensor.data_ptr() for name, tensor in network.named_parameters()}


def test_a_component_is_on_the_device_for_its_stage_alone() -> None:
    network = UNet(unet_config.read(TINY.unet))
    before = bits(network)
    stages = Stages(Policy(offload="component"), META)
    with stages.run("denoise", network):
        assert places(network) == {"meta"}
        with stages.run("denoise", network):  # a second user
            assert places(network) == {"meta"}
        assert places(network) == {"meta"}
    assert places(network) == {"cpu"}
    assert bits(network) == before


def test_a_component_comes_back_after_an_error() -> None:
    network = nn.Linear(3, 3)
    with pytest.raises(ZeroDivisionError), Stages(Policy(offload="component"), META).run("decode", network):
        raise ZeroDivisionError
    assert places(network) == {"cpu"}


@pytest.fixture(params=["unet", "dit", "pixart", "controlled"])
def blocky(request: pytest.FixtureRequest) -> tuple[nn.Module, Any]:
    """Networks that come in blocks, and their inputs on a device."""
    torch.manual_seed(0)
    small = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "out_channels": 8}
    if request.param == "dit":
        network = dit.build(dit.read({"_class_name": "DiTTransformer2DModel", **small, "num_embeds_ada_norm": 10}))
        return network, lambda device: {"labels": torch.tensor([3, 4], device=device)}
    if request.param == "pixart":
        raw = {"_class_name": "PixArtTransformer2DModel", **small, "caption_channels": 6, "cross_attention_dim": 16}
        return dit.build(dit.read(raw)), lambda device: {"context": torch.ones(2, 5, 6, device=device)}
    unet = UNet(unet_config.read(TINY.unet))
    if request.param == "unet":
        return unet, lambda device: {"context": torch.ones(2, 5, 32, device=device)}
    made = {k: v for k, v in TINY.unet.items() if k not in ("up_block_types", "sample_size")}
    raw = {"_class_name": "ControlNetModel", **made, "conditioning_embedding_out_channels": TINY.hint}
    control = bench.ControlNet(unet_config.read(raw))
    hint = control.hint(torch.zeros(2, 3, 16, 16), [1.0, 1.0])

    def inputs(device: torch.device) -> dict[str, Any]:
        here = type(hint)(*(tensor.to(device) for tensor in hint))
        return {"context": torch.ones(2, 5, 32, device=device), "control": (here,)}

    return ControlledUNet(unet, [control]), inputs


def call(network: nn.Module, inputs: Any, device: torch.device) -> torch.Tensor:
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad():
        return network(x, torch.tensor([3.0, 4.0], device=device), **inputs(device))


class Strict(Rehearsal):
    """Refuses what CUDA would refuse: an operation on tensors of two devices. Copies and numbers may cross."""

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.ndim > 0]
        crossing = func._schema.name in ("aten::_to_copy", "aten::copy_")
        if not crossing and len({t.device.type for t in tensors}) > 1:
            raise AssertionError(f"{func} on two devices, in {self.places[-1:]}")
        return super().call(func, args, kwargs)


def test_blocks_come_one_at_a_time(blocky: tuple[nn.Module, Any]) -> None:
    """Inside of a block all of it is there and nothing of the others; at the end all is home."""
    network, inputs = blocky
    blocks = list(blocks_of(network))
    seen = 0

    def look(module: nn.Module, args: Any) -> None:
        nonlocal seen
        seen += 1
        assert places(module) == {"meta"}
        assert all(places(other) == {"cpu"} for other in blocks if other is not module and list(other.parameters()))

    before = bits(network)
    stages = Stages(Policy(offload="block"), META)
    with Strict(["meta"]), stages.run("denoise", network):
        for block in blocks:
            block.register_forward_pre_hook(look)
        assert call(network, inputs, META).shape[0] == 2
    called = [block for block in blocks if list(block.parameters())]
    assert seen >= 0.8 * len(called)  # a hint's embedding is not called by the network
    assert places(network) == {"cpu"}
    assert bits(network) == before


def test_blocks_hold_nearly_all_weights(blocky: tuple[nn.Module, Any]) -> None:
    """What stays for the whole stage is small, or nothing would be saved."""
    network, _ = blocky
    outside = sum(slot.registry[slot.name].numel() for slot in slots_of(network, list(blocks_of(network))))
    assert outside < 0.05 * sum(weight.numel() for weight in network.parameters())


class Elsewhere(Guests):
    """Guests of another device that is the CPU in truth: what is brought is a copy, and computes."""

    def __init__(self) -> None:
        super().__init__(META)
        self.brought = 0

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        self.brought += 1
        return nn.Parameter(tensor.detach().clone(), requires_grad=False)


def test_numbers_are_the_same_bit_by_bit(blocky: tuple[nn.Module, Any]) -> None:
    network, inputs = blocky
    expected = call(network, inputs, CPU)
    guests = Elsewhere()
    with guests.staying(guests.attach(network)):
        assert torch.equal(call(network, inputs, CPU), expected)
    assert guests.brought > 0
    assert not guests.slots
    assert not guests.copies


def test_threads_share_what_is_brought() -> None:
    """Two threads in one network: each gets the right numbers, and nothing stays."""
    torch.manual_seed(0)
    network, guests, results = UNet(unet_config.read(TINY.unet)), Elsewhere(), []

    def inputs(device: torch.device) -> dict[str, torch.Tensor]:
        return {"context": torch.ones(2, 5, 32)}

    def work() -> None:
        for _ in range(3):
            with guests.staying(guests.attach(network)):
                results.append(call(network, inputs, CPU))

    expected, before = call(network, inputs, CPU), bits(network)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 9
    assert all(torch.equal(result, expected) for result in results)
    assert bits(network) == before
    assert not guests.copies


def test_an_error_in_a_block_sends_it_back() -> None:
    network = UNet(unet_config.read(TINY.unet))
    before = bits(network)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    network.mid_block.resnets[0].conv1.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError), Stages(Policy(offload="block"), META).run("denoise", network):
        call(network, lambda device: {"context": torch.ones(2, 5, 32, device=device)}, META)
    assert bits(network) == before


def test_a_device_that_is_full_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in the middle of bringing: what had come leaves again."""
    network = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    before, came, moved = bits(network), [], Guests.moved

    def full(guests: Guests, tensor: torch.Tensor) -> torch.Tensor:
        if len(came) == 5:
            raise torch.OutOfMemoryError("full")
        came.append(tensor)
        return moved(guests, tensor)

    monkeypatch.setattr(Guests, "moved", full)
    stages = Stages(Policy(offload="component"), META)
    with pytest.raises(PellucidError, match="stage decode") as error, stages.run("decode", network):
        raise AssertionError("the stage must not begin")
    assert error.value.code == "out-of-memory"
    assert len(came) == 5
    assert bits(network) == before


def test_a_view_has_blocks_of_its_own() -> None:
    """A LoRA's view shares the untouched weights with its base; under offload, too, and the others stay apart."""
    network = UNet(unet_config.read(TINY.unet))
    guests = Elsewhere()
    guests.attach(network)
    layer = "mid_block.resnets.0.conv1"
    changed = torch.zeros_like(network.get_submodule(layer).weight)
    twin = view(network, {layer: {"weight": changed}})

    def inputs(device: torch.device) -> dict[str, torch.Tensor]:
        return {"context": torch.ones(2, 5, 32)}

    plain = call(network, inputs, CPU)
    with guests.staying(guests.attach(twin)):
        other = call(twin, inputs, CPU)
    assert not torch.equal(plain, other)
    assert torch.equal(call(network, inputs, CPU), plain)
    assert twin.get_submodule(layer).weight.data_ptr() == changed.data_ptr()
    assert not guests.slots


@pytest.mark.parametrize("offload", ["component", "block"])
def test_the_whole_pipeline_brings_all_that_it_uses(
    pipe: Pipeline, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rehearsal that refuses what CUDA would refuse: text, ControlNet, denoising and decoding under offload."""
    monkeypatch.setattr(memory, "Rehearsal", Strict)
    request = memory.request_for(pipe, size=(32, 32), controlnets=[bench.controlnet_of(TINY, pipe)])
    found = memory.predict(pipe, request, policy=Policy(offload=offload), device="cuda")
    assert list(found.stages) == ["text", "encode", "denoise", "decode"]
    assert places(pipe.components.network) == {"cpu"}


# --- compile -------------------------------------------------------------------------------------------------------


def test_the_denoising_network_compiles_once(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over steps, runs and a LoRA's view: one graph. The backend counts and computes nothing faster."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    torch._dynamo.reset()
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda network, **options: compiler(network, backend=counter, **options))
    compiled = replace(pipe, policy=Policy(compile=True))
    request = memory.request_for(pipe, size=(16, 16), steps=3)
    first = compiled.run(request)
    assert torch.equal(first.latents, pipe.run(request).latents)
    layer = "mid_block.resnets.0.conv1"
    weight = pipe.components.network.get_submodule(layer).weight
    twin = view(pipe.components.network, {layer: {"weight": weight.detach() * 2}})
    other = replace(compiled, components=replace(pipe.components, network=twin)).run(request)
    assert not torch.equal(other.latents, first.latents)
    assert counter.frame_count == 1
