"""The tab Schedules: curves with a grid's points on them, an image noised along them, and what is said when not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import gradio as gr
import numpy as np
import pytest
import torch
from PIL import Image

from pellucid.core import schedule as schedules
from pellucid.core.errors import PellucidError
from pellucid.core.grid import Grid, make_path
from pellucid.studio import schedules_tab
from pellucid.studio.form import Shelf
from pellucid.studio.schedules_tab import SchedulesTab
from pellucid.studio.visitors import Sessions

EVERY = schedules.names()


@pytest.fixture(scope="module")
def tab() -> SchedulesTab:
    async def built() -> SchedulesTab:  # outside of a loop Gradio makes one, and never closes it
        with gr.Blocks(analytics_enabled=False):
            return SchedulesTab(Shelf(), Sessions(), gr.Dropdown(), gr.State(""))

    return asyncio.run(built())


# --- curves ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_a_grid_lies_on_its_curve(name: str) -> None:
    found = schedules_tab.curves([name], "trailing", 8, False)
    (one,) = found.found
    assert found.notes == ()
    path = make_path(one.schedule, Grid("trailing"), 8, one.schedule.frame)
    lams = np.array([leg.start.lam for leg in path.legs])
    finite = np.isfinite(lams)
    assert one.calls["lam"][finite] == pytest.approx(lams[finite], rel=1e-9, abs=1e-9)
    between = finite & (one.call_time > 0.05) & (one.call_time < 0.95)
    drawn = np.interp(one.call_time, one.time, one.columns["lam"])
    assert one.calls["lam"][between] == pytest.approx(drawn[between], abs=0.05)
    assert (one.time[0], one.time[-1]) == (0.0, 1.0)


def test_snr_lam_and_alpha_bar_say_the_same() -> None:
    for one in schedules_tab.curves(EVERY[:6], "karras", 12, False).found:
        bar = one.calls["alpha_bar"]
        assert one.calls["snr"] == pytest.approx(bar / (1 - bar), rel=1e-6)
        assert one.calls["lam"] == pytest.approx(0.5 * np.log(one.calls["snr"]))


def test_zero_terminal_snr_leaves_no_signal_at_the_end() -> None:
    plain, zero = (schedules_tab.curves(["scaled_linear"], "trailing", 5, on).found[0] for on in (False, True))
    assert plain.columns["alpha_bar"][-1] > 1e-3
    assert zero.columns["alpha_bar"][-1] == 0.0
    assert zero.calls["alpha_bar"][0] == 0.0


@pytest.mark.parametrize(
    ("names", "grid", "zero", "said"),
    [
        (["scaled_linear", "flow"], "ays", False, "flow is drawn without the grid ays"),
        (["linear", "cosine"], "karras", True, "linear is drawn without the grid karras"),
        (["linear", "flow"], "trailing", True, "flow is drawn as it is"),
    ],
)
def test_what_one_schedule_cannot_take_is_said_of_that_one(names: list[str], grid: str, zero: bool, said: str) -> None:
    found = schedules_tab.curves(names, grid, 6, zero)
    assert [one.name for one in found.found] == names
    assert any(note.startswith(said) for note in found.notes)
    assert all("\n" not in note for note in found.notes)
    assert schedules_tab.panels(found).count("<svg") == 4


@pytest.mark.parametrize(
    ("names", "grid", "steps", "code"),
    [
        ([], "trailing", 5, "schedules"),
        (list(EVERY[:7]), "trailing", 5, "schedules"),
        (["nothing"], "trailing", 5, "unknown-schedule"),
        (["linear"], "trailing", 201, "steps"),
    ],
)
def test_bad_choices_are_refused(names: list[str], grid: str, steps: int, code: str) -> None:
    with pytest.raises(PellucidError) as error:
        schedules_tab.curves(names, grid, steps, False)
    assert error.value.code == code


def test_a_grid_that_is_none_is_said() -> None:
    found = schedules_tab.curves(["linear"], "nothing", 5, False)
    assert "grid must be a known name" in found.notes[0]


# --- an image ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scaled_linear", "edm", "flow", "vp_cosine"])
def test_a_image_loses_its_signal_along_a_schedule(name: str) -> None:
    x0 = schedules_tab.scene()
    made = schedules_tab.noisy_images(schedules.make(name), x0)
    assert len(made) == schedules_tab.COLUMNS
    likeness = [float(np.corrcoef(np.asarray(one.image).ravel(), as_bytes(x0))[0, 1]) for one in made]
    assert likeness[0] > 0.99
    assert likeness == sorted(likeness, reverse=True)
    assert likeness[-1] < 0.2
    lams = [one.level.lam for one in made]
    assert lams == sorted(lams, reverse=True)


def as_bytes(x0: torch.Tensor) -> np.ndarray:
    return ((x0 / 2 + 0.5) * 255).movedim(0, -1).numpy().ravel()


def test_the_middle_of_an_upload_is_taken() -> None:
    wide = Image.new("RGB", (300, 100), "red")
    wide.paste("blue", (100, 0, 200, 100))
    made = schedules_tab.square(wide)
    assert made.shape == (3, schedules_tab.SIDE, schedules_tab.SIDE)
    assert made[:, 48, 48].tolist() == [-1.0, -1.0, 1.0]
    assert made[:, 48, 3].tolist() == [-1.0, -1.0, 1.0]


# --- the page ----------------------------------------------------------------------------------------------------


def test_the_page_draws_what_is_chosen(tab: SchedulesTab) -> None:
    said, charts, table, rows = tab.draw(["linear", "edm"], "trailing", 7, False, None)
    assert "<b>!</b>" not in said
    assert charts.count("<svg") == 4
    assert charts.count("<circle") == 4 * 2 * 7
    assert "tabindex" not in charts
    assert table.count("<tr>") == 1 + 2 * 7
    assert rows.count("<img") == 2 * schedules_tab.COLUMNS
    assert rows.count("σ ") >= 2 * schedules_tab.COLUMNS


@pytest.mark.parametrize("steps", [0, None, 2.5, "many", 10_000])
def test_a_bad_number_of_steps_is_a_line_and_nothing_is_lost(tab: SchedulesTab, steps: object) -> None:
    said, *rest = tab.draw(["linear"], "trailing", steps, False, None)
    assert "steps must be" in said
    assert all(isinstance(one, dict) and one.get("__type__") == "update" for one in rest)


def test_an_upload_that_is_no_image_is_a_line(tab: SchedulesTab, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no image")
    said, *_ = tab.draw(["linear"], "trailing", 5, False, str(tmp_path / "a.png"))
    assert "image must be" in said


def test_the_first_look_is_drawn(tab: SchedulesTab) -> None:
    assert schedules_tab.first_charts().count("<svg") == 4
    assert "scaled_linear, call 1" in schedules_tab.first_table()
    rows = tab.open(list(schedules_tab.FIRST), schedules_tab.GRID, schedules_tab.STEPS, False, None)
    assert rows.count("<img") == len(schedules_tab.FIRST) * schedules_tab.COLUMNS
