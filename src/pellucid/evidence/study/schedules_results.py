"""What a schedule study has found so far, read from its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import naming, read_json
from pellucid.core.schedule import Array
from pellucid.evidence.statistics import Estimate, between
from pellucid.evidence.study.kernel import CONFIG, MARKS, Records
from pellucid.evidence.study.schedules import IMAGES, RUNS, ScheduleCell, ScheduleStudyConfig
from pellucid.interop.atomic_files import read_lines
from pellucid.train.config import read
from pellucid.train.journal import FILE as LOG

Row = dict[str, Any]
_END_SHARE = 0.1  # of training: what is called its end where windows are averaged
_DRAWN_TIMES = 1 << 16  # times that show a distribution


@dataclass(frozen=True)
class TrainingPoint:
    """A figure of one point of training: of every seed, and the mean, with its interval where there is one seed and it
    is known."""

    images: float
    values: tuple[float, ...]
    estimate: Estimate

    @staticmethod
    def of(rows: Sequence[Row], metric: str) -> TrainingPoint:
        values = tuple(row[metric] for row in rows)
        estimate = Estimate(float(np.mean(values))) if len(rows) > 1 else _estimate_of(rows[0], metric)
        return TrainingPoint(rows[0]["images"], values, estimate)

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest seed, or the interval of a single one."""
        held = (*self.values, *(self.estimate.ends or ()), self.estimate.value)
        return min(held), max(held)

    def scaled(self, images: float, value: float) -> TrainingPoint:
        """In other units."""
        values = tuple(one * value for one in self.values)
        return TrainingPoint(self.images * images, values, self.estimate.times(value))

    def plain(self) -> dict[str, Any]:
        low, high = self.estimate.ends or (None, None)
        return {"images": self.images, "values": list(self.values), "low": low, "high": high}


@dataclass(frozen=True)
class ScheduleResults:
    """Finished or not: what is missing is left out. `logs` are the windows of each run, (schedule, seed)."""

    folder: Path
    study: ScheduleStudyConfig
    rows: tuple[Row, ...]
    logs: Mapping[tuple[str, int], list[Row]]

    @staticmethod
    def read(folder: Path) -> ScheduleResults:
        path = folder / CONFIG
        if not path.is_file():
            raise PellucidError(rule("folder of a study", f"one that holds {CONFIG}", str(folder)), "study-folder")
        held = read_json(path, code="study-folder")
        raw = {key: value for key, value in held.items() if value is not None and key not in MARKS}
        with naming(str(path)):
            study = read(ScheduleStudyConfig, raw, "config")
        rows = [_scored(row, folder) for row in Records.shared(folder, ScheduleCell._fields).rows]
        runs = product(study.schedules, study.seeds)
        logs = {run: _windows_of(folder / RUNS / f"{run[0]}-{run[1]}" / LOG) for run in runs}
        return ScheduleResults(folder, study, tuple(rows), logs)

    def image(self, schedule: str, step: int) -> Path:
        """A sheet of images of the first seed."""
        return self.folder / IMAGES / f"{schedule}-{self.study.seeds[0]}-{step:08d}.png"

    # --- scores

    def at(self, schedule: str, step: int) -> dict[int, Row]:
        """The main scores of a point by seed: those of the own EMA length and grid."""
        return {row["seed"]: row for row in self.scored(schedule, step, *self.study.own)}

    def scored(self, schedule: str, step: int, ema: float, grid: str) -> list[Row]:
        """The scores of a cell, whatever the seed."""
        wanted = {"schedule": schedule, "step": step, "ema": ema, "grid": grid}
        return [row for row in self.rows if all(row[key] == value for key, value in wanted.items())]

    def curve(self, schedule: str, metric: str) -> list[TrainingPoint]:
        """A metric over training. FID is that of `samples` images at every point: at another count it is another."""
        found = []
        for step in self.study.points:
            rows = list(self.at(schedule, step).values())
            more = metric == "fid" and any(row["samples"] > self.study.samples for row in rows)
            name = "fid_few" if more else metric
            rows = [row for row in rows if name in row]
            found += [TrainingPoint.of(rows, name)] if rows else []
        return found

    def final(self, schedule: str) -> TrainingPoint | None:
        """FID of `final_samples` images at the end, where these are more."""
        rows = list(self.at(schedule, self.study.points[-1]).values())
        return TrainingPoint.of(rows, "fid") if rows and self.study.samples < self.study.final_samples else None

    def variants(self, schedule: str) -> list[list[Row]]:
        """The scores of the last point, a list of seeds for each EMA length and grid; all of `samples` images."""
        cells = self.study.cells(schedule, self.study.seeds[0], self.study.points[-1])
        found = (self.scored(cell.schedule, cell.step, cell.ema, cell.grid) for cell in cells)
        return [rows for rows in found if rows]

    def last(self, *schedules: str) -> int | None:
        """The last point that all of these have reached with one seed at least that they share."""
        for step in reversed(self.study.points):
            if set.intersection(*(set(self.at(name, step)) for name in schedules)):
                return step
        return None

    def difference(self, a: str, b: str, metric: str) -> tuple[int, Estimate] | None:
        """`a` less `b` at the last point that both have reached, and that point."""
        step = self.last(a, b)
        if step is None:
            return None
        first, second = self.at(a, step), self.at(b, step)
        shared = sorted(set(first) & set(second))
        sides = ([_estimate_of(rows[seed], metric) for seed in shared] for rows in (first, second))
        return step, between(*sides)

    @property
    def done(self) -> tuple[int, int]:
        """Cells that are scored, and all of them."""
        s = self.study
        return len(self.rows), sum(len(s.cells(*place)) for place in product(s.schedules, s.seeds, s.points))

    # --- training

    def series(self, schedule: str, column: str) -> tuple[Array, Array]:
        """Images seen, and a column of the log as the mean of the seeds, where all of them have come."""
        found = [self.logs[schedule, seed] for seed in self.study.seeds if self.logs[schedule, seed]]
        if not found:
            return np.empty(0), np.empty(0)
        images = sorted(set.intersection(*({row["images"] for row in log} for log in found)))
        by_images = [{row["images"]: row[column] for row in log} for log in found]
        return np.array(images, float), np.array([np.mean([log[n] for log in by_images]) for n in images])

    def at_end(self, schedule: str, column: str) -> float:
        """A column's mean over the last tenth of training."""
        images, values = self.series(schedule, column)
        return float(values[images > (1 - _END_SHARE) * images[-1]].mean()) if len(values) else float("nan")

    def levels(self, schedule: str) -> tuple[Array, Array]:
        """λ, and the error there over the last tenth of training, of all seeds."""
        sums: dict[float, list[float]] = {}
        for seed in self.study.seeds:
            log = self.logs[schedule, seed]
            for row in (row for row in log if row["images"] > (1 - _END_SHARE) * log[-1]["images"]):
                for level in row["levels"]:
                    held = sums.setdefault(level["lam"], [0.0, 0.0])
                    held[0] += level["count"]
                    held[1] += level["count"] * level["mean"]
        lams = sorted(sums)
        return np.array(lams), np.array([sums[lam][1] / sums[lam][0] for lam in lams])

    def trained_at(self, schedule: str) -> Array:
        """λ of many training times, as the config draws them."""
        objective = self.study.task(schedule).objective.build()
        times = replace(objective.times, stratified=True)
        drawn = times.draw(_DRAWN_TIMES, objective.schedule, torch.Generator().manual_seed(0))
        with np.errstate(divide="ignore"):  # without signal λ is −∞
            return -np.log(objective.schedule.ratio_at(drawn))

    def seconds(self, schedule: str) -> float:
        """Of training, of all seeds, without the scores."""
        total = 0.0
        for seed in self.study.seeds:
            before = 0
            for row in self.logs[schedule, seed]:
                total += (row["images"] - before) / max(row["images_per_s"], 0.1)
                before = row["images"]
        return total


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scored(row: Row, folder: Path) -> Row:
    """A record, whose scores are numbers, and are there."""
    wanted = dict.fromkeys(("images", "samples", "fid", "kid", "precision", "recall"))
    for key, value in {**wanted, **row}.items():
        if key not in ScheduleCell._fields and not _is_number(value):
            raise PellucidError(rule(f"{key[:80]} in the records of {folder.name}", "a number", value), "study-records")
    return row


def _windows_of(path: Path) -> list[Row]:
    """The windows of a run's log that are whole, with the levels that are."""
    found = [row for row in read_lines(path) if _is_number(row.get("images")) and _is_number(row.get("images_per_s"))]
    for row in found:
        levels = [one for one in row["levels"] if isinstance(one, dict)] if isinstance(row.get("levels"), list) else []
        row["levels"] = [one for one in levels if all(_is_number(one.get(key)) for key in ("lam", "count", "mean"))]
    return found


def images_at_points(found: ScheduleResults) -> list[int]:
    """The images seen at each point."""
    batch = found.study.run_config(found.study.schedules[0], found.study.seeds[0]).batch
    return [step * batch for step in found.study.points]


def _estimate_of(row: Row, metric: str) -> Estimate:
    ends = [row.get(f"{metric}_{end}") for end in ("low", "high")]
    return Estimate(row[metric], *(() if None in ends else ends))
