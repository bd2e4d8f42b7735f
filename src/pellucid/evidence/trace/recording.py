"""One run on its way into a file: measured and appended step by step, on a GPU a few at a time; memory is flat."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.core.loop import RunSeen, StepSeen, Work, column
from pellucid.evidence.trace import header as headers
from pellucid.evidence.trace import layout, measures
from pellucid.evidence.trace.clock import MARKS, Clock, Memory
from pellucid.evidence.trace.gathering import Block
from pellucid.evidence.trace.header import TENSORS, Header
from pellucid.evidence.trace.layout import Entry, Writer, step_name
from pellucid.evidence.trace.measures import DIGESTED, NUMBERS, Noted, Past
from pellucid.evidence.trace.shuttle import Shuttle

SOON = 0.2  # seconds after which a step is on its way to the file, however few wait with it
SPARE = 4096  # bytes of a header for what is known only at the end; as many again for a recipe that comes then
KINDS = {torch.float32: "F32", torch.float64: "F64"}


@dataclass(frozen=True)
class Settings:
    """What a recorder was asked for."""

    path: Path
    tensors: bool = False
    every: int = 1
    limit: float | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Waiting:
    """A step that is not measured yet, or not on the host: what goes along with its numbers."""

    index: int
    noted: Noted
    marks: list[Any]


class Recording:
    """The recording of one run. The file appears with the first step, when the tensors that a step has are known."""

    def __init__(self, asked: Settings, begun: RunSeen, recipes: Sequence[dict[str, Any]]) -> None:
        self.asked, x = asked, begun.x
        self.writer: Writer | None = None
        self.begun: RunSeen | None = begun
        self.lengths = [len(plan.rows) for plan in begun.plans]
        self.kind = KINDS[x.dtype]
        self.clock, self.memory = Clock(x.device), Memory(x.device)
        self.shuttle = Shuttle(x.device, self.deliver)
        self.past = Past()
        self.block: Block | None = None
        self.waiting: list[Waiting] = []
        self.since = 0.0
        self.weight = torch.from_numpy(measures.weights(max(x[0].numel(), 1))).to(x.device)
        self.end = torch.empty_like(x) if asked.tensors else None
        self.delivered = 0
        self.laid = (b"", 0)  # where the tensors of a whole run lie, for its header
        self.started_as = measures.digest(x.reshape(1, len(x), -1).contiguous(), self.weight)
        self.header = self.first_header(begun, recipes)

    def first_header(self, begun: RunSeen, recipes: Sequence[dict[str, Any]]) -> Header:
        x, (plans, plan_of) = begun.x, headers.distinct(begun)
        shape = tuple(x.shape[1:])
        return Header(
            state="recording",
            images=len(x),
            shape=shape,
            dtype=str(x.dtype).removeprefix("torch."),
            steps=max(self.lengths),
            done=0,
            kept=(),
            every=self.asked.every,
            limit=measures.limit_of(shape) if self.asked.limit is None else self.asked.limit,
            plan_tables=tuple(plan.to_dict() for plan in plans),
            plan_of=plan_of,
            noise=headers.noise_words(begun.noise),
            versions=headers.versions(),
            machine=headers.machine(x.device),
            recipes=tuple(recipes),
        )

    # --- the layout -----------------------------------------------------------------------------------------------

    def keeps(self, index: int) -> bool:
        """Whether the tensors of a step are kept."""
        return bool(self.header.kept) and (index % self.header.every == 0 or index == self.header.steps - 1)

    def entries_of(self, index: int) -> list[Entry]:
        count = len(layout.active(self.lengths, index))
        shape = (count, *self.header.shape)
        found = [
            Entry(step_name(index, "numbers"), "F64", (count, len(NUMBERS))),
            Entry(step_name(index, "digests"), "I64", (count, len(DIGESTED))),
            Entry(step_name(index, "clock"), "F64", (MARKS, 3)),
            Entry(step_name(index, "memory"), "I64", (2,)),
        ]
        kept = self.header.kept if self.keeps(index) else ()
        checked = len(found) + sum(name not in DIGESTED for name in kept)
        found += [Entry(step_name(index, name), self.kind, shape) for name in kept]
        return [*found, Entry(step_name(index, layout.CHECK), "I64", (checked,))]

    def entries(self, steps: int, ended: bool) -> Iterator[Entry]:
        """All tensors of a file with so many steps, in their order."""
        whole = (self.header.images, *self.header.shape)
        if self.asked.tensors:
            yield Entry("start", self.kind, whole)
        for index in range(steps):
            yield from self.entries_of(index)
        if self.asked.tensors and ended:
            yield Entry("end", self.kind, whole)

    # --- steps ----------------------------------------------------------------------------------------------------

    def mark(self, work: Work) -> None:
        self.clock.mark(work)

    def see(self, seen: StepSeen) -> None:
        """One step: laid behind those that wait, which are measured together when they are enough."""
        if self.writer is None:
            self.open(seen)
        levels = measures.levels_of(seen)
        self.past = self.past.after(seen, tuple(level.ratio for level in levels))
        noted, values = measures.note(seen, self.past, levels)
        if self.block is None or not self.block.takes(noted, seen.x):
            self.measure()
            self.block = Block(noted, seen.x, self.header.limit)
        self.since = self.since if self.waiting else self.clock.now()
        self.block.add(noted, values)
        self.waiting.append(Waiting(seen.index, noted, self.clock.taken()))
        if self.block.full or self.clock.now() - self.since > SOON:
            self.measure()
        self.finish_images(seen)
        if seen.index + 1 == self.header.steps:
            self.finish(None)

    def measure(self) -> None:
        """Starts the measurement of the steps that wait, and hands on what is ready of those before."""
        steps, self.waiting = self.waiting, []
        if self.block is None or not steps:
            return
        found, block = self.block.measure(self.weight)
        kept = [torch.stack(self.kept(step, block[k])) for k, step in enumerate(steps) if self.keeps(step.index)]
        self.shuttle.send((steps, self.memory.read()), [found, *kept])

    def open(self, seen: StepSeen) -> None:
        """Lays the file out and writes its beginning. A guided denoiser names cond, but where it zeroes first steps."""
        guided = "cond" in seen.parts or "zero_init" in seen.parts
        kept = TENSORS if guided else TENSORS[:-1]
        self.header = replace(self.header, kept=kept if self.asked.tensors else ())
        assert self.begun is not None
        self.header = replace(self.header, start=tuple(int(d) for d in self.started_as[0].tolist()))
        self.laid = layout.laid(self.entries(self.header.steps, True))
        front = layout.encode(self.header.to_words(), self.laid[0])
        spare = SPARE if self.header.recipes else SPARE * (1 + self.header.images)  # a wrapped pipeline's come late
        self.writer = Writer(self.asked.path, front, spare, overwrite=self.asked.overwrite)
        if self.asked.tensors:
            self.writer.write(raw(self.begun.x.detach().cpu().contiguous().numpy()))
        self.begun = None  # the first x is not held any longer than the run holds it

    def kept(self, step: Waiting, measured: Sequence[Tensor] | Tensor) -> list[Tensor]:
        """The tensors of a step, in the order of the layout; what a step does not have is NaN."""
        scales = [1.0 / sigma if sigma > 0 else float("nan") for sigma in step.noted.sigmas]
        block = dict(zip(step.noted.measured, measured, strict=True))
        held = {"x": block["x"], "x0": block["x0"]}
        held["eps"] = block["noise"] * column(scales, block["x"], len(set(step.noted.sigmas)) == 1)
        if "x0-cond" in block:
            held["delta"] = block["x0-cond"]
        if "delta" in held and "delta" not in self.header.kept:
            self.note("guidance deltas were not kept: the first step had no prediction with the prompt apart")
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

    def deliver(self, sent: tuple[list[Waiting], tuple[int, int]], arrays: list[Any]) -> None:
        """Steps have arrived on the host: appended in one piece."""
        assert self.writer is not None
        steps, memory = sent
        parts, kept = [], iter(arrays[1:])
        for step, found in zip(steps, arrays[0], strict=True):
            numbers, marks = measures.settle(step.noted, found, self.weight.numel())
            own = [numbers, marks, self.clock.table(step.marks), array("q", memory).tobytes()]
            tensors = [raw(one) for one in next(kept)] if self.keeps(step.index) else []
            checked = [data for name, data in zip(self.header.kept, tensors, strict=False) if name not in DIGESTED]
            parts += [*own, *tensors, *map(layout.digest, own + checked)]
        self.writer.write(b"".join(parts))
        self.delivered += len(steps)

    # --- the end --------------------------------------------------------------------------------------------------

    def finish(self, why: str | None) -> None:
        """Writes what is left and the header again; `why` a run broke off, None where it did not."""
        if self.writer is None:
            return
        try:
            self.measure()
            self.shuttle.drain()
        finally:  # also what could not be measured, or written, is noted
            self.past, self.block, self.waiting = Past(), None, []
            self.memory.close()
            complete = self.delivered == self.header.steps
            if complete and self.end is not None and self.header.state == "recording":
                self.writer.write(raw(self.end.cpu().numpy()))
                self.end = None
            state: headers.State = "whole" if complete else "broken off"
            seconds = self.clock.now() if self.header.seconds is None else self.header.seconds
            self.update(state=state, done=self.delivered, seconds=seconds, ended=why)

    def update(self, **changes: Any) -> None:
        """Writes the header again, with these fields."""
        assert self.writer is not None
        self.header = replace(self.header, **changes)
        complete = self.header.state == "whole"
        places, size = self.laid if complete else layout.laid(self.entries(self.delivered, False))
        self.writer.finish(layout.encode(self.header.to_words(), places), size)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def raw(held: Any) -> bytes:
    return np.ascontiguousarray(held).tobytes()
