"""Reading a trace: the header, the numbers of each step, and its tensors on demand."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pellucid.core.batch import level_after
from pellucid.core.errors import PellucidError, rule
from pellucid.core.plan import Row
from pellucid.core.reader import naming
from pellucid.core.schedule import Level
from pellucid.evidence.trace import layout, measures
from pellucid.evidence.trace.header import MARKS, WORKS, Header
from pellucid.evidence.trace.layout import FileIndex, step_name
from pellucid.evidence.trace.measures import DIGESTED, NUMBERS

_KINDS = {"F64": torch.float64, "F32": torch.float32, "I64": torch.int64}
_CHECKED = {"x": "x", "x0": "x0", "end": "x_next"}  # tensor → which of a step's digests are of it
OLD = "it was recorded by an older version without digests of its numbers, eps and delta: only x and x0 are checked"
_NUMERIC = ("numbers", "digests", "clock", "memory")
Array = Any  # numpy, one number an image


@dataclass(frozen=True)
class WorkMark:
    """When the loop began some work, in seconds of the run; `device` is NaN where only the host was timed."""

    work: str
    host: float
    device: float


@dataclass(frozen=True)
class Step:
    """One model call and its update. Arrays hold one number for each of `images`, the positions that still ran.

    `norms` are Euclidean, of x as the network was called with it, of x0 and eps as guided, and of the guidance delta
    (x0 less the x0 of cond). NaN where there was nothing to measure. `seconds` are by what the loop did.
    """

    index: int
    images: tuple[int, ...]
    rows: tuple[Row, ...]
    next_levels: tuple[Level, ...]
    norms: dict[str, Array]
    cosine: Array
    saturation: Array
    local_error: Array
    digests: dict[str, Array]
    seconds: dict[str, float]
    device_seconds: dict[str, float]
    memory: int | None
    peak: int | None
    marks: tuple[WorkMark, ...]

    @property
    def level(self) -> Level:
        """Of the first image's call."""
        return self.rows[0].level

    @property
    def levels(self) -> tuple[Level, ...]:
        return tuple(row.level for row in self.rows)

    @property
    def time(self) -> float:
        """The time that was passed to the network, for the first image."""
        return self.rows[0].time

    @property
    def times(self) -> tuple[float, ...]:
        return tuple(row.time for row in self.rows)

    def of(self, image: int) -> int:
        """The place of an image in the arrays."""
        return self.images.index(image)


@dataclass(frozen=True)
class Trace:
    """A recorded run. Tensors are read from the file on demand."""

    path: Path
    header: Header
    steps: tuple[Step, ...]
    found: FileIndex

    @property
    def whole(self) -> bool:
        return self.header.state == "whole" and len(self.steps) == self.header.steps

    def has(self, name: str, index: int | None = None) -> bool:
        """Whether a tensor is there: `start`, `end`, or one of `header.kept` at a step."""
        return self.found.holds(name if index is None else step_name(index, name))

    def tensor(self, name: str, index: int | None = None) -> Tensor:
        """`start` or `end` (all images), or a tensor of a step (the images that ran then)."""
        key = name if index is None else step_name(index, name)
        if not self.found.holds(key):
            advice = "Record with tensors (--trace-tensors)." if not self.header.kept else ""
            raise PellucidError(rule("tensor", "one that the trace holds", key, advice), "trace-tensor")
        tensor = _read_tensor(self.path, self.found, self.header, key)
        if name in _CHECKED or name == "start":
            self.check(tensor, name, index)
        return tensor

    def check(self, tensor: Tensor, name: str, index: int | None) -> None:
        """Refuses a tensor whose bits are not those that the run had."""
        if name == "start":
            wanted = list(self.header.start)
        elif index is not None:
            wanted = self.steps[index].digests[_CHECKED[name]].tolist()
        else:
            ends = [self.steps[len(plan.rows) - 1] for plan in self.header.plans]
            wanted = [int(step.digests["x_next"][step.of(image)]) for image, step in enumerate(ends)]
        if measures.digests_of(tensor) != wanted:
            raise layout.damaged(self.path, name if index is None else f"{name} of step {index}")

    def verify(self) -> None:
        """Reads every tensor, and so refuses a damaged trace."""
        for name in filter(self.has, ("start", "end")):
            self.tensor(name)
        for index in self.has_images:
            for name in self.header.kept:
                self.tensor(name, index)

    @property
    def has_images(self) -> list[int]:
        """The steps whose tensors are there."""
        return [step.index for step in self.steps if self.has("x", step.index)]


def read(path: str | os.PathLike[str], *, partial: bool = False) -> Trace:
    """A trace from its file. One that was cut or killed is refused; `partial` reads the steps that are whole in it."""
    place = Path(path)
    found = layout.read_index(place)
    with naming(place.name):
        header = Header.from_words(found.words)
    if found.sound is False:
        raise layout.damaged(place, "the header")
    if found.sound is None:
        header = replace(header, notes=(*header.notes, OLD))
    wanted = header.steps if header.state == "recording" else header.done
    checks = () if found.sound is None else (layout.CHECK,)
    names = [[step_name(i, name) for name in (*_NUMERIC, *header.kept_at(i), *checks)] for i in range(wanted)]
    count = next((i for i, needed in enumerate(names) if not all(map(found.holds, needed))), wanted)
    if not partial and (count < wanted or found.whole_size > found.size or header.state == "recording"):
        raise _unfinished(place, header, count)
    return Trace(place, header, _read_steps(place, found, header, count), found)


def end_of_last(header: Header, count: int) -> float:
    """When the last of `count` steps ended: with the run; NaN where the run has more, or its end is not known."""
    return math.nan if header.seconds is None or count < header.done else header.seconds


def _unfinished(path: Path, header: Header, count: int) -> PellucidError:
    killed = header.state == "recording"
    why = "Its run was killed, or is still going on" if killed else "The file was cut: its header promises more"
    advice = f"{why}. The steps before are whole: `pellucid trace show --partial` (partial=True) reads them."
    got = f"{path.name} with {count} of {header.steps} steps"
    return PellucidError(rule("trace", "whole", got, advice), "trace-truncated")


def _read_tensor(path: Path, found: FileIndex, header: Header, name: str) -> Tensor:
    """A tensor of a file, checked against its step's digests where they are of it."""
    place = found.places[name]
    if place.entry.kind not in _KINDS:
        raise PellucidError(rule(name, f"of kind {', '.join(_KINDS)}", place.entry.kind), "trace")
    data, kind = layout.read_bytes(path, place), _KINDS[place.entry.kind]
    if found.sound is not None and name.startswith("step."):
        index, own = int(name.split(".")[1]), name.rpartition(".")[2]
        checked = [one for one in (*_NUMERIC, *header.kept_at(index)) if one not in DIGESTED]
        if own in checked:
            digests = layout.read_bytes(path, found.places[step_name(index, layout.CHECK)])
            at = 8 * checked.index(own)
            if layout.digest(data) != digests[at : at + 8]:
                raise layout.damaged(path, f"{own} of step {index}")
    return torch.frombuffer(data, dtype=kind).reshape(place.entry.shape) if data else torch.empty(0, dtype=kind)


def _read_steps(path: Path, found: FileIndex, header: Header, count: int) -> tuple[Step, ...]:
    """The first `count` steps of a file, put together from its arrays and its plans."""

    def array(index: int, name: str, shape: tuple[int, ...]) -> Array:
        values = _read_tensor(path, found, header, step_name(index, name)).numpy()
        if values.shape != shape:
            raise PellucidError(rule(step_name(index, name), f"of shape {shape}", values.shape), "trace")
        return values

    def marks_of(index: int) -> tuple[WorkMark, ...]:
        table = array(index, "clock", (MARKS, 3)).tolist()
        return tuple(WorkMark(WORKS[int(row[0])], row[1], row[2]) for row in table if row[0] in range(len(WORKS)))

    def step(index: int, images: tuple[int, ...], marks: tuple[WorkMark, ...], end: WorkMark) -> Step:
        numbers = dict(zip(NUMBERS, array(index, "numbers", (len(images), len(NUMBERS))).T, strict=True))
        digests = dict(zip(DIGESTED, array(index, "digests", (len(images), len(DIGESTED))).T, strict=True))
        now, most = (int(value) if value >= 0 else None for value in array(index, "memory", (2,)))
        plans = [header.plans[k] for k in images]
        return Step(
            index=index,
            images=images,
            rows=tuple(plan.rows[index] for plan in plans),
            next_levels=tuple(level_after(plan, index) for plan in plans),
            norms={name: numbers[name] for name in ("x", "x0", "eps", "delta")},
            cosine=numbers["cosine"],
            saturation=numbers["saturation"],
            local_error=numbers["local_error"],
            digests=digests,
            seconds=_spent([(mark.work, mark.host) for mark in (*marks, end)]),
            device_seconds=_spent([(mark.work, mark.device) for mark in (*marks, end)]),
            memory=now,
            peak=most,
            marks=marks,
        )

    lengths = [len(plan.rows) for plan in header.plans]
    clocks = [marks_of(index) for index in range(count)]
    last = WorkMark("", end_of_last(header, count), math.nan)
    ends = [marks[0] if marks else last for marks in clocks[1:]] + [last]
    pairs = enumerate(zip(clocks, ends, strict=False))
    return tuple(step(index, layout.active(lengths, index), marks, end) for index, (marks, end) in pairs)


def _spent(marks: list[tuple[str, float]]) -> dict[str, float]:
    """Seconds by what the loop did, without what was not timed."""
    out: dict[str, float] = {}
    for (work, begun), (_, ended) in pairwise(marks):
        if not math.isnan(ended - begun):
            out[work] = out.get(work, 0.0) + ended - begun
    return out
