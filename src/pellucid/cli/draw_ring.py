"""The picture of the demonstration: a line a sampler, from noise on the left to data and the truth on the right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.evidence.study import charts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pellucid.cli.demo_ring import Moment, Show
    from pellucid.core.oracle import Mixture

NIGHT, STAR, DUST = "#0b0f17", "#eef2f8", "#7f8ba0"
HUES = ("#ff5d5d", "#ff9f43", "#ffd93d", "#7ee081", "#2dd4bf", "#4da3ff", "#9d7bff", "#ff7ac6")
REACH = 2.35  # half the width of a panel; x has alpha² + sigma² = 1 there
TAILS = 160  # points whose way from the moment before is drawn


def journey(ring: Mixture, shows: Sequence[Show], path: Path) -> None:
    columns = len(shows[0].moments) + 1
    side, left, top = 1.75, 1.5, 1.1
    width, height = left + side * columns + 0.2, top + side * len(shows) + 0.25
    figure = charts.canvas(width, height, NIGHT)
    box = {"left": left / width, "right": 1 - 0.2 / width, "top": 1 - top / height, "bottom": 0.25 / height}
    panels = figure.subplots(len(shows), columns, squeeze=False, gridspec_kw={"wspace": 0.05, "hspace": 0.05, **box})
    truth = density(ring)
    for line, show in zip(panels, shows, strict=True):
        colours = [HUES[int(mode) % len(HUES)] for mode in show.modes]
        for i, (axes, moment) in enumerate(zip(line, show.moments, strict=False)):
            cloud(axes, show.moments[i - 1] if i else None, moment, colours)
        heat(line[-1], truth)
        name(line[0], show)
    titles(figure, panels, shows, (width, height))
    charts.save(figure, path, dpi=130)


def bare(axes: Axes) -> None:
    axes.set_facecolor(NIGHT)
    axes.set(xlim=(-REACH, REACH), ylim=(-REACH, REACH), xticks=[], yticks=[], aspect="equal")
    for spine in axes.spines.values():
        spine.set_color("#232c3b")


def cloud(axes: Axes, before: Moment | None, moment: Moment, colours: Sequence[str]) -> None:
    """The points, each in the colour of the mode in which it ends, and for some the way that they came."""
    from matplotlib.collections import LineCollection

    bare(axes)
    if before is not None:
        ways = [((*a,), (*b,)) for a, b in zip(before.x[:TAILS].tolist(), moment.x[:TAILS].tolist(), strict=True)]
        axes.add_collection(LineCollection(ways, colors=list(colours[:TAILS]), linewidths=0.45, alpha=0.35))
    axes.scatter(moment.x[:, 0], moment.x[:, 1], s=2.2, c=list(colours), alpha=0.75, linewidths=0, rasterized=True)


def density(ring: Mixture, size: int = 240) -> Any:
    """The true density on the panel."""
    import torch

    line = torch.linspace(-REACH, REACH, size, dtype=torch.float64)
    points = torch.cartesian_prod(line, line)
    gaps = (points[:, None] - ring.means).square().sum(-1)
    bells = torch.exp(-gaps / (2 * ring.spreads**2)) / ring.spreads**2
    return (bells @ ring.weights).reshape(size, size).T.numpy()


def heat(axes: Axes, truth: Any) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    bare(axes)
    glow = LinearSegmentedColormap.from_list("glow", [NIGHT, "#3b2a6d", "#b5367a", "#fb8861", "#fcfdbf"])
    axes.imshow(truth**0.6, origin="lower", extent=(-REACH, REACH, -REACH, REACH), cmap=glow, interpolation="bilinear")


def name(axes: Axes, show: Show) -> None:
    """The sampler, its calls, and its error."""
    score = show.score
    look: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right"}
    axes.annotate(score.title, (0, 0.5), (-10, 8), color=STAR, fontsize=13, fontweight="bold", **look)
    axes.annotate(f"{score.nfe} calls", (0, 0.5), (-10, -8), color=DUST, fontsize=9, **look)
    error = "fresh noise" if score.error is None else f"error {100 * score.error:.1f} %"
    axes.annotate(error, (0, 0.5), (-10, -21), color=DUST, fontsize=9, **look)


def titles(figure: Figure, panels: Any, shows: Sequence[Show], size: tuple[float, float]) -> None:
    from pellucid.cli.output import short

    width, height = size
    last = len(shows[0].moments) - 1
    for i, moment in enumerate(shows[0].moments):
        word = "noise, " if i == 0 else "data, " if i == last else ""
        panels[0, i].set_title(f"{word}σ = {short(moment.ratio, 3)}", color=STAR, fontsize=10.5, pad=7)
    panels[0, -1].set_title("true density", color=STAR, fontsize=10.5, pad=7)
    figure.text(0.25 / width, 1 - 0.45 / height, "From noise to data", color=STAR, fontsize=17, fontweight="bold")
    left = 2.95 / width
    words = "The same noise, five samplers, one exact denoiser.\nA point has the colour of the mode in which it ends."
    figure.text(left, 1 - 0.39 / height, words, color=DUST, fontsize=9.5, va="center", linespacing=1.4)
