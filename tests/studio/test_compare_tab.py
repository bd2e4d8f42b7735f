"""The tab Compare: two set-ups of one seed, where they part and why; X/Y sheets as they fill."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import numpy as np
import pytest
from PIL import Image

from pellucid.core.errors import Cancelled, PellucidError
from pellucid.pipeline.load import load
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.recipe import read_png, read_sheet
from pellucid.studio import compare_tab, comparison, form, visitors
from pellucid.studio.compare_tab import CompareTab, SheetNews
from pellucid.studio.comparison import ComparisonNews, ComparisonResult, SideJob
from pellucid.studio.form import Form, Shelf
from pellucid.studio.generate_tab import RunResult, StepNews
from pellucid.studio.visitors import Job, Session, Sessions

A = Form(prompt="a red star", sampler="ddim", grid="trailing", seed="7", steps=4)
SIDE = ("ddim", "trailing", 4, 4.0, False)


@pytest.fixture(scope="module")
def pipe(small: Path) -> Pipeline:
    return load(small, device="cpu")


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path)


def compared(pipe: Pipeline, session: Session, b: Form) -> ComparisonResult:
    return comparison.run(pipe, (A, b), session, Job())


def code_of(call: Any, *given: Any) -> str:
    with pytest.raises(PellucidError) as error:
        call(*given)
    assert "\n" not in str(error.value)
    return error.value.code


# --- where they part ---------------------------------------------------------------------------------------------


def test_one_set_up_twice_is_the_same(pipe: Pipeline, session: Session) -> None:
    done = compared(pipe, session, A)
    assert done.found.same
    assert comparison.headline(done) == "The two runs are the same in all of 4 steps."
    assert not any(column.first for column in done.film)
    assert comparison.distances(done.found) == ""
    assert "The rows are the same" in comparison.plans(done.plans, done.theirs)
    assert np.array_equal(*(np.asarray(made.image) for made in done.made))


def test_the_first_step_that_differs_is_named_with_its_cause(pipe: Pipeline, session: Session) -> None:
    """DPM++ 2M begins as DDIM does; its second row takes the prediction before it, too."""
    done = compared(pipe, session, replace(A, sampler="dpmpp_2m"))
    assert done.found.first is not None
    assert (done.found.first.step, done.found.first.cause) == (1, "plan")
    assert comparison.headline(done) == "They diverge at step 2 of 4, by plan."
    shown = comparison.film(done.film)
    assert shown.count('class="first"') == 1
    assert shown.index("step 2") < shown.index("they diverge here") < shown.index("step 3")
    assert [column.step for column in done.film if column.first] == [1]
    verdict = comparison.verdict(done)
    assert "name of the plan: ddim → dpmpp_2m" in verdict
    assert "Rows that differ" in comparison.plans(done.plans, done.theirs)
    assert "<svg" in comparison.distances(done.found)


def test_guidance_is_a_cause(pipe: Pipeline, session: Session) -> None:
    done = compared(pipe, session, replace(A, guidance=6.0))
    assert done.found.first is not None
    assert (done.found.first.step, done.found.first.cause) == (0, "guidance")
    assert "The rows are the same" in comparison.plans(done.plans, done.theirs)


def test_runs_of_different_length_are_aligned_by_step(pipe: Pipeline, session: Session) -> None:
    done = compared(pipe, session, replace(A, steps=6))
    assert done.calls == (4, 6)
    assert [frame.ratio is None for frame in done.film[-1].frames] == [True, False]
    assert "A · ended" in comparison.film(done.film)
    plans = comparison.plans(done.plans, done.theirs)
    assert "The rows of both" in plans
    assert "rows have no partners" in plans


def test_other_frames_are_compared_in_one(pipe: Pipeline, session: Session) -> None:
    done = compared(pipe, session, replace(A, sampler="euler"))
    assert "For the rows, B is rewritten from the frame ve to vp" in comparison.plans(done.plans, done.theirs)


@pytest.mark.parametrize(
    ("steps", "first", "wanted"),
    [
        (3, None, [0, 1, 2]),
        (3, 1, [0, 1, 2]),
        (29, None, [0, 4, 8, 12, 16, 20, 24, 28]),
        (29, 13, [0, 4, 8, 13, 16, 20, 24, 28]),
        (29, 1, [0, 1, 8, 12, 16, 20, 24, 28]),
        (29, 28, [0, 4, 8, 12, 16, 20, 24, 28]),
        (4, 4, [0, 1, 2, 3]),
    ],
)
def test_the_strip_shows_the_step_where_they_part(steps: int, first: int | None, wanted: list[int]) -> None:
    assert comparison.columns(steps, first) == wanted


# --- as it runs --------------------------------------------------------------------------------------------------


def test_both_sides_are_told_together(pipe: Pipeline, session: Session) -> None:
    job = Job()
    comparison.run(pipe, (A, A), session, job)
    news = []
    while not job.reports.empty():
        news.append(job.reports.get())
    assert all(isinstance(one, ComparisonNews) for one in news)
    assert [one.part for one in news] == sorted(one.part for one in news)
    assert isinstance(news[0].a, StepNews)
    assert news[0].b is None
    assert all(isinstance(one.a, RunResult) for one in news if one.b is not None)
    assert isinstance(news[-1].b, RunResult)
    assert news[0].words.startswith("A: step 1 of 4")


def test_what_cannot_be_planned_is_refused_before_anything_runs(pipe: Pipeline, session: Session) -> None:
    job = Job()
    assert code_of(comparison.run, pipe, (A, replace(A, steps=0)), session, job) == "steps"
    assert job.reports.empty()
    assert list(session.folder.iterdir()) == []


def test_cancel_stops_both(pipe: Pipeline, session: Session) -> None:
    job = Job()
    half = SideJob(job, [None, None], 0)
    assert not half.cancelled()
    job.cancel()
    assert half.cancelled()
    with pytest.raises(Cancelled):
        comparison.run(pipe, (A, A), session, job)


# --- sheets ------------------------------------------------------------------------------------------------------


def test_a_sheet_fills_and_carries_its_recipe(pipe: Pipeline, session: Session) -> None:
    job, asked = Job(), compare_tab.sheet_of("steps=1,2 x guidance=1,3,20", A)
    drawn = compare_tab.run(pipe, asked, session, job)
    axes, recipe = read_sheet(drawn.file) or ("", None)
    assert (axes, recipe.steps, recipe.seed) == ("steps=1,2 x guidance=1,3,20", 1, 7)
    assert any("may burn colours" in note for note in drawn.notes)
    news = []
    while not job.reports.empty():
        news.append(job.reports.get())
    assert [len(one.images) for one in news] == sorted(len(one.images) for one in news)
    assert (news[-1].calls, news[-1].of, len(news[-1].images)) == (9, 9, 6)
    assert news[0].words.startswith("cell 1 of 6 · call 1 of 9")
    assert news[1].draw().size == news[-1].draw().size


def test_a_cell_is_the_image_of_its_settings(pipe: Pipeline, session: Session) -> None:
    asked = compare_tab.sheet_of("guidance=2,5", A)
    alone = [pipe.run(replace(A, guidance=scale).request()).images[0] for scale in (2.0, 5.0)]
    cells = [pipe.run(request).images[0] for request in asked.requests]
    for one, other in zip(alone, cells, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "grid-of"),
        ("steps", "grid-of"),
        ("stepz=1,2", "grid-axis"),
        ("size=4096x4096", "grid-axis"),
        ("lora=1,2", "grid-axis"),
        ("steps=0,1", "steps"),
        ("steps=1,2000", "steps"),
        ('prompt="", a', "prompt"),
        ("sampler=eulr", "unknown-sampler"),
        ("seed=1..37", "grid-cells"),
        ("seed=1..7 x steps=1..6", "grid-cells"),
    ],
)
def test_bad_axes_are_refused(text: str, code: str) -> None:
    assert code_of(compare_tab.sheet_of, text, A) == code


def test_36_cells_are_not_too_many() -> None:
    assert len(compare_tab.sheet_of("seed=1..6 x steps=1..6", A).requests) == compare_tab.MOST_CELLS


# --- the page ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tab(pipe: Pipeline, session: Session) -> CompareTab:
    shelf, sessions = Shelf(["m"]), Sessions({"me": session})
    shelf.held["m"] = pipe

    async def built() -> CompareTab:  # outside of a loop Gradio makes one, and never closes it
        with gr.Blocks(analytics_enabled=False):
            return CompareTab(shelf, sessions, gr.Dropdown(), gr.State(""))

    return asyncio.run(built())


ME: Any = SimpleNamespace(session_hash="me")


def test_the_page_shows_both_and_keeps_their_traces(tab: CompareTab, session: Session) -> None:
    *_, last = tab.compare(ME, "m", "a red star", "7", *SIDE, "dpmpp_2m", *SIDE[1:])
    shown, said, file_a, file_b, verdict, film, _, plans, ran = last
    assert shown.count("<img") == 2
    assert "done in" in said
    assert "They diverge at step 2 of 4, by plan." in verdict
    assert film.count("<img") == 2 * 4
    assert "<table" in plans
    assert ran in session.runs
    assert len(session.runs) == 2
    for button, sampler in ((file_a, "ddim"), (file_b, "dpmpp_2m")):
        assert read_png(button.value["path"] if isinstance(button.value, dict) else button.value).sampler == sampler


@pytest.mark.parametrize(
    ("prompt", "seed", "steps", "said"),
    [("", "7", 4, "prompt must not be empty"), ("a", "x", 4, "seed must be"), ("a", "7", 10_000, "steps must be")],
)
def test_bad_input_is_a_line_and_nothing_is_lost(
    tab: CompareTab, prompt: str, seed: str, steps: int, said: str
) -> None:
    seen = []
    with pytest.raises(gr.Error, match=said):
        seen.extend(tab.compare(ME, "m", prompt, seed, *SIDE, "ddim", "trailing", steps, 4.0, False))
    bad = ("ddim", "trailing", steps, 4.0, False)
    with pytest.raises(gr.Error, match=said):
        seen.extend(tab.draw(ME, "m", prompt, seed, *bad, *SIDE, "guidance=1,2"))
    assert len(seen) >= 2
    assert all(one[0] == gr.skip() for one in seen)
    assert "ready" in seen[-1][1]


def test_a_sheet_on_the_page(tab: CompareTab) -> None:
    given = ("a red star", "7", *SIDE, *SIDE)
    *_, last = tab.draw(ME, "m", *given, "steps=1,2")
    shown, said, _ = last
    assert "<img" in shown
    assert "done in" in said
    with pytest.raises(gr.Error, match="at most 36"):
        list(tab.draw(ME, "m", *given, "seed=1..37"))


def test_cancel_is_said(tab: CompareTab, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(work: Any) -> Job:
        job = Job()
        job.cancel()
        job.run(work)
        return job

    monkeypatch.setattr(visitors, "begin", begun)
    *_, last = tab.compare(ME, "m", "a red star", "7", *SIDE, *SIDE)
    assert "cancelled" in last[1]
    *_, last = tab.draw(ME, "m", "a red star", "7", *SIDE, *SIDE, "steps=1,2")
    assert "cancelled" in last[1]
    assert "cancelled" in tab.cancel(ME)
    assert "cancelled" in tab.cancel_sheet(ME)


def test_an_empty_seed_is_one_seed_for_both() -> None:
    a, b = compare_tab.setups_of("a", "", *SIDE, *SIDE)
    assert a.seed == b.seed
    assert form.seed_of(a.seed) == a.seed


def test_a_wide_sheet_is_made_smaller_for_the_page() -> None:
    assert len(comparison.sheet(Image.new("RGB", (4000, 4000)))) < 200_000
    assert SheetNews((), (), 0, 0, 1, 0.0).words.startswith("cell 0 of 0")


def test_the_guard_holds_on_a_sheet_of_guidances() -> None:
    guarded = replace(A, guarded=True)
    assert [one.guidance.text() for one in compare_tab.sheet_of("guidance=2,5", guarded).requests] == [
        "2 + rescale",
        "5 + rescale",
    ]
    with pytest.raises(PellucidError, match="all different with the guard on"):
        compare_tab.sheet_of("guidance=8,15", guarded)
