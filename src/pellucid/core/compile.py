"""compile_plan: (sampler, schedule, target, grid, steps, dialect) → a frozen, proven table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pellucid.core import dialect as dialects
from pellucid.core import grid as grids
from pellucid.core import schedule as schedules
from pellucid.core import target as targets
from pellucid.core.dialect_diffusers import SPACING
from pellucid.core.errors import PlanError, rule
from pellucid.core.grid import Grid, Path
from pellucid.core.plan import Plan, Row, X, row, seal
from pellucid.core.samplers import Draft, Sampler, resolve
from pellucid.core.schedule import EDM, Schedule, Target


def compile_plan(
    sampler: str,
    *,
    schedule: str | Schedule = "scaled_linear",
    target: str | None = None,
    grid: str | Grid | None = None,
    steps: int | None = None,
    dialect: str = "exact",
    skip: int = 0,
    stop: int | None = None,
    between: tuple[float | None, float | None] | None = None,
    **options: Any,
) -> Plan:
    """Turns a sampler into its table, in float64, and proves that each row lands on its level.

    `target` defaults to the schedule's usual one (eps, v under zero terminal SNR, edm, flow), `steps` to 20, `grid` to
    karras for EDM schedules and trailing elsewhere (the class's own in the diffusers dialect). `between` runs from one
    training time to another, exactly (image-to-image, hand-off to a refiner); `skip` and `stop` leave out the first
    legs and those from `stop` on, which is how the peers do it (in the diffusers dialect PNDM's and PLMS' calls).
    `options` are the sampler's own (`pellucid samplers` lists them).
    """
    for name, value, kinds in (
        ("sampler", sampler, str),
        ("grid", grid, (str, Grid, type(None))),
        ("dialect", dialect, str),
    ):
        if not isinstance(value, kinds):
            raise PlanError(rule(name, "a name", value), "type")
    entry, grid_of_name = resolve(sampler)
    curve = schedules.make(schedule)
    kind = curve.carries[0] if target is None else targets.named(target)
    if kind not in curve.carries:
        raise PlanError(
            rule(
                "target",
                f"one that schedule {curve.name} carries ({', '.join(curve.carries)})",
                target,
                _why_not(curve, kind),
            ),
            "target-schedule",
        )
    way = dialects.named(dialect)
    if grid is None:
        grid = grid_of_name or default_grid(entry, curve, way)
    lay = grids.named(grid)
    if grid_of_name is not None and lay.name != grid_of_name:
        raise PlanError(rule("grid", f"{grid_of_name}, as the sampler's name says", lay.name), "grid-twice")
    if entry.family == "inversion" and way == "exact":
        lay = replace(lay, final="sigma_min")  # a clean x holds no eps: it is taken as the least noisy level
    asked = 20 if steps is None and lay.name != "explicit" else steps
    setup = dialects.set_up(way, entry, curve, lay, asked, kind, options)
    count = len(setup.path.legs)
    _check_cuts(entry, way, count, skip, stop, between)
    if skip:
        setup = dialects.start_late(way, entry, setup, skip)
    path = setup.path if between is None else grids.cut(setup.path, *between)
    draft = _draft_of(entry, path, {**options, **setup.options})
    begin = path.legs[-1].end if entry.family == "inversion" else path.legs[0].start
    end = draft.end or path.legs[-1].end
    if stop is not None and stop < count:  # a peer plans all steps, then stops early: its last rows are not special
        if len(draft.rows) != len(path.legs):
            raise PlanError(rule("stop", f"None for {entry.name}, which calls the model twice per step", stop), "stop")
        end = path.legs[stop - skip].start
        draft = replace(draft, rows=draft.rows[: stop - skip])
    scale = begin.sigma if skip or between is not None else setup.initial_scale
    blind = next((r for r in draft.rows if r.level.alpha == 0.0), None)
    if blind is not None and kind in ("eps", "score"):
        targets.to_x0(kind, blind.level)  # raises: pure noise determines no x0
    plan = Plan(
        name=entry.name,
        rows=drop_dead_anchors(draft.rows),
        basis=draft.basis,
        start=begin,
        end=end,
        frame=path.frame,
        initial_scale=1.0 if entry.family == "inversion" else scale,
        clock=entry.clock,
        target=kind,
        schedule=schedules.to_dict(curve),
        grid={
            **lay.to_dict(),
            "steps": setup.steps or count,
            **({"skip": skip} if skip else {}),
            **({"stop": stop} if stop is not None else {}),
            **({"between": list(between)} if between is not None else {}),
        },
        dialect=way,
        options={k: list(v) if isinstance(v, tuple) else v for k, v in options.items()},
        declared="; ".join(d for d in (setup.declared, draft.declared) if d),
    )
    return seal(plan)


def _draft_of(entry: Sampler, path: Path, options: dict[str, Any]) -> Draft:
    """The rows of a path. Where a grid repeats a level, and the sampler cannot divide by that step, x waits there."""
    try:
        return entry.draft(path, options)
    except PlanError as error:
        moves = tuple(leg for leg in path.legs if leg.start != leg.end)
        if error.code != "repeated-level" or not 0 < len(moves) < len(path.legs):
            raise
    draft = entry.draft(replace(path, legs=moves), options)
    if len(draft.rows) != len(moves):
        raise PlanError(rule("levels", f"all different for {entry.name}", "a repeated one"), "repeated-level")
    rows = iter(draft.rows)
    waits = [row(leg.time, leg.start, X, held=True) if leg.start == leg.end else next(rows) for leg in path.legs]
    return replace(draft, rows=waits)


def _check_cuts(
    entry: Sampler,
    dialect: str,
    count: int,
    skip: int,
    stop: int | None,
    between: tuple[float | None, float | None] | None,
) -> None:
    if not isinstance(skip, int) or not 0 <= skip < count:
        raise PlanError(rule("skip", f"a whole number from 0 to {count - 1}", skip), "skip")
    if stop is not None and (not isinstance(stop, int) or not skip < stop <= count):
        raise PlanError(rule("stop", f"a whole number from {skip + 1} to {count}", stop), "stop")
    if between is None:
        return
    if skip or stop is not None or dialect == "diffusers" or entry.family == "inversion":
        raise PlanError(
            "between cannot be combined with skip, stop, inversion or the diffusers dialect.",
            "between",
        )


def drop_dead_anchors(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Leaves out each anchor that no later row reads."""
    kept: list[Row] = []
    needed = False
    for r in reversed(rows):
        if r.anchor is not None and not needed:
            r = replace(r, anchor=None)
        reads = r.uses("anchor")
        needed = reads if r.anchor is not None else needed or reads
        kept.append(r)
    return tuple(reversed(kept))


def default_grid(entry: Sampler, curve: Schedule, dialect: str) -> str:
    """The grid where none is named: karras for EDM, the distillation's for LCM and TCD, else what the dialect uses."""
    if isinstance(curve, EDM):
        return "karras"
    if entry.family == "distilled":
        return "lcm"
    return SPACING.get(entry.peer, "linspace") if dialect == "diffusers" else "trailing"


def _why_not(curve: Schedule, kind: Target) -> str:
    if kind in ("eps", "score") and "eps" not in curve.carries:
        return "At zero terminal SNR x is pure noise, so eps says nothing about x0: use a v or x0 model."
    return {
        "flow": "A flow model needs the schedule `flow`.",
        "edm": "An edm model needs the schedule `edm`.",
    }.get(kind, "")
