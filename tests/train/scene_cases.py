"""What the tests of the text, VAE and image-text tasks share: tiny parts over small scenes, and runs of seconds."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tiny_networks import ENCODER, UNET, VAE

from pellucid.interop.save import save_component
from pellucid.interop.tokenizer import Tokenizer
from pellucid.train.config import OptimizerConfig, TrainConfig, read
from pellucid.train.draws import Draws
from pellucid.train.initial import fresh
from pellucid.train.kinds import Task
from pellucid.train.ranks import Ranks
from pellucid.train.scenes_source import ScenesConfig, scenes_tokenizer
from pellucid.train.source import Batch
from pellucid.train.trainer import Trainer

CPU = torch.device("cpu")
WINDOW = 40
SCENES = ScenesConfig(size=16, seed=5, objects=(1,))


@cache
def tokenizer() -> Tokenizer:
    return scenes_tokenizer(WINDOW)


def write_parts(folder: Path) -> Path:
    """A tokenizer and a VAE of random weights, as folders."""
    tokenizer().save(folder / "tokenizer")
    vae = fresh(VAE, seed=3)
    with torch.no_grad():  # residual branches that do something
        for parameter in vae.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    save_component(vae, folder / "vae")
    return folder


def batch(count: int = 8, first: int = 0, config: ScenesConfig = SCENES) -> Batch:
    return config.open().batch(torch.arange(first, first + count), Draws(0, 0, count), CPU)


def text_table(parts: Path, **changes: Any) -> dict[str, Any]:
    """A TextDenoiserConfig as a TOML file would say it."""
    return {
        "network": UNET,
        "objective": {"schedule": {"name": "cosine"}, "target": "v", "dropout": 0.25},
        "vae": str(parts / "vae"),
        "text": {"encoder": ENCODER, "tokenizer": str(parts / "tokenizer"), "train": True},
        "sampling": {"sampler": "dpmpp_2m", "grid": "trailing", "steps": 4, "guidance": 3.0},
        "prompts": ["a red star", "a large blue circle"],
        **changes,
    }


def built(kind: type[Any], table: dict[str, Any], seed: int = 7) -> Any:
    return read(kind, table, "task").build(seed, CPU)


def train(task: Task, folder: Path, *, steps: int, rate: float = 2e-3, count: int = 8, **changes: Any) -> Trainer:
    """A finished run over the small scenes; its model lies in folder/model."""
    raw: dict[str, Any] = {
        "task": {},
        "data": {},
        "steps": steps,
        "batch": count,
        "seed": 11,
        "log": {"every": 5, "checkpoint_every": 0, "tensorboard": False},
        **changes,
    }
    config = read(TrainConfig, raw, "config")
    object.__setattr__(config, "optimizer", OptimizerConfig(rate=rate, warmup=5))
    trainer = Trainer(config, folder, Ranks(), task=task, source=SCENES.open(), quiet=True)
    trainer.run()
    return trainer


def asked(task: Task, count: int = 32) -> dict[str, torch.Tensor]:
    """One fixed question, to compare before and after."""
    return task.prepare(batch(count, first=10_000), Draws(99, 0, count))


@torch.no_grad()
def loss(task: Task, count: int = 32) -> float:
    task.network.eval()
    return float(task.loss(task.network, asked(task, count)).loss)
