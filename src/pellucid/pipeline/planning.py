"""From a request to a plan: whose sampler, in which dialect, from which level to which."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError, rule
from pellucid.core.filters import Filter
from pellucid.core.grid import Grid
from pellucid.core.loop import check_fits
from pellucid.core.plan import Plan
from pellucid.core.reader import naming, read_text
from pellucid.interop import diffusers_config, source
from pellucid.interop.components import Components
from pellucid.interop.diffusers_plan import compile_reading, pipeline_options
from pellucid.pipeline.conditions import takes_text
from pellucid.pipeline.request import Request

STEPS = 30
MAX_PLAN_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Planned:
    """A plan, and the filter on x0 that the model's own scheduler asks for."""

    plan: Plan
    x0_filter: Filter | None = None


def make_plan(components: Components, request: Request) -> Planned:
    """The plan of a request: the one given, that of the sampler named, or that of the model's own scheduler."""
    reading = diffusers_config.read(components.scheduler, strict=False) if components.scheduler else None
    keep = reading.x0_filter if reading is not None else None
    if request.plan is not None:
        return Planned(given_plan(components, request), keep)
    steps = STEPS if request.steps is None else request.steps
    if request.sampler is None and request.grid is None and reading is not None:
        dialect = request.dialect or "diffusers"
        passes_eta = dialect == "diffusers" and takes_text(components.network)
        options = {**pipeline_options(reading, passes_eta), **request.options}

        def from_config(**cuts: Any) -> Plan:
            return compile_reading(reading, steps, dialect=dialect, overrides=options, **cuts)

        return Planned(cut(components, request, dialect, from_config), keep)
    if request.options and request.sampler is None and reading is None:
        raise PellucidError("options must come with a sampler: the model has no scheduler of its own.", "request")
    grid = grid_of(request.grid) if isinstance(request.grid, Mapping) else request.grid
    dialect = request.dialect or "exact"

    def from_name(**cuts: Any) -> Plan:
        return compile_plan(
            request.sampler or (reading.sampler if reading else "dpmpp_2m"),
            schedule=components.schedule,
            target=components.target,
            grid=grid,
            steps=None if isinstance(grid, Grid) and grid.name == "explicit" else steps,
            dialect=dialect,
            **cuts,
            **request.options,
        )

    return Planned(cut(components, request, dialect, from_name), keep)


def grid_of(table: Mapping[str, Any]) -> Grid:
    return Grid.from_dict(dict(table))


def given_plan(components: Components, request: Request) -> Plan:
    for name in ("strength", "denoising_start", "denoising_end"):
        if getattr(request, name) is not None:
            raise PellucidError(
                rule(name, "left out with a plan, which says where it starts and ends", "both"), "request"
            )
    plan = read_plan(request.plan)  # type: ignore[arg-type]
    check_fits(plan, components.schedule, components.target, "model")
    return plan


def read_plan(given: Plan | str | os.PathLike[str]) -> Plan:
    """A plan, or that of a file or of a bundle's part, such as scenes-128/plans/8.json."""
    if isinstance(given, Plan):
        return given
    path = source.bundled(given)
    text = read_text(path, "plan", MAX_PLAN_BYTES, "plan-file")
    with naming(path.name):
        return Plan.from_json(text)


def cut(components: Components, request: Request, dialect: str, make: Any) -> Plan:
    """Starts and ends where the request says: exactly, or on the whole legs that diffusers counts."""
    ends = (request.strength, request.denoising_start, request.denoising_end)
    if all(end is None for end in ends):
        return make()
    if dialect == "diffusers":
        return as_diffusers(request, make)
    low, high = components.schedule.span
    start = request.strength if request.strength is not None else request.denoising_start
    if request.denoising_start is not None:
        start = 1.0 - request.denoising_start
    begin = None if start is None else low + start * (high - low)
    end = None if request.denoising_end is None else low + (1.0 - request.denoising_end) * (high - low)
    return make(between=(begin, end))


def as_diffusers(request: Request, make: Any) -> Plan:
    """diffusers keeps int(steps · strength) of the steps, and hands over at the first time below a rounded one."""
    whole = make()
    count = int(whole.grid["steps"])
    skip = 0
    if request.strength is not None:
        kept = min(int(count * request.strength), count)
        if kept < 1:
            raise PellucidError(
                f"strength × steps must be at least 1 in the diffusers dialect; got {request.strength} × {count}. "
                "Use more steps, or name a sampler: the exact dialect starts at any level.",
                "strength",
            )
        skip = count - kept
    cuts: dict[str, Any] = {"skip": skip} if skip else {}
    if request.denoising_start is not None:
        cuts = {"skip": starts_before(whole, request.denoising_start)}
    if request.denoising_end is not None:
        stop = starts_before(whole, request.denoising_end)
        cuts |= {"stop": stop} if stop < len(starts_of(whole)) else {}
    return make(**cuts) if cuts else whole


def starts_of(whole: Plan) -> list[float]:
    """The times that diffusers counts when it cuts a run: one per step, and in PNDM one per call."""
    if whole.name in ("plms", "pndm"):
        return list(whole.timesteps)
    starts = list(dict.fromkeys(whole.timesteps))  # several calls per step tell the start of the next one twice
    if len(starts) != whole.grid["steps"]:
        raise PellucidError(
            f"denoising_start, denoising_end must be left out for {whole.name} in the diffusers dialect: it calls the "
            "model between two steps. Name a sampler: the exact dialect cuts anywhere.",
            "denoising",
        )
    return starts


def starts_before(whole: Plan, part: float) -> int:
    """How many of them lie before a part of the run, as diffusers counts: by whole training times."""
    total = whole.schedule.get("num_train", 1000)
    return sum(time >= round(total - part * total) for time in starts_of(whole))
