"""The tab Study: what is asked for, cells as they come, cancel and going on, and reports that are there already."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from tiny_models import saved

from pellucid.core.errors import Cancelled, PellucidError
from pellucid.pipeline.load import load
from pellucid.pipeline.pipeline import Pipeline
from pellucid.studio import study_tab as tab
from pellucid.studio.form import Shelf
from pellucid.studio.study_tab import StudyForm, StudyNews, StudyTab
from pellucid.studio.visitors import Job, Sessions

ME: Any = SimpleNamespace(session_hash="me")
NAME = "ddpm"


def folder() -> str:
    return str(saved(NAME)[1])


@cache
def pipe() -> Pipeline:
    return load(folder(), device="cpu")


def wish(**changes: Any) -> StudyForm:
    return StudyForm(**{"model": folder(), "samplers": ("ddim", "euler"), "steps": "2,3", "yardstick": 6, **changes})


class Watched(Job):
    """A job that keeps all its news, and is cancelled when `until` says so."""

    def __init__(self, until: Callable[[StudyNews], bool] = lambda news: False) -> None:
        super().__init__()
        self.news: list[StudyNews] = []
        self.until = until

    def tell(self, news: StudyNews) -> None:
        self.news.append(news)
        if self.until(news):
            self.cancel()


def made(news: StudyNews) -> int:
    return sum(one.distance is not None for one in news.cells)


# --- what is asked for -------------------------------------------------------------------------------------------


def test_a_wish_becomes_a_study_within_bounds() -> None:
    found = wish(prompts="a red star\n\n a blue square \n", seeds=2.0).config("prompt")
    assert found.prompts == ("a red star", "a blue square")
    assert (found.steps, found.seeds, found.batch, found.converged_steps) == ((2, 3), 2, 4, 6)
    assert wish(prompts="a red star").config("nothing").prompts == ()


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"model": " "}, "model must be a folder"),
        ({"samplers": ()}, "samplers must be at least one"),
        ({"samplers": ("oiler",)}, "sampler"),
        ({"samplers": ("/etc/plan.json",)}, "samplers must be names"),
        ({"samplers": [f"euler:{n}" for n in range(17)]}, "samplers must be at most 16"),
        ({"steps": ""}, "steps must be whole numbers"),
        ({"steps": "5, many"}, "steps must be whole numbers"),
        ({"steps": "0"}, "steps must be whole numbers"),
        ({"steps": "10000"}, "steps must be whole numbers"),
        ({"steps": ",".join(map(str, range(1, 30)))}, "steps must be whole numbers"),
        ({"seeds": 1.5}, "images per prompt must be a whole number"),
        ({"seeds": "x"}, "images per prompt must be a whole number"),
        ({"seeds": 10**6}, "images per prompt must be a whole number"),
        ({"prompts": "a\n" * 100}, "prompts must be at most 64"),
        ({"prompts": "a\n" * 60, "seeds": 16}, "prompts × images must be at most 256"),
        ({"yardstick": 5}, "converged_steps must be at least twice"),
        ({"yardstick": None}, "steps of the converged images must be a whole number"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], start: str) -> None:
    with pytest.raises(PellucidError, match=f"^{start}"):
        wish(**changes).config("prompt")


def test_a_folder_is_that_of_the_images_not_of_the_cells(tmp_path: Path) -> None:
    def of(**changes: Any) -> Path:
        return tab.folder_of(wish(**changes).config("prompt"), "mark", tmp_path)

    assert of() == of(steps="2", samplers=("heun",))
    assert of() != of(prompts="a red star")
    assert of() != of(yardstick=8)


# --- a study that is stopped and goes on -------------------------------------------------------------------------


def test_a_study_fills_can_be_stopped_and_goes_on(tmp_path: Path) -> None:
    first = Watched(lambda news: made(news) == 2)
    with pytest.raises(Cancelled):
        tab.run(pipe(), wish(), tmp_path, first)
    counts = [made(news) for news in first.news]
    assert counts == sorted(counts)
    assert counts[-1] == 2
    assert all(len(news.cells) == 4 for news in first.news)
    assert any(news.images and news.last for news in first.news)
    parts = [news.part for news in first.news]
    assert parts == sorted(parts)

    second = Watched()
    page = tab.run(pipe(), wish(), tmp_path, second)
    assert made(second.news[0]) == 2  # nothing is made twice
    assert made(second.news[-1]) == 4
    assert page.parent.parent == tmp_path
    text = tab.report_in(str(page.parent))
    assert "data-cell" in text
    assert "Recommendation" in text
    shown = tab.framed(text, "a report")
    assert 'sandbox="allow-scripts"' in shown
    assert shown.count("<iframe") == 1
    assert "<script" not in shown  # it is in the frame, escaped


def test_a_run_within_a_cell_stops_too(tmp_path: Path) -> None:
    job = Watched(lambda news: news.part > 0)
    with pytest.raises(Cancelled):
        tab.run(pipe(), wish(), tmp_path, job)
    assert made(job.news[-1]) == 0


def test_table_and_chart_as_they_fill(tmp_path: Path) -> None:
    job = Watched(lambda news: made(news) == 1)
    with pytest.raises(Cancelled):
        tab.run(pipe(), wish(), tmp_path, job)
    empty, filled = job.news[0], job.news[-1]
    assert tab.chart(empty.cells) == tab.EMPTY
    assert tab.table(empty.cells).count("waiting") == 4
    assert tab.table(filled.cells).count('class="done"') == 1
    assert tab.chart(filled.cells).count("<circle") >= 1


# --- reports that are there --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "start"),
    [
        ({}, "study must be a folder of a study"),
        ({"config.json": "{"}, "study must be a folder of a study"),
        ({"config.json": "[]"}, "study must be a folder of a study"),
        ({"config.json": "{}", "report.html": "x"}, "study must be a folder of a study"),
        ({"config.json": '{"study": "samplers"}'}, "study must be done"),
    ],
)
def test_only_studies_are_opened(files: dict[str, str], start: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(PellucidError, match=f"^{start}"):
        tab.report_in(str(tmp_path))


@pytest.mark.parametrize("path", ["", None, "x" * 5000, "a\0b", "missing"])
def test_paths_that_are_none(path: str | None) -> None:
    with pytest.raises(PellucidError, match=r"^study must be"):
        tab.report_in(path)


def test_a_report_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"study": "samplers"}))
    (tmp_path / "report.html").write_text("x" * 100)
    assert tab.report_in(str(tmp_path)) == "x" * 100
    monkeypatch.setattr(tab, "MOST_REPORT", 10)
    with pytest.raises(PellucidError, match=r"^report must be at most"):
        tab.report_in(str(tmp_path))


# --- the page ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page() -> Iterator[StudyTab]:
    shelf, sessions = Shelf(device="cpu"), Sessions()
    shelf.held[folder()] = pipe()

    async def built() -> StudyTab:  # outside of a loop Gradio makes one, and never closes it
        with gr.Blocks(analytics_enabled=False):
            return StudyTab(shelf, sessions, gr.Dropdown(), gr.State(""))

    yield asyncio.run(built())
    sessions.end_all()


def test_the_page_ends_with_the_report(page: StudyTab) -> None:
    *_, last = page.start(ME, folder(), ["ddim"], "2", "", 1, 4)
    assert "done" in last[0]
    assert "<iframe" in last[4]
    assert page.cancel(ME) == gr.skip()


def test_cancel_says_what_is_kept(page: StudyTab) -> None:
    events = page.start(ME, folder(), ["ddim", "euler"], "2,3,4", "", 1, 100)
    for said, *_ in events:
        if "model calls" in said:
            assert "cancelled" in page.cancel(ME)
            break
    *_, last = events
    assert "cells are kept; Start continues from there" in last[0]


def test_bad_input_keeps_what_is_shown(page: StudyTab) -> None:
    seen: list[Any] = []
    with pytest.raises(gr.Error, match="steps must be"):
        seen.extend(page.start(ME, folder(), ["ddim"], "many", "", 1, 4))
    assert all(one == gr.skip() for event in seen for one in event[1:])
    with pytest.raises(gr.Error, match="study must be"):
        page.open("/nowhere")
