"""Small networks that take what the large ones take."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from pellucid.evidence.metrics.inception import Inception
from pellucid.pipeline.encoders.image_inputs import DEVIATION, MEAN

PROMPTS = ["a cab", "bad face", "deaf", "a bee fed"]


class Small(Inception):
    """Takes what Inception takes and has eight features: colours of the corners, seen through random numbers."""

    def __init__(self, seed: int = 0) -> None:
        nn.Module.__init__(self)
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(12, 8, generator=generator), requires_grad=False)

    @property
    def device(self) -> torch.device:
        return self.table.device

    def laid_out(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        corners = nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)  # (N, 12)
        return corners @ self.table


def clip_model(base: Path) -> Path:
    """A tiny CLIPModel of transformers with its tokenizer and preprocessor beside the weights."""
    import tiny_models as tiny  # slow to import, and few tests need it
    import transformers

    text = tiny.text_config(projection_dim=20)
    text.max_position_embeddings = 16
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, projection_dim=20, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=8,
    )  # fmt: skip
    config = transformers.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=20)
    tiny.randomised(transformers.CLIPModel(config)).save_pretrained(base)
    tiny.tokenizer(base).save_pretrained(base)
    settings = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}, "resample": 3}
    settings |= {"image_mean": list(MEAN), "image_std": list(DEVIATION), "do_resize": True}
    (base / "preprocessor_config.json").write_text(json.dumps(settings))
    return base
