"""Which training schedule is better, and by more than chance: the same run under each, scored on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import naming, typed
from pellucid.evidence.metrics.fid import Statistics, frechet, square_root, weighted
from pellucid.evidence.metrics.images import Pixels
from pellucid.evidence.metrics.inception import Inception, features, load_inception, to_bytes
from pellucid.evidence.metrics.kid import kid_exact, kid_interval
from pellucid.evidence.metrics.precision_recall import precision_recall
from pellucid.evidence.metrics.score import measure_cached
from pellucid.evidence.statistics import Estimate, draws, reflected
from pellucid.evidence.study.kernel import ShardNumber, Study
from pellucid.interop.atomic_files import put
from pellucid.train.config import TrainConfig, chosen, counts, parse, read, to_plain
from pellucid.train.denoiser import DenoiserConfig, DenoiserTask
from pellucid.train.journal import sheet
from pellucid.train.kinds import TASKS
from pellucid.train.ranks import Ranks
from pellucid.train.trainer import Trainer

if TYPE_CHECKING:
    from pellucid.evidence.study.schedules_results import ScheduleResults

# --- The judge ------------------------------------------------------------------------------------------------------

_KID_RESAMPLES = 200
_INCEPTION_BATCH = 256  # images in an Inception: 4 GB of activations
_FEWEST_IMAGES = 4  # images that are scored: a radius needs three neighbours


@dataclass(frozen=True)
class TrainingJudge:
    """FID against all of the reference; KID, precision and recall against `some` of it (≤ neighbours, 2048)."""

    network: Inception
    statistics: Statistics
    root: Tensor  # of the covariance: the dear part of an FID, computed once
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

RUNS, IMAGES, _FEATURES = "runs", "pictures", "features"
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
        for name in ("schedules", "points", "seeds"):
            given = getattr(self, name)
            if not given or len(set(given)) != len(given):
                raise PellucidError(rule(name, "at least one, none of them twice", list(given)), "study-list")
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
        """The run of one cell: the same but for the schedule and the seed."""
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
        made = self.images(trainer, cell.ema, cell.grid, c.final_samples if last else c.samples)
        if main:
            path = self.folder / IMAGES / f"{trainer.folder.name}-{cell.step:08d}.png"
            path.parent.mkdir(exist_ok=True)
            put(path, Image.fromarray(sheet(made[:64].float() / 255)).save)
        found = self.judge.features(made)
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
            made = task.sampling(grid).batches(
                ask, task.shape, count, _SAMPLE_SEED, device=task.device, batch=at_once, dtype=dtype
            )
            return torch.cat([to_bytes(batch.add(1).div(2)) for batch in made])

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
            made = sampling.last_calls(ask, x0, _SAMPLE_SEED, batch=at_once, dtype=_half_of(trainer))
            return torch.cat([to_bytes(batch.add(1).div(2)) for batch in made])

    def results(self) -> ScheduleResults:
        from pellucid.evidence.study.schedules_results import ScheduleResults

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
