"""What a task must offer, and the kinds of tasks and data that a config can name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from pellucid.train.autoencoder import AutoencoderConfig
from pellucid.train.cifar10 import CIFAR10, CIFAR10Source
from pellucid.train.controlnet import ControlNetConfig
from pellucid.train.denoiser import DenoiserConfig
from pellucid.train.draws import Draws
from pellucid.train.image_folder import ImageFolderConfig
from pellucid.train.image_text import ImageTextConfig
from pellucid.train.ip_adapter import IPAdapterConfig
from pellucid.train.latent_source import LatentsConfig
from pellucid.train.lora import LoraConfig
from pellucid.train.objective import BatchLoss
from pellucid.train.scenes_source import ScenesConfig
from pellucid.train.source import Batch, Source
from pellucid.train.text_denoiser import TextDenoiserConfig
from pellucid.train.web_shards import WebShardsConfig

# --- The contract of a task -----------------------------------------------------------------------------------------


class Task(Protocol):
    """`network` is what is trained: its parameters with requires_grad. All chance is in `prepare`, so that `loss` is a
    function of tensors alone, which can be compiled and captured; the network given to it may be wrapped (DDP,
    compiled), or hold running means.

    A task may have `frozen`, the networks that it holds beside the trained one, and `gathered`, the widths of
    the float32 embeddings that its loss gathers from all ranks, by name: `--explain` counts them."""

    network: nn.Module

    def prepare(self, batch: Batch, draws: Draws) -> dict[str, Tensor]: ...

    def loss(self, network: nn.Module, asked: Mapping[str, Tensor]) -> BatchLoss: ...

    def images(self, network: nn.Module, count: int, seed: int) -> Tensor | None:
        """(N, 3, H, W) in [0, 1]: sample images of the current network."""
        ...

    def save(self, network: nn.Module, folder: Path) -> None:
        """In the form that `pellucid.load` reads, or `load_component` for a single component."""
        ...


# --- Kinds by name --------------------------------------------------------------------------------------------------


class _TaskConfig(Protocol):
    def build(self, seed: int, device: torch.device) -> Task: ...


class _DataConfig(Protocol):
    def open(self) -> Source: ...


@dataclass(frozen=True)
class _CIFAR10Config:
    folder: str
    split: Literal["train", "test"] = "train"
    flip: bool = True

    def open(self) -> Source:
        return CIFAR10Source(CIFAR10.read(self.folder, self.split), self.flip)


TASKS: dict[str, type[_TaskConfig]] = {
    "denoiser": DenoiserConfig,
    "text_denoiser": TextDenoiserConfig,
    "autoencoder": AutoencoderConfig,
    "image_text": ImageTextConfig,
    "lora": LoraConfig,
    "controlnet": ControlNetConfig,
    "ip_adapter": IPAdapterConfig,
}
DATA: dict[str, type[_DataConfig]] = {
    "cifar10": _CIFAR10Config,
    "image_folder": ImageFolderConfig,
    "web_shards": WebShardsConfig,
    "scenes": ScenesConfig,
    "latents": LatentsConfig,
}
