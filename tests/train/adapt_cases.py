"""What the tests of the adapters share: a tiny base, tiny data, one task of each kind, and the shortest of loops."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError
from pellucid.interop import source
from pellucid.interop.components import KINDS as KINDS_OF_NETWORK
from pellucid.interop.save import save_components
from pellucid.models import dit
from pellucid.train.adapters import AdapterTask
from pellucid.train.controlnet import ControlNetConfig
from pellucid.train.draws import Draws
from pellucid.train.ip_adapter import IPAdapterConfig
from pellucid.train.lora import LoraConfig
from pellucid.train.objective import BatchLoss
from pellucid.train.source import Batch

CPU = torch.device("cpu")
COUNT = 4
WORDS = ("abc", "a b", "cab", "bad dab")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def examples() -> Batch:
    """Four images of 16 × 16 with captions, edges, and references of another size."""
    return Batch(
        drawn(COUNT, 3, 16, 16) * 2 - 1,
        captions=WORDS,
        hints={
            "edges": drawn(COUNT, 1, 16, 16, seed=1).round(),
            "reference": drawn(COUNT, 3, 40, 56, seed=2) * 2 - 1,
        },
    )


class Examples:
    """The four as a source."""

    endless = False

    def __len__(self) -> int:
        return COUNT

    def batch(self, indices: Tensor, draws: Draws, device: torch.device) -> Batch:
        return rows(examples(), indices)


def rows(batch: Batch, indices: Tensor) -> Batch:
    assert batch.captions is not None
    captions = tuple(batch.captions[i] for i in indices.tolist())
    return Batch(batch.images[indices], None, captions, {name: hint[indices] for name, hint in batch.hints.items()})


@cache
def base(name: str = "sd1") -> str:
    return str(tiny.saved(name)[1])


@cache
def eyes() -> str:
    """The folder of a tiny CLIP vision encoder."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, projection_dim=20, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=8,
    )  # fmt: skip
    folder = tiny.root() / "adapt-eyes"
    tiny.randomised(CLIPVisionModelWithProjection(config)).save_pretrained(folder)
    return str(folder)


@cache
def pixart() -> str:
    """The folder of a tiny PixArt that reads CLIP's text and the tiny model's latents."""
    parts = source.read_components(base())
    raw = {
        "_class_name": "PixArtTransformer2DModel", "sample_size": 8, "patch_size": 2, "in_channels": 4,
        "out_channels": 8, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8,
        "cross_attention_dim": 16, "caption_channels": 64, "use_additional_conditions": False,
    }  # fmt: skip
    network = tiny.randomised(KINDS_OF_NETWORK[raw["_class_name"]].build(dit.read(raw)))
    made = replace(parts, network=network, pipeline_class="PixArtAlphaPipeline")
    return str(save_components(made, tiny.root() / "adapt-pixart"))


KINDS: dict[str, Any] = {
    "lora": (LoraConfig, {"rank": 4}),
    "text_lora": (LoraConfig, {"rank": 4, "text_layers": ("*.q_proj", "*.fc1")}),
    "controlnet": (ControlNetConfig, {}),
    "ip_adapter": (IPAdapterConfig, {"image_encoder": eyes}),
}
NAMES = tuple(KINDS)


def config(kind: str, **changes: Any) -> Any:
    cls, given = KINDS[kind]
    made = {"base": base, **given, **changes}
    return cls(**{name: value() if callable(value) else value for name, value in made.items()})


def task(kind: str, seed: int = 0, **changes: Any) -> AdapterTask:
    return config(kind, **changes).build(seed, CPU)


def draws(step: int = 0, batch: int = COUNT, **part: int) -> Draws:
    return Draws(seed=5, step=step, batch=batch, **part)


def loss_of(one: AdapterTask, network: nn.Module | None = None, step: int = 0) -> BatchLoss:
    """The loss on the four examples with the chance of a step."""
    return one.loss(one.network if network is None else network, one.prepare(examples(), draws(step)))


def fit(one: AdapterTask, steps: int, rate: float = 3e-3) -> list[float]:
    """Trains on one question, over and over; the losses before each step and after the last."""
    asked = one.prepare(examples(), draws())
    optimizer = torch.optim.AdamW(one.network.parameters(), rate, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = one.loss(one.network, asked).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return [*losses, float(one.loss(one.network, asked).loss.detach())]


def randomised(network: nn.Module, scale: float = 1.0) -> nn.Module:
    """Every trained weight is drawn, so that nothing that starts at zero stays hidden."""
    tiny.randomised(network)
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(scale)
    return network


def saved(one: AdapterTask, folder: Path) -> Path:
    one.save(one.network, folder)
    return folder


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    """The code of the one line with which a call is refused."""
    with pytest.raises(PellucidError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    return error.value.code
