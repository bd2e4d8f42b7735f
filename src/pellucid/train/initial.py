"""Starting weights: branches that add nothing yet, outputs that are zero, and CLIP's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.interop import source, weights
from pellucid.interop.components import KINDS, NETWORK_PARTS
from pellucid.models.blocks import PixelAttention, ResnetBlock, SpatialTransformer
from pellucid.models.clip import CLIP, Layers, TextEmbeddings, VisionEmbeddings
from pellucid.models.dit import DiT, PixArt, TextBlock
from pellucid.models.unet import UNet
from pellucid.train.draws import seeded

# --- Denoisers ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _start_small(network: nn.Module) -> nn.Module:
    """Zeroes the last layer of every residual branch and of the network: at first each block is the identity.

    As in Ho et al. 2020 for UNets, and in Peebles and Xie 2023 (adaLN-zero) for transformers.
    """
    for module in network.modules():
        if isinstance(module, ResnetBlock):
            _zero(module.conv2)
        elif isinstance(module, PixelAttention):
            _zero(module.to_out[0])
        elif isinstance(module, SpatialTransformer):
            _zero(module.proj_out)
        elif isinstance(module, UNet):
            _zero(module.conv_out)
        elif isinstance(module, DiT | PixArt):
            _start_transformer(module)
    return network


def _start_transformer(network: DiT | PixArt) -> None:
    """Gates closed, output zero."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in ("proj_out", "proj_out_2"):
            _zero(module)
        if isinstance(module, nn.Linear) and name.endswith(("norm1.linear", "adaln_single.linear")):
            _zero(module)
        if isinstance(module, TextBlock):
            module.scale_shift_table[[2, 5]] = 0.0  # its own part of the two gates
            _zero(module.attn2.to_out[0])  # has no gate


def _zero(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        parameter.zero_()


# --- From a config or a folder ----------------------------------------------------------------------------------------


def fresh(raw: Mapping[str, Any], seed: int) -> nn.Module:
    """A network of a diffusers config, with random weights that a seed decides."""
    kind = raw.get("_class_name")
    if not isinstance(kind, str) or kind not in KINDS:
        raise PellucidError(rule("network._class_name", "one of " + ", ".join(KINDS), kind), "class")
    settings = KINDS[kind].read(raw)
    sketched = weights.sketch(lambda: KINDS[kind].build(settings), "network")
    _check_room(sum(weight.numel() for weight in sketched.parameters()))
    with seeded(seed):
        return _start_small(KINDS[kind].build(settings))


def _check_room(count: int) -> None:
    """Refuses a network whose weights alone, in float32, are more than this machine's memory, before it is made."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**40
    if 4 * count > whole:
        must = f"of at most {whole // 4:,} weights, which fill the memory of this machine"
        raise PellucidError(rule("network", must, f"{count:,}"), "network")


def begun(network: Mapping[str, Any], start: str, seed: int) -> nn.Module:
    """The denoiser as the first step finds it: fresh, or that of a pipeline's folder, in float32."""
    if not start:
        return fresh(network, seed)
    folder = source.locate(start)
    found = [folder / part for part in NETWORK_PARTS if (folder / part).is_dir()]
    if not found:
        raise PellucidError(rule("start", f"a folder with {' or '.join(NETWORK_PARTS)}", start), "not-a-component")
    return source.load_component(found[0], dtype=torch.float32).train().requires_grad_(True)


# --- CLIP -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def start_clip(network: nn.Module) -> nn.Module:
    """Draws the weights of every text and vision transformer in a network, from torch's own stream of numbers.

    Branches that are added to the residual stream start smaller the more of them there are. torch's embeddings would
    start at 1: then the places of words, and not the words, would be most of what the first layers see.
    """
    for module in network.modules():
        if isinstance(module, TextEmbeddings):
            module.token_embedding.weight.normal_(std=0.02)
            module.position_embedding.weight.normal_(std=0.01)
        elif isinstance(module, VisionEmbeddings):
            width = len(module.class_embedding)
            module.class_embedding.normal_(std=width**-0.5)
            module.position_embedding.weight.normal_(std=width**-0.5)
        elif isinstance(module, Layers):
            _start_layers(module)
        elif isinstance(module, CLIP):
            for projection in (module.text_projection, module.visual_projection):
                projection.weight.normal_(std=projection.in_features**-0.5)
    return network


def _start_layers(layers: Layers) -> None:
    shrink = (2 * len(layers.layers)) ** -0.5
    for layer in layers.layers:
        attention, mlp = layer.self_attn, layer.mlp
        width = attention.q_proj.in_features
        for project in (attention.q_proj, attention.k_proj, attention.v_proj):
            _linear(project, width**-0.5)
        _linear(attention.out_proj, width**-0.5 * shrink)
        _linear(mlp.fc1, (2 * width) ** -0.5)
        _linear(mlp.fc2, width**-0.5 * shrink)


def _linear(layer: nn.Linear, std: float) -> Tensor:
    if layer.bias is not None:
        layer.bias.zero_()
    return layer.weight.normal_(std=std)
