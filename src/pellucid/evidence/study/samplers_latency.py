"""How long one image takes in each cell: warm, one at a time, in rounds over all cells so that a machine's drift
falls on all of them alike. Never beside other work of the study."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from pellucid.evidence.study.cells import Cell
from pellucid.evidence.study.front import Array
from pellucid.evidence.study.records import Records
from pellucid.evidence.study.samplers import Study

FILE = "latency.jsonl"
KEYS = ("cell", "round", "machine")
WARM = 2  # calls before the first that counts


@dataclass(frozen=True)
class Latency:
    """Seconds of one request for one image, from prompt to pixels: median and quartiles of all rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.seconds)) if self.seconds else float("nan")

    @property
    def quartiles(self) -> tuple[float, float]:
        if not self.seconds:
            return float("nan"), float("nan")
        low, high = np.quantile(self.seconds, [0.25, 0.75])
        return float(low), float(high)

    def drawn(self, resamples: int, seed: int = 0) -> Array:
        """Medians (R,) of rounds that were drawn again."""
        if not self.seconds:
            return np.full(resamples, np.nan)
        random = np.random.default_rng(seed)
        picks = random.integers(0, len(self.seconds), (resamples, len(self.seconds)))
        return np.asarray(np.median(np.asarray(self.seconds)[picks], axis=1), float)


class Clock:
    """Measures what is missing and reads what is there: only rounds of this machine count."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.records = Records(study.folder, KEYS, FILE)
        self.machine = machine_of(study.subject.device)

    def missing(self) -> list[tuple[int, Cell]]:
        """(round, cell), each round in an order of its own."""
        found = []
        for number in range(self.study.config.rounds):
            order = np.random.default_rng(number).permutation(len(self.study.cells))
            cells = [self.study.cells[i] for i in order]
            found += [(number, cell) for cell in cells if not self.records.has(self.place(number, cell))]
        return found

    def place(self, number: int, cell: Cell) -> dict[str, object]:
        return {"cell": cell.key, "round": number, "machine": self.machine}

    def run(self, done: Callable[[int], object] = lambda count: None) -> None:
        waiting = self.missing()
        if waiting:
            cheapest = min(self.study.cells, key=lambda cell: cell.nfe)
            for _ in range(WARM):
                self.once(cheapest)
        for number, cell in waiting:
            self.records.add({**self.place(number, cell), "seconds": self.once(cell)})
            done(cell.nfe)

    def once(self, cell: Cell) -> float:
        """The noise is the pipeline's own: the Brownian path of a study is no part of what a user waits for."""
        config, subject = self.study.config, self.study.subject
        began = time.perf_counter()
        subject.make([config.prompt(0)], [config.seed], **config.how, **cell.asks())
        return time.perf_counter() - began

    def of(self, cell: Cell) -> Latency:
        rows = [r for r in self.records.rows if r["cell"] == cell.key and r["machine"] == self.machine]
        return Latency(tuple(float(row["seconds"]) for row in rows if row["round"] < self.study.config.rounds))


def machine_of(device: torch.device) -> str:
    """Where the time was measured, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


def processor() -> str:
    """The processor's own name where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
