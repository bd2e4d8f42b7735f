"""`pellucid models`: bundles, the hub's cache and what lies in folders, by their files; and names for the shell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_bundle
import torch
from safetensors.torch import save_file

from pellucid.cli import options
from pellucid.interop import local_models, source


@pytest.fixture(autouse=True)
def _bundle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source, "BUNDLES", tiny_bundle.bundles())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


def pipeline(place: Path, prediction: str = "epsilon") -> None:
    (place / "scheduler").mkdir(parents=True)
    (place / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    config = {"_class_name": "DDIMScheduler", "beta_schedule": "linear", "prediction_type": prediction}
    (place / "scheduler/scheduler_config.json").write_text(json.dumps(config))


def test_bundles_come_with_their_parts(tell):
    found, inner = tell("models", "--json").json
    assert (found["name"], found["where"], found["kind"]) == ("scenes-128", "bundle", "StableDiffusionPipeline")
    assert {"lora", "controlnet", "ip_adapter", "image_text"} == set(found["parts"])
    assert (found["target"], found["schedule"]) == ("v", "cosine")
    assert (inner["name"], inner["target"], inner["schedule"]) == ("scenes-128/dit", "eps", "linear")
    assert found["bytes"] > 0
    assert "scenes-128/lora" in tell("models").words


def test_what_lies_in_a_folder_and_in_the_cache(tell, tmp_path):
    pipeline(tmp_path / "mine/deep/one", "v_prediction")
    pipeline(tmp_path / "cache/models--owner--na--me/snapshots/abc")
    (tmp_path / "cache/models--owner--other/snapshots/abc").mkdir(parents=True)  # no pipeline
    names = {
        f"{prefix}weight": torch.zeros(1) for prefix in ("model.diffusion_model.", "cond_stage_model.transformer.")
    }
    save_file(names, tmp_path / "mine/whole.safetensors")
    save_file({"lora_unet_x.lora_up.weight": torch.zeros(1)}, tmp_path / "mine/style.safetensors")
    (tmp_path / "mine/broken.safetensors").write_bytes(b"no")
    found = {model["name"]: model for model in tell("models", "mine", "--json").json}
    assert set(found) == {"scenes-128", "scenes-128/dit", "owner/na--me", "mine/deep/one", "mine/whole.safetensors"}
    assert (found["mine/deep/one"]["target"], found["mine/deep/one"]["schedule"]) == ("v", "linear")
    assert found["owner/na--me"]["where"] == "hub cache"
    assert found["mine/whole.safetensors"]["kind"].startswith("Stable Diffusion 1")


def test_a_damaged_index_is_listed_and_stops_nothing(tell, tmp_path):
    pipeline(tmp_path / "one")
    (tmp_path / "one/model_index.json").write_text("{")
    assert {model["name"]: model["kind"] for model in tell("models", ".", "--json").json}["one"] == "unknown"


def test_bad_input(refuse, tmp_path, monkeypatch):
    assert refuse("models", "nowhere").startswith("error[not-found]: folder must be one that exists; got 'nowhere'.")
    monkeypatch.setattr(local_models, "MAX_SEEN", 2)
    for name in "abc":
        (tmp_path / name).mkdir()
    assert refuse("models", ".").startswith("error[too-many]: folder must be one with at most 2 files below it")


def test_names_for_the_shell():
    assert options.model_names("sc") == ["scenes-128", "scenes-128/dit"]
    assert {"dpmpp_2m", "dpmpp_3m"} <= set(options.sampler_names("dpmpp"))
    assert options.grid_names("karr") == ["karras"]
    assert not options.model_names("x") + options.sampler_names("qq") + options.grid_names("qq")


def test_the_shell_is_answered(monkeypatch, ask):
    monkeypatch.setenv("_PELLUCID_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "pellucid sample scenes-128 --grid kar")
    monkeypatch.setenv("COMP_CWORD", "4")
    assert ask().out.split() == ["karras"]
