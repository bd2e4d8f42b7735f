"""The tab Study: which sampler, and how many steps, for this model. It fills in while it runs, and can be resumed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from PIL import Image

from pellucid.core import samplers
from pellucid.core.batch import StepSeen
from pellucid.core.errors import Cancelled, PellucidError, rule
from pellucid.core.reader import read_json
from pellucid.evidence.report import charts
from pellucid.evidence.report.charts import Axis, Chart, Series
from pellucid.evidence.study import samplers_report
from pellucid.evidence.study.samplers import FIXED_KEYS, InceptionScorer, Judges, SamplerStudy, SamplerStudyConfig
from pellucid.evidence.study.samplers_results import LatencyClock
from pellucid.evidence.study.samplers_verdict import SamplerFigures
from pellucid.evidence.study.setups import SamplerCell
from pellucid.evidence.study.subject import Subject
from pellucid.interop.source import expanded
from pellucid.studio import html
from pellucid.studio.form import Shelf, named, whole
from pellucid.studio.generate_tab import EXAMPLES
from pellucid.studio.html import status
from pellucid.studio.visitors import Job, Session, Sessions

_TAB = "study"
_CHOSEN = ("ddim", "dpmpp_2m", "unipc")
_STEPS = "5,8,10,20"
_YARDSTICK = 60  # steps of the converged images: no more, so that the first point comes soon
_ROUNDS = 3  # of timing
_MOST_SAMPLERS, _MOST_COUNTS, _MOST_PROMPTS, _MOST_SEEDS, _MOST_IMAGES = 16, 16, 64, 16, 256
_MOST_STEPS = 250  # of a cell
_SHOWN = 4  # images of the cell that was made last
MOST_REPORT = 64 * 2**20  # bytes of a page that is opened
_MOST_PATH = 4096
_FIRST = "the converged images, the reference for all others, come first"
_TOO_SLOW = "too slow for the page: use pellucid study samplers"
_FEW = 2  # prompts at the start
_ROOM = '<div style="min-height: min(440px, 90vw)">{}</div>'  # of the chart, before it is there and after
EMPTY = html.block(
    _ROOM.format('<p class="note">A point for each sampler and step count appears here as it is made.</p>')
)
_NO_REPORT = html.block('<p class="note">The report appears here when the study is done.</p>')


# --- what is asked for -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StudyForm:
    """A study as the page holds it."""

    model: str | None
    samplers: Sequence[str] = _CHOSEN
    steps: str = _STEPS
    prompts: str = ""
    seeds: Any = 1
    yardstick: Any = _YARDSTICK

    def config(self, asks: str) -> SamplerStudyConfig:
        """Checked and bounded; a model that takes neither text nor labels gets no prompts."""
        chosen = tuple(dict.fromkeys(one.strip() for one in self.samplers or () if one and one.strip()))
        prompts = tuple(line.strip() for line in (self.prompts or "").splitlines() if line.strip())
        seeds = whole(self.seeds, "images per prompt", _MOST_SEEDS, "study-number")
        counts = _counts_of(self.steps)
        for what, found, most in (("samplers", chosen, _MOST_SAMPLERS), ("prompts", prompts, _MOST_PROMPTS)):
            if len(found) > most:
                raise PellucidError(rule(what, f"at most {most} on the page", len(found)), "study-size")
        if any(one.lower().endswith(".json") for one in chosen):
            raise PellucidError(rule("samplers", "names: plan files are for the command line", chosen), "study-list")
        if len(prompts) * seeds > _MOST_IMAGES:
            must = f"at most {_MOST_IMAGES} images per cell on the page"
            raise PellucidError(rule("prompts × images", must, len(prompts) * seeds), "study-size")
        if asks == "nothing":
            prompts = ()
        best = max(whole(self.yardstick, "steps of the converged images", 1000, "study-number"), 2)
        return SamplerStudyConfig(
            model=named(self.model),
            samplers=chosen,
            steps=counts,
            prompts=prompts,
            seeds=seeds,
            batch=min(16, max(1, len(prompts)) * seeds),
            converged_steps=best,
            path_steps=max(best, 2 * max(counts)),
            rounds=_ROUNDS,
        )


def _counts_of(text: str | None) -> tuple[int, ...]:
    """`5,8,10` → (5, 8, 10), each once."""
    must = f"whole numbers from 1 to {_MOST_STEPS} with commas between them, {_MOST_COUNTS} at most"
    try:
        found = tuple(dict.fromkeys(int(word) for word in (text or "").replace(";", ",").split(",") if word.strip()))
    except ValueError:
        raise PellucidError(rule("steps", must, str(text)[:60]), "steps") from None
    if not 1 <= len(found) <= _MOST_COUNTS or not all(1 <= count <= _MOST_STEPS for count in found):
        raise PellucidError(rule("steps", must, str(text)[:60]), "steps")
    return found


def folder_of(config: SamplerStudyConfig, mark: str, inside: Path) -> Path:
    """The folder of a study: the same for all requests that may extend it, whatever their samplers and steps."""
    plain = config.plain()
    held = json.dumps([mark, *(plain[name] for name in FIXED_KEYS)], sort_keys=True)
    return inside / f"study-{hashlib.sha256(held.encode()).hexdigest()[:12]}"


# --- what is computed --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellState:
    """A cell and what is known of it: the mean distance of its images, and seconds per image, made together."""

    cell: SamplerCell
    distance: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class StudyNews:
    """How far a study is."""

    words: str
    part: float
    cells: Sequence[CellState]
    last: str = ""  # the cell that was made last
    images: Sequence[Image.Image] = ()


def _cells_of(study: SamplerStudy) -> list[CellState]:
    """Every cell of the table, made or not."""
    found = []
    for cell in study.table:
        batches = [first for first in study.config.firsts() if study.files.has(cell.key, first, "pictures")]
        rows = [study.files.row(cell.key, first, "pictures") for first in batches]
        values = [value for row in rows for value in row["distance"] if value is not None]
        count = sum(row["numbers"] for row in rows)
        spent = sum(row["seconds"] for row in rows) / count if count else None
        found.append(CellState(cell, float(np.mean(values)) if values else None, spent))
    return found


def _first_images(study: SamplerStudy, cell: SamplerCell) -> list[Image.Image]:
    """The first of a cell, where its first batch is there."""
    if not study.files.has(cell.key, 0, "pictures"):
        return []
    return study.files.images(cell, 0, len(study.config.numbers(0)))[:_SHOWN]


class _CancellablePipeline:
    """A pipeline whose runs report each step and end when a job is cancelled."""

    def __init__(self, pipe: Any, job: Job) -> None:
        self.pipe, self.job = pipe, job
        self.see: Callable[[StepSeen], None] = lambda seen: None

    def __call__(self, *given: Any, **how: Any) -> Any:
        return self.pipe(*given, **how, cancelled=self.job.cancelled, observers=(self.see,))


def _light(judges: Judges) -> Judges:
    """Who judges on the page: Inception takes longer than the images."""
    kept = tuple(one for one in judges.scorers if not isinstance(one, InceptionScorer))
    if judges.inception is None:
        return judges
    return replace(judges, scorers=kept, inception=None, reasons={**judges.reasons, "fid": _TOO_SLOW})


def run(pipe: Any, wish: StudyForm, inside: Path, job: Job) -> Path:
    """Makes and times what is missing, keeping each cell at once, and writes the report; returns its page."""
    charts.require()
    subject = Subject.of(pipe)
    config = wish.config(subject.asks)
    folder = folder_of(config, subject.mark, inside)
    maker = _CancellablePipeline(subject.pipe, job)
    study = SamplerStudy(config, folder, replace(subject, pipe=maker))
    study.judges = _light(Judges.open(study))
    _fill(study, maker, job)
    clock = LatencyClock(study)
    clock.run(_timing(study, job, sum(cell.nfe for _, cell in clock.missing())))
    job.tell(StudyNews("writing the report …", 1.0, _cells_of(study)))
    return samplers_report.write(SamplerFigures(SamplerStudy(config, folder, subject), study.judges))


def _fill(study: SamplerStudy, maker: _CancellablePipeline, job: Job) -> None:
    """The images of all cells, each reported as it comes, with steps in between."""
    total, done, cells = study.todo(), 0, _cells_of(study)
    job.tell(StudyNews(_FIRST, 0.0, cells))

    def see(seen: StepSeen) -> None:
        calls = done + seen.index + 1
        said = f"{calls} of {total} model calls per image"
        early = not any(one.distance is not None for one in cells)
        job.tell(StudyNews(f"{said}; {_FIRST}" if early else said, calls / max(total, 1), cells))

    def seen(count: int) -> None:
        nonlocal done, cells
        before = {one.cell.key for one in cells if one.distance is not None}
        done, cells = done + count, _cells_of(study)
        new = [one.cell for one in cells if one.distance is not None and one.cell.key not in before]
        said = f"{done} of {total} model calls per image"
        images = _first_images(study, new[-1]) if new else []
        job.tell(StudyNews(said, done / max(total, 1), cells, new[-1].key if new else "", images))

    maker.see = see
    study.run(lambda what, total: nullcontext(seen), job.cancelled)
    maker.see = lambda seen: None
    job.check()


def _timing(study: SamplerStudy, job: Job, total: int) -> Callable[[int], None]:
    """Tells how much of the timing is done."""
    done, cells = 0, _cells_of(study)

    def tick(count: int) -> None:
        nonlocal done
        done += count
        job.check()
        job.tell(StudyNews(f"timing: {done} of {total} model calls", done / max(total, 1), cells))

    return tick


def report_in(path: str | None) -> str:
    """The page of an existing study: a folder with a study's config and its report."""
    text = (path or "").strip()
    if not text or len(text) > _MOST_PATH or "\0" in text:
        raise PellucidError(rule("study", "the path of a study's folder", text[:60] or "none"), "study-folder")
    folder = expanded(text)
    config, page = folder / "config.json", folder / "report.html"
    try:
        held = read_json(config, 2**24, foreign=True)
    except PellucidError:
        held = {}
    if "study" not in held:
        raise PellucidError(rule("study", "a folder of a study, with its config.json", text), "study-folder")
    if not page.is_file():
        raise PellucidError(rule("study", "done, with its report.html", text, "Let it finish first."), "study-report")
    if page.stat().st_size > MOST_REPORT:
        raise PellucidError(rule("report", f"at most {MOST_REPORT // 2**20} MiB", text), "file-size")
    return page.read_text("utf-8", errors="replace")


# --- what is shown -----------------------------------------------------------------------------------------------


def table(cells: Sequence[CellState]) -> str:
    """All cells in their places; those that are made have numbers."""
    rows, kinds = [], []
    for one in cells:
        kinds.append("waiting" if one.distance is None and one.seconds is None else "done")
        distance = "–" if one.distance is None else html.number(one.distance)
        seconds = "–" if one.seconds is None else html.seconds(one.seconds)
        rows.append((one.cell.setup.text, one.cell.steps, one.cell.nfe, distance, seconds))
    heads = ("sampler", "steps", "calls", "distance", "time per image")
    return html.block(html.table(heads, rows, marks=kinds))


def chart(cells: Sequence[CellState]) -> str:
    """The distance to the converged image over model calls, one line per sampler, as far as it is known."""
    series = []
    for number, name in enumerate(dict.fromkeys(one.cell.setup.text for one in cells)):
        own = [one for one in cells if one.cell.setup.text == name and one.distance is not None]
        own.sort(key=lambda one: one.cell.nfe)
        labels = [f"{name}, {one.cell.steps} steps: {html.number(one.distance or 0.0)}" for one in own]
        xs, ys = [float(one.cell.nfe) for one in own], [one.distance or 0.0 for one in own]
        series.append(Series(name, xs, ys, labels=labels, colour=charts.COLOURS[number % len(charts.COLOURS)]))
    if not any(len(one.x) for one in series):
        return EMPTY
    log = all(y > 0 for one in series for y in one.y)
    calls = tuple(sorted({x for one in series for x in one.x}))
    title, name = "Distance to the converged image against model calls", "RMSE to the converged image"
    note = "Less is better. The report marks the knee and shows the images of a point."
    made = Chart(title, series, Axis("model calls (NFE)", True, calls), Axis(name, log), (), note)
    return html.block(_ROOM.format(made.html()))


def _last_made(moment: StudyNews) -> str:
    cells = "".join(html.frame(image, moment.last) for image in moment.images)
    return html.block(f'<p class="note">{html.text(moment.last)}</p><div class="four">{cells}</div>')


def framed(page: str, title: str) -> str:
    """A report in a frame of its own: its script may run there, and sees nothing of this page."""
    look = "width: 100%; height: 1000px; border: 1px solid var(--border-color-primary); border-radius: 8px"
    return html.block(
        f'<iframe title="{html.text(title)}" sandbox="allow-scripts" '
        f'style="{look}; background: #fff" srcdoc="{html.text(page)}"></iframe>'
    )


# --- the tab -----------------------------------------------------------------------------------------------------


class StudyTab:
    """Builds the tab: the controls on the left, the points as they come on the right, the report below."""

    def __init__(self, shelf: Shelf, sessions: Sessions, model: gr.Dropdown, ran: gr.State) -> None:
        self.shelf, self.sessions = shelf, sessions
        with gr.Row():
            with gr.Column(scale=5, min_width=320):
                asked = self.controls()
                with gr.Row():
                    go = gr.Button("Start", variant="primary", min_width=120, elem_id="study-start")
                    stop = gr.Button("Cancel", variant="stop", min_width=120, elem_id="study-cancel")
                said = gr.HTML(status("ready"), elem_id="study-status")
                cells = gr.HTML("", elem_id="study-cells")
            with gr.Column(scale=6, min_width=320):
                points = gr.HTML(EMPTY, elem_id="study-chart")
                last = gr.HTML("", elem_id="study-last")
        page = gr.HTML(_NO_REPORT, elem_id="study-report")
        with gr.Row():
            path = gr.Textbox(
                label="Existing study",
                info="the path of its folder",
                max_length=_MOST_PATH,
                scale=4,
                min_width=240,
                elem_id="study-path",
            )
            look = gr.Button("Open", min_width=100, elem_id="study-open")
        outputs = [said, cells, points, last, page]
        go.click(self.start, [model, *asked], outputs, show_progress="hidden", concurrency_limit=4)
        stop.click(self.cancel, None, said, queue=False)
        gr.on([look.click, path.submit], self.open, path, [said, page], show_progress="hidden")

    def controls(self) -> list[Any]:
        names = list(dict.fromkeys([*_CHOSEN, *samplers.names()]))
        chosen = gr.Dropdown(
            names,
            value=list(_CHOSEN),
            multiselect=True,
            max_choices=_MOST_SAMPLERS,
            allow_custom_value=True,
            label="Samplers",
            info="NAME, or NAME:GRID",
            elem_id="study-samplers",
        )
        steps = gr.Textbox(_STEPS, label="Step counts", elem_id="study-steps")
        prompts = gr.Textbox(
            "\n".join(EXAMPLES[:_FEW]), label="Prompts, one per line", lines=3, max_lines=8, elem_id="study-prompts"
        )
        with gr.Row():
            seeds = gr.Number(1, label="Images per prompt", precision=None, min_width=120, elem_id="study-seeds")
            best = gr.Number(
                _YARDSTICK,
                label="Steps of the converged images",
                info="twice the most steps, or more",
                precision=None,
                min_width=120,
                elem_id="study-yardstick",
            )
        return [chosen, steps, prompts, seeds, best]

    @html.settled(5)
    def start(self, request: gr.Request, model: str, *asked: Any) -> Iterator[tuple[Any, ...]]:
        nothing = (gr.skip(),) * 4
        kept: Sequence[CellState] = ()
        session = self.sessions.of(request.session_hash)
        wish = StudyForm(model, *asked)
        wish.config("nothing" if not (wish.prompts or "").strip() else "prompt")  # refused before any loading
        yield status("loading …"), gr.skip(), gr.skip(), "", _NO_REPORT
        pipe = self.shelf.pipe(model)
        try:
            for news in self.following(session, pipe, wish):
                if isinstance(news, Path):
                    report = framed(news.read_text("utf-8"), "the report of the study")
                    yield status("done", 1.0), *nothing[:3], report
                    continue
                last = _last_made(news) if news.images else gr.skip()
                drawn = (gr.skip(), gr.skip()) if news.cells is kept else (table(news.cells), chart(news.cells))
                kept = news.cells
                yield status(news.words, news.part), *drawn, last, gr.skip()
        except Cancelled:
            made = sum(one.distance is not None for one in kept)
            yield status(f"cancelled: {made} of {len(kept)} cells are kept; Start continues from there"), *nothing

    def following(self, session: Session, pipe: Any, wish: StudyForm) -> Iterator[StudyNews | Path]:
        before = session.jobs.get(_TAB)

        def work(job: Job) -> Path:
            while before is not None and not before.ended:  # it was cancelled, but may still write into the same folder
                time.sleep(0.05)
            return run(pipe, wish, session.folder, job)

        return session.follow(_TAB, work)

    def open(self, path: str | None) -> tuple[Any, Any]:
        with html.plainly():
            return status(f"opened {(path or '').strip()}", 1.0), framed(report_in(path), f"the report in {path}")

    def cancel(self, request: gr.Request) -> Any:
        there = self.sessions.of(request.session_hash).cancel(_TAB)
        return status("cancelled") if there else gr.skip()
