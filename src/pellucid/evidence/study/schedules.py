"""Which training schedule is better, and by more than chance: the same run under each, scored on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import naming, read_json, typed
from pellucid.core.schedule import Array
from pellucid.evidence.metrics.fid import Statistics, frechet, square_root, weighted
from pellucid.evidence.metrics.images import Pixels
from pellucid.evidence.metrics.inception import Inception, features, load_inception, to_bytes
from pellucid.evidence.metrics.kid import kid_exact, kid_interval
from pellucid.evidence.metrics.precision_recall import precision_recall
from pellucid.evidence.metrics.score import measure_cached
from pellucid.evidence.statistics import Estimate, between, draws, reflected
from pellucid.evidence.study.kernel import CONFIG, MARKS, Records, ShardNumber, Study, check_lists
from pellucid.interop.atomic_files import put, read_lines
from pellucid.train.config import TrainConfig, chosen, counts, parse, read, to_plain
from pellucid.train.denoiser import DenoiserConfig, DenoiserTask
from pellucid.train.journal import FILE as LOG
from pellucid.train.journal import sheet
from pellucid.train.kinds import TASKS
from pellucid.train.ranks import Ranks
from pellucid.train.trainer import Trainer

# --- The judge ------------------------------------------------------------------------------------------------------

_KID_RESAMPLES = 200
_INCEPTION_BATCH = 256  # images in an Inception: 4 GB of activations
_FEWEST_IMAGES = 4  # images that are scored: a radius needs three neighbours


@dataclass(frozen=True)
class TrainingJudge:
    """FID against all of the reference; KID, precision and recall against `some` of it (≤ neighbours, 2048)."""

    network: Inception
    statistics: Statistics
    root: Tensor  # of the covariance: the expensive part of an FID, computed once
    some: Tensor

    @staticmethod
    def of(images: Tensor, network: Inception, count: int, neighbours: int, cache: Path) -> TrainingJudge:
        """Knows `count` of the images (N, 3, H, W) uint8, or all of them where there are fewer; what Inception says of
        them is kept in the folder `cache`."""
        chosen = _shuffled(len(images))[:count].to(images.device)
        seen = measure_cached(Pixels(images[chosen]), network, cache, _INCEPTION_BATCH)
        assert seen.features is not None
        root = square_root(seen.statistics.covariance)
        return TrainingJudge(network, seen.statistics, root, seen.features[:neighbours].clone())

    def features(self, images: Tensor) -> Tensor:
        return features(images, self.network, _INCEPTION_BATCH)

    def score(self, found: Tensor) -> dict[str, Any]:
        """Of the features of images, (N, 2048)."""
        some = found[: len(self.some)]
        closeness = precision_recall(some, self.some)
        kid = kid_interval(some, self.some, resamples=_KID_RESAMPLES, value=self.kid(found))
        figures = {"fid": self.fid(found), "kid": kid.value, "kid_low": kid.low, "kid_high": kid.high}
        return {"samples": len(found), **figures, "precision": closeness.precision, "recall": closeness.recall}

    def fid(self, found: Tensor) -> float:
        return frechet(self.statistics, Statistics.of(found), self.root)

    def kid(self, found: Tensor) -> float:
        return kid_exact(found[: len(self.some)], self.some)

    def fid_interval(self, found: Tensor, estimate: float, resamples: int) -> Estimate:
        """As `metrics.fid.fid_interval`, with the root that is known."""
        rows = draws(len(found), resamples).to(found.device)
        values = [frechet(self.statistics, weighted(found, row), self.root) for row in rows]
        return reflected(torch.tensor(values, dtype=torch.float64), estimate)


def _shuffled(count: int) -> Tensor:
    """The order in which training images are known: the first are compared with, and always the same."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


# --- The study ------------------------------------------------------------------------------------------------------

RUNS, _IMAGES, _FEATURES = "runs", "pictures", "features"
_MAX_IMAGES, _CIFAR10_IMAGES = 1_000_000, 50_000  # images that are made, and that there are to compare with
_SAMPLE_SEED = 1234  # of every set of images: schedules start from the same noise
Say = Callable[[str], object]


class ScheduleCell(NamedTuple):
    schedule: str
    seed: int
    step: int
    ema: float
    grid: str


@dataclass(frozen=True)
class ScheduleStudyConfig:
    """`train` is a run as `pellucid train` takes it, without a schedule. Images are made and scored at each of
    `points` (steps), `samples` of them, and `final_samples` at the last; there also with the other grids and EMA
    lengths."""

    train: Mapping[str, Any]
    schedules: tuple[str, ...]
    points: tuple[int, ...]
    seeds: tuple[int, ...] = (0,)
    samples: int = 10_000
    final_samples: int = 50_000
    reference: int = 50_000  # training images that FID compares with
    neighbours: int = 10_000  # images of each side for KID, and for precision and recall
    batch: int = 1000  # images made at once
    resamples: int = 20  # of a FID's interval, at the last point
    grids: tuple[str, ...] = ()  # scored at the last point too, beside the config's own
    inception: str | None = None

    def __post_init__(self) -> None:
        """Everything that can be refused is refused here: not by the last schedule, after hours of the first."""
        counts(self, "samples", "final_samples", low=_FEWEST_IMAGES, high=_MAX_IMAGES)
        counts(self, "reference", "neighbours", low=_FEWEST_IMAGES, high=_CIFAR10_IMAGES)
        counts(self, "batch", low=1)
        counts(self, "resamples", low=2)
        check_lists(self, "schedules", "points", "seeds")
        if list(self.points) != sorted(self.points) or self.points[0] < 1:
            raise PellucidError(rule("points", "steps that grow", list(self.points)), "study-points")
        for schedule in self.schedules:
            task = self.task(schedule)
            objective, sampling = task.objective.build(), task.sampling
            process: dict[str, Any] = {"schedule": objective.schedule, "target": objective.target}
            for grid in (sampling.grid, *self.grids):
                compile_plan(sampling.sampler, **process, grid=grid, steps=sampling.steps)
        for seed in self.seeds:
            self.run_config(self.schedules[0], seed)

    @staticmethod
    def load(path: str | Path) -> ScheduleStudyConfig:
        with naming(Path(path).name):
            return read(ScheduleStudyConfig, parse(Path(path)), "config")

    def run_config(self, schedule: str, seed: int) -> TrainConfig:
        """The run of one cell: the same except for the schedule and the seed."""
        raw = json.loads(json.dumps(to_plain(self.train)))
        task = typed(Mapping[str, Any], raw.get("task", {}), "config.train.task")
        objective = typed(Mapping[str, Any], task.get("objective", {}), "config.train.task.objective")
        raw["task"] = {**task, "objective": objective}
        for table, key in ((objective, "schedule"), (raw, "seed"), (raw, "steps")):
            if key in table:
                raise PellucidError(rule(f"train.{key}", "left to the study", table[key]), "study-config")
        objective["schedule"] = {"name": schedule}
        config = read(TrainConfig, raw | {"seed": seed, "steps": self.points[-1]}, "config.train")
        if not config.ema:
            raise PellucidError(rule("train.ema", "at least one length", []), "study-config")
        if config.data.get("kind") != "cifar10":
            raise PellucidError(rule("train.data.kind", "cifar10", config.data.get("kind")), "study-config")
        return config

    def task(self, schedule: str) -> DenoiserConfig:
        """What is trained under a schedule."""
        found = chosen(self.run_config(schedule, self.seeds[0]).task, TASKS, "config.train.task")
        if not isinstance(found, DenoiserConfig) or found.condition != "none":
            must = "a denoiser without a condition"
            raise PellucidError(rule("train.task", must, self.train["task"].get("kind")), "study-config")
        return found

    @cached_property
    def own(self) -> tuple[float, str]:
        """The EMA length and the grid of the scores that are compared: the first length, the grid of the task."""
        return self.run_config(self.schedules[0], self.seeds[0]).ema[0], self.task(self.schedules[0]).sampling.grid

    def cells(self, schedule: str, seed: int, step: int) -> list[ScheduleCell]:
        """What is scored at a point: the own length and grid, and at the last point each of the others too."""
        ema, grid = self.own
        variants = [(ema, grid)]
        if step == self.points[-1]:
            variants += [(other, grid) for other in self.run_config(schedule, seed).ema[1:]]
            variants += [(ema, other) for other in self.grids if other != grid]
        return [ScheduleCell(schedule, seed, step, *variant) for variant in variants]


class ScheduleStudy(Study[ScheduleStudyConfig, ScheduleCell]):
    kind = "schedules"
    cell = ScheduleCell
    parts = "runs"

    def __init__(
        self,
        config: ScheduleStudyConfig,
        folder: Path,
        shard: ShardNumber = (0, 1),
        *,
        device: str | None = None,
        say: Say = print,
    ) -> None:
        super().__init__(config, folder, shard)
        self.say = say
        self.ranks = Ranks.join("ddp", device)
        if self.ranks.world > 1:
            raise PellucidError(rule("ranks of a study", "1", self.ranks.world), "study-ranks")
        self.trainer: Trainer | None = None  # of the run that is at work, trained until `step`
        self.step = 0
        self.inception: Inception | None = None
        self.judge: TrainingJudge | None = None

    def settings(self) -> dict[str, Any]:
        return dict(to_plain(self.config))

    def cells(self) -> Iterator[ScheduleCell]:
        c = self.config
        for seed, schedule, step in product(c.seeds, c.schedules, c.points):
            yield from c.cells(schedule, seed, step)

    def part(self, cell: ScheduleCell) -> tuple[str, int]:
        """A run trains from point to point."""
        return cell.schedule, cell.seed

    def make(self, cell: ScheduleCell) -> dict[str, Any]:
        """Trains until a point and scores it. The folder is only taken once data and Inception are there."""
        run = self.config.run_config(cell.schedule, cell.seed)
        folder = self.folder / RUNS / f"{cell.schedule}-{cell.seed}"
        if self.trainer is None or self.trainer.folder != folder:
            self.trainer, self.step = None, 0  # before another is made
            self.trainer = Trainer(run, folder, self.ranks, quiet=True)
        self.inception = self.inception or load_inception(self.config.inception, self.ranks.device)
        self.claim()
        if cell.step != self.step:
            self.train(self.trainer, cell.step)
            self.step = cell.step
        score = self.score(self.trainer, cell)
        self.say(f"  EMA {cell.ema:g}, {cell.grid}: FID {score['fid']:.2f}, KID {1e3 * score['kid']:.2f}e-3")
        return {"images": cell.step * run.batch, **score}

    def train(self, trainer: Trainer, step: int) -> None:
        at = trainer.checkpoints.latest() or 0
        if at > step:
            line = (
                f"records of {trainer.folder.name} at step {step} must be kept; they are lost, and it is at step {at}."
            )
            raise PellucidError(f"{line} Remove {trainer.folder} to run it again.", "study-records")
        started = time.perf_counter()
        trainer.run(until=step)
        self.say(f"{trainer.folder.name}: steps {at} to {step} in {time.perf_counter() - started:.1f} s")

    def score(self, trainer: Trainer, cell: ScheduleCell) -> dict[str, Any]:
        """Of images that are made for it. The last score of a run has more of them, and an interval of FID; `fid_few`
        is then that of as many as at the points before, to be compared with them."""
        c, main = self.config, (cell.ema, cell.grid) == self.config.own
        if self.judge is None:  # until now a process that shares the study may have seen the training images
            images = trainer.source.data.images  # type: ignore[union-attr]
            assert self.inception is not None
            self.say(f"features of {min(c.reference, len(images)):,} training images")
            self.judge = TrainingJudge.of(images, self.inception, c.reference, c.neighbours, self.folder / _FEATURES)
        last = main and cell.step == c.points[-1]
        samples = self.images(trainer, cell.ema, cell.grid, c.final_samples if last else c.samples)
        if main:
            path = self.folder / _IMAGES / f"{trainer.folder.name}-{cell.step:08d}.png"
            path.parent.mkdir(exist_ok=True)
            put(path, Image.fromarray(sheet(samples[:64].float() / 255)).save)
        found = self.judge.features(samples)
        score = self.judge.score(found)
        if last:
            spread = self.judge.fid_interval(found, score["fid"], c.resamples)
            score |= {"fid_low": spread.low, "fid_high": spread.high}
            if c.samples < c.final_samples:
                score["fid_few"] = self.judge.fid(found[: c.samples])
        denoised = self.last_calls(trainer, cell.ema, cell.grid) if cell.step == c.points[-1] else None
        if denoised is not None:
            score["kid_last_call"] = self.judge.kid(self.judge.features(denoised))
        return score

    def images(self, trainer: Trainer, ema: float, grid: str, count: int) -> Tensor:
        """(count, 3, H, W) uint8 from the running mean of one length."""
        task, at_once, dtype = _denoising(trainer), min(self.config.batch, count), _half_of(trainer)
        with _averaged(trainer, ema) as ask:
            batches = task.sampling(grid).batches(
                ask, task.shape, count, _SAMPLE_SEED, device=task.device, batch=at_once, dtype=dtype
            )
            return torch.cat([to_bytes(batch.add(1).div(2)) for batch in batches])

    def last_calls(self, trainer: Trainer, ema: float, grid: str) -> Tensor | None:
        """Training images, noised to the level of the last call and denoised by it: their KID is what the end of the
        grid costs. Others than the judge compares with; None where there are no others."""
        images, some = trainer.source.data.images, self.config.neighbours  # type: ignore[union-attr]
        chosen = _shuffled(len(images))[some : 2 * some].to(images.device)
        at_once = min(self.config.batch, len(chosen))
        if at_once < _FEWEST_IMAGES:
            return None
        sampling, x0 = _denoising(trainer).sampling(grid), images[chosen].float().div(127.5).sub(1)
        with _averaged(trainer, ema) as ask:
            batches = sampling.last_calls(ask, x0, _SAMPLE_SEED, batch=at_once, dtype=_half_of(trainer))
            return torch.cat([to_bytes(batch.add(1).div(2)) for batch in batches])

    def results(self) -> ScheduleResults:
        return ScheduleResults.read(self.folder)

    def report(self) -> ScheduleResults:
        from pellucid.evidence.study import schedules_report

        schedules_report.write(self.folder)
        return self.results()


@contextmanager
def _averaged(trainer: Trainer, ema: float) -> Iterator[Callable[..., Tensor]]:
    """The network with the running mean of one length in it, as images are made with it."""
    assert trainer.ema is not None
    network = trainer.network.eval()
    with trainer.ema.inside(ema):
        yield torch.compile(network, dynamic=False) if trainer.config.engine.compile else network
    network.train()


def _denoising(trainer: Trainer) -> DenoiserTask:
    assert isinstance(trainer.task, DenoiserTask)
    return trainer.task


def _half_of(trainer: Trainer) -> torch.dtype | None:
    return torch.bfloat16 if trainer.config.engine.dtype == "bf16" else None


# --- Results, read from the folder: what there is so far ------------------------------------------------------------

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
        return self.folder / _IMAGES / f"{schedule}-{self.study.seeds[0]}-{step:08d}.png"

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
