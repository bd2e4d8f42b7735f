"""Memory for people and for machines: tables with bars, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.cli import output
from pellucid.cli.output import short
from pellucid.pipeline.memory import in_words
from pellucid.pipeline.policy import EFFECTS

if TYPE_CHECKING:
    from pellucid.pipeline.compare import Row
    from pellucid.pipeline.memory import Forecast, Measured

BAR = 24  # characters of the longest bar
ITSELF = "the stage itself"  # what happens in no module: noise, sums, pictures
PARTS = (("weights", "█"), ("activations", "▓"), ("workspace", "░"))


def headline(about: dict[str, Any]) -> str:
    width, height = about["size"]
    words = [Path(about["model"]).name or about["model"], f"{width}×{height}", f"batch {about['batch']}"]
    words += [about["dtype"], f"on {about['device']}"]
    words += [f"{name}={value}" for name, value in about["policy"].items()]
    words += [
        f"{about[what]} {name}" for what, name in (("controlnets", "ControlNet"), ("loras", "LoRA")) if about[what]
    ]
    return " · ".join(words)


# --- stages --------------------------------------------------------------------------------------------------------


def show_stages(about: dict[str, Any], forecast: Forecast, found: Measured | None) -> None:
    columns = ["stage", *(name for name, _ in PARTS), "predicted", "measured", "ratio", "", "owner of the peak"]
    if found is None:
        columns = [name for name in columns if name not in ("measured", "ratio")]
    made = output.table(*columns, right=tuple(columns[1:-2]))
    most = forecast.peak.total
    for name, peak in forecast.stages.items():
        sizes = [in_words(getattr(peak, part)) for part, _ in PARTS]
        seen = [] if found is None else [in_words(found.peaks[name]), f"{peak.total / max(found.peaks[name], 1):.3f}"]
        style = "[bold]" if name == forecast.stage else ""
        made.add_row(f"{style}{name}", *sizes, in_words(peak.total), *seen, bar(peak, most), peak.owner or ITSELF)
    screen = output.console()
    screen.print(headline(about), style="bold")
    screen.print(made)
    for line in notes(forecast, found, about):
        screen.print(line, soft_wrap=True, markup=False)


def bar(peak: Any, most: int) -> str:
    """Weights, activations and workspace, one after the other."""
    ends, total = [], 0
    for name, _ in PARTS:
        total += getattr(peak, name)
        ends.append(round(BAR * total / max(most, 1)))
    starts = [0, *ends[:-1]]
    return "".join(mark * (end - begin) for begin, end, (_, mark) in zip(starts, ends, PARTS, strict=True))


def notes(forecast: Forecast, found: Measured | None, about: dict[str, Any]) -> list[str]:
    peak = forecast.peak
    held = ", ".join(f"{name or ITSELF} {in_words(size)}" for name, size in peak.held[:3])
    lines = [
        f"peak: {forecast.stage}, {in_words(peak.total)} predicted"
        + ("" if found is None else f", {in_words(found.peak)} measured")
        + f"; at work: {peak.owner or ITSELF}; held then: {held or 'nothing'}.",
        "█ weights  ▓ activations  ░ workspace of kernels.",
    ]
    if found is not None and not about["device"].startswith("cuda"):
        lines.append(
            "measured: bytes of living tensors; what kernels borrow inside of themselves is not seen on a CPU."
        )
    lines += [f"{name}: reduces {effect.reduces}. Costs {effect.costs}." for name, effect in effects(about)]
    return lines


def effects(about: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, EFFECTS[name]) for name in about["policy"]]


def stages_json(about: dict[str, Any], forecast: Forecast, found: Measured | None) -> dict[str, Any]:
    stages = {}
    for name, peak in forecast.stages.items():
        stages[name] = {
            **{part: getattr(peak, part) for part, _ in PARTS},
            "predicted": peak.total,
            "measured": None if found is None else found.peaks[name],
            "seconds": None if found is None else found.seconds[name],
            "owner": peak.owner,
            "held": [{"module": module, "bytes": size} for module, size in peak.held],
        }
    return {**about, "peak_stage": forecast.stage, "stages": stages}


# --- strategies ----------------------------------------------------------------------------------------------------

COLUMNS = ("strategy", "predicted", "measured", "", "denoise", "decode", "ms", "× time", "max diff", "mean diff", "to")


def show_rows(about: dict[str, Any], rows: Sequence[Row], left_out: Sequence[str]) -> None:
    made = output.table(*COLUMNS, right=tuple(name for name in COLUMNS[1:-1] if name))
    most = max((peak_of(row) for row in rows), default=1)
    for row in rows:
        if row.trouble:
            made.add_row(row.strategy.name, "–", "–", f"[dim]{row.trouble.split(':')[0]}[/]", *["–"] * 6, "")
        else:
            made.add_row(row.strategy.name, *cells(row, most))
    screen = output.console()
    screen.print(headline(about), style="bold")
    screen.print(made)
    lines = [
        f"predicted, measured: the peak of a whole run of {about['steps']} steps; denoise, decode: measured there.",
        "ms: the fastest of three runs; × time: to runs of the first row just before and after.",
        "diff: of the pictures' pixels in 255ths, to the row named last; for an adapter it is what the adapter does.",
        *(f"{row.strategy.name}: {row.trouble}" for row in rows if row.trouble),
        *(f"left out: {words}." for words in left_out),
    ]
    for line in lines:
        screen.print(line, soft_wrap=True, markup=False)


def peak_of(row: Row) -> int:
    return max((row.measured or row.predicted or {"": 0}).values())


def cells(row: Row, most: int) -> tuple[str, ...]:
    def at(sizes: Any, stage: str | None = None) -> str:
        if not sizes:
            return "–"
        return in_words(max(sizes.values()) if stage is None else sizes.get(stage, 0))

    assert row.seconds is not None
    assert row.times is not None
    first = row.strategy.against == row.strategy.name
    return (
        at(row.predicted),
        at(row.measured),
        "█" * max(round(BAR * peak_of(row) / max(most, 1)), 1),
        at(row.measured, "denoise"),
        at(row.measured, "decode"),
        f"{row.seconds * 1000:.0f}",
        f"{row.times:.2f}",
        "" if first else short(row.largest or 0.0, 3),
        "" if first else short(row.mean or 0.0, 3),
        "" if first else row.strategy.against,
    )


def rows_json(about: dict[str, Any], rows: Sequence[Row], left_out: Sequence[str]) -> dict[str, Any]:
    listed = []
    for row in rows:
        listed.append(
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
        )
    return {**about, "strategies": listed, "left_out": list(left_out)}
