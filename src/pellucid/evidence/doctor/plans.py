"""The plan that a subject would run, and what can be measured on it: steps that do nothing, levels that are missed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError
from pellucid.core.plan import Plan, landings
from pellucid.core.schedule import Flow
from pellucid.evidence.doctor.subject import Asked
from pellucid.interop.diffusers_config import Reading
from pellucid.interop.diffusers_plan import compile_reading
from pellucid.pipeline.planning import STEPS

IDENTITY = 1e-9  # how far from "x stays x" a row may be that does nothing
LARGE_SHIFT = 1.15  # diffusers' shift of the largest images, where a config shifts by size and says no other


@dataclass(frozen=True)
class Miss:
    """A call before which x is not at the level that the call is made for; the row after the last is the end."""

    row: int
    gap: float  # as a part of x


def steps_of(asked: Asked) -> int:
    """As many as were asked for, or what a run takes when nobody says."""
    return STEPS if asked.steps is None else asked.steps


def make(reading: Reading, asked: Asked) -> Plan:
    """What `pellucid sample` would run: the config in diffusers' dialect, or the sampler that was named, exactly."""
    try:
        if asked.own:
            return compile_reading(reading, steps_of(asked), **shift_of(reading))
        return compile_plan(
            asked.sampler or reading.sampler,
            schedule=reading.schedule,
            target=reading.target,
            grid=asked.grid,
            steps=steps_of(asked),
            dialect=asked.dialect or "exact",
        )
    except PellucidError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
        must = f"config of {reading.class_name} must have values of the right kind"
        raise PellucidError(f"{must}; got {error}.", "config-value") from None


def shift_of(reading: Reading) -> dict[str, Any]:
    """What a flow pipeline would take from the size of the image."""
    if not (reading.values.get("use_dynamic_shifting") and isinstance(reading.schedule, Flow)):
        return {}
    return {"mu": float(reading.values.get("max_shift", LARGE_SHIFT))}


def exact(reading: Reading, asked: Asked) -> Plan:
    """The same sampler, steps and grid without diffusers' rounding and habits."""
    return compile_reading(reading, steps_of(asked), dialect="exact", **shift_of(reading))


def null_rows(plan: Plan) -> list[int]:
    """Calls of the model after which x is what it was."""
    return [
        number
        for number, row in enumerate(plan.rows)
        if all(abs(weight - (register == 0)) <= IDENTITY for register, weight in row.x) and row.anchor is None
    ]


def misses(plan: Plan, least: float) -> list[Miss]:
    """Where x is off its level by more than `least`."""
    return [Miss(row, gap) for row, (gap, _) in enumerate(landings(plan)) if gap > least]


def told_again(plan: Plan) -> int:
    """Calls that tell the network a time that it was told at another level before."""
    seen: dict[float, float] = {}
    count = 0
    for row in plan.rows:
        known = seen.setdefault(row.time, row.level.ratio)
        count += abs(known - row.level.ratio) > IDENTITY * known
    return count
