"""Model folders that are broken in one way: their components, their text, their weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_models as tiny
import torch
from diffusers import AutoencoderKL
from sabotages import sabotage
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPTextModel

from pellucid.evidence.doctor.subject import RunSpec, Subject, SubjectSpec, of_model

WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = "model_index.json"
SCHEDULER = "scheduler/scheduler_config.json"


def edit(path: Path, **changes: Any) -> None:
    """Changes keys of a JSON file; ... takes one away."""
    held = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps({k: v for k, v in held.items() if v is not ...}), encoding="utf-8")


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(path)), path)


def linked(model: Path, goal: Path) -> Path:
    """A copy whose configs may be spoilt; its weights are links."""
    for path in model.rglob("*"):
        place = goal / path.relative_to(model)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            place.write_bytes(path.read_bytes())
        elif path.is_file():
            place.symlink_to(path)
    return goal


def look(folder: Path, **given: Any) -> Subject:
    """The subject of a folder; files alone are read unless weights matter."""
    return of_model(str(folder), RunSpec(device="cpu"), SubjectSpec(**{"quick": True, **given}))


# --- components ------------------------------------------------------------------------------------------------


@sabotage("component-missing", "lists vae (AutoencoderKL)")
def a_folder_without_its_vae(folder: Path) -> Subject:
    model = tiny.copied("sd1", folder)
    (model / "vae").rename(folder / "gone")
    return look(model)


@sabotage("class-mismatch", "makes a AutoencoderTiny of the config of a AutoencoderKL")
def a_vae_of_another_class(folder: Path) -> Subject:
    model = tiny.copied("sd1", folder)
    edit(model / INDEX, vae=["diffusers", "AutoencoderTiny"])
    return look(model)


@sabotage("class-mismatch", "samples otherwise than the config says")
def a_scheduler_of_another_class(folder: Path) -> Subject:
    model = tiny.copied("sd1", folder)
    edit(model / INDEX, scheduler=["diffusers", "DDIMScheduler"])
    return look(model)


@sabotage("pipeline-class", "takes sizes and a pooled text")
def an_xl_unet_in_the_first_pipeline(folder: Path) -> Subject:
    model = tiny.copied("xl", folder)
    edit(model / INDEX, _class_name="StableDiffusionPipeline")
    return look(model)


@sabotage("pipeline-class", "takes 9 channels")
def an_inpainting_unet_in_the_first_pipeline(folder: Path) -> Subject:
    model = tiny.copied("inpaint", folder)
    edit(model / INDEX, _class_name="StableDiffusionPipeline")
    return look(model)


@sabotage("text-width", "comes 32 wide")
def a_text_encoder_of_another_model(folder: Path) -> Subject:
    model = tiny.copied("sd1", folder)
    tiny.randomised(CLIPTextModel(tiny.text_config(hidden_size=32))).save_pretrained(model / "text_encoder")
    return look(model)


@sabotage("pooled-width", "the UNet takes 1600")
def a_second_encoder_of_another_model(folder: Path) -> Subject:
    model = tiny.copied("xl", folder)
    edit(model / "text_encoder_2/config.json", projection_dim=32)
    return look(model)


@sabotage("latent-channels", "makes 8 channels and the network takes 4")
def a_vae_of_another_model(folder: Path) -> Subject:
    model = tiny.copied("dit", folder)
    made = AutoencoderKL(**{**tiny.VAE, "latent_channels": 3})
    tiny.randomised(made).save_pretrained(model / "vae")
    edit(model / "vae/config.json", latent_channels=8)
    return look(model)


# --- text ------------------------------------------------------------------------------------------------------


@sabotage("tokenizer-length", "has no position for its last tokens")
def a_tokenizer_with_a_longer_window(folder: Path) -> Subject:
    model = tiny.copied("sd1", folder)
    edit(model / "tokenizer/tokenizer_config.json", model_max_length=77)
    return look(model)


@sabotage("tokenizer-vocabulary", "table ends at 31")
def a_tokenizer_of_a_larger_vocabulary(folder: Path) -> Subject:
    model = tiny.copied("sd1", folder)
    tiny.randomised(CLIPTextModel(tiny.text_config(vocab_size=32))).save_pretrained(model / "text_encoder")
    return look(model)


@sabotage("tokenizer-end", "pools at the first token")
def an_encoder_that_looks_for_another_end(folder: Path) -> Subject:
    model = tiny.copied("xl", folder)
    edit(model / "text_encoder_2/config.json", eos_token_id=50)
    return look(model)


@sabotage("tokenizer-files", "must be JSON")
def a_tokenizer_that_is_cut_off(folder: Path) -> Subject:
    model = tiny.copied("sd1", folder)
    for path in (model / "tokenizer").iterdir():
        if path.name in ("vocab.json", "tokenizer.json"):
            path.write_text('{"a": ', encoding="utf-8")
    return look(model)


# --- weights ---------------------------------------------------------------------------------------------------


@sabotage("weights-missing", "does not hold them")
def weights_that_are_missing(folder: Path) -> Subject:
    model = tiny.copied("sd1", folder)
    rewrite(model / "unet" / WEIGHTS, lambda held: {k: t for k, t in held.items() if "mid_block" not in k})
    return look(model)


@sabotage("weights-extra", "has no place for them")
def weights_that_are_too_many(folder: Path) -> Subject:
    model = tiny.copied("sd1", folder)
    rewrite(model / "unet" / WEIGHTS, lambda held: {**held, "class_embedding.weight": torch.ones(4, 8)})
    return look(model)


@sabotage("weights-shape", "of different models")
def a_config_of_another_width(folder: Path) -> Subject:
    model = tiny.copied("sd1", folder)
    edit(model / "unet/config.json", cross_attention_dim=96)
    return look(model)


@sabotage("model-config-key", "layers_per_blok")
def a_network_config_with_a_slip(folder: Path) -> Subject:
    model = tiny.copied("sd1", folder)
    edit(model / "unet/config.json", layers_per_blok=2)
    return look(model)


@sabotage("model-config-value", "CrossAttnDownBlock3D")
def a_network_config_with_a_strange_block(folder: Path) -> Subject:
    model = tiny.copied("sd1", folder)
    edit(model / "unet/config.json", down_block_types=["CrossAttnDownBlock3D", "DownBlock2D"])
    return look(model)


@sabotage("weights-dtype", "8 bits")
def weights_of_eight_bits(folder: Path) -> Subject:
    model = tiny.copied("dit", folder)
    rewrite(model / "transformer" / WEIGHTS, lambda held: {k: t.to(torch.float8_e4m3fn) for k, t in held.items()})
    return look(model, quick=False)


@sabotage("weights-not-finite", "half precision overflowed")
def weights_that_overflowed(folder: Path) -> Subject:
    model = tiny.copied("dit", folder)
    name = "transformer_blocks.1.ff.net.2.weight"
    rewrite(model / "transformer" / WEIGHTS, lambda held: {**held, name: (held[name] * 1e7).half().float()})
    return look(model, quick=False)


@sabotage("weights-zero", "its output is always zero")
def weights_of_the_first_step(folder: Path) -> Subject:
    model = tiny.copied("dit", folder)
    rewrite(
        model / "transformer" / WEIGHTS,
        lambda held: {k: torch.zeros_like(t) if k.startswith("proj_out_2") else t for k, t in held.items()},
    )
    return look(model, quick=False)


@sabotage("weights-file", "git-LFS pointer")
def weights_that_were_not_fetched(folder: Path) -> Subject:
    model = tiny.copied("dit", folder)
    (model / "transformer" / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n", encoding="utf-8")
    return look(model)
