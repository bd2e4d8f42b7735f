"""`pellucid.trace`, `pellucid.study` and `pellucid.tune`: what their commands do, from Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models as tiny
import torch
from tiny_scenes import write_model

import pellucid
from pellucid import PellucidError, Pipeline

SIZE = {"width": 16, "height": 16}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("public")
    tiny.stable_diffusion(folder).save_pretrained(folder / "model")
    return pellucid.load(folder / "model", device="cpu")


def test_a_pipeline_is_run_and_its_trace_read(pipe: Pipeline, tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    seen: list[int] = []
    options = {"sampler": "ddim", "steps": 3, "seed": 7, "observers": [lambda step: seen.append(step.index)], **SIZE}
    found = pellucid.trace(pipe, "abc", out=file, tensors=True, **options)
    assert [step.index for step in found.steps] == seen == [0, 1, 2]
    assert found.header.recipes[0]["prompt"] == "abc"
    again = pellucid.trace(file)
    assert torch.equal(again.tensor("x0", 2), found.tensor("x0", 2))


def test_what_is_neither_read_nor_run_is_refused(pipe: Pipeline, tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    with pytest.raises(PellucidError, match="out must be given"):
        pellucid.trace(pipe, "abc")
    with pytest.raises(PellucidError, match="a file is read as it is"):
        pellucid.trace(file, "abc")
    with pytest.raises(PellucidError, match="a trace file or a pipeline; got 'int'"):
        pellucid.trace(3)
    with pytest.raises(PellucidError, match="unknown option num_inference_steps; use steps"):
        pellucid.trace(pipe, "abc", out=file, num_inference_steps=3)
    assert not file.exists()


def test_a_study_says_what_to_use(pipe: Pipeline, tmp_path: Path) -> None:
    how = {"prompts": ["abc", "def"], "size": (16, 16), "converged_steps": 6, "path_steps": 6, "rounds": 1}
    found = pellucid.study(pipe, ["ddim", "euler"], [2, 3], out=tmp_path / "study", guidance=3, **how)
    assert found.verdict.sentence.startswith("Use ")
    assert found.verdict.call["guidance"] == 3
    assert (tmp_path / "study/report.html").is_file()
    with pytest.raises(PellucidError, match=r"unknown option setps; got 3. Nearest: steps"):
        pellucid.study(pipe, ["ddim"], [2], out=tmp_path / "other", setps=3)


def test_a_tuned_plan_runs_with_its_pipeline(tmp_path: Path) -> None:
    pipe = pellucid.load(write_model(tmp_path / "scenes"), device="cpu")
    few = {"pairs": 4, "held_out": 4, "teacher": 20, "iterations": 2, "batch": 4, "starts": ["unipc-3:trailing"]}
    tuned = pellucid.tune(pipe, 2, guidance=3, prompts="scenes", out=tmp_path / "plan.json", **few)
    assert tuned.plan.nfe == 2
    assert tuned.evidence["guidance"] == "3"
    made = pipe("a red star", plan=tmp_path / "plan.json", guidance=3, seed=1)
    assert made.notes == ()
    other = pipe("a red star", plan=tuned.plan, guidance="guarded 3", seed=1)
    assert other.notes == ("the plan was tuned for guidance 3, and runs with 3 + rescale",)
    with pytest.raises(PellucidError, match="pass overwrite=True"):
        pellucid.tune(pipe, 2, out=tmp_path / "plan.json")
    with pytest.raises(PellucidError, match=r"unknown option iteration; got 3\. Nearest: iterations"):
        pellucid.tune(pipe, 2, iteration=3)


def test_a_tuned_plan_of_other_weights_is_said(pipe: Pipeline, tmp_path: Path) -> None:
    plan = pellucid.Plan.from_json((Path(pellucid.__file__).parent / "bundles/scenes-128/plans/8.json").read_text())
    scenes = pellucid.load("scenes-128", device="cpu")
    assert scenes("a red star", plan=plan, guidance="guarded 4", seed=1).notes == ()
    with torch.no_grad():
        scenes.components.network.conv_out.bias += 1e-3
    notes = scenes("a red star", plan=plan, guidance="guarded 4", seed=1).notes
    assert notes == ("the plan was tuned for other weights (of scenes-128): network differs",)


@pytest.mark.parametrize("given", [{"samplers": "ddim"}, {"steps": 4}, {"prompts": "a red star"}])
def test_one_thing_is_no_list(pipe: Pipeline, tmp_path: Path, given: dict[str, object]) -> None:
    """A text would be taken letter by letter."""
    asked = {"samplers": ["ddim"], "steps": [2], "prompts": ["abc"], **given}
    with pytest.raises(PellucidError, match=f"{next(iter(given))} must be a list"):
        pellucid.study(pipe, out=tmp_path / "study", **asked)


def test_a_place_that_cannot_be_written_is_refused_before_the_work(pipe: Pipeline, tmp_path: Path) -> None:
    with pytest.raises(PellucidError, match="out must be in a folder that exists"):
        pellucid.tune(pipe, 2, out=tmp_path / "no/such/plan.json")
    with pytest.raises(PellucidError, match="a file is read as it is"):
        pellucid.trace(tmp_path / "run.safetensors", tensors=True)
