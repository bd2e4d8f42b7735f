"""The tab Pipeline: the graph as an image and as tables, one component, milliseconds, and strategies of memory."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from tiny_models import saved

from pellucid.core.errors import Cancelled
from pellucid.pipeline import compare
from pellucid.pipeline.inspection import Graph, GraphOptions
from pellucid.pipeline.inspection_graph import inspect
from pellucid.pipeline.load import load
from pellucid.studio import pipeline_tab as tab
from pellucid.studio.form import Shelf
from pellucid.studio.pipeline_tab import PipelineTab
from pellucid.studio.visitors import Job, Sessions

ME: Any = SimpleNamespace(session_hash="me")
ASKED = GraphOptions(steps=2, depth=tab.DEPTH)


def folder() -> str:
    return str(saved("ddpm")[1])


@cache
def graph() -> Graph:
    return inspect(folder(), GraphOptions(steps=5, depth=tab.DEPTH))


@pytest.fixture(scope="module")
def page() -> Iterator[PipelineTab]:
    sessions = Sessions()

    async def built() -> PipelineTab:  # outside of a loop Gradio makes one, and never closes it
        with gr.Blocks(analytics_enabled=False), gr.Tab("Pipeline"):
            return PipelineTab(Shelf(device="cpu"), sessions, gr.Dropdown(), gr.State(""))

    yield asyncio.run(built())
    sessions.end_all()


def test_the_image_is_one_that_holds_itself_and_says_what_it_shows() -> None:
    shown = tab.image(graph())
    assert f'alt="the pipeline of ddpm: {", ".join(node.name for node in graph().nodes)}"' in shown
    held = shown.split("data:image/svg+xml;base64,")[1].split('"')[0]
    assert b"<svg" in base64.b64decode(held)
    assert "http" not in shown.replace(held, "")


def test_the_overview_has_bytes_of_every_component() -> None:
    shown = tab.overview(graph())
    for node in graph().components():
        assert f"<td>{node.name}</td>" in shown
    assert "in memory" in shown
    assert "whole run" not in shown


def test_every_station_can_be_looked_at() -> None:
    names = tab.names_of(graph())
    assert set(names) == {node.name for node in graph().nodes}
    for one in names:
        assert f"<b>{one}</b>" in tab.component(graph(), one)
    assert "mid_block" in tab.component(graph(), "unet")


def test_time_is_measured_and_told() -> None:
    job = Job()
    found = tab.timed(inspect(folder(), ASKED), folder(), ASKED, "cpu", job)
    assert found.times is not None
    assert "the whole run on cpu, measured" in tab.overview(found)
    words, part = job.reports.get()
    assert words.startswith("timing, row 1 of ")
    assert 0 < part < 1


def test_a_cancelled_timing_ends() -> None:
    job = Job()
    job.cancel()
    with pytest.raises(Cancelled):
        tab.timed(inspect(folder(), ASKED), folder(), ASKED, "cpu", job)


@pytest.mark.parametrize("ran", [False, True])
def test_strategies_with_their_peaks(ran: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    every = compare.strategies
    monkeypatch.setattr(compare, "strategies", lambda *given: (every(*given)[0][:2], ["the others"]))  # for speed
    found = tab.compared(load(folder(), device="cpu"), 1, ran, Job())
    assert found.rows[0].predicted
    assert bool(found.rows[0].measured) is ran
    shown = tab.strategies(found)
    assert all(f"<td>{row.strategy.name}</td>" in shown for row in found.rows)
    assert "data:image/svg+xml" in shown
    assert ("nothing was run" in shown) is not ran
    assert "left out: the others." in shown


# --- the page ----------------------------------------------------------------------------------------------------


def test_who_comes_sees_the_model_once(page: PipelineTab) -> None:
    said, shown, table, which, here = page.came(ME, folder(), 5, "")
    assert here == folder()
    assert which.value == "unet"
    assert "5 steps" in said
    assert "<img" in shown
    assert "unet" in table
    assert "mid_block" in page.look(here, 5, "unet")
    assert page.came(ME, folder(), 5, here)[1] == gr.skip()


@pytest.mark.parametrize(("model", "steps"), [("", 5), ("missing", 5), (".", 5), ("MODEL", 0), ("MODEL", "many")])
def test_bad_input_is_one_clear_line(page: PipelineTab, model: str, steps: Any) -> None:
    with pytest.raises(gr.Error, match=r"must be|must hold"):
        page.draw(ME, folder() if model == "MODEL" else model, steps)


def test_a_look_at_nothing_is_nothing(page: PipelineTab) -> None:
    assert page.look("", 5, None) == ""
    assert page.look(folder(), 5, "text_encoder") == ""  # another model's component, for a moment
    assert page.cancel(ME) == gr.skip()
    assert page.cancel_memory(ME) == gr.skip()
