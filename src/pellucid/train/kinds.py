"""The kinds of tasks and data that a config can name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from pellucid.train.adapt_control import ControlNetConfig
from pellucid.train.adapt_image import IPAdapterConfig
from pellucid.train.adapt_lora import LoraConfig
from pellucid.train.autoencode import AutoencoderConfig
from pellucid.train.cifar10 import CIFAR10, CIFAR10Source
from pellucid.train.denoise import DenoiserConfig
from pellucid.train.image_folder import ImageFolderConfig
from pellucid.train.image_text import ImageTextConfig
from pellucid.train.latents import LatentsConfig
from pellucid.train.scenes_source import ScenesConfig
from pellucid.train.source import Source
from pellucid.train.task import Task
from pellucid.train.text_denoise import TextDenoiserConfig
from pellucid.train.web_shards import WebShardsConfig


class TaskConfig(Protocol):
    def build(self, seed: int, device: torch.device) -> Task: ...


class DataConfig(Protocol):
    def open(self) -> Source: ...


@dataclass(frozen=True)
class CIFAR10Config:
    folder: str
    split: Literal["train", "test"] = "train"
    flip: bool = True

    def open(self) -> Source:
        return CIFAR10Source(CIFAR10.read(self.folder, self.split), self.flip)


TASKS: dict[str, type[TaskConfig]] = {
    "denoiser": DenoiserConfig,
    "text_denoiser": TextDenoiserConfig,
    "autoencoder": AutoencoderConfig,
    "image_text": ImageTextConfig,
    "lora": LoraConfig,
    "controlnet": ControlNetConfig,
    "ip_adapter": IPAdapterConfig,
}
DATA: dict[str, type[DataConfig]] = {
    "cifar10": CIFAR10Config,
    "image_folder": ImageFolderConfig,
    "web_shards": WebShardsConfig,
    "scenes": ScenesConfig,
    "latents": LatentsConfig,
}
