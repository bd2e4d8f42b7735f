"""A trace as a timeline: Chrome's trace-event JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Complete events (`ph: X`) on one track each for the stages of the pipeline, the steps, what the loop was at on the host,
and on the device where it was timed; counters (`ph: C`) for memory and the numbers of the first image. Times are in µs
from the earliest event, as the format wants them.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from pellucid.evidence.trace.reading import Step, Trace, WorkMark, end_of_last
from pellucid.interop.atomic_files import put

_PROCESS = 1
_STAGES, _STEPS, _HOST, _DEVICE = 1, 2, 3, 4
_TRACKS = {
    _STAGES: "stages of the pipeline",
    _STEPS: "steps",
    _HOST: "loop, on the host",
    _DEVICE: "loop, on the device",
}
_Event = dict[str, Any]


def timeline(trace: Trace) -> dict[str, Any]:
    """The whole document."""
    spans = [*_stages(trace), *_steps(trace), *_works(trace, "host", _HOST), *_works(trace, "device", _DEVICE)]
    zero = min((event["ts"] for event in spans), default=0.0)
    events = [_placed(event, zero) for event in (*spans, *_counters(trace))]
    used = {event["tid"] for event in spans}
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return {
        "traceEvents": [*_names(trace, used), *events],
        "displayTimeUnit": "ms",
        "otherData": {**trace.header.versions, **{k: str(v) for k, v in trace.header.machine.items()}},
    }


def write(trace: Trace, path: Path) -> Path:
    put(path, json.dumps(timeline(trace), allow_nan=False))
    return path


def _names(trace: Trace, used: set[int]) -> list[_Event]:
    plans = {plan.name for plan in trace.header.plans}
    about = f"pellucid · {', '.join(sorted(plans))} · {trace.header.images} × {tuple(trace.header.shape)}"
    found = [{"name": "process_name", "ph": "M", "pid": _PROCESS, "tid": 0, "args": {"name": about}}]
    for track, name in _TRACKS.items():
        if track in used:
            at = {"ph": "M", "pid": _PROCESS, "tid": track}
            found.append({"name": "thread_name", **at, "args": {"name": name}})
            found.append({"name": "thread_sort_index", **at, "args": {"sort_index": track}})
    return found


def _span(name: str, begun: float, ended: float, track: int, **args: Any) -> _Event:
    """From second to second."""
    place = {"ph": "X", "pid": _PROCESS, "tid": track}
    return {"name": name, "cat": _TRACKS[track], **place, "ts": begun * 1e6, "dur": (ended - begun) * 1e6, "args": args}


def _placed(event: _Event, zero: float) -> _Event:
    """An event counted from the first one, in whole nanoseconds: where one ends, the next begins."""
    begun = round(event["ts"] - zero, 3)
    if "dur" not in event:
        return {**event, "ts": begun}
    return {**event, "ts": begun, "dur": max(round(round(event["ts"] + event["dur"] - zero, 3) - begun, 3), 0.0)}


def _stages(trace: Trace) -> list[_Event]:
    found = []
    for stage in trace.header.stages:
        peak = {} if stage.peak is None else {"peak": stage.peak}
        found.append(_span(stage.name, stage.began, stage.began + stage.seconds, _STAGES, **peak))
    return found


def _ends(trace: Trace, clock: str) -> list[float]:
    """When each step ended: where the next one begins; the last one, with the run, if it was read to its end."""
    firsts = [getattr(step.marks[0], clock) if step.marks else math.nan for step in trace.steps[1:]]
    return [*firsts, end_of_last(trace.header, len(trace.steps)) if clock == "host" else math.nan]


def _steps(trace: Trace) -> list[_Event]:
    found = []
    for step, end in zip(trace.steps, _ends(trace, "host"), strict=True):
        if step.marks:
            end = step.marks[-1].host if math.isnan(end) else end
            found.append(_span(f"step {step.index}", step.marks[0].host, end, _STEPS, **_numbers(step)))
    return found


def _numbers(step: Step) -> dict[str, Any]:
    """What a click on a step shows: its level, and the numbers of its images."""
    found: dict[str, Any] = {
        "alpha": step.level.alpha,
        "sigma": step.level.sigma,
        "time": step.time,
        **{f"norm of {name}": values.tolist() for name, values in step.norms.items()},
        "cosine": step.cosine.tolist(),
        "saturation": step.saturation.tolist(),
        "local error": step.local_error.tolist(),
    }
    return {name: finite(value) for name, value in found.items()}


def finite(value: Any) -> Any:
    """The same with null for NaN, which JSON has not."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _works(trace: Trace, clock: str, track: int) -> list[_Event]:
    """What the loop did, one after the other; on the device as far as it was timed."""
    found = []
    for step, end in zip(trace.steps, _ends(trace, clock), strict=True):
        marks = [mark for mark in step.marks if not math.isnan(getattr(mark, clock))]
        closed = [*marks, *([] if math.isnan(end) else [WorkMark("", end, end)])]
        for mark, following in pairwise(closed):
            begun, ended = getattr(mark, clock), getattr(following, clock)
            found.append(_span(mark.work, begun, ended, track, step=step.index))
    return found


def _counters(trace: Trace) -> list[_Event]:
    """Memory, and the first image's guidance and saturation, as lines over time."""
    found = []
    for step in trace.steps:
        if not step.marks:
            continue
        at = {"ph": "C", "pid": _PROCESS, "tid": 0, "ts": step.marks[-1].host * 1e6}
        values = {
            "memory, MB": None if step.memory is None else step.memory / 1e6,
            "guidance delta / x0": step.norms["delta"][0] / (step.norms["x0"][0] or math.nan),
            "saturation": step.saturation[0],
        }
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                found.append({"name": name, **at, "args": {"value": round(float(value), 6)}})
    return found
