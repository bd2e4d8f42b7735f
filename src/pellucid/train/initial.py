"""Where training starts: residual branches that add nothing yet, and outputs that are zero."""

from __future__ import annotations

import torch
from torch import nn

from pellucid.models.blocks import PixelAttention, ResnetBlock, SpatialTransformer
from pellucid.models.dit import DiT, PixArt, TextBlock
from pellucid.models.unet import UNet


@torch.no_grad()
def start_small(network: nn.Module) -> nn.Module:
    """Zeroes the last layer of every residual branch and of the network: at first each block is the identity.

    As in Ho et al. 2020 for UNets, and in Peebles and Xie 2023 (adaLN-zero) for transformers.
    """
    for module in network.modules():
        if isinstance(module, ResnetBlock):
            zero(module.conv2)
        elif isinstance(module, PixelAttention):
            zero(module.to_out[0])
        elif isinstance(module, SpatialTransformer):
            zero(module.proj_out)
        elif isinstance(module, UNet):
            zero(module.conv_out)
        elif isinstance(module, DiT | PixArt):
            start_transformer(module)
    return network


def start_transformer(network: DiT | PixArt) -> None:
    """Gates closed, output zero."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in ("proj_out", "proj_out_2"):
            zero(module)
        if isinstance(module, nn.Linear) and name.endswith(("norm1.linear", "adaln_single.linear")):
            zero(module)
        if isinstance(module, TextBlock):
            module.scale_shift_table[[2, 5]] = 0.0  # its own part of the two gates
            zero(module.attn2.to_out[0])  # has no gate


def zero(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        parameter.zero_()
