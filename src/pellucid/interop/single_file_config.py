"""The configs of networks in CompVis's and Stability's files, read from the shapes of their weights.

Shapes do not say how many heads an attention has, nor the groups of a norm: those are the families' own, below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.single_file_keys import indices

_HEADS = 8  # of every attention of Stable Diffusion 1
_HEAD_WIDTH = 64  # of every attention of Stable Diffusion 2 and XL, and of CLIP
_SIZE_WAVES = 256  # channels that SDXL gives to each of its six numbers

State = Mapping[str, Tensor]


def _shape(tensors: State, name: str, owner: str) -> tuple[int, ...]:
    if name not in tensors:
        raise PellucidError(f"weights of the {owner} must have {name}; got none.", "single-file-keys")
    return tuple(tensors[name].shape)


def _same(values: list[Any], what: str) -> Any:
    """The one value that all of a level have: a network whose levels are uneven is not of these families."""
    if len(set(values)) != 1:
        raise PellucidError(rule(what, "the same throughout", values), "single-file-shape")
    return values[0]


def _levels_of(tensors: State, owner: str) -> list[list[tuple[int, int]]]:
    """The way down: for each level and residual block, its channels and the depth of the transformer after it."""
    levels: list[list[tuple[int, int]]] = [[]]
    for index in range(1, indices(tensors, "input_blocks.")):
        block = f"input_blocks.{index}"
        if f"{block}.0.op.weight" in tensors:
            levels.append([])
        else:
            channels = _shape(tensors, f"{block}.0.out_layers.3.weight", owner)[0]
            levels[-1].append((channels, indices(tensors, f"{block}.1.transformer_blocks.")))
    if not all(levels):
        raise PellucidError(f"weights of the {owner} must have residual blocks at every level.", "single-file-shape")
    return levels


def _descent_config(tensors: State, owner: str) -> dict[str, Any]:
    """What the first half of a UNet says of itself."""
    levels = _levels_of(tensors, owner)
    channels = [_same([c for c, _ in level], f"channels of a level of the {owner}") for level in levels]
    depths = [_same([d for _, d in level], f"depth of a level of the {owner}") for level in levels]
    types = ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths]
    middle = indices(tensors, "middle_block.1.transformer_blocks.")
    if middle == 0 or depths[-1] not in (0, middle):
        raise PellucidError(rule(f"depth of the middle of the {owner}", f"{depths[-1]}", middle), "single-file-shape")
    attention = "middle_block.1"
    linear = len(_shape(tensors, f"{attention}.proj_in.weight", owner)) == 2
    depth = {depth for depth in depths if depth} | {middle}  # a level without attention may say anything
    config = {
        "in_channels": _shape(tensors, "input_blocks.0.0.weight", owner)[1],
        "block_out_channels": channels,
        "down_block_types": types,
        "layers_per_block": _same([len(level) for level in levels], f"layers a level of the {owner}"),
        "cross_attention_dim": _shape(tensors, f"{attention}.transformer_blocks.0.attn2.to_k.weight", owner)[1],
        "transformer_layers_per_block": middle if len(depth) == 1 else [*(each or 1 for each in depths[:-1]), middle],
        "use_linear_projection": linear,
        "attention_head_dim": [width // _HEAD_WIDTH for width in channels] if linear else _HEADS,
    }
    if "label_emb.0.0.weight" in tensors:
        config |= {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": _SIZE_WAVES,
            "projection_class_embeddings_input_dim": _shape(tensors, "label_emb.0.0.weight", owner)[1],
        }
    return config


def unet_config(tensors: State, sample_size: int) -> dict[str, Any]:
    config = _descent_config(tensors, "UNet")
    up = [name.replace("Down", "Up") for name in reversed(config["down_block_types"])]
    out_channels = _shape(tensors, "out.2.weight", "UNet")[0]
    return {**config, "up_block_types": up, "out_channels": out_channels, "sample_size": sample_size}


def control_config(tensors: State) -> dict[str, Any]:
    """The image's convolutions come in pairs, the second of each wider and at half the size."""
    numbers = range(0, indices(tensors, "input_hint_block.") - 1, 4)
    first = _shape(tensors, "input_hint_block.0.weight", "ControlNet")
    widths = [_shape(tensors, f"input_hint_block.{number}.weight", "ControlNet")[0] for number in numbers]
    return {
        **_descent_config(tensors, "ControlNet"),
        "conditioning_channels": first[1],
        "conditioning_embedding_out_channels": widths,
    }


def vae_config(tensors: State) -> dict[str, Any]:
    count = indices(tensors, "encoder.down.")
    channels = [_shape(tensors, f"encoder.down.{i}.block.0.conv1.weight", "VAE")[0] for i in range(count)]
    layers = [indices(tensors, f"encoder.down.{i}.block.") for i in range(count)]
    return {
        "in_channels": _shape(tensors, "encoder.conv_in.weight", "VAE")[1],
        "out_channels": _shape(tensors, "decoder.conv_out.weight", "VAE")[0],
        "latent_channels": _shape(tensors, "decoder.conv_in.weight", "VAE")[1],
        "block_out_channels": channels,
        "down_block_types": ["DownEncoderBlock2D"] * count,
        "up_block_types": ["UpDecoderBlock2D"] * count,
        "layers_per_block": _same(layers, "layers a level of the VAE"),
        "use_quant_conv": "quant_conv.weight" in tensors,
        "use_post_quant_conv": "post_quant_conv.weight" in tensors,
    }


def clip_config(tensors: State) -> dict[str, Any]:
    """OpenAI's text encoder, under transformers' own names."""
    place = "text_model.encoder.layers."
    vocabulary, width = _shape(tensors, "text_model.embeddings.token_embedding.weight", "text encoder")
    length = _shape(tensors, "text_model.embeddings.position_embedding.weight", "text encoder")[0]
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "max_position_embeddings": length,
        "num_hidden_layers": indices(tensors, place),
        "intermediate_size": _shape(tensors, f"{place}0.mlp.fc1.weight", "text encoder")[0],
        "num_attention_heads": max(width // _HEAD_WIDTH, 1),
        "hidden_act": "quick_gelu",
        "projection_dim": width,
        **_ends(vocabulary, vocabulary - 1),
    }


def open_clip_config(tensors: State, layers: int) -> dict[str, Any]:
    vocabulary, width = _shape(tensors, "token_embedding.weight", "text encoder")
    projection = tensors.get("text_projection")
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "max_position_embeddings": _shape(tensors, "positional_embedding", "text encoder")[0],
        "num_hidden_layers": layers,
        "intermediate_size": _shape(tensors, "transformer.resblocks.0.mlp.c_fc.weight", "text encoder")[0],
        "num_attention_heads": max(width // _HEAD_WIDTH, 1),
        "hidden_act": "gelu",
        "projection_dim": width if projection is None else projection.shape[1],
        **_ends(vocabulary, 0),
    }


def _ends(vocabulary: int, pad: int) -> dict[str, int]:
    """CLIP's vocabulary ends in the marks of a text's start and end."""
    return {"bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1, "pad_token_id": pad}
