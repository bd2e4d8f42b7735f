"""Adapter files: every layout, written by its own peer or renamed from one, acts as it does in that peer."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.training_utils import _collate_lora_metadata
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model, inject_adapter_in_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from pellucid.core.errors import PellucidError
from pellucid.interop import lora_file
from pellucid.interop.lora_keys import Spellings, numbered, spellings, take_apart
from pellucid.models import config as configs
from pellucid.models import lora
from pellucid.models.lora import AdapterSet
from pellucid.models.lora_delta import LoKr, LoRA
from pellucid.models.unet import UNet
from pellucid.models.unet_config import UNetConfig

PARITY = 1e-5  # of float32: the peer adds x·A·B where we add to W, so the two round differently
MODULES = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"]
CONVS = ["conv1", "conv2", "conv_shortcut", "time_emb_proj", "downsamplers.0.conv", "upsamplers.0.conv"]
TEXT = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
ATTN = "down_blocks.1.attentions.0.transformer_blocks.0.attn1"


# Two tiny pipelines


def clip(cls: type[nn.Module], width: int) -> nn.Module:
    settings = CLIPTextConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=16,
        projection_dim=12,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=2,
    )
    return cls(settings).eval()


def tiny_unet(context: int, **settings: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=context,
        attention_head_dim=4,
        norm_num_groups=2,
        **settings,
    ).eval()


def tiny_vae() -> AutoencoderKL:
    return AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, sample_size=8)


def sd_networks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"unet": tiny_unet(10), "text_encoder": clip(CLIPTextModel, 10)}


def xl_networks() -> dict[str, nn.Module]:
    torch.manual_seed(1)
    unet = tiny_unet(
        24,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=12 + 6 * 4,
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
    )
    first, second = clip(CLIPTextModel, 10), clip(CLIPTextModelWithProjection, 14)
    return {"unet": unet, "text_encoder": first, "text_encoder_2": second}


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


def pipeline(networks: dict[str, nn.Module]) -> Any:
    """A pipeline of diffusers over copies of the networks."""
    mine = copy.deepcopy(networks)
    if "text_encoder_2" in mine:
        return StableDiffusionXLPipeline(
            **mine, vae=tiny_vae(), tokenizer=None, tokenizer_2=None, scheduler=DDIMScheduler(), add_watermarker=False
        )
    return StableDiffusionPipeline(
        **mine,
        vae=tiny_vae(),
        tokenizer=None,
        scheduler=DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


@torch.no_grad()
def outputs(networks: dict[str, nn.Module]) -> dict[str, Tensor]:
    """What each network says to the same input."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(2, 4, 8, 8, generator=draw)
    found = {}
    for name, network in networks.items():
        if name == "unet":
            context = torch.randn(2, 5, network.config.cross_attention_dim, generator=draw)
            told = {"text_embeds": torch.ones(2, 12), "time_ids": torch.ones(2, 6)}
            found[name] = network(x, torch.tensor([3.0, 700.0]), context, added_cond_kwargs=told).sample
        else:
            found[name] = network(torch.tensor([[0, 5, 9, 2]]), output_hidden_states=True).hidden_states[-1]
    return found


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def assert_equal(ours: dict[str, nn.Module], theirs: Any, base: dict[str, nn.Module], touched: set[str]) -> None:
    """Our views answer as their networks do, and those of `touched` otherwise than the base."""
    expected = outputs({name: getattr(theirs, name) for name in base} if not isinstance(theirs, dict) else theirs)
    got, plain = outputs(ours), outputs(base)
    for name in base:
        assert relative(got[name], expected[name]) <= PARITY, name
        assert (relative(expected[name], plain[name]) > 1e-3) == (name in touched), name


def applied(
    path: Path, base: dict[str, nn.Module], scale: lora.Scale = 1.0
) -> tuple[dict[str, nn.Module], lora.Receipt]:
    return lora.apply_all(base, [(lora_file.load(path, base), scale)])


# Files of diffusers and PEFT


def trained(network: nn.Module, settings: Any, seed: int = 0) -> nn.Module:
    """A copy of a network with a random PEFT adapter in it."""
    torch.manual_seed(seed)
    network = copy.deepcopy(network)
    inject_adapter_in_model(settings, network)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    network.peft_config = {"default": settings}
    return network.eval()


def state(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(network).items()}


def unet_config(**settings: Any) -> LoraConfig:
    plain = {"r": 3, "lora_alpha": 5, "target_modules": MODULES + CONVS, "init_lora_weights": False}
    return LoraConfig(**plain | settings)


def text_config(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "lora_alpha": 3, "target_modules": TEXT, "init_lora_weights": False} | settings)


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
def test_diffusers_files(sd: dict[str, nn.Module], tmp_path: Path, settings: dict[str, Any]) -> None:
    if "use_dora" not in settings:
        settings = settings | {"target_modules": [*MODULES, *CONVS, "conv_in"]}
    theirs = {
        "unet": trained(sd["unet"], unet_config(**settings)),
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


def test_scales_equal_diffusers(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    for name in ("one", "two"):
        theirs = trained(sd["unet"], unet_config(), seed=len(name) + ord(name[0]))
        StableDiffusionPipeline.save_lora_weights(tmp_path / name, unet_lora_layers=state(theirs))
    loaded = pipeline(sd)
    for name in ("one", "two"):
        loaded.load_lora_weights(tmp_path / name, adapter_name=name)
    loaded.set_adapters(["one", "two"], [0.6, -0.4])
    stack = [(lora_file.load(tmp_path / name, sd), scale) for name, scale in (("one", 0.6), ("two", -0.4))]
    views, receipt = lora.apply_all(sd, stack)
    assert_equal(views, loaded, sd, {"unet"})
    assert receipt.adapters == ("one", "two")
    loaded.set_adapters(["one"], [{"unet": {"down": 0.2, "mid": 0.9, "up": 0.5}}])
    by_block = {"unet.down_blocks": 0.2, "unet.mid_block": 0.9, "unet.up_blocks": 0.5}
    assert_equal(lora.apply_all(sd, [(stack[0][0], by_block)])[0], loaded, sd, {"unet"})


PEFT_CASES = {
    "lora": lambda: unet_config(alpha_pattern={"to_q": 7}),
    "dora": lambda: unet_config(use_dora=True),
    "loha": lambda: LoHaConfig(r=3, alpha=5, target_modules=MODULES + CONVS, init_weights=False),
    "lokr": lambda: LoKrConfig(r=8, alpha=5, target_modules=MODULES + CONVS, init_weights=False),
    "lokr small": lambda: LoKrConfig(
        r=1, alpha=2, target_modules=MODULES + CONVS, init_weights=False, decompose_both=True, use_effective_conv2d=True
    ),
}


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


def underscored(name: str) -> str:
    return name.replace(".", "_")


COMPVIS = {  # by hand, for two levels of two layers: input blocks 1, 2, (3 halves), 4, 5; output blocks 0–5
    "down_blocks.0.resnets.0": "input_blocks.1.0",
    "down_blocks.0.resnets.1": "input_blocks.2.0",
    "down_blocks.0.downsamplers.0.conv": "input_blocks.3.0.op",
    "down_blocks.1.resnets.0": "input_blocks.4.0",
    "down_blocks.1.attentions.0": "input_blocks.4.1",
    "down_blocks.1.resnets.1": "input_blocks.5.0",
    "down_blocks.1.attentions.1": "input_blocks.5.1",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
    "up_blocks.0.resnets.0": "output_blocks.0.0",
    "up_blocks.0.attentions.0": "output_blocks.0.1",
    "up_blocks.0.resnets.1": "output_blocks.1.0",
    "up_blocks.0.attentions.1": "output_blocks.1.1",
    "up_blocks.0.resnets.2": "output_blocks.2.0",
    "up_blocks.0.attentions.2": "output_blocks.2.1",
    "up_blocks.0.upsamplers.0.conv": "output_blocks.2.2.conv",
    "up_blocks.1.resnets.0": "output_blocks.3.0",
    "up_blocks.1.resnets.1": "output_blocks.4.0",
    "up_blocks.1.resnets.2": "output_blocks.5.0",
    ".conv1": ".in_layers.2",
    ".conv2": ".out_layers.3",
    ".time_emb_proj": ".emb_layers.1",
    ".conv_shortcut": ".skip_connection",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}


def compvis(name: str) -> str:
    for new, old in COMPVIS.items():
        name = re.sub(re.escape(new) + r"(?=\.|$)", old, name)
    return name


def by_layer(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """PEFT's tensors as {layer: {ending: tensor}}."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        layer, end = re.fullmatch(r"(.+)\.((?:lora|hada|lokr)_.+)", key).groups()
        found.setdefault(layer, {})[end] = tensor
    return found


KOHYA_ENDS = {
    "lora_A.weight": "lora_down.weight",
    "lora_B.weight": "lora_up.weight",
    "lora_magnitude_vector": "dora_scale",
}


def kohya(
    prefix: str, tensors: dict[str, Tensor], alpha: float, spell: Callable[[str], str] = str
) -> dict[str, Tensor]:
    found = {}
    for layer, parts in by_layer(tensors).items():
        name = prefix + underscored(spell(layer))
        found |= {f"{name}.{KOHYA_ENDS.get(end, end)}": tensor for end, tensor in parts.items()}
        found[f"{name}.alpha"] = torch.tensor(alpha)
    return found


def with_text_model(name: str) -> str:
    return f"text_model.{name.removeprefix('text_model.')}"


@pytest.mark.parametrize("spell", [str, compvis], ids=["diffusers", "compvis"])
@pytest.mark.parametrize("base", ["sd", "xl"])
def test_kohya_files(base: str, spell: Callable[[str], str], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    networks = request.getfixturevalue(base)
    modules = MODULES + CONVS + (["add_embedding.linear_1", "time_embedding.linear_2"] if base == "xl" else [])
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
    assert adapters.unused == ("<s1>",)
    assert set(adapters.layers) == set(expected)
    for name, delta in adapters.layers.items():
        assert torch.equal(delta.weight(expected[name]), expected[name])
    tensors["unet:0:up"] = torch.randn(9, 2)
    save_file(tensors, tmp_path / "other.safetensors", metadata)
    with pytest.raises(PellucidError, match="numbered adapter other must be the") as caught:
        lora_file.load(tmp_path / "other.safetensors", sd)
    assert caught.value.code == "lora-base"


def test_numbered_files_of_later_trainers_have_the_feed_forward_last() -> None:
    block = "down_blocks.0.attentions.0.transformer_blocks.0"
    layers = [f"{block}.attn1.to_q", f"{block}.attn2.to_q", f"{block}.ff.net.0.proj"]
    then, later = numbered(layers, ["Attention", "GEGLU"])
    assert then == [layers[0], layers[2], layers[1]]
    assert later == layers


# Names


def test_every_spelling_of_the_full_sdxl_unet_means_one_layer() -> None:
    with torch.device("meta"):
        unet = UNet2DConditionModel(
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )
    names = lora.layer_weights(unet)
    table = spellings(names)
    assert all(table[name] == name == table[underscored(name)] for name in names)
    block, up = "attentions.0.transformer_blocks", "output_blocks"
    known = {  # from files in the wild
        "input_blocks_4_1_transformer_blocks_0_attn1_to_q": f"down_blocks.1.{block}.0.attn1.to_q",
        "input_blocks_7_1_transformer_blocks_9_ff_net_0_proj": f"down_blocks.2.{block}.9.ff.net.0.proj",
        "input_blocks_6_0_op": "down_blocks.1.downsamplers.0.conv",
        "middle_block_1_transformer_blocks_3_attn2_to_out_0": f"mid_block.{block}.3.attn2.to_out.0",
        f"{up}_5_2_conv": "up_blocks.1.upsamplers.0.conv",
        f"{up}_8_0_skip_connection": "up_blocks.2.resnets.2.conv_shortcut",
        "label_emb_0_2": "add_embedding.linear_2",
        "out_2": "conv_out",
    }
    assert {spelling: table.get(spelling) for spelling in known} == known


def test_a_spelling_that_two_layers_share_means_neither() -> None:
    table = spellings(["a.b_c", "a_b.c", "d"])
    assert "a_b_c" not in table
    assert (table["a.b_c"], table["a_b.c"], table["d"]) == ("a.b_c", "a_b.c", "d")


def test_a_component_that_is_not_there_leaves_its_keys_unused(sd: dict[str, nn.Module]) -> None:
    names = Spellings({"text_encoder": sd["text_encoder"]})
    assert names.find(f"unet.{ATTN}.to_q") is None
    assert names.find(f"lora_te2_{underscored('text_model.encoder.layers.0.mlp.fc1')}") is None
    assert names.find(f"lora_te_{underscored('text_model.encoder.layers.0.mlp.fc1')}") is not None


@pytest.mark.parametrize(
    ("key", "stem", "part"),
    [
        ("a.to_q.lora_A.weight", "a.to_q", "down"),
        ("a.to_q.lora_B.default.weight", "a.to_q", "up"),
        ("a.to_q_lora.up.weight", "a.to_q", "up"),
        ("a.to_q.lora.down.weight", "a.to_q", "down"),
        ("a.fc1.lora_linear_layer.up.weight", "a.fc1", "up"),
        ("a.to_q.lora_magnitude_vector.default.weight", "a.to_q", "magnitude"),
        ("a.to_q.magnitude_vector", "a.to_q", "magnitude"),
        ("lora_unet_a.hada_w1_a", "lora_unet_a", "hada_w1_a"),
        ("lora_unet_a.lokr_t2", "lora_unet_a", "lokr_t2"),
        ("lora_unet_a.dora_scale", "lora_unet_a", "dora_scale"),
        ("unet:12:down", "unet:12", "down"),
    ],
)
def test_keys_come_apart(key: str, stem: str, part: str) -> None:
    assert take_apart(key) == (stem, part)


@pytest.mark.parametrize("key", ["a.weight", "lora_A.weight", "a.oft_blocks", ""])
def test_other_keys_do_not(key: str) -> None:
    assert take_apart(key) is None


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


def test_what_diffusers_cannot_open_is_not_saved(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    theirs = trained(sd["unet"], PEFT_CASES["loha"]())
    save_file(kohya("lora_unet_", state(theirs), 5.0), tmp_path / "loha.safetensors")
    adapters = lora_file.load(tmp_path / "loha.safetensors", sd)
    with pytest.raises(PellucidError, match=r"must be all LoRA or all DoRA; got \['LoHa'\]"):
        lora_file.save(adapters, tmp_path / "out.safetensors")
    with pytest.raises(PellucidError, match=r"ends in \.safetensors"):
        lora_file.save(adapters, tmp_path / "out.bin")
    assert [file.name for file in tmp_path.iterdir()] == ["loha.safetensors"]


# Bad input


def refused(path: Path, networks: dict[str, nn.Module]) -> PellucidError:
    with pytest.raises(PellucidError) as caught:
        lora_file.load(path, networks)
    assert "\n" not in str(caught.value)
    return caught.value


def saved_kohya(path: Path, networks: dict[str, nn.Module], **settings: Any) -> dict[str, Tensor]:
    tensors = kohya("lora_unet_", state(trained(networks["unet"], unet_config(**settings))), 2.0)
    if "text_encoder_2" in networks:
        tensors |= kohya("lora_te2_", state(trained(networks["text_encoder_2"], text_config())), 2.0)
    save_file(tensors, path)
    return tensors


def test_a_truncated_file(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    file = tmp_path / "style.safetensors"
    saved_kohya(file, sd)
    whole = file.read_bytes()
    for size in (len(whole) // 2, 40, 5, 0):
        file.write_bytes(whole[:size])
        assert "style.safetensors" in str(refused(file, sd))


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("trapped", "w"))


def test_a_pickle_with_code_is_refused_and_not_run(
    sd: dict[str, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"unet.a": Trap()}, "style.bin")
    Path("style.pt").write_bytes(pickle.dumps(Trap()))
    torch.save([torch.zeros(2), torch.zeros(2)], "list.pt")  # the first trainer's, without names
    for name in ("style.bin", "style.pt", "list.pt"):
        refused(tmp_path / name, sd)
    assert not Path("trapped").exists()


def test_files_that_are_not_there_or_not_alone(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    assert refused(tmp_path / "none.safetensors", sd).code == "lora-file"
    assert "got 'none'" in str(refused(tmp_path, sd))
    for name in ("a", "b"):
        saved_kohya(tmp_path / f"{name}.safetensors", sd, target_modules=["to_q"])
    assert "got 'a.safetensors, b.safetensors'" in str(refused(tmp_path, sd))


def test_unknown_keys_only(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    file = tmp_path / "style.safetensors"
    save_file({"lora_unet_double_blocks_0_img.lora_down.weight": torch.zeros(1), "x.weight": torch.zeros(1)}, file)
    error = refused(file, sd)
    assert error.code == "lora-nothing"
    assert "double_blocks_0_img" in str(error)
    assert "adapter style must be one with keys for layers of unet, text_encoder" in str(error)
    save_file({"lora_te2_x.alpha": torch.ones(1)}, file)
    assert str(refused(file, sd)).endswith("It is for SDXL.")
    save_file({f"unet.{ATTN}.to_q.alpha": torch.ones(1)}, file)  # a layer that is there, and nothing to add to it
    assert refused(file, sd).code == "lora-nothing"


def test_some_unknown_keys_are_named(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    file = tmp_path / "style.safetensors"
    tensors = saved_kohya(file, sd, target_modules=["to_q"])
    more = {"lora_unet_nowhere.alpha": torch.ones(1), f"unet.{ATTN}.to_k.oft_blocks": torch.ones(1)}
    save_file(tensors | more, file)
    _, receipt = applied(file, sd)
    assert set(receipt.unused) == set(more)
    assert set(receipt.read) == set(tensors)


def test_another_base_is_named_with_layer_and_shapes(
    sd: dict[str, nn.Module], xl: dict[str, nn.Module], tmp_path: Path
) -> None:
    saved_kohya(tmp_path / "xl.safetensors", xl)
    error = refused(tmp_path / "xl.safetensors", sd)
    assert error.code == "lora-base"
    layer = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"
    assert f"{layer} of adapter xl must be (16, 10) as in the base; got (16, 24)." in str(error)
    saved_kohya(tmp_path / "sd.safetensors", sd, target_modules=["to_k"])
    assert "must be (16, 24) as in the base; got (16, 10)" in str(refused(tmp_path / "sd.safetensors", xl))


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ({"lora_down.weight": (2, 16)}, "lora-incomplete"),
        ({"lora_up.weight": (16, 2)}, "lora-incomplete"),
        ({"hada_w1_a": (16, 2), "hada_w1_b": (2, 16)}, "lora-incomplete"),
        ({"lokr_w1": (4, 4)}, "lora-incomplete"),
        ({"lora_down.weight": (3, 16), "lora_up.weight": (16, 2)}, "lora-shape"),
        ({"lora_down.weight": (16,), "lora_up.weight": (16,)}, "lora-shape"),
        ({"lora_down.weight": (), "lora_up.weight": ()}, "lora-shape"),
        ({"lora_down.weight": (2, 16), "lora_up.weight": (16, 2), "alpha": (2,)}, "lora-shape"),
        ({"lora_down.weight": (2, 16), "lora_up.weight": (16, 2), "dora_scale": (7, 1)}, "lora-base"),
        ({"hada_w1_a": (16, 2), "hada_w1_b": (2, 16), "hada_w2_a": (16, 2), "hada_w2_b": (2, 8)}, "lora-shape"),
        ({"lokr_w1": (4, 4), "lokr_w2": (4,)}, "lora-shape"),
        ({"lokr_w1": (4, 4), "lokr_w2": (4, 5)}, "lora-base"),
        ({"diff": ()}, "lora-base"),
    ],
)  # fmt: skip
def test_broken_layers_are_named(
    sd: dict[str, nn.Module], tmp_path: Path, parts: dict[str, tuple[int, ...]], code: str
) -> None:
    name = f"lora_unet_{underscored(ATTN)}_to_q"
    save_file({f"{name}.{end}": torch.ones(shape) for end, shape in parts.items()}, tmp_path / "style.safetensors")
    error = refused(tmp_path / "style.safetensors", sd)
    assert error.code == code
    assert f"{ATTN}.to_q of adapter style" in str(error)


@pytest.mark.parametrize(
    "metadata",
    ["{", "[]", '{"unet.lora_alpha": "much"}', '{"unet.lora_alpha": 1, "unet.alpha_pattern": {"(": 1}}',
     '{"unet.lora_alpha": 1, "unet.alpha_pattern": [1]}'],
)  # fmt: skip
def test_broken_metadata(sd: dict[str, nn.Module], tmp_path: Path, metadata: str) -> None:
    tensors = state(trained(sd["unet"], unet_config(target_modules=["to_q"])))
    tensors = {f"unet.{key}": tensor for key, tensor in tensors.items()}
    save_file(tensors, tmp_path / "style.safetensors", {"lora_adapter_metadata": metadata})
    assert refused(tmp_path / "style.safetensors", sd).code == "lora-config"


def test_a_file_of_zeros_is_read_but_not_applied(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    tensors = state(trained(sd["unet"], unet_config(init_lora_weights=True)))  # as PEFT begins: B is zero
    save_file({f"unet.{key}": tensor for key, tensor in tensors.items()}, tmp_path / "style.safetensors")
    adapters = lora_file.load(tmp_path / "style.safetensors", sd)
    assert isinstance(adapters, AdapterSet)
    assert all(isinstance(delta, LoRA) for delta in adapters.layers.values())
    with pytest.raises(PellucidError, match="adapter style must change a layer") as caught:
        lora.apply_all(sd, [(adapters, 1.0)])
    assert caught.value.code == "lora-nothing"
