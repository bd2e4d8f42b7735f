"""The UNet against diffusers': the same names of weights, the same output, one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from oracles import randomise, relative

from pellucid import PellucidError
from pellucid.models.unet import UNet
from pellucid.models.unet_config import read

BASE: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 8,
    "block_out_channels": [16, 32],
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "cross_attention_dim": 24,
    "attention_head_dim": 4,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}
PIXEL: dict[str, Any] = {
    "_class_name": "UNet2DModel",
    "sample_size": 16,
    "block_out_channels": [16, 32],
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "sd1": {**BASE, "layers_per_block": 2},
    "sd2": {**BASE, "attention_head_dim": [2, 4], "use_linear_projection": True, "upcast_attention": True},
    "sdxl": {
        **BASE,
        "block_out_channels": [16, 32, 32],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "attention_head_dim": [2, 4, 8],
        "use_linear_projection": True,
        "transformer_layers_per_block": [1, 2, 3],
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 48 + 20,
    },
    "uneven": {
        **BASE,
        "layers_per_block": [1, 2],
        "cross_attention_dim": [24, 24],
        "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
        "transformer_layers_per_block": [[2], [1, 2]],
        "reverse_transformer_layers_per_block": [[1, 2, 1], [1, 2]],
        "mid_block_type": "UNetMidBlock2D",
    },
    "inpaint": {**BASE, "in_channels": 9},
    "scale_shift": {**BASE, "resnet_time_scale_shift": "scale_shift"},
    "labels": {**BASE, "num_class_embeds": 7},
    "label_times": {**BASE, "class_embed_type": "timestep"},
    "label_vectors": {**BASE, "class_embed_type": "projection", "projection_class_embeddings_input_dim": 12},
    "label_plain": {**BASE, "class_embed_type": "simple_projection", "projection_class_embeddings_input_dim": 12},
    "lcm": {**BASE, "time_cond_proj_dim": 10},
    "text_proj": {**BASE, "encoder_hid_dim": 20, "encoder_hid_dim_type": "text_proj"},
    "cross_only": {**BASE, "only_cross_attention": True},
    "no_middle": {**BASE, "mid_block_type": None},
    "centred": {**BASE, "center_input_sample": True, "conv_in_kernel": 5, "conv_out_kernel": 1, "freq_shift": 1},
    "ddpm": {**PIXEL, "downsample_padding": 0, "flip_sin_to_cos": False, "freq_shift": 1, "norm_eps": 1e-6},
    "ddpm_one_head": {**PIXEL, "attention_head_dim": None, "mid_block_scale_factor": 1.4},
    "ddpm_no_attention": {**PIXEL, "add_attention": False, "resnet_time_scale_shift": "scale_shift"},
    "ddpm_groups": {**PIXEL, "attn_norm_num_groups": 8},
    "ddpm_labels": {**PIXEL, "num_class_embeds": 5},
}


def pair(raw: dict[str, Any]) -> tuple[UNet, Any]:
    """Ours and diffusers' with the same weights."""
    theirs = {"UNet2DConditionModel": UNet2DConditionModel, "UNet2DModel": UNet2DModel}[raw["_class_name"]]
    peer = randomise(theirs.from_config({k: v for k, v in raw.items() if k != "_class_name"}))
    mine = UNet(read(raw)).eval()
    mine.load_state_dict(peer.state_dict())  # strict: the names and shapes are the same
    return mine, peer


def inputs_of(
    raw: dict[str, Any], batch: int = 2, seed: int = 0, size: tuple[int, int] | None = None
) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    height, width = size or (raw["sample_size"],) * 2
    channels = raw.get("in_channels", 4 if raw["_class_name"] == "UNet2DConditionModel" else 3)
    out: dict[str, Any] = {"x": torch.randn(batch, channels, height, width, generator=g)}
    out["time"] = torch.rand(batch, generator=g) * 999
    if raw["_class_name"] == "UNet2DConditionModel":
        out["context"] = torch.randn(batch, 7, raw.get("encoder_hid_dim", 24), generator=g)
    if raw.get("num_class_embeds"):
        out["labels"] = torch.arange(batch) % 5
    elif raw.get("class_embed_type") == "timestep":
        out["labels"] = torch.arange(batch) * 3.0
    elif raw.get("class_embed_type"):
        out["labels"] = torch.randn(batch, 12, generator=g)
    if raw.get("addition_embed_type"):
        out["pooled"] = torch.randn(batch, 20, generator=g)
        out["sizes"] = torch.randint(0, 1024, (batch, 6), generator=g).float()
    if raw.get("time_cond_proj_dim"):
        out["guidance_embedding"] = torch.randn(batch, 10, generator=g)
    return out


def theirs(peer: Any, given: dict[str, Any]) -> torch.Tensor:
    names = {"labels": "class_labels", "guidance_embedding": "timestep_cond", "context": "encoder_hidden_states"}
    rest = {names[k]: v for k, v in given.items() if k in names}
    if "pooled" in given:
        rest["added_cond_kwargs"] = {"text_embeds": given["pooled"], "time_ids": given["sizes"]}
    with torch.no_grad():
        return peer(given["x"], given["time"], **rest).sample


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_diffusers(name: str) -> None:
    mine, peer = pair(CONFIGS[name])
    given = inputs_of(CONFIGS[name])
    with torch.no_grad():
        assert relative(mine(**given), theirs(peer, given)) < 1e-5


@pytest.mark.parametrize("size", [(9, 11), (8, 6), (2, 2)])
@pytest.mark.parametrize("name", ["sd1", "sdxl"])
def test_odd_sizes_come_back_as_they_were(name: str, size: tuple[int, int]) -> None:
    mine, peer = pair(CONFIGS[name])
    given = inputs_of(CONFIGS[name], size=size)
    with torch.no_grad():
        assert relative(mine(**given), theirs(peer, given)) < 1e-5


def test_a_context_mask_hides_tokens() -> None:
    mine, peer = pair(CONFIGS["sd1"])
    given = inputs_of(CONFIGS["sd1"])
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]])
    with torch.no_grad():
        other = peer(given["x"], given["time"], given["context"], encoder_attention_mask=mask).sample
        assert relative(mine(**given, context_mask=mask), other) < 1e-5


def test_a_batch_equals_its_images_alone() -> None:
    mine, _ = pair(CONFIGS["sdxl"])
    given = inputs_of(CONFIGS["sdxl"], batch=3)
    with torch.no_grad():
        together = mine(**given)
        alone = torch.cat([mine(**{k: v[i : i + 1] for k, v in given.items()}) for i in range(3)])
    assert relative(together, alone) < 1e-5


@pytest.mark.parametrize("name", ["sd1", "sdxl", "ddpm", "labels", "lcm"])
def test_one_graph_whatever_the_time_and_the_prompt(name: str, count_graphs: Any) -> None:
    mine, _ = pair(CONFIGS[name])
    calls = []
    for seed in range(3):
        given = inputs_of(CONFIGS[name], seed=seed)
        calls.append(((given.pop("x"), given.pop("time")), given))
    assert count_graphs(mine, calls) == 1


def test_the_compiled_network_gives_the_same() -> None:
    mine, _ = pair(CONFIGS["sdxl"])
    given = inputs_of(CONFIGS["sdxl"])
    with torch.no_grad():
        compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
        assert relative(compiled(**given), mine(**given)) < 1e-5


def test_gradients_are_those_of_diffusers() -> None:
    mine, peer = pair(CONFIGS["sd1"])
    given = inputs_of(CONFIGS["sd1"])
    mine(**given).square().mean().backward()
    peer(given["x"], given["time"], given["context"]).sample.square().mean().backward()
    grads = {name: p.grad for name, p in peer.named_parameters()}
    for name, p in mine.named_parameters():
        assert relative(p.grad, grads[name]) < 1e-3, name  # sums of many terms in another order


def test_perturbed_attention_is_the_identity_where_named_and_nowhere_else() -> None:
    mine, _ = pair(CONFIGS["sd1"])
    given = inputs_of(CONFIGS["sd1"])
    with torch.no_grad():
        plain = mine(**given)
        middle = mine(**given, perturbed=("mid_block",))
        everywhere = mine(**given, perturbed=("down_blocks", "mid_block", "up_blocks"))
        for block, place, _ in mine.cross_attentions():  # by hand: queries and keys of zero see all alike …
            if place.startswith("mid_block"):
                attention = block.attn1
                attention.forward = lambda x, *_, a=attention, **__: a.to_out[0](a.to_v(x))  # … this sees itself
        by_hand = mine(**given)
    assert torch.equal(middle, by_hand)
    assert not torch.equal(plain, middle)
    assert not torch.equal(middle, everywhere)


def test_a_skipped_place_adds_nothing() -> None:
    mine, _ = pair(CONFIGS["sd1"])
    given = inputs_of(CONFIGS["sd1"])
    with torch.no_grad():
        skipped = mine(**given, skipped=("mid_block.attentions.0",))
        mine.mid_block.attentions[0].proj_out.weight.zero_()
        mine.mid_block.attentions[0].proj_out.bias.zero_()
        assert torch.equal(skipped, mine(**given))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"down_block_types": ["KDownBlock2D", "DownBlock2D"]}, "config-unsupported"),
        ({"time_embedding_type": "fourier"}, "config-unsupported"),
        ({"dual_cross_attention": True}, "config-unsupported"),
        ({"addition_embed_type": "image"}, "config-unsupported"),
        ({"class_embed_type": "mystery"}, "config-unsupported"),
        ({"block_out_channels": [16, 32, 64]}, "config-length"),
        ({"atention_head_dim": 8}, "config-key"),
        ({"addition_embed_type": "text_time"}, "config-missing"),
    ],
)
def test_what_it_cannot_be_is_refused_by_name(change: dict[str, Any], code: str) -> None:
    with pytest.raises(PellucidError) as error:
        UNet(read({**BASE, **change}))
    assert error.value.code == code
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["labels", "sdxl"])
def test_a_missing_condition_is_named(name: str) -> None:
    mine, _ = pair(CONFIGS[name])
    given = inputs_of(CONFIGS[name])
    with pytest.raises(PellucidError, match=r"labels|pooled"):
        mine(given["x"], given["time"], given["context"])


FULL: dict[str, dict[str, Any]] = {
    "sd15": {
        "_class_name": "UNet2DConditionModel",
        "sample_size": 64,
        "cross_attention_dim": 768,
        "attention_head_dim": 8,
    },
    "sdxl": {
        "_class_name": "UNet2DConditionModel",
        "sample_size": 128,
        "block_out_channels": [320, 640, 1280],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "attention_head_dim": [5, 10, 20],
        "transformer_layers_per_block": [1, 2, 10],
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_full_size_equals_diffusers(name: str) -> None:
    """One set of random weights shared by both networks: SDXL's are 10 GB."""
    raw = FULL[name]
    with torch.device("meta"):
        peer = UNet2DConditionModel.from_config({k: v for k, v in raw.items() if k != "_class_name"})
        mine = UNet(read(raw))
    peer.to_empty(device="cpu")
    randomise(peer)
    mine.load_state_dict(peer.state_dict(), assign=True)
    g = torch.Generator().manual_seed(0)
    given = {
        "x": torch.randn(1, 4, 16, 16, generator=g),
        "time": torch.tensor([421.0]),
        "context": torch.randn(1, 77, raw["cross_attention_dim"], generator=g),
    }
    if name == "sdxl":
        given["pooled"] = torch.randn(1, 1280, generator=g)
        given["sizes"] = torch.tensor([[1024.0, 1024.0, 0.0, 0.0, 1024.0, 1024.0]])
    with torch.no_grad():
        assert relative(mine.eval()(**given), theirs(peer, given)) < 1e-5
