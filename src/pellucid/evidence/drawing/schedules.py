"""Noise schedules as curves: β, ᾱ, SNR and λ over normalised time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.evidence.study.charts import COLOURS, INK, canvas, quiet, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pellucid.core.schedule import Schedule


def schedules(found: Mapping[str, Schedule], path: Path) -> None:
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
            axes.plot((values["time"] - values["time"][0]) / span, y, **line(i, curve, len(found)))
        if log:
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, 1e-12), high)
        axes.set_xlim(0, 1)
    panels[0, 0].set_ylim(bottom=max(panels[0, 0].get_ylim()[0], 1e-7), top=1.5)
    panels[1, 1].set_ylim(bottom=max(panels[1, 1].get_ylim()[0], -14))
    for axes in panels[1]:
        axes.set_xlabel("training time, normalised: data → noise", color=INK, fontsize=9)
    legend_below(figure, panels[0, 0])
    save(figure, path)


def line(index: int, curve: Schedule, count: int) -> dict[str, Any]:
    dashes: Any = "-" if curve.num_train is not None else (0, (4, 2))
    colour = COLOURS[index % len(COLOURS)]
    return {"color": colour, "linestyle": dashes, "linewidth": 1.9 if count <= 4 else 1.6, "label": curve.name}


def legend_below(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    columns = min(6, len(labels))
    lines = math.ceil(len(labels) / columns)
    figure.legend(handles, labels, loc="lower center", ncols=columns, frameon=False, fontsize=10, handlelength=2.6)
    figure.tight_layout(rect=(0, 0.035 * lines + 0.01, 1, 1), w_pad=2.0, h_pad=1.6)
