"""What the doctor reads in traces: runs of an exact guided denoiser, recorded as any run is, each broken in one way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_scenes
import torch
from guided_runs import SHAPE, Guided, plan, recorded

import pellucid
from pellucid.core.compile import compile_plan
from pellucid.core.grid import Grid
from pellucid.evidence import trace
from pellucid.evidence.doctor.checks import CHECKS, Finding, Report, examine
from pellucid.evidence.doctor.subject import Subject, SubjectSpec, open_subject
from pellucid.evidence.doctor.traces import scale_of


def seen(folder: Path, *how: Any) -> Report:
    """The report of a run of two images."""
    return examine(recorded(folder, *how))


def only(report: Report) -> Finding:
    (found,) = report.findings
    return found


def test_a_sound_run_is_left_alone(tmp_path: Path) -> None:
    for scale in (1.0, 3.0, 5.0):
        (tmp_path / f"{scale}").mkdir()
        report = seen(tmp_path / f"{scale}", Guided(scale))
        assert report.findings == (), report.text()
        assert {"numbers of the trace", "levels of the trace", "guidance of the trace"} <= set(report.checked)


def test_every_check_of_a_trace_needs_one() -> None:
    names = [name for name in CHECKS if name.endswith("of the trace")]
    assert len(names) == 3
    skipped = dict(examine(Subject("nothing")).skipped)
    assert all("no trace" in skipped[name] for name in names)


def test_too_much_guidance_is_told(tmp_path: Path) -> None:
    found = only(seen(tmp_path, Guided(15.0)))
    assert found.code == "oversaturated"
    facts = dict(found.evidence)
    assert facts["share of |x0| at or beyond the limit"] > 0.05  # type: ignore[operator]
    assert facts["limit"] == 3.0
    assert "Guidance" in found.cause


@pytest.mark.parametrize(("scale", "codes"), [(4.0, []), (7.0, []), (12.0, ["guidance-overshoots"])])
def test_guidance_that_overshoots_early_is_told(scale: float, codes: list[str], tmp_path: Path) -> None:
    """The true model: at 12 its image ends in range, and nearly half of its first prediction does not."""
    pipe = pellucid.load("scenes-128", device="cpu")
    with trace.Recorder(tmp_path / "run.trace") as recorder:
        pipe("a large red star on a white background", steps=12, guidance=scale, seed=1, observers=[recorder])
    report = examine(Subject("run", trace=trace.read(tmp_path / "run.trace")))
    assert [finding.code for finding in report.findings] == codes, report.text()
    for found in report.findings:
        facts = dict(found.evidence)
        assert facts["root mean square of x0"] > 2 * facts["the same at the end"]  # type: ignore[operator]
        assert "guidance of 12" in found.cause


def test_a_prompt_without_effect_is_told(tmp_path: Path) -> None:
    found = only(seen(tmp_path, Guided(7.0, prompt=False)))
    assert found.code == "prompt-no-effect"
    assert dict(found.evidence)["largest guidance delta"] == 0


def test_a_run_that_breaks_is_told_with_its_step(tmp_path: Path) -> None:
    table = plan()
    report = seen(tmp_path, Guided(3.0, breaks_below=1.0), table)
    found = only(report)
    first = next(i for i, row in enumerate(table.rows) if row.level.ratio < 1.0)
    assert found.code == "run-not-finite"
    assert dict(found.evidence)["step"] == first + 1
    assert "prediction" in found.cause
    assert "not finite" in dict(report.skipped)["guidance of the trace"]


def test_noise_that_is_left_at_the_end_is_told(tmp_path: Path) -> None:
    """The little that diffusers' own configs leave is a note; a plan that stops early is a warning."""
    whole = plan("sigma_min")
    little = only(seen(tmp_path, Guided(), whole))
    assert (little.code, little.severity) == ("wrong-final-level", "note")
    (tmp_path / "cut").mkdir()
    table = compile_plan(
        "ddim", schedule="scaled_linear", grid=Grid("karras", sigma_min=0.3, final="sigma_min"), steps=9
    )
    much = only(seen(tmp_path / "cut", Guided(), table))
    assert (much.code, much.severity) == ("wrong-final-level", "warning")
    assert dict(much.evidence)["sigma/alpha at the end"] == pytest.approx(table.end.ratio)


@pytest.mark.parametrize("times", [0.5, 14.6])
def test_a_start_at_another_level_is_told(times: float, tmp_path: Path) -> None:
    noise = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    found = only(seen(tmp_path, Guided(1.0), plan(), noise * times))
    assert found.code == "wrong-start-level"
    assert dict(found.evidence)["standard deviation of x"] == pytest.approx(times, rel=0.1)


def test_a_run_of_a_pipeline_says_its_scale(tmp_path: Path) -> None:
    """The scale comes from the recipe that the trace carries."""
    pipe = pellucid.load(tiny_scenes.write_model(tmp_path / "tiny"), device="cpu")
    with trace.Recorder(tmp_path / "run.trace") as recorder:
        pipe("a red star", steps=4, guidance=30.0, seed=1, decode=False, observers=[recorder])
    assert scale_of(trace.read(tmp_path / "run.trace")) == 30.0


def test_a_trace_is_asked_about_the_plan_and_the_recipe_that_it_holds(tmp_path: Path) -> None:
    """Guidance and a grid that the doctor finds in an image's recipe, it finds in the trace of the same run."""
    pipe, path = pellucid.load("scenes-128", device="cpu"), tmp_path / "run.safetensors"
    with trace.Recorder(path) as recorder:
        pipe("a red star", sampler="dpmpp_2m", grid="karras", steps=5, guidance=20.0, observers=[recorder])
    codes = {finding.code for finding in examine(open_subject(SubjectSpec(trace=str(path)))).findings}
    assert {"calls-in-noise", "guidance-high"} <= codes
    with trace.Recorder(tmp_path / "sound.safetensors") as recorder:
        pipe("a red star", steps=5, guidance=4.0, observers=[recorder])
    assert not examine(open_subject(SubjectSpec(trace=str(recorder.path)))).findings
    beside = open_subject(SubjectSpec(model="scenes-128", trace=str(path), quick=True))
    assert not beside.is_run  # the model has a plan of its own, and is asked about that
    assert beside.recipe is None
