"""The plan of a wrapped pipeline's request: from what the pipeline asks of its scheduler, or from a sampler's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pellucid.core.compile import compile_plan
from pellucid.core.grid import Grid
from pellucid.core.plan import Plan
from pellucid.core.samplers import resolve
from pellucid.core.schedule import Flow, Schedule
from pellucid.interop.diffusers_config import Reading
from pellucid.interop.diffusers_plan import compile_reading, pipeline_options, shifted
from pellucid.interop.scheduler import Scheduler
from pellucid.interop.wrap_proxies import Times
from pellucid.models.guidance import Guidance
from pellucid.pipeline.pipeline import asks_uncond
from pellucid.pipeline.planning import given_plan, read_plan
from pellucid.pipeline.request import Request


def make_plan(reading: Reading, request: Request, times: Times, passes_eta: bool = False) -> tuple[Plan, Schedule]:
    """The plan, and the schedule as it is bent for this image's size."""
    if request.plan is not None:  # a plan is all of it: the times that the network is told, too
        table = as_table(request)
        curve = bent(reading, "exact" if table is None else table.dialect, times)
        return given_plan(SimpleNamespace(schedule=curve, target=reading.target), request), curve  # type: ignore
    own = request.sampler is None and request.grid is None
    dialect = request.dialect or ("diffusers" if own else "exact")
    curve = bent(reading, dialect, times)
    if own:
        passed = pipeline_options(reading, passes_eta and dialect == "diffusers")
        plan = as_the_pipeline(reading, dialect, times, {**passed, **request.options})
    else:
        plan = by_name(reading, request, curve, times.count, dialect)
    if times.timesteps is not None and times.sigmas is not None and isinstance(curve, Flow):
        # the network is told the time before the shift (CogView 4)
        plan = replace(plan, rows=tuple(replace(r, time=curve.unbend(r.time)) for r in plan.rows))
    return plan, curve


def as_table(request: Request) -> Plan | None:
    """The plan that a request gives, from its file where it names one; None where that cannot be read."""
    try:
        return None if request.plan is None else read_plan(request.plan)
    except (OSError, ValueError):
        return None  # `given_plan` says what is wrong with it


def bent(reading: Reading, dialect: str, times: Times) -> Schedule:
    return shifted(reading, dialect, times.mu) if reading.values.get("use_dynamic_shifting") else reading.schedule


def as_the_pipeline(reading: Reading, dialect: str, times: Times, options: dict[str, Any]) -> Plan:
    """The plan of the pipeline's own scheduler, with options over those of its config."""
    timesteps = times.timesteps if times.sigmas is None else None
    if times.original is not None:  # LCM: out of the times of its distillation
        timesteps = Scheduler.from_config(reading.values | {"_class_name": reading.class_name})._distilled(
            times.steps, timesteps, times.original, 1.0
        )
    steps = times.steps if timesteps is None and times.sigmas is None else None
    given = {"timesteps": timesteps, "sigmas": times.sigmas, "mu": times.mu}
    return compile_reading(reading, steps, dialect=dialect, overrides=options, **given)


def by_name(reading: Reading, request: Request, curve: Schedule, steps: int | None, dialect: str) -> Plan:
    grid: Any = Grid.from_dict(dict(request.grid)) if isinstance(request.grid, Mapping) else request.grid
    return compile_plan(
        request.sampler or reading.sampler,
        schedule=curve,
        target=reading.target,
        grid=grid,
        steps=None if isinstance(grid, Grid) and grid.name == "explicit" else steps,
        dialect=dialect,
        **request.options,
    )


def keeps_uncond(reading: Reading, request: Request) -> bool:
    """Whether the sampler uses the unconditional prediction beside the guided one (the CFG++ family)."""
    table = as_table(request)
    if table is not None:
        return asks_uncond(table)
    if request.sampler is None:
        return False
    curve = replace(reading.schedule, terminal=None) if isinstance(reading.schedule, Flow) else reading.schedule
    small = replace(request, grid=None, dialect=None)
    return asks_uncond(by_name(reading, small, curve, 4, "exact"))


def told_times(plan: Plan, guidance: Guidance | None, curve: Schedule) -> Tensor:
    """What the network is told, one per call: rows that CFG-Zero* leaves out have none."""
    bound = None if guidance is None else guidance.bind(plan, curve)
    told = [r.time for r in plan.rows if bound is None or not bound.at(r.level).zero]
    whole = plan.dialect == "diffusers" and resolve(plan.name)[0].peer in ("solver", "training")
    kind = torch.int64 if whole and all(t == int(t) for t in told) else torch.float32
    return torch.tensor(told, dtype=kind)
