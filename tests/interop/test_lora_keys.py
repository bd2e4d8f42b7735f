"""Names of layers: every spelling finds its layer, and one that means two layers finds none."""

from __future__ import annotations

import pytest
import torch
from diffusers import UNet2DConditionModel
from lora_peers import ATTN, sd_networks, underscored

from pellucid.interop.lora_keys import Spellings, numbered, spellings, take_apart
from pellucid.models import lora


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


def test_a_component_that_is_not_there_leaves_its_keys_unused() -> None:
    names = Spellings({"text_encoder": sd_networks()["text_encoder"]})
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


def test_numbered_files_of_later_trainers_have_the_feed_forward_last() -> None:
    block = "down_blocks.0.attentions.0.transformer_blocks.0"
    layers = [f"{block}.attn1.to_q", f"{block}.attn2.to_q", f"{block}.ff.net.0.proj"]
    then, later = numbered(layers, ["Attention", "GEGLU"])
    assert then == [layers[0], layers[2], layers[1]]
    assert later == layers
