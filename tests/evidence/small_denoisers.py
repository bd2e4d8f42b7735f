"""Small denoisers that were truly trained, each for its own target on its own schedule: seconds each, on images of
one object at 16 × 16, in pixels or in the latents of a small VAE."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pellucid
from pellucid import scenes
from pellucid.core.schedule import Target
from pellucid.evidence.doctor.subject import KnownImages, Subject, of_pipeline
from pellucid.train.autoencoder import AutoencoderConfig
from pellucid.train.cifar10 import CIFAR10
from pellucid.train.config import TrainConfig, read
from pellucid.train.denoiser import DenoiserConfig
from pellucid.train.draws import Draws
from pellucid.train.ranks import Ranks
from pellucid.train.source import Batch
from pellucid.train.text_denoiser import TextDenoiserConfig
from pellucid.train.trainer import Trainer

SIDE, COUNT, BATCH = 16, 2048, 16
STEPS, LATENT_STEPS, VAE_STEPS = 1200, 800, 600
PIXELS: dict[str, tuple[str, Target]] = {
    "eps-linear": ("linear", "eps"),
    "eps-scaled_linear": ("scaled_linear", "eps"),
    "eps-cosine": ("cosine", "eps"),
    "eps-sqrt_alpha_bar": ("sqrt_alpha_bar", "eps"),
    "eps-sqrt_beta": ("sqrt_beta", "eps"),
    "v-cosine": ("cosine", "v"),
    "x0-scaled_linear": ("scaled_linear", "x0"),
    "flow": ("flow", "flow"),
}
LATENTS: dict[str, tuple[str, Target]] = {
    "latent-eps": ("scaled_linear", "eps"),
    "latent-v": ("linear", "v"),
    "latent-flow": ("flow", "flow"),
}
UNET: dict[str, Any] = {
    "_class_name": "UNet2DModel",
    "sample_size": SIDE,
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
    "mid_block_type": None,
    "norm_num_groups": 4,
    "attention_head_dim": 8,
}
VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKL",
    "sample_size": SIDE,
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "norm_num_groups": 4,
}
TEXT_UNET: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": SIDE // 2,
    "block_out_channels": [16, 32],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 1,
    "cross_attention_dim": 16,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}
ENCODER: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "projection_dim": 16,
}  # fmt: skip


def drawn(count: int = COUNT, first: int = 0) -> tuple[Tensor, tuple[str, ...]]:
    """(N, 3, 16, 16) in [−1, 1] and their captions."""
    found = scenes.sample(torch.arange(first, first + count), 0, "any", ("flat",), (1,))
    return scenes.render(found, SIDE), tuple(scenes.captions(found, 0))


class Held:
    """Pictures in memory as a source."""

    endless = False

    def __init__(self, images: Tensor, captions: tuple[str, ...]) -> None:
        self.images, self.captions = images, captions

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: Tensor, draws: Draws, device: torch.device) -> Batch:
        return Batch(self.images[indices.cpu()], captions=tuple(self.captions[i] for i in indices.tolist()))


def sampling_of(schedule: str) -> dict[str, Any]:
    return {"sampler": "flow_euler", "grid": "linspace", "steps": 2} if schedule == "flow" else {"steps": 2}


class Small:
    """Trains what is asked for, once, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def source(self) -> Held:
        return Held(*drawn())

    @cached_property
    def data(self) -> KnownImages:
        """Pictures that no training saw."""
        images, captions = drawn(64, 10_000)
        return KnownImages(images / 2 + 0.5, captions)

    def subject(self, name: str) -> Subject:
        return of_pipeline(pellucid.load(self.model(name), device="cpu"), data=self.data)

    def model(self, name: str) -> Path:
        """The folder of a trained model."""
        goal = self.folder / name / "model"
        if not goal.is_dir():
            (self.latent if name in LATENTS else self.pixel)(name)
        return goal

    def pixel(self, name: str) -> None:
        schedule, target = PIXELS[name]
        table = {"network": UNET, "objective": objective(schedule, target), "sampling": sampling_of(schedule)}
        self.train(read(DenoiserConfig, table, "task").build(1, CPU), name, STEPS)

    def latent(self, name: str) -> None:
        schedule, target = LATENTS[name]
        parts = self.parts()
        table = {
            "network": TEXT_UNET,
            "objective": {**objective(schedule, target), "dropout": 0.1},
            "vae": str(parts / "vae" / "model"),
            "text": {"encoder": ENCODER, "tokenizer": str(parts / "tokenizer"), "train": True},
            "sampling": {"sampler": "dpmpp_2m", "grid": "trailing", "steps": 3, "guidance": 1.0},
        }
        self.train(read(TextDenoiserConfig, table, "task").build(1, CPU), name, LATENT_STEPS)

    def parts(self) -> Path:
        """A VAE that was trained, and a tokenizer."""
        from pellucid.train.scenes_source import scenes_tokenizer

        if not (self.folder / "tokenizer").is_dir():
            scenes_tokenizer(40).save(self.folder / "tokenizer")
            task = read(AutoencoderConfig, {"network": VAE}, "task").build(1, CPU)
            self.train(task, "vae", VAE_STEPS)
        return self.folder

    def train(self, task: Any, name: str, steps: int) -> None:
        raw = {
            "task": {}, "data": {}, "steps": steps, "batch": BATCH, "ema": [BATCH * 40.0],
            "optimizer": {"rate": 3e-3, "warmup": 20},
            "log": {"every": 100, "checkpoint_every": 0, "tensorboard": False},
        }  # fmt: skip
        config = read(TrainConfig, raw, "config")
        Trainer(config, self.folder / name, Ranks(), task=task, source=self.source, quiet=True).run()


CPU = torch.device("cpu")


def objective(schedule: str, target: str) -> dict[str, Any]:
    return {"schedule": {"name": schedule}, "target": target, "times": {"stratified": True}}


def cifar_subject(folder: Path, cifar: Path) -> Subject:
    """A CIFAR-10 run of the schedule study, with test images."""
    pixels = CIFAR10.read(cifar, "test").images[:64].float() / 255
    return of_pipeline(pellucid.load(folder / "model", device="cpu"), data=KnownImages(pixels))


def truth_of(folder: Path) -> tuple[str, str]:
    """The schedule and the target of a run of the study."""
    told = json.loads((folder / "config.json").read_text("utf-8"))["config"]["task"]["objective"]
    return told["schedule"]["name"], told["target"]
