"""The charts of a study of oracles: error against NFE by sampler and by grid, and the distance of laws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from pellucid.evidence.study import charts
from pellucid.evidence.study.oracle_results import Line, Results, is_noisy
from pellucid.evidence.study.oracle_tables import mean
from pellucid.evidence.study.page import Axis, Chart, Mark, Series

LINES = 12  # as many as there are colours
MOST = 1.0  # a path that ends further off than the data are large has no place in a chart
ALWAYS = ("ddim", "heun", "dpm_multistep")  # the yardsticks that everybody knows
Pick = Callable[[str, str, int], list[Line]]


def panels(found: Results, what: str, floors: dict[str, float]) -> list[Chart]:
    """One chart for each schedule and mixture; `what` is sampler, grid or law."""
    pick, figure, name = {
        "sampler": (found.ranked, "error", "sampler"),
        "grid": (found.ranked_grids, "error", "grid"),
        "law": (lambda s, m, n: found.ranked(s, m, n, "sliced"), "sliced", "sampler"),
    }[what]
    names = leaders(found, pick, figure, name)
    axis = "distance of the laws" if what == "law" else "error"
    made = []
    for mixture, schedule in product(found.mixtures, found.schedules):
        series = [line_of(found, pick, (schedule, mixture), figure, name, i, one) for i, one in enumerate(names)]
        marks = [Mark("true draws", y=floors[mixture])] if what == "law" else []
        x = Axis("model calls", log=True, ticks=tuple(map(float, found.budgets)))
        title = f"{schedule}, {mixture}"
        made.append(Chart(title, [one for one in series if one.x], x, Axis(axis, log=True), marks))
    return [chart for chart in made if chart.series]


def leaders(found: Results, pick: Pick, figure: str, name: str) -> list[str]:
    """The names to draw: yardsticks, and those that are close to the best most; of laws, first those with noise."""
    scores: dict[str, list[float]] = {}
    for schedule, mixture, nfe in product(found.schedules, found.mixtures, found.budgets):
        ranking = pick(schedule, mixture, nfe)
        for line in ranking:
            scores.setdefault(getattr(line, name), []).append(line.figures[figure] / ranking[0].figures[figure])
    most = max((len(values) for values in scores.values()), default=0)
    kept = sorted((one for one in scores if 2 * len(scores[one]) > most), key=lambda one: mean(scores[one]))
    first = [one for one in kept if one in ALWAYS] if name == "sampler" else []
    if figure == "sliced":
        first = [*first, *[one for one in kept if one not in first][:1], *filter(is_noisy, kept)]
    return sorted([*first, *(one for one in kept if one not in first)][:LINES], key=kept.index)


def line_of(
    found: Results, pick: Pick, place: tuple[str, str], figure: str, name: str, number: int, wanted: str
) -> Series:
    points = []
    for nfe in found.budgets:
        points += [one for one in pick(*place, nfe) if getattr(one, name) == wanted and one.figures[figure] <= MOST]
    other = "grid" if name == "sampler" else "sampler"
    bounded = figure == "error"
    noisy = figure == "sliced" and any(line.stochastic for line in points)
    return Series(
        wanted,
        [float(line.calls) for line in points],
        [line.figures[figure] for line in points],
        [line.figures["low"] for line in points] if bounded else None,
        [line.figures["high"] for line in points] if bounded else None,
        [f"{getattr(line, other)}, {line.steps} steps{', noise' if line.stochastic else ''}" for line in points],
        colour=charts.COLOURS[number % len(charts.COLOURS)],
        dashed=noisy,
    )


def draw(panels: Sequence[Chart], columns: int, path: Path, note: str = "") -> Path:
    """All panels in one image, with one legend."""
    rows = -(-len(panels) // columns)
    figure = charts.canvas(3.6 * columns, 3.1 * rows + 0.9)
    handles = {}
    for i, chart in enumerate(panels):
        axes = figure.add_subplot(rows, columns, i + 1)
        for one in chart.series:
            style = "--" if one.dashed else "-"
            (line,) = axes.plot(one.x, one.y, style, color=one.colour, marker="o", markersize=3, linewidth=1.5)
            handles.setdefault(one.name, line)
        for mark in chart.marks:
            axes.axhline(mark.y, color=charts.INK, linestyle=":", linewidth=1.2)
        charts.quiet(
            axes,
            chart.title,
            "model calls" if i >= len(panels) - columns else "",
            chart.y.name if i % columns == 0 else "",
        )
        axes.set_xscale("log")
        axes.set_xticks(chart.x.ticks, [f"{tick:g}" for tick in chart.x.ticks])
        axes.set_xticks([], minor=True)
        charts.log_y(axes)
    height = figure.get_figheight()
    look = {"frameon": False, "fontsize": 9.5, "labelcolor": charts.INK, "ncols": max(2, round(1.8 * columns))}
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.25 / height)}
    figure.legend(list(handles.values()), list(handles), **place, **look)
    figure.text(0.5, 0.08 / height, note, fontsize=8.5, color=charts.SLATE, ha="center", va="bottom")
    figure.tight_layout(rect=(0, 0.85 / height, 1, 1), w_pad=1.2, h_pad=1.4)
    return charts.save(figure, path)
