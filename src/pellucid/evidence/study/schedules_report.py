"""The report of a schedule study: tables, charts, and whether differences are significant, in one HTML file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pellucid.core.schedule import Array
from pellucid.evidence.report import charts
from pellucid.evidence.report.charts import COLOURS, FAINT, INK, MARKS, PAPER, Drawing, Spot
from pellucid.evidence.report.page import Code, Page, Table, Text
from pellucid.evidence.statistics import in_words, spread
from pellucid.evidence.study.schedules import ScheduleResults, TrainingPoint, images_at_points
from pellucid.interop.atomic_files import put
from pellucid.train.config import to_plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# --- Tables ---------------------------------------------------------------------------------------------------------

_METRICS = (("fid", "FID", 1.0), ("kid", "KID × 10³", 1e3))
_LAST_CALL = "last call alone"
_KINDS = {"images": "pictures"}  # what an interval is over, as files of studies name it


def _number_words(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}".replace("-", "−") if math.isfinite(value) else "–"


def _point_words(point: TrainingPoint, scale: float = 1.0) -> str:
    """One seed: the figure and its interval; several: their mean and standard deviation."""
    if len(point.values) > 1:
        mean, deviation = spread(point.values)
        return f"{_number_words(mean * scale)} ± {_number_words(deviation * scale)}"
    return point.estimate.times(scale).words(_number_words)


def _last_call(rows: list[dict[str, Any]]) -> str:
    known = [row for row in rows if "kid_last_call" in row]
    return _point_words(TrainingPoint.of(known, "kid_last_call"), 1e3) if known else "–"


def _tables_of(found: ScheduleResults) -> list[Table]:
    tables = [_final_table(found), _progress_table(found), _variants_table(found)]
    return [table for table in tables if table.rows]


def _final_table(found: ScheduleResults) -> Table:
    """The last point that each schedule has reached, and how its training went at the end."""
    rows = []
    for name in found.study.schedules:
        step = found.last(name)
        if step is None:
            continue
        here = list(found.at(name, step).values())
        shares = [_number_words(TrainingPoint.of(here, metric).estimate.value, 3) for metric in ("precision", "recall")]
        seconds = found.seconds(name) / max(1, sum(bool(found.logs[name, seed]) for seed in found.study.seeds))
        scores = (_point_words(TrainingPoint.of(here, metric), scale) for metric, _, scale in _METRICS)
        loss, norm, norm_std = (found.at_end(name, column) for column in ("loss", "grad_norm", "grad_norm_std"))
        end = (_number_words(loss, 4), _number_words(norm, 3), _number_words(norm_std / norm), f"{seconds:,.0f} s")
        about = (name, f"{step:,}", f"{here[0]['samples']:,}")
        rows.append((*about, *scores, *shares, _last_call(here), *end))
    columns = ("schedule", "step", "images", *(title for _, title, _ in _METRICS), "precision", "recall")
    last = (_LAST_CALL, "loss", "gradient norm", "its spread", "training")
    note = (
        "± is one standard deviation over the seeds; brackets hold 95 % of other images of one run. The last call "
        "alone: KID × 10³ of training images that are noised to its level and denoised by it, which is what the end "
        "of the grid costs, however good the way to it. Loss, gradient norm and its spread within a window (standard "
        "deviation ÷ mean) are of the last tenth of training. Losses of different schedules are means over different "
        "noise levels and cannot be compared."
    )
    return Table("At the end", (*columns, *last), tuple(rows), note)


def _progress_table(found: ScheduleResults) -> Table:
    """FID and KID at every point that is known of any schedule."""
    rows = []
    for metric, title, scale in _METRICS:
        for name in found.study.schedules:
            by_images = {point.images: _point_words(point, scale) for point in found.curve(name, metric)}
            if by_images:
                rows.append((f"{title}, {name}", *(by_images.get(images, "–") for images in images_at_points(found))))
    columns = ("", *(f"{images:,} images" for images in images_at_points(found)))
    return Table("On the way", columns, tuple(rows), f"FID of {found.study.samples:,} images at every point.")


def _variants_table(found: ScheduleResults) -> Table:
    """The last point again with the other EMA lengths and grids, at the same count of images."""
    rows = []
    for name in found.study.schedules:
        for held in found.variants(name):
            metric = "fid_few" if all("fid_few" in row for row in held) else "fid"
            fid, kid = TrainingPoint.of(held, metric), TrainingPoint.of(held, "kid")
            figures = (_point_words(fid), _point_words(kid, 1e3), _last_call(held))
            rows.append((name, f"{held[0]['ema']:,.0f}", held[0]["grid"], *figures))
    if len(rows) <= len(found.study.schedules):
        rows = []  # there are no others
    columns = ("schedule", "EMA, images", "grid", "FID", "KID × 10³", _LAST_CALL)
    note = f"FID of {found.study.samples:,} images. An image of the EMA counts half as much so many images later."
    return Table("Other running means and grids, at the last point", columns, tuple(rows), note)


def _comparisons(found: ScheduleResults) -> list[dict[str, Any]]:
    """Each pair of schedules under each metric: the difference, its interval, and a sentence."""
    rows = []
    for a, b in combinations(found.study.schedules, 2):
        for metric, title, scale in _METRICS:
            apart = found.difference(a, b, metric)
            if apart is None:
                continue
            step, difference = apart
            words = in_words(a, b, difference, title, scale)
            if step != found.study.points[-1]:
                words = f"At step {step:,}: {words}"
            rows.append({"a": a, "b": b, "metric": metric, "step": step, "words": words})
            rows[-1] |= {**difference.plain(), "kind": _KINDS.get(difference.over, difference.over)}
            rows[-1] |= {"seeds": difference.count, "significant": difference.significant}
    return rows


def _plain_results(found: ScheduleResults) -> dict[str, Any]:
    """All of it for programs."""
    scored, wanted = found.done
    schedules: dict[str, Any] = {}
    for name in found.study.schedules:
        step = found.last(name)
        points = {metric: [point.plain() for point in found.curve(name, metric)] for metric, _, _ in _METRICS}
        lam, error = found.levels(name)
        schedules[name] = {
            "last_step": step,
            "last": [] if step is None else list(found.at(name, step).values()),
            "points": points,
            "levels": {"lam": lam.tolist(), "error": error.tolist()},
            "seconds": found.seconds(name),
        }
        for column in ("loss", "loss_std", "grad_norm", "grad_norm_std"):
            value = found.at_end(name, column)
            schedules[name][column] = value if math.isfinite(value) else None
    return {"cells": {"scored": scored, "wanted": wanted}, "schedules": schedules, "comparisons": _comparisons(found)}


# --- Charts ---------------------------------------------------------------------------------------------------------

_SMOOTH = 9  # windows of a running mean, where there are many
_ASIDE = 0.006  # of the axis, between the marks of two schedules
BIN = 0.25  # of λ, in the density of training times
_EDGE = 8.25  # of λ, beyond which nothing is drawn: the log's last bins end at ±8 and hold what lies beyond


def _looks(found: ScheduleResults) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each schedule with its line and its mark."""
    for i, name in enumerate(found.study.schedules):
        yield name, {"color": COLOURS[i % len(COLOURS)], "linewidth": 1.9}, MARKS[i % len(MARKS)]


def _unit_of(found: ScheduleResults) -> tuple[float, str]:
    """Of images seen: one, thousand or million."""
    most = max([row["images"] for row in found.rows] + [log[-1]["images"] for log in found.logs.values() if log] + [1])
    if most >= 1_000_000:
        return 1e6, "images seen, millions"
    return (1e3, "images seen, thousands") if most >= 10_000 else (1.0, "images seen")


# --- quality -----------------------------------------------------------------------------------------------------


def _quality(found: ScheduleResults) -> Drawing:
    """FID and KID against images seen: the mean of the seeds, from the lowest to the highest of them."""
    figure = charts.canvas(11, 5.0)
    panels, spots = figure.subplots(1, 2), []
    unit, x = _unit_of(found)
    for axes, metric, title in ((panels[0], "fid", "FID"), (panels[1], "kid", "KID × 10³")):
        lowest = [np.inf]
        for i, (name, look, mark) in enumerate(_looks(found)):
            aside = (i - (len(found.study.schedules) - 1) / 2) * _ASIDE * images_at_points(found)[-1]
            points = [_scaled(point, unit, metric, aside) for point in found.curve(name, metric)]
            _draw_line(axes, points, name, look, mark)
            final = found.final(name) if metric == "fid" else None
            if final is not None:
                points.append(_scaled(final, unit, metric, aside))
                _draw_bar(axes, points[-1], look["color"])
                place = (points[-1].images, points[-1].estimate.value)
                axes.plot(*place, mark, color=look["color"], markerfacecolor=PAPER)
            lowest += [point.ends[0] for point in points]
            spots += [
                Spot(axes, point.images, point.estimate.value, f"{name}\n{title}: {_point_words(point)}")
                for point in points
            ]
        charts.quiet(axes, title, x, "less is better")
        if 0 < min(lowest) < np.inf:
            charts.log_y(axes)
    charts.legend(figure, panels[0], _told(found))
    return Drawing(figure, "FID and KID against images seen", "Quality over training.", spots)


def _told(found: ScheduleResults) -> str:
    """How to read the chart of quality."""
    s = found.study
    words = [f"FID of {s.samples:,} images"]
    if s.samples < s.final_samples:
        words.append(f"hollow: of {s.final_samples:,}")
    seeds = max((len(found.at(name, step)) for name in s.schedules for step in s.points), default=1)
    words.append(f"bars: lowest and highest of {seeds} seeds" if seeds > 1 else "bars: 95 % of other images")
    return " · ".join(words)


def _scaled(point: TrainingPoint, unit: float, metric: str, aside: float) -> TrainingPoint:
    """In the units of the axes, and a hair aside, so that bars of different schedules do not hide each other."""
    return replace(point, images=point.images + aside).scaled(1 / unit, 1e3 if metric == "kid" else 1.0)


def _draw_line(axes: Axes, points: Sequence[TrainingPoint], name: str, look: dict[str, Any], mark: str) -> None:
    x, means = [point.images for point in points], [point.estimate.value for point in points]
    axes.plot(x, means, marker=mark, markersize=7, markeredgecolor=PAPER, label=name, **look)
    if any(len(point.values) > 1 for point in points):
        low, high = zip(*(point.ends for point in points), strict=True)
        axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    for point in points:
        _draw_bar(axes, point, look["color"])


def _draw_bar(axes: Axes, point: TrainingPoint, colour: str) -> None:
    """From the lowest to the highest seed, or over the interval of a single one."""
    low, high = point.ends
    if low < high:
        mean = point.estimate.value
        reach = [[mean - low], [high - mean]]
        axes.errorbar([point.images], [mean], yerr=reach, fmt="none", ecolor=colour, capsize=4, elinewidth=1.2)


# --- where it is trained, and how well -------------------------------------------------------------------------------


def _levels_chart(found: ScheduleResults) -> Drawing:
    """Above, the error of the network at the end of training by λ; below, where each schedule trains it."""
    figure = charts.canvas(9, 7.2)
    error, density = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for name, look, mark in _looks(found):
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
    density.set_xlim(max(low, -_EDGE), min(high, _EDGE))
    if np.isfinite(error.dataLim.ymin) and error.dataLim.ymin > 0:
        charts.log_y(error)
    charts.legend(figure, error)
    note = "Where the network errs at the end, and where each schedule trained it."
    return Drawing(figure, "Error by noise level", note)


def with_gaps(lam: Array, mean: Array) -> tuple[Array, Array]:
    """A line that ends where a level was never seen: NaN between bins that are not neighbours."""
    far = np.flatnonzero(np.diff(lam) > 1.5 * np.diff(lam).min(initial=np.inf)) + 1
    return np.insert(lam, far, np.nan), np.insert(mean, far, np.nan)


def spread_of(lam: Array) -> tuple[Array, Array]:
    """The density of λ: middles of bins and shares per unit. What lies beyond is counted and not shown."""
    inside = lam[np.abs(lam) < _EDGE]
    low, high = np.floor(inside.min() / BIN) * BIN, np.ceil(inside.max() / BIN) * BIN
    counted, edges = np.histogram(inside, np.arange(low - BIN, high + 1.5 * BIN, BIN))
    return (edges[:-1] + edges[1:]) / 2, counted / len(lam) / BIN


# --- stability -----------------------------------------------------------------------------------------------------


def _stability_chart(found: ScheduleResults) -> Drawing:
    """Gradient norm and loss over training, and how much the steps of a window differ."""
    figure = charts.canvas(11, 7.2)
    panels = figure.subplots(2, 2, sharex=True)
    unit, x = _unit_of(found)
    for row, (column, title) in enumerate((("grad_norm", "Gradient norm"), ("loss", "Loss"))):
        for name, look, _ in _looks(found):
            images, mean = found.series(name, column)
            _, spread = found.series(name, f"{column}_std")
            _smooth(panels[row, 0], images / unit, mean, {**look, "label": name})
            _smooth(panels[row, 1], images / unit, spread / np.where(mean > 0, mean, np.nan), look)
        below = x if row else ""
        charts.quiet(panels[row, 0], title + ", mean of a window", below)
        charts.quiet(panels[row, 1], title + ", spread of the steps of a window", below, "standard deviation ÷ mean")
        panels[row, 1].set_ylim(bottom=0)
        if np.isfinite(panels[row, 0].dataLim.ymin) and panels[row, 0].dataLim.ymin > 0:
            charts.log_y(panels[row, 0])
    charts.legend(figure, panels[0, 0])
    note = "How calm training was: the steps of a window against each other."
    return Drawing(figure, "Gradient norm and loss over training", note)


def _smooth(axes: Axes, x: Array, y: Array, look: dict[str, Any]) -> None:
    """A line; where it has many points, a faint one with its running mean."""
    if len(y) > 4 * _SMOOTH:
        axes.plot(x, y, color=look["color"], linewidth=0.7, alpha=0.2)
        half = _SMOOTH // 2
        y = np.array([np.mean(y[max(0, i - half) : i + half + 1]) for i in range(len(y))])
    axes.plot(x, y, **look)


# --- images --------------------------------------------------------------------------------------------------------

_DPI = 200
_GAP, _LEFT, _TOP = 0.08, 0.35, 0.5  # inches
_LEAST = 200  # pixels of a sheet's side, to which small ones are enlarged by whole numbers


def _image_sheet(found: ScheduleResults) -> Drawing:
    """A row a schedule, a column a point: what the first seed makes of the same noise. Pixels stay whole."""
    names, steps = found.study.schedules, found.study.points
    sheets = {(name, step): _sheet_of(found.image(name, step)) for name in names for step in steps}
    side = max([max(sheet.shape[:2]) for sheet in sheets.values() if sheet is not None], default=_LEAST) / _DPI
    width, height = _LEFT + len(steps) * (side + _GAP), _TOP + len(names) * (side + _GAP)
    figure = charts.canvas(width, height)
    for (name, step), sheet in sheets.items():
        row, column = names.index(name), steps.index(step)
        left, top = _LEFT + column * (side + _GAP), _TOP + row * (side + _GAP)
        axes = figure.add_axes((left / width, 1 - (top + side) / height, side / width, side / height))
        axes.set_axis_off()
        if sheet is None:
            axes.text(0.5, 0.5, "not yet", ha="center", va="center", color=FAINT, fontsize=9)
        else:
            axes.imshow(sheet, interpolation="nearest")
            axes.set_anchor("N")
    _heads(figure, found, side)
    note = "Images of the first seed, from the same noise."
    return Drawing(figure, "Images over training", note, dpi=_DPI, raster=True)


def _heads(figure: Figure, found: ScheduleResults, side: float) -> None:
    """The names of rows and columns."""
    width, height = figure.get_size_inches()
    for column, (step, images) in enumerate(zip(found.study.points, images_at_points(found), strict=True)):
        x = _LEFT + column * (side + _GAP) + side / 2
        words = f"step {step:,}" + (f"\n{images / 1e6:.2g} M images" if images >= 1e5 else "")
        figure.text(x / width, 1 - (_TOP - 0.06) / height, words, ha="center", va="bottom", fontsize=8, color=INK)
    for row, (name, look, _) in enumerate(_looks(found)):
        y = _TOP + row * (side + _GAP) + side / 2
        place: dict[str, Any] = {"rotation": 90, "ha": "center", "va": "center", "fontsize": 10, "fontweight": "bold"}
        figure.text(_LEFT / 2 / width, 1 - y / height, name, color=look["color"], **place)


def _sheet_of(path: Path) -> Any:
    """A stored sheet, (H, W, 3) uint8, enlarged where it is small; None where there is none."""
    from PIL import Image

    if not path.is_file():
        return None
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    times = 2 if min(pixels.shape[:2]) >= _LEAST else max(1, -(-2 * _LEAST // max(pixels.shape[:2])))
    return pixels.repeat(times, 0).repeat(times, 1)


# --- The report -----------------------------------------------------------------------------------------------------

_CHARTS = {"quality": _quality, "levels": _levels_chart, "stability": _stability_chart, "pictures": _image_sheet}
_ALONE = (
    "Each interval holds for its own pair at 95 %: of twenty pairs that do not differ, one would seem to. "
    "Less is better for both. Schedules of one seed share the data order, the first weights and the noise of images."
)
_TABLE = "table.json"


def write(folder: Path) -> Path:
    """Reads a study's folder, finished or not, and writes charts/*.png, table.md, table.json and report.html there."""
    charts.require()
    found = ScheduleResults.read(folder)
    drawn = {name: draw(found) for name, draw in _CHARTS.items()}
    charts.write(drawn, folder)
    put(folder / _TABLE, json.dumps(_plain_results(found), indent=1, allow_nan=False) + "\n")
    put(folder / "table.md", _markdown(found))
    return _page(found, list(drawn.values())).write(folder / "report.html")


def _headline(found: ScheduleResults) -> str:
    """What was compared, and how far it is."""
    s = found.study
    scored, wanted = found.done
    seeds = "1 seed" if len(s.seeds) == 1 else f"{len(s.seeds)} seeds"
    words = f"{', '.join(s.schedules)} · {seeds} · {s.points[-1]:,} steps"
    return words if scored >= wanted else f"{words} · unfinished: {scored} of {wanted} scores"


def _markdown(found: ScheduleResults) -> str:
    parts = ["# Noise schedules\n", _headline(found) + "\n", *(table.markdown() for table in _tables_of(found))]
    if said := [one["words"] for one in _comparisons(found)]:
        parts += ["## Are they different?\n", "\n".join(f"- {words}" for words in said) + "\n", _ALONE + "\n"]
    return "\n".join(parts)


def _page(found: ScheduleResults, drawn: Sequence[Drawing]) -> Page:
    page, (first, *rest) = Page("Noise schedules", _headline(found)), _tables_of(found) or [None]
    page.add(*([] if first is None else [first]))
    if said := [one["words"] for one in _comparisons(found)]:
        page.add(Text("", "Are they different?"), *map(Text, said), Text(_ALONE, kind="note"))
    config = json.dumps(to_plain(found.study), indent=1)
    return page.add(*drawn, *rest, Text("", "Config"), Code(config, "All of it"))
