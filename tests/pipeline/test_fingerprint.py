"""Fingerprints: the same for the same numbers however they are kept, another for any other; quick on large networks."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import save_file
from torch import nn

from pellucid.interop.components import Components
from pellucid.interop.source import read_components
from pellucid.models.lora import AdapterSet
from pellucid.pipeline import fingerprint
from pellucid.pipeline.load import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fingerprint")
    peer = tiny.stable_diffusion(place)
    peer.save_pretrained(place / "model")
    peer.save_pretrained(place / "shards" / "another name", max_shard_size="200KB")
    save_file({k: v.contiguous() for k, v in tiny.checkpoint(peer).items()}, place / "model.safetensors")
    return place


@pytest.fixture(scope="module")
def model(folder: Path) -> Components:
    return read_components(folder / "model")


def test_the_same_weights_have_one_fingerprint(folder, model):
    own = fingerprint.of_model(model)
    assert own.startswith("weights-1:")
    assert len(own.split(":")[1].split("-")) == len(fingerprint.PARTS)
    assert fingerprint.of_model(read_components(folder / "model")) == own
    assert fingerprint.of_model(read_components(folder / "shards" / "another name")) == own


def test_a_folder_and_a_single_file_share_the_networks(folder, model):
    """The words and the process may differ: a single file has no tokenizer and no scheduler of its own."""
    file = read_components(folder / "model.safetensors", tokenizer=folder / "model" / "tokenizer")
    for mine, theirs in ((model.network, file.network), (model.vae, file.vae)):
        assert fingerprint.of_network(mine) == fingerprint.of_network(theirs)


def test_every_part_counts(folder, model):
    own = fingerprint.of_model(model)

    def changed(name: str) -> tuple[str, ...]:
        other = read_components(folder / "model")
        held = {"network": other.network, "vae": other.vae, "text": other.text_encoders[0]}[name]
        with torch.no_grad():
            next(held.parameters()).view(-1)[0] += 1e-6
        return fingerprint.differing(own, fingerprint.of_model(other))

    assert changed("network") == ("network",)
    assert changed("vae") == ("vae",)
    assert changed("text") == ("text encoders",)
    for change in ({"target": "v"}, {"extra": {"force_zeros_for_empty_prompt": True}}):
        other = fingerprint.of_model(replace(model, **change))
        assert fingerprint.differing(own, other) == ("schedule, target or settings",)
    words = fingerprint.of_model(replace(model, tokenizers=()))
    assert fingerprint.differing(own, words) == ("tokenizers",)
    half = fingerprint.of_model(read_components(folder / "model", dtype="float16"))
    assert fingerprint.differing(own, half) == ("network", "vae", "text encoders")
    assert fingerprint.differing(own, own) == ()
    assert fingerprint.differing(own, "sha256:0") == fingerprint.PARTS


def test_memory_formats_and_other_requests_change_nothing(folder, model):
    pipe = load(folder / "model")
    before = fingerprint.of_network(pipe.components.network)
    pipe.components.network.to(memory_format=torch.channels_last)
    assert fingerprint.of_network(pipe.components.network) == before == fingerprint.of_network(model.network)


def test_a_change_in_place_is_seen(model):
    network = nn.Linear(4, 4)
    before = fingerprint.of_network(network)
    assert fingerprint.of_network(network) == before
    with torch.no_grad():
        network.weight.mul_(2)
    assert fingerprint.of_network(network) != before


def test_names_shapes_and_dtypes_count():
    one = torch.arange(6.0)
    own = fingerprint.of_tensors({"a": one})
    assert own == fingerprint.of_tensors([("a", one.clone())])
    others = [{"b": one}, {"a": one.reshape(2, 3)}, {"a": one.double()}, {"a": one, "b": one}, {"a": one + 1e-7}]
    assert len({own, *(fingerprint.of_tensors(other) for other in others)}) == 1 + len(others)
    swapped = fingerprint.of_tensors({"b": one, "a": one + 1})
    assert swapped == fingerprint.of_tensors({"a": one + 1, "b": one})  # the order does not count


def test_a_large_network_is_sampled_all_over_and_quickly(monkeypatch):
    """80 MB, more than is read whole. A shift of any eighth of a large tensor shows, and any number of a small one."""
    big, small = torch.zeros(20, 2**20), torch.zeros(4096)
    held = {"big": big, "small": small}
    began = time.perf_counter()
    own = fingerprint.of_tensors(held)
    took = time.perf_counter() - began
    flat = big.view(-1)
    eighth = len(flat) // 8
    for i in range(8):
        flat[i * eighth : (i + 1) * eighth] += 1
        assert fingerprint.of_tensors(held) != own
        flat[i * eighth : (i + 1) * eighth] -= 1
    for place in (0, -1):
        flat[place] += 1
        assert fingerprint.of_tensors(held) != own
        flat[place] -= 1
    small[1234] = 1
    assert fingerprint.of_tensors(held) != own
    small[1234] = 0
    assert fingerprint.of_tensors(held) == own
    monkeypatch.setattr(fingerprint, "WHOLE", 2**40)
    began = time.perf_counter()
    fingerprint.of_tensors(held)
    assert took < time.perf_counter() - began  # reading a thousandth is quicker than reading all


def test_a_lora_is_named_by_what_it_does(folder, tmp_path):
    """One LoRA in two layouts is one; another scale inside is another."""
    pipe = load(folder / "model")
    layer = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    down, up = torch.randn(4, 32), torch.randn(32, 4)

    def read(name: str, tensors: dict[str, torch.Tensor]) -> AdapterSet:
        save_file(tensors, tmp_path / f"{name}.safetensors")
        return pipe.load_lora(tmp_path / f"{name}.safetensors")

    peft = read("peft", {f"unet.{layer}.lora_A.weight": down, f"unet.{layer}.lora_B.weight": up})
    kohya = {
        f"lora_unet_{layer.replace('.', '_')}.{k}": v for k, v in (("lora_down.weight", down), ("lora_up.weight", up))
    }
    alpha = f"lora_unet_{layer.replace('.', '_')}.alpha"
    same = read("kohya", {**kohya, alpha: torch.tensor(4.0)})
    other = read("half", {**kohya, alpha: torch.tensor(2.0)})
    prints = [fingerprint.of_adapter(adapter) for adapter in (peft, same, other)]
    assert prints[0] == prints[1] != prints[2]


def test_a_model_without_numbers_has_one_too():
    with torch.device("meta"):
        network = nn.Linear(4, 4)
    assert fingerprint.of_network(network).startswith("weights-1:")
