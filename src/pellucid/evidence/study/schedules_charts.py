"""The four charts of a schedule study: quality, loss by noise level, stability, images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pellucid.core.schedule import Array
from pellucid.evidence.study import charts
from pellucid.evidence.study.charts import COLOURS, FAINT, INK, MARKS, PAPER
from pellucid.evidence.study.schedules_results import Point, Results, places

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTH = 9  # windows of a running mean, where there are many
ASIDE = 0.006  # of the axis, between the marks of two schedules
BIN = 0.25  # of λ, in the density of training times
EDGE = 8.25  # of λ, beyond which nothing is drawn: the log's last bins end at ±8 and hold what lies beyond


def looks(found: Results) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each schedule with its line and its mark."""
    for i, name in enumerate(found.study.schedules):
        yield name, {"color": COLOURS[i % len(COLOURS)], "linewidth": 1.9}, MARKS[i % len(MARKS)]


def unit_of(found: Results) -> tuple[float, str]:
    """Of images seen: one, thousand or million."""
    most = max([row["images"] for row in found.rows] + [log[-1]["images"] for log in found.logs.values() if log] + [1])
    if most >= 1_000_000:
        return 1e6, "images seen, millions"
    return (1e3, "images seen, thousands") if most >= 10_000 else (1.0, "images seen")


# --- quality -----------------------------------------------------------------------------------------------------


def quality(found: Results, path: Path) -> Path:
    """FID and KID against images seen: the mean of the seeds, from the lowest to the highest of them."""
    figure = charts.canvas(11, 5.0)
    panels = figure.subplots(1, 2)
    unit, x = unit_of(found)
    for axes, metric, title in ((panels[0], "fid", "FID"), (panels[1], "kid", "KID × 10³")):
        lowest = [np.inf]
        for i, (name, look, mark) in enumerate(looks(found)):
            aside = (i - (len(found.study.schedules) - 1) / 2) * ASIDE * places(found)[-1]
            points = [scaled(point, unit, metric, aside) for point in found.curve(name, metric)]
            line(axes, points, name, look, mark)
            final = found.final(name) if metric == "fid" else None
            if final is not None:
                points.append(scaled(final, unit, metric, aside))
                bar(axes, points[-1], look["color"])
                axes.plot(points[-1].images, points[-1].mean, mark, color=look["color"], markerfacecolor=PAPER)
            lowest += [point.ends[0] for point in points]
        charts.quiet(axes, title, x, "less is better")
        if 0 < min(lowest) < np.inf:
            charts.log_y(axes)
    charts.legend(figure, panels[0], told(found))
    return charts.save(figure, path)


def told(found: Results) -> str:
    """How to read the chart of quality."""
    s = found.study
    words = [f"FID of {s.samples:,} images"]
    if s.samples < s.final_samples:
        words.append(f"hollow: of {s.final_samples:,}")
    seeds = max((len(found.at(name, step)) for name in s.schedules for step in s.points), default=1)
    words.append(f"bars: lowest and highest of {seeds} seeds" if seeds > 1 else "bars: 95 % of other images")
    return " · ".join(words)


def scaled(point: Point, unit: float, metric: str, aside: float) -> Point:
    """In the units of the axes, and a hair aside, so that bars of different schedules do not hide each other."""
    scale = 1e3 if metric == "kid" else 1.0
    low, high = (None if end is None else end * scale for end in (point.low, point.high))
    return Point((point.images + aside) / unit, tuple(value * scale for value in point.values), low, high)


def line(axes: Axes, points: Sequence[Point], name: str, look: dict[str, Any], mark: str) -> None:
    x, means = [point.images for point in points], [point.mean for point in points]
    axes.plot(x, means, marker=mark, markersize=7, markeredgecolor=PAPER, label=name, **look)
    if any(len(point.values) > 1 for point in points):
        low, high = zip(*(point.ends for point in points), strict=True)
        axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    for point in points:
        bar(axes, point, look["color"])


def bar(axes: Axes, point: Point, colour: str) -> None:
    """From the lowest to the highest seed, or over the interval of a single one."""
    low, high = point.ends
    if low < high:
        reach = [[point.mean - low], [high - point.mean]]
        axes.errorbar([point.images], [point.mean], yerr=reach, fmt="none", ecolor=colour, capsize=4, elinewidth=1.2)


# --- where it is trained, and how well -------------------------------------------------------------------------------


def levels(found: Results, path: Path) -> Path:
    """Above, the error of the network at the end of training by λ; below, where each schedule trains it."""
    figure = charts.canvas(9, 7.2)
    error, density = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for name, look, mark in looks(found):
        lam, mean = with_gaps(*found.levels(name))
        error.plot(lam, mean, marker=mark, markersize=5, markeredgecolor=PAPER, label=name, **look)
        middle, height = spread_of(found.trained_at(name))
        density.plot(middle, height, color=look["color"], linewidth=1.6)
        density.fill_between(middle, height, color=look["color"], alpha=0.14, linewidth=0)
    target = found.study.task(found.study.schedules[0]).objective.target
    charts.quiet(error, "Error by noise level, last tenth of training", "", f"mean squared error of {target}")
    x = "noise  ←   λ = log(α / σ) = ½·log SNR   →  data"
    charts.quiet(density, "Where a schedule trains: density of its training times", x, "share per unit of λ")
    density.set_ylim(bottom=0)
    low, high = density.get_xlim()
    density.set_xlim(max(low, -EDGE), min(high, EDGE))
    if np.isfinite(error.dataLim.ymin) and error.dataLim.ymin > 0:
        charts.log_y(error)
    charts.legend(figure, error)
    return charts.save(figure, path)


def with_gaps(lam: Array, mean: Array) -> tuple[Array, Array]:
    """A line that ends where a level was never seen: NaN between bins that are not neighbours."""
    far = np.flatnonzero(np.diff(lam) > 1.5 * np.diff(lam).min(initial=np.inf)) + 1
    return np.insert(lam, far, np.nan), np.insert(mean, far, np.nan)


def spread_of(lam: Array) -> tuple[Array, Array]:
    """The density of λ: middles of bins and shares per unit. What lies beyond is counted and not shown."""
    inside = lam[np.abs(lam) < EDGE]
    low, high = np.floor(inside.min() / BIN) * BIN, np.ceil(inside.max() / BIN) * BIN
    counted, edges = np.histogram(inside, np.arange(low - BIN, high + 1.5 * BIN, BIN))
    return (edges[:-1] + edges[1:]) / 2, counted / len(lam) / BIN


# --- stability -----------------------------------------------------------------------------------------------------


def stability(found: Results, path: Path) -> Path:
    """Gradient norm and loss over training, and how much the steps of a window differ."""
    figure = charts.canvas(11, 7.2)
    panels = figure.subplots(2, 2, sharex=True)
    unit, x = unit_of(found)
    for row, (column, title) in enumerate((("grad_norm", "Gradient norm"), ("loss", "Loss"))):
        for name, look, _ in looks(found):
            images, mean = found.series(name, column)
            _, spread = found.series(name, f"{column}_std")
            smooth(panels[row, 0], images / unit, mean, {**look, "label": name})
            smooth(panels[row, 1], images / unit, spread / np.where(mean > 0, mean, np.nan), look)
        below = x if row else ""
        charts.quiet(panels[row, 0], title + ", mean of a window", below)
        charts.quiet(panels[row, 1], title + ", spread of the steps of a window", below, "standard deviation ÷ mean")
        panels[row, 1].set_ylim(bottom=0)
        if np.isfinite(panels[row, 0].dataLim.ymin) and panels[row, 0].dataLim.ymin > 0:
            charts.log_y(panels[row, 0])
    charts.legend(figure, panels[0, 0])
    return charts.save(figure, path)


def smooth(axes: Axes, x: Array, y: Array, look: dict[str, Any]) -> None:
    """A line; where it has many points, a faint one with its running mean."""
    if len(y) > 4 * SMOOTH:
        axes.plot(x, y, color=look["color"], linewidth=0.7, alpha=0.2)
        half = SMOOTH // 2
        y = np.array([np.mean(y[max(0, i - half) : i + half + 1]) for i in range(len(y))])
    axes.plot(x, y, **look)


# --- images --------------------------------------------------------------------------------------------------------

DPI = 200
GAP, LEFT, TOP = 0.08, 0.35, 0.5  # inches
LEAST = 200  # pixels of a sheet's side, to which small ones are enlarged by whole numbers


def images(found: Results, path: Path) -> Path:
    """A row a schedule, a column a point: what the first seed makes of the same noise. Pixels stay whole."""
    names, steps = found.study.schedules, found.study.points
    sheets = {(name, step): sheet_of(found.image(name, step)) for name in names for step in steps}
    side = max([max(sheet.shape[:2]) for sheet in sheets.values() if sheet is not None], default=LEAST) / DPI
    width, height = LEFT + len(steps) * (side + GAP), TOP + len(names) * (side + GAP)
    figure = charts.canvas(width, height)
    for (name, step), sheet in sheets.items():
        row, column = names.index(name), steps.index(step)
        left, top = LEFT + column * (side + GAP), TOP + row * (side + GAP)
        axes = figure.add_axes((left / width, 1 - (top + side) / height, side / width, side / height))
        axes.set_axis_off()
        if sheet is None:
            axes.text(0.5, 0.5, "not yet", ha="center", va="center", color=FAINT, fontsize=9)
        else:
            axes.imshow(sheet, interpolation="nearest")
            axes.set_anchor("N")
    heads(figure, found, side)
    return charts.save(figure, path, DPI)


def heads(figure: Figure, found: Results, side: float) -> None:
    """The names of rows and columns."""
    width, height = figure.get_size_inches()
    for column, (step, images) in enumerate(zip(found.study.points, places(found), strict=True)):
        x = LEFT + column * (side + GAP) + side / 2
        words = f"step {step:,}" + (f"\n{images / 1e6:.2g} M images" if images >= 1e5 else "")
        figure.text(x / width, 1 - (TOP - 0.06) / height, words, ha="center", va="bottom", fontsize=8, color=INK)
    for row, (name, look, _) in enumerate(looks(found)):
        y = TOP + row * (side + GAP) + side / 2
        place: dict[str, Any] = {"rotation": 90, "ha": "center", "va": "center", "fontsize": 10, "fontweight": "bold"}
        figure.text(LEFT / 2 / width, 1 - y / height, name, color=look["color"], **place)


def sheet_of(path: Path) -> Any:
    """A stored sheet, (H, W, 3) uint8, enlarged where it is small; None where there is none."""
    from PIL import Image

    if not path.is_file():
        return None
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    times = 2 if min(pixels.shape[:2]) >= LEAST else max(1, -(-2 * LEAST // max(pixels.shape[:2])))
    return pixels.repeat(times, 0).repeat(times, 1)
