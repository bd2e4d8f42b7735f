"""X/Y sheets for the page: a set-up and two settings that vary → one labelled image with its recipe."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from PIL import Image

from pellucid.core.errors import PellucidError, rule
from pellucid.core.loop import StepSeen
from pellucid.models.guidance import guarded
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.planning import make_plan
from pellucid.pipeline.recipe import write_png
from pellucid.pipeline.request import Request
from pellucid.pipeline.sheet import Axis, cells, draw_sheet
from pellucid.pipeline.sheet_cells import AXES, axes_of, cell_fields, footer
from pellucid.studio import asking, jobs
from pellucid.studio.asking import Setup
from pellucid.studio.jobs import Job
from pellucid.studio.session import Session

MOST_CELLS = 36
NAMES = ("steps", "guidance", "sampler", "grid", "dialect", "seed", "clip_skip", "prompt", "negative", "noise")
BLANK = "#e9edf2"  # a cell that is not made yet
CHECKS = {"steps": asking.steps_of, "prompt": asking.prompt_of}


@dataclass(frozen=True)
class Asked:
    """The axes, the text that they were read from, and the request of each cell, row by row."""

    text: str
    axes: tuple[Axis, ...]
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Filling:
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
        blanks = [Image.new("RGB", size, BLANK)] * (self.cells - len(self.images))
        return draw_sheet([*self.images, *blanks], self.axes)


@dataclass(frozen=True)
class Drawn:
    image: Image.Image
    file: Path
    notes: tuple[str, ...]
    seconds: float


def asked(text: str, setup: Setup) -> Asked:
    """What a sheet asks for; all cells share one seed, unless that varies."""
    base = setup.request()
    held = {one.name: getattr(base, one.name) for one in fields(base) if getattr(base, one.name) != default(one)}
    axes = axes_of(text or "", base.sampler, {name: AXES[name] for name in NAMES})
    every = cells(axes)
    if len(every) > MOST_CELLS:
        advice = "Leave out some values; `pellucid sample --grid-of` draws larger ones."
        raise PellucidError(rule("cells", f"at most {MOST_CELLS} on this page", len(every), advice), "grid-cells")
    for axis in axes:
        for value in axis.values if axis.name in CHECKS else ():
            CHECKS[axis.name](value)
    requests = [Request(**cell_fields(held, settings)) for settings in every]
    if setup.guarded:
        requests = [replace(one, guidance=guarded(one.guidance)) for one in requests]
        if len({one.guidance.text() for one in requests}) < len({str(cell.get("guidance")) for cell in every}):
            must = "all different with the guard on, which caps at 7"
            raise PellucidError(rule("values of guidance", must, text), "grid-value")
    return Asked(text, axes, tuple(requests))


def default(one: Any) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def run(pipe: Pipeline, sheet: Asked, session: Session, job: Job) -> Drawn:
    """Every cell, then the sheet. All are planned before the first is run."""
    began = time.perf_counter()
    of = sum(make_plan(pipe.components, request).plan.nfe for request in sheet.requests)
    images: list[Image.Image] = []
    recipes, notes, calls = [], [], 0

    def tell() -> None:
        taken = time.perf_counter() - began
        job.tell(Filling(sheet.axes, tuple(images), len(sheet.requests), calls, of, taken))

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
    drawn = draw_sheet(images, sheet.axes, title=title, footer=footer(recipes))
    file = session.new_file(".png")
    write_png(drawn, file, recipes[0], sheet.text)
    return Drawn(drawn, file, tuple(dict.fromkeys(notes)), time.perf_counter() - began)


def follow(pipe: Pipeline, sheet: Asked, session: Session, tab: str) -> Iterator[Filling | Drawn]:
    """The sheet as it fills, and then the whole."""
    job = session.begin(tab, lambda job: run(pipe, sheet, session, job))
    yield from jobs.follow(job)
    yield job.result
