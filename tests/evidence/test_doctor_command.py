"""`pellucid doctor`: what it prints, what it ends with, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
from published import SD15, SDXL
from sabotages_folder import edit, linked
from typer.testing import CliRunner

from pellucid.cli import app


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: str) -> Any:
        result = CliRunner().invoke(app, ["doctor", *args], prog_name="pellucid")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    def write(base: dict[str, Any], **changes: Any) -> str:
        (tmp_path / "scheduler_config.json").write_text(json.dumps({**base, **changes}), encoding="utf-8")
        return "scheduler_config.json"

    return write


def test_a_healthy_config_ends_with_0(ask: Callable[..., Any], config: Callable[..., str]) -> None:
    for args in (("--config", config(SD15)), (config(SD15),)):
        answer = ask(*args)
        assert (answer.exit_code, answer.stderr) == (0, "")
        assert "no fault found; NOT checked: target, schedule; 2 notes" in answer.stdout
        assert "\x1b" not in answer.stdout  # colours are for terminals


def test_a_finding_ends_with_1_and_says_evidence_cause_and_fix(
    ask: Callable[..., Any], config: Callable[..., str]
) -> None:
    answer = ask("--config", config(SDXL, rescale_betas_zero_snr=True, timestep_spacing="trailing"))
    assert (answer.exit_code, answer.stderr) == (1, "")
    first, *rest = answer.stdout.splitlines()
    assert first.startswith("error[eps-zero-snr] ")
    words = [line.split(maxsplit=1) for line in rest[:3]]
    assert [name for name, _ in words] == ["evidence", "cause", "fix"]
    assert words[2][1].startswith('"prediction_type": "v_prediction"')


def test_json_holds_the_same(ask: Callable[..., Any], config: Callable[..., str]) -> None:
    answer = ask("--config", config(SDXL), "--steps", "1500", "--json")
    held = json.loads(answer.stdout)
    assert answer.exit_code == held["status"] == 1
    (hit,) = [one for one in held["findings"] if one["code"] == "steps-beyond"]
    assert hit["evidence"] == {"steps": 1500, "times": 1000}
    assert set(hit) == {"code", "severity", "title", "evidence", "cause", "fix"}
    assert {"steps", "repeated last sigma"} <= set(held["checked"])
    assert {"check": "strength and steps", "why": "no strength: give --strength S"} in held["skipped"]


def test_the_options_of_a_run_are_heard(ask: Callable[..., Any], config: Callable[..., str]) -> None:
    path = config(SDXL)
    assert ask(path, "--steps", "20", "--strength", "0.04").exit_code == 1
    assert ask(path, "--steps", "20", "--strength", "0.05").exit_code == 0
    assert ask(path, "--steps", "20", "--strength", "0.04", "--sampler", "euler", "--grid", "karras").exit_code == 0


def test_a_model_is_looked_at_whole_or_by_its_files(ask: Callable[..., Any], tmp_path: Path) -> None:
    model = linked(tiny.saved("dit")[1], tmp_path / "model")
    answer = ask("model", "--device", "cpu")
    assert answer.exit_code == 0, answer.stdout
    assert "model: no fault found; NOT checked: target, schedule" in answer.stdout  # its weights are random
    assert "numbers of weights" in ask("model", "--quick").stdout  # among those that were not checked
    edit(model / "scheduler/scheduler_config.json", clip_sample=True)
    broken = ask("model", "--quick")
    assert broken.exit_code == 1
    assert "error[clipped-latents]" in broken.stdout


def test_a_model_that_does_not_load_is_still_looked_at(ask: Callable[..., Any], tmp_path: Path) -> None:
    model = linked(tiny.saved("dit")[1], tmp_path / "model")
    (model / "transformer/config.json").unlink()
    (model / "vae/config.json").unlink()
    answer = ask("model", "--device", "cpu", "--data", "scenes", "--json")
    held = json.loads(answer.stdout)
    assert answer.exit_code == 1
    assert [one["code"] for one in held["findings"]] == ["component-missing"] * 2
    (why,) = {one["why"] for one in held["skipped"] if one["check"] == "scale of the VAE"}
    assert why.endswith("nothing is measured: no weights are loaded")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ((), "usage", "MODEL, --config, --trace or --images must be given"),
        (("x", "--config", "y"), "usage", "left out with --config"),
        (("nowhere",), "not-found", "a folder, a file, a bundle's name or a hub id"),
        (("empty",), "not-a-model", "must hold model_index.json"),
        (("--config", "nowhere.json"), "config-file", "scheduler_config.json"),
        (("bad.json",), "json-file", "must be JSON"),
        (("other.json",), "config-class", "_class_name must be in the config"),
        (("scheduler_config.json", "--steps", "0"), "request", "steps must be from 1"),
        (("scheduler_config.json", "--strength", "0"), "request", "strength must be above 0"),
        (("scheduler_config.json", "--grid", "karas"), "unknown-grid", "Nearest: karras"),
        (("scheduler_config.json", "--sampler", "eular"), "unknown-sampler", "Nearest: euler"),
        (("--images", "empty", "--steps", "3"), "usage", "--steps must come with MODEL or --config"),
        (("--images", "empty"), "pictures-empty", "a folder that holds .png"),
        (("--config", "scheduler_config.json", "--data", "scenes"), "usage", "--data must come with MODEL"),
        (("--config", "scheduler_config.json", "--quick"), "usage", "--quick must come with MODEL"),
        (("model", "--quick", "--data", "scenes"), "usage", "--quick must be left out with --data"),
        (("--trace", "bad.json"), "", ""),
        (("model", "--device", "abacus"), "device", "one that torch has here"),
        (("model", "--dtype", "float7"), "dtype", "dtype must be one of"),
        (("model", "--data", "nowhere"), "not-found", "images must be"),
    ],
)
def test_bad_input_is_one_line_and_2(
    ask: Callable[..., Any], config: Callable[..., str], tmp_path: Path, args: tuple[str, ...], code: str, words: str
) -> None:
    config(SDXL)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    linked(tiny.saved("dit")[1], tmp_path / "model")
    answer = ask(*args)
    assert (answer.exit_code, answer.stdout) == (2, "")
    (line,) = answer.stderr.splitlines()
    assert line.startswith(f"error[{code}" if code else "error[")
    assert words in line


def test_a_plan_of_a_bundle_goes_by_its_name(ask: Callable[..., Any]) -> None:
    answer = ask("scenes-128/plans/8.json")
    assert (answer.exit_code, answer.stderr) == (0, "")


def test_images_of_which_none_can_be_read_are_bad_input(ask: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "a.png").write_text("no image")
    answer = ask("--images", "made")
    assert (answer.exit_code, answer.stdout) == (2, "")
    assert "--images must hold an image that can be read; a.png" in answer.stderr
