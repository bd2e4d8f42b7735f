"""What a run needs in memory, as a report: a table, notes, JSON and a chart; by stage, or strategy by strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.core.wording import short
from pellucid.evidence.report import charts
from pellucid.evidence.report.charts import COLOURS, FAINT, INK
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

ITSELF = "the stage itself"  # what happens in no module: noise, sums, images
BAR = 24  # characters of the longest bar
PARTS = {"weights": ("█", COLOURS[0]), "activations": ("▓", COLOURS[1]), "workspace": ("░", "#f6c592")}


def describe_run(pipe: Pipeline, request: Request, policy: Policy, device: Any) -> dict[str, Any]:
    """What was run, for the head of every output."""
    width, height = pipe.size_of(request)
    kind = next(pipe.components.network.parameters()).dtype
    return {
        "model": pipe.components.name,
        "size": [width, height],
        "batch": request.n,
        "steps": request.steps,
        "device": str(device),
        "dtype": str(kind).removeprefix("torch."),
        "policy": policy.to_dict(),
        "controlnets": len(request.controls),
        "loras": len(request.loras),
    }


def headline(about: dict[str, Any]) -> str:
    width, height = about["size"]
    words = [Path(about["model"]).name or about["model"], f"{width}×{height}", f"batch {about['batch']}"]
    words += [about["dtype"], f"on {about['device']}"]
    words += [f"{name}={value}" for name, value in about["policy"].items()]
    words += [
        f"{about[what]} {name}" for what, name in (("controlnets", "ControlNet"), ("loras", "LoRA")) if about[what]
    ]
    return " · ".join(words)


# --- By stage -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageReport:
    """The peak of each stage and who owns it: predicted, and measured where it was run. `about` is what was run."""

    about: dict[str, Any]
    forecast: Forecast
    found: MemoryUse | None

    @property
    def columns(self) -> tuple[str, ...]:
        measured = () if self.found is None else ("measured", "ratio")
        return ("stage", *PARTS, "predicted", *measured, "", "owner of the peak")

    def rows(self) -> list[tuple[str, ...]]:
        rows = []
        for name, peak in self.forecast.stages.items():
            seen: tuple[str, ...] = ()
            if self.found is not None:
                seen = (size_text(self.found.peaks[name]), f"{peak.total / max(self.found.peaks[name], 1):.3f}")
            sizes = [size_text(getattr(peak, part)) for part in PARTS]
            rows.append((name, *sizes, size_text(peak.total), *seen, self.bar(peak), peak.owner or ITSELF))
        return rows

    def bar(self, peak: Any) -> str:
        """Weights, activations and workspace, one after the other."""
        text, total = "", 0
        for name, (mark, _) in PARTS.items():
            total += getattr(peak, name)
            text += mark * (round(BAR * total / max(self.forecast.peak.total, 1)) - len(text))
        return text

    def notes(self) -> list[str]:
        peak, found = self.forecast.peak, self.found
        held = ", ".join(f"{name or ITSELF} {size_text(size)}" for name, size in peak.held[:3])
        measured = "" if found is None else f", {size_text(found.peak)} measured"
        lines = [
            f"peak: {self.forecast.stage}, {size_text(peak.total)} predicted{measured}; "
            f"owner: {peak.owner or ITSELF}; other memory held: {held or 'none'}.",
            "█ weights  ▓ activations  ░ workspace of kernels.",
        ]
        if found is not None and not self.about["device"].startswith("cuda"):
            lines.append("measured: bytes of live tensors; on a CPU the kernels' own workspace is not seen.")
        effects = {name: EFFECTS[name] for name in self.about["policy"]}
        return lines + [f"{name}: reduces {one.reduces}. Costs {one.costs}." for name, one in effects.items()]

    def to_dict(self) -> dict[str, Any]:
        stages = {
            name: {
                **{part: getattr(peak, part) for part in PARTS},
                "predicted": peak.total,
                "measured": None if self.found is None else self.found.peaks[name],
                "seconds": None if self.found is None else self.found.seconds[name],
                "owner": peak.owner,
                "held": [{"module": module, "bytes": size} for module, size in peak.held],
            }
            for name, peak in self.forecast.stages.items()
        }
        return {**self.about, "peak_stage": self.forecast.stage, "stages": stages}

    def draw(self, path: Path) -> None:
        draw_stages(self.about, self.forecast, self.found, path)


# --- Strategy by strategy -------------------------------------------------------------------------------------------


def peak_of(row: StrategyCost) -> int:
    return max((row.measured or row.predicted or {"": 0}).values())


def strategy_cells(row: StrategyCost) -> tuple[str, ...]:
    """A strategy in words: peaks, milliseconds, ratio, and how far its image moved from which other."""

    def at(sizes: Any, stage: str | None = None) -> str:
        if not sizes:
            return "–"
        return size_text(max(sizes.values()) if stage is None else sizes.get(stage, 0))

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

    columns = (
        "strategy",
        "predicted",
        "measured",
        "",
        "denoise",
        "decode",
        "ms",
        "× time",
        "max diff",
        "mean diff",
        "to",
    )

    def rows(self) -> list[tuple[str, ...]]:
        most = max((peak_of(row) for row in self.costs), default=1)
        rows: list[tuple[str, ...]] = []
        for row in self.costs:
            predicted, measured, *rest = strategy_cells(row)
            bar = row.trouble.split(":")[0] or "█" * max(round(BAR * peak_of(row) / max(most, 1)), 1)
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
        charts.save(costs(self.about, self.costs), path)


# --- Charts ---------------------------------------------------------------------------------------------------------

STAGES = {"denoise": COLOURS[0], "decode": "#8fb9ee"}
ROW = 0.58  # inches of a strategy


def draw_stages(about: dict[str, Any], forecast: Forecast, found: MemoryUse | None, path: Path) -> None:
    """A stacked bar a stage, a mark where it was measured, and the owner of its peak beneath it."""
    names = list(forecast.stages)
    height = 1.75 + 0.85 * len(names)
    figure = charts.canvas(10.5, height)
    axes = figure.add_axes((0.1, 0.62 / height, 0.78, 1 - 1.75 / height))
    scale, unit = unit_of(forecast.peak.total)
    for row, name in enumerate(names):
        stage_bar(axes, row, forecast.stages[name], scale)
        if found is not None:
            mark(axes, found.peaks[name] / scale, row, 0.34)
    finish(axes, names, f"{unit} on the device")
    ends = [peak.total for peak in forecast.stages.values()] + ([] if found is None else list(found.peaks.values()))
    axes.set_xlim(0, 1.02 * max(ends) / scale)
    axes.set_ylim(len(names) - 0.35, -0.6)
    head(figure, height, "Memory by stage", headline(about))
    key(figure, height, 0.1, {part: fill for part, (_, fill) in PARTS.items()}, "" if found is None else "measured")
    charts.save(figure, path)


def stage_bar(axes: Axes, row: int, peak: Any, scale: float) -> None:
    left = 0.0
    for part, (_, fill) in PARTS.items():
        width = getattr(peak, part) / scale
        axes.barh(row, width, left=left, height=0.5, color=fill, edgecolor="white", linewidth=0.6)
        left += width
    axes.annotate(
        size_text(peak.total), (left, row), (6, 0), textcoords="offset points", va="center", fontsize=9, color=INK
    )
    owner = peak.owner or ITSELF
    axes.annotate(owner, (0, row + 0.27), (2, -9), textcoords="offset points", fontsize=7.5, color="#5f6b7a")


def costs(about: dict[str, Any], rows: Sequence[StrategyCost]) -> Figure:
    """Left, the peaks of each strategy; right, what it costs: time, and how far the image moved."""
    shown = [row for row in rows if not row.trouble]
    height = 1.85 + ROW * len(shown)
    figure = charts.canvas(11.5, height)
    bottom, top = 0.62 / height, 1 - 1.85 / height
    peaks, times, apart = (
        figure.add_axes((x, bottom, width, top)) for x, width in ((0.15, 0.38), (0.57, 0.2), (0.81, 0.16))
    )
    scale, unit = unit_of(max(peak_of(row) for row in shown))
    for place, row in enumerate(shown):
        peak_bars(peaks, place, row, scale)
        took = (row.seconds or 0.0) * 1000
        times.barh(place, took, height=0.42, color=COLOURS[1])
        label(times, f"{took:.0f}", took, place)
    dashes: Any = {"color": FAINT, "linewidth": 1, "linestyle": (0, (3, 3)), "zorder": 0}
    peaks.axvline(peak_of(shown[0]) / scale, **dashes)
    times.axvline((shown[0].seconds or 0) * 1000, **dashes)
    finish(peaks, [row.strategy.name for row in shown], f"peak, {unit}")
    finish(times, [""] * len(shown), f"ms of a run of {about['steps']} steps")
    differences(apart, shown)
    for axes, room in ((peaks, 1.16), (times, 1.2), (apart, 1.0)):
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlim(0, axes.get_xlim()[1] * room)
    head(figure, height, "What each strategy saves, and what it costs", headline(about))
    key(figure, height, 0.15, STAGES, "predicted")
    return figure


def predictions(about: dict[str, Any], rows: Sequence[StrategyCost]) -> Figure:
    """The peaks of strategies that were not run."""
    height = 1.85 + ROW * len(rows)
    figure = charts.canvas(8.5, height)
    peaks = figure.add_axes((0.22, 0.62 / height, 0.72, 1 - 1.85 / height))
    scale, unit = unit_of(max(peak_of(row) for row in rows))
    for place, row in enumerate(rows):
        peak_bars(peaks, place, row, scale)
    finish(peaks, [row.strategy.name for row in rows], f"predicted peak, {unit}")
    peaks.set_ylim(len(rows) - 0.4, -0.6)
    peaks.set_xlim(0, peaks.get_xlim()[1] * 1.16)
    head(figure, height, "What each strategy would need", headline(about))
    key(figure, height, 0.22, STAGES, "")
    return figure


def peak_bars(axes: Axes, place: int, row: StrategyCost, scale: float) -> None:
    """Denoising above decoding: which of them a strategy lowers is what one wants to know."""
    sizes = row.measured or row.predicted
    for offset, (stage, fill) in zip((-0.17, 0.17), STAGES.items(), strict=True):
        y, size = place + offset, sizes.get(stage, 0) / scale
        axes.barh(y, size, height=0.3, color=fill)
        label(axes, size_text(size * scale), size, y, 8)
        if stage in row.predicted:
            mark(axes, row.predicted[stage] / scale, y, 0.17)


def differences(axes: Axes, rows: Sequence[StrategyCost]) -> None:
    """Largest and mean difference as text: they span too many decades for bars."""
    axes.axis("off")
    axes.set_title("image: max · mean /255", loc="left", fontsize=9, color=INK)
    for place, row in enumerate(rows):
        if row.strategy.against == row.strategy.name:
            continue
        words = f"{row.largest:.0f} · {row.mean:.2g}"
        words += "" if row.strategy.against == rows[0].strategy.name else f"   to {row.strategy.against}"
        axes.text(0, place, words, va="center", fontsize=9, color=INK)


# --- the look ------------------------------------------------------------------------------------------------------


def unit_of(size: int) -> tuple[float, str]:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return float(2**power), unit
    return 1.0, "bytes"


def finish(axes: Axes, names: Sequence[str], label: str) -> None:
    charts.quiet(axes)
    axes.set_yticks(range(len(names)), list(names), fontsize=10)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(label, fontsize=9, color=INK)


def head(figure: Figure, height: float, title: str, words: str) -> None:
    figure.text(0.025, 1 - 0.42 / height, title, fontsize=14, fontweight="bold", color=INK)
    figure.text(0.025, 1 - 0.72 / height, words, fontsize=9, color=FAINT)


def key(figure: Figure, height: float, place: float, fills: dict[str, str], marked: str) -> None:
    """A coloured square a part, and what the marks are."""
    for part, fill in fills.items():
        figure.text(place, 1 - 1.1 / height, "■", color=fill, fontsize=10)
        figure.text(place + 0.016, 1 - 1.1 / height, part, color=INK, fontsize=9)
        place += 0.11
    if marked:
        figure.text(place, 1 - 1.1 / height, f"▏{marked}", color=INK, fontsize=9)


def mark(axes: Axes, x: float, y: float, half: float) -> None:
    axes.plot([x, x], [y - half, y + half], color=INK, linewidth=1.8, solid_capstyle="butt")


def label(axes: Axes, words: str, x: float, y: float, size: float = 9) -> None:
    """Beside the end of a bar, on paper of its own, so that no line runs through it."""
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axes.annotate(
        words, (x, y), (6, 0), textcoords="offset points", va="center", fontsize=size, color=INK, bbox=paper, zorder=3
    )
