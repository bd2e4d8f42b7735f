"""Runs that take a second: images of one colour a class, a UNet of a few thousand weights, one CPU thread."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pellucid.train.cifar10 import CIFAR10, CIFAR10Source
from pellucid.train.config import TrainConfig, read
from pellucid.train.ranks import Ranks
from pellucid.train.trainer import Trainer

SIDE = 8
NETWORK: dict[str, Any] = {
    "_class_name": "UNet2DModel",
    "sample_size": SIDE,
    "block_out_channels": [8],
    "layers_per_block": 1,
    "down_block_types": ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"],
    "norm_num_groups": 4,
    "attention_head_dim": 8,
}
RUN: dict[str, Any] = {
    "task": {
        "kind": "denoiser",
        "network": NETWORK,
        "objective": {"schedule": {"name": "linear", "num_train": 100}},
        "sampling": {"steps": 2},
    },
    "data": {"kind": "cifar10", "folder": "not read"},
    "steps": 12,
    "batch": 8,
    "ema": [40.0, 200.0],
    "optimizer": {"rate": 2e-3, "warmup": 4},
    "log": {"every": 2, "checkpoint_every": 4, "tensorboard": False},
}
CONDITIONAL: dict[str, Any] = {"task": {"network": {"num_class_embeds": 5}, "condition": "labels"}}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A table with some of its values changed, at any depth; {} empties a table."""
    made = copy.deepcopy(base)
    for key, value in changes.items():
        made[key] = merged(made[key], value) if isinstance(value, dict) and value and made.get(key) else value
    return made


def config(*changes: dict[str, Any]) -> TrainConfig:
    raw = RUN
    for change in changes:
        raw = merged(raw, change)
    return read(TrainConfig, raw, "config")


def images(count: int = 40, classes: int = 4) -> CIFAR10:
    """CIFAR-10 in memory: a colour a class, with a little noise, so that there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % classes
    colours = torch.randint(30, 226, (classes, 3, 1, 1), generator=generator)
    noise = torch.randint(-20, 21, (count, 3, SIDE, SIDE), generator=generator)
    return CIFAR10((colours[labels] + noise).to(torch.uint8), labels)


def trainer(folder: Path, *changes: dict[str, Any], source: Any = None, task: Any = None) -> Trainer:
    data = CIFAR10Source(images()) if source is None else source
    return Trainer(config(*changes), folder, Ranks(), source=data, task=task, quiet=True)


def log_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a log, without what only time decides."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]
    for line in lines:
        assert line.pop("images_per_s") > 0
    return lines


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors")


def model(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the model that came out."""
    return load_file(folder / "model" / "unet" / "diffusion_pytorch_model.safetensors")


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """To the bit."""
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)
