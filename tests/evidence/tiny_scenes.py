"""A tiny untrained model of scenes with all its parts, as training writes them; and makers that draw the truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from tiny_networks import ENCODER, PIXART, UNET, VAE

from pellucid import scenes
from pellucid.interop.save import save_component
from pellucid.pipeline.images import to_images
from pellucid.scenes.scene import Scenes
from pellucid.train.config import read
from pellucid.train.controlnet import ControlNetConfig
from pellucid.train.image_text import ImageTextConfig
from pellucid.train.initial import fresh
from pellucid.train.ip_adapter import IPAdapterConfig
from pellucid.train.lora import LoraConfig
from pellucid.train.scenes_source import scenes_tokenizer
from pellucid.train.text_denoiser import TextDenoiserConfig

CPU = torch.device("cpu")
VISION: dict[str, Any] = {**ENCODER, "image_size": 32, "patch_size": 8}


def write_model(folder: Path) -> Path:
    """The base, its transformer in dit/, and controlnet/, ip_adapter/, lora/, image_text/, all untrained."""
    parts = folder.parent / f"{folder.name}-parts"
    scenes_tokenizer(64).save(parts / "tokenizer")
    save_component(fresh(VAE, seed=3), parts / "vae")
    text = {"encoder": ENCODER, "tokenizer": str(parts / "tokenizer"), "train": True}
    save(TextDenoiserConfig, denoiser(UNET, "v", parts, text), folder)
    save(TextDenoiserConfig, denoiser(PIXART, "eps", parts, {"folder": str(folder)}), folder / "dit")
    halves = {"text": {**ENCODER}, "vision": {**VISION}, "width": 16}
    save(ImageTextConfig, {"tokenizer": str(parts / "tokenizer"), **halves}, folder / "image_text")
    save(ControlNetConfig, {"base": str(folder)}, folder / "controlnet")
    save(LoraConfig, {"base": str(folder), "rank": 2}, folder / "lora")
    eyes = {"base": str(folder), "image_encoder": str(folder / "image_text")}
    save(IPAdapterConfig, eyes, folder / "ip_adapter")
    return folder


def denoiser(network: dict[str, Any], target: str, parts: Path, text: dict[str, Any]) -> dict[str, Any]:
    objective = {"schedule": {"name": "cosine" if target == "v" else "linear"}, "target": target}
    return {"network": network, "objective": objective, "vae": str(parts / "vae"), "text": text}


def save(kind: type[Any], table: dict[str, Any], folder: Path) -> None:
    """Training begins denoisers and LoRAs as nothing; they are moved from there, so that their inputs matter."""
    task = read(kind, table, "task").build(7, CPU)
    if kind in (TextDenoiserConfig, LoraConfig):
        generator = torch.Generator().manual_seed(1)
        for parameter in task.network.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    task.save(task.network, folder)


class Truth:
    """A maker that draws image n by a rule: the scene that it was asked for, or another."""

    def __init__(self, drawn: Scenes, rule: Callable[[int, dict[str, Any]], int] = lambda n, _: n) -> None:
        self.drawn, self.rule, self.calls = drawn, rule, 0

    def __call__(self, prompt: Sequence[str], /, *, seed: Sequence[int], **options: Any) -> SimpleNamespace:
        self.calls += 1
        rows = [self.rule(n, options) % len(self.drawn) for n in seed]
        return SimpleNamespace(images=draw(self.drawn[rows]))


def draw(drawn: Scenes) -> list[Image.Image]:
    return to_images(scenes.render(drawn))
