"""The doctor without --data: target and schedule are asked with built-in images, or the verdict says "NOT checked"."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import exact_pipelines as exact
import pytest
import small_denoisers as small
import tiny_scenes
import torch
from typer.testing import CliRunner

import pellucid
from pellucid import schedules
from pellucid.cli import app
from pellucid.evidence.doctor import hypotheses
from pellucid.evidence.doctor.checks import KEY_CHECKS, Finding, Report, examine, named, verdict_line
from pellucid.evidence.doctor.detectors import WORDS
from pellucid.evidence.doctor.probe import pipeline_probe
from pellucid.evidence.doctor.subject import KnownImages, Subject, of_pipeline
from pellucid.interop.source import BUNDLES
from pellucid.pipeline.pipeline import Pipeline

ASSETS = Path(__file__).parents[2] / "assets"
SMALL = ASSETS / "cifar10-small-cosine"
MODELS = {
    "scenes-128": (BUNDLES / "scenes-128", "v", "cosine"),
    "scenes-128/dit": (BUNDLES / "scenes-128" / "dit", "eps", "scaled_linear"),
    "cifar10-cosine": (ASSETS / "cifar10-cosine", "v", "cosine"),
    "cifar10-small-cosine": (SMALL, "v", "cosine"),
    "cifar10-small-linear": (ASSETS / "cifar10-small-linear", "v", "linear"),
    "cifar10-small-sqrt_alpha_bar": (ASSETS / "cifar10-small-sqrt_alpha_bar", "v", "sqrt_alpha_bar"),
}
LABELS = ("its own", "target", "schedule", "both")
NOT_CHECKED = "no fault found; NOT checked: target, schedule"


def ask(*args: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *args, "--device", "cpu"], env={"COLUMNS": "200"})


def labelled(folder: Path, goal: Path, **changes: Any) -> str:
    """A copy of a model whose scheduler's config says something else; the transformer shares the parts above it."""
    inner = folder.name if folder.name == "dit" else "."
    shutil.copytree(folder.parent if inner == "dit" else folder, goal)
    file = goal / inner / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **changes}), "utf-8")
    return str(goal / inner)


def wrong(label: str, target: str, schedule: str) -> dict[str, Any]:
    """A config that lies about the target, the schedule or both."""
    other = "squaredcos_cap_v2" if "linear" in schedule else "linear"
    lies = {
        "target": {"prediction_type": "v_prediction" if target == "eps" else "epsilon"},
        "schedule": {"beta_schedule": other, "beta_start": 1e-4, "beta_end": 0.02, "trained_betas": None},
    }
    chosen = [lies[one] for one in lies if label in (one, "both")]
    return {key: value for lie in chosen for key, value in lie.items()}


def check_verdict(name: str, label: str, folder: Path) -> None:
    """The right labels are called healthy; a wrong one is found, with the right one in its name."""
    model, target, schedule = MODELS[name]
    path = labelled(model, folder / "model", **wrong(label, target, schedule))
    began = time.monotonic()
    answer = ask(path, "--only", "target", "--only", "schedule", "--json")
    found = json.loads(answer.stdout)
    print(f"{name}, {label}: {found['verdict']}, {[one['code'] for one in found['findings']]}"
          f" in {time.monotonic() - began:.1f} s")  # fmt: skip
    expected = {"target-mismatch": WORDS[target]} if label in ("target", "both") else {}
    expected |= {"schedule-mismatch": f"on the schedule {schedule};"} if label in ("schedule", "both") else {}
    assert {one["code"] for one in found["findings"]} == set(expected)
    for one in found["findings"]:
        assert expected[one["code"]] in one["title"]
    assert found["verdict"] == ("not healthy" if expected else "healthy")
    assert answer.exit_code == found["status"] == int(bool(expected))


def test_a_small_model_and_its_wrong_labels(tmp_path: Path) -> None:
    check_verdict("cifar10-small-cosine", "both", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_and_its_wrong_labels(name: str, label: str, tmp_path: Path) -> None:
    check_verdict(name, label, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted([*small.PIXELS, *small.LATENTS]))
def test_small_networks_are_never_misjudged(name: str, small_denoisers: small.Small) -> None:
    """Of 30,000 weights, they know few images: what is said of them is right, and the rest is not checked."""
    schedule, target = {**small.PIXELS, **small.LATENTS}[name]
    parts = pellucid.load(small_denoisers.model(name), device="cpu").components
    other = schedules.make("cosine" if schedule == "linear" else "linear")
    lying = replace(parts, schedule=other, target="eps" if target == "v" else "v")
    reports = [examine(of_pipeline(Pipeline(one)), named(KEY_CHECKS)) for one in (parts, lying)]
    print(f"{name}: {reports[0].verdict} | {reports[1].verdict}, {[one.title for one in reports[1].findings]}")
    assert reports[0].findings == (), reports[0].text()
    for found in reports[1].findings:
        right = f"predicts {WORDS[target]};" if found.code == "target-mismatch" else f"on the schedule {schedule};"
        assert right in found.title


def test_a_v_model_that_is_labelled_eps_is_found_by_the_plain_command(tmp_path: Path) -> None:
    """The case of the issue: no option, no data; this was called healthy."""
    broken = ask(labelled(SMALL, tmp_path / "model", prediction_type="epsilon"))
    assert broken.exit_code == 1
    assert "error[target-mismatch] the network predicts the velocity (v); its config says epsilon" in broken.stdout
    assert "not healthy; 1 error" in broken.stdout


# --- what could not be asked --------------------------------------------------------------------------------------


def test_a_key_check_that_was_not_made_is_never_healthy() -> None:
    """Files alone, a config alone: one line that says what was not checked; --strict ends with 1 for it."""
    for args in ([str(SMALL), "--quick"], ["--config", str(SMALL / "scheduler" / "scheduler_config.json")]):
        plain, strict = ask(*args), ask(*args, "--strict")
        assert (plain.exit_code, strict.exit_code) == (0, 1)
        assert plain.stdout == strict.stdout
        assert f"{NOT_CHECKED};" in plain.stdout
        assert "healthy" not in plain.stdout
        found = json.loads(ask(*args, "--strict", "--json").stdout)
        assert (found["verdict"], found["unchecked"], found["status"]) == (NOT_CHECKED, list(KEY_CHECKS), 1)


def test_strict_is_silent_where_everything_was_checked() -> None:
    answer = ask(str(SMALL), "--strict")
    assert answer.exit_code == 0, answer.stdout
    assert ": healthy; " in answer.stdout
    assert "NOT checked" not in answer.stdout


def test_one_check_alone_is_no_clean_bill() -> None:
    answer = ask(str(SMALL), "--only", "overflow")
    assert answer.exit_code == 0
    assert f"{NOT_CHECKED}; 1 check." in answer.stdout


def test_a_fault_is_not_hidden_by_what_was_not_checked() -> None:
    fault = Finding("some-code", "warning", "title", (), "cause", "fix")
    report = Report((fault,), ("one",), unchecked=("schedule",))
    assert (report.verdict, report.status) == ("not healthy", 1)
    assert (
        verdict_line(Report((), ("one",), unchecked=("schedule",))) == "no fault found; NOT checked: schedule; 1 check."
    )


def test_what_has_no_network_is_asked_for_no_target(tmp_path: Path) -> None:
    """A plan says nothing about a network: nothing key is missing, in strict mode neither."""
    (tmp_path / "plan.json").write_text(pellucid.compile_plan("ddim", steps=20).to_json(), "utf-8")
    answer = ask(str(tmp_path / "plan.json"), "--strict")
    assert answer.exit_code == 0, answer.output
    assert "NOT checked" not in answer.stdout


def test_networks_that_know_none_of_the_images_are_not_judged(tmp_path: Path) -> None:
    """An untrained one, and an exact one of another world under its right labels and under wrong ones."""
    bundle = tiny_scenes.write_model(tmp_path / "tiny")
    others = (exact.subject(), exact.subject("cosine", "v", said_target="eps", said_schedule="linear"))
    pipes = [pellucid.load(bundle, device="cpu"), *(one.pipeline for one in others)]
    for pipe in pipes:
        assert pipe is not None
        report = examine(of_pipeline(pipe), named(KEY_CHECKS))
        assert (report.findings, report.verdict) == ((), NOT_CHECKED), report.text()
        assert {why for _, why in report.skipped} == {"the network denoises no built-in image; give --data of its kind"}


# --- the images ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", hypotheses.KINDS)
def test_the_images_are_the_same_each_time_and_of_any_size(kind: str) -> None:
    for size in (16, 40, 160):
        first, again = hypotheses.built_in_images(kind, 6, size), hypotheses.built_in_images(kind, 6, size)
        assert first.shape == (6, 3, size, size)
        assert torch.equal(first, again)
        assert 0 <= float(first.min()) < float(first.max()) <= 1
        assert float((first[0] - first[1]).abs().mean()) > 0.01


def test_a_network_is_asked_with_the_kinds_that_it_knows() -> None:
    """scenes-128 was trained on scenes and knows no clouds; a network of photographs knows both."""
    kinds = []
    for model in (BUNDLES / "scenes-128", SMALL):
        pipe = pellucid.load(model, device="cpu", dtype="float32")
        data = KnownImages(
            hypotheses.mixed_images(hypotheses.KINDS, len(hypotheses.KINDS), 32 if model == SMALL else 128)
        )
        kinds.append(hypotheses.denoisable_kinds(pipeline_probe(pipe, data)))
    assert "scenes" in kinds[0]
    assert "clouds" not in kinds[0]
    assert {"scenes", "clouds"} <= set(kinds[1])


def asked_of(monkeypatch: pytest.MonkeyPatch, large: float) -> tuple[Report, int]:
    """The report on the small model, and how many images its network was given."""
    monkeypatch.setattr(hypotheses, "LARGE", large)
    pipe, given = pellucid.load(SMALL, device="cpu", dtype="float32"), []
    pipe.components.network.register_forward_pre_hook(lambda _, args: given.append(len(args[0])))
    subject: Subject = of_pipeline(pipe)
    return examine(subject, named(KEY_CHECKS)), sum(given)


def test_a_large_network_on_a_cpu_is_asked_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 100 images in all, where a small one is given some 500; the answer is the same."""
    (full, many), (light, few) = (asked_of(monkeypatch, large) for large in (hypotheses.LARGE, 0))
    assert few <= 100 < many <= 700
    assert light.verdict == full.verdict == "healthy", light.text()
    monkeypatch.setattr(hypotheses, "TOO_LARGE", 1000)
    report, none = asked_of(monkeypatch, 0)
    assert (report.verdict, none) == (NOT_CHECKED, 0)
    assert "take minutes on a CPU" in report.skipped[0][1]


def test_a_network_of_grey_images_is_asked_in_grey() -> None:
    """And one of five channels, which no image has, is not asked."""
    pixels = hypotheses.mixed_images(hypotheses.KINDS, 4, 16)
    for channels in (1, 5):
        pipe = exact.subject().pipeline
        assert pipe is not None
        pipe.components.network.config.in_channels = channels
        if channels == 1:
            clean = pipeline_probe(pipe, KnownImages(pixels)).clean
            torch.testing.assert_close(clean, (pixels * 2 - 1).mean(1, keepdim=True))
            continue
        report = examine(of_pipeline(pipe), named(KEY_CHECKS))
        assert report.verdict == NOT_CHECKED
        assert "5 channels" in report.skipped[0][1]
