"""Charts of reports: drawn once, with matplotlib; a PNG file and the SVG of a page are the same drawing.

    chart = Chart("Error", [Series("ddim", calls, errors)], Axis("model calls", log=True), Axis("error"))
    chart.png(folder / "error.png")
    page.add(chart)

On a page the points answer the pointer, and a click on an entry of the legend hides its line.
"""

from __future__ import annotations

import base64
import html
import io
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.atomic_files import put

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as MatplotlibAxis
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

    from pellucid.evidence.statistics import Estimate

INK, SLATE, FAINT, PAPER, _GRID = "#1c2530", "#51606f", "#8894a3", "#ffffff", "#e3e8ee"
# Twelve lines that stay apart, in hue and in lightness.
COLOURS = (
    "#1f6fd6", "#e8710a", "#188a3b", "#c5221f", "#8430ce", "#8d6e3f", "#e0439b", "#5f6b7a", "#a3ad12", "#12a4af",
    "#101820", "#f2b01e",
)  # fmt: skip
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")  # schedules stay apart without colours too
_SIZE = (5.6, 3.9)  # inches of a chart of one panel: two stand side by side on a page
LOCK = threading.RLock()  # matplotlib draws for one thread at a time, and its settings are one for all
_ZOOM = 1.4  # pixels of a page to a point of a drawing, at most: 9 points are then read as 12.6 pixels


def require() -> None:
    """Refuses to begin what could not be drawn at its end."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        advice = "Install it: pip install 'pellucid[plot]'."
        raise PellucidError(f"matplotlib must be installed to draw; got none. {advice}", "missing-extra") from None


# --- The look ----------------------------------------------------------------------------------------------------


def canvas(width: float, height: float, paper: str = PAPER) -> Figure:
    """An empty figure, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=paper)
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path, dpi: int = 150) -> Path:
    put(path, partial(figure.savefig, dpi=dpi))
    return path


def write(drawn: Mapping[str, Chart | Drawing], folder: Path) -> None:
    """charts/*.png of a report, by their names."""
    (folder / "charts").mkdir(exist_ok=True)
    for name, one in drawn.items():
        one.png(folder / "charts" / f"{name}.png")


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
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def log_y(axes: Axes) -> None:
    """A log axis with a few plain numbers, where what is drawn spans more than a factor of two."""
    low, high = axes.dataLim.ymin, axes.dataLim.ymax
    if high < 2 * low:
        return
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    _numbered(axes.yaxis, log_ticks(low, high))
    axes.set_ylim(low, high)


def _numbered(axis: MatplotlibAxis, places: Sequence[float]) -> None:
    """An axis with plain numbers at these places and nowhere else."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(list(places)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))


def legend(figure: Figure, axes: Axes | Sequence[Axes], note: str = "") -> Legend | None:
    """One for all panels, in a strip under them, which makes the figure higher than for one line; the note below it.
    `axes` are those whose lines it names."""
    named: dict[str, Any] = {}
    for one in axes if isinstance(axes, Sequence) else [axes]:
        handles, labels = one.get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True)) | named
    foot = 0.25 if note else 0.04  # inches
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "labelcolor": INK, "loc": "lower center"}
    look |= {"borderaxespad": 0.2, "columnspacing": 1.4}
    drawn, tall = None, 0.0
    for columns in range(min(6, len(named)), 0, -1):
        drawn = figure.legend(list(named.values()), list(named), ncols=columns, **look)
        size = drawn.get_window_extent(figure.canvas.get_renderer())  # type: ignore[attr-defined]  # of Agg
        tall = size.height / figure.dpi
        if size.width <= figure.bbox.width or columns == 1:
            break
        drawn.remove()
    height = figure.get_figheight() + max(0.0, tall - 0.3)
    figure.set_figheight(height)
    if drawn is not None:
        drawn.set_bbox_to_anchor((0.5, foot / height), figure.transFigure)
    figure.text(0.5, 0.08 / height, note, fontsize=8.5, color=SLATE, ha="center", va="bottom")
    figure.tight_layout(rect=(0, (foot + tall) / height, 1, 1), w_pad=2.0, h_pad=1.4, pad=0.6)
    return drawn


def number_text(value: float, digits: int = 4) -> str:
    """A number for an axis, the pointer or a table, with this many significant digits."""
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{min(digits, 3) - 1}e}".replace("e-0", "e-").replace("e+0", "e").replace("-", "−")
    text = f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
    return text.replace("-", "−")


# --- Drawings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spot:
    """A place in the data of `axes` that tells the pointer `words`; a click shows the images of the cell `key`."""

    axes: Axes
    x: float
    y: float
    words: str
    key: str = ""
    series: int | None = None
    radius: float = 4.0  # points

    @property
    def finite(self) -> bool:
        return math.isfinite(self.x) and math.isfinite(self.y)


@dataclass(frozen=True)
class Drawing:
    """A finished figure: a PNG file, and on a page an SVG, or with `raster` the same pixels. `title` is read aloud."""

    figure: Figure
    title: str
    note: str = ""
    spots: Sequence[Spot] = ()
    dpi: int = 150
    raster: bool = False

    def png(self, path: Path) -> Path:
        return save(self.figure, path, self.dpi)

    @property
    def wide(self) -> bool:
        """Whether it takes the whole width of a page."""
        return bool(self.figure.get_figwidth() > 1.3 * _SIZE[0])

    def html(self) -> str:
        kind = "chart wide" if self.wide else "chart"
        note = f"<figcaption>{html.escape(self.note)}</figcaption>" if self.note else ""
        most = f"max-width:{_ZOOM * 72 * self.figure.get_figwidth():.0f}px"
        return f'<figure class="{kind}" style="{most}">{self.image()}<div class="tip"></div>{note}</figure>\n'

    def image(self) -> str:
        title = html.escape(self.title, quote=True)
        if self.raster:
            held = io.BytesIO()
            self.figure.savefig(held, dpi=self.dpi)
            data = base64.b64encode(held.getvalue()).decode()
            return f'<img alt="{title}" src="data:image/png;base64,{data}">'
        width, height = (72 * float(side) for side in self.figure.get_size_inches())
        spots = "".join(self.circle(spot, height) for spot in self.spots if spot.finite)
        inside = _svg(self.figure, title)
        return f'<svg viewBox="0 0 {width:g} {height:g}" role="group" aria-label="{title}">{inside}{spots}</svg>'

    def circle(self, spot: Spot, height: float) -> str:
        """What answers the pointer, over the point that is drawn."""
        x, y = (72 / self.figure.dpi * float(v) for v in spot.axes.transData.transform((spot.x, spot.y)))
        words = html.escape(spot.words, quote=True)
        cell = f' data-cell="{html.escape(spot.key, quote=True)}"' if spot.key else ""
        series = "" if spot.series is None else f' data-series="{spot.series}"'
        return (
            f'<circle cx="{x:.1f}" cy="{height - y:.1f}" r="{spot.radius:g}" tabindex="0" role="img"{series} '
            f'aria-label="{words.replace(chr(10), ", ")}" data-tip="{words}"{cell}/>'
        )


_FONT = re.compile(r"((?:font(?:-family)?): [^;\"]*?)'DejaVu Sans'[^;\"]*")


def _svg(figure: Figure, salt: str) -> str:
    """What is inside the SVG of a figure, the same at every run; text stays text."""
    import matplotlib

    held, settings = io.StringIO(), {"svg.fonttype": "none", "svg.hashsalt": salt}
    with LOCK:
        before = {name: matplotlib.rcParams[name] for name in settings}
        matplotlib.rcParams.update(settings)
        try:
            figure.savefig(held, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        finally:
            matplotlib.rcParams.update(before)
    text = held.getvalue()
    text = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>|<defs>\s*</defs>", "", text, flags=re.S)
    text = re.sub(r'<g id="series-(\d+)">', r'<g data-series="\1">', text)
    text = re.sub(r'<g id="entry-(\d+)">', r'<g data-entry="\1" tabindex="0" role="button">', text)
    text = _FONT.sub(r"\1'DejaVu Sans', Verdana, sans-serif", text)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
    return re.sub(r">\s+<", "><", text).strip()


# --- Lines with intervals ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """What an axis counts; `ticks` where the plain choice would not fit."""

    name: str
    log: bool = False
    ticks: tuple[float, ...] = ()


@dataclass(frozen=True)
class Series:
    """One line. `low` and `high` are the ends of an interval for each point, `labels` a line of words for the pointer,
    `href` the key of a cell of `Images` that a click shows. A point that is not finite is left out; without `points`
    there is the line alone."""

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
            values = getattr(self, name)
            if values is not None and len(values) not in ((len(self.x),) if name == "y" else (0, len(self.x))):
                must = f"as many as x, {len(self.x)}"
                raise PellucidError(rule(f"{name} of series {self.name}", must, len(values)), "chart")

    @staticmethod
    def of(name: str, x: Sequence[float], y: Sequence[Estimate], **look: Any) -> Series:
        """A line of estimates."""
        return Series(name, x, *([getattr(one, part) for one in y] for part in ("value", "low", "high")), **look)

    def interval(self, i: int) -> tuple[float, float] | None:
        """The ends of a point's interval, where it has one."""
        if not self.low or not self.high or not math.isfinite(self.low[i]) or not math.isfinite(self.high[i]):
            return None
        return self.low[i], self.high[i]


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
    named: bool = True  # whether there is a legend
    size: tuple[float, float] = field(default=_SIZE, repr=False)

    @cached_property
    def drawing(self) -> Drawing:
        figure = canvas(*self.size)
        axes = figure.add_subplot()
        with LOCK:
            spots = self.paint(axes)
            quiet(axes, self.title, self.x.name, self.y.name)
            if self.named and len(self.series) > 1:
                _name_entries(legend(figure, axes), [one.name for one in self.series])
            else:
                figure.tight_layout(pad=0.6)
        return Drawing(figure, self.title, self.note, spots, dpi=190)

    @property
    def wide(self) -> bool:
        return self.drawing.wide

    def html(self) -> str:
        return self.drawing.html()

    def png(self, path: Path) -> Path:
        return self.drawing.png(path)

    def colour(self, number: int) -> str:
        return self.series[number].colour or COLOURS[number % len(COLOURS)]

    def paint(self, axes: Axes, number: Callable[[str], int] | None = None, marker: float = 5.0) -> list[Spot]:
        """All of it but the words around; `number` tells the series by their names, where panels share a legend."""
        across, up = _scales(self)
        spots = []
        for i, one in enumerate(self.series):
            own = number(one.name) if number else i
            kept = [j for j in range(len(one.x)) if across.shows(one.x[j]) and up.shows(one.y[j])]
            _paint_series(axes, one, kept, self.colour(i), own, (up, marker))
            if one.points:
                spots += [
                    Spot(axes, one.x[j], one.y[j], self.words(one, j), one.href[j] if one.href else "", own)
                    for j in kept
                ]
        for mark in self.marks:
            _paint_mark(axes, mark, across)
        across.lay(axes.xaxis, self.x.ticks)
        up.lay(axes.yaxis, self.y.ticks)
        return spots

    def words(self, one: Series, i: int) -> str:
        """What the pointer is shown: the series, both numbers, the interval, and the point's own words."""
        lines = [one.name, f"{self.x.name}: {number_text(one.x[i])}", f"{self.y.name}: {number_text(one.y[i])}"]
        if ends := one.interval(i):
            lines[-1] += f" ({number_text(ends[0])} to {number_text(ends[1])})"
        return "\n".join([*lines, *([one.labels[i]] if one.labels and one.labels[i] else [])])


def _paint_series(
    axes: Axes, one: Series, indices: Sequence[int], colour: str, number: int, look: tuple[Scale, float]
) -> None:
    """A line with its points and bars for their intervals; a bar that reaches zero ends at the frame of a log axis."""
    up, marker = look
    style = ("--" if one.dashed else "-") if one.line else ""
    drawn = axes.plot(
        [one.x[i] for i in indices],
        [one.y[i] for i in indices],
        style or "none",
        color=colour,
        marker="o" if one.points else "none",
        markersize=marker,
        linewidth=1.8 if marker > 4 else 1.4,
        label=one.name,
    )
    ends = [(one.x[i], *held) for i in indices if (held := one.interval(i)) is not None]
    if ends:
        x, low, high = zip(*ends, strict=True)
        low = [max(v, up.low) for v in low] if up.log else low
        drawn.append(axes.vlines(x, low, high, colors=colour, linewidth=1.3, alpha=0.55))  # type: ignore[arg-type]
    for artist in drawn:
        artist.set_gid(f"series-{number}")


def panels(charts: Sequence[Chart], columns: int, title: str, note: str = "") -> Drawing:
    """Charts with the same axes in one figure, with one legend for all; a series has one colour in all of them."""
    names = list(dict.fromkeys(one.name for chart in charts for one in chart.series))
    columns = min(columns, len(charts))
    figure = canvas(max(3.6 * columns, _SIZE[0]), 2.7 * -(-len(charts) // columns) + 0.4)
    painted, spots = [], []
    for i, chart in enumerate(charts):
        axes = figure.add_subplot(-(-len(charts) // columns), columns, i + 1)
        spots += chart.paint(axes, names.index, 3.5)
        last, first = i >= len(charts) - columns, i % columns == 0
        quiet(axes, chart.title, chart.x.name if last else "", chart.y.name if first else "")
        painted.append(axes)
    _name_entries(legend(figure, painted, note), names)
    return Drawing(figure, title, spots=spots)


def _paint_mark(axes: Axes, one: Mark, across: Scale) -> None:
    behind = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 0.6}  # or a line would cross the words out
    look: dict[str, Any] = {"color": INK, "fontsize": 9, "bbox": behind}
    if one.x is not None and one.y is not None:
        axes.plot([one.x], [one.y], "o", markersize=13, markerfacecolor="none", markeredgecolor=INK, label="_")
        left = across.part(one.x) > 0.72
        place = {"xytext": (-10 if left else 10, 8), "textcoords": "offset points", "ha": "right" if left else "left"}
        axes.annotate(one.name, (one.x, one.y), **place, **look)
    elif one.x is not None:
        axes.axvline(one.x, color=INK, linestyle=":", linewidth=1.2)
        place = {"xytext": (4, -2), "textcoords": "offset points", "va": "top"}
        axes.annotate(one.name, (one.x, 1.0), xycoords=("data", "axes fraction"), **place, **look)
    else:
        axes.axhline(one.y, color=INK, linestyle=":", linewidth=1.2)
        place = {"xytext": (3, 0), "textcoords": "offset points", "va": "center"}  # beside the axes: no line is there
        axes.annotate(one.name, (1.0, one.y), xycoords=("axes fraction", "data"), **place, **look)


def _name_entries(drawn: Legend | None, names: Sequence[str]) -> None:
    """Lets a page know which entry of a legend is which series."""
    for text in drawn.get_texts() if drawn else ():
        text.set_gid(f"entry-{names.index(text.get_text())}")


@dataclass(frozen=True)
class Scale:
    """The range of an axis, and round numbers in it."""

    log: bool
    low: float
    high: float

    @staticmethod
    def over(axis: Axis, values: Sequence[float]) -> Scale:
        """Around all values, with some air; a line of one value gets room too."""
        good = [v for v in values if math.isfinite(v) and (v > 0 or not axis.log)]
        low, high = (min(good), max(good)) if good else (1.0, 2.0)
        if axis.log:
            air = max((high / low) ** 0.06, 1.08)
            return Scale(True, low / air, high * air)
        air = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        return Scale(False, low - air, high + air)

    def shows(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.log)

    def part(self, value: float) -> float:
        """How far along the axis a value lies: 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def lay(self, axis: MatplotlibAxis, ticks: Sequence[float] = ()) -> None:
        """Gives a drawn axis this range."""
        if self.log:
            axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        axis.axes.set(**{f"{axis.axis_name}lim": (self.low, self.high)})
        _numbered(axis, ticks or self.ticks())

    def ticks(self, most: int = 7) -> list[float]:
        """Round numbers inside."""
        return (log_ticks if self.log else _even_ticks)(self.low, self.high, most)


def _scales(chart: Chart) -> tuple[Scale, Scale]:
    xs = [v for one in chart.series for v in one.x] + [m.x for m in chart.marks if m.x is not None]
    ys = [v for one in chart.series for v in (*one.y, *(one.low or ()), *(one.high or ()))]
    ys += [m.y for m in chart.marks if m.y is not None]
    return Scale.over(chart.x, xs), Scale.over(chart.y, ys)


def _even_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough)
    found = [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [0.0 if abs(v) < step / 1e6 else v for v in found]


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Powers of ten with as many numbers between them as there is room for; in a narrow range, even steps."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for inside in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        found = [m * 10.0**e for e in range(first, last + 1) for m in inside if low <= m * 10.0**e <= high]
        if len(found) <= most:
            return found if len(found) > 1 else _even_ticks(low, high, most)
    every = math.ceil((last - first + 1) / most)
    return [10.0**e for e in range(first, last + 1, every) if low <= 10.0**e <= high]
