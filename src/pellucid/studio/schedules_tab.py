"""The tab Schedules: β, ᾱ, SNR and λ with a grid's points on them, and an image noised along them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import gradio as gr
import numpy as np
import torch
from gradio.context import Context
from PIL import Image, ImageOps
from torch import Tensor

from pellucid.core import grid as grids
from pellucid.core import schedule as schedules
from pellucid.core.errors import PellucidError, rule
from pellucid.core.noise import Philox
from pellucid.core.schedule import Array, Level, Schedule
from pellucid.core.wording import short
from pellucid.evidence.report import charts
from pellucid.evidence.report.charts import Axis, Chart, Series
from pellucid.pipeline.images import flatten, to_images, to_tensor
from pellucid.scenes import Scene, SceneObject, Scenes, render
from pellucid.studio import form, html
from pellucid.studio.form import Shelf
from pellucid.studio.visitors import Sessions

# --- Curves and noisy images ----------------------------------------------------------------------------------------

_MOST = 6  # schedules at a time
_MOST_STEPS = 200  # points of a grid that can still be distinguished
_DRAWN = 160  # points of a curve
COLUMNS = 8  # times at which an image is noised
SIDE = 96  # pixels of it
_SEED = 7
_SCENE = Scene(
    (SceneObject("star", "red", "solid", 0.38, 0.42, 0.24), SceneObject("circle", "blue", "striped", 0.7, 0.7, 0.17))
)


@dataclass(frozen=True)
class Curve:
    """A schedule as columns over normalised time (0 is data, 1 is noise), and a grid's points on it."""

    name: str
    schedule: Schedule
    time: Array
    columns: dict[str, Array]
    call_time: Array  # empty where the schedule does not carry the grid
    calls: dict[str, Array]


@dataclass(frozen=True)
class Curves:
    """The curves, and a line for each thing that could not be."""

    found: tuple[Curve, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class NoisyImage:
    """An image at a time of a schedule, scaled to one size for the eye."""

    time: float
    level: Level
    image: Image.Image


def curves(names: Sequence[str], grid: str, steps: Any, zero_snr: bool) -> Curves:
    """The chosen schedules; what one of them cannot take is said and left out for that one alone."""
    if not 1 <= len(names) <= _MOST:
        raise PellucidError(rule("schedules", f"one to {_MOST}", len(names)), "schedules")
    count = _steps_of(steps)
    found, notes = [], []
    for name in names:
        schedule = schedules.make(name)
        if zero_snr:
            try:
                schedule = schedules.make(schedule, zero_snr=True)
            except PellucidError as error:
                notes.append(f"{name} is drawn as it is: {error}")
        times, ratios = np.empty(0), np.empty(0)
        try:
            ratios, times = grids.points(schedule, grids.named(grid), count)
        except PellucidError as error:
            notes.append(f"{name} is drawn without the grid {grid}: {error}")
        found.append(_curve(name, schedule, times, ratios))
    return Curves(tuple(found), tuple(notes))


def _steps_of(given: Any) -> int:
    """The number of points of the grid, bounded by what the charts can show."""
    try:
        steps = form.steps_of(given)
    except PellucidError:
        steps = 0
    if not 1 <= steps <= _MOST_STEPS:
        got = "none" if given in (None, "") else given
        raise PellucidError(rule("steps", f"a whole number from 1 to {_MOST_STEPS} here", got), "steps")
    return steps


def _curve(name: str, schedule: Schedule, times: Array, ratios: Array) -> Curve:
    table = schedule.table()
    low, high = schedule.span
    kept = np.unique(np.linspace(0, len(table["time"]) - 1, _DRAWN).round().astype(np.int64))
    with np.errstate(divide="ignore"):
        calls = {
            "beta": np.interp(times, table["time"], table["beta"]),
            "alpha_bar": 1.0 / (1.0 + ratios**2),
            "snr": 1.0 / ratios**2,
            "lam": -np.log(ratios),
        }
    columns = {column: table[column][kept] for column in calls}
    time = (table["time"][kept] - low) / (high - low)
    return Curve(name, schedule, time, columns, (np.asarray(times) - low) / (high - low), calls)


def scene() -> Tensor:
    """(3, S, S): the image that is noised where none is given."""
    return render(Scenes.of([_SCENE]), SIDE)[0]


def square(image: Image.Image) -> Tensor:
    """(3, S, S): the middle of an uploaded image."""
    return to_tensor(ImageOps.fit(flatten(image), (SIDE, SIDE)))[0]


def noisy_images(schedule: Schedule, x0: Tensor) -> list[NoisyImage]:
    """x = alpha·x0 + sigma·eps at a few times, evenly, with one noise; shown at the size that x0 has."""
    eps = Philox(_SEED).first(x0.shape, x0, [0])[0]
    made = []
    for time in np.linspace(*schedule.span, COLUMNS):
        level = schedule.level(float(time))
        x = level.alpha * x0 + level.sigma * eps
        shown = x / float(np.hypot(level.alpha, level.sigma))
        made.append(NoisyImage(float(time), level, to_images(torch.clamp(shown, -1, 1)[None])[0]))
    return made


# --- The tab --------------------------------------------------------------------------------------------------------

FIRST = ("scaled_linear", "cosine", "flow")
GRID, STEPS = "trailing", 10
# What is drawn: the column, its title, whether over a log axis, and the least value that is worth the room.
_PANELS = (
    ("beta", "β, the noise that a step adds", True, 1e-7),
    ("alpha_bar", "ᾱ, the signal that is left", False, -math.inf),
    ("snr", "SNR = ᾱ / (1 − ᾱ)", True, 1e-9),
    ("lam", "λ = ½·log SNR", False, -10.5),
)
_TIME = "training time, normalised: data → noise"
_STYLE = """<style>
.plc .panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); gap: 8px 20px; }
.plc .key { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 14px; }
.plc .key i, .plc .noised i { display: inline-block; width: 11px; height: 11px; border-radius: 50%; margin-right: 6px; }
.plc .noised { display: grid; grid-template-columns: repeat(8, minmax(104px, 1fr)); gap: 8px; }
.plc .noised b { grid-column: 1 / -1; margin-top: 8px; }
.plc .noised img { width: 100%; aspect-ratio: 1; image-rendering: pixelated; border-radius: 6px; }
.plc .noised figcaption { font-size: 12px; line-height: 1.35; }
.plc .warning { min-height: 24px; font-size: 14px; }
</style>"""


class SchedulesTab:
    """Everything here is quick: it is drawn again whenever something is chosen. The images, which are heavy, come
    when the tab is opened: below them is nothing that could move."""

    def __init__(self, shelf: Shelf, sessions: Sessions, model: gr.Dropdown, ran: gr.State) -> None:
        known, place = list(schedules.names()), Context.block
        grids = [name for name in form.grid_choices() if name != form.OWN]
        with gr.Row():
            names = gr.Dropdown(
                known,
                value=list(FIRST),
                multiselect=True,
                max_choices=_MOST,
                label="Schedules",
                info=f"at most {_MOST}",
                scale=4,
                min_width=300,
                elem_id="schedules-names",
            )
            where = {"info": "where the model is called", "min_width": 150, "elem_id": "schedules-grid"}
            grid = gr.Dropdown(grids, value=GRID, label="Grid", **where)
            steps = gr.Number(STEPS, label="Steps", info="calls of the model", min_width=110, elem_id="schedules-steps")
        zero = gr.Checkbox(
            False,
            label="Zero terminal SNR",
            info="shifts and stretches √ᾱ so that no signal is left at the last timestep (discrete schedules)",
            elem_id="schedules-zero",
        )
        said = gr.HTML(_notes(()), elem_id="schedules-notes")
        shown = gr.HTML(first_charts, elem_id="schedules-charts")
        with gr.Accordion("The grid's points as numbers", open=False):
            table = gr.HTML(first_table, elem_id="schedules-table")
        with gr.Row():
            with gr.Column(scale=1, min_width=200):
                given = gr.Image(
                    label="Image (a scene if empty)",
                    type="filepath",
                    sources=["upload", "clipboard"],
                    height=200,
                    elem_id="schedules-image",
                )
            with gr.Column(scale=5, min_width=320):
                rows = gr.HTML("", elem_id="schedules-noised")
        inputs = [names, grid, steps, zero, given]
        outputs = [said, shown, table, rows]
        if isinstance(place, gr.Tab):
            place.select(self.open, inputs, rows, show_progress="hidden")
        for control in inputs:
            control.change(self.draw, inputs, outputs, show_progress="hidden", trigger_mode="always_last")

    def open(self, *chosen: Any) -> Any:
        """The images alone; an error was shown when the wrong value was chosen."""
        with html.plainly():
            try:
                return _images(*_asked_for(*chosen))
            except PellucidError:
                return gr.skip()

    def draw(self, *chosen: Any) -> tuple[Any, ...]:
        """An error is one line; what was drawn before stays."""
        with html.plainly():
            try:
                found, x0 = _asked_for(*chosen)
            except PellucidError as error:
                return _notes((str(error),)), gr.skip(), gr.skip(), gr.skip()
            return _notes(found.notes), panels(found), _numbers(found), _images(found, x0)


def _asked_for(names: list[str], grid: str, steps: Any, zero: bool, given: str | None) -> tuple[Curves, Tensor]:
    """What is chosen: the curves, and the image that is noised along them."""
    found = curves(names or [], grid, steps, zero)
    return found, scene() if given is None else square(form.upload(given))


# --- what is shown ----------------------------------------------------------------------------------------------


@cache
def first() -> Curves:
    return curves(FIRST, GRID, STEPS, False)


@cache
def first_charts() -> str:
    return panels(first())


@cache
def first_table() -> str:
    return _numbers(first())


def _notes(lines: Sequence[str]) -> str:
    said = "<br>".join(html.text(line) for line in lines)
    return html.block(f'{_STYLE}<div class="warning" role="status">{f"<b>!</b> {said}" if said else ""}</div>')


def _colour(number: int) -> str:
    return charts.COLOURS[number % len(charts.COLOURS)]


def panels(found: Curves) -> str:
    """Four charts, with one line per schedule and one dot per call of the model."""
    key = "".join(
        f'<span><i style="background:{_colour(i)}"></i>{html.text(one.name)}</span>'
        for i, one in enumerate(found.found)
    )
    drawn = "".join(_chart(found.found, *panel).html() for panel in _PANELS)
    drawn = drawn.replace(' tabindex="0"', "")  # hundreds of stops on the way down; the table below has the numbers
    note = "Each dot is a model call. Where no signal is left, SNR is 0 and λ is −∞, which cannot be drawn."
    return html.block(f'{_STYLE}<div class="key">{key}</div><div class="panels">{drawn}</div><p class=note>{note}</p>')


def _chart(found: Sequence[Curve], column: str, title: str, log: bool, least: float) -> Chart:
    series = []
    for i, one in enumerate(found):
        look = {"colour": _colour(i)}
        line = Series(one.name, _plain(one.time), _above(one.columns[column], least), points=False, **look)
        dots = Series(f"{one.name}, calls", _plain(one.call_time), _above(one.calls[column], least), line=False, **look)
        series += [line, dots]
    return Chart(title, series, Axis(_TIME), Axis("", log=log), named=False)


def _plain(values: Array) -> list[float]:
    return [float(value) for value in values]


def _above(values: Array, least: float) -> list[float]:
    """What is too small to show, or infinite, is left out."""
    return _plain(np.where(np.isfinite(values) & (values >= least), values, np.nan))


def _numbers(found: Curves) -> str:
    """Each call of the model: its timestep, and how much signal is left there."""
    rows = []
    for one in found.found:
        low, high = one.schedule.span
        for i, time in enumerate(one.call_time):
            timestep = short(float(low + time * (high - low)), 5)
            values = (short(float(one.calls[name][i])) for name in ("beta", "alpha_bar", "snr", "lam"))
            rows.append((f"{one.name}, call {i + 1}", timestep, *values))
    return html.block(html.table(("", "timestep", "β", "ᾱ", "SNR", "λ"), rows))


def _images(found: Curves, x0: Tensor) -> str:
    """Rows are schedules, columns are times; one noise for all."""
    cells = []
    for i, one in enumerate(found.found):
        cells.append(f'<b><i style="background:{_colour(i)}"></i>{html.text(one.name)}</b>')
        cells += [_tile(one.name, noised) for noised in noisy_images(one.schedule, x0)]
    note = "x = α·x0 + σ·eps with the same noise for all, drawn at the same scale; the times are evenly spaced."
    return html.block(
        f'{_STYLE}<div class="wide"><div class="noised">{"".join(cells)}</div></div><p class=note>{note}</p>'
    )


def _tile(name: str, noised: NoisyImage) -> str:
    alt = html.text(f"{name} at time {noised.time:.4g}")
    level = f"α {short(noised.level.alpha, 3)}<br>σ {short(noised.level.sigma, 3)}"
    image = f'<img alt="{alt}" src="{html.source(noised.image, 0)}">'
    return f"<figure>{image}<figcaption>t {short(noised.time, 4)}<br>{level}</figcaption></figure>"
