"""Where training starts: the output is zero, each block is the identity, and yet nothing is dead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pellucid.models import ops
from pellucid.models.blocks import PixelAttention, ResnetBlock, SpatialTransformer
from pellucid.models.dit_blocks import Block
from pellucid.train.initial import fresh

PIXEL = {
    "_class_name": "UNet2DModel",
    "sample_size": 8,
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    "norm_num_groups": 4,
    "attention_head_dim": 8,
}
LATENT = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 8,
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "norm_num_groups": 4,
    "attention_head_dim": 2,
    "cross_attention_dim": 6,
}
PATCHES = {
    "sample_size": 8,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 4,
}
DIT = {"_class_name": "DiTTransformer2DModel", **PATCHES, "num_embeds_ada_norm": 3}
PIXART = {
    "_class_name": "PixArtTransformer2DModel",
    **PATCHES,
    "cross_attention_dim": 16,
    "caption_channels": 6,
    "use_additional_conditions": False,
}
CONTEXT = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1))
CASES: list[tuple[dict[str, Any], int, dict[str, Any]]] = [
    (PIXEL, 3, {}),
    (LATENT, 4, {"context": CONTEXT}),
    (DIT, 4, {"labels": torch.tensor([0, 2])}),
    (PIXART, 4, {"context": CONTEXT}),
]
BRANCHES = (ResnetBlock, PixelAttention, SpatialTransformer, Block)
each = pytest.mark.parametrize(("raw", "channels", "told"), CASES, ids=[case[0]["_class_name"] for case in CASES])


def asked(channels: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, channels, 8, 8, generator=torch.Generator().manual_seed(step)), torch.tensor([10.0, 900.0])


@each
def test_the_output_is_zero(raw: dict[str, Any], channels: int, told: dict[str, Any]) -> None:
    x, time = asked(channels)
    out = fresh(raw, 0)(x, time, **told)
    assert out.shape == x.shape
    assert not out.any()


@each
def test_every_block_is_the_identity(raw: dict[str, Any], channels: int, told: dict[str, Any]) -> None:
    network, met = fresh(raw, 0), []

    def look(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        came = given[0]
        if isinstance(module, Block):
            came, out = (ops.residual(x, update) for x, update in (given[:2], out))
        if getattr(module, "resized", False):
            came = module.conv_shortcut(came)
        met.append(module)
        assert torch.equal(out, came)

    wanted = [module for module in network.modules() if isinstance(module, BRANCHES)]
    for module in wanted:
        module.register_forward_hook(look)
    network(*asked(channels), **told)
    assert set(met) == set(wanted)
    assert wanted


@each
def test_nothing_is_dead(raw: dict[str, Any], channels: int, told: dict[str, Any]) -> None:
    """After a few steps every weight has moved: no two factors of one product both start at zero."""
    network = fresh(raw, 0)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    sgd = torch.optim.SGD(network.parameters(), lr=0.5)
    for step in range(5):
        x, time = asked(channels, step)
        sgd.zero_grad()
        (network(x, time, **told) - x.roll(1, -1)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        sgd.step()
    still = {name for name, p in network.named_parameters() if torch.equal(p, before[name])}
    # the bias of a key moves all logits of a query alike, which softmax does not see
    assert {name for name in still if not name.endswith("to_k.bias")} == set()


@each
def test_a_seed_decides(raw: dict[str, Any], channels: int, told: dict[str, Any]) -> None:
    """And what others draw before or after it does not."""
    torch.manual_seed(5)
    first = fresh(raw, 3).state_dict()
    drawn = torch.rand(4)
    again, other = fresh(raw, 3).state_dict(), fresh(raw, 4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4), drawn)
