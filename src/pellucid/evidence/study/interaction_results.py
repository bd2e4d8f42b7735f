"""Where the best sampler changes from model to model, and whether the change is more than chance.

Set-ups are compared at budgets of model calls: each with its most steps that fit. Distances are compared as logarithms
(a factor is a factor at 5 calls and at 50), other measures as they are. Two groups have different best set-ups for sure
where each one's own is better than the other's in its own group: over the models of a group by Student's t where there
are several, which holds for other training runs; else over resampled images, which holds for this one. Distances that
are no larger than three times what the converged run itself still moves are not resolved, and no change is sure there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

from pellucid.evidence.study.front import Array
from pellucid.evidence.study.interaction import Seen
from pellucid.evidence.study.samplers_figures import UNRESOLVED
from pellucid.evidence.study.samplers_results import Measure
from pellucid.evidence.study.significance import t_interval

TINY = 1e-12
SCALED = ("distance", "latent")  # compared by their ratio


@dataclass(frozen=True)
class Best:
    """The best set-up of one model at a budget: its figure, how often it came first in the resamples, and who else
    cannot be told from it (the interval of the difference holds zero)."""

    model: str
    budget: int
    setup: str
    value: float
    low: float
    high: float
    first: float
    rivals: tuple[str, ...]
    resolved: bool = True


@dataclass(frozen=True)
class Gap:
    """How much worse one set-up is than another in a group: a factor where the measure is compared so, else a
    difference; `over` is what the interval holds for."""

    value: float
    low: float
    high: float
    over: str  # "models" or "pictures"

    def worse(self, nothing: float) -> bool:
        return self.low > nothing


@dataclass(frozen=True)
class Change:
    """Two groups at a budget whose best set-ups differ. `kept_there`: what the first group's best costs in the second;
    `kept_here`: what the second's costs in the first."""

    budget: int
    here: str
    there: str
    best_here: str
    best_there: str
    kept_there: Gap
    kept_here: Gap
    sure: bool


class Interaction:
    """All models of a study side by side."""

    def __init__(self, seen: Sequence[Seen], budgets: Sequence[int]) -> None:
        self.seen, self.budgets = tuple(seen), tuple(sorted(budgets))
        self.measure: Measure = seen[0].column.measure

    @property
    def scaled(self) -> bool:
        return self.measure.name in SCALED

    @property
    def nothing(self) -> float:
        """The gap of two equals."""
        return 1.0 if self.scaled else 0.0

    @cached_property
    def setups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.setup.text for one in self.seen for cell in one.cells))

    @cached_property
    def groups(self) -> dict[str, list[Seen]]:
        found: dict[str, list[Seen]] = {}
        for one in self.seen:
            found.setdefault(one.group, []).append(one)
        return found

    # --- one model ------------------------------------------------------------------------------------------------

    def cell(self, one: Seen, setup: str, budget: int) -> int | None:
        """The number of a set-up's cell with the most calls that fit into a budget."""
        fit = [i for i, c in enumerate(one.cells) if c.setup.text == setup and c.nfe <= budget]
        good = [i for i in fit if math.isfinite(one.column.values[i])]
        return max(good, key=lambda i: (one.cells[i].nfe, one.cells[i].steps)) if good else None

    def loss(self, one: Seen, setup: str, budget: int) -> Array:
        """(1 + R,): the estimate and its resamples, less is better, as they are compared; NaN where it has none."""
        i = self.cell(one, setup, budget)
        assert one.column.drawn is not None
        if i is None:
            return np.full(1 + one.column.drawn.shape[1], math.nan)
        held = np.concatenate([one.column.values[i : i + 1], one.column.drawn[i]])
        held = self.measure.loss(held)
        return np.log(np.maximum(held, TINY)) if self.scaled else held

    def table(self, one: Seen, budget: int) -> Array:
        """(S, 1 + R) of all set-ups; what has no cell is infinitely bad."""
        held = np.stack([self.loss(one, setup, budget) for setup in self.setups])
        return np.where(np.isfinite(held), held, math.inf)

    def best(self, one: Seen, budget: int) -> Best | None:
        held = self.table(one, budget)
        if not np.isfinite(held[:, 0]).any():
            return None
        i = int(held[:, 0].argmin())
        first = float((held[:, 1:].argmin(0) == i).mean())
        rivals = [
            setup
            for j, setup in enumerate(self.setups)
            if j != i and math.isfinite(held[j, 0]) and np.quantile(held[j, 1:] - held[i, 1:], 0.025) <= 0
        ]
        number = self.cell(one, self.setups[i], budget)
        assert number is not None
        column = one.column
        ends = [float(part[number]) for part in (column.values, column.low, column.high)]
        resolved = self.resolved(one, self.setups[i], budget)
        return Best(one.name, budget, self.setups[i], *ends, first, tuple(rivals), resolved)

    def resolved(self, one: Seen, setup: str, budget: int) -> bool:
        """Whether a distance is well above what the converged run still moves; other measures have no such bound."""
        i = self.cell(one, setup, budget)
        return i is None or not one.column.values[i] < UNRESOLVED * one.floor

    # --- groups ---------------------------------------------------------------------------------------------------

    def mean(self, group: str, setup: str, budget: int) -> float:
        """Of the losses of a group's models; infinite where one has none."""
        held = [float(self.loss(one, setup, budget)[0]) for one in self.groups[group]]
        return float(np.mean(held)) if all(map(math.isfinite, held)) else math.inf

    def best_of(self, group: str, budget: int) -> str | None:
        means = {setup: self.mean(group, setup, budget) for setup in self.setups}
        name = min(means, key=means.__getitem__)
        return name if math.isfinite(means[name]) else None

    def gap(self, group: str, setup: str, other: str, budget: int) -> Gap:
        """How much worse a set-up is than another in a group."""
        apart = [self.loss(one, setup, budget) - self.loss(one, other, budget) for one in self.groups[group]]
        if len(apart) > 1:
            value, half = t_interval([float(held[0]) for held in apart])
            ends, over = (value, value - half, value + half), "models"
        else:
            low, high = np.quantile(apart[0][1:], [0.025, 0.975])
            ends, over = (float(apart[0][0]), float(low), float(high)), "pictures"
        return Gap(*(math.exp(v) if self.scaled else v for v in ends), over)

    def changes(self) -> list[Change]:
        """Every pair of groups at every budget whose best set-ups differ."""
        found = []
        for budget in self.budgets:
            for here, there in combinations(self.groups, 2):
                a, b = self.best_of(here, budget), self.best_of(there, budget)
                if a is None or b is None or a == b or not self.both(here, there, a, b, budget):
                    continue
                kept_there, kept_here = self.gap(there, a, b, budget), self.gap(here, b, a, budget)
                clear = all(
                    self.resolved(one, s, budget) for g in (here, there) for one in self.groups[g] for s in (a, b)
                )
                sure = clear and kept_there.worse(self.nothing) and kept_here.worse(self.nothing)
                found.append(Change(budget, here, there, a, b, kept_there, kept_here, sure))
        return found

    def both(self, here: str, there: str, a: str, b: str, budget: int) -> bool:
        return all(math.isfinite(self.mean(group, setup, budget)) for group in (here, there) for setup in (a, b))

    def spreads(self, budget: int) -> tuple[float, float, float] | None:
        """How much of the losses (group × set-up) is the set-up's, the group's, and their interaction's: root mean
        squares of the two-way table. None where groups share fewer than two set-ups."""
        table = np.array([[self.mean(group, setup, budget) for setup in self.setups] for group in self.groups])
        kept = table[:, np.isfinite(table).all(0)]
        if kept.shape[0] < 2 or kept.shape[1] < 2:
            return None
        whole, rows, columns = kept.mean(), kept.mean(1, keepdims=True), kept.mean(0, keepdims=True)
        parts = (columns - whole, rows - whole, kept - rows - columns + whole)
        found = [float(np.sqrt((part**2).mean())) for part in parts]
        return tuple(math.exp(v) if self.scaled else v for v in found)  # type: ignore[return-value]
