"""The tab Trace: a scrubber over the steps of a run, and every number of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import gradio as gr
import torch
from PIL import Image
from torch import Tensor

from pellucid.core.errors import PellucidError
from pellucid.evidence.report.charts import Axis, Chart, Mark, Series
from pellucid.evidence.trace import previews, reading
from pellucid.evidence.trace.previews import Preview
from pellucid.evidence.trace.reading import Step, Trace
from pellucid.studio import html
from pellucid.studio.form import Shelf
from pellucid.studio.visitors import Sessions

_FITTED = 6  # steps whose x0 the colours are fitted on
_NAMES = {
    "x": "x, the input of the network",
    "x0": "x0, its estimate of the image",
    "eps": "eps, its estimate of the noise",
    "delta": "what guidance changed",
}
_EMPTY = html.block("<p class=note>Generate an image, or open a trace file: its steps appear here.</p>")


@dataclass
class Film:
    """A trace and how to show it; the images of a step are made when the step is first shown."""

    trace: Trace
    look: Preview | None
    made: dict[int, dict[str, Image.Image]] = field(default_factory=dict)

    @staticmethod
    def of(path: Path, vae: Any = None) -> Film:
        trace = reading.read(path, partial=True)
        if not trace.steps:
            raise PellucidError("trace must hold at least one step; got none.", "trace-empty")
        shown = previews.spaced([i for i in trace.has_images if 0 in trace.steps[i].images], _FITTED)
        if not shown:
            return Film(trace, None)
        return Film(trace, previews.preview_for(torch.stack([_of_first(trace, "x0", i) for i in shown]), vae))

    def images(self, index: int) -> dict[str, Image.Image]:
        if index not in self.made:
            self.made[index] = self.look_at(index)
        return self.made[index]

    def look_at(self, index: int) -> dict[str, Image.Image]:
        if self.look is None or not self.trace.has("x0", index):
            return {}
        step, look = self.trace.steps[index], self.look
        x, x0 = (_of_first(self.trace, name, index)[None] for name in ("x", "x0"))
        found = {"x": look.colours(x / math.hypot(step.level.alpha, step.level.sigma)), "x0": look.image(x0)}
        if self.trace.has("eps", index):
            found["eps"] = look.colours(_of_first(self.trace, "eps", index)[None])
        if self.trace.has("delta", index):
            change = torch.nan_to_num(look.change(x0, _of_first(self.trace, "delta", index)[None]))
            found["delta"] = previews.signed(change, float(change.abs().max()))
        return {name: html.of_unit(one) for name, one in found.items()}


def _of_first(trace: Trace, name: str, index: int) -> Tensor:
    """A tensor of a step, of the first image."""
    return torch.nan_to_num(trace.tensor(name, index)[trace.steps[index].of(0)])


# --- what is shown ----------------------------------------------------------------------------------------------


def _frames(film: Film, index: int) -> str:
    made = film.images(index)
    if not made:
        return html.block("<p class=note>This trace holds numbers only: record with --trace-tensors for images.</p>")
    cells = (html.frame(made.get(name), _NAMES[name], _NAMES[name], "none") for name in _NAMES)
    return html.block(f'<div class="four">{"".join(cells)}</div>')


def _numbers(film: Film, index: int) -> str:
    step = film.trace.steps[index]
    place, size = step.of(0), math.sqrt(math.prod(film.trace.header.shape))
    rows = [
        ("level: alpha, sigma", f"{step.level.alpha:.5f}, {step.level.sigma:.5f}"),
        ("λ = log(alpha / sigma)", f"{step.level.lam:+.4f}"),
        ("time passed to the network", html.number(step.time)),
        *((f"size of {name} (rms)", html.number(step.norms[name][place] / size)) for name in _NAMES),
        ("cosine of cond and uncond", html.number(step.cosine[place])),
        ("x0 saturated", f"{step.saturation[place]:.2%}"),
        ("local error", html.number(step.local_error[place])),
        *((f"time, {work}", html.seconds(spent)) for work, spent in step.seconds.items()),
        *(() if step.memory is None else [("memory", f"{step.memory / 2**20:,.0f} MiB")]),
    ]
    return html.block(html.table(("step " + str(index + 1), ""), rows))


def _curve(film: Film, index: int) -> str:
    """Where the steps lie on the schedule: λ over the timestep passed to the network, this step marked."""
    steps = film.trace.steps
    times, lams = [step.time for step in steps], [_bounded(step) for step in steps]
    labels = [
        f"step {i + 1}: λ {lam:+.2f} at {time:.1f}" for i, (time, lam) in enumerate(zip(times, lams, strict=True))
    ]
    here = Mark(f"step {index + 1}", times[index], lams[index])
    chart = Chart(
        "Where the step lies",
        [Series("calls of the network", times, lams, labels=labels)],
        Axis("time passed to the network"),
        Axis("λ, log of signal to noise"),
        [here],
    )
    return html.block(chart.html())


def _bounded(step: Step) -> float:
    lam = step.level.lam
    return max(-12.0, min(12.0, lam)) if math.isfinite(lam) else math.copysign(12.0, lam)


class TraceTab:
    def __init__(self, shelf: Shelf, sessions: Sessions, model: gr.Dropdown, ran: gr.State) -> None:
        self.shelf, self.sessions = shelf, sessions
        self.film = lru_cache(maxsize=16)(self.open)
        with gr.Row():
            which = gr.Dropdown([], label="Run", elem_id="trace-run", scale=3)
            given = gr.UploadButton("Open a trace file", file_types=[".safetensors"], elem_id="trace-file", scale=1)
        step = gr.Slider(1, 20, 1, step=1, label="Step", elem_id="trace-step")
        shown = gr.HTML(_EMPTY, elem_id="trace-frames")
        with gr.Row():
            with gr.Column(min_width=320):
                table = gr.HTML("", elem_id="trace-numbers")
            with gr.Column(min_width=320):
                place = gr.HTML("", elem_id="trace-curve")
        ran.change(self.listed, ran, which, show_progress="hidden")
        given.upload(self.took, given, which, show_progress="hidden")
        which.change(self.chosen, [model, which], [step, shown, table, place], show_progress="hidden")
        step.change(
            self.at, [model, which, step], [shown, table, place], show_progress="hidden", trigger_mode="always_last"
        )

    def open(self, path: Path, model: str) -> Film:
        pipe = self.shelf.held.get(model)
        return Film.of(path, None if pipe is None else pipe.components.vae)

    def listed(self, request: gr.Request, name: str) -> Any:
        return gr.Dropdown(list(reversed(self.sessions.of(request.session_hash).runs)), value=name)

    def took(self, request: gr.Request, path: str) -> Any:
        with html.plainly():
            session = self.sessions.of(request.session_hash)
            reading.read(path, partial=True)
            name = Path(path).name
            session.runs[name] = Path(path)
            return self.listed(request, name)

    def path_of(self, request: gr.Request, name: str | None) -> Path | None:
        return self.sessions.of(request.session_hash).runs.get(name or "")

    def chosen(self, request: gr.Request, model: str, name: str) -> tuple[Any, ...]:
        with html.plainly():
            path = self.path_of(request, name)
            if path is None:
                return gr.skip(), _EMPTY, "", ""
            count = len(self.film(path, model).trace.steps)
            return gr.Slider(1, max(count, 2), count, step=1), *self.at(request, model, name, count)

    def at(self, request: gr.Request, model: str, name: str, step: float) -> tuple[str, str, str]:
        with html.plainly():
            path = self.path_of(request, name)
            if path is None:
                return _EMPTY, "", ""
            film = self.film(path, model)
            index = max(0, min(int(step), len(film.trace.steps)) - 1)
            return _frames(film, index), _numbers(film, index), _curve(film, index)
