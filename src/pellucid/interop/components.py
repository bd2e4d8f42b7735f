"""Components: the parts of a loaded model, and the classes of diffusers and transformers that we have networks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.core.schedule import Schedule
from pellucid.interop import weights
from pellucid.interop.tokenizer import Tokenizer
from pellucid.models import clip, config, dit, unet_config, vae
from pellucid.models.clip import CLIP, CLIPTextEncoder, CLIPVisionEncoder
from pellucid.models.clip_config import CLIPConfig, CLIPTextConfig, CLIPVisionConfig
from pellucid.models.controlnet import ControlNet
from pellucid.models.dit import DiT, PixArt
from pellucid.models.tiny_vae import TinyAutoencoder, TinyVAEConfig
from pellucid.models.unet import UNet
from pellucid.models.vae import AutoencoderKL, VAEConfig

INDEX = "model_index.json"
TEXT_PARTS = ("text_encoder", "text_encoder_2")
TOKENIZER_PARTS = ("tokenizer", "tokenizer_2")
NETWORK_PARTS = ("unet", "transformer")


Network = UNet | DiT | PixArt  # what denoises


@dataclass
class Components:
    """A model in parts. `notes` says in words what its files contradict and what was left out."""

    name: str
    pipeline_class: str
    network: Network
    vae: AutoencoderKL | TinyAutoencoder | None
    text_encoders: tuple[CLIPTextEncoder, ...]
    tokenizers: tuple[Tokenizer, ...]
    image_encoder: CLIPVisionEncoder | None
    controlnets: tuple[ControlNet, ...]
    scheduler: dict[str, Any]
    schedule: Schedule
    target: str
    labels: dict[int, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadOptions:
    """How a model is to be read; None leaves each to the files."""

    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    variant: str | None = None
    target: str | None = None
    tokenizer: Path | None = None


@dataclass(frozen=True)
class Kind:
    """How a class of diffusers or transformers is read: its config, its network, and the names of its weights."""

    read: Callable[[Mapping[str, Any]], Any]
    build: Callable[[Any], nn.Module]
    rename: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict


def clip_text(raw: Mapping[str, Any]) -> CLIPTextConfig:
    return config.read(CLIPTextConfig, raw)


def clip_vision(raw: Mapping[str, Any]) -> CLIPVisionConfig:
    return config.read(CLIPVisionConfig, raw)


KINDS: dict[str, Kind] = {
    "UNet2DConditionModel": Kind(unet_config.read, UNet),
    "UNet2DModel": Kind(unet_config.read, UNet, vae.modern_names),
    "ControlNetModel": Kind(unet_config.read, ControlNet),
    **{name: Kind(dit.read, dit.build) for name in (*dit.CLASSES, "Transformer2DModel")},
    "AutoencoderKL": Kind(lambda raw: config.read(VAEConfig, raw), AutoencoderKL, vae.modern_names),
    "AutoencoderTiny": Kind(lambda raw: config.read(TinyVAEConfig, raw), TinyAutoencoder),
    "CLIPTextModel": Kind(clip_text, CLIPTextEncoder, clip.modern_names),
    "CLIPTextModelWithProjection": Kind(clip_text, CLIPTextEncoder, clip.modern_names),
    "CLIPVisionModel": Kind(clip_vision, CLIPVisionEncoder, clip.modern_names),
    "CLIPVisionModelWithProjection": Kind(clip_vision, CLIPVisionEncoder, clip.modern_names),
    "CLIPModel": Kind(lambda raw: config.read(CLIPConfig, raw), CLIP, clip.modern_names),
}


def read_config(kind: str, raw: Mapping[str, Any], name: str) -> Any:
    """The config of a class of diffusers or transformers, checked, from what its file holds."""
    if kind not in KINDS:
        raise PellucidError(rule(f"class of {name}", "one that Pellucid has", kind, nearest(kind, KINDS)), "class")
    owner = {"architectures": [kind]} if kind.startswith("CLIP") else {"_class_name": kind}
    return KINDS[kind].read({**raw, **owner})


def build(
    kind: str,
    settings: Any,
    tensors: Mapping[str, Tensor],
    *,
    name: str,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """The network of a class of diffusers or transformers, from its config and its weights."""
    known = KINDS[kind]
    network = weights.load(lambda: known.build(settings), known.rename(tensors), name=name, dtype=dtype, device=device)
    if isinstance(network, DiT):
        network.share_embedders()
    return network


def class_of(network: nn.Module) -> str:
    """The class of diffusers or transformers that a network is."""
    if isinstance(network, UNet | ControlNet):
        return network.config.class_name
    if isinstance(network, CLIPTextEncoder):
        return "CLIPTextModel" if network.text_projection is None else "CLIPTextModelWithProjection"
    if isinstance(network, CLIPVisionEncoder):
        return "CLIPVisionModel" if network.visual_projection is None else "CLIPVisionModelWithProjection"
    names: dict[type[nn.Module], str] = {
        DiT: "DiTTransformer2DModel",
        PixArt: "PixArtTransformer2DModel",
        AutoencoderKL: "AutoencoderKL",
        TinyAutoencoder: "AutoencoderTiny",
    }
    if type(network) not in names:
        raise PellucidError(rule("network", "one of Pellucid's own", type(network).__name__), "class")
    return names[type(network)]


def first_text(components: Components) -> int:
    """Where a model's text encoders begin among the parts: SDXL's refiner has the second and not the first."""
    return 1 if "XL" in components.pipeline_class and len(components.text_encoders) == 1 else 0


def text_parts(components: Components) -> tuple[str, ...]:
    """The part that each text encoder is."""
    return TEXT_PARTS[first_text(components) :][: len(components.text_encoders)]


def named_classes(index: Mapping[str, Any]) -> dict[str, str]:
    """The parts that a model_index.json lists, with their classes; those set to null are left out."""
    pairs = {part: value for part, value in index.items() if isinstance(value, list) and len(value) == 2}
    return {part: str(kind) for part, (_, kind) in pairs.items() if kind is not None and not part.startswith("_")}
