"""What a study of oracles found: the best sampler and grid at each NFE, equal samplers, where ranks change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pellucid.evidence.study.setups import entry_of, setup_without_grid

OracleFigure = Literal["error", "median", "sliced"]
_EQUAL = 1e-6  # errors of one table under two names differ by rounding alone


@dataclass(frozen=True)
class OracleRun:
    """One run on one mixture."""

    schedule: str
    grid: str
    sampler: str
    mixture: str
    nfe: int
    calls: int
    steps: int
    stochastic: bool
    figures: Mapping[str, float]

    @property
    def name(self) -> str:
        return f"{self.sampler} · {self.grid}"


@dataclass(frozen=True)
class OracleResults:
    """All lines of a study, and the orders of its samplers."""

    lines: tuple[OracleRun, ...]
    orders: tuple[Mapping[str, Any], ...]

    @staticmethod
    def of(rows: Iterable[Mapping[str, Any]]) -> OracleResults:
        lines, orders = [], []
        for row in rows:
            if row["part"] == "order":
                orders.append(row)
                continue
            place = (row["schedule"], row["grid"], row["sampler"])
            for run in row["runs"]:
                if "refused" in run:
                    continue
                about = (run["nfe"], run["calls"], run["steps"], is_noisy(row["sampler"]))
                lines += [
                    OracleRun(*place, mixture, *about, run[mixture])
                    for mixture in run
                    if isinstance(run[mixture], dict)
                ]
        return OracleResults(tuple(lines), tuple(orders))

    @cached_property
    def by_place(self) -> dict[tuple[str, str, int], list[OracleRun]]:
        found: dict[tuple[str, str, int], list[OracleRun]] = {}
        for line in self.lines:
            found.setdefault((line.schedule, line.mixture, line.nfe), []).append(line)
        return found

    @cached_property
    def by_all(self) -> dict[tuple[str, str, int, str, str], OracleRun]:
        return {(line.schedule, line.mixture, line.nfe, line.sampler, line.grid): line for line in self.lines}

    @cached_property
    def least(self) -> dict[tuple[str, str, int], float]:
        """The error of the best at each place where there is one."""
        found = {
            place: [x.figures["error"] for x in there if not x.stochastic] for place, there in self.by_place.items()
        }
        return {place: min(errors) for place, errors in found.items() if errors}

    @cached_property
    def schedules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line.schedule for line in self.lines))

    @cached_property
    def mixtures(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line.mixture for line in self.lines))

    @cached_property
    def budgets(self) -> tuple[int, ...]:
        return tuple(sorted({line.nfe for line in self.lines}))

    @cached_property
    def samplers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line.sampler for line in self.lines))

    @cached_property
    def grids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line.grid for line in self.lines))

    @cached_property
    def twins(self) -> dict[str, str]:
        """Samplers whose tables are those of an earlier one wherever both run, and that one."""
        runs: dict[str, dict[tuple[str, str, str, int], OracleRun]] = {}
        for line in self.lines:
            runs.setdefault(line.sampler, {})[line.schedule, line.grid, line.mixture, line.nfe] = line
        found: dict[str, str] = {}
        for i, name in enumerate(self.samplers):
            for other in self.samplers[:i]:
                if other not in found and same(runs[name], runs[other]):
                    found[name] = other
                    break
        return found

    def at(self, schedule: str, mixture: str, nfe: int, figure: OracleFigure = "error") -> list[OracleRun]:
        """The lines at a place that have a figure, the best first; a table that has two names is there once."""
        there = self.by_place.get((schedule, mixture, nfe), [])
        kept = [line for line in there if figure == "sliced" or not line.stochastic]
        chosen = [line for line in kept if figure in line.figures and line.sampler not in self.twins]
        return sorted(chosen, key=lambda line: line.figures[figure])

    def ranked(self, schedule: str, mixture: str, nfe: int, figure: OracleFigure = "error") -> list[OracleRun]:
        """The samplers at a place, each on its best grid, the best first."""
        return _firsts(self.at(schedule, mixture, nfe, figure), "sampler")

    def ranked_grids(self, schedule: str, mixture: str, nfe: int) -> list[OracleRun]:
        """The grids at a place, each with its best sampler, the best first."""
        return _firsts(self.at(schedule, mixture, nfe), "grid")

    def one(self, schedule: str, mixture: str, nfe: int, sampler: str, grid: str) -> OracleRun | None:
        return self.by_all.get((schedule, mixture, nfe, sampler, grid))

    def names_of(self, sampler: str) -> str:
        """A sampler with the other names of its table."""
        others = [name for name, first in self.twins.items() if first == sampler]
        return " = ".join([sampler, *others])


def is_noisy(sampler: str) -> bool:
    """Whether a sampler draws noise where it has steps enough for it; some do not at few steps."""
    return not entry_of(setup_without_grid(sampler)).deterministic


def same(a: Mapping[Any, OracleRun], b: Mapping[Any, OracleRun]) -> bool:
    both = a.keys() & b.keys()
    if not both or any(line.stochastic for line in (*a.values(), *b.values())):
        return False
    return all(math.isclose(a[k].figures["error"], b[k].figures["error"], rel_tol=_EQUAL) for k in both)


def _firsts(lines: Sequence[OracleRun], what: str) -> list[OracleRun]:
    kept: dict[str, OracleRun] = {}
    for line in lines:
        kept.setdefault(getattr(line, what), line)
    return list(kept.values())


def agreement(a: Sequence[str], b: Sequence[str]) -> float:
    """Kendall's τ between two orders of the names that are in both: 1 the same, −1 turned round."""
    names = [name for name in a if name in set(b)]
    place = {name: i for i, name in enumerate(b)}
    pairs = [(x, y) for i, x in enumerate(names) for y in names[i + 1 :]]
    if not pairs:
        return math.nan
    return sum(1.0 if place[x] < place[y] else -1.0 for x, y in pairs) / len(pairs)


def changes(found: OracleResults, schedule: str, mixture: str) -> str:
    """Who is best from where to where: `deis · karras to 14, ipndm · karras from 20`."""
    bests = [(nfe, ranking[0].name) for nfe in found.budgets if (ranking := found.at(schedule, mixture, nfe))]
    runs: list[tuple[int, int, str]] = []
    for nfe, name in bests:
        if runs and runs[-1][2] == name:
            runs[-1] = (runs[-1][0], nfe, name)
        else:
            runs.append((nfe, nfe, name))
    return ", ".join(f"{name} at {a}" if a == b else f"{name} from {a} to {b}" for a, b, name in runs)
