"""Starts: the samplers that tuning may begin with, and their rows on any levels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pellucid.core import grid as grids
from pellucid.core.compile import compile_plan
from pellucid.core.dialect import on_frame
from pellucid.core.errors import PellucidError, rule
from pellucid.core.plan import Plan
from pellucid.core.samplers import Sampler, resolve
from pellucid.core.samplers.registry import Draft
from pellucid.core.schedule import Array, Schedule
from pellucid.evidence.tune.shares import BASES

ORDERED = re.compile(r"(?P<name>.+)-(?P<order>\d)")
FEWEST, MOST = 2, 100  # steps of a plan that is tuned


@dataclass(frozen=True)
class Start:
    """A sampler with its options, and the grid whose levels come first."""

    sampler: str
    grid: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    @staticmethod
    def parse(text: str) -> Start:
        """`unipc-3:kl_optimal`: a sampler, its order where it has one, and a grid."""
        name, sign, grid = text.partition(":")
        if not sign or not name or not grid:
            raise PellucidError(rule("--start", "SAMPLER:GRID, such as unipc-3:karras", text), "start")
        ordered = ORDERED.fullmatch(name)
        known = resolve(ordered["name"])[0] if ordered else None
        if known is not None and ordered is not None and "order" in known.options():
            made = Start(known.name, grids.named(grid).name, {"order": int(ordered["order"])})
        else:
            made = Start(resolve(name)[0].name, grids.named(grid).name)
        made.check()
        return made

    @property
    def entry(self) -> Sampler:
        return resolve(self.sampler)[0]

    @property
    def text(self) -> str:
        order = f"-{self.options['order']}" if "order" in self.options else ""
        return f"{self.sampler}{order}:{self.grid}"

    def check(self) -> None:
        """Refuses what draws noise, and what spends more than one call on a step."""
        entry = self.entry
        if not entry.deterministic:
            advice = "Tuning compares images of one seed: use unipc-3, dpmpp_2m or deis."
            raise PellucidError(rule("--start", "a deterministic sampler", self.sampler, advice), "start-stochastic")
        if not tunable(entry):
            advice = "Use unipc-3, dpmpp_2m or deis."
            raise PellucidError(rule("--start", "a sampler of one call a step", self.sampler, advice), "start")

    def plan(self, schedule: Schedule, target: str, steps: int) -> Plan:
        return compile_plan(self.sampler, schedule=schedule, target=target, grid=self.grid, steps=steps, **self.options)

    def draft(self, schedule: Schedule, ratios: Sequence[float] | Array) -> Draft:
        """The sampler's own rows when it calls at these sigma / alpha, and ends clean."""
        told = schedule.time_at(np.asarray(ratios))
        ends = [*ratios[1:], 0.0]
        path = on_frame(self.entry, schedule, lambda frame: grids.build(schedule, frame, told, ratios, ends))
        return self.entry.draft(path, dict(self.options))


def tunable(entry: Sampler) -> bool:
    """Whether a sampler's rows can be tuned: one deterministic call a leg, over registers that the law pins."""
    if not entry.deterministic or entry.family in ("inversion", "distilled") or entry.calls != 1:
        return False
    try:
        plan = compile_plan(entry.name, schedule="linear", grid="exponential", steps=6)
    except PellucidError:
        return False
    return plan.nfe == 6 and not plan.guided and not plan.declared and plan.basis in BASES and plan.end.sigma == 0.0


def check_steps(steps: object) -> int:
    if isinstance(steps, bool) or not isinstance(steps, int) or not FEWEST <= steps <= MOST:
        raise PellucidError(rule("--steps", f"a whole number from {FEWEST} to {MOST}", steps), "steps")
    return steps
