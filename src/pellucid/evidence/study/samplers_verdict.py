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
TIE = 1e-4  # a part of a figure: samplers that make the same pictures differ by less
DISTANCES = ("distance", "latent")
TIE_OF_DISTANCES = 5e-3  # on a GPU by up to 3e-3, since rounding moves some pictures far


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
    return Verdict(
        by=measure.name,
        by_calls=front(calls, loss),
        by_seconds=front(seconds, loss) if timed else [],
        knee=knee,
        knee_seconds=knee_of(seconds, loss, np.stack([times, losses])) if timed else None,
        ranking=ranking(cells, column),
        sentence=sentence(cells, column, latencies, knee),
        words="" if pick is None or start is None else command(pick, guidance, start),
        call={} if pick is None else pick.asks() | ({} if guidance is None else {"guidance": guidance}),
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
    cost = f"{cell.nfe} model calls" + (f", {short(seconds, 3)} s a picture," if np.isfinite(seconds) else "")
    figure = interval(column, i)
    gives = {
        "distance": f"leave it {figure} RMSE from the converged picture",
        "latent": f"leave it {figure} RMSE from the converged latents",
    }.get(measure.name, f"give {measure.amount(figure)}")
    steps = f"with {cell.steps} steps" if cell.setup.file is None else "as it is"
    return f"Use {cell.setup.text} {steps}: {cost} {gives}{about_knee(knee)}."


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
    """What to paste into a shell: the guidance of the study was taken as it is, so it is unguarded there too."""
    scale = "" if guidance is None else f' --guidance "{guidance}" --unguarded'
    return f"pellucid sample {start} {cell.setup.words(cell.steps)}{scale}"


# --- who comes first -------------------------------------------------------------------------------------------


def ranking(cells: list[Cell], column: Column) -> list[Ranked]:
    """Samplers by their mean over the range of model calls that all of them cover, in equal parts of its logarithm.

    Distances are averaged as logarithms, so that a factor counts the same at 5 calls and at 100. Samplers with one
    step count, such as plans, have no range and are left out.
    """
    groups = {text: [i for i, c in enumerate(cells) if c.setup.text == text] for text in names(cells)}
    groups = {text: sorted(held, key=lambda i: cells[i].nfe) for text, held in groups.items() if len(held) > 1}
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
    return list(dict.fromkeys(cell.setup.text for cell in cells))


def over_range(at: Array, calls: Array, table: Array) -> Array:
    """The mean of each column of a table (steps, R) over places between its calls."""
    found = np.stack([np.interp(at, calls, table[:, r]) for r in range(table.shape[1])])
    return np.asarray(found.mean(1), float)


def ranked(values: dict[str, float], drawn: dict[str, Array], less: bool, scaled: bool) -> list[Ranked]:
    sign = 1.0 if less else -1.0
    order = sorted(values, key=lambda text: sign * values[text])
    table = np.stack([sign * drawn[text] for text in order])  # (S, R)
    first = np.bincount(table.argmin(0), minlength=len(order)) / table.shape[1]
    found = []
    for i, text in enumerate(order):
        apart = table[i] - table[0]
        gap = (sign * (values[text] - values[order[0]]) + 0.0, *np.quantile(apart, [0.025, 0.975]))
        behind = tuple(float(np.exp(g) if scaled else g) for g in gap)
        value = float(np.exp(values[text]) if scaled else values[text])
        found.append(Ranked(text, value, float(first[i]), behind))  # type: ignore[arg-type]
    return found


def told(found: list[Ranked], column: Column) -> str:
    """Who is first, and by how much: one sentence."""
    if len(found) < 2:
        return ""
    a, b = found[0], found[1]
    value, low, high = b.behind
    scaled = column.measure.name in DISTANCES
    sure = low > (1.0 if scaled else 0.0)
    lead = f"{a.sampler} comes first over the whole range (in {100 * a.first:.0f} % of resamples), then {b.sampler}"
    if scaled:
        gap = f"whose distance is {value:.2f} ({low:.2f} to {high:.2f}) times as large"
    else:
        ends = [short(v * column.measure.scale) for v in (value, low, high)]
        gap = "behind by " + column.measure.amount("{} ({} to {})".format(*ends))
    return f"{lead}, {gap}{'' if sure else '; they are not distinguishable'}."
