"""Two traces: each way in which runs can part is found at its step and under its name, with tensors or without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trace_runs import SEEDS, SHAPE, denoiser, network, plan_of, record

import pellucid
from pellucid import Brownian, Guidance, Job, Philox, StepSeen, compile_plan, run_batch
from pellucid.core import schedule as schedules
from pellucid.evidence import trace
from pellucid.evidence.trace import Recorder, Trace
from pellucid.evidence.trace.diff import Comparison, compare, details
from pellucid.models.guided import GuidedDenoiser
from pellucid.models.rules import Interval, Rescale

TOY = pellucid.denoiser(lambda x, time: x * 0.4 / (1.0 + x * x), "scaled_linear", "eps")


@pytest.fixture(params=[True, False], ids=["tensors", "numbers"])
def tensors(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def pair(folder: Path, tensors: bool, one: dict[str, Any], other: dict[str, Any]) -> tuple[Trace, Trace]:
    """Two runs that differ in what is said of them."""
    made = []
    for name, how in (("a", one), ("b", other)):
        asked = {"plan": plan_of(), "model": denoiser(), **how}
        made.append(record(folder / name, asked.pop("plan"), asked.pop("model"), tensors=tensors, **asked))
    return made[0], made[1]


def parted(folder: Path, tensors: bool, one: dict[str, Any], other: dict[str, Any]) -> tuple[Any, ...]:
    """(step, cause, what) of the first divergence, which is the same seen from the other side."""
    a, b = pair(folder, tensors, one, other)
    first, back = compare(a, b).first, compare(b, a).first
    assert first is not None
    assert back is not None
    assert (first.step, first.cause, first.what) == (back.step, back.cause, back.what)
    return first.step, first.cause, first.what


def turned(at: float, by: float) -> GuidedDenoiser:
    """A network that predicts something else from a time on."""

    def called(x: Tensor, time: Tensor, prompt: Tensor) -> Tensor:
        return network(x, time, prompt, by if float(time[0]) < at else 0.0)

    told = [{"prompt": torch.full((len(SEEDS),), value)} for value in (1.0, 0.0)]
    return GuidedDenoiser(called, schedules.make("scaled_linear"), "eps", *told, Guidance(4.0))


def nudge(seen: StepSeen) -> Tensor:
    return seen.x_next + 0.01 if seen.index == 2 else seen.x_next


# --- the same --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["dpmpp_2m", "euler_a", "heun", "pndm", "unipc"])
def test_one_run_twice_is_the_same(tmp_path: Path, tensors: bool, sampler: str) -> None:
    found = compare(*pair(tmp_path, tensors, {"plan": plan_of(sampler)}, {"plan": plan_of(sampler)}))
    assert found.same
    assert found.headers == ()
    assert all((one.x, one.x0) == (0.0, 0.0) for one in found.distances)
    assert found.steps == plan_of(sampler).nfe


# --- each cause ------------------------------------------------------------------------------------------------


def test_another_seed_is_noise(tmp_path: Path, tensors: bool) -> None:
    assert parted(tmp_path, tensors, {}, {"seeds": [3, 5]}) == (0, "noise", "x")
    found = compare(trace.read(tmp_path / "a"), trace.read(tmp_path / "b"))
    assert [one.image for one in found.images] == [1]  # the first image has its own seed in both
    assert [told.name for told in found.why] == ["seeds"]


def test_another_path_of_noise_shows_where_it_is_drawn(tmp_path: Path, tensors: bool) -> None:
    """Both sources begin alike and draw apart: the first x is the same."""
    how = {"plan": plan_of("euler_a")}
    found = parted(tmp_path, tensors, {**how, "noise": Philox(SEEDS)}, {**how, "noise": Brownian(SEEDS)})
    assert found == (0, "noise", "x_next")


def test_churn_is_noise_at_the_call(tmp_path: Path, tensors: bool) -> None:
    how = {"plan": compile_plan("euler", steps=6, grid="karras", s_churn=2.0, s_tmax=5.0)}
    first = next(i for i, row in enumerate(how["plan"].rows) if row.pre_noise)
    assert first > 0
    found = parted(tmp_path, tensors, {**how, "noise": Philox(SEEDS)}, {**how, "noise": Brownian(SEEDS)})
    assert found == (first, "noise", "x")


def test_another_start_is_told_from_another_scale(tmp_path: Path, tensors: bool) -> None:
    """One noise, scaled as one dialect and as another: that is the plan's doing."""
    exact = compile_plan("euler", steps=6)
    other = replace(exact, initial_scale=exact.initial_scale * 1.001)
    assert parted(tmp_path, tensors, {"plan": exact}, {"plan": other}) == (0, "plan", "x")


def test_other_noise_is_named_before_its_scale(tmp_path: Path, tensors: bool) -> None:
    """It is drawn first: a scale that differs in its ninth digit did not move x by all of its norm."""
    exact = compile_plan("euler", steps=6)
    other = replace(exact, initial_scale=exact.initial_scale * (1 + 1e-9))
    found = parted(tmp_path, tensors, {"plan": exact}, {"plan": other, "seeds": [5, 6]})
    assert found == (0, "noise", "x")


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ({"steps": 6}, {"steps": 8}, (0, "level", "landing")),
        ({"grid": "karras"}, {"grid": "trailing"}, (0, "level", "landing")),
        ({"grid": "trailing"}, {"grid": "leading"}, (0, "level", "level")),
        ({"schedule": "linear"}, {"schedule": "cosine"}, (0, "level", "level")),
    ],
)
def test_other_levels(tmp_path: Path, tensors: bool, one: Any, other: Any, wanted: tuple[Any, ...]) -> None:
    runs = [
        {
            "plan": compile_plan("euler", **{"steps": 6, **how}),
            "model": denoiser(schedule=how.get("schedule", "scaled_linear")),
        }
        for how in (one, other)
    ]
    assert parted(tmp_path, tensors, *runs) == wanted


def test_another_told_time_is_a_level_of_its_own(tmp_path: Path, tensors: bool) -> None:
    plan = plan_of("euler")
    rows = [*plan.rows]
    rows[3] = replace(rows[3], time=rows[3].time - 20)
    found = parted(tmp_path, tensors, {"plan": plan}, {"plan": replace(plan, rows=tuple(rows))})
    assert found == (3, "level", "time")


def test_another_sampler_on_the_same_levels_is_the_plan(tmp_path: Path, tensors: bool) -> None:
    """DPM++ 2M by two formulas: they begin with the same step of first order, and part in the next row."""
    plans = [compile_plan("dpmpp_2m", steps=6, grid="trailing", solver=solver) for solver in ("midpoint", "heun")]
    rows = [i for i, (a, b) in enumerate(zip(plans[0].rows, plans[1].rows, strict=True)) if a.x != b.x]
    step, cause, what = parted(tmp_path, tensors, *({"plan": plan} for plan in plans))
    assert (step, cause) == (rows[0], "plan") == (1, "plan")
    assert what.startswith("x.")


def test_another_network_is_the_model(tmp_path: Path, tensors: bool) -> None:
    assert parted(tmp_path, tensors, {}, {"model": denoiser(shift=0.5)}) == (0, "model", "cond")


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_network_that_turns_aside_is_found_at_its_step(tmp_path: Path, tensors: bool, at: int) -> None:
    time = plan_of().rows[at].time + 1e-3
    assert parted(tmp_path, tensors, {"model": turned(time, 0.0)}, {"model": turned(time, 0.3)}) == (
        at,
        "model",
        "cond",
    )


def test_prompts_are_the_models_and_a_negative_one_shows_without_the_prompt(tmp_path: Path, tensors: bool) -> None:
    assert parted(tmp_path, tensors, {}, {"model": denoiser(prompt=2.0)}) == (0, "model", "cond")
    (tmp_path / "n").mkdir()
    assert parted(tmp_path / "n", tensors, {}, {"model": denoiser(negative=-1.0)}) == (0, "model", "uncond")


def test_a_bare_denoiser_that_differs_is_the_model(tmp_path: Path, tensors: bool) -> None:
    bare = [pellucid.denoiser(lambda x, t, k=k: x * k, "scaled_linear", "eps") for k in (0.4, 0.5)]
    assert parted(tmp_path, tensors, {"model": bare[0]}, {"model": bare[1]}) == (0, "model", "x0")


@pytest.mark.parametrize("other", [Guidance(5.0), Guidance(4.0, (Rescale(0.7),))], ids=["scale", "rule"])
def test_guidance_is_what_is_made_of_the_same_predictions(tmp_path: Path, tensors: bool, other: Guidance) -> None:
    assert parted(tmp_path, tensors, {}, {"model": denoiser(other)}) == (0, "guidance", "x0")


def test_guidance_that_stops_earlier(tmp_path: Path, tensors: bool) -> None:
    early = denoiser(Guidance(4.0, (Interval(0.0, 0.5),)))
    assert parted(tmp_path, tensors, {}, {"model": early}) == (3, "guidance", "uncond")


def asked_together(guidance: Any, off: float = 5e-7) -> GuidedDenoiser:
    """A network that rounds otherwise in a larger batch, as a guided run has it."""

    def called(x: Tensor, time: Tensor, prompt: Tensor) -> Tensor:
        return network(x, time, prompt) * (1 + off * (len(x) > len(SEEDS)))

    told = [{"prompt": torch.full((len(SEEDS),), value)} for value in (1.0, 0.0)]
    return GuidedDenoiser(called, schedules.make("scaled_linear"), "eps", *told, Guidance.parse(guidance))


def with_recipe(found: Trace, guidance: Any, **more: Any) -> Trace:
    recipe = {"model_hash": "1:a-b-c", "prompt": "a star", "guidance": Guidance.parse(guidance).to_dict(), **more}
    return replace(found, header=replace(found.header, recipes=(recipe,) * len(SEEDS)))


def test_a_run_without_guidance_parts_by_guidance_though_its_batch_rounds_otherwise(
    tmp_path: Path, tensors: bool
) -> None:
    a, b = pair(tmp_path, tensors, {"model": asked_together(4.0)}, {"model": asked_together(1.0)})

    def cause(one: Trace, other: Trace) -> str:
        first, back = compare(one, other).first, compare(other, one).first
        assert (first.cause, first.what) == (back.cause, back.what)
        assert first.what == "cond"
        return first.cause

    guided, plain = with_recipe(a, 4.0), with_recipe(b, 1.0)
    assert cause(guided, plain) == "guidance"
    found = compare(guided, plain)
    assert [told.name for told in found.why] == ["guidance"]
    assert 0 < found.first.distance < 1e-5 if tensors else found.first.distance is None
    assert not any("nothing that differs" in line for line in details(found))
    assert cause(guided, with_recipe(b, 4.0)) == "model"  # the recipes say nothing of guidance
    assert cause(guided, with_recipe(b, 1.0, model_hash="1:x-b-c")) == "model"
    assert cause(guided, with_recipe(b, 1.0, prompt="a ring")) == "model"
    assert cause(a, b) == "model"  # without recipes nothing is known of it


def test_what_is_more_than_rounding_is_the_models(tmp_path: Path) -> None:
    a, b = pair(tmp_path, True, {"model": asked_together(4.0, 0.3)}, {"model": asked_together(1.0, 0.3)})
    assert compare(with_recipe(a, 4.0), with_recipe(b, 1.0)).first.cause == "model"


def test_a_clip_is_found_with_guidance(tmp_path: Path, tensors: bool) -> None:
    clipped = replace(denoiser(), x0_filter=pellucid.Clip(0.5))
    assert parted(tmp_path, tensors, {}, {"model": clipped}) == (0, "guidance", "x0")


def test_what_changes_x_after_the_row_is_a_constraint(tmp_path: Path, tensors: bool) -> None:
    assert parted(tmp_path, tensors, {}, {"constraints": [nudge]}) == (2, "constraint", "x_next")


def test_the_first_of_several_causes_is_named(tmp_path: Path, tensors: bool) -> None:
    """A nudge at step 2 and another network from step 4 on: the nudge is first."""
    time = plan_of().rows[4].time + 1e-3
    how = {"model": turned(time, 0.3), "constraints": [nudge]}
    assert parted(tmp_path, tensors, {"model": turned(time, 0.0)}, how) == (2, "constraint", "x_next")


# --- how far ---------------------------------------------------------------------------------------------------


def test_distances_are_those_of_the_tensors(tmp_path: Path) -> None:
    a, b = pair(tmp_path, True, {}, {"model": denoiser(shift=0.5)})
    found = compare(a, b)
    assert found.first is not None
    for one in found.distances:
        x, y = (t.tensor("x0", one.step).double() for t in (a, b))
        assert one.x0 == pytest.approx(float((x - y).norm() / y.norm()), rel=1e-9)
    cond = [(t.tensor("x0", 0) - t.tensor("delta", 0))[0].double() for t in (a, b)]
    assert found.first.distance == pytest.approx(float((cond[0] - cond[1]).norm() / cond[1].norm()), rel=1e-9)
    assert not found.first.least
    assert found.distances[0].x == 0.0
    assert found.distances[-1].x > found.distances[1].x > 0


def test_without_tensors_the_norms_give_a_lower_bound(tmp_path: Path) -> None:
    one, other = {}, {"model": denoiser(5.0)}
    (tmp_path / "t").mkdir()
    known = compare(*pair(tmp_path / "t", True, one, other)).first
    bound = compare(*pair(tmp_path, False, one, other)).first
    assert known is not None
    assert bound is not None
    assert bound.least
    assert 0 < bound.distance <= known.distance * (1 + 1e-6)  # type: ignore[operator]


# --- tolerance -------------------------------------------------------------------------------------------------


def test_a_tolerance_passes_over_rounding_and_finds_what_is_larger(tmp_path: Path) -> None:
    """A network that rounds otherwise (as on another device), and guidance that stops earlier: the latter is found."""
    slight = denoiser(shift=1e-5)
    a, b = pair(tmp_path, True, {}, {"model": slight})
    assert compare(a, b).first.cause == "model"  # type: ignore[union-attr]
    assert compare(a, b, 1e-3).same
    (tmp_path / "g").mkdir()
    stops = denoiser(Guidance(4.0, (Interval(0.0, 0.5),)), shift=1e-5)
    first = compare(*pair(tmp_path / "g", True, {}, {"model": stops}), tolerance=1e-3).first
    assert first is not None
    assert (first.step, first.cause) == (3, "guidance")


def test_what_grows_beyond_the_tolerance_keeps_its_cause(tmp_path: Path) -> None:
    """A push at each step, within the tolerance, until together they are not."""

    def push(seen: StepSeen) -> Tensor:
        return seen.x_next * (1 + 1e-4)

    a, b = pair(tmp_path, True, {"model": TOY}, {"model": TOY, "constraints": [push]})
    distances = [one.x for one in compare(a, b).distances]
    assert distances[2] < distances[3]
    first = compare(a, b, (distances[2] + distances[3]) / 2).first
    assert first is not None
    assert (first.step, first.cause, first.what) == (2, "constraint", "x_next")
    assert first.detail.startswith("grown beyond the tolerance from step 0, where the row and all that it combines")


# --- batches and broken runs -----------------------------------------------------------------------------------


def mixed(path: Path, jobs: list[Job]) -> Trace:
    with Recorder(path, True) as recorder:
        run_batch(jobs, TOY, shape=SHAPE, observers=[recorder])
    return trace.read(path)


def test_in_a_mixed_batch_the_image_is_named(tmp_path: Path) -> None:
    jobs = [Job(plan_of("euler", 4), 1), Job(plan_of("heun", 3), 2), Job(plan_of("dpmpp_2m", 6), 3)]
    a = mixed(tmp_path / "a", jobs)
    b = mixed(tmp_path / "b", [jobs[0], jobs[1], replace(jobs[2], seed=9)])
    c = mixed(tmp_path / "c", [jobs[0], Job(plan_of("heun", 5), 2), jobs[2]])
    found = compare(a, b)
    assert [(one.image, one.cause) for one in found.images] == [(2, "noise")]
    found = compare(a, c)
    assert [(one.image, one.cause) for one in found.images] == [(1, "level")]


def test_a_run_that_broke_off_is_the_same_as_far_as_it_went(tmp_path: Path) -> None:
    calls = iter(range(100))
    whole = record(tmp_path / "a", plan_of(), denoiser())
    with pytest.raises(pellucid.Cancelled):
        record(tmp_path / "b", plan_of(), denoiser(), cancelled=lambda: next(calls) == 3)
    found = compare(whole, trace.read(tmp_path / "b"))
    assert (found.same, found.steps) == (True, 3)
    assert found.notes == ("B was broken off after 3 of 6 steps: Cancelled: stopped before row 3",)


def test_other_numbers_of_images_and_other_shapes(tmp_path: Path) -> None:
    a = record(tmp_path / "a", plan_of("euler"), TOY)
    b = record(tmp_path / "b", plan_of("euler"), TOY, seeds=[3])
    found: Comparison = compare(a, b)
    assert found.same
    assert "A has 2 images, B 1" in found.notes[0]
    assert {diff.name for diff in found.headers} == {"images", "seeds"}
    with Recorder(tmp_path / "c", True) as recorder:
        pellucid.run(plan_of("euler"), TOY, shape=(4, 3, 3), seeds=SEEDS, observers=[recorder])
    first = compare(a, trace.read(tmp_path / "c")).first
    assert first is not None
    assert (first.step, first.cause) == (0, "noise")
    assert np.isnan(first.distance)
