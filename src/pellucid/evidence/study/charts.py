"""The look of every chart: the house's colours and quiet axes, and files that are whole or absent."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.core.errors import PellucidError
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
