"""Traces and their comparisons as text, and as JSON."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from pellucid.cli import output
from pellucid.core.wording import counted, short, time_text
from pellucid.evidence.trace import diff
from pellucid.evidence.trace.diff import Comparison
from pellucid.evidence.trace.header import Header
from pellucid.evidence.trace.previews import spaced
from pellucid.evidence.trace.reading import Step, Trace
from pellucid.evidence.trace.replay import Replay
from pellucid.evidence.trace.timeline import finite
from pellucid.models.guidance import Guidance

_GROWTH = 12  # steps of a comparison that are shown


# --- one trace -------------------------------------------------------------------------------------------------


def show_trace(trace: Trace, index: int | None) -> None:
    for line in _trace_lines(trace):
        output.say(line)
    if trace.header.images > 1:
        means = f"means of {trace.header.images} images; --index N shows one"
        output.say(means if index is None else f"image {index}")
    output.console().print(_step_table(trace, index))
    for note in trace.header.notes:
        output.say(f"note: {note}")


def _trace_lines(trace: Trace) -> list[str]:
    """What ran, in a few lines."""
    header = trace.header
    names = ", ".join(dict.fromkeys(f"{p.name} ({p.grid.get('name', '?')}), {p.nfe} calls" for p in header.plans))
    size = " × ".join(map(str, header.shape))
    how = "with tensors" if header.kept else "numbers only"
    lines = [
        f"{trace.path.name}: {_state_of(trace)} · {counted(header.images, 'image')} of {size}, {header.dtype} · {how}",
        f"{names} · {_noise_of(header)}",
    ]
    if header.recipes:
        first = header.recipes[0]
        guidance = Guidance.from_dict(first["guidance"]).text() if first.get("guidance") else "none"
        lines.append(f"{first['model']} · {first['prompt']!r} · guidance {guidance}")
    where = f"{header.machine.get('device')} ({header.machine.get('name')})"
    where += f", {counted(header.machine.get('threads', 1), 'thread')}"
    lines.append(f"{where} · " + ", ".join(f"{name} {value}" for name, value in header.versions.items()))
    took = [f"{stage.name} {stage.seconds:.2f} s" for stage in header.stages]
    if took or header.seconds is not None:
        lines.append(" · ".join(took or [f"run {header.seconds:.2f} s"]))
    return lines


def _state_of(trace: Trace) -> str:
    header = trace.header
    if trace.whole:
        return counted(header.steps, "step")
    why = header.ended or ("killed, or still running" if header.state == "recording" else "cut")
    return f"{len(trace.steps)} of {header.steps} steps, {why}"


def _noise_of(header: Header) -> str:
    seeds = header.noise.get("seeds") or []
    words = ", ".join(map(str, seeds[:4])) + (", …" if len(seeds) > 4 else "")
    return f"noise {header.noise.get('kind')}" + (f", seed {words}" if seeds else "")


def _step_table(trace: Trace, index: int | None) -> Table:
    """One row per step: sizes as root mean squares, so that images of any size read alike."""
    heads = ("step", "σ/α", "time", "x", "x0", "eps", "x0−cond", "cosine", "saturated", "error", "model", "other", "MB")
    table = output.table(*heads, right=heads)
    root = math.sqrt(trace.header.numbers)
    for step in trace.steps:
        if index is not None and index not in step.images:
            continue
        pick = _picker(step, index)
        seconds = step.device_seconds or step.seconds
        model = seconds.get("model", math.nan)
        ended = {mark.work for mark in step.marks} <= set(step.seconds)  # not so of the last step of a cut trace
        other = sum(value for work, value in seconds.items() if work != "model") if ended else math.nan
        row = step.rows[0 if index is None else step.of(index)]
        table.add_row(
            str(step.index),
            short(row.level.ratio),
            time_text(row.time, 5),
            *(_number(pick(step.norms[name]) / root) for name in ("x", "x0", "eps", "delta")),
            _number(pick(step.cosine), 4),
            _number(100 * pick(step.saturation), 3, " %"),
            _number(pick(step.local_error), 2),
            _number(1e3 * model, 3, " ms"),
            _number(1e3 * other, 3, " ms"),
            "" if step.memory is None else f"{step.memory / 1e6:.0f}",
        )
    return table


def _picker(step: Step, index: int | None) -> Callable[[Any], float]:
    """One image's number, or the mean of those that have one."""

    def pick(values: Any) -> float:
        if index is not None:
            return float(values[step.of(index)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of nothing but NaN
            return float(np.nanmean(values))

    return pick


def _number(value: float, digits: int = 3, unit: str = "") -> str:
    return "–" if math.isnan(value) else f"{short(value, digits)}{unit}"


def trace_dict(trace: Trace) -> dict[str, Any]:
    """The whole trace without its tensors, as JSON."""
    header = {f.name: getattr(trace.header, f.name) for f in fields(trace.header)}
    header |= {"stages": [asdict(stage) for stage in trace.header.stages]}
    return finite(
        {"file": str(trace.path), "whole": trace.whole, "header": header, "steps": list(map(_step_dict, trace.steps))}
    )


def _step_dict(step: Step) -> dict[str, Any]:
    levels = {name: [getattr(level, name) for level in step.levels] for name in ("alpha", "sigma", "lam")}
    norms = {name: values.tolist() for name, values in step.norms.items()}
    figures = {name: getattr(step, name).tolist() for name in ("cosine", "saturation", "local_error")}
    digests = {name: [f"{v & (2**64 - 1):016x}" for v in values.tolist()] for name, values in step.digests.items()}
    costs = {name: getattr(step, name) for name in ("seconds", "device_seconds", "memory", "peak")}
    images = {"index": step.index, "images": list(step.images)}
    return finite(
        {**images, **levels, "time": list(step.times), "norms": norms, **figures, "digests": digests, **costs}
    )


# --- two traces ------------------------------------------------------------------------------------------------


def show_comparison(found: Comparison, files: tuple[Path, Path], steps: int) -> None:
    output.say(f"A {files[0]}\nB {files[1]}")
    _show_first_difference(found)
    rest = [entry for entry in found.headers if entry not in found.why]
    if rest:
        output.say("The headers also differ in" if found.why else "The headers differ in", style="bold")
        for entry in rest:
            output.say(f"  {entry.text()}")
    if found.first is not None and any(not math.isnan(one.x0) and one.x0 > 0 for one in found.distances):
        output.say("Distance by step, as a part of B's norm", style="bold")
        rows = [(str(d.step), _number(d.x), _number(d.x0)) for d in spaced(found.distances, _GROWTH)]
        output.console().print(output.table("step", "x", "x0", right=("step", "x", "x0"), rows=rows))
    for note in found.notes:
        output.say(f"note: {note}")


def _show_first_difference(found: Comparison) -> None:
    output.say(diff.headline(found), style="bold")
    for line in diff.details(found):
        output.say(f"  {line}")


def comparison_dict(found: Comparison) -> dict[str, Any]:
    first = None if found.first is None else asdict(found.first)
    lists = {"why": found.why, "images": found.images, "headers": found.headers, "apart": found.distances}
    rows = {name: [asdict(one) for one in held] for name, held in lists.items()}
    return finite({"same": found.same, "steps": found.steps, "first": first, **rows, "notes": list(found.notes)})


def show_replay(trace: Trace, found: Replay) -> None:
    ways = {
        "model": "run again with its model",
        "predictions": "run again from the predictions that it holds, without a model: its plan, noise and updates",
    }
    output.say(f"{trace.path.name}: {ways.get(found.way, 'run again')}")
    if found.same:
        steps, images = counted(found.comparison.steps, "step"), counted(trace.header.images, "image")
        output.say(f"the same, bit by bit, in {steps} of {images}", style="bold")
        return
    _show_first_difference(found.comparison)
