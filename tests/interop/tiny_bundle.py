"""A bundle like scenes-128 of tiny random networks, made by the code that makes the real one: runs, then `assemble`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import tiny_models as tiny
import tiny_networks
import torch

from pellucid.interop.save import save_component
from pellucid.train.bundle import BundleRuns, assemble
from pellucid.train.config import read
from pellucid.train.controlnet import ControlNetConfig
from pellucid.train.image_text import ImageTextConfig
from pellucid.train.initial import fresh
from pellucid.train.ip_adapter import IPAdapterConfig
from pellucid.train.lora import LoraConfig
from pellucid.train.scenes_source import scenes_tokenizer
from pellucid.train.text_denoiser import TextDenoiserConfig

NAME = "scenes-128"
CPU = torch.device("cpu")
STEPS, BATCH, SPEED = 40, 8, 16.0  # of every run's log: 40 · 8 / 16 = 20 seconds
VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKL",
    "sample_size": 128,
    "block_out_channels": [8, 8, 8, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "norm_num_groups": 4,
    "force_upcast": False,
}
UNET, PIXART = ({**network, "sample_size": 16} for network in (tiny_networks.UNET, tiny_networks.PIXART))
ENCODER = {key: value for key, value in tiny_networks.ENCODER.items() if key != "projection_dim"}
SEEING = {**ENCODER, "image_size": 32, "patch_size": 8}
SAMPLING = {"sampler": "dpmpp_2m", "grid": "trailing", "steps": 20, "guidance": 4.0}


def write_run(task: Any, folder: Path) -> Path:
    """The folder of a finished run: its model, its config and its log."""
    tiny.randomised(task.network)
    task.save(task.network, folder / "model")
    return write_log(folder)


def write_log(folder: Path) -> Path:
    config = {"steps": STEPS, "batch": BATCH, "task": {"kind": folder.name, "vae": "runs/scenes_vae/model"}}
    (folder / "config.json").write_text(json.dumps({"fingerprint": "0", "config": config}), encoding="utf-8")
    lines = [
        {"step": step, "images": step * BATCH, "loss": 1.0 / step, "images_per_s": SPEED}
        for step in (STEPS // 2, STEPS)
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def text_task(network: dict[str, Any], vae: Path, text: dict[str, Any], target: str, schedule: str) -> Any:
    table = {
        "network": network,
        "objective": {"schedule": {"name": schedule}, "target": target, "dropout": 0.1},
        "vae": str(vae / "model"),
        "text": text,
        "sampling": SAMPLING,
    }
    return read(TextDenoiserConfig, table, "task").build(3, CPU)


def write_runs(folder: Path) -> dict[str, Path]:
    """The runs of recipes/scenes_128.sh under their names, by the part of the bundle that they become."""
    scenes_tokenizer(48).save(folder / "tokenizer")
    words = {"tokenizer": str(folder / "tokenizer")}
    runs = {
        part: folder / f"scenes_{name}"
        for part, name in (
            ("vae", "vae"), ("base", "text_unet_layout"), ("dit", "text_dit_longer"), ("image_text", "image_text"),
            ("lora", "lora"), ("controlnet", "controlnet"), ("ip_adapter", "ip_adapter"),
        )
    }  # fmt: skip
    save_component(tiny.randomised(fresh(VAE, seed=3)), runs["vae"] / "model")
    write_log(runs["vae"])
    own_text = {"encoder": {**ENCODER, "projection_dim": 32}, "train": True, **words}
    write_run(text_task(UNET, runs["vae"], own_text, "v", "cosine"), runs["base"])
    base = str(runs["base"] / "model")
    write_run(text_task(PIXART, runs["vae"], {"folder": base}, "eps", "linear"), runs["dit"])
    judge = {**words, "text": ENCODER, "vision": SEEING, "width": 24}
    write_run(read(ImageTextConfig, judge, "task").build(4, CPU), runs["image_text"])
    for part, config in (
        ("lora", LoraConfig(base=base, rank=2)),
        ("controlnet", ControlNetConfig(base=base, hint_widths=(4, 8, 8, 8))),
        ("ip_adapter", IPAdapterConfig(base=base, image_encoder=str(runs["image_text"] / "model"))),
    ):
        write_run(config.build(5, CPU), runs[part])
    return runs


@cache
def runs() -> dict[str, Path]:
    """Made once; not to be changed."""
    return write_runs(tiny.root() / "bundle-runs")


@cache
def bundles() -> Path:
    """A folder with the bundle `scenes-128` in it, made once; not to be changed."""
    folder = tiny.root() / "bundles"
    assemble(BundleRuns(**runs()), folder / NAME)
    return folder
