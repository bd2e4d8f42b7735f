"""Adapter files: every layout, written by its own peer or renamed from one, acts as it does in that peer."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from diffusers.training_utils import _collate_lora_metadata
from diffusers.utils import convert_state_dict_to_diffusers
from lora_peers import (
    ATTN,
    CONVS,
    MODULES,
    PARITY,
    PEFT_CASES,
    applied,
    assert_equal,
    by_layer,
    compvis,
    kohya,
    outputs,
    pipeline,
    relative,
    sd_networks,
    state,
    text_config,
    trained,
    underscored,
    unet_config,
    with_text_model,
    xl_networks,
)
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pellucid.core.errors import PellucidError
from pellucid.interop import lora_file
from pellucid.models import config as configs
from pellucid.models import lora
from pellucid.models.lora_delta import LoKr
from pellucid.models.unet import UNet
from pellucid.models.unet_config import UNetConfig


@pytest.fixture(scope="module")
def sd() -> dict[str, nn.Module]:
    return sd_networks()


@pytest.fixture(scope="module")
def xl() -> dict[str, nn.Module]:
    return xl_networks()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """diffusers logs a warning where a file has nothing for a component."""
    logger = logging.getLogger("diffusers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


# Files of diffusers and PEFT


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rank_pattern": {"to_q": 5, "mid_block.*.to_k": 1}, "alpha_pattern": {"to_v": 11, "^conv_in": 3}},
        {"use_rslora": True},
        {"use_dora": True},
        {"lora_bias": True},
    ],
    ids=["plain", "patterns", "rslora", "dora", "bias"],
)
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer")  # ours makes a bias there
@pytest.mark.filterwarnings("ignore:Adapter 'default'.*have invalid shape:")  # PEFT takes a bias for a torn weight
def test_diffusers_files(sd: dict[str, nn.Module], tmp_path: Path, settings: dict[str, Any]) -> None:
    modules = [*MODULES, *CONVS, "conv_in"]
    theirs = {
        "unet": trained(sd["unet"], unet_config(**settings, target_modules=modules)),
        "text_encoder": trained(sd["text_encoder"], text_config()),
    }
    StableDiffusionPipeline.save_lora_weights(
        tmp_path,
        unet_lora_layers=state(theirs["unet"]),
        text_encoder_lora_layers=convert_state_dict_to_diffusers(state(theirs["text_encoder"])),
        **_collate_lora_metadata(theirs),
    )
    ours, receipt = applied(tmp_path, sd)  # the folder, and below the file in it
    assert_equal(ours, theirs, sd, {"unet", "text_encoder"})
    file = tmp_path / "pytorch_lora_weights.safetensors"
    assert set(receipt.read) == set(load_file(file))
    assert receipt.unused == ()
    assert torch.equal(outputs(applied(file, sd)[0])["unet"], outputs(ours)["unet"])


def test_without_metadata_alpha_is_the_rank_of_each_layer(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    theirs = trained(sd["unet"], unet_config(rank_pattern={"to_q": 5}, use_dora=False))
    StableDiffusionPipeline.save_lora_weights(tmp_path, unet_lora_layers=state(theirs))
    loaded = pipeline(sd)
    loaded.load_lora_weights(tmp_path)
    assert_equal(applied(tmp_path, sd)[0], loaded, sd, {"unet"})


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
def test_scales_equal_diffusers(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    for name in ("one", "two"):
        theirs = trained(sd["unet"], unet_config(target_modules=MODULES), seed=len(name) + ord(name[0]))
        StableDiffusionPipeline.save_lora_weights(tmp_path / name, unet_lora_layers=state(theirs))
    loaded = pipeline(sd)
    for name in ("one", "two"):
        loaded.load_lora_weights(tmp_path / name, adapter_name=name)
    loaded.set_adapters(["one", "two"], [0.6, -0.4])
    stack = [(lora_file.load(tmp_path / name, sd), scale) for name, scale in (("one", 0.6), ("two", -0.4))]
    views, receipt = lora.apply_all(sd, stack)
    assert_equal(views, loaded, sd, {"unet"})
    assert receipt.adapters == ("one", "two")
    # diffusers' scales by block are of attentions; where there are none, it leaves 1
    loaded.set_adapters(["one"], [{"unet": {"down": 0.2, "mid": 0.9, "up": 0.5}}])
    by_block = {"unet.down_blocks": 0.2, "unet.mid_block": 0.9, "unet.up_blocks": 0.5}
    assert_equal(lora.apply_all(sd, [(stack[0][0], by_block)])[0], loaded, sd, {"unet"})


@pytest.mark.parametrize("case", PEFT_CASES)
@pytest.mark.parametrize("place", ["", "unet"])
def test_peft_folders(sd: dict[str, nn.Module], tmp_path: Path, case: str, place: str) -> None:
    torch.manual_seed(4)
    theirs = get_peft_model(copy.deepcopy(sd["unet"]), PEFT_CASES[case]())
    theirs.save_pretrained(tmp_path / place)
    assert "base_model.model." in next(iter(load_file(tmp_path / place / "adapter_model.safetensors")))
    ours, receipt = applied(tmp_path, sd)
    assert relative(outputs(ours)["unet"], outputs({"unet": theirs.base_model.model})["unet"]) <= PARITY
    assert receipt.unused == ()


# kohya's and LyCORIS' files, renamed from PEFT's


@pytest.mark.parametrize("spell", [str, compvis], ids=["diffusers", "compvis"])
@pytest.mark.parametrize("base", ["sd", "xl"])
def test_kohya_files(base: str, spell: Callable[[str], str], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    networks = request.getfixturevalue(base)
    modules = MODULES + CONVS + ["time_embedding.linear_2"]
    if base == "xl" and spell is compvis:  # diffusers knows it under this name only
        modules += ["add_embedding.linear_1", "add_embedding.linear_2"]
    tensors = kohya("lora_unet_", state(trained(networks["unet"], unet_config(target_modules=modules))), 1.5, spell)
    for part, prefix in (
        ("text_encoder", "lora_te_" if base == "sd" else "lora_te1_"),
        ("text_encoder_2", "lora_te2_"),
    ):
        if part in networks:
            tensors |= kohya(prefix, state(trained(networks[part], text_config(r=3))), 1.5, with_text_model)
    file = tmp_path / "style.safetensors"
    save_file(tensors, file)
    ours, receipt = applied(file, networks)
    assert set(receipt.read) == set(tensors)
    assert len(receipt.change) == len(tensors) / 3
    loaded = pipeline(networks)
    loaded.load_lora_weights(file, **({"unet_config": loaded.unet.config} if base == "sd" else {}))
    assert_equal(ours, loaded, networks, set(networks))


def test_a_file_with_both_spellings_counts_a_layer_once(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    tensors = state(trained(sd["unet"], unet_config(target_modules=["to_q"])))
    both = kohya("lora_unet_", tensors, 2.0) | kohya("lora_unet_", tensors, 2.0, compvis)
    save_file(both, tmp_path / "both.safetensors")
    save_file(kohya("lora_unet_", tensors, 2.0), tmp_path / "one.safetensors")
    ours, receipt = applied(tmp_path / "both.safetensors", sd)
    assert torch.equal(outputs(ours)["unet"], outputs(applied(tmp_path / "one.safetensors", sd)[0])["unet"])
    assert len(receipt.unused) == len(both) / 2


def test_alpha_and_rank_by_layer(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    shape = sd["unet"].get_submodule(f"{ATTN}.to_q").weight.shape
    tensors, expected = {}, {}
    for rank, alpha, end in ((1, 4.0, "to_q"), (3, 0.5, "to_k"), (2, None, "to_v")):
        down, up = torch.randn(rank, shape[1]), torch.randn(shape[0], rank)
        name = f"lora_unet_{underscored(ATTN)}_{end}"
        tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        if alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(alpha, dtype=torch.float16)
        expected[f"{ATTN}.{end}"] = (alpha or rank) / rank * up @ down
    save_file(tensors, tmp_path / "style.safetensors")
    layers = lora_file.load(tmp_path / "style.safetensors", sd).adapters["unet"].layers
    assert set(layers) == set(expected)
    for layer, delta in expected.items():
        assert relative(layers[layer].weight(sd["unet"].get_submodule(layer).weight), delta) <= PARITY


@pytest.mark.parametrize("prefix", ["lora_unet_", "lycoris_"])
@pytest.mark.parametrize("case", [case for case in PEFT_CASES if case != "lora"])
def test_lycoris_files_act_as_their_peft_twins(
    sd: dict[str, nn.Module], tmp_path: Path, case: str, prefix: str
) -> None:
    settings = PEFT_CASES[case]()
    theirs = trained(sd["unet"], settings)
    alpha = float(settings.lora_alpha if case == "dora" else settings.alpha)
    tensors = kohya(prefix, state(theirs), alpha)
    save_file(tensors, tmp_path / "style.safetensors")
    adapters = lora_file.load(tmp_path / "style.safetensors", sd)
    if case == "lokr":  # whole on both sides, where LyCORIS has no alpha: PEFT's alpha / r is taken back
        whole = {
            k: d for k, d in adapters.adapters["unet"].layers.items() if isinstance(d, LoKr) and d.right.rank is None
        }
        assert whole
        scale = {"": 1.0} | {f"unet.{layer}": settings.alpha / settings.r for layer in whole}
        views, receipt = lora.apply_all(sd, [(adapters, scale)])
    else:
        views, receipt = lora.apply_all(sd, [(adapters, 1.0)])
    assert relative(outputs(views)["unet"], outputs({"unet": theirs})["unet"]) <= PARITY
    assert set(receipt.read) == set(tensors)


def test_lycoris_magnitudes_of_inputs_and_of_outputs(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    layer = f"{ATTN}.to_q"
    base = sd["unet"].get_submodule(layer).weight.detach()
    down, up = torch.randn(2, base.shape[1]), torch.randn(base.shape[0], 2)
    moved = base + up @ down
    name = f"lora_unet_{underscored(layer)}"
    for axis, shape in ((1, (1, -1)), (0, (-1, 1))):  # the matrix is square: only the shape tells them apart
        magnitude = torch.rand(base.shape[axis]).reshape(shape) + 0.5
        tensors = {"lora_down.weight": down, "lora_up.weight": up, "dora_scale": magnitude}
        save_file({f"{name}.{end}": t for end, t in tensors.items()}, tmp_path / "dora.safetensors")
        view = applied(tmp_path / "dora.safetensors", sd)[0]["unet"]
        expected = moved / moved.pow(2).sum(1 - axis, keepdim=True).sqrt() * magnitude
        assert relative(view.get_submodule(layer).weight, expected) <= PARITY


def test_locon_with_a_core(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    layer = "down_blocks.0.resnets.0.conv1"
    down, mid, up = torch.randn(2, 8, 1, 1), torch.randn(2, 2, 3, 3), torch.randn(8, 2, 1, 1)
    name = "lora_unet_input_blocks_1_0_in_layers_2"
    tensors = {"lora_down.weight": down, "lora_mid.weight": mid, "lora_up.weight": up, "alpha": torch.tensor(1.0)}
    save_file({f"{name}.{end}": tensor for end, tensor in tensors.items()}, tmp_path / "locon.safetensors")
    view = applied(tmp_path / "locon.safetensors", sd)[0]["unet"]
    conv, x = sd["unet"].get_submodule(layer), torch.randn(1, 8, 6, 6)
    side = nn.functional.conv2d(nn.functional.conv2d(nn.functional.conv2d(x, down), mid, padding=1), up) / 2
    assert relative(view.get_submodule(layer)(x), conv(x) + side) <= PARITY


def test_full_differences(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    norm, conv, out = "conv_norm_out", sd["unet"].conv_in, f"{ATTN}.to_out.0"
    tensors = {
        "lora_unet_conv_norm_out.w_norm": torch.randn(8),
        "lora_unet_conv_norm_out.b_norm": torch.randn(8),
        "diffusion_model.input_blocks.0.0.diff": torch.randn_like(conv.weight),
        "diffusion_model.input_blocks.0.0.diff_b": torch.randn_like(conv.bias),
        f"unet.{out}.diff_b": torch.randn(16),
    }
    save_file(tensors, tmp_path / "full.safetensors")
    views, receipt = applied(tmp_path / "full.safetensors", sd, 0.5)
    view = views["unet"]
    assert torch.allclose(view.conv_in.weight, conv.weight + tensors["diffusion_model.input_blocks.0.0.diff"] / 2)
    assert torch.allclose(view.conv_in.bias, conv.bias + tensors["diffusion_model.input_blocks.0.0.diff_b"] / 2)
    assert torch.allclose(view.get_submodule(norm).weight, 1 + tensors["lora_unet_conv_norm_out.w_norm"] / 2)
    assert view.get_submodule(out).weight is sd["unet"].get_submodule(out).weight
    assert set(receipt.change) == {
        "unet.conv_in", "unet.conv_in.bias", "unet.conv_norm_out", "unet.conv_norm_out.bias", f"unet.{out}.bias"
    }  # fmt: skip


# Older layouts


def old_processors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """diffusers before PEFT: the attention processor held the LoRA, and to_out had no index."""
    found = {}
    for layer, parts in by_layer(tensors).items():
        name = re.sub(r"\.(attn[12])\.", r".\1.processor.", layer).removesuffix(".0")
        found[f"{name}_lora.down.weight"], found[f"{name}_lora.up.weight"] = (
            parts["lora_A.weight"],
            parts["lora_B.weight"],
        )
    return found


OLD_TEXT = {"q_proj": "to_q_lora", "k_proj": "to_k_lora", "v_proj": "to_v_lora", "out_proj": "to_out_lora"}


def old_text(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for layer, parts in by_layer(tensors).items():
        place, _, last = with_text_model(layer).rpartition(".")
        name = f"{place}.{OLD_TEXT[last]}" if last in OLD_TEXT else f"{place}.{last}.lora_linear_layer"
        found[f"{name}.down.weight"], found[f"{name}.up.weight"] = parts["lora_A.weight"], parts["lora_B.weight"]
    return found


@pytest.mark.parametrize("prefixed", [True, False])
def test_attention_processor_files(sd: dict[str, nn.Module], tmp_path: Path, prefixed: bool) -> None:
    heads = ["to_q", "to_k", "to_v", "to_out.0"]
    unet = old_processors(state(trained(sd["unet"], unet_config(target_modules=heads))))
    text = old_text(state(trained(sd["text_encoder"], text_config())))
    assert f"{ATTN}.processor.to_out_lora.up.weight" in unet
    prefixes = ("unet.", "text_encoder.")
    tensors = {p + k: v.contiguous() for p, part in zip(prefixes, (unet, text), strict=True) for k, v in part.items()}
    bare = {re.sub("^(unet|text_encoder)[.]", "", k): v for k, v in tensors.items()}
    save_file(tensors if prefixed else bare, tmp_path / "old.safetensors")
    loaded = pipeline(sd)
    loaded.load_lora_weights(tensors)
    ours, receipt = applied(tmp_path / "old.safetensors", sd)
    assert receipt.unused == ()
    assert_equal(ours, loaded, sd, {"unet", "text_encoder"})


def test_a_pickle_of_tensors_is_read(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    tensors = old_processors(state(trained(sd["unet"], unet_config(target_modules=["to_q"]))))
    torch.save(tensors, tmp_path / "pytorch_lora_weights.bin")
    save_file(tensors, tmp_path / "same.safetensors")
    ours, _ = applied(tmp_path / "pytorch_lora_weights.bin", sd)
    assert torch.equal(outputs(ours)["unet"], outputs(applied(tmp_path / "same.safetensors", sd)[0])["unet"])


def injected(network: nn.Module, ancestors: dict[str, str], order: Callable[[str], Any]) -> list[str]:
    """The linear layers inside ancestors, walking as the first LoRA trainer did (module by module, child by child)."""
    found = []
    for name, _ in sorted(network.named_modules(), key=lambda item: order(item[0])):
        if name.endswith(tuple(ancestors)):
            children = network.get_submodule(name).named_modules()
            found += [f"{name}.{child}" for child, module in children if isinstance(module, nn.Linear)]
    return found


def test_numbered_files(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    def order(name: str) -> tuple[bool, list[Any]]:  # the middle block was registered last, the feed-forward second
        inner = name.replace("attn1", "0").replace("ff", "1").replace("attn2", "2").replace("up_blocks", "e_blocks")
        return name.startswith("mid_block"), inner.split(".")

    unet = injected(sd["unet"], {".attn1": "", ".attn2": "", ".ff.net.0": ""}, order)
    text = injected(sd["text_encoder"], {".self_attn": ""}, str)
    assert [name.rpartition(".")[2] for name in text[:4]] == ["k_proj", "v_proj", "q_proj", "out_proj"]
    tensors, expected, metadata = {}, {}, {}
    for part, layers, classes in (
        ("unet", unet, ["CrossAttention", "GEGLU"]),
        ("text_encoder", text, ["CLIPAttention"]),
    ):
        metadata[part] = json.dumps(classes)
        for i, layer in enumerate(layers):
            rows, columns = sd[part].get_submodule(layer).weight.shape
            up, down = torch.randn(rows, 2), torch.randn(2, columns)
            tensors |= {f"{part}:{i}:up": up, f"{part}:{i}:down": down}
            expected[f"{part}.{layer}"] = up @ down
    tensors["<s1>"] = torch.randn(8)  # such files carry textual inversions too
    save_file(tensors, tmp_path / "first.safetensors", metadata)
    adapters = lora_file.load(tmp_path / "first.safetensors", sd)
    assert adapters.unused == ()
    assert torch.equal(adapters.tokens["<s1>"][0], tensors["<s1>"])
    assert set(adapters.layers) == set(expected)
    for name, delta in adapters.layers.items():
        assert torch.equal(delta.weight(expected[name]), expected[name])
    tensors["unet:0:up"] = torch.randn(9, 2)
    save_file(tensors, tmp_path / "other.safetensors", metadata)
    with pytest.raises(PellucidError, match="numbered adapter other must be the") as caught:
        lora_file.load(tmp_path / "other.safetensors", sd)
    assert caught.value.code == "lora-base"


# Our own network


def test_our_unet_takes_the_same_files(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    theirs = trained(sd["unet"], unet_config())
    save_file(kohya("lora_unet_", state(theirs), 5.0, compvis), tmp_path / "style.safetensors")
    raw = {key: value for key, value in sd["unet"].config.items() if key != "_use_default_values"}
    ours = UNet(configs.read(UNetConfig, raw)).eval()
    ours.load_state_dict(sd["unet"].state_dict())
    view = applied(tmp_path / "style.safetensors", {"unet": ours})[0]["unet"]
    x, context, time = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 10), torch.tensor([3.0, 700.0])
    with torch.no_grad():
        assert relative(view(x, time, context), theirs(x, time, context).sample) <= PARITY


# Saving


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("base", ["sd", "xl"])
def test_diffusers_opens_what_is_saved(base: str, dora: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    networks = request.getfixturevalue(base)
    tensors = kohya("lora_unet_", state(trained(networks["unet"], unet_config(use_dora=dora))), 1.7)
    for part, prefix in (("text_encoder", "lora_te1_"), ("text_encoder_2", "lora_te2_")):
        if part in networks:
            tensors |= kohya(
                prefix, state(trained(networks[part], text_config(target_modules=["fc1"]))), 1.7, with_text_model
            )
    save_file(tensors, tmp_path / "kohya.safetensors")
    adapters = lora_file.load(tmp_path / "kohya.safetensors", networks)
    lora_file.save(adapters, tmp_path / "new" / "saved.safetensors")
    written = load_file(tmp_path / "new" / "saved.safetensors")
    assert "text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_linear_layer.up.weight" in written  # as older readers
    loaded = pipeline(networks)
    loaded.load_lora_weights(tmp_path / "new" / "saved.safetensors")
    ours = lora.apply_all(networks, [(adapters, 1.0)])[0]
    assert_equal(ours, loaded, networks, set(networks))
    again = applied(tmp_path / "new" / "saved.safetensors", networks)[0]
    assert_equal(again, loaded, networks, set(networks))


def test_saving_a_core_and_half_precision_loses_nothing(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    name, q = "lora_unet_down_blocks_0_resnets_0_conv1", f"lora_unet_{underscored(ATTN)}_to_q"
    tensors = {
        f"{name}.lora_down.weight": torch.randn(2, 8, 1, 1),
        f"{name}.lora_mid.weight": torch.randn(2, 2, 3, 3),
        f"{name}.lora_up.weight": torch.randn(8, 2, 1, 1),
        f"{q}.lora_down.weight": torch.randn(3, 16).half(),
        f"{q}.lora_up.weight": torch.randn(16, 3).half(),
        f"{q}.alpha": torch.tensor(1.0),  # / 3, which float16 would round
    }
    save_file(tensors, tmp_path / "old.safetensors")
    adapters = lora_file.load(tmp_path / "old.safetensors", sd)
    lora_file.save(adapters, tmp_path / "old.safetensors")  # over the file that it came from
    loaded = pipeline(sd)
    loaded.load_lora_weights(tmp_path / "old.safetensors")
    assert_equal(lora.apply_all(sd, [(adapters, 1.0)])[0], loaded, sd, {"unet"})


def test_what_is_loaded_does_not_depend_on_its_file_any_more(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    file = tmp_path / "style.safetensors"
    save_file(kohya("lora_unet_", state(trained(sd["unet"], unet_config())), 5.0), file)
    adapters = lora_file.load(file, sd)
    before = outputs(lora.apply_all(sd, [(adapters, 1.0)])[0])["unet"]
    size = file.stat().st_size
    with file.open("r+b") as same:  # in place: a mapping of the file would see it
        same.write(b"\0" * size)
    assert torch.equal(outputs(lora.apply_all(sd, [(adapters, 1.0)])[0])["unet"], before)


def test_what_diffusers_cannot_open_is_not_saved(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    theirs = trained(sd["unet"], PEFT_CASES["loha"]())
    save_file(kohya("lora_unet_", state(theirs), 5.0), tmp_path / "loha.safetensors")
    adapters = lora_file.load(tmp_path / "loha.safetensors", sd)
    with pytest.raises(PellucidError, match=r"must be all LoRA or all DoRA; got \['LoHa'\]"):
        lora_file.save(adapters, tmp_path / "out.safetensors")
    with pytest.raises(PellucidError, match=r"ends in \.safetensors"):
        lora_file.save(adapters, tmp_path / "out.bin")
    assert [file.name for file in tmp_path.iterdir()] == ["loha.safetensors"]
