"""Names of weights in CompVis's and Stability's files → diffusers' and transformers': tables, made by rules.

A table maps the name of a module to its new name; what follows the longest known name is kept as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.weights import some

_MAX_MODULES = 1_000  # of one numbered list
_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_VAE_RESNET = {name: name for name in ("norm1", "conv1", "norm2", "conv2")} | {"nin_shortcut": "conv_shortcut"}
_VAE_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
_OPEN_CLIP_LAYER = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_OPEN_CLIP = {
    "token_embedding": "text_model.embeddings.token_embedding",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
}


def _inside(old: str, new: str, names: Mapping[str, str]) -> dict[str, str]:
    return {f"{old}.{a}": f"{new}.{b}" for a, b in names.items()}


def renamed(tensors: Mapping[str, Tensor], table: Mapping[str, str], owner: str) -> dict[str, Tensor]:
    """The tensors under their new names; those that no rule knows are an error."""
    found, unknown = {}, []
    for name, tensor in tensors.items():
        new = new_name(name, table)
        if new is None:
            unknown.append(name)
        else:
            found[new] = tensor
    if unknown:
        raise PellucidError(f"weights of the {owner} must have known names; got {some(unknown)}.", "single-file-keys")
    return found


def new_name(name: str, table: Mapping[str, str]) -> str | None:
    known = name
    while known:
        if known in table:
            return table[known] + name[len(known) :]
        known = known.rpartition(".")[0]
    return None


def indices(names: Iterable[str], prefix: str) -> int:
    """How many numbered modules follow a prefix: one more than the highest number."""
    numbers = {name[len(prefix) :].split(".")[0] for name in names if name.startswith(prefix)}
    found = 1 + max((int(number) for number in numbers if re.fullmatch(r"[0-9]{1,9}", number)), default=-1)
    if found > _MAX_MODULES:
        raise PellucidError(rule(f"modules under {prefix}", f"at most {_MAX_MODULES}", found), "single-file-keys")
    return found


def _descent_table(config: Mapping[str, Any]) -> dict[str, str]:
    """A UNet's first half: input_blocks count every residual block and every halving, after the first convolution."""
    layers, levels = config["layers_per_block"], len(config["block_out_channels"])
    table = {
        "time_embed.0": "time_embedding.linear_1",
        "time_embed.2": "time_embedding.linear_2",
        "label_emb.0.0": "add_embedding.linear_1",
        "label_emb.0.2": "add_embedding.linear_2",
        "input_blocks.0.0": "conv_in",
        "middle_block.1": "mid_block.attentions.0",
    }
    for index in range(levels * (layers + 1) - 1):
        (level, layer), old = divmod(index, layers + 1), f"input_blocks.{index + 1}"
        if layer == layers:
            table[f"{old}.0.op"] = f"down_blocks.{level}.downsamplers.0.conv"
        else:
            table |= _inside(f"{old}.0", f"down_blocks.{level}.resnets.{layer}", _RESNET)
            table[f"{old}.1"] = f"down_blocks.{level}.attentions.{layer}"
    for old_index, new_index in ((0, 0), (2, 1)):
        table |= _inside(f"middle_block.{old_index}", f"mid_block.resnets.{new_index}", _RESNET)
    return table


def unet_table(config: Mapping[str, Any]) -> dict[str, str]:
    """output_blocks count residual blocks; the doubling comes after the last of a level and after its attention."""
    layers = config["layers_per_block"] + 1
    table = _descent_table(config) | {"out.0": "conv_norm_out", "out.2": "conv_out"}
    for index in range(len(config["block_out_channels"]) * layers):
        (level, layer), old = divmod(index, layers), f"output_blocks.{index}"
        table |= _inside(f"{old}.0", f"up_blocks.{level}.resnets.{layer}", _RESNET)
        attends = config["up_block_types"][level].startswith("CrossAttn")
        if attends:
            table[f"{old}.1"] = f"up_blocks.{level}.attentions.{layer}"
        if layer == layers - 1:
            table[f"{old}.{1 + attends}.conv"] = f"up_blocks.{level}.upsamplers.0.conv"
    return table


def control_table(config: Mapping[str, Any]) -> dict[str, str]:
    """A ControlNet: a UNet's first half, a 1×1 convolution a skip, and the image's convolutions at even numbers."""
    table = _descent_table(config) | {"middle_block_out.0": "controlnet_mid_block"}
    for index in range(len(config["block_out_channels"]) * (config["layers_per_block"] + 1)):
        table[f"zero_convs.{index}.0"] = f"controlnet_down_blocks.{index}"
    between = 2 * len(config["conditioning_embedding_out_channels"]) - 2
    new = "controlnet_cond_embedding"
    names = ["conv_in", *(f"blocks.{index}" for index in range(between)), "conv_out"]
    return table | {f"input_hint_block.{2 * index}": f"{new}.{name}" for index, name in enumerate(names)}


def _vae_table(config: Mapping[str, Any]) -> dict[str, str]:
    """A VAE: the same parts as diffusers', but the decoder's levels are numbered from the image."""
    levels, layers = len(config["block_out_channels"]), config["layers_per_block"]
    table = {name: name for name in ("quant_conv", "post_quant_conv")}
    for half in ("encoder", "decoder"):
        table |= {f"{half}.{name}": f"{half}.{name}" for name in ("conv_in", "conv_out")}
        table[f"{half}.norm_out"] = f"{half}.conv_norm_out"
        table |= _inside(f"{half}.mid.attn_1", f"{half}.mid_block.attentions.0", _VAE_ATTENTION)
        for index in (0, 1):
            table |= _inside(f"{half}.mid.block_{index + 1}", f"{half}.mid_block.resnets.{index}", _VAE_RESNET)
    for level in range(levels):
        down, up = f"encoder.down_blocks.{level}", f"decoder.up_blocks.{levels - 1 - level}"
        table[f"encoder.down.{level}.downsample.conv"] = f"{down}.downsamplers.0.conv"
        table[f"decoder.up.{level}.upsample.conv"] = f"{up}.upsamplers.0.conv"
        for layer in range(layers):
            table |= _inside(f"encoder.down.{level}.block.{layer}", f"{down}.resnets.{layer}", _VAE_RESNET)
        for layer in range(layers + 1):
            table |= _inside(f"decoder.up.{level}.block.{layer}", f"{up}.resnets.{layer}", _VAE_RESNET)
    return table


def vae_tensors(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    found = renamed(tensors, _vae_table(config), "VAE")
    # attention was written as 1×1 convolutions
    flat = {name: t.flatten(1) for name, t in found.items() if ".attentions.0.to_" in name and t.ndim == 4}
    return found | flat


def open_clip_tensors(tensors: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """OpenCLIP's text encoder, its first `layers` layers: queries, keys and values come apart, its projection turns."""
    table, fused = dict(_OPEN_CLIP), {}
    plain: dict[str, Tensor] = {}
    for layer in range(layers):
        new = f"text_model.encoder.layers.{layer}"
        table |= _inside(f"transformer.resblocks.{layer}", new, _OPEN_CLIP_LAYER)
        for kind in ("weight", "bias"):
            fused[f"transformer.resblocks.{layer}.attn.in_proj_{kind}"] = (f"{new}.self_attn", kind)
    for name, tensor in tensors.items():
        if name in fused:
            place, kind = fused[name]
            parts = tensor.chunk(3)  # (3·D, …) → 3 × (D, …)
            plain |= {f"{place}.{part}_proj.{kind}": t for part, t in zip("qkv", parts, strict=True)}
        elif name == "text_projection":
            plain["text_projection.weight"] = tensor.T  # (D, P) → (P, D)
    rest = {name: t for name, t in tensors.items() if name not in fused and name != "text_projection"}
    return plain | renamed(rest, table, "text encoder")
