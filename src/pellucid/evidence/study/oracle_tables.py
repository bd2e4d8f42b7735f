"""The tables of a study of oracles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, product
from typing import Any

from pellucid.evidence.study.oracle_results import Line, Results, agreement, changes
from pellucid.evidence.study.table import Table

HABITS = (
    ("dpmpp_2m", "karras"),
    ("dpmpp_2m", "trailing"),
    ("euler", "trailing"),
    ("heun", "karras"),
    ("unipc", "trailing"),
)
SHOWN = 12  # rows of a list of set-ups
RELATIVE = "Errors are relative to the size of the data: 0.01 is a distance of one percent."


def tables(found: Results, floors: dict[str, float]) -> list[Table]:
    made = [best(found, mixture) for mixture in found.mixtures]
    made += [everywhere(found), every_sampler(found), every_grid(found), laws(found, floors), ranks(found)]
    made += [orders(found)] if found.orders else []
    return [table for table in made if table.rows]


def number(value: float) -> str:
    """Two digits that count; − where there is none."""
    if not math.isfinite(value):
        return "−"
    if 1e-3 <= value < 1e4:
        return f"{value:.2g}" if value < 100 else f"{value:.0f}"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")


def mean(values: Iterable[float]) -> float:
    """The geometric mean; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


def best(found: Results, mixture: str) -> Table:
    rows = []
    for nfe in found.budgets:
        firsts = [found.at(schedule, mixture, nfe)[:1] for schedule in found.schedules]
        rows.append((str(nfe), *(told(one[0]) if one else "−" for one in firsts)))
    note = (
        "The deterministic sampler and grid that end closest to the exact flow of the same noise (root mean square) "
        f"with at most so many model calls. {RELATIVE}"
    )
    return Table(f"The best at each NFE, {mixture} mixture", ("NFE", *found.schedules), tuple(rows), note)


def told(line: Line) -> str:
    return f"{line.name} {number(line.figures['error'])}"


def regret(found: Results, pick: Callable[[str, str, int], float | None], nfe: int, schedules: Sequence[str]) -> float:
    """How many times the error of the best a choice has, as the geometric mean over schedules and mixtures; NaN where
    it does not run everywhere."""
    ratios = []
    for schedule, mixture in product(schedules, found.mixtures):
        mine, least = pick(schedule, mixture, nfe), found.least.get((schedule, mixture, nfe))
        if mine is None or least is None:
            return math.nan
        ratios.append(mine / least)
    return mean(ratios)


def of_pair(found: Results, sampler: str, grid: str) -> Callable[[str, str, int], float | None]:
    def pick(schedule: str, mixture: str, nfe: int) -> float | None:
        line = found.one(schedule, mixture, nfe, sampler, grid)
        return None if line is None else line.figures.get("error")

    return pick


def regrets(found: Results, schedules: Sequence[str]) -> dict[tuple[str, str], list[float]]:
    """Of every sampler and grid, at each budget."""
    pairs = dict.fromkeys((line.sampler, line.grid) for line in found.lines if not line.stochastic)
    return {pair: [regret(found, of_pair(found, *pair), nfe, schedules) for nfe in found.budgets] for pair in pairs}


def choices(found: Results, schedules: Sequence[str]) -> list[tuple[float, tuple[str, str]]]:
    """Every sampler and grid that runs at all budgets of some schedules, with its regret over them; the best first."""
    known = regrets(found, schedules)
    return sorted((mean(values), pair) for pair, values in known.items() if all(map(math.isfinite, values)))


def everywhere(found: Results) -> Table:
    """One choice for all schedules and mixtures."""
    known = regrets(found, found.schedules)
    whole = {pair: value for value, pair in choices(found, found.schedules)}
    order = [pair for pair in whole if pair[0] not in found.twins]
    chosen = [*order[:SHOWN], *(pair for pair in HABITS if pair in whole and pair not in order[:SHOWN])]
    rows = [(f"{a} · {b}", number(whole[a, b]), *map(number, known[a, b])) for a, b in chosen]
    note = (
        "How many times the error of the best set-up at that NFE, as the geometric mean over schedules and mixtures: "
        "1 would be the best everywhere. The first ones, and below them common habits. Only what runs on all schedules."
    )
    columns = ("one choice for all", "mean", *(f"NFE {nfe}" for nfe in found.budgets))
    return Table("What one choice costs", columns, tuple(rows), note)


def every_sampler(found: Results) -> Table:
    rows = []
    for sampler in found.samplers:
        if sampler in found.twins:
            continue
        values = []
        for nfe in found.budgets:
            ranked = [found.ranked(*place, nfe) for place in product(found.schedules, found.mixtures)]
            own = [[one.figures["error"] for one in ranking if one.sampler == sampler] for ranking in ranked]
            values.append(mean(v[0] for v in own if v))
        if any(map(math.isfinite, values)):
            rows.append((found.names_of(sampler), *map(number, values)))
    rows.sort(key=lambda row: float(row[-1]) if row[-1] != "−" else math.inf)
    note = f"Geometric mean over schedules and mixtures, each time on the sampler's best grid. {RELATIVE}"
    return Table("Every deterministic sampler", ("sampler", *(f"NFE {n}" for n in found.budgets)), tuple(rows), note)


def every_grid(found: Results) -> Table:
    rows = []
    for grid in found.grids:

        def pick(schedule: str, mixture: str, nfe: int, grid: str = grid) -> float | None:
            own = [one for one in found.ranked_grids(schedule, mixture, nfe) if one.grid == grid]
            return own[0].figures["error"] if own else None

        values = [regret(found, pick, nfe, found.schedules) for nfe in found.budgets]
        if any(map(math.isfinite, values)):
            rows.append((grid, *map(number, values)))
    rows.sort(key=lambda row: mean(float(v) for v in row[1:] if v != "−"))
    note = (
        "How many times the error of the best grid, each with its best sampler: geometric mean over schedules and "
        "mixtures. Left out: grids that some schedule refuses."
    )
    return Table("Every grid", ("grid", *(f"NFE {nfe}" for nfe in found.budgets)), tuple(rows), note)


def laws(found: Results, floors: dict[str, float]) -> Table:
    """The best with noise beside the best without, by the distance of their laws from the data's."""
    rows = []
    for mixture, schedule, nfe in product(found.mixtures, found.schedules, found.budgets):
        ranking = found.ranked(schedule, mixture, nfe, "sliced")
        cells = []
        for noisy in (False, True):
            first = next((one for one in ranking if one.stochastic == noisy), None)
            cells.append("−" if first is None else f"{first.name} {number(first.figures['sliced'])}")
        if ranking:
            rows.append((f"{mixture}, {schedule}, {nfe}", *cells, number(floors[mixture])))
    note = (
        "Sliced Wasserstein distance between the points at the end and the data's law, in standard deviations. True "
        "draws, as many, measure the last column: what is not above it cannot be told from perfect."
    )
    columns = ("mixture, schedule, NFE", "best without noise", "best with noise", "true draws")
    return Table("With noise and without, as laws", columns, tuple(rows), note)


def ranks(found: Results) -> Table:
    """Who is best from where to where, and how much of the order of samplers is kept."""
    rows = []
    for mixture, schedule in product(found.mixtures, found.schedules):
        kept = [tau(found, (schedule, mixture, a), (schedule, mixture, b)) for a, b in pairwise(found.budgets)]
        rows.append((f"{mixture}, {schedule}", changes(found, schedule, mixture), *map(signed, kept)))
    note = (
        "τ is Kendall's agreement of the order of samplers, each on its best grid, at two neighbouring NFE: 1 is the "
        "same order, 0 chance."
    )
    columns = ("mixture, schedule", "the best", *(f"τ {a}, {b}" for a, b in pairwise(found.budgets)))
    return Table("Where the ranking changes", columns, tuple(rows), note)


def tau(found: Results, one: tuple[str, str, int], other: tuple[str, str, int]) -> float:
    orders_of = [[line.sampler for line in found.ranked(*place)] for place in (one, other)]
    return agreement(*orders_of)


def signed(value: float) -> str:
    return "−" if not math.isfinite(value) else f"{value:.2f}".replace("-", "−")


def orders(found: Results) -> Table:
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


def plain(found: Results, floors: dict[str, float]) -> dict[str, Any]:
    """The tables for a program: the best at each place with the runners-up, one choice for all, and the orders."""
    best_at = [
        {"schedule": s, "mixture": m, "nfe": nfe, "ranking": [flat(line) for line in found.ranked(s, m, nfe)]}
        for s, m, nfe in product(found.schedules, found.mixtures, found.budgets)
    ]
    costs = regrets(found, found.schedules)
    return {
        "best": best_at,
        "one_choice": [
            {"sampler": a, "grid": b, "times_the_best": dict(zip(map(str, found.budgets), values, strict=True))}
            for (a, b), values in costs.items()
        ],
        "same_tables": found.twins,
        "true_draws": floors,
        "orders": [{k: v for k, v in row.items() if k not in ("part", "seconds")} for row in found.orders],
    }


def flat(line: Line) -> dict[str, Any]:
    about = {"sampler": line.sampler, "grid": line.grid, "calls": line.calls, "steps": line.steps}
    return {**about, **line.figures}


def sentences(found: Results) -> list[str]:
    """What a reader should take away, in words with numbers."""
    said = []
    for schedule in found.schedules:
        known = {pair: value for value, pair in choices(found, [schedule])}
        if not known:
            continue
        pair, value = next(iter(known.items()))
        words = f"{schedule}: one choice for all NFE is {' · '.join(pair)}, {number(value)} times the best of each."
        habit = f" DPM++ 2M Karras: {number(known[HABITS[0]])} times." if HABITS[0] in known else ""
        said.append(words + habit)
    return said
