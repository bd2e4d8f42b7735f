"""Charts of reports: the house's colours and quiet axes, and lines with intervals over two axes."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.atomic_files import put

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SLATE, FAINT, PAPER = "#1c2530", "#51606f", "#8894a3", "#ffffff"
# Twelve lines that stay apart, in hue and in lightness.
COLOURS = (
    "#1f6fd6", "#e8710a", "#188a3b", "#c5221f", "#8430ce", "#8d6e3f", "#e0439b", "#5f6b7a", "#a3ad12", "#12a4af",
    "#101820", "#f2b01e",
)  # fmt: skip
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")  # schedules stay apart without colours too


def require() -> None:
    """Refuses to begin what could not be drawn at its end."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        advice = "Install it: pip install 'pellucid[plot]'."
        raise PellucidError(f"matplotlib must be installed to draw; got none. {advice}", "missing-extra") from None


def canvas(width: float, height: float, paper: str = PAPER) -> Figure:
    """An empty image, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=paper)
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path, dpi: int = 150) -> Path:
    put(path, partial(figure.savefig, dpi=dpi))
    return path


def quiet(axes: Axes, title: str = "", x: str = "", y: str = "") -> None:
    """The house's axes: few lines, faint ones."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.tick_params(which="both", colors=INK, labelsize=9, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.grid(True, color="#e3e8ee", linewidth=0.8)
    axes.set_axisbelow(True)


def log_y(axes: Axes) -> None:
    """A log axis with a few plain numbers, where what is drawn spans more than a factor of two."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if axes.dataLim.ymax < 2 * axes.dataLim.ymin:
        return
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    steps: tuple[float, ...] = (1.0, 2.0, 5.0) if high < 60 * low else (1.0,)
    if high < 4 * low:
        steps = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0f}" if 1e3 <= v < 1e7 else f"{v:.3g}"))
    axes.set_ylim(low, high)


def legend(figure: Figure, axes: Axes, note: str = "") -> None:
    """One for all panels, in a strip under them; the note under it."""
    handles, labels = axes.get_legend_handles_labels()
    height = figure.get_figheight()
    foot = 0.25 if note else 0.02  # inches
    look: dict[str, Any] = {"frameon": False, "fontsize": 10, "labelcolor": INK, "borderaxespad": 0.2}
    place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, foot / height)}
    figure.legend(handles, labels, ncols=min(6, len(labels)), **place, **look)
    figure.text(0.5, 0.08 / height, note, fontsize=8.5, color=SLATE, ha="center", va="bottom")
    figure.tight_layout(rect=(0, (foot + 0.3) / height, 1, 1), w_pad=2.0, h_pad=1.4)


# --- Lines with intervals -------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 520, 340  # of the drawing, in its own units
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 46
GRID = "#e3e8ee"


@dataclass(frozen=True)
class Axis:
    """What an axis counts; `ticks` where the plain choice would not fit."""

    name: str
    log: bool = False
    ticks: tuple[float, ...] = ()


@dataclass(frozen=True)
class Series:
    """One line. `low` and `high` are the ends of an interval a point, `labels` a line of words for the pointer, `href`
    the key of a cell of `Images` that a click shows. A point that is not finite is left out; without `points` there
    is the line alone."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    labels: Sequence[str] = ()
    href: Sequence[str] = ()
    colour: str = ""
    line: bool = True
    dashed: bool = False
    points: bool = True

    def __post_init__(self) -> None:
        for name in ("y", "low", "high", "labels", "href"):
            given = getattr(self, name)
            if given is not None and len(given) not in ((len(self.x),) if name == "y" else (0, len(self.x))):
                must = f"as many as x, {len(self.x)}"
                raise PellucidError(rule(f"{name} of series {self.name}", must, len(given)), "chart")


@dataclass(frozen=True)
class Mark:
    """A remarkable place: a ring with a name around a point, or, with x or y alone, a line across."""

    name: str
    x: float | None = None
    y: float | None = None


@dataclass(frozen=True)
class Chart:
    """Series over two axes; `note` says how to read them."""

    title: str
    series: Sequence[Series]
    x: Axis
    y: Axis
    marks: Sequence[Mark] = ()
    note: str = ""

    def html(self) -> str:
        return figure(self)

    def png(self, path: Path) -> Path:
        """The same by matplotlib."""
        return png(self, path)

    def colour(self, number: int) -> str:
        return self.series[number].colour or COLOURS[number % len(COLOURS)]


@dataclass(frozen=True)
class Scale:
    """From an axis to the units of the drawing."""

    log: bool
    low: float
    high: float
    begin: float
    end: float

    @staticmethod
    def over(axis: Axis, values: Sequence[float], begin: float, end: float) -> Scale:
        """Around all values, with some air; a line of one value gets room too."""
        good = [v for v in values if math.isfinite(v) and (v > 0 or not axis.log)]
        low, high = (min(good), max(good)) if good else (1.0, 2.0)
        if axis.log:
            air = max((high / low) ** 0.06, 1.08)
            return Scale(True, low / air, high * air, begin, end)
        air = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        return Scale(False, low - air, high + air, begin, end)

    def __call__(self, value: float) -> float:
        if self.log:
            value = max(value, self.low)  # an interval that reaches zero ends at the frame
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.begin + min(max(part, 0.0), 1.0) * (self.end - self.begin)

    def shows(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.log)

    def ticks(self, most: int = 7) -> list[float]:
        """Round numbers inside."""
        if self.log:
            return log_ticks(self.low, self.high, most)
        rough = (self.high - self.low) / most
        size = 10 ** math.floor(math.log10(rough))
        step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough)
        first = math.ceil(self.low / step)
        found = [i * step for i in range(first, math.floor(self.high / step) + 1)]
        return [0.0 if abs(v) < step / 1e6 else v for v in found]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten with as many numbers between them as there is room for."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for inside in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        found = [m * 10.0**e for e in range(first, last + 1) for m in inside if low <= m * 10.0**e <= high]
        if len(found) <= most:
            return found
    every = math.ceil((last - first + 1) / most)
    return [10.0**e for e in range(first, last + 1, every) if low <= 10.0**e <= high]


def short(value: float, digits: int = 4) -> str:
    """A number for an axis, the pointer or a table, with so many significant digits."""
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{min(digits, 3) - 1}e}".replace("e-0", "e-").replace("e+0", "e").replace("-", "−")
    text = f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
    return text.replace("-", "−")


# SVG


def figure(chart: Chart) -> str:
    """The drawing, its legend and the place where the pointer's words appear."""
    across, up = scales(chart)
    parts = [*frame(chart, across, up), *(line(chart, i, across, up) for i in range(len(chart.series)))]
    parts += [mark(one, across, up) for one in chart.marks]
    names = "".join(
        f'<button type="button" aria-pressed="true" data-series="{i}"><i style="background:{chart.colour(i)}"></i>'
        f"{html.escape(one.name)}</button>"
        for i, one in enumerate(chart.series)
    )
    note = f"<figcaption>{html.escape(chart.note)}</figcaption>" if chart.note else ""
    title = html.escape(chart.title)
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="group" aria-label="{html.escape(chart.title, quote=True)}">'
        + "".join(parts)
        + "</svg>"
    )
    inside = f'<h3>{title}</h3>{svg}<div class="tip"></div><div class="legend">{names}</div>{note}'
    return f'<figure class="chart">{inside}</figure>\n'


def scales(chart: Chart) -> tuple[Scale, Scale]:
    xs = [v for one in chart.series for v in one.x] + [m.x for m in chart.marks if m.x is not None]
    ys = [v for one in chart.series for v in (*one.y, *(one.low or ()), *(one.high or ()))]
    ys += [m.y for m in chart.marks if m.y is not None]
    return Scale.over(chart.x, xs, LEFT, WIDTH - RIGHT), Scale.over(chart.y, ys, HEIGHT - BOTTOM, TOP)


def frame(chart: Chart, across: Scale, up: Scale) -> list[str]:
    """Grid lines, their numbers and the names of the axes."""
    parts = []
    low, high = HEIGHT - BOTTOM, WIDTH - RIGHT
    for value in chart.x.ticks or across.ticks():
        at = across(value)
        parts.append(f'<path d="M{at:.1f} {TOP}V{low}" stroke="{GRID}"/>')
        parts.append(f'<text x="{at:.1f}" y="{low + 16}" text-anchor="middle">{short(value)}</text>')
    for value in chart.y.ticks or up.ticks():
        at = up(value)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{high}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{short(value)}</text>')
    middle = (LEFT + high) / 2
    name_x, name_y = html.escape(chart.x.name), html.escape(chart.y.name)
    parts.append(f'<path d="M{LEFT} {TOP}V{low}H{high}" fill="none" stroke="{FAINT}"/>')
    parts.append(f'<text class="name" x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{name_x}</text>')
    turn = f"translate(13 {(TOP + low) / 2:.0f}) rotate(-90)"
    parts.append(f'<text class="name" transform="{turn}" text-anchor="middle">{name_y}</text>')
    return parts


def line(chart: Chart, number: int, across: Scale, up: Scale) -> str:
    """One series: its line, its intervals, and a point for each value that the pointer may ask."""
    one, colour = chart.series[number], chart.colour(number)
    kept = [i for i in range(len(one.x)) if across.shows(one.x[i]) and up.shows(one.y[i])]
    at = [(across(one.x[i]), up(one.y[i])) for i in kept]
    parts = []
    if one.line and len(at) > 1:
        dash = ' stroke-dasharray="5 4"' if one.dashed else ""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>')
    for i, (x, y) in zip(kept, at, strict=True) if one.points else ():
        if one.low and one.high and math.isfinite(one.low[i]) and math.isfinite(one.high[i]):
            ends = f"M{x:.1f} {up(one.low[i]):.1f}V{up(one.high[i]):.1f}"
            parts.append(f'<path d="{ends}" stroke="{colour}" stroke-width="1.3" opacity=".55"/>')
        cell = f' data-cell="{html.escape(one.href[i], quote=True)}"' if one.href and one.href[i] else ""
        words = html.escape(told(chart, one, i), quote=True)
        spoken = words.replace("\n", ", ")
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" tabindex="0" role="img" '
            f'aria-label="{spoken}" data-tip="{words}"{cell}/>'
        )
    return f'<g data-series="{number}">{"".join(parts)}</g>'


def told(chart: Chart, one: Series, i: int) -> str:
    """What the pointer is shown: the series, both numbers, the interval, and the point's own words."""
    lines = [one.name, f"{chart.x.name}: {short(one.x[i])}", f"{chart.y.name}: {short(one.y[i])}"]
    if one.low and one.high and math.isfinite(one.low[i]) and math.isfinite(one.high[i]):
        lines[-1] += f" ({short(one.low[i])} to {short(one.high[i])})"
    return "\n".join([*lines, *([one.labels[i]] if one.labels and one.labels[i] else [])])


def mark(one: Mark, across: Scale, up: Scale) -> str:
    name = html.escape(one.name)
    if one.x is not None and one.y is not None:
        x, y = across(one.x), up(one.y)
        ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8.5" fill="none" stroke="{INK}" stroke-width="1.6"/>'
        left = x > WIDTH * 0.72
        place = f'x="{x + (-13 if left else 13):.1f}" y="{y - 7:.1f}" text-anchor="{"end" if left else "start"}"'
        return f'{ring}<text class="name" {place}>{name}</text>'
    if one.x is not None:
        at = across(one.x)
        path, place = f"M{at:.1f} {TOP}V{HEIGHT - BOTTOM}", f'x="{at + 5:.1f}" y="{TOP + 10}"'
    else:
        assert one.y is not None
        at = up(one.y)
        path, place = f"M{LEFT} {at:.1f}H{WIDTH - RIGHT}", f'x="{LEFT + 5}" y="{at - 5:.1f}"'
    stroke = f'stroke="{INK}" stroke-dasharray="3 3" opacity=".7"'
    return f'<path d="{path}" {stroke}/><text class="name" {place}>{name}</text>'


# PNG


def png(chart: Chart, path: Path) -> Path:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    drawing = canvas(7.2, 5.0)
    axes = drawing.add_subplot()
    across, up = scales(chart)
    for number, one in enumerate(chart.series):
        paint(axes, one, chart.colour(number), across, up)
    for one in chart.marks:
        paint_mark(axes, one)
    quiet(axes, chart.title, chart.x.name, chart.y.name)
    sides = ((axes.xaxis, chart.x, across, axes.set_xscale), (axes.yaxis, chart.y, up, axes.set_yscale))
    for axis, about, scale, set_scale in sides:
        if about.log:
            set_scale("log")
        axis.set_major_locator(FixedLocator(list(about.ticks) or scale.ticks()))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.set_xlim(across.low, across.high)
    axes.set_ylim(up.low, up.high)
    if len(chart.series) > 1:
        legend(drawing, axes)
    else:
        drawing.tight_layout()
    return save(drawing, path)


def paint(axes: Any, one: Series, colour: str, across: Scale, up: Scale) -> None:
    kept = [i for i in range(len(one.x)) if across.shows(one.x[i]) and up.shows(one.y[i])]
    xs, ys = [one.x[i] for i in kept], [one.y[i] for i in kept]
    style = ("--" if one.dashed else "-") if one.line else ""
    dots = "o" if one.points else "none"
    axes.plot(xs, ys, style or "none", color=colour, marker=dots, markersize=5, linewidth=1.8, label=one.name)
    for i in kept:
        if one.low and one.high and math.isfinite(one.low[i]) and math.isfinite(one.high[i]):
            ends = [max(one.low[i], up.low), one.high[i]]
            axes.plot([one.x[i]] * 2, ends, "-", color=colour, linewidth=1.3, alpha=0.55)


def paint_mark(axes: Any, one: Mark) -> None:
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=3, foreground=PAPER)]  # or a line behind the words would cross them out
    look: dict[str, Any] = {"color": INK, "fontsize": 9, "path_effects": halo}
    if one.x is not None and one.y is not None:
        axes.plot([one.x], [one.y], "o", markersize=13, markerfacecolor="none", markeredgecolor=INK)
        axes.annotate(one.name, (one.x, one.y), xytext=(10, 8), textcoords="offset points", **look)
    elif one.x is not None:
        axes.axvline(one.x, color=INK, linestyle=":", linewidth=1.2)
        axes.annotate(one.name, (one.x, 0.97), xycoords=("data", "axes fraction"), va="top", **look)
    else:
        axes.axhline(one.y, color=INK, linestyle=":", linewidth=1.2)
        under = {**look, "zorder": 1.9}  # of the points, which its halo would hide
        axes.annotate(one.name, (0.01, one.y), xycoords=("axes fraction", "data"), va="bottom", **under)
