"""The teacher: the same seeds with so many steps that more would change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError, rule
from pellucid.core.grid import Grid
from pellucid.core.plan import Plan
from pellucid.core.schedule import Schedule
from pellucid.evidence.tune.errors import Drawn, Truth, distance, ends
from pellucid.evidence.tune.pairs import Pairs
from pellucid.evidence.tune.subject import Subject

SAMPLER = "dpmpp_3m"
STEPS = 200
FEWEST, MOST = 20, 2000
SIGNAL = 300.0  # sigma / alpha of the second call after pure noise
LOOKED_AT = 32  # pairs on which the teacher itself is judged


def teacher_plan(schedule: Schedule, target: str, steps: int) -> Plan:
    """Third order, even in λ. From pure noise, where λ is infinite, one step leads to where signal begins to tell."""
    low, high = schedule.ratio_at(schedule.span)
    if 0 < high < math.inf:
        grid = Grid("explicit", sigmas=tuple(schedule.sigma_of(np.geomspace(high, low, steps))))
    else:
        ratios = [math.inf, *np.geomspace(SIGNAL, low, steps - 1)]
        grid = Grid("explicit", timesteps=tuple(np.clip(schedule.time_at(np.array(ratios)), *schedule.span)))
    return compile_plan(SAMPLER, schedule=schedule, target=target, grid=grid)


def check_steps(steps: object, tuned: int) -> int:
    least = max(FEWEST, 4 * tuned)
    if isinstance(steps, bool) or not isinstance(steps, int) or not least <= steps <= MOST:
        raise PellucidError(rule("--teacher", f"from {least} to {MOST} steps for a plan of {tuned}", steps), "teacher")
    return steps


def teach(
    subject: Subject, pairs: Pairs, steps: int, at_once: int, done: Callable[[int], object] | None = None
) -> Truth:
    """The converged x0 of every pair."""
    plan, drawn = teacher_plan(subject.schedule, subject.target, steps), Drawn.of(subject, pairs)
    return Truth(drawn, ends(plan, subject, drawn, at_once, done))


def doubt(subject: Subject, truth: Truth, steps: int, at_once: int) -> float:
    """The mean distance from a teacher of half the steps: an upper bound of what the teacher itself is off."""
    few = truth.first(LOOKED_AT)
    half = teacher_plan(subject.schedule, subject.target, steps // 2)
    return float(distance(ends(half, subject, few.drawn, at_once), few.x0).mean())
