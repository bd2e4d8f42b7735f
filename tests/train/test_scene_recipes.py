"""The committed recipes of scenes-128: each reads, the parts fit together, and their sizes keep to the budget."""

from __future__ import annotations

import json
import re
import runpy
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pellucid.interop.components import KINDS
from pellucid.interop.tokenizer import Tokenizer
from pellucid.models.clip import CLIPTextEncoder
from pellucid.pipeline.load import load
from pellucid.train.bundle import BundleRuns, ModelCard, assemble
from pellucid.train.config import TrainConfig, chosen, to_plain
from pellucid.train.initial import fresh
from pellucid.train.kinds import TASKS
from pellucid.train.scenes_source import ScenesConfig
from pellucid.train.text import fresh_encoder
from pellucid.train.text_denoiser import check_parts, scheduler_of

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
MOST_BASE, MOST = 14_000_000, 24_000_000  # bytes
SPARE = 100_000  # of MOST, for the figures on the card


def recipe(name: str) -> tuple[TrainConfig, Any]:
    config = TrainConfig.load(ROOT / "configs" / f"scenes_{name}.toml")
    assert chosen(config.data.get("of", config.data), {"scenes": ScenesConfig}, "data").size == 128
    return config, chosen(config.task, TASKS, "task")


def size(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.fixture(scope="module")
def networks() -> dict[str, nn.Module]:
    """All networks of the recipes, with random weights."""
    tokenizer = Tokenizer.load(ROOT / "configs" / "scenes_tokenizer")
    (_, vae), (_, unet), (_, dit) = (recipe(name) for name in ("vae", "text_unet", "text_dit"))
    return {
        "vae": fresh(vae.network, 0),
        "text": fresh_encoder(unet.text.encoder, tokenizer, 0),
        "unet": fresh(unet.network, 0),
        "dit": fresh(dit.network, 0),
    }


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """The bundle of the recipes and its sizes: every run as it is saved before its first step, then `assemble`."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("scenes")
    (folder / "configs").symlink_to(ROOT / "configs")
    order = re.search(r'^ALL="(.*)"$', (RECIPES / "scenes_128.sh").read_text("utf-8"), re.M)
    assert order is not None
    with chdir(folder):
        for name in order[1].split():
            config, chosen_task = recipe(name)
            task, run = chosen_task.build(config.seed, torch.device("cpu")), Path(f"runs/scenes_{name}")
            task.save(task.network, run / "model")
            (run / "config.json").write_text(json.dumps({"config": to_plain(config)}), "utf-8")
            (run / "log.jsonl").write_text('{"step": 1, "images": 1, "loss": 1.0, "images_per_s": 1.0}', "utf-8")
        runs = runpy.run_path(str(RECIPES / "make_bundle.py"))["RUNS"]
        parts = BundleRuns(**{part: Path("runs") / run for part, run in runs.items()})
        return folder / "scenes-128", assemble(parts, "scenes-128", ModelCard(RECIPES / "scenes_128_card.md"))


def test_the_sizes_keep_to_the_budget(bundle: tuple[Path, dict[str, int]], networks: dict[str, nn.Module]) -> None:
    """Bytes of all files, as they will be: what is trained changes the weights and not their number."""
    folder, sizes = bundle
    assert sum(sizes.values()) == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert set(sizes) == {"base", "dit", "controlnet", "ip_adapter", "lora", "image_text"}
    assert sizes["base"] <= MOST_BASE, sizes
    assert sum(sizes.values()) <= MOST - SPARE, sizes
    assert abs(size(networks["unet"]) / size(networks["dit"]) - 1) < 0.02  # they are compared at equal parameters


def test_the_ip_adapter_sees_with_the_image_text_encoder(bundle: tuple[Path, dict[str, int]]) -> None:
    """Its recipe trains on that one's vision half, so that a bundle needs it once."""
    assert recipe("ip_adapter")[1].image_encoder == "runs/scenes_image_text/model"
    assert {path.name for path in (bundle[0] / "ip_adapter").iterdir()} == {
        "ip_adapter.safetensors",
        "image_encoder.json",
    }


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


def test_the_base_makes_a_image(bundle: tuple[Path, dict[str, int]]) -> None:
    made = load(bundle[0], device="cpu", dtype="float32")("a red star", steps=1, guidance=1.0)
    assert made.images[0].size == (128, 128)
