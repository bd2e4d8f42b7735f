"""The tab Schedules: β, ᾱ, SNR and λ with a grid's points on them, and an image noised along them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import gradio as gr
import numpy as np
from gradio.context import Context
from torch import Tensor

from pellucid.core import schedule as schedules
from pellucid.core.errors import PellucidError
from pellucid.core.schedule import Array
from pellucid.core.wording import short
from pellucid.evidence.study import charts
from pellucid.evidence.study.page_chart import Axis, Chart, Series
from pellucid.studio import asking, html, noising, words
from pellucid.studio.noising import Curve, Curves, Noised
from pellucid.studio.session import Sessions
from pellucid.studio.shelf import Shelf

FIRST = ("scaled_linear", "cosine", "flow")
GRID, STEPS = "trailing", 10
# What is drawn: the column, its title, whether over a log axis, and the least value that is worth the room.
PANELS = (
    ("beta", "β, the noise that a step adds", True, 1e-7),
    ("alpha_bar", "ᾱ, the signal that is left", False, -math.inf),
    ("snr", "SNR = ᾱ / (1 − ᾱ)", True, 1e-9),
    ("lam", "λ = ½·log SNR", False, -10.5),
)
TIME = "training time, normalised: data → noise"
STYLE = """<style>
.plc .panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); gap: 8px 20px; }
.plc .panels h3 { font-size: 15px; margin: 8px 0 4px; }
.plc .panels text { font: 12px system-ui, sans-serif; fill: #44505c; }
.plc .panels svg { width: 100%; }
.plc .panels .legend { display: none !important; }
.plc .key { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 14px; }
.plc .key i, .plc .noised i { display: inline-block; width: 11px; height: 11px; border-radius: 50%; margin-right: 6px; }
.plc .noised { display: grid; grid-template-columns: repeat(8, minmax(104px, 1fr)); gap: 8px; }
.plc .noised b { grid-column: 1 / -1; margin-top: 8px; }
.plc .noised img { width: 100%; aspect-ratio: 1; image-rendering: pixelated; border-radius: 6px; }
.plc .noised figcaption { font-size: 12px; line-height: 1.35; }
.plc .warning { min-height: 24px; font-size: 14px; }
@media (max-width: 640px) { .plc .panels text { font-size: 17px; } }
</style>"""


class SchedulesTab:
    """Everything here is quick: it is drawn again whenever something is chosen. The images, which are heavy, come
    when the tab is opened: below them is nothing that could move."""

    def __init__(self, shelf: Shelf, sessions: Sessions, model: gr.Dropdown, ran: gr.State) -> None:
        known, place = list(schedules.names()), Context.block
        grids = [name for name in asking.grid_choices() if name != asking.OWN]
        with gr.Row():
            names = gr.Dropdown(
                known,
                value=list(FIRST),
                multiselect=True,
                max_choices=noising.MOST,
                label="Schedules",
                info=f"at most {noising.MOST}",
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
            info="shift and stretch √ᾱ so that no signal is left at the last time (discrete schedules)",
            elem_id="schedules-zero",
        )
        said = gr.HTML(notes(()), elem_id="schedules-notes")
        shown = gr.HTML(first_charts, elem_id="schedules-charts")
        with gr.Accordion("The grid's points as numbers", open=False):
            table = gr.HTML(first_table, elem_id="schedules-table")
        with gr.Row():
            with gr.Column(scale=1, min_width=200):
                given = gr.Image(
                    label="Image (else a scene)",
                    type="filepath",
                    sources=["upload", "clipboard"],
                    height=200,
                    elem_id="schedules-picture",
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
        """The images alone; what is wrong was said when it was chosen."""
        with words.plainly():
            try:
                return images(*asked_for(*chosen))
            except PellucidError:
                return gr.skip()

    def draw(self, *chosen: Any) -> tuple[Any, ...]:
        """What is wrong is said in a line; what was drawn before stays."""
        with words.plainly():
            try:
                found, x0 = asked_for(*chosen)
            except PellucidError as error:
                return notes((str(error),)), gr.skip(), gr.skip(), gr.skip()
            return notes(found.notes), panels(found), numbers(found), images(found, x0)


def asked_for(names: list[str], grid: str, steps: Any, zero: bool, given: str | None) -> tuple[Curves, Tensor]:
    """What is chosen: the curves, and the image that is noised along them."""
    found = noising.curves(names or [], grid, steps, zero)
    return found, noising.scene() if given is None else noising.square(asking.upload(given))


# --- what is shown ----------------------------------------------------------------------------------------------


@cache
def first() -> Curves:
    return noising.curves(FIRST, GRID, STEPS, False)


@cache
def first_charts() -> str:
    return panels(first())


@cache
def first_table() -> str:
    return numbers(first())


def notes(lines: Sequence[str]) -> str:
    said = "<br>".join(html.text(line) for line in lines)
    return html.block(f'{STYLE}<div class="warning" role="status">{f"<b>!</b> {said}" if said else ""}</div>')


def colour(number: int) -> str:
    return charts.COLOURS[number % len(charts.COLOURS)]


def panels(found: Curves) -> str:
    """Four charts; a line a schedule, a dot a call of the model."""
    key = "".join(
        f'<span><i style="background:{colour(i)}"></i>{html.text(one.name)}</span>' for i, one in enumerate(found.found)
    )
    drawn = "".join(chart(found.found, *panel).html() for panel in PANELS)
    drawn = drawn.replace(' tabindex="0"', "")  # hundreds of stops on the way down; the table below has the numbers
    note = "A dot is a call of the model. Where no signal is left, SNR is 0 and λ −∞: these have no place to be drawn."
    return html.block(f'{STYLE}<div class="key">{key}</div><div class="panels">{drawn}</div><p class=note>{note}</p>')


def chart(found: Sequence[Curve], column: str, title: str, log: bool, least: float) -> Chart:
    series = []
    for i, one in enumerate(found):
        look = {"colour": colour(i)}
        line = Series(one.name, plain(one.time), above(one.columns[column], least), points=False, **look)
        dots = Series(f"{one.name}, calls", plain(one.call_time), above(one.calls[column], least), line=False, **look)
        series += [line, dots]
    return Chart(title, series, Axis(TIME), Axis("", log=log))


def plain(values: Array) -> list[float]:
    return [float(value) for value in values]


def above(values: Array, least: float) -> list[float]:
    """What is too small to show, or infinite, is left out."""
    return plain(np.where(np.isfinite(values) & (values >= least), values, np.nan))


def numbers(found: Curves) -> str:
    """Each call of the model: the time that it is told, and how much signal is left there."""
    rows = []
    for one in found.found:
        low, high = one.schedule.span
        for i, time in enumerate(one.call_time):
            told = short(float(low + time * (high - low)), 5)
            values = (short(float(one.calls[name][i])) for name in ("beta", "alpha_bar", "snr", "lam"))
            rows.append((f"{one.name}, call {i + 1}", told, *values))
    return html.block(html.table(("", "time told", "β", "ᾱ", "SNR", "λ"), rows))


def images(found: Curves, x0: Tensor) -> str:
    """Rows are schedules, columns are times; one noise for all."""
    cells = []
    for i, one in enumerate(found.found):
        cells.append(f'<b><i style="background:{colour(i)}"></i>{html.text(one.name)}</b>')
        cells += [tile(one.name, noised) for noised in noising.noised(one.schedule, x0)]
    note = "x = α·x0 + σ·eps, one noise for all, shown at one size; the times are even from the first to the last."
    return html.block(
        f'{STYLE}<div class="wide"><div class="noised">{"".join(cells)}</div></div><p class=note>{note}</p>'
    )


def tile(name: str, noised: Noised) -> str:
    alt = html.text(f"{name} at time {noised.time:.4g}")
    level = f"α {short(noised.level.alpha, 3)}<br>σ {short(noised.level.sigma, 3)}"
    image = f'<img alt="{alt}" src="{html.source(noised.image, 0)}">'
    return f"<figure>{image}<figcaption>t {short(noised.time, 4)}<br>{level}</figcaption></figure>"
