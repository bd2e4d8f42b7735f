"""The guidance study with real pipelines, and as a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_scenes import write_model
from typer.testing import CliRunner

from pellucid.evidence.adherence.samples import open_pipe
from pellucid.evidence.metrics.image_text import Judge
from pellucid.evidence.study.guidance import RULE_NAMES, GuidanceStudy, GuidanceStudyConfig, ModelTraits, guidance_of
from pellucid.evidence.study.guidance_report import results_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("guided") / "model")


def test_every_rule_acts_in_a_pipeline(model: Path) -> None:
    pipe = open_pipe(model, device="cpu")
    nature = ModelTraits.of(pipe)
    assert nature == ModelTraits(latent=True, flow=False)
    made = {}
    for name in RULE_NAMES:
        told = guidance_of(name, 9.0, nature).text()
        found = pipe(["a red star"], seed=[3], sampler="dpmpp_2m", steps=6, guidance=told, decode=False).latents
        assert torch.isfinite(found).all()
        made[name] = found
    for name in RULE_NAMES[1:]:
        assert not torch.allclose(made[name], made["plain"], atol=1e-4), name


def ask(*args: str) -> Any:
    from pellucid.cli import app

    result = CliRunner().invoke(app, ["study", "guidance", *args], prog_name="pellucid", env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_command_runs_and_goes_on(model: Path, tmp_path: Path) -> None:
    given = ["--model", str(model), "--prompts", "scenes:3", "--seeds", "2", "--steps", "2", "--scales", "1,3"]
    given += ["--rules", "plain,dynamic scale=2", "--out", str(tmp_path / "out"), "--device", "cpu"]
    first = ask(*given, "--json")
    held = json.loads(first.stdout)
    assert first.exit_code == 0
    assert [(one["rule"], one["guidance"]) for one in held["cells"]] == [
        ("plain", "1"), ("plain", "3"), ("dynamic scale=2", "1"), ("dynamic scale=2", "3 + mimic scale=2"),
    ]  # fmt: skip
    assert held["recommendation"] == "No scale is useful: no image under any guidance is all right."  # untrained
    before = (tmp_path / "out" / "records.jsonl").read_bytes()
    again = ask(*given)
    assert again.exit_code == 0
    assert "No scale is useful" in again.stdout
    assert "report.html" in again.stdout
    assert (tmp_path / "out" / "records.jsonl").read_bytes() == before


def test_a_bundle_s_own_encoder_scores_a_file(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("a photograph\n")
    given = ["--model", str(model), "--prompts", str(path), "--seeds", "2", "--steps", "2", "--scales", "1"]
    found = ask(*given, "--rules", "plain", "--out", str(tmp_path / "out"), "--device", "cpu", "--json")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["adherence"] == "image_text"


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["--scales", "1,x"], "--scales must be numbers with commas between them; got '1,x'"),
        (["--rules", "plain,,apg"], "rules must be of plain"),
        (["--rules", "aps"], "Nearest: apg"),
        (["--prompts", "nowhere.txt"], "prompts must be a text file that exists"),
        (["--tolerance", "3"], "tolerance must be above 0 and below 1"),
        (["--seeds", "0"], "--seeds"),
        (["--sampler", "bogus"], "sampler must be a known name"),
        (["--reference", "nowhere"], "images must be a folder"),
    ],
)
def test_bad_input_is_one_line(model: Path, tmp_path: Path, args: list[str], hint: str) -> None:
    found = ask("--model", str(model), "--out", str(tmp_path / "out"), "--device", "cpu", *args)
    assert found.exit_code == 2
    assert found.stdout == ""
    assert len(found.stderr.splitlines()) == 1
    assert hint in found.stderr


def test_no_encoder_for_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "p.txt").write_text("a photograph\n")
    found = ask("--model", str(tmp_path / "bare"), "--prompts", str(tmp_path / "p.txt"))
    assert found.exit_code == 2
    assert "--clip must be given" in found.stderr


@pytest.mark.slow
def test_a_wrapped_pipeline_is_studied(tmp_path: Path, clip_folder: Path) -> None:
    import tiny_models as tiny

    import pellucid

    (tmp_path / "parts").mkdir()
    pipe = pellucid.wrap(tiny.stable_diffusion(tmp_path / "parts", unet={**tiny.SD1_UNET, "sample_size": 8}))
    (tmp_path / "p.txt").write_text("a cab\nbad face\n")
    config = GuidanceStudyConfig(
        "wrapped", (1.0, 3.0), RULE_NAMES, str(tmp_path / "p.txt"), seeds=2, steps=3, clip=str(clip_folder)
    )
    study = GuidanceStudy(config, tmp_path / "out", pipe, Judge.load(clip_folder))
    assert study.nature.latent
    study.run()
    assert (
        len(results_of(study).cells) == len(study.guidances) == 2 + len(RULE_NAMES)
    )  # cfg_zero is no plain one at scale 1
