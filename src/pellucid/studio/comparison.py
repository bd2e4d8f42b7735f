"""Two runs with one seed: where they diverge and why, and the page's HTML of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from pellucid.core.plan import Difference, Plan
from pellucid.core.wording import counted, short
from pellucid.evidence import plan_diff
from pellucid.evidence.plan_diff import POINTS, TOLERANCE, change, facts, kind_of, size_of
from pellucid.evidence.plan_diff import Comparison as Plans
from pellucid.evidence.report.charts import Axis, Chart, Series
from pellucid.evidence.trace import diff, previews, reading
from pellucid.evidence.trace.diff import Comparison
from pellucid.evidence.trace.previews import Preview
from pellucid.evidence.trace.reading import Trace
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.prepare import make_plan
from pellucid.studio import generate_tab, html
from pellucid.studio.form import Form
from pellucid.studio.generate_tab import RunResult, StepNews
from pellucid.studio.visitors import Job, Session

# --- Both runs ------------------------------------------------------------------------------------------------------

SIDES = ("A", "B")
_COLUMNS = 8  # steps that are shown as images
_MOST_CALLS = 300  # of plans whose differences are run on the oracle


@dataclass(frozen=True)
class ComparisonNews:
    """Both set-ups, as far as they have come: the latest step of each, or what was made."""

    a: StepNews | RunResult | None = None
    b: StepNews | RunResult | None = None

    def __iter__(self) -> Iterator[StepNews | RunResult | None]:
        return iter((self.a, self.b))

    @property
    def part(self) -> float:
        """How much is done, of 1."""
        return sum(one.step / one.steps if isinstance(one, StepNews) else one is not None for one in self) / 2

    @property
    def words(self) -> str:
        under_way = [f"{name}: {one.words}" for name, one in zip(SIDES, self, strict=True) if isinstance(one, StepNews)]
        return under_way[-1] if under_way else "comparing …"


@dataclass(frozen=True)
class Frame:
    """x0 of one run at a step, and the noise there; `image` is None where there is nothing to see."""

    image: Image.Image | None
    ratio: float | None


@dataclass(frozen=True)
class Column:
    """A step of both runs; `first` where they part."""

    step: int
    frames: tuple[Frame, Frame]
    first: bool


@dataclass(frozen=True)
class ComparisonResult:
    made: tuple[RunResult, RunResult]
    found: Comparison
    film: tuple[Column, ...]
    plans: plan_diff.Comparison
    theirs: Plan  # B's plan in its own frame
    calls: tuple[int, int]


class SideJob(Job):
    """One of the two runs of a job: it reports together with the other."""

    def __init__(self, whole: Job, held: list[Any], place: int) -> None:
        super().__init__(stop=whole.stop)
        self.whole, self.held, self.place = whole, held, place

    def tell(self, news: Any) -> None:
        self.held[self.place] = news
        self.whole.tell(ComparisonNews(*self.held))


def run(pipe: Pipeline, setups: Sequence[Form], session: Session, job: Job) -> ComparisonResult:
    """Both are planned before the first is run: what cannot be is refused at once."""
    for setup in setups:
        make_plan(pipe.components, setup.request())
    held: list[Any] = [None, None]
    made = []
    for place, setup in enumerate(setups):
        half = SideJob(job, held, place)
        made.append(generate_tab.run(pipe, setup, session, half))
        half.tell(made[-1])
    a, b = (reading.read(one.trace) for one in made)
    job.check()
    found = diff.compare(a, b)
    strips = _aligned(a, b, found, pipe.components.vae)
    mine, theirs = (trace.header.plans[0] for trace in (a, b))
    plans = plan_diff.compare(mine, theirs, job.check, effects=max(mine.nfe, theirs.nfe) <= _MOST_CALLS)
    return ComparisonResult((made[0], made[1]), found, strips, plans, theirs, (len(a.steps), len(b.steps)))


# --- both in images -------------------------------------------------------------------------------------------


def _aligned(a: Trace, b: Trace, found: Comparison, vae: Any = None) -> tuple[Column, ...]:
    """A few steps of both runs, aligned by their number; the one where they part is among them."""
    first = None if found.first is None else found.first.step
    look = _look_at(a, b, vae)
    return tuple(
        Column(step, (_frame(a, step, look), _frame(b, step, look)), step == first)
        for step in columns(max(len(a.steps), len(b.steps)), first)
    )


def columns(steps: int, first: int | None) -> list[int]:
    """At most `_COLUMNS` steps, evenly; where two runs part is one of them."""
    if first is None or first >= steps:
        return previews.spaced(range(steps), _COLUMNS)
    even = previews.spaced(range(steps), _COLUMNS)
    if first in even:
        return even
    inner = even[1:-1] or even
    nearest = min(inner, key=lambda step: abs(step - first))
    return sorted({first, *even} - {nearest})


def _look_at(a: Trace, b: Trace, vae: Any) -> Preview | None:
    """One way to look at both: decoded where that is quick, else by the linear map that fits the VAE best."""
    last = [trace.tensor("x0", trace.has_images[-1])[:1] for trace in (a, b) if trace.has_images]
    if not last or len({one.shape for one in last}) > 1:
        return None
    began = time.perf_counter()
    look = previews.preview_for(torch.nan_to_num(torch.cat(last)).float(), vae)
    slow = time.perf_counter() - began > generate_tab.EAGER * len(last)
    return getattr(look, "linear", look) if slow else look


def _frame(trace: Trace, index: int, look: Preview | None) -> Frame:
    if index >= len(trace.steps):
        return Frame(None, None)
    step = trace.steps[index]
    if look is None or not trace.has("x0", index) or 0 not in step.images:
        return Frame(None, step.level.ratio)
    x0 = torch.nan_to_num(trace.tensor("x0", index)[step.of(0)]).float()[None]
    return Frame(html.of_unit(look.image(x0)), step.level.ratio)


# --- As HTML --------------------------------------------------------------------------------------------------------

_ROWS = 40  # of a table of rows
_KINDS = ("time passed", "level", "churn", "weights")
_WIDEST = 1600  # pixels of a sheet on the page; the file holds it whole

_STYLE = """<style>
.plc .film { display: grid; grid-auto-flow: column; grid-auto-columns: minmax(116px, 1fr); gap: 6px; width: 100%; }
.plc .film > div { padding: 4px; border: 2px solid transparent; border-radius: 8px; }
.plc .film > div.first { border-color: #c62828; }
.plc .film b { display: block; font-size: 13px; min-height: 40px; }
.plc .film figcaption { font-size: 12px; white-space: nowrap; }
.plc .verdict { font-size: 17px; margin: 4px 0; }
.plc ul.why { margin: 0 0 8px; padding-left: 20px; list-style: disc; }
.plc h4 { margin: 16px 0 6px; font-size: 15px; font-weight: 600; }
.plc .sheet { min-height: 240px; display: grid; place-items: center; text-align: center;
  border: 1px solid var(--border-color-primary); border-radius: 8px; overflow: hidden; }
.plc .sheet img { max-width: 100%; height: auto; }
.plc figure.chart { max-width: 620px; }
.plc figure.chart h3 { font-size: 15px; margin: 8px 0 4px; }
.plc figure.chart text { font-size: 12px; fill: #44505c; }
.plc .legend button { margin-right: 12px; font-size: 13px; }
.plc .legend i { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 5px; }
</style>"""

EMPTY_FILM = html.block(f"{_STYLE}<p class=note>Run both to see where they diverge, and why.</p>")


def pair(images: Sequence[Image.Image | None], words: Sequence[str]) -> str:
    """Both sides, each in its place whether there is an image or not."""
    cells = (
        html.frame(image, f"set-up {name}", f"{name} · {said}" if said else name, f"{name} appears here")
        for name, image, said in zip(SIDES, images, words, strict=True)
    )
    return html.block(f'<div class="two">{"".join(cells)}</div>')


NOTHING = pair((None, None), ("", ""))


# --- where they part --------------------------------------------------------------------------------------------


def verdict(done: ComparisonResult) -> str:
    """The first step at which the runs differ, the cause, and the other differences of their headers."""
    found, rest = done.found, [one.text() for one in done.found.headers if one not in done.found.why]
    lines = "".join(f"<li>{html.text(line)}</li>" for line in diff.details(found))
    also = f"<p class=note>The set-ups also differ in: {html.text('; '.join(rest))}.</p>" if rest else ""
    notes = "".join(f"<p class=note>{html.text(note)}</p>" for note in found.notes)
    said = f'<p class="verdict" role="status"><b>{html.text(headline(done))}</b></p>'
    return html.block(f'{_STYLE}{said}<ul class="why">{lines}</ul>{also}{notes}')


def headline(done: ComparisonResult) -> str:
    """Steps are counted from 1, as everywhere on the page."""
    first = done.found.first
    if first is None:
        return f"The two runs are the same in all of {counted(done.found.steps, 'step')}."
    if first.cause == "nan":
        return f"Both are NaN from step {first.step + 1} of {max(done.calls)}; the same before."
    return f"They diverge at step {first.step + 1} of {max(done.calls)}, by {first.cause}."


def film(columns: Sequence[Column]) -> str:
    """Both runs aligned by step; the first that differs is outlined."""
    cells = "".join(_column(one) for one in columns)
    note = "x0, the network's estimate of the image. Outlined: the first step that differs."
    return html.block(
        f'{_STYLE}<h4>Step by step</h4><div class="wide"><div class="film">{cells}</div></div>{_said(note)}'
    )


def _column(one: Column) -> str:
    shown = "".join(_cell(name, one.step, frame) for name, frame in zip(SIDES, one.frames, strict=True))
    mark = "<br>they diverge here" if one.first else ""
    kind = ' class="first" aria-current="step"' if one.first else ""
    return f"<div{kind}><b>step {one.step + 1}{mark}</b>{shown}</div>"


def _cell(name: str, step: int, frame: Frame) -> str:
    if frame.ratio is None:
        return html.frame(None, "", f"{name} · ended", "–")
    return html.frame(frame.image, f"{name} at step {step + 1}", f"{name} · σ/α {short(frame.ratio, 3)}", "–")


def _said(words: str) -> str:
    return f"<p class=note>{html.text(words)}</p>"


def distances(found: Comparison) -> str:
    """How far apart the runs are at each step, as long as they are at the same levels."""
    at = [one for one in found.distances if not math.isnan(one.x0)]
    if not any(one.x0 > 0 or one.x > 0 for one in at):
        return ""
    steps = [one.step + 1 for one in at]
    series = [Series(name, steps, [getattr(one, name) for one in at]) for name in ("x", "x0")]
    note = "As a fraction of B's norm; only steps at which both are at the same level."
    chart = Chart("How far apart, by step", series, Axis("step"), Axis("", log=True), note=note)
    return html.block(_STYLE + chart.html())


# --- the plans --------------------------------------------------------------------------------------------------


def plans(found: Plans, theirs: Plan) -> str:
    """What the plans are, the rows that differ, and what each kind of difference does on the exact oracle."""
    left, right = facts(found.mine), facts(theirs)
    rows = [(name, left[name], right[name]) for name in left if left[name] or right[name]]
    parts = ["<h4>The plans</h4>", _table(("", *SIDES), rows, [row[1] != row[2] for row in rows])]
    if found.mine.frame != theirs.frame:
        parts.append(_said(f"For the rows, B is rewritten from the frame {theirs.frame} to {found.mine.frame}."))
    by_row = [d for d in found.differences if d.row >= 0]
    if found.mine.nfe != found.theirs.nfe:
        parts += ["<h4>The rows of both</h4>", _levels(found.mine, found.theirs)]
    elif by_row:
        parts += ["<h4>Rows that differ, A → B</h4>", _changes(by_row)]
    else:
        parts.append(_said(f"The rows are the same (to {TOLERANCE:g})."))
    if found.effects:
        effects = [(e.kind, "" if e.rows is None else e.rows, size_of(e), e.note) for e in found.effects]
        note = f"{POINTS} points of a smooth mixture through its exact denoiser; each kind alone, then all."
        heads = ("swapped in", "rows", "relative distance", "")
        parts += ["<h4>What it does to the result</h4>", _table(heads, effects), _said(note)]
    return html.block(_STYLE + "".join(parts))


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]], marked: Sequence[bool] = ()) -> str:
    """Rows of words; those that are `marked` stand out."""
    return html.table(heads, rows, words=len(heads), marks=["here" if mark else "" for mark in marked])


def _changes(differences: Sequence[Difference]) -> str:
    """A row for each that differs, `old → new` in the column of its kind."""
    kinds = [kind for kind in _KINDS if any(kind_of(d) == kind for d in differences)]
    every = sorted({d.row for d in differences})
    rows = [
        (index + 1, *("\n".join(change(d) for d in differences if d.row == index and kind_of(d) == k) for k in kinds))
        for index in every[:_ROWS]
    ]
    return _table(("step", *kinds), rows) + _more(len(every))


def _levels(mine: Plan, theirs: Plan) -> str:
    """Where each plan calls the network; plans of different length have no partners to compare."""
    count = max(mine.nfe, theirs.nfe)
    rows = [(i + 1, *_level(mine, i), *_level(theirs, i)) for i in range(min(count, _ROWS))]
    return html.table(("step", "A: time", "σ/α", "B: time", "σ/α"), rows) + _more(count)


def _level(plan: Plan, index: int) -> tuple[str, str]:
    if index >= plan.nfe:
        return "", ""
    row = plan.rows[index]
    return short(0.0 if abs(row.time) < TOLERANCE else row.time, 5), short(row.level.ratio)


def _more(count: int) -> str:
    return _said(f"… and {count - _ROWS} more.") if count > _ROWS else ""


# --- a sheet ----------------------------------------------------------------------------------------------------


def sheet(image: Image.Image | None, alt: str = "") -> str:
    if image is None:
        return html.block(
            f'{_STYLE}<div class="sheet"><span class=note>The sheet fills here, cell by cell.</span></div>'
        )
    small = image.copy()
    small.thumbnail((_WIDEST, _WIDEST))
    return html.block(f'{_STYLE}<div class="sheet"><img alt="{html.text(alt)}" src="{html.source(small)}"></div>')
