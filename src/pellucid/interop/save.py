"""Components → a folder that diffusers opens, and that we open again: whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.components import (
    INDEX,
    TEXT_PARTS,
    TOKENIZER_PARTS,
    Components,
    class_of,
    first_text,
    text_parts,
)
from pellucid.interop.diffusers_config import FILE_NAME as SCHEDULER
from pellucid.interop.folder import CONFIG
from pellucid.interop.tokenizer import Tokenizer
from pellucid.models.config import Config
from pellucid.models.quantize import is_quantized
from pellucid.models.unet import UNet
from pellucid.models.unet_config import UNetConfig

MAX_SHARD_BYTES = 5 * 10**9
_LAYOUT_VERSION = "0.30.0"  # the oldest diffusers whose layout this is
_NOTHING = [None, None]  # an optional part that a pipeline is without

# UNetConfig holds the keys of three classes: these are the ones that only some of them know.
_PIXEL_KEYS = """
sample_size in_channels out_channels center_input_sample time_embedding_dim freq_shift flip_sin_to_cos down_block_types
mid_block_type up_block_types block_out_channels layers_per_block mid_block_scale_factor downsample_padding dropout
attention_head_dim norm_num_groups attn_norm_num_groups norm_eps resnet_time_scale_shift class_embed_type
num_class_embeds num_train_timesteps add_attention
"""
_PIXEL_ONLY = "class_name attn_norm_num_groups add_attention num_train_timesteps"
_CONTROL_ONLY = "conditioning_channels conditioning_embedding_out_channels controlnet_conditioning_channel_order"
_UNET_ONLY = """
sample_size out_channels center_input_sample up_block_types mid_block_only_cross_attention dropout time_embedding_dim
reverse_transformer_layers_per_block time_cond_proj_dim conv_in_kernel conv_out_kernel
"""


def save_components(
    components: Components,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Writes a pipeline's folder. An older one is replaced, with `overwrite`, when the new one is complete."""
    index, networks, tokenizers = layout(components)
    with replaced(Path(folder), INDEX, overwrite) as place:
        write_json(place / INDEX, index)
        for part, network in networks.items():
            write_network(network, place / part, dtype, max_shard_bytes)
        for part, tokenizer in tokenizers.items():
            tokenizer.save(place / part)
        (place / "scheduler").mkdir()
        write_json(place / "scheduler" / SCHEDULER, components.scheduler)
    return Path(folder)


def save_component(
    network: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Writes one network's folder: a ControlNet, a VAE, an encoder."""
    class_of(network)
    with replaced(Path(folder), CONFIG, overwrite) as place:
        write_network(network, place, dtype, max_shard_bytes)
    return Path(folder)


# What goes where


def layout(components: Components) -> tuple[dict[str, Any], dict[str, nn.Module], dict[str, Tokenizer]]:
    """model_index.json, the network of each part, and the tokenizer of each part."""
    kind = components.pipeline_class
    if components.controlnets and "ControlNet" not in kind:
        raise PellucidError(
            rule("pipeline_class", "a ControlNet pipeline to save ControlNets with it", kind, "Save them apart."),
            "save",
        )
    networks: dict[str, nn.Module] = {
        "unet" if isinstance(components.network, UNet) else "transformer": components.network
    }
    if components.vae is not None:
        networks["vae"] = components.vae
    networks |= dict(zip(text_parts(components), components.text_encoders, strict=False))
    tokenizers = dict(zip(TOKENIZER_PARTS[first_text(components) :], components.tokenizers, strict=False))
    if components.image_encoder is not None:
        networks["image_encoder"] = components.image_encoder
    listed: dict[str, Any] = {part: _library_of(network) for part, network in networks.items()}
    for number, controlnet in enumerate(components.controlnets):
        networks[f"controlnet_{number}" if number else "controlnet"] = controlnet
    if components.controlnets:
        several = len(components.controlnets) > 1
        listed["controlnet"] = ["diffusers", "MultiControlNetModel" if several else "ControlNetModel"]
    for part, tokenizer in tokenizers.items():
        listed[part] = ["transformers", "CLIPTokenizer" if tokenizer.clip else "PreTrainedTokenizerFast"]
    listed["scheduler"] = ["diffusers", components.scheduler["_class_name"]]
    extra = {**components.extra, **({"id2label": components.labels} if components.labels else {})}
    empty = {part: _NOTHING for part in _optional_parts(kind) if part not in listed}
    if "safety_checker" in empty:
        extra["requires_safety_checker"] = False
    index = {"_class_name": kind, "_diffusers_version": _LAYOUT_VERSION, **empty, **listed, **extra}
    return dict(sorted(index.items())), networks, tokenizers


def _optional_parts(kind: str) -> tuple[str, ...]:
    if kind.startswith("StableDiffusionXL"):
        return (*TEXT_PARTS, *TOKENIZER_PARTS, "image_encoder", "feature_extractor")
    if kind.startswith("StableDiffusion") or kind.startswith("LatentConsistency"):
        return ("safety_checker", "feature_extractor", "image_encoder")
    return ("text_encoder", "tokenizer") if kind.startswith("PixArt") else ()


def _library_of(network: nn.Module) -> list[str]:
    kind = class_of(network)
    return ["transformers" if kind.startswith("CLIP") else "diffusers", kind]


def config_of(network: nn.Module) -> dict[str, Any]:
    """A network's config.json, with the keys that its class in diffusers or transformers knows."""
    kind, config = class_of(network), cast(Config, network.config)
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    if isinstance(config, UNetConfig):
        known = set(_PIXEL_KEYS.split())
        if kind != "UNet2DModel":
            known = set(values) - {*_PIXEL_ONLY.split()}
            known -= {*(_UNET_ONLY if kind == "ControlNetModel" else _CONTROL_ONLY).split()}
        values = {key: value for key, value in values.items() if key in known}
    if kind == "AutoencoderTiny":
        values.pop("block_out_channels")  # diffusers derives it
    if kind.startswith("CLIP"):
        model_type = "clip_text_model" if kind.startswith("CLIPText") else "clip_vision_model"
        return {**values, "architectures": [kind], "model_type": model_type}
    return {"_class_name": kind, "_diffusers_version": _LAYOUT_VERSION, **values}


# Files


def write_network(network: nn.Module, folder: Path, dtype: torch.dtype | None, limit: int) -> None:
    if is_quantized(network):
        advice = "Load the model without dtype='fp8' to save it."
        raise PellucidError(rule("weights to save", "as precise as those that were loaded", "fp8", advice), "save")
    folder.mkdir(exist_ok=True)
    write_json(folder / CONFIG, config_of(network))
    stem = "model" if class_of(network).startswith("CLIP") else "diffusion_pytorch_model"
    write_tensors(network.state_dict(), folder, stem, dtype, limit)


def write_tensors(state: Mapping[str, Tensor], folder: Path, stem: str, dtype: torch.dtype | None, limit: int) -> None:
    """One file, or shards of at most `limit` bytes with an index; a tensor that is larger has a shard of its own."""
    if limit < 1:
        raise PellucidError(rule("max_shard_bytes", "positive", limit), "save")
    sizes = {
        name: t.numel() * (dtype if dtype and t.is_floating_point() else t.dtype).itemsize for name, t in state.items()
    }
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files = [f"{stem}-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    files = files if len(shards) > 1 else [f"{stem}.safetensors"]
    for file, names in zip(files, shards, strict=True):
        save_file({name: own(state[name], dtype) for name in names}, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        write_json(folder / f"{stem}.safetensors.index.json", index)


def own(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor in memory of its own: safetensors writes none that share it, as embedders of a DiT do."""
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(device="cpu", dtype=kind, copy=True).contiguous()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def replaced(folder: Path, mark: str, overwrite: bool) -> Iterator[Path]:
    """A new folder to fill, which takes its name when all is written; on an error nothing is left of it."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        if not overwrite:
            raise PellucidError(
                rule("folder", "new or empty", str(folder), "Pass overwrite=True to replace it."), "save"
            )
        if not (folder / mark).is_file():  # never delete what is not a model
            raise PellucidError(rule("folder", f"one that holds {mark}, to replace it", str(folder)), "save")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as holder:
            fresh, old = Path(holder) / "new", Path(holder) / "old"
            fresh.mkdir()
            yield fresh
            if folder.exists():
                os.rename(folder, old)
            try:
                os.rename(fresh, folder)
            except OSError:
                if old.exists():
                    os.rename(old, folder)
                raise
            shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise PellucidError(f"folder must be one that can be written; {folder.name} is not: {error}.", "save") from None
