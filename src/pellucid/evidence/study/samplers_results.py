"""The figures of a sampler study: seconds per image, and every measure of every cell with its interval.

Times are taken warm, one image at a time, in rounds over all cells, so that a machine's drift falls on all of them
alike, and never beside other work of the study. Intervals of all cells are over the same resampled images.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.metrics.fid import FEW, Statistics, fid, fid_interval
from pellucid.evidence.metrics.kid import kid_exact, kid_paired, kid_resampled
from pellucid.evidence.statistics import Array, Estimate, Share, draws
from pellucid.evidence.study.kernel import Records
from pellucid.evidence.study.samplers import SamplerStudy
from pellucid.evidence.study.setups import SamplerCell

# --- Seconds per image ----------------------------------------------------------------------------------------------

_LATENCY_FILE = "latency.jsonl"
_LATENCY_KEYS = ("cell", "round", "machine")
_WARM_CALLS = 2  # calls before the first that counts


@dataclass(frozen=True)
class Latency:
    """Seconds of one request for one image, from prompt to pixels: median and quartiles of all rounds."""

    seconds: tuple[float, ...]

    @property
    def estimate(self) -> Estimate:
        if not self.seconds:
            return Estimate(math.nan)
        low, high = np.quantile(self.seconds, [0.25, 0.75])
        return Estimate(float(np.median(self.seconds)), float(low), float(high), "rounds", len(self.seconds), 0.5)

    def drawn(self, resamples: int, seed: int = 0) -> Array:
        """Medians (R,) of rounds that were drawn again."""
        if not self.seconds:
            return np.full(resamples, np.nan)
        random = np.random.default_rng(seed)
        picks = random.integers(0, len(self.seconds), (resamples, len(self.seconds)))
        return np.asarray(np.median(np.asarray(self.seconds)[picks], axis=1), float)


class LatencyClock:
    """Measures what is missing and reads what is there: only rounds of this machine count."""

    def __init__(self, study: SamplerStudy) -> None:
        self.study = study
        self.records = Records(study.folder, _LATENCY_KEYS, _LATENCY_FILE)
        self.machine = _machine_of(study.subject.device)

    def missing(self) -> list[tuple[int, SamplerCell]]:
        """(round, cell), each round in an order of its own."""
        found = []
        for number in range(self.study.config.rounds):
            order = np.random.default_rng(number).permutation(len(self.study.table))
            cells = [self.study.table[i] for i in order]
            found += [(number, cell) for cell in cells if not self.records.has(self.place(number, cell))]
        return found

    def place(self, number: int, cell: SamplerCell) -> dict[str, object]:
        return {"cell": cell.key, "round": number, "machine": self.machine}

    def run(self, done: Callable[[int], object] = lambda count: None) -> None:
        waiting = self.missing()
        if waiting:
            cheapest = min(self.study.table, key=lambda cell: cell.nfe)
            for _ in range(_WARM_CALLS):
                self.once(cheapest)
        for number, cell in waiting:
            self.records.add({**self.place(number, cell), "seconds": self.once(cell)})
            done(cell.nfe)

    def once(self, cell: SamplerCell) -> float:
        """The noise is the pipeline's own: the Brownian path of a study is no part of what a user waits for."""
        config, subject = self.study.config, self.study.subject
        began = time.perf_counter()
        subject.make([config.prompt(0)], [config.seed], **config.how, **cell.asks())
        return time.perf_counter() - began

    def of(self, cell: SamplerCell) -> Latency:
        rows = [r for r in self.records.rows if r["cell"] == cell.key and r["machine"] == self.machine]
        return Latency(tuple(float(row["seconds"]) for row in rows if row["round"] < self.study.config.rounds))


def _machine_of(device: torch.device) -> str:
    """Where the time was measured, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


def _processor() -> str:
    """The processor's own name where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


# --- Measures with their intervals ----------------------------------------------------------------------------------

RESAMPLES = 1000
_DEAR_RESAMPLES, _FID_RESAMPLES = 200, 20  # of KID beyond MANY images, and of FID
_MANY = 2000  # images beyond which a kernel's resamples are expensive
_TINY = 1e-12  # under a logarithm
CLUSTERS = 10  # prompts from which on prompts are drawn again, and not single images


@dataclass(frozen=True)
class Measure:
    """What is measured: its words, and whether less is better."""

    name: str
    title: str
    less: bool
    scale: float = 1.0
    digits: int = 4

    @property
    def scaled(self) -> bool:
        """Whether figures are compared by their ratio: a factor is a factor at 5 calls and at 50."""
        return self.name in ("distance", "latent")

    def loss(self, values: Array) -> Array:
        return values if self.less else -values

    def amount(self, figure: str) -> str:
        """'26.1 image-text score', '37.5 % of images that are all right'"""
        what, percent, _ = self.title.partition(", %")
        return f"{figure} % of {what}" if percent else f"{figure} {what}"


MEASURES = {
    one.name: one
    for one in (
        Measure("distance", "RMSE to the converged image", True),
        Measure("latent", "RMSE to the converged latents", True),
        Measure("kid", "KID × 10³", True, 1e3, 3),
        Measure("fid", "FID", True, 1.0, 2),
        Measure("image_text", "image-text score", False, 1.0, 2),
        Measure("right", "images that are all right, %", False, 100.0, 1),
    )
}


def gap_of(apart: Array) -> Estimate:
    """A difference with its resamples, (1 + R,), and their interval."""
    return Estimate(float(apart[0]), *np.quantile(apart[1:], [0.025, 0.975]).tolist())


@dataclass(frozen=True)
class Column:
    """One measure of all cells: estimates and ends of their intervals (C,), and resampled values (C, R) where the
    resamples are those of the other columns. `of_converged` is the converged images' own figure, where it has one."""

    measure: Measure
    values: Array
    low: Array
    high: Array
    drawn: Array | None = field(default=None, repr=False)
    of_converged: float | None = None

    def compared(self) -> Array:
        """(C, 1 + R): the values with their resamples, as cells are compared: distances by their logarithms."""
        assert self.drawn is not None
        table = np.concatenate([self.values[:, None], self.drawn], axis=1)
        return np.log(np.maximum(table, _TINY)) if self.measure.scaled else table

    def estimate(self, i: int) -> Estimate:
        return Estimate(*(float(held[i]) for held in (self.values, self.low, self.high)))

    def shown(self, i: int) -> Estimate:
        """In the units of the measure."""
        return self.estimate(i).times(self.measure.scale)


class SamplerResults:
    """What the records of a study say, over the images that every cell has."""

    def __init__(self, study: SamplerStudy, resamples: int = RESAMPLES) -> None:
        self.study, self.resamples = study, resamples
        self.cells, self.files = study.table, study.files
        own = (*study.table, *study.converged)
        self.firsts = [
            first for first in study.config.firsts() if all(self.files.has(c.key, first, "pictures") for c in own)
        ]

    @property
    def count(self) -> int:
        """Images of each cell."""
        return len(self.numbers)

    @cached_property
    def numbers(self) -> list[int]:
        return [n for first in self.firsts for n in self.study.config.numbers(first)]

    @cached_property
    def by_prompt(self) -> bool:
        """Whether prompts are drawn again: images of one prompt are more alike than those of different ones."""
        config = self.study.config
        return config.seeds > 1 and len({n // config.seeds for n in self.numbers}) >= CLUSTERS

    @cached_property
    def weights(self) -> Tensor:
        """(R, N): how often each image counts in each resample, the same for every cell and measure."""
        if not self.by_prompt:
            return draws(self.count, self.resamples)
        prompts = [n // self.study.config.seeds for n in self.numbers]
        places = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        return draws(len(places), self.resamples)[:, [places[prompt] for prompt in prompts]]

    # --- one number an image -------------------------------------------------------------------------------------

    def listed(self, cell: SamplerCell, what: str, key: str) -> list[Any]:
        found: list[Any] = []
        for first in self.firsts:
            count = len(self.study.config.numbers(first))
            held = self.files.row(cell.key, first, what).get(key)
            if not isinstance(held, list) or len(held) != count:
                where = f"{key} of {cell.key} in the records of {self.files.folder.name}"
                raise PellucidError(rule(where, f"{count} values, one per image", held), "study-records")
            found += held
        return found

    def scored(self, what: str) -> bool:
        """Whether every batch of every cell has this score."""
        return bool(self.firsts) and all(self.complete(cell, what) for cell in self.cells)

    def per_image(self, cell: SamplerCell, what: str, key: str, scale: float = 1.0) -> Array:
        found = self.listed(cell, what, key)
        if not all(isinstance(value, int | float | None) for value in found):
            where = f"{key} of {cell.key} in the records of {self.files.folder.name}"
            raise PellucidError(rule(where, "numbers", found), "study-records")
        return np.array([math.nan if value is None else scale * float(value) for value in found])

    def means(self, name: str, what: str, key: str, scale: float = 1.0) -> Column:
        """The mean over images of each cell, and of the converged ones where they have it."""
        best, of = self.study.converged[0], partial(self.per_image, what=what, key=key, scale=scale)
        own = float(of(best).mean()) if what != "pictures" and self.complete(best, what) else None
        held = np.stack([of(cell) for cell in self.cells])  # (C, N)
        w = self.weights.double().numpy()
        drawn = held @ w.T / w.sum(1)
        low, high = np.quantile(drawn, [0.025, 0.975], axis=1)
        return Column(MEASURES[name], held.mean(1), low, high, drawn, own)

    def floor(self, key: str) -> dict[str, float]:
        """How far each converged run still moved when its steps were doubled, over the first batch."""
        found = {}
        for full, part in zip(self.study.converged, self.study.halves, strict=True):
            if self.files.has(part.key, 0, "pictures"):
                values = [v for v in self.files.row(part.key, 0, "pictures")[key] if v is not None]
                found[full.key] = float(np.mean(values)) if values else math.nan
        return found

    def right(self) -> Column:
        found = self.means("right", "scenes", "right")
        # Where all images are right, or none, no resample differs: the interval is never narrower than Wilson's.
        ends = np.array([Share.of(self.listed(cell, "scenes", "right")).interval for cell in self.cells])
        return replace(found, low=np.minimum(found.low, ends[:, 0]), high=np.maximum(found.high, ends[:, 1]))

    def attributes(self, cell: SamplerCell) -> dict[str, tuple[int, int]]:
        """Of each attribute: in how many images it is right, of how many whose prompt says it."""
        found: dict[str, tuple[int, int]] = {}
        for marks in self.listed(cell, "scenes", "marks"):
            for name, right in marks.items():
                good, count = found.get(name, (0, 0))
                found[name] = (good + bool(right), count + 1)
        bled = [one for one in self.listed(cell, "scenes", "bled") if one is not None]
        return found | ({"colour of another": (sum(bled), len(bled))} if bled else {})

    def complete(self, cell: SamplerCell, what: str) -> bool:
        return all(self.files.has(cell.key, first, what) for first in self.firsts)

    # --- sets of images -----------------------------------------------------------------------------------------

    def features(self, cell: SamplerCell, what: str) -> Tensor:
        return torch.cat([self.files.features(cell, first, what) for first in self.firsts])

    def kid(self, what: str, reference: Tensor | None = None, device: torch.device | str = "cpu") -> Column:
        """Against the converged images of the same prompts and noise, in pairs; or against a reference."""
        best = (self.features(self.study.converged[0], what) if reference is None else reference).to(device)
        weights = self.weights[: _DEAR_RESAMPLES if self.count > _MANY else None]
        ones = torch.ones(1, self.count)
        values, drawn = [], []
        for cell in self.cells:
            x = self.features(cell, what).to(device)
            if reference is None:
                values.append(float(kid_paired(x, best, ones)[0]))
                rows = kid_paired(x, best, weights).cpu()
            else:
                values.append(kid_exact(x, best))
                rows = kid_resampled(x, best, weights, torch.ones(len(weights), len(best))).cpu()
            drawn.append(rows.numpy())
        table = np.stack(drawn)
        table = table[:, np.isfinite(table).all(0)]  # a resample that is one image many times has no pairs
        low, high = np.quantile(table, [0.025, 0.975], axis=1)
        return Column(MEASURES["kid"], np.array(values), low, high, table)

    def fid(self, what: str, reference: Statistics | None = None, device: torch.device | str = "cpu") -> Column | None:
        """From 10,000 images on; below, it says more about their number than about their quality."""
        if self.count < FEW:
            return None
        if reference is None:
            reference = Statistics.of(self.features(self.study.converged[0], what).to(device))
        found = []
        for cell in self.cells:
            x = self.features(cell, what).to(device)
            spread = fid_interval(x, reference, _FID_RESAMPLES)
            found.append((fid(reference.to(x.device), Statistics.of(x)), spread.low, spread.high))
        return Column(MEASURES["fid"], *np.array(found).T)
