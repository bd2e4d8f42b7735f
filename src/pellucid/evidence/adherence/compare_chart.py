"""The costs of two networks against the size of latents, drawn."""

from __future__ import annotations

import json
from pathlib import Path

from pellucid.evidence.adherence.compare import Comparison, tables
from pellucid.evidence.study import charts
from pellucid.interop.atomic_files import put

PANELS = (
    ("milliseconds", "Time of a call", "milliseconds", 1.0),
    ("activations", "Activations at the peak", "MiB", 2**20),
    ("flops", "Operations of one image", "GFLOP", 1e9),
)


def draw(found: Comparison, path: Path) -> Path:
    """Three panels over the side of the latents, both axes logarithmic: a straight line is a power."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    figure = charts.canvas(11.5, 4.2)
    panels = figure.subplots(1, 3)
    sides = sorted({cost.side for cost in found.costs})
    for axes, (field, title, unit, scale) in zip(panels, PANELS, strict=True):
        for i, name in enumerate(found.parameters):
            own = sorted((cost for cost in found.costs if cost.network == name), key=lambda cost: cost.side)
            x = [cost.side for cost in own]
            look = {"color": charts.COLOURS[i], "marker": charts.MARKS[i], "label": label(found, name)}
            axes.plot(x, [getattr(cost, field) / scale for cost in own], linewidth=1.8, markersize=5, **look)
            if field == "milliseconds":
                low, high = [cost.fastest for cost in own], [cost.slowest for cost in own]
                axes.fill_between(x, low, high, color=charts.COLOURS[i], alpha=0.18, linewidth=0)
        charts.quiet(axes, title, "side of the latents", unit)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis, places in ((axes.xaxis, FixedLocator(sides)), (axes.yaxis, LogLocator(subs=(1.0, 2.0, 5.0)))):
            axis.set_major_locator(places)
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
            axis.set_minor_locator(NullLocator())
    threads = f", {found.threads} thread{'s' if found.threads > 1 else ''}" if found.device == "cpu" else ""
    note = f"{found.device}{threads}, {found.dtype}, batch {found.batch}, text of {found.tokens} tokens"
    charts.legend(figure, panels[0], note)
    return charts.save(figure, path)


def label(found: Comparison, name: str) -> str:
    return f"{name}, {found.parameters[name] / 1e6:.2f} M parameters"


def write(found: Comparison, folder: Path) -> Path:
    """compare.json, compare.md and compare.png."""
    charts.require()
    folder.mkdir(parents=True, exist_ok=True)
    put(folder / "compare.json", json.dumps(found.plain(), indent=1) + "\n")
    put(folder / "compare.md", "\n".join(table.markdown() for table in tables(found)))
    return draw(found, folder / "compare.png")
