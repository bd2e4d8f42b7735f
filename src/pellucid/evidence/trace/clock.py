"""When the loop was at what, on the host and on the device, and how much memory is taken. Nothing waits for a device:
its clock is read from events, after they have passed."""

from __future__ import annotations

import math
import os
import time
from array import array
from typing import Any, get_args

import torch

from pellucid.core.loop import Work

WORKS: tuple[Work, ...] = get_args(Work)
MARKS = 10  # that one step may have; a row has eight at most
STATM = "/proc/self/statm"  # Linux: pages of the process; the second number is what is resident


class Clock:
    """Marks of the step that is being made: (what, host seconds, device event), from the run's beginning."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.origin = time.perf_counter()
        self.spare: list[Any] = []  # events that have been read: to make one costs more than to record it
        self.first = self.event()
        self.marks: list[tuple[int, float, Any]] = []

    def event(self) -> Any:
        if self.stream is None:
            return None
        made = self.spare.pop() if self.spare else torch.cuda.Event(enable_timing=True)
        made.record(self.stream)
        return made

    def mark(self, work: Work) -> None:
        if len(self.marks) < MARKS:
            self.marks.append((WORKS.index(work), time.perf_counter() - self.origin, self.event()))

    def taken(self) -> list[tuple[int, float, Any]]:
        """The marks since the last time, which are forgotten."""
        held, self.marks = self.marks, []
        return held

    def table(self, marks: list[tuple[int, float, Any]]) -> bytes:
        """(MARKS, 3) float64: what, host seconds, device seconds; NaN where nothing is. The events have passed."""
        out = array("d")
        for work, at, event in marks:
            out.extend((work, at, math.nan if event is None else self.first.elapsed_time(event) / 1000))
            if event is not None:
                self.spare.append(event)
        out.extend([math.nan] * (3 * (MARKS - len(marks))))
        return out.tobytes()

    def now(self) -> float:
        return time.perf_counter() - self.origin


class Memory:
    """Bytes that torch has on the device now and had at most; on a CPU what of the process is resident."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.most, self.page = device, 0, 0
        self.pages: Any = None
        if device.type != "cuda" and os.path.exists(STATM):
            self.page = os.sysconf("SC_PAGE_SIZE")
            self.pages = open(STATM, "rb", buffering=0)  # noqa: SIM115  it is read at every step

    def read(self) -> tuple[int, int]:
        """(now, at most); −1 where the system does not tell."""
        if self.device.type == "cuda":
            held = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]
            return int(held["current"]), int(held["peak"])
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
