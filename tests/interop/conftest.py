"""A tiny random Stable Diffusion, made of diffusers' and transformers' own classes. Nothing is downloaded."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer


def tokenizer(folder: Path) -> CLIPTokenizer:
    """CLIP's tokenizer with letters for a vocabulary."""
    letters = string.ascii_lowercase
    words = ["<|startoftext|>", "<unk>", "<|endoftext|>", *letters, *(f"{c}</w>" for c in letters)]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)


@pytest.fixture(scope="session")
def components(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All parts of a StableDiffusionPipeline but the scheduler: 16×16 pixels, 8×8 latents."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(4, 8),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=2,
        norm_num_groups=2,
    )
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        sample_size=16,
        block_out_channels=[4, 8],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        norm_num_groups=2,
    )
    text = CLIPTextConfig(
        vocab_size=64,
        hidden_size=8,
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=2,
    )
    return {
        "unet": unet.eval(),
        "vae": vae.eval(),
        "text_encoder": CLIPTextModel(text).eval(),
        "tokenizer": tokenizer(tmp_path_factory.mktemp("tokenizer")),
        "safety_checker": None,
        "feature_extractor": None,
    }
