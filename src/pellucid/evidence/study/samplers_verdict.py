"""What follows from the figures of a sampler study: the fronts, the knee, who comes first, and one recommendation."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from pellucid.evidence.study.cells import Cell
from pellucid.evidence.study.front import Array, Knee, front, knee_of
from pellucid.evidence.study.page_chart import short
from pellucid.evidence.study.samplers_latency import Latency
from pellucid.evidence.study.samplers_results import Column

POINTS = 65  # of the common range of model calls at which samplers are compared
TINY = 1e-12
TIE = 1e-4  # a part of a figure: samplers that make the same images differ by less
DISTANCES = ("distance", "latent")
TIE_OF_DISTANCES = 5e-3  # on a GPU by up to 3e-3, since rounding moves some images far


@dataclass(frozen=True)
class Ranked:
    """A sampler over the whole range of model calls that all have: its mean figure, how often it came first in the
    resamples, and how many times worse than the first it is (the difference, where less is not better)."""

    sampler: str
    value: float
    first: float
    behind: tuple[float, float, float]  # estimate, low, high


@dataclass(frozen=True)
class Verdict:
    """Fronts are cells by number, cheapest first. `knee` is the cell to use: a knee, or (not `found`) the best
    of the asked. `sentence` is the recommendation, `words` its command, `call` the same for a pipeline's call."""

    by: str
    by_calls: list[int]
    by_seconds: list[int]
    knee: Knee | None
    knee_seconds: Knee | None
    ranking: list[Ranked]
    sentence: str
    words: str
    call: dict[str, Any] = field(default_factory=dict)
    comparison: str = ""  # who comes first over the whole range, and how given plans compare at their calls

    def place(self, cell: int) -> str:
        """'knee', 'front' or nothing, for the table."""
        if self.knee is not None and self.knee.found and cell == self.knee.cell:
            return "knee"
        return "front" if cell in self.by_calls else ""


def verdict(cells: list[Cell], column: Column, latencies: list[Latency], guidance: Any, start: str | None) -> Verdict:
    """`start` begins the command to paste: the model and what it is asked; None for what has no name to load by."""
    measure, drawn = column.measure, column.drawn
    assert drawn is not None
    calls = np.array([cell.nfe for cell in cells], float)
    seconds = np.array([one.median for one in latencies])
    part = TIE_OF_DISTANCES if measure.name in DISTANCES else TIE
    loss, losses = (tied(measure.loss(values), part) for values in (column.values, drawn))
    count = losses.shape[1]
    times = np.stack([one.drawn(count, seed) for seed, one in enumerate(latencies)])
    knee = knee_of(calls, loss, losses)
    timed = bool(np.isfinite(seconds).all())
    pick = None if knee is None else cells[knee.cell]
    order = ranking(cells, column)
    return Verdict(
        by=measure.name,
        by_calls=front(calls, loss),
        by_seconds=front(seconds, loss) if timed else [],
        knee=knee,
        knee_seconds=knee_of(seconds, loss, np.stack([times, losses])) if timed else None,
        ranking=order,
        sentence=sentence(cells, column, latencies, knee),
        words="" if pick is None or start is None else command(pick, guidance, start),
        call={} if pick is None else pick.asks() | ({} if guidance is None else {"guidance": guidance}),
        comparison=" ".join(filter(None, [told(order, column, pick), *of_plans(cells, column)])),
    )


def tied(losses: Array, part: float) -> Array:
    """(C, …): what differs by rounding alone is equal, and of equals the first is taken."""
    found = losses.copy()
    with np.errstate(invalid="ignore"):
        for i, j in combinations(range(len(found)), 2):
            found[j] = np.where(np.abs(found[j] - found[i]) <= part * np.abs(found[i]), found[i], found[j])
    return found


def sentence(cells: list[Cell], column: Column, latencies: list[Latency], knee: Knee | None) -> str:
    """What to use, what it costs, what it gives, and how sure the knee is, or that none was found."""
    if knee is None:
        return "No sampler can be recommended: no cell has finite figures."
    cell, measure, i = cells[knee.cell], column.measure, knee.cell
    seconds = latencies[i].median
    cost = f"{cell.nfe} model calls" + (f", {short(seconds, 3)} s per image," if np.isfinite(seconds) else "")
    figure = interval(column, i)
    gives = {
        "distance": f"leave it {figure} RMSE from the converged image",
        "latent": f"leave it {figure} RMSE from the converged latents",
    }.get(measure.name, f"give {measure.amount(figure)}")
    steps = f"with {cell.steps} steps" if cell.setup.file is None else "as it is"
    return f"Use {cell.setup.label} {steps}: {cost} {gives}{about_knee(knee)}."


def about_knee(knee: Knee) -> str:
    """Where the knee is, and what more calls bring; or that none was found."""
    if knee.beyond == "more":
        return (
            f", the best of what was asked. No knee was found within the asked steps: at {knee.cost:g} calls, the "
            "most that were asked, there is still a gain. Ask for more steps"
        )
    if knee.beyond == "unknown":
        return f", the best of what was asked. No knee can be found at {knee.cost:g} calls alone: ask for more steps"
    span = f"{knee.low:g}" if knee.low == knee.high else f"{knee.low:g} to {knee.high:g}"
    less = "a doubling of the calls gains less than it does on the average of the range"
    more = less if knee.beyond == "less" else "more calls gained nothing"
    return f", at the knee of the front (in 95 % of resamples at {span} calls), beyond which {more}"


def interval(column: Column, i: int) -> str:
    """'0.0123 (0.0119 to 0.0127)'"""
    scale = column.measure.scale
    value, low, high = (short(float(held[i]) * scale, 3) for held in (column.values, column.low, column.high))
    return f"{value} ({low} to {high})"


def command(cell: Cell, guidance: Any, start: str) -> str:
    """What to paste into a shell."""
    scale = "" if guidance is None else f' --guidance "{guidance}"'
    return f"pellucid sample {start} {cell.setup.words(cell.steps)}{scale}"


# --- who comes first -------------------------------------------------------------------------------------------


def ranking(cells: list[Cell], column: Column) -> list[Ranked]:
    """Samplers by their mean over the range of model calls that all of them cover, in equal parts of its logarithm.

    Distances are averaged as logarithms, so that a factor counts the same at 5 calls and at 100. Samplers with one
    step count, such as plans, have no range: `of_plans` compares these at their own calls.
    """
    groups = {text: held for text, held in by_sampler(cells).items() if len(held) > 1}
    groups = {text: held for text, held in groups.items() if np.isfinite(column.values[held]).all()}
    if not groups:
        return []
    low = max(cells[held[0]].nfe for held in groups.values())
    high = min(cells[held[-1]].nfe for held in groups.values())
    if low > high:
        return []
    at = np.linspace(np.log(low), np.log(high), POINTS)
    scaled = column.measure.name in DISTANCES
    assert column.drawn is not None
    values, drawn = {}, {}
    for text, held in groups.items():
        calls = np.log([cells[i].nfe for i in held])
        table = np.concatenate([column.values[held, None], column.drawn[held]], axis=1)  # (steps, 1 + R)
        found = over_range(at, calls, np.log(np.maximum(table, TINY)) if scaled else table)
        values[text], drawn[text] = found[0], found[1:]
    return ranked(values, drawn, column.measure.less, scaled)


def names(cells: list[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.setup.label for cell in cells))


def by_sampler(cells: list[Cell]) -> dict[str, list[int]]:
    """The cells of each sampler by number, cheapest first."""
    held = {label: [i for i, cell in enumerate(cells) if cell.setup.label == label] for label in names(cells)}
    return {label: sorted(own, key=lambda i: cells[i].nfe) for label, own in held.items()}


def over_range(at: Array, calls: Array, table: Array) -> Array:
    """The mean of each column of a table (steps, R) over places between its calls."""
    found = np.stack([np.interp(at, calls, table[:, r]) for r in range(table.shape[1])])
    return np.asarray(found.mean(1), float)


def ranked(values: dict[str, float], drawn: dict[str, Array], less: bool, scaled: bool) -> list[Ranked]:
    """The first comes first; of samplers that differ by rounding alone, the one that was asked for first."""
    part = TIE_OF_DISTANCES if scaled else TIE
    table = np.stack([np.concatenate([[values[text]], drawn[text]]) for text in values])  # (S, 1 + R)
    table = np.log(tied(np.exp(table), part)) if scaled else tied(table, part)
    table *= 1.0 if less else -1.0
    order = np.argsort(table[:, 0], kind="stable")
    table, texts = table[order], [list(values)[i] for i in order]
    first = np.bincount(table[:, 1:].argmin(0), minlength=len(texts)) / (table.shape[1] - 1)
    found = []
    for i, text in enumerate(texts):
        apart = table[i] - table[0]
        gap = (apart[0] + 0.0, *np.quantile(apart[1:], [0.025, 0.975]))
        behind = tuple(float(np.exp(g) if scaled else g) for g in gap)
        value = float(np.exp(values[text]) if scaled else values[text])
        found.append(Ranked(text, value, float(first[i]), behind))  # type: ignore[arg-type]
    return found


def told(found: list[Ranked], column: Column, pick: Cell | None = None) -> str:
    """Who is first over the whole range, and by how much; and where that is not `pick`, why `pick` is to be used."""
    if len(found) < 2:
        return ""
    scaled = column.measure.name in DISTANCES
    alike = [one for one in found if set(one.behind) == {found[0].behind[0]}]  # in every resample too
    rest = [one for one in found if one not in alike]
    names = [one.sampler for one in alike]
    if len(alike) > 1:
        lead = f"{', '.join(names[:-1])} and {names[-1]} come first over the whole range, with the same figures"
    else:
        lead = f"{names[0]} comes first over the whole range (in {100 * alike[0].first:.0f} % of resamples)"
    if rest:
        value, low, high = rest[0].behind
        sure = "" if low > (1.0 if scaled else 0.0) else "; they are not distinguishable"
        lead += f", then {rest[0].sampler}, {gap_words(column, value, low, high)}{sure}"
    if pick is not None and pick.setup.label not in names:
        lead += f". With {pick.nfe} calls or fewer nothing that was asked is better than {pick.setup.label}"
    return f"{lead}."


def gap_words(column: Column, value: float, low: float, high: float) -> str:
    if column.measure.name in DISTANCES:
        return f"whose distance is {value:.2f} ({low:.2f} to {high:.2f}) times as large"
    ends = [short(v * column.measure.scale) for v in (value, low, high)]
    return "behind by " + column.measure.amount("{} ({} to {})".format(*ends))


def of_plans(cells: list[Cell], column: Column) -> list[str]:
    """Each plan that was given as a file, beside the best of the samplers at its own number of calls."""
    return [words for i, cell in enumerate(cells) if cell.setup.file and (words := of_plan(i, cells, column))]


def of_plan(i: int, cells: list[Cell], column: Column) -> str:
    assert column.drawn is not None
    label, nfe, scaled = cells[i].setup.label, cells[i].nfe, column.measure.name in DISTANCES
    table = np.concatenate([column.values[:, None], column.drawn], axis=1)  # (C, 1 + R)
    table = np.log(np.maximum(table, TINY)) if scaled else table
    others = {}
    for text, held in by_sampler(cells).items():
        calls = [cells[j].nfe for j in held]
        if cells[held[0]].setup.file is None and calls[0] <= nfe <= calls[-1] and np.isfinite(table[held, 0]).all():
            others[text] = over_range(np.log([nfe]), np.log(calls), table[held])
    if not others or not np.isfinite(table[i, 0]):
        return f"{label}: {nfe} calls, where no sampler was asked to compare it with."
    sign = 1.0 if column.measure.less else -1.0
    least = min(sign * held[0] for held in others.values())
    best = next(text for text, held in others.items() if sign * held[0] <= least + TIE_OF_DISTANCES * scaled)
    apart = sign * (table[i] - others[best])
    value, low, high = apart[0], *np.quantile(apart[1:], [0.025, 0.975])
    figure = interval(column, i)
    if scaled:
        ends = [f"{np.exp(v):.2f}" for v in (value, low, high)]
        gap = "{} ({} to {}) times that of".format(*ends)
    else:
        ends = [short(v * column.measure.scale) for v in (value, low, high)]
        gap = f"{column.measure.amount('{} ({} to {})'.format(*ends))} behind"
    sure = "" if low > 0 or high < 0 else "; they are not distinguishable"
    return f"{label}: {figure} with {nfe} calls, {gap} {best}, the best of the samplers at as many calls{sure}."
