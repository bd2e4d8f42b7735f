"""The report of an oracle study: tables, charts of error against model calls, and report.html."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any

from pellucid.evidence.report import charts
from pellucid.evidence.report.charts import Axis, Chart, Mark, Series
from pellucid.evidence.report.page import Code, Page, Table, Text
from pellucid.evidence.statistics import Estimate
from pellucid.evidence.study.oracle import (
    MIXTURES,
    LawSlices,
    OracleResults,
    OracleRun,
    OracleStudy,
    OracleStudyConfig,
    agreement,
    changes,
    is_noisy,
    same_levels,
)
from pellucid.interop.atomic_files import put

# --- Tables ---------------------------------------------------------------------------------------------------------

_HABITS = (
    ("dpmpp_2m", "karras"),
    ("dpmpp_2m", "trailing"),
    ("euler", "trailing"),
    ("heun", "karras"),
    ("unipc", "trailing"),
)
_ROWS_SHOWN = 12  # rows of a list of set-ups
_Choice = Callable[[str, str, int], OracleRun | None]
_RELATIVE = "Errors are relative to the size of the data: 0.01 is a distance of one percent."


def _tables_of(found: OracleResults, floors: dict[str, float]) -> list[Table]:
    tables = [best_table(found, mixture) for mixture in found.mixtures]
    tables += [table_of(found) for table_of in (one_choice_table, _samplers_table, _grids_table)]
    tables += [_laws_table(found, floors), _ranks_table(found), _orders_table(found)]
    return [table for table in tables if table.rows]


def _number_words(value: float) -> str:
    """Two digits that count; − where there is none."""
    if not math.isfinite(value):
        return "−"
    if 1e-3 <= value < 1e4:
        return f"{value:.2g}" if value < 100 else f"{value:.0f}"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")


def _mean(values: Iterable[float]) -> float:
    """The geometric mean; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


def best_table(found: OracleResults, mixture: str) -> Table:
    rows = [(str(nfe), *(_first_words(found.at(s, mixture, nfe)) for s in found.schedules)) for nfe in found.budgets]
    note = (
        "The deterministic sampler and grid that end closest to the exact flow of the same noise (root mean square) "
        f"with at most so many model calls. {_RELATIVE}"
    )
    return Table(f"The best at each NFE, {mixture} mixture", ("NFE", *found.schedules), tuple(rows), note)


def _first_words(lines: Iterable[OracleRun], figure: str = "error") -> str:
    """The first of some runs with its figure."""
    return next((f"{line.name} {_number_words(line.figures[figure])}" for line in lines), "−")


def _regret(found: OracleResults, pick: _Choice, nfe: int, schedules: Sequence[str]) -> float:
    """How many times the error of the best a choice has, as the geometric mean over schedules and mixtures; NaN where
    it does not run everywhere."""
    ratios = []
    for place in product(schedules, found.mixtures, [nfe]):
        line, least = pick(*place), found.least.get(place)
        if line is None or least is None or "error" not in line.figures:
            return math.nan
        ratios.append(line.figures["error"] / least)
    return _mean(ratios)


def regrets(found: OracleResults, schedules: Sequence[str]) -> dict[tuple[str, str], list[float]]:
    """Of every sampler and grid, at each budget."""
    pairs = dict.fromkeys((line.sampler, line.grid) for line in found.lines if not line.stochastic)
    picks = {pair: partial(found.one, sampler=pair[0], grid=pair[1]) for pair in pairs}
    return {pair: [_regret(found, pick, nfe, schedules) for nfe in found.budgets] for pair, pick in picks.items()}


def _choices(found: OracleResults, schedules: Sequence[str]) -> list[tuple[float, tuple[str, str]]]:
    """Every sampler and grid that runs at all budgets of some schedules, with its regret over them; the best first."""
    known = regrets(found, schedules)
    return sorted((_mean(values), pair) for pair, values in known.items() if all(map(math.isfinite, values)))


def one_choice_table(found: OracleResults) -> Table:
    """One choice for all schedules and mixtures."""
    known = regrets(found, found.schedules)
    means = {pair: value for value, pair in _choices(found, found.schedules)}
    order = [pair for pair in means if pair[0] not in found.twins]
    chosen = [*order[:_ROWS_SHOWN], *(pair for pair in _HABITS if pair in means and pair not in order[:_ROWS_SHOWN])]
    rows = [(f"{a} · {b}", _number_words(means[a, b]), *map(_number_words, known[a, b])) for a, b in chosen]
    note = (
        "How many times the error of the best set-up at that NFE, as the geometric mean over schedules and mixtures: "
        "1 would be the best everywhere. The first ones, and below them common habits. Only what runs on all schedules."
    )
    columns = ("one choice for all", "mean", *(f"NFE {nfe}" for nfe in found.budgets))
    return Table("What one choice costs", columns, tuple(rows), note)


def _samplers_table(found: OracleResults) -> Table:
    rows = []
    for sampler in found.samplers:
        if sampler in found.twins:
            continue
        values = []
        for nfe in found.budgets:
            ranked = [found.ranked(*place, nfe) for place in product(found.schedules, found.mixtures)]
            own = [[one.figures["error"] for one in ranking if one.sampler == sampler] for ranking in ranked]
            values.append(_mean(v[0] for v in own if v))
        if any(map(math.isfinite, values)):
            rows.append((found.names_of(sampler), *map(_number_words, values)))
    rows.sort(key=lambda row: float(row[-1]) if row[-1] != "−" else math.inf)
    note = f"Geometric mean over schedules and mixtures, each time on the sampler's best grid. {_RELATIVE}"
    return Table("Every deterministic sampler", ("sampler", *(f"NFE {n}" for n in found.budgets)), tuple(rows), note)


def _grids_table(found: OracleResults) -> Table:
    rows = []
    for grid in found.grids:

        def pick(*place: Any, grid: str = grid) -> OracleRun | None:
            return next((one for one in found.ranked_grids(*place) if one.grid == grid), None)

        values = [_regret(found, pick, nfe, found.schedules) for nfe in found.budgets]
        if any(map(math.isfinite, values)):
            rows.append((grid, *map(_number_words, values)))
    rows.sort(key=lambda row: _mean(float(v) for v in row[1:] if v != "−"))
    note = (
        "How many times the error of the best grid, each with its best sampler: geometric mean over schedules and "
        "mixtures. Left out: grids that some schedule refuses."
    )
    return Table("Every grid", ("grid", *(f"NFE {nfe}" for nfe in found.budgets)), tuple(rows), note)


def _laws_table(found: OracleResults, floors: dict[str, float]) -> Table:
    """The best with noise beside the best without, by the distance of their laws from the data's."""
    rows = []
    for mixture, schedule, nfe in product(found.mixtures, found.schedules, found.budgets):
        ranking = found.ranked(schedule, mixture, nfe, "sliced")
        sides = ([one for one in ranking if one.stochastic == noisy] for noisy in (False, True))
        if ranking:
            cells = (_first_words(side, "sliced") for side in sides)
            rows.append((f"{mixture}, {schedule}, {nfe}", *cells, _number_words(floors[mixture])))
    note = (
        "Sliced Wasserstein distance between the points at the end and the data's law, in standard deviations. True "
        "draws, as many, measure the last column: what is not above it cannot be distinguished from perfect."
    )
    columns = ("mixture, schedule, NFE", "best without noise", "best with noise", "true draws")
    return Table("With noise and without, as laws", columns, tuple(rows), note)


def _ranks_table(found: OracleResults) -> Table:
    """Who is best from where to where, and how much of the order of samplers is kept."""
    rows = []
    for mixture, schedule in product(found.mixtures, found.schedules):
        orders = [[line.sampler for line in found.ranked(schedule, mixture, nfe)] for nfe in found.budgets]
        kept = (f"{agreement(a, b):.2f}" for a, b in pairwise(orders))
        signed = (words.replace("nan", "−").replace("-", "−") for words in kept)
        rows.append((f"{mixture}, {schedule}", changes(found, schedule, mixture), *signed))
    note = (
        "τ is Kendall's agreement of the order of samplers, each on its best grid, at two neighbouring NFE: 1 is the "
        "same order, 0 chance."
    )
    columns = ("mixture, schedule", "the best", *(f"τ {a}, {b}" for a, b in pairwise(found.budgets)))
    return Table("Where the ranking changes", columns, tuple(rows), note)


def _orders_table(found: OracleResults) -> Table:
    rows = []
    for row in found.orders:
        cells = [
            "" if row["claimed"] is None else str(row["claimed"]),
            *("" if key not in row else f"{row[key]:.2f}" for key in ("order", "weak", "strong")),
        ]
        verdict = {True: "as claimed", False: "NOT as claimed", None: ""}[row.get("as_claimed")]
        rows.append((row["sampler"], *cells, verdict))
    note = (
        "Asymptotic: sigma 300 to 0.05 on a grid even in λ, between 160 and 320 steps, against a solution that shares "
        "no code. Noise off: distance from the exact flow. Variance: of the result on a Gaussian, noise on, computed "
        "and not drawn. Path: distance from the solution of the same Brownian path, between 80 and 160 steps."
    )
    columns = ("sampler", "claimed", "noise off", "variance", "path", "")
    return Table("Orders", columns, tuple(rows), note)


def _plain_results(found: OracleResults, floors: dict[str, float]) -> dict[str, Any]:
    """The tables for a program: the best at each place with the runners-up, one choice for all, and the orders."""
    about = ("sampler", "grid", "calls", "steps")
    costs = regrets(found, found.schedules)
    return {
        "best": [
            {"schedule": s, "mixture": m, "nfe": nfe}
            | {"ranking": [{key: getattr(one, key) for key in about} | one.figures for one in found.ranked(s, m, nfe)]}
            for s, m, nfe in product(found.schedules, found.mixtures, found.budgets)
        ],
        "one_choice": [
            {"sampler": a, "grid": b, "times_the_best": dict(zip(map(str, found.budgets), values, strict=True))}
            for (a, b), values in costs.items()
        ],
        "same_tables": found.twins,
        "true_draws": floors,
        "orders": [{k: v for k, v in row.items() if k not in ("part", "seconds")} for row in found.orders],
    }


def sentences_of(found: OracleResults) -> list[str]:
    """What a reader should take away, in words with numbers."""
    said = []
    for schedule in found.schedules:
        known = {pair: _number_words(value) for value, pair in _choices(found, [schedule])}
        for pair, value in [*known.items()][:1]:
            words = f"{schedule}: one choice for all NFE is {' · '.join(pair)}, {value} times the best of each."
            habit = f" DPM++ 2M Karras: {known[_HABITS[0]]} times." if _HABITS[0] in known else ""
            said.append(words + habit)
    return said


# --- Charts ---------------------------------------------------------------------------------------------------------

_WIDEST = 3  # panels side by side: more could not be read
_MAX_LINES = 12  # as many as there are colours
_MAX_ERROR = 1.0  # a path that ends further off than the data are large has no place in a chart
_CUT_OFF = "Errors above 1 are not drawn."
_YARDSTICKS = ("ddim", "heun", "dpm_multistep")  # the yardsticks that everybody knows
_Pick = Callable[[str, str, int], list[OracleRun]]


def _panels_of(found: OracleResults, what: str, floors: dict[str, float]) -> list[Chart]:
    """One chart for each schedule and mixture; `what` is sampler, grid or law."""
    pick, figure, name = {
        "sampler": (found.ranked, "error", "sampler"),
        "grid": (found.ranked_grids, "error", "grid"),
        "law": (lambda s, m, n: found.ranked(s, m, n, "sliced"), "sliced", "sampler"),
    }[what]
    names = _leaders(found, pick, figure, name)
    axis = "distance of the laws" if what == "law" else "error"
    drawn = []
    for mixture, schedule in product(found.mixtures, found.schedules):
        series = [_line_of(found, pick, (schedule, mixture), figure, name, i, one) for i, one in enumerate(names)]
        marks = [Mark("true draws", y=floors[mixture])] if what == "law" else []
        x = Axis("model calls", log=True, ticks=tuple(map(float, found.budgets)))
        title = f"{schedule}, {mixture}"
        drawn.append(Chart(title, [one for one in series if one.x], x, Axis(axis, log=True), marks))
    return [chart for chart in drawn if chart.series]


def _leaders(found: OracleResults, pick: _Pick, figure: str, name: str) -> list[str]:
    """The names to draw: yardsticks, and those that are close to the best most; of laws, first those with noise."""
    scores: dict[str, list[float]] = {}
    for schedule, mixture, nfe in product(found.schedules, found.mixtures, found.budgets):
        ranking = pick(schedule, mixture, nfe)
        for line in ranking:
            scores.setdefault(getattr(line, name), []).append(line.figures[figure] / ranking[0].figures[figure])
    most = max((len(values) for values in scores.values()), default=0)
    kept = sorted((one for one in scores if 2 * len(scores[one]) > most), key=lambda one: _mean(scores[one]))
    first = [one for one in kept if one in _YARDSTICKS] if name == "sampler" else []
    if figure == "sliced":
        first = [*first, *[one for one in kept if one not in first][:1], *filter(is_noisy, kept)]
    return sorted([*first, *(one for one in kept if one not in first)][:_MAX_LINES], key=kept.index)


def _line_of(
    found: OracleResults, pick: _Pick, place: tuple[str, str], figure: str, name: str, number: int, label: str
) -> Series:
    every = [one for nfe in found.budgets for one in pick(*place, nfe) if getattr(one, name) == label]
    points = [one for one in every if one.figures[figure] <= _MAX_ERROR]
    other = "grid" if name == "sampler" else "sampler"
    ends: tuple[str, ...] = ("low", "high") if figure == "error" else ()
    return Series.of(
        label,
        [float(line.calls) for line in points],
        [Estimate(*(line.figures[key] for key in (figure, *ends))) for line in points],
        labels=[f"{getattr(line, other)}, {line.steps} steps{', noise' if line.stochastic else ''}" for line in points],
        colour=charts.COLOURS[number % len(charts.COLOURS)],
        dashed=figure == "sliced" and any(line.stochastic for line in points),
    )


# --- The report -----------------------------------------------------------------------------------------------------

_CHARTS = {
    "sampler": ("Every sampler on its best grid", "Each sampler on its best grid at each NFE. " + _CUT_OFF),
    "grid": ("Every grid with its best sampler", "Each grid with its best sampler at each NFE. " + _CUT_OFF),
    "law": ("With noise and without, as laws", "Dotted: true draws, as many. Dashed: samplers with noise."),
}


def write(study: OracleStudy) -> dict[str, Any]:
    """charts/*.png, table.md, figures.json and report.html in the study's folder, finished or not; the figures."""
    charts.require()
    found = OracleResults.of(study.records.rows)
    laws = {name: (one := MIXTURES[name](), LawSlices.of(one, study.config.points)) for name in study.config.mixtures}
    floors = {name: law.floor(one) for name, (one, law) in laws.items()}  # what true draws measure, as many as points
    folder = study.folder / "charts"
    folder.mkdir(exist_ok=True)
    tables = _tables_of(found, floors)
    page = Page("Samplers on exact denoisers", _headline(study))
    page.add(*(Text(words) for words in sentences_of(found)), *tables[: len(found.mixtures) + 1])
    for what, (title, note) in _CHARTS.items():
        panels = _panels_of(found, what, floors)
        if panels:
            columns = len(found.schedules) if len(found.schedules) <= _WIDEST else 2
            drawing = charts.panels(panels, columns, title, note)
            drawing.png(folder / f"{what}s.png")
            page.add(Text("", title), drawing)
    page.add(*tables[len(found.mixtures) + 1 :], *_equal_grids(study.config), Code(study.text, "Config"))
    page.write(study.folder / "report.html")
    said = "\n".join(f"- {words}" for words in sentences_of(found))
    parts = ["# Samplers on exact denoisers\n", _headline(study) + "\n", said + "\n"]
    put(study.folder / "table.md", "\n".join([*parts, *(table.markdown() for table in tables)]))
    figures = _plain_results(found, floors)
    put(study.folder / "figures.json", json.dumps(figures, indent=1) + "\n")
    return figures


def _headline(study: OracleStudy) -> str:
    c = study.config
    words = (
        f"{len(c.samplers)} samplers, {len(c.grids)} grids, schedules {', '.join(c.schedules)}, {c.points:,} points of "
        "each mixture, float64."
    )
    left = len(study.missing())
    return words + (f" Unfinished: {left} cells are missing." if left else "")


def _equal_grids(config: OracleStudyConfig) -> list[Text]:
    twins = {schedule: same_levels(schedule, config.grids) for schedule in config.schedules}
    pairs = {schedule: ", ".join(f"{a} = {b}" for a, b in same.items()) for schedule, same in twins.items() if same}
    words = "On {} these grids lay the same levels and are run once: {}."
    return [Text(words.format(*one), kind="note") for one in pairs.items()]
