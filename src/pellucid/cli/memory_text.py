"""Memory for people and for machines: tables with bars, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pellucid.cli import output
from pellucid.evidence.drawing.memory import ITSELF, headline, peak_of, row_notes, strategy_cells
from pellucid.pipeline.memory import size_text
from pellucid.pipeline.policy import EFFECTS

if TYPE_CHECKING:
    from pellucid.pipeline.compare import MemoryUse, StrategyCost
    from pellucid.pipeline.memory import Forecast

BAR = 24  # characters of the longest bar
PARTS = (("weights", "█"), ("activations", "▓"), ("workspace", "░"))


# --- stages --------------------------------------------------------------------------------------------------------


def show_stages(about: dict[str, Any], forecast: Forecast, found: MemoryUse | None) -> None:
    columns = ["stage", *(name for name, _ in PARTS), "predicted", "measured", "ratio", "", "owner of the peak"]
    if found is None:
        columns = [name for name in columns if name not in ("measured", "ratio")]
    made = output.table(*columns, right=tuple(columns[1:-2]))
    most = forecast.peak.total
    for name, peak in forecast.stages.items():
        sizes = [size_text(getattr(peak, part)) for part, _ in PARTS]
        seen = [] if found is None else [size_text(found.peaks[name]), f"{peak.total / max(found.peaks[name], 1):.3f}"]
        style = "[bold]" if name == forecast.stage else ""
        made.add_row(f"{style}{name}", *sizes, size_text(peak.total), *seen, bar(peak, most), peak.owner or ITSELF)
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


def notes(forecast: Forecast, found: MemoryUse | None, about: dict[str, Any]) -> list[str]:
    peak = forecast.peak
    held = ", ".join(f"{name or ITSELF} {size_text(size)}" for name, size in peak.held[:3])
    lines = [
        f"peak: {forecast.stage}, {size_text(peak.total)} predicted"
        + ("" if found is None else f", {size_text(found.peak)} measured")
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


def stages_json(about: dict[str, Any], forecast: Forecast, found: MemoryUse | None) -> dict[str, Any]:
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


def show_rows(about: dict[str, Any], rows: Sequence[StrategyCost], left_out: Sequence[str]) -> None:
    made = output.table(*COLUMNS, right=tuple(name for name in COLUMNS[1:-1] if name))
    most = max((peak_of(row) for row in rows), default=1)
    for row in rows:
        if row.trouble:
            made.add_row(row.strategy.name, "–", "–", f"[dim]{row.trouble.split(':')[0]}[/]", *["–"] * 6, "")
        else:
            predicted, measured, *rest = strategy_cells(row)
            length = max(round(BAR * peak_of(row) / max(most, 1)), 1)
            made.add_row(row.strategy.name, predicted, measured, "█" * length, *rest)
    screen = output.console()
    screen.print(headline(about), style="bold")
    screen.print(made)
    for line in row_notes(about, rows, left_out):
        screen.print(line, soft_wrap=True, markup=False)


def rows_json(about: dict[str, Any], rows: Sequence[StrategyCost], left_out: Sequence[str]) -> dict[str, Any]:
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
