"""The recorder: an observer that streams a run into one file, step by step, in flat memory."""

from __future__ import annotations

import math
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.core.batch import RunSeen, StepSeen, Work
from pellucid.core.errors import PellucidError, rule
from pellucid.core.table import column
from pellucid.evidence.trace import header as headers
from pellucid.evidence.trace import layout, measures
from pellucid.evidence.trace.header import MARKS, TENSORS, WORKS, Header, StageTime
from pellucid.evidence.trace.layout import Entry, Writer, step_name
from pellucid.evidence.trace.measures import DIGESTED, NUMBERS, EarlierCalls, StepBlock, StepContext
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.result import Result

# --- time and memory ----------------------------------------------------------------------------------------------

_STATM = "/proc/self/statm"  # Linux: pages of the process; the second number is what is resident


class _StepClock:
    """Marks of the current step: (what, host seconds, device event), from the beginning of the run.

    Nothing waits for a device: its time is read from events, after they have passed.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.origin = time.perf_counter()
        self.spare: list[Any] = []  # events that have been read: to make one costs more than to record it
        self.first = self.event()
        self.marks: list[tuple[int, float, Any]] = []

    def event(self) -> Any:
        if self.stream is None:
            return None
        event = self.spare.pop() if self.spare else torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def mark(self, work: Work) -> None:
        if len(self.marks) < MARKS:
            self.marks.append((WORKS.index(work), self.now(), self.event()))

    def take(self) -> list[tuple[int, float, Any]]:
        """The marks since the last time."""
        marks, self.marks = self.marks, []
        return marks

    def table(self, marks: list[tuple[int, float, Any]]) -> bytes:
        """(MARKS, 3) float64: what, host seconds, device seconds; NaN in unused rows. The events have passed."""
        out = array("d")
        for work, at, event in marks:
            out.extend((work, at, math.nan if event is None else self.first.elapsed_time(event) / 1000))
            if event is not None:
                self.spare.append(event)
        out.extend([math.nan] * (3 * (MARKS - len(marks))))
        return out.tobytes()

    def now(self) -> float:
        return time.perf_counter() - self.origin


class _MemoryMeter:
    """Bytes that torch holds on the device now and held at most; on a CPU the resident size of the process."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.most, self.page = device, 0, 0
        self.pages: Any = None
        if device.type != "cuda" and os.path.exists(_STATM):
            self.page = os.sysconf("SC_PAGE_SIZE")
            self.pages = open(_STATM, "rb", buffering=0)  # noqa: SIM115  it is read at every step

    def read(self) -> tuple[int, int]:
        """(now, at most); −1 where the system does not say."""
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]
            return int(stats["current"]), int(stats["peak"])
        if self.pages is None:
            return -1, -1
        self.pages.seek(0)
        now = int(self.pages.read(128).split()[1]) * self.page
        self.most = max(self.most, now)
        return now, self.most

    def close(self) -> None:
        if self.pages is not None:
            self.pages.close()
        self.pages = None

    def __del__(self) -> None:
        if getattr(self, "pages", None) is not None:
            self.pages.close()


# --- asynchronous copy to the host --------------------------------------------------------------------------------

Deliver = Callable[[Any, list[Any]], None]  # (what was sent along, the tensors as arrays on the host)
LAG = 1  # blocks of steps that may be under way; more would only take memory, and be lost by a kill


class AsyncCopy:
    """Delivers tensors to the host in the order in which they were sent.

    From a CPU at once; from a GPU they are copied behind the kernels that made them and delivered some steps later, so
    that no step waits for its own numbers.
    """

    def __init__(self, device: torch.device, deliver: Deliver) -> None:
        self.device, self.deliver = device, deliver
        self.under_way: deque[tuple[Any, list[Tensor], Any]] = deque()

    def send(self, what: Any, tensors: Sequence[Tensor]) -> None:
        if self.device.type != "cuda":
            self.deliver(what, [tensor.detach().cpu().contiguous().numpy() for tensor in tensors])
            return
        copies = [pinned_copy(tensor) for tensor in tensors]
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self.under_way.append((what, copies, event))
        while self.under_way and (len(self.under_way) > LAG or self.under_way[0][2].query()):
            self.deliver_first()

    def deliver_first(self) -> None:
        what, copies, event = self.under_way.popleft()
        event.synchronize()
        try:
            self.deliver(what, [copy.numpy() for copy in copies])
        except BaseException:
            self.under_way.clear()  # the steps after one that is not in the file would be in the wrong place
            raise

    def drain(self) -> None:
        while self.under_way:
            self.deliver_first()


def pinned_copy(tensor: Tensor) -> Tensor:
    """A copy on the host that is filled when the device gets there."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)


# --- one run ------------------------------------------------------------------------------------------------------

_SOON = 0.2  # seconds after which a step is sent to the file, however few wait with it
_SPARE = 4096  # bytes of a header for what is known only at the end; as many again for each recipe that comes then
_TENSOR_KINDS = {torch.float32: "F32", torch.float64: "F64"}


@dataclass(frozen=True)
class _PendingStep:
    """A step that is not measured yet, or not on the host."""

    index: int
    context: StepContext
    marks: list[Any]


class _Recording:
    """The recording of one run. The file appears with the first step, when the tensors that a step has are known."""

    def __init__(self, options: Recorder, run: RunSeen) -> None:
        self.options, x = options, run.x
        self.writer: Writer | None = None
        self.run: RunSeen | None = run  # until its first x is written
        self.lengths = [len(plan.rows) for plan in run.plans]
        self.kind = _TENSOR_KINDS[x.dtype]
        self.clock, self.memory = _StepClock(x.device), _MemoryMeter(x.device)
        self.copies = AsyncCopy(x.device, self.deliver)
        self.past = EarlierCalls()
        self.block: StepBlock | None = None
        self.waiting: list[_PendingStep] = []
        self.since = 0.0
        self.weight = torch.from_numpy(measures.weights(max(x[0].numel(), 1))).to(x.device)
        self.end = torch.empty_like(x) if options.tensors else None
        self.delivered = 0
        self.laid = (b"", 0)  # where the tensors of a whole run lie, for its header
        self.first_digests = measures.digest(x.reshape(1, len(x), -1).contiguous(), self.weight)
        self.header = self.first_header(run)

    def first_header(self, run: RunSeen) -> Header:
        x, (plans, plan_of) = run.x, headers.distinct(run.plans)
        shape = tuple(x.shape[1:])
        return Header(
            state="recording",
            images=len(x),
            shape=shape,
            dtype=str(x.dtype).removeprefix("torch."),
            steps=max(self.lengths),
            done=0,
            kept=(),
            every=self.options.every,
            limit=measures.limit_of(shape) if self.options.limit is None else self.options.limit,
            plan_tables=tuple(plan.to_dict() for plan in plans),
            plan_of=plan_of,
            noise=headers.noise_words(run.noise),
            versions=headers.versions(),
            machine=headers.machine(x.device),
            recipes=tuple(self.options.recipes),
        )

    # --- the layout -----------------------------------------------------------------------------------------------

    def entries_of(self, index: int) -> list[Entry]:
        count = len(layout.active(self.lengths, index))
        shape = (count, *self.header.shape)
        found = [
            Entry(step_name(index, "numbers"), "F64", (count, len(NUMBERS))),
            Entry(step_name(index, "digests"), "I64", (count, len(DIGESTED))),
            Entry(step_name(index, "clock"), "F64", (MARKS, 3)),
            Entry(step_name(index, "memory"), "I64", (2,)),
        ]
        kept = self.header.kept_at(index)
        checked = len(found) + sum(name not in DIGESTED for name in kept)
        found += [Entry(step_name(index, name), self.kind, shape) for name in kept]
        return [*found, Entry(step_name(index, layout.CHECK), "I64", (checked,))]

    def entries(self, steps: int, ended: bool) -> Iterator[Entry]:
        """All tensors of a file with this many steps, in their order."""
        shape = (self.header.images, *self.header.shape)
        if self.options.tensors:
            yield Entry("start", self.kind, shape)
        for index in range(steps):
            yield from self.entries_of(index)
        if self.options.tensors and ended:
            yield Entry("end", self.kind, shape)

    # --- steps ----------------------------------------------------------------------------------------------------

    def mark(self, work: Work) -> None:
        self.clock.mark(work)

    def see(self, seen: StepSeen) -> None:
        """One step: put behind those that wait, which are measured together when there are enough."""
        if self.writer is None:
            self.open(seen)
        levels = measures.levels_of(seen)
        self.past = self.past.after(seen, tuple(level.ratio for level in levels))
        context, values = measures.context_of(seen, self.past, levels)
        if self.block is None or not self.block.takes(context, seen.x):
            self.measure()
            self.block = StepBlock(context, seen.x, self.header.limit)
        self.since = self.since if self.waiting else self.clock.now()
        self.block.add(context, values)
        self.waiting.append(_PendingStep(seen.index, context, self.clock.take()))
        if self.block.full or self.clock.now() - self.since > _SOON:
            self.measure()
        self.finish_images(seen)
        if seen.index + 1 == self.header.steps:
            self.finish(None)

    def measure(self) -> None:
        """Starts the measurement of the steps that wait, and delivers those before that are ready."""
        steps, self.waiting = self.waiting, []
        if self.block is None or not steps:
            return
        found, block = self.block.measure(self.weight)
        chosen = [k for k, step in enumerate(steps) if self.header.kept_at(step.index)]
        kept = [torch.stack(self.kept(steps[k], block[k])) for k in chosen]
        self.copies.send((steps, self.memory.read()), [found, *kept])

    def open(self, seen: StepSeen) -> None:
        """Lays the file out and writes its beginning. A guided denoiser has cond, or zeroes the first steps."""
        guided = "cond" in seen.parts or "zero_init" in seen.parts
        kept = TENSORS if guided else TENSORS[:-1]
        self.header = replace(self.header, kept=kept if self.options.tensors else ())
        assert self.run is not None
        self.header = replace(self.header, start=tuple(int(d) for d in self.first_digests[0].tolist()))
        self.laid = layout.lay_out(self.entries(self.header.steps, True))
        front = layout.encode(self.header.to_words(), self.laid[0])
        spare = _SPARE if self.header.recipes else _SPARE * (1 + self.header.images)  # a wrapped pipeline's come late
        self.writer = Writer(self.options.path, front, spare, overwrite=self.options.overwrite)
        if self.options.tensors:
            self.writer.write(_raw(self.run.x.detach().cpu().contiguous().numpy()))
        self.run = None  # the first x is held no longer than the run holds it

    def kept(self, step: _PendingStep, measured: Sequence[Tensor] | Tensor) -> list[Tensor]:
        """The tensors of a step, in the order of the layout; what a step does not have is NaN."""
        scales = [1.0 / sigma if sigma > 0 else float("nan") for sigma in step.context.sigmas]
        block = dict(zip(step.context.measured, measured, strict=True))
        held = {"x": block["x"], "x0": block["x0"]}
        held["eps"] = block["noise"] * column(scales, block["x"], len(set(step.context.sigmas)) == 1)
        if "x0-cond" in block:
            held["delta"] = block["x0-cond"]
        if "delta" in held and "delta" not in self.header.kept:
            self.note("guidance deltas were not kept: the first step had no separate prediction with the prompt")
        return [held[name] if name in held else torch.full_like(held["x"], float("nan")) for name in self.header.kept]

    def note(self, text: str) -> None:
        if text not in self.header.notes:
            self.header = replace(self.header, notes=(*self.header.notes, text))

    def finish_images(self, seen: StepSeen) -> None:
        """Keeps x of the images whose last row this was."""
        if self.end is not None:
            for k, image in enumerate(seen.images):
                if self.lengths[image] == seen.index + 1:
                    self.end[image] = seen.x_next[k]

    def deliver(self, sent: tuple[list[_PendingStep], tuple[int, int]], arrays: list[Any]) -> None:
        """Steps have arrived on the host: appended in one piece."""
        assert self.writer is not None
        steps, memory = sent
        parts, kept = [], iter(arrays[1:])
        for step, found in zip(steps, arrays[0], strict=True):
            numbers, marks = measures.to_bytes(step.context, found, self.weight.numel())
            own = [numbers, marks, self.clock.table(step.marks), array("q", memory).tobytes()]
            tensors = [_raw(one) for one in next(kept)] if self.header.kept_at(step.index) else []
            checked = [data for name, data in zip(self.header.kept, tensors, strict=False) if name not in DIGESTED]
            parts += [*own, *tensors, *map(layout.digest, own + checked)]
        self.writer.write(b"".join(parts))
        self.delivered += len(steps)

    # --- the end --------------------------------------------------------------------------------------------------

    def finish(self, why: str | None) -> None:
        """Writes what is left and the header again; `why` is the reason that a run broke off, if it did."""
        if self.writer is None:
            return
        try:
            self.measure()
            self.copies.drain()
        finally:  # also what could not be measured, or written, is noted
            self.past, self.block, self.waiting = EarlierCalls(), None, []
            self.memory.close()
            complete = self.delivered == self.header.steps
            if complete and self.end is not None and self.header.state == "recording":
                self.writer.write(_raw(self.end.cpu().numpy()))
                self.end = None
            state: headers.State = "whole" if complete else "broken off"
            seconds = self.clock.now() if self.header.seconds is None else self.header.seconds
            self.update(state=state, done=self.delivered, seconds=seconds, ended=why)

    def update(self, **changes: Any) -> None:
        """Writes the header again, with these fields."""
        assert self.writer is not None
        self.header = replace(self.header, **changes)
        complete = self.header.state == "whole"
        places, size = self.laid if complete else layout.lay_out(self.entries(self.delivered, False))
        self.writer.finish(layout.encode(self.header.to_words(), places), size)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _raw(values: Any) -> bytes:
    return np.ascontiguousarray(values).tobytes()


# --- the observer -------------------------------------------------------------------------------------------------


class Recorder:
    """Records one run: `with Recorder("run.safetensors") as recorder: pipe("a star", observers=[recorder])`.

    `tensors` keeps x, x0, eps and the guidance delta of every `every`-th step and of the last one, beside the numbers
    of every step. `limit` is where values of x0 count as saturated; without it 1 for one or three channels, else 3.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: bool = False,
        every: int = 1,
        *,
        limit: float | None = None,
        overwrite: bool = False,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise PellucidError(rule("every", "a whole number from 1", every), "trace-every")
        if limit is not None and not limit > 0:
            raise PellucidError(rule("limit", "positive", limit), "trace-limit")
        self.path = Path(path)
        layout.check_goal(self.path, overwrite)
        self.tensors, self.every, self.limit, self.overwrite = tensors, every, limit, overwrite
        self.recording: _Recording | None = None
        self.recipes: list[dict[str, Any]] = []
        self.closed = False

    # --- what the pipeline shows ----------------------------------------------------------------------------------

    def begin_request(self, recipes: Sequence[Recipe]) -> None:
        self.recipes = [recipe.to_dict() for recipe in recipes]

    def end_request(self, result: Result) -> None:
        """The recipes, which a wrapped pipeline gives only now, and how long each stage took."""
        recording = self.recording
        if recording is None or recording.writer is None or recording.header.state != "whole":
            return
        origin, notes = recording.clock.origin, (*recording.header.notes, *result.notes)
        stages = tuple(StageTime(s.name, s.began - origin, s.seconds, s.peak) for s in result.stages)
        recording.update(recipes=tuple(recipe.to_dict() for recipe in result.recipes), stages=stages, notes=notes)

    # --- what the loop shows --------------------------------------------------------------------------------------

    def begin_run(self, run: RunSeen) -> None:
        if self.closed or self.recording is not None:
            got = "a closed one" if self.closed else "a second run"
            raise PellucidError(rule("recorder", "of one run", got, "Make another Recorder."), "trace-runs")
        with torch.no_grad():
            self.recording = _Recording(self, run)

    def mark(self, work: Work) -> None:
        assert self.recording is not None
        self.recording.mark(work)

    def __call__(self, seen: StepSeen) -> None:
        assert self.recording is not None
        with torch.no_grad():
            self.recording.see(seen)

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self, why: str | None = None) -> None:
        """Ends the file; a run that has not come to its end is recorded as broken off, with the reason."""
        if self.closed:
            return
        self.closed = True
        recording = self.recording
        if recording is None or recording.writer is None:
            if why is None:
                raise PellucidError("recorder must see a run before it is closed; got none.", "trace-runs")
            return
        try:
            if recording.header.state != "whole":
                recording.finish(why or "closed before its last step")
        finally:
            recording.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(None if kind is None else f"{kind.__name__}: {error}".removesuffix(": "))
