"""Tiny networks of the kinds that scenes-128 is made of, as diffusers' configs: 16 × 16 pixels, 8 × 8 latents."""

from __future__ import annotations

from typing import Any

VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKL",
    "sample_size": 16,
    "block_out_channels": [8, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "norm_num_groups": 4,
}
UNET: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 8,
    "block_out_channels": [16, 32],
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
    "layers_per_block": 1,
    "cross_attention_dim": 32,
    "attention_head_dim": 2,
    "norm_num_groups": 8,
}
PIXART: dict[str, Any] = {
    "_class_name": "PixArtTransformer2DModel",
    "sample_size": 8,
    "patch_size": 2,
    "out_channels": 4,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 32,
}
ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 32,
}
