"""What a run needs in memory, as a report: a table, notes, JSON and a chart; by stage, or strategy by strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.core.wording import short
from pellucid.evidence.report import charts
from pellucid.evidence.report.charts import COLOURS, FAINT, INK
from pellucid.models.quantize import dtype_name
from pellucid.pipeline.memory import size_text
from pellucid.pipeline.policy import EFFECTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pellucid.pipeline.compare import MemoryUse, StrategyCost
    from pellucid.pipeline.memory import Forecast
    from pellucid.pipeline.pipeline import Pipeline
    from pellucid.pipeline.policy import Policy
    from pellucid.pipeline.request import Request

_ITSELF = "the stage itself"  # what happens in no module: noise, sums, images
_COSTS = ("denoise", "decode", "ms", "× time", "max diff", "mean diff", "to")
_BAR = 24  # characters of the longest bar
_PARTS = {"weights": ("█", COLOURS[0]), "activations": ("▓", COLOURS[1]), "workspace": ("░", "#f6c592")}
_GRAPHS = {"graphs": ("▒", "#b9a7e0")}  # where some are captured


def describe_run(pipe: Pipeline, request: Request, policy: Policy, device: Any) -> dict[str, Any]:
    """What was run, for the head of every output."""
    width, height = pipe.size_of(request)
    return {
        "model": pipe.components.name,
        "size": [width, height],
        "batch": request.n,
        "steps": request.steps,
        "device": str(device),
        "dtype": dtype_name(pipe.components.network),
        "policy": policy.to_dict(),
        "controlnets": len(request.controls),
        "loras": len(request.loras),
    }


def headline(about: dict[str, Any]) -> str:
    width, height = about["size"]
    words = [Path(about["model"]).name or about["model"], f"{width}×{height}", f"batch {about['batch']}"]
    words += [about["dtype"], f"on {about['device']}"]
    words += [f"{name}={value}" for name, value in about["policy"].items()]
    adapters = {"controlnets": "ControlNet", "loras": "LoRA"}
    return " · ".join([*words, *(f"{about[what]} {name}" for what, name in adapters.items() if about[what])])


# --- By stage -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageReport:
    """The peak of each stage and who owns it: predicted, and measured where it was run. `about` is what was run."""

    about: dict[str, Any]
    forecast: Forecast
    found: MemoryUse | None

    @property
    def parts(self) -> dict[str, tuple[str, str]]:
        """The parts of a peak, with the mark and the colour of each."""
        return {**_PARTS, **_GRAPHS} if self.forecast.graphs else _PARTS

    @property
    def columns(self) -> tuple[str, ...]:
        measured = () if self.found is None else ("measured", "ratio")
        return ("stage", *self.parts, "predicted", *measured, "", "owner of the peak")

    def rows(self) -> list[tuple[str, ...]]:
        rows = []
        for name, peak in self.forecast.stages.items():
            seen: tuple[str, ...] = ()
            if self.found is not None:
                seen = (size_text(self.found.peaks[name]), f"{peak.total / max(self.found.peaks[name], 1):.3f}")
            sizes = [size_text(getattr(peak, part)) for part in self.parts]
            rows.append((name, *sizes, size_text(peak.total), *seen, self.bar(peak), peak.owner or _ITSELF))
        return rows

    def bar(self, peak: Any) -> str:
        """Weights, activations, workspace and graphs, one after the other."""
        text, total = "", 0
        for name, (mark, _) in self.parts.items():
            total += getattr(peak, name)
            text += mark * (round(_BAR * total / max(self.forecast.peak.total, 1)) - len(text))
        return text

    def notes(self) -> list[str]:
        peak, found = self.forecast.peak, self.found
        held = ", ".join(f"{name or _ITSELF} {size_text(size)}" for name, size in peak.held[:3])
        measured = "" if found is None else f", {size_text(found.peak)} measured"
        lines = [
            f"peak: {self.forecast.stage}, {size_text(peak.total)} predicted{measured}; "
            f"owner: {peak.owner or _ITSELF}; other memory held: {held or 'none'}.",
            "█ weights  ▓ activations  ░ workspace of kernels"
            + ("  ▒ captured graphs." if self.forecast.graphs else "."),
        ]
        if self.forecast.graphs:
            kept = (
                "" if found is None else f", {size_text(found.graphs.total)} measured in {found.graphs.graphs} graphs"
            )
            lines.append(
                f"graphs: {size_text(self.forecast.graphs)} predicted to stay between runs{kept}: "
                "registers, inputs, and the activations of one call. Leave them out with without=graphs."
            )
        if found is not None and not self.about["device"].startswith("cuda"):
            lines.append("measured: bytes of live tensors; on a CPU the kernels' own workspace is not seen.")
        effects = {name: EFFECTS[name] for name in self.about["policy"]}
        return lines + [f"{name}: reduces {one.reduces}. Costs {one.costs}." for name, one in effects.items()]

    def to_dict(self) -> dict[str, Any]:
        stages = {
            name: {
                **{part: getattr(peak, part) for part in (*_PARTS, *_GRAPHS)},
                "predicted": peak.total,
                "measured": None if self.found is None else self.found.peaks[name],
                "seconds": None if self.found is None else self.found.seconds[name],
                "owner": peak.owner,
                "held": [{"module": module, "bytes": size} for module, size in peak.held],
            }
            for name, peak in self.forecast.stages.items()
        }
        kept = {
            "predicted": self.forecast.graphs,
            "measured": None if self.found is None else self.found.graphs._asdict(),
        }
        return {**self.about, "peak_stage": self.forecast.stage, "stages": stages, "graphs": kept}

    def draw(self, path: Path) -> None:
        """A stacked bar per stage, a mark where it was measured, and the owner of its peak beneath it."""
        names, peaks = list(self.forecast.stages), list(self.forecast.stages.values())
        scale, unit = _unit_of(self.forecast.peak.total)
        figure, [axes] = _panels("Memory by stage", self.about, names, 10.5, [1.0])
        left, look = [0.0] * len(peaks), {"edgecolor": "white", "linewidth": 0.6}
        for part, (_, fill) in self.parts.items():
            sizes = [getattr(peak, part) / scale for peak in peaks]
            bars = axes.barh(range(len(peaks)), sizes, 0.42, left, color=fill, label=part, **look)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
        axes.bar_label(bars, [size_text(peak.total) for peak in peaks], **_NUMBER)
        for row, peak in enumerate(peaks):
            axes.annotate(peak.owner or _ITSELF, (0, row + 0.3), (2, -6), textcoords="offset points", fontsize=7.5)
        if self.found is not None:
            measured = [self.found.peaks[name] / scale for name in names]
            axes.plot(measured, range(len(names)), "|", color=INK, markersize=24, markeredgewidth=1.8, label="measured")
        _finish(figure, axes, f"{unit} on the device")
        charts.save(figure, path)


# --- Strategy by strategy -------------------------------------------------------------------------------------------


def peak_of(row: StrategyCost) -> int:
    return max((row.measured or row.predicted or {"": 0}).values())


def strategy_cells(row: StrategyCost) -> tuple[str, ...]:
    """A strategy in words: peaks, milliseconds, ratio, and how far its image moved from which other."""

    def at(sizes: Any, stage: str | None = None) -> str:
        return size_text(max(sizes.values()) if stage is None else sizes.get(stage, 0)) if sizes else "–"

    if row.trouble:
        return (*["–"] * 8, "")
    first = row.strategy.against == row.strategy.name
    return (
        at(row.predicted),
        at(row.measured),
        at(row.measured, "denoise"),
        at(row.measured, "decode"),
        "–" if row.seconds is None else f"{row.seconds * 1000:.0f}",
        "–" if row.times is None else f"{row.times:.2f}",
        "" if first else "–" if row.largest is None else short(row.largest, 3),
        "" if first else "–" if row.mean is None else short(row.mean, 3),
        "" if first else row.strategy.against,
    )


def row_notes(about: dict[str, Any], rows: Sequence[StrategyCost], left_out: Sequence[str]) -> list[str]:
    """How to read a table of strategies, and what is not in it."""
    return [
        f"predicted, measured: the peak of a whole run of {about['steps']} steps; denoise, decode: of that stage.",
        "ms: the fastest of three runs; × time: relative to runs of the first row just before and after.",
        "diff: of the images' pixels in 255ths, to the row in the last column; for an adapter, the adapter's effect.",
        *(f"{row.strategy.name}: {row.trouble}" for row in rows if row.trouble),
        *(f"left out: {words}." for words in left_out),
    ]


@dataclass(frozen=True)
class StrategyReport:
    """Strategies side by side: what each saves, and what it costs."""

    about: dict[str, Any]
    costs: Sequence[StrategyCost]
    left_out: Sequence[str]

    columns = ("strategy", "predicted", "measured", "", *_COSTS)

    def rows(self) -> list[tuple[str, ...]]:
        most = max((peak_of(row) for row in self.costs), default=1)
        rows: list[tuple[str, ...]] = []
        for row in self.costs:
            predicted, measured, *rest = strategy_cells(row)
            bar = row.trouble.split(":")[0] or "█" * max(round(_BAR * peak_of(row) / max(most, 1)), 1)
            rows.append((row.strategy.name, predicted, measured, bar, *rest))
        return rows

    def notes(self) -> list[str]:
        return row_notes(self.about, self.costs, self.left_out)

    def to_dict(self) -> dict[str, Any]:
        listed = [
            {
                "strategy": row.strategy.name,
                "policy": row.strategy.policy.to_dict(),
                "predicted": max(row.predicted.values(), default=None),
                "measured": max(row.measured.values(), default=None),
                "stages": {"predicted": dict(row.predicted), "measured": dict(row.measured)},
                "ms": None if row.seconds is None else row.seconds * 1000,
                "times": row.times,
                "difference": {"max": row.largest, "mean": row.mean, "to": row.strategy.against},
                "trouble": row.trouble or None,
            }
            for row in self.costs
        ]
        return {**self.about, "strategies": listed, "left_out": list(self.left_out)}

    def draw(self, path: Path) -> None:
        charts.save(strategy_figure(self.about, self.costs), path)


# --- Charts ---------------------------------------------------------------------------------------------------------

_STAGES = {"denoise": (COLOURS[0], -0.17), "decode": ("#8fb9ee", 0.17)}  # denoising above decoding
_PAPER: Any = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # so that no line runs through a number
_NUMBER: Any = {"padding": 6, "fontsize": 9, "color": INK, "bbox": _PAPER}


def strategy_figure(about: dict[str, Any], rows: Sequence[StrategyCost]) -> Figure:
    """The peaks of each strategy; of those that were run what it costs too: time, and how far the image moved."""
    shown = [row for row in rows if not row.trouble]
    ran = any(row.measured for row in shown)
    title = "What each strategy saves, and what it costs" if ran else "What each strategy would need"
    names = [row.strategy.name for row in shown]
    figure, (peaks, *others) = _panels(title, about, names, 11.5 if ran else 8.5, [0.5, 0.27, 0.23] if ran else [1.0])
    scale, unit = _unit_of(max(peak_of(row) for row in shown))
    for stage, (fill, offset) in _STAGES.items():
        sizes = [(row.measured or row.predicted).get(stage, 0) for row in shown]
        places = [place + offset for place in range(len(shown))]
        bars = peaks.barh(places, [size / scale for size in sizes], 0.3, color=fill, label=stage)
        peaks.bar_label(bars, [size_text(size) for size in sizes], **{**_NUMBER, "fontsize": 8})
        if ran:
            predicted = [row.predicted.get(stage, float("nan")) / scale for row in shown]
            mark = "predicted" if stage == "decode" else None
            peaks.plot(predicted, places, "|", color=INK, markersize=11, markeredgewidth=1.8, label=mark)
    if ran:
        times, apart = others
        took = [(row.seconds or 0.0) * 1000 for row in shown]
        times.bar_label(times.barh(range(len(shown)), took, 0.42, color=COLOURS[1]), fmt="%.0f", **_NUMBER)
        for axes, first in ((peaks, peak_of(shown[0]) / scale), (times, took[0])):
            axes.axvline(first, color=FAINT, linewidth=1, linestyle=(0, (3, 3)), zorder=0)
        times.set_xlabel(f"ms per run of {about['steps']} steps", fontsize=9, color=INK)
        _differences(apart, shown)
    _finish(figure, peaks, f"peak, {unit}" if ran else f"predicted peak, {unit}")
    return figure


def _differences(axes: Axes, rows: Sequence[StrategyCost]) -> None:
    """Largest and mean difference as text: they span too many decades for bars."""
    axes.axis("off")
    axes.set_xlim(0, 1)
    axes.set_title("image: max · mean /255", loc="left", fontsize=9, color=INK)
    for place, row in enumerate(rows):
        if row.strategy.against == row.strategy.name:
            continue
        words = f"{row.largest:.0f} · {row.mean:.2g}"
        words += "" if row.strategy.against == rows[0].strategy.name else f"   to {row.strategy.against}"
        axes.text(0, place, words, va="center", fontsize=9, color=INK)


def _panels(
    title: str, about: dict[str, Any], names: Sequence[str], width: float, shares: Sequence[float]
) -> tuple[Figure, list[Axes]]:
    """A figure with a head, and panels side by side in which each name has a row."""
    height = 1.9 + 0.62 * len(names)
    figure = charts.canvas(width, height)
    figure.text(0.025, 1 - 0.42 / height, title, fontsize=14, fontweight="bold", color=INK)
    figure.text(0.025, 1 - 0.72 / height, headline(about), fontsize=9, color=FAINT)
    found = list(figure.subplots(1, len(shares), width_ratios=shares, squeeze=False)[0])
    for axes in found:
        charts.quiet(axes)
        axes.set_yticks(range(len(names)), names if axes is found[0] else [""] * len(names), fontsize=10)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.margins(x=0.18)
    return figure, found


def _finish(figure: Figure, axes: Axes, label: str) -> None:
    axes.set_xlabel(label, fontsize=9, color=INK)
    top = 1 - 0.8 / figure.get_figheight()
    look: Any = {"frameon": False, "fontsize": 9, "labelcolor": INK, "borderaxespad": 0.0, "markerscale": 0.5}
    figure.legend(loc="upper left", bbox_to_anchor=(0.02, top), ncols=5, **look)
    figure.tight_layout(rect=(0.01, 0, 1, top - 0.25 / figure.get_figheight()), w_pad=1.5)


def _unit_of(size: int) -> tuple[float, str]:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return float(2**power), unit
    return 1.0, "bytes"
