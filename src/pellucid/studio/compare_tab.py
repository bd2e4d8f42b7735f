"""The tab Compare: two set-ups of one seed side by side, where they part and why; and X/Y sheets."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image

from pellucid.core.batch import StepSeen
from pellucid.core.errors import PellucidError, rule
from pellucid.models.guidance import guarded
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.prepare import make_plan
from pellucid.pipeline.recipe import write_png
from pellucid.pipeline.request import Request
from pellucid.pipeline.sheet import AXES, Axis, axes_of, cell_fields, cells, draw_sheet, shared_settings
from pellucid.studio import comparison, form, html
from pellucid.studio.comparison import SIDES, ComparisonNews, ComparisonResult
from pellucid.studio.form import Form, Shelf
from pellucid.studio.generate_tab import READY, Preview, RunResult, StepNews, guard
from pellucid.studio.html import status
from pellucid.studio.visitors import Job, Session, Sessions

# --- X/Y sheets -----------------------------------------------------------------------------------------------------

MOST_CELLS = 36
_NAMES = ("steps", "guidance", "sampler", "grid", "dialect", "seed", "clip_skip", "prompt", "negative", "noise")
_BLANK = "#e9edf2"  # a cell that has not run yet
_CHECKS = {"steps": form.steps_of, "prompt": form.prompt_of}


@dataclass(frozen=True)
class SheetPlan:
    """The axes, the text that they were read from, and the request of each cell, row by row."""

    text: str
    axes: tuple[Axis, ...]
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class SheetNews:
    """A sheet as far as it has come: the cells that are made, and how many model calls of all."""

    axes: tuple[Axis, ...]
    images: tuple[Image.Image, ...]
    cells: int
    calls: int
    of: int
    seconds: float

    @property
    def words(self) -> str:
        left = self.seconds / max(self.calls, 1) * (self.of - self.calls)
        at = min(len(self.images) + 1, self.cells)
        return f"cell {at} of {self.cells} · call {self.calls} of {self.of} · {left:.1f} s left"

    def draw(self) -> Image.Image:
        """The sheet so far, with room for what is to come."""
        size = self.images[0].size if self.images else (128, 128)
        blanks = [Image.new("RGB", size, _BLANK)] * (self.cells - len(self.images))
        return draw_sheet([*self.images, *blanks], self.axes)


@dataclass(frozen=True)
class SheetResult:
    image: Image.Image
    file: Path
    notes: tuple[str, ...]
    seconds: float


def sheet_of(text: str, setup: Form) -> SheetPlan:
    """The requests of a sheet; all cells share one seed, unless the seed varies."""
    base = setup.request()
    held = {one.name: getattr(base, one.name) for one in fields(base) if getattr(base, one.name) != _default(one)}
    axes = axes_of(text or "", base.sampler, {name: AXES[name] for name in _NAMES})
    every = cells(axes)
    if len(every) > MOST_CELLS:
        advice = "Leave out some values; `pellucid sample --grid-of` draws larger ones."
        raise PellucidError(rule("cells", f"at most {MOST_CELLS} on this page", len(every), advice), "grid-cells")
    for axis in axes:
        for value in axis.values if axis.name in _CHECKS else ():
            _CHECKS[axis.name](value)
    requests = [Request(**cell_fields(held, settings)) for settings in every]
    if setup.guarded:
        requests = [replace(one, guidance=guarded(one.guidance)) for one in requests]
        if len({one.guidance.text() for one in requests}) < len({str(cell.get("guidance")) for cell in every}):
            must = "all different with the guard on, which caps at 7"
            raise PellucidError(rule("values of guidance", must, text), "grid-value")
    return SheetPlan(text, axes, tuple(requests))


def _default(one: Any) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def run(pipe: Pipeline, sheet: SheetPlan, session: Session, job: Job) -> SheetResult:
    """Every cell, then the sheet. All are planned before the first is run."""
    began = time.perf_counter()
    of = sum(make_plan(pipe.components, request).plan.nfe for request in sheet.requests)
    images: list[Image.Image] = []
    recipes, notes, calls = [], [], 0

    def tell() -> None:
        taken = time.perf_counter() - began
        job.tell(SheetNews(sheet.axes, tuple(images), len(sheet.requests), calls, of, taken))

    def see(_: StepSeen) -> None:
        nonlocal calls
        calls += 1
        tell()

    for request in sheet.requests:
        made = pipe.run(replace(request, observers=(see,), cancelled=job.cancelled))
        images.append(made.images[0])
        recipes.append(made.recipe)
        notes += made.notes
        tell()
    title = None if any(axis.name == "prompt" for axis in sheet.axes) else recipes[0].prompt
    drawn = draw_sheet(images, sheet.axes, title=title, footer=shared_settings(recipes))
    file = session.new_file(".png")
    write_png(drawn, file, recipes[0], sheet.text)
    return SheetResult(drawn, file, tuple(dict.fromkeys(notes)), time.perf_counter() - began)


# --- The tab --------------------------------------------------------------------------------------------------------

_TAB, _SHEET = "compare", "sheet"
_PROMPT = "a large red star on a white background"
_FIRST = (Form(sampler="ddim", grid="trailing", steps=12), Form(sampler="dpmpp_2m", grid="trailing", steps=12))
_FIRST_AXES = "steps=5,10,20 x guidance=1,4,7"
_HELD = 5  # controls of a side


class CompareTab:
    """Builds the tab; its handlers use the loaded models and the sessions."""

    def __init__(self, shelf: Shelf, sessions: Sessions, model: gr.Dropdown, ran: gr.State) -> None:
        self.shelf, self.sessions = shelf, sessions
        with gr.Row():
            prompt = gr.Textbox(_PROMPT, label="Prompt", lines=1, max_lines=4, scale=5, elem_id="compare-prompt")
            seed = gr.Textbox("7", label="Seed of both", placeholder="random", min_width=120, elem_id="compare-seed")
        with gr.Row():
            sides = [self.side(name, first) for name, first in zip(SIDES, _FIRST, strict=True)]
        asked = [model, prompt, seed, *sides[0], *sides[1]]
        with gr.Tab("Side by side"):
            self.both(asked, ran)
        with gr.Tab("X/Y sheet"):
            self.sheets(asked)

    def side(self, name: str, first: Form) -> list[Any]:
        mark = f"compare-{name.lower()}"
        with gr.Column(min_width=300, elem_id=mark):
            gr.Markdown(f"### Set-up {name}")
            with gr.Row():
                sampler = _choice(form.sampler_choices(), first.sampler, f"Sampler of {name}", f"{mark}-sampler")
                grid = _choice(form.grid_choices(), first.grid, f"Grid of {name}", f"{mark}-grid")
            with gr.Row():
                steps = gr.Number(first.steps, label=f"Steps of {name}", min_width=100, elem_id=f"{mark}-steps")
                about = {"label": f"Guidance of {name}", "min_width": 180, "elem_id": f"{mark}-guidance"}
                scale = gr.Slider(0, form.MOST_SCALE, first.guidance, step=0.1, **about)
            guarded = gr.Checkbox(False, label=f"{name} guarded", info=html.GUARDED, elem_id=f"{mark}-guarded")
            guarded.change(guard, [guarded, scale], scale, show_progress="hidden")
        return [sampler, grid, steps, scale, guarded]

    def both(self, asked: list[Any], ran: gr.State) -> None:
        with gr.Row():
            go = gr.Button("Run both", variant="primary", elem_id="compare-run")
            stop = gr.Button("Cancel", variant="stop", elem_id="compare-cancel")
        said = gr.HTML(READY, elem_id="compare-status")
        shown = gr.HTML(comparison.NOTHING, elem_id="compare-images")
        with gr.Row():
            files = [
                gr.DownloadButton(
                    f"Download {name} with recipe", interactive=False, elem_id=f"compare-download-{name.lower()}"
                )
                for name in SIDES
            ]
        verdict = gr.HTML(comparison.EMPTY_FILM, elem_id="compare-verdict")
        film = gr.HTML("", elem_id="compare-film")
        apart = gr.HTML("", elem_id="compare-distance")
        plans = gr.HTML("", elem_id="compare-plans")
        outputs = [shown, said, *files, verdict, film, apart, plans, ran]
        go.click(self.compare, asked, outputs, show_progress="hidden", concurrency_limit=4)
        stop.click(self.cancel, None, [said], queue=False)

    def sheets(self, asked: list[Any]) -> None:
        names = ", ".join(_NAMES)
        axes = gr.Textbox(
            _FIRST_AXES,
            label="What varies: across x down",
            info=f"around set-up A: {names}, or a number of its sampler; at most {MOST_CELLS} cells",
            elem_id="sheet-axes",
        )
        with gr.Row():
            go = gr.Button("Draw the sheet", variant="primary", elem_id="sheet-run")
            stop = gr.Button("Cancel", variant="stop", elem_id="sheet-cancel")
        said = gr.HTML(READY, elem_id="sheet-status")
        shown = gr.HTML(comparison.sheet(None), elem_id="sheet-image")
        file = gr.DownloadButton("Download with recipe", interactive=False, elem_id="sheet-download")
        for event in (go.click, axes.submit):
            event(self.draw, [*asked, axes], [shown, said, file], show_progress="hidden", concurrency_limit=4)
        stop.click(self.cancel_sheet, None, [said], queue=False)

    # --- what happens -------------------------------------------------------------------------------------------

    @html.settled(9, 1)
    def compare(self, request: gr.Request, model: str, *given: Any) -> Iterator[tuple[Any, ...]]:
        session = self.sessions.of(request.session_hash)
        rest = (gr.skip(),) * 7
        setups = setups_of(*given)
        if model not in self.shelf.held:
            yield gr.skip(), status(f"loading {model} …"), *rest
        pipe = self.shelf.pipe(model)
        preview = Preview(pipe)
        yield gr.skip(), status("starting …"), *rest
        for news in session.follow(_TAB, lambda job: comparison.run(pipe, setups, session, job)):
            if isinstance(news, ComparisonNews):
                yield _so_far(news, preview), status(news.words, news.part), *rest
            else:
                yield _finished(news, setups[0].prompt, session)

    @html.settled(3, 1)
    def draw(self, request: gr.Request, model: str, *given: Any) -> Iterator[tuple[Any, ...]]:
        session = self.sessions.of(request.session_hash)
        *held, axes = given
        sheet = sheet_of(axes, setups_of(*held)[0])
        if model not in self.shelf.held:
            yield gr.skip(), status(f"loading {model} …"), gr.skip()
        pipe = self.shelf.pipe(model)
        yield gr.skip(), status("starting …"), gr.DownloadButton(interactive=False)
        drawn = -1
        for news in session.follow(_SHEET, lambda job: run(pipe, sheet, session, job)):
            if isinstance(news, SheetNews):
                fresh, drawn = len(news.images) != drawn, len(news.images)
                image = comparison.sheet(news.draw(), "the sheet so far") if fresh else gr.skip()
                yield image, status(news.words, news.calls / news.of), gr.skip()
                continue
            file = gr.DownloadButton(value=str(news.file), interactive=True)
            yield comparison.sheet(news.image, f"a sheet of {sheet.text}"), html.done(news), file

    def cancel(self, request: gr.Request) -> str:
        self.sessions.of(request.session_hash).cancel(_TAB)
        return status("cancelled")

    def cancel_sheet(self, request: gr.Request) -> str:
        self.sessions.of(request.session_hash).cancel(_SHEET)
        return status("cancelled")


def _choice(names: Sequence[str], value: str, label: str, mark: str) -> gr.Dropdown:
    return gr.Dropdown(names, value=value, label=label, min_width=130, elem_id=mark)


def setups_of(prompt: str, seed: Any, *given: Any) -> tuple[Form, Form]:
    """The two set-ups that the controls hold, in their order; an empty seed is one random seed for both."""
    whole = form.seed_of(seed)
    held = (given[:_HELD], given[_HELD:])
    a, b = (
        Form(prompt=prompt, sampler=sampler, grid=grid, steps=steps, guidance=scale, guarded=guarded, seed=whole)
        for sampler, grid, steps, scale, guarded in held
    )
    return a, b


def _so_far(news: ComparisonNews, preview: Preview) -> str:
    """Both sides while they run: x0 of the latest step, or the image where it is done."""
    shown = [preview.image(one.x0) if isinstance(one, StepNews) else one and one.image for one in news]
    said = [
        _about(one) if isinstance(one, RunResult) else "x0, the network's estimate of the image" if one else ""
        for one in news
    ]
    return comparison.pair(shown, said)


def _about(made: RunResult) -> str:
    recipe = made.recipe
    grid = recipe.grid.get("name", "")
    return f"{recipe.sampler}, {grid}, {recipe.steps} steps · seed {recipe.seed} · {html.seconds(made.seconds)}"


def _finished(done: ComparisonResult, prompt: str, session: Session) -> tuple[Any, ...]:
    """All that is shown of two runs. Their traces are kept, so that the tab Trace can open them."""
    names = [f"{session.count:04d} · {side} · {prompt[:56]}" for side in SIDES]
    for name, made in zip(names, done.made, strict=True):
        session.keep(name, made.trace)
    notes = dict.fromkeys(note for made in done.made for note in made.notes)
    spent = html.seconds(sum(made.seconds for made in done.made))
    return (
        comparison.pair([made.image for made in done.made], [_about(made) for made in done.made]),
        status(" · ".join([f"done in {spent}", *notes]), 1.0),
        *(gr.DownloadButton(value=str(made.file), interactive=True) for made in done.made),
        comparison.verdict(done),
        comparison.film(done.film),
        comparison.distances(done.found),
        comparison.plans(done.plans, done.theirs),
        names[1],
    )
