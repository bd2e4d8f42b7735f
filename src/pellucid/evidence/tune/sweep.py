"""Untuned samplers: the best of all at a budget of calls, and a short list to begin tuning from."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from pellucid.core import grid as grids
from pellucid.core import schedule as schedules
from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError, rule
from pellucid.core.plan import Plan
from pellucid.core.samplers import REGISTRY, Sampler
from pellucid.core.schedule import Schedule
from pellucid.evidence.study.kernel import Records, claim
from pellucid.evidence.tune.model import TuningModel
from pellucid.evidence.tune.table import Start, Table
from pellucid.evidence.tune.teacher import ErrorSummary, Truth, errors

KEYS = ("calls", "name", "pairs")
GRIDS = tuple(name for name in grids.names() if name not in ("explicit", "lcm"))
_ORDERS = (1, 2, 3, 4)
_SIFTED = 64  # pairs on which all are tried
KEPT = 8  # of them, the best by mean and by the mean of roots, on all pairs
_USUAL = "dpmpp_2m:karras"  # what people use; always measured on all pairs


def plan_within(start: Start, schedule: Schedule, target: str, calls: int) -> Plan:
    """The plan of the most steps that the budget allows; raises where there is none."""
    for steps in range(calls, 0, -1):
        plan = start.plan(schedule, target, steps)
        if plan.nfe <= calls:
            return plan
    raise PellucidError(rule("calls", f"enough for one step of {start.sampler}", calls), "calls")


@dataclass(frozen=True)
class SweepCell:
    """A candidate at a budget, on some number of pairs; `refused` says why it makes no plan there."""

    calls: int
    name: str
    pairs: int
    nfe: int = 0
    mean: float = float("inf")
    root: float = float("inf")
    summary: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


def candidates() -> list[Start]:
    """The deterministic part of the registry, at every order and on every grid."""
    return [
        Start(name, grid, options)
        for name, entry in REGISTRY.items()
        if entry.deterministic and entry.family not in ("inversion", "distilled")
        for options in _variants(entry)
        for grid in GRIDS
    ]


def _variants(entry: Sampler) -> Iterator[dict[str, Any]]:
    """Its orders and, where it has two, its algorithms; an order that it does not have is left out."""
    known = entry.options()
    orders = [{"order": order} for order in _ORDERS] if "order" in known else [{}]
    algorithms = [{"algorithm": name} for name in ("dpmsolver++", "dpmsolver")] if "algorithm" in known else [{}]
    for algorithm, order in product(algorithms, orders):
        options: dict[str, Any] = {**order, **algorithm}
        try:
            compile_plan(entry.name, steps=6, **options)
        except PellucidError as error:
            if error.code in ("order", "option"):
                continue
        yield options


@dataclass(frozen=True)
class Sweep:
    """Which of the candidates ends nearest to the truth of these pairs."""

    model: TuningModel
    truth: Truth
    at_once: int = 64
    folder: Path | None = None
    sifted: int = _SIFTED
    done: Callable[[], object] = lambda: None

    @property
    def text(self) -> str:
        """What a folder of records is for."""
        pairs = self.truth.pairs
        listed = json.dumps([pairs.seeds, pairs.prompts, pairs.labels]).encode()
        kept = {
            "model": self.model.fingerprint or self.model.name,
            "schedule": schedules.to_dict(self.model.schedule),
            "target": self.model.target,
            "guidance": self.model.guidance,
            "pairs": hashlib.sha256(listed).hexdigest()[:16],
            "truth": hashlib.sha256(self.truth.x0.numpy().tobytes()).hexdigest()[:16],
            "sifted": self.sifted,
        }
        return json.dumps(kept, indent=1, sort_keys=True)

    @cached_property
    def all(self) -> dict[str, Start]:
        return {one.text: one for one in candidates()}

    def best(self, calls: int, count: int = 1) -> list[SweepCell]:
        """The best cells at a budget, on all pairs, the least mean error first."""
        with self.records() as records:
            first = [self.cell(records, calls, name, self.sifted) for name in self.all]
            known = [cell for cell in first if not cell.refused]
            chosen = {cell.name for key in ("mean", "root") for cell in sorted(known, key=_ranked(key))[:KEPT]}
            chosen |= {_USUAL} & {cell.name for cell in known}
            measured = [self.cell(records, calls, name, len(self.truth)) for name in sorted(chosen)]
        return sorted(measured, key=_ranked("mean"))[: count or None]

    def usual(self, calls: int) -> SweepCell:
        """DPM++ 2M on Karras' grid."""
        with self.records() as records:
            return self.cell(records, calls, _USUAL, len(self.truth))

    def plan(self, cell: SweepCell) -> Plan:
        return plan_within(self.all[cell.name], self.model.schedule, self.model.target, cell.calls)

    @contextmanager
    def records(self) -> Iterator[Records]:
        """The folder's, or those of a folder that is thrown away."""
        if self.folder is not None:
            claim(self.folder, self.text)
            yield Records(self.folder, KEYS)
            return
        with tempfile.TemporaryDirectory() as place:
            yield Records(Path(place), KEYS)

    def cell(self, records: Records, calls: int, name: str, pairs: int) -> SweepCell:
        """A cell that is known, or measured now and kept."""
        count = min(pairs, len(self.truth))
        key = {"calls": calls, "name": name, "pairs": count}
        if not records.has(key):
            records.add({**key, **self.measured(calls, name, count)})
        self.done()
        return SweepCell(**records.by_name[records.name(key)])

    def measured(self, calls: int, name: str, count: int) -> dict[str, Any]:
        try:
            plan = plan_within(self.all[name], self.model.schedule, self.model.target, calls)
        except PellucidError as error:
            return {"refused": error.code}
        found = errors(plan, self.model, self.truth.first(count), self.at_once)
        if not bool(found.isfinite().all()):
            return {"refused": "not-finite", "nfe": plan.nfe}
        summary = ErrorSummary.of(found).to_dict()
        return {"nfe": plan.nfe, "mean": summary["mean"], "root": float(found.sqrt().mean()), "summary": summary}


def _ranked(key: str) -> Callable[[SweepCell], tuple[float, str]]:
    return lambda cell: (getattr(cell, key), cell.name)


# --- starts to tune from ------------------------------------------------------------------------------------------

# Of every basis one or two. UniPC's rows have a corrector, which the others get from the tuning.
SAMPLERS = ("unipc-3", "dpmpp_2m", "dpmpp_3m", "deis-3", "ipndm-3", "lms-3")
SURE = "unipc"  # is among them wherever it can be
_TRIED_PAIRS = 16  # pairs
SHORTLIST = 4


def shortlist(
    model: TuningModel, truth: Truth, steps: int, at_once: int, done: Callable[[], object] = lambda: None
) -> list[Start]:
    """The best grid of each sampler by the mean of √error on a few pairs, the best samplers first."""
    few, best = truth.first(_TRIED_PAIRS), []
    for name in SAMPLERS:
        found = []
        for grid in GRIDS:
            start = Start.parse(f"{name}:{grid}")
            root = trial(start, model, few, steps, at_once)
            if root is not None:
                found.append((root, start.text))
            done()
        best += [min(found)] if found else []
    if not best:
        raise PellucidError(rule("--model", "one that some start can run", model.name, "Give --start."), "start")
    ranked = [Start.parse(text) for _, text in sorted(best)]
    sure = [start for start in ranked if start.sampler == SURE]
    kept = ranked[:SHORTLIST]
    return kept if not sure or sure[0] in kept else [*kept[:-1], sure[0]]


def trial(start: Start, model: TuningModel, truth: Truth, steps: int, at_once: int) -> float | None:
    """The mean of √error of a start; None where it makes no table here, or ends nowhere."""
    try:
        table = Table.of(start, model.schedule, model.target, steps)
    except PellucidError:
        return None
    found = errors(table.plan, model, truth, at_once)
    return float(found.sqrt().mean()) if bool(found.isfinite().all()) else None
