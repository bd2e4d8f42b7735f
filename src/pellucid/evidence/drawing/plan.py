"""A plan as an image, its calls beside the matrix of its weights; noise schedules as curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.core.wording import short, time_text
from pellucid.evidence.report.charts import COLOURS, FAINT, INK, PAPER, canvas, quiet, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pellucid.core.plan import Plan
    from pellucid.core.schedule import Schedule

_NUMBERED_ROWS = 30  # more rows than this and the numbers would not be legible
_CELL = 0.78  # inches of a column of the matrix
_GAP = 0.35  # the width of the gap between two groups of columns, in columns


@dataclass(frozen=True)
class _Matrix:
    """The weights of a plan as an array [rows, columns]; a column without a name is a gap between two groups."""

    names: list[str]
    groups: list[tuple[str, int, int]]  # what the registers go into; the first and the last column
    weights: Any

    @property
    def edges(self) -> list[float]:
        return [0.0, *accumulate(1.0 if name else _GAP for name in self.names)]

    @property
    def centres(self) -> list[float]:
        return [(a + b) / 2 for a, b in pairwise(self.edges)]


def draw_plan(plan: Plan, path: Path) -> None:
    """Left, the calls: sigma and λ by row. Right, the weights: one line per row, one column per register."""
    matrix = _weights_of(plan)
    few = plan.nfe <= _NUMBERED_ROWS
    width = 6.2 + _CELL * matrix.edges[-1]
    height = 2.0 + (max(0.3 * plan.nfe, 1.2) if few else 9.0)
    figure = canvas(width, height)
    left, right = figure.add_gridspec(1, 2, width_ratios=[4.0, _CELL * matrix.edges[-1] + 0.2], wspace=0.06)
    sigma, lam = (figure.add_subplot(cell) for cell in left.subgridspec(1, 2, wspace=0.1))
    _calls(sigma, lam, plan)
    cells = figure.add_subplot(right)
    _heat(figure, cells, matrix)
    for axes in (sigma, lam, cells):
        axes.set_ylim(plan.nfe - 0.5, -0.5)
    margin = 0.4 if few else 0.9
    edges = {"left": 1.3 / width, "right": 1 - margin / width, "top": 1 - 1.45 / height, "bottom": 0.5 / height}
    figure.subplots_adjust(**edges)
    _title(figure, plan, width, height)
    save(figure, path)


def _title(figure: Figure, plan: Plan, width: float, height: float) -> None:
    words = [str(plan.schedule.get("name", "")), f"{plan.grid.get('name', '')} grid", f"{plan.dialect} dialect"]
    words += [f"{plan.target} network", f"frame {plan.frame}", f"p: {plan.basis}"]
    words.append(f"initial scale {plan.initial_scale:.4g}")
    count = "1 model call" if plan.nfe == 1 else f"{plan.nfe} model calls"
    place: dict[str, Any] = {"x": 0.35 / width, "color": INK}
    figure.text(y=1 - 0.42 / height, s=f"{plan.name}: {count}", fontsize=14, fontweight="bold", **place)
    figure.text(y=1 - 0.7 / height, s=" · ".join(words), fontsize=9, **{**place, "color": FAINT})


def _calls(sigma: Axes, lam: Axes, plan: Plan) -> None:
    """Two columns that share the rows of the matrix: sigma on a log axis, λ on a straight one."""
    rows = range(plan.nfe)
    few = plan.nfe <= _NUMBERED_ROWS
    sigmas = [r.level.sigma if r.level.sigma > 0 else math.nan for r in plan.rows]
    lams = [r.level.lam if math.isfinite(r.level.lam) else math.nan for r in plan.rows]
    held = [i for i, r in enumerate(plan.rows) if r.held]
    for axes, values, name, colour in ((sigma, sigmas, "σ", COLOURS[0]), (lam, lams, "λ", COLOURS[1])):
        quiet(axes)
        axes.set_title(name, fontsize=11, color=INK)
        size = 5 if few else 2
        axes.plot(values, rows, "-o", color=colour, markersize=size, linewidth=1.4)
        axes.plot([values[i] for i in held], held, "o", color=PAPER, markersize=size - 2)
        if few:
            axes.set_yticks(list(rows))
    lam.tick_params(labelleft=False, left=False)
    if few:
        _time_labels(sigma, plan)
    _log_ticks(sigma, [s for s in sigmas if s == s])
    hint = "hollow: held out of the history" if held else ""
    sigma.set_xlabel(hint, fontsize=8, color=FAINT, loc="left")
    sigma.set_ylabel("" if few else "row", color=INK, fontsize=9)


def _time_labels(axes: Axes, plan: Plan) -> None:
    """A column of the times that are passed to the network, left of the rows' numbers."""
    beside, above = axes.get_yaxis_transform(), axes.transAxes
    look: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "color": INK}
    for i, r in enumerate(plan.rows):
        axes.annotate(time_text(r.time, 5), (0, i), (-32, 0), xycoords=beside, va="center", fontsize=9, **look)
    axes.annotate("time", (0, 1), (-32, 6), xycoords=above, fontsize=11, **look)
    axes.annotate("row", (0, 1), (-4, 6), xycoords=above, fontsize=11, **look)


def _log_ticks(axes: Axes, values: Sequence[float]) -> None:
    """A log axis with a few plain numbers, also where it spans less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    decades = math.log10(max(values) / min(values)) if values else 0.0
    steps = (1.0, 2.0, 5.0) if decades < 1.5 else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=steps, numticks=5))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _weights_of(plan: Plan) -> _Matrix:
    """The weights by row and register, in groups: noise before the call, the next x, the next anchor."""
    import numpy as np

    from pellucid.core.plan import REGISTERS

    groups: list[tuple[str, int, int]] = []
    names: list[str] = []
    columns: list[list[float]] = []
    goals = {
        "churn: x +": [{7: r.pre_noise} if r.pre_noise else {} for r in plan.rows],
        "x ←": [dict(r.x or ()) for r in plan.rows],
        "anchor ←": [dict(r.anchor or ()) for r in plan.rows],
    }
    for goal, tables in goals.items():
        used = sorted({register for found in tables for register in found})
        if not used:
            continue
        if names:
            names.append("")
            columns.append([math.nan] * plan.nfe)
        groups.append((goal, len(names), len(names) + len(used) - 1))
        names += [REGISTERS[register] for register in used]
        columns += [[found.get(register, math.nan) for found in tables] for register in used]
    return _Matrix(names, groups, np.array(columns, np.float64).T)


def _heat(figure: Figure, axes: Axes, matrix: _Matrix) -> None:
    """The weights as colours: blue for what is added, red for what is taken away, log beyond ±0.01."""
    import numpy as np
    from matplotlib.colors import SymLogNorm

    few = len(matrix.weights) <= _NUMBERED_ROWS
    top = max(float(np.nanmax(np.abs(matrix.weights))), 0.1)
    reach = top * 10 if few else top  # pale enough to read the numbers
    norm = SymLogNorm(linthresh=0.01, vmin=-reach, vmax=reach, base=10)
    look: dict[str, Any] = {"edgecolors": PAPER, "linewidth": 1.0} if few else {}
    lines = np.arange(len(matrix.weights) + 1) - 0.5
    image = axes.pcolormesh(matrix.edges, lines, np.ma.masked_invalid(matrix.weights), cmap="RdBu", norm=norm, **look)
    axes.set_xticks(matrix.centres, matrix.names, fontsize=10, color=INK)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelleft=False)
    axes.spines[:].set_visible(False)
    for name, first, last in matrix.groups:
        middle = (matrix.edges[first] + matrix.edges[last + 1]) / 2, 1.0
        box: dict[str, Any] = {"ha": "center", "va": "bottom", "color": INK, "fontsize": 10, "fontweight": "bold"}
        axes.annotate(name, middle, (0, 21), xycoords=axes.get_xaxis_transform(), textcoords="offset points", **box)
    if few:
        _numbers(axes, matrix, lambda weight: image.cmap(norm(weight)))
        return
    bar = figure.colorbar(image, cax=axes.inset_axes((1.02, 0.0, 0.15 / matrix.edges[-1], 1.0)))
    bar.ax.tick_params(labelsize=8, colors=INK)


def _numbers(axes: Axes, matrix: _Matrix, colour: Callable[[float], tuple[float, ...]]) -> None:
    """The weights as numbers, light on dark cells and dark on light ones."""
    for row, weights in enumerate(matrix.weights):
        for centre, weight in zip(matrix.centres, weights, strict=True):
            if math.isfinite(weight):
                red, green, blue, _ = colour(weight)
                ink = PAPER if 0.3 * red + 0.59 * green + 0.11 * blue < 0.56 else INK
                text = short(float(weight))
                axes.text(centre, row, text, ha="center", va="center", fontsize=8.5, color=ink)


# --- Schedules ------------------------------------------------------------------------------------------------------


def draw_schedules(found: Mapping[str, Schedule], path: Path) -> None:
    """Four panels over normalised time: β, ᾱ, SNR, λ; one line a schedule."""
    import numpy as np

    figure = canvas(12, 8.6)
    panels = figure.subplots(2, 2, sharex=True)
    titles = (
        ("beta", "β: noise added by a step", True),
        ("alpha_bar", "$\\bar{\\alpha}$: signal left", False),
        ("snr", "SNR = $\\bar{\\alpha}\\,/\\,(1-\\bar{\\alpha})$", True),
        ("lam", "λ = ½·log SNR", False),
    )
    for axes, (column, title, log) in zip(panels.flat, titles, strict=True):
        quiet(axes, title)
        for i, curve in enumerate(found.values()):
            values = curve.table()
            span = values["time"][-1] - values["time"][0]
            y = values[column]
            y = np.where(np.isfinite(y) & (y > 0 if log else True), y, np.nan)
            dashes: Any = "-" if curve.num_train is not None else (0, (4, 2))
            look = {"color": COLOURS[i % len(COLOURS)], "linewidth": 1.9 if len(found) <= 4 else 1.6}
            axes.plot((values["time"] - values["time"][0]) / span, y, linestyle=dashes, label=curve.name, **look)
        if log:
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, 1e-12), high)
        axes.set_xlim(0, 1)
    panels[0, 0].set_ylim(bottom=max(panels[0, 0].get_ylim()[0], 1e-7), top=1.5)
    panels[1, 1].set_ylim(bottom=max(panels[1, 1].get_ylim()[0], -14))
    for axes in panels[1]:
        axes.set_xlabel("training time, normalised: data → noise", color=INK, fontsize=9)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    columns = min(6, len(labels))
    lines = math.ceil(len(labels) / columns)
    figure.legend(handles, labels, loc="lower center", ncols=columns, frameon=False, fontsize=10, handlelength=2.6)
    figure.tight_layout(rect=(0, 0.035 * lines + 0.01, 1, 1), w_pad=2.0, h_pad=1.6)
    save(figure, path)
