"""Two set-ups run one after the other: both traces, where they part and why, and their plans side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from pellucid.core.errors import Cancelled
from pellucid.core.plan import Plan
from pellucid.evidence import plan_diff
from pellucid.evidence.trace import diff, looks, reading
from pellucid.evidence.trace.diff import Comparison
from pellucid.evidence.trace.looks import Look
from pellucid.evidence.trace.reading import Trace
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.planning import make_plan
from pellucid.studio import html, jobs, running
from pellucid.studio.asking import Setup
from pellucid.studio.jobs import Job
from pellucid.studio.running import Finished, Moment
from pellucid.studio.session import Session

SIDES = ("A", "B")
COLUMNS = 8  # steps that are shown as images
MOST_CALLS = 300  # of plans whose differences are run on the oracle


@dataclass(frozen=True)
class Pair:
    """Both set-ups, as far as they have come: the latest step of each, or what was made."""

    a: Moment | Finished | None = None
    b: Moment | Finished | None = None

    def __iter__(self) -> Iterator[Moment | Finished | None]:
        return iter((self.a, self.b))

    @property
    def part(self) -> float:
        """How much is done, of 1."""
        return sum(one.step / one.steps if isinstance(one, Moment) else one is not None for one in self) / 2

    @property
    def words(self) -> str:
        under_way = [f"{name}: {one.words}" for name, one in zip(SIDES, self, strict=True) if isinstance(one, Moment)]
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
class Compared:
    made: tuple[Finished, Finished]
    found: Comparison
    film: tuple[Column, ...]
    plans: plan_diff.Comparison
    theirs: Plan  # B's plan in its own frame
    calls: tuple[int, int]


class Half(Job):
    """One of the two runs of a job: what it tells is told together with the other's."""

    def __init__(self, whole: Job, held: list[Any], place: int) -> None:
        super().__init__(stop=whole.stop)
        self.whole, self.held, self.place = whole, held, place

    def tell(self, news: Any) -> None:
        self.held[self.place] = news
        self.whole.tell(Pair(*self.held))


def run(pipe: Pipeline, setups: Sequence[Setup], session: Session, job: Job) -> Compared:
    """Both are planned before the first is run: what cannot be is refused at once."""
    for setup in setups:
        make_plan(pipe.components, setup.request())
    held: list[Any] = [None, None]
    made = []
    for place, setup in enumerate(setups):
        half = Half(job, held, place)
        made.append(running.run(pipe, setup, session, half))
        half.tell(made[-1])
    a, b = (reading.read(one.trace) for one in made)

    def seen() -> None:
        if job.cancelled():
            raise Cancelled

    seen()
    found = diff.compare(a, b)
    strips = film(a, b, found, pipe.components.vae)
    mine, theirs = (trace.header.plans[0] for trace in (a, b))
    plans = plan_diff.compare(mine, theirs, seen, effects=max(mine.nfe, theirs.nfe) <= MOST_CALLS)
    return Compared((made[0], made[1]), found, strips, plans, theirs, (len(a.steps), len(b.steps)))


def follow(pipe: Pipeline, setups: Sequence[Setup], session: Session, tab: str) -> Iterator[Pair | Compared]:
    """How far both are, as they come, and then what was found."""
    job = session.begin(tab, lambda job: run(pipe, setups, session, job))
    yield from jobs.follow(job)
    yield job.result


# --- both in images -------------------------------------------------------------------------------------------


def film(a: Trace, b: Trace, found: Comparison, vae: Any = None) -> tuple[Column, ...]:
    """A few steps of both runs, aligned by their number; the one where they part is among them."""
    first = None if found.first is None else found.first.step
    look = look_at(a, b, vae)
    return tuple(
        Column(step, (frame(a, step, look), frame(b, step, look)), step == first)
        for step in columns(max(len(a.steps), len(b.steps)), first)
    )


def columns(steps: int, first: int | None) -> list[int]:
    """At most `COLUMNS` steps, evenly; where two runs part is one of them."""
    if first is None or first >= steps:
        return looks.spaced(range(steps), COLUMNS)
    even = looks.spaced(range(steps), COLUMNS)
    if first in even:
        return even
    inner = even[1:-1] or even
    nearest = min(inner, key=lambda step: abs(step - first))
    return sorted({first, *even} - {nearest})


def look_at(a: Trace, b: Trace, vae: Any) -> Look | None:
    """One way to look at both: decoded where that is quick, else by the linear map that fits the VAE best."""
    last = [trace.tensor("x0", trace.has_images[-1])[:1] for trace in (a, b) if trace.has_images]
    if not last or len({one.shape for one in last}) > 1:
        return None
    began = time.perf_counter()
    look = looks.look_for(torch.nan_to_num(torch.cat(last)).float(), vae)
    slow = time.perf_counter() - began > running.EAGER * len(last)
    return getattr(look, "linear", look) if slow else look


def frame(trace: Trace, index: int, look: Look | None) -> Frame:
    if index >= len(trace.steps):
        return Frame(None, None)
    step = trace.steps[index]
    if look is None or not trace.has("x0", index) or 0 not in step.images:
        return Frame(None, step.level.ratio)
    x0 = torch.nan_to_num(trace.tensor("x0", index)[step.of(0)]).float()[None]
    return Frame(html.of_unit(look.image(x0)), step.level.ratio)
