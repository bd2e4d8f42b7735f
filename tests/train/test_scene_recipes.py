"""The committed recipes of scenes-128: each reads, the parts fit together, and their sizes keep to the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pellucid.interop.components import KINDS, Components
from pellucid.interop.save import save_components
from pellucid.interop.tokenizer import Tokenizer
from pellucid.models.clip import CLIP, CLIPTextEncoder
from pellucid.pipeline.load import load
from pellucid.train.autoencode import AutoencoderConfig
from pellucid.train.config import TrainConfig, chosen
from pellucid.train.denoise import fresh
from pellucid.train.image_text import ImageTextConfig, clip_config
from pellucid.train.scenes_source import ScenesConfig
from pellucid.train.text import fresh_encoder
from pellucid.train.text_denoise import TextDenoiserConfig, check_parts, scheduler_of

ROOT = Path(__file__).parents[2]
TASKS: dict[str, type[Any]] = {
    "autoencoder": AutoencoderConfig,
    "text_denoiser": TextDenoiserConfig,
    "image_text": ImageTextConfig,
}
BASE, ALL = 7_000_000, 12_000_000  # parameters: 14 MB and 24 MB in float16
ADAPTERS = 2_000_000  # of ALL: ControlNet, IP-Adapter, LoRA


def recipe(name: str) -> tuple[TrainConfig, Any]:
    config = TrainConfig.load(ROOT / "configs" / f"scenes_{name}.toml")
    assert chosen(config.data, {"scenes": ScenesConfig}, "data").size == 128
    return config, chosen(config.task, TASKS, "task")


def size(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.fixture(scope="module")
def networks() -> dict[str, nn.Module]:
    """All networks of the recipes, with random weights."""
    tokenizer = Tokenizer.load(ROOT / "configs" / "scenes_tokenizer")
    (_, vae), (_, unet), (_, dit), (_, judge) = (recipe(n) for n in ("vae", "text_unet", "text_dit", "image_text"))
    return {
        "vae": fresh(vae.network, 0),
        "text": fresh_encoder(unet.text.encoder, tokenizer, 0),
        "unet": fresh(unet.network, 0),
        "dit": fresh(dit.network, 0),
        "judge": CLIP(clip_config(judge, tokenizer)),
    }


def test_the_sizes_keep_to_the_budget(networks: dict[str, nn.Module]) -> None:
    sizes = {name: size(network) for name, network in networks.items()}
    assert sizes["unet"] + sizes["vae"] + sizes["text"] <= BASE, sizes
    assert sum(sizes.values()) + ADAPTERS <= ALL, sizes
    assert abs(sizes["unet"] / sizes["dit"] - 1) < 0.02, sizes  # they are compared at equal parameters


def test_the_parts_fit_together(networks: dict[str, Any]) -> None:
    for name in ("unet", "dit"):
        check_parts(networks[name], networks["vae"], networks["text"])
        assert networks[name].config.sample_size * networks["vae"].config.factor == 128
    assert networks["vae"].config.factor == 8
    assert networks["vae"].config.latent_channels == 4
    assert KINDS["CLIPTextModel"].read({}).__class__ is type(networks["text"].config)
    assert isinstance(networks["text"], CLIPTextEncoder)


def test_one_denoiser_predicts_v_and_one_eps_and_both_export() -> None:
    targets = []
    for name in ("text_unet", "text_dit"):
        _, task = recipe(name)
        objective = task.objective.build()
        targets.append(objective.target)
        assert scheduler_of(objective, task.sampling)["_class_name"] == "DPMSolverMultistepScheduler"
        assert (task.sampling.steps, task.sampling.guidance) == (20, 4.0)
        assert objective.dropout > 0
    assert targets == ["v", "eps"]


def test_the_base_in_float16_is_at_most_14_mb(networks: dict[str, Any], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    _, unet = recipe("text_unet")
    objective = unet.objective.build()
    parts = Components(
        name="scenes-128",
        pipeline_class="StableDiffusionPipeline",
        network=networks["unet"],
        vae=networks["vae"],
        text_encoders=(networks["text"],),
        tokenizers=(Tokenizer.load(ROOT / "configs" / "scenes_tokenizer"),),
        image_encoder=None,
        controlnets=(),
        scheduler=scheduler_of(objective, unet.sampling),
        schedule=objective.schedule,
        target=objective.target,
    )
    folder = save_components(parts, tmp_path / "scenes-128", dtype=torch.float16)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 14_000_000
    made = load(folder, device="cpu", dtype="float32")("a red star", steps=1, guidance=1.0)
    assert made.images[0].size == (128, 128)
