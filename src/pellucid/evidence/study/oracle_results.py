"""What a study of oracles found: the best sampler and grid at each NFE, equal samplers, where ranks change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby
from operator import itemgetter
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
            for run in (run for run in row["runs"] if "refused" not in run):
                about = (run["nfe"], run["calls"], run["steps"], is_noisy(row["sampler"]))
                held = {mixture: figures for mixture, figures in run.items() if isinstance(figures, dict)}
                lines += [OracleRun(*place, mixture, *about, figures) for mixture, figures in held.items()]
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
            firsts = (one for one in self.samplers[:i] if one not in found and same(runs[name], runs[one]))
            if (first := next(firsts, None)) is not None:
                found[name] = first
        return found

    def at(self, schedule: str, mixture: str, nfe: int, figure: OracleFigure = "error") -> list[OracleRun]:
        """The lines at a place that have a figure, the best first; a table that has two names is there once."""
        kept = [one for one in self.by_place.get((schedule, mixture, nfe), []) if one.sampler not in self.twins]
        chosen = [one for one in kept if figure in one.figures and (figure == "sliced" or not one.stochastic)]
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
    place = {name: i for i, name in enumerate(b)}
    signs = [1.0 if x < y else -1.0 for x, y in combinations([place[name] for name in a if name in place], 2)]
    return sum(signs) / len(signs) if signs else math.nan


def changes(found: OracleResults, schedule: str, mixture: str) -> str:
    """Who is best from where to where: `deis · karras to 14, ipndm · karras from 20`."""
    bests = [(ranking[0].name, nfe) for nfe in found.budgets if (ranking := found.at(schedule, mixture, nfe))]
    runs = [(name, [nfe for _, nfe in own]) for name, own in groupby(bests, key=itemgetter(0))]
    return ", ".join(f"{name} at {a}" if not b else f"{name} from {a} to {b[-1]}" for name, (a, *b) in runs)
