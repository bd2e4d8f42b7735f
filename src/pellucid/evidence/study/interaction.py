"""Does the best sampler depend on how a model was trained: a sampler study of each of several models, and the change.

Every model is asked for the same images (seeds, prompts) by the same samplers at the same step counts, in a sampler
study of its own under `models/`. Models that share schedule, target and architecture are one group: runs of it.

Set-ups are compared at budgets of model calls: each with its most steps that fit. Distances are compared as logarithms
(a factor is a factor at 5 calls and at 50), other measures as they are. Two groups have different best set-ups for sure
where each one's own is better than the other's in its own group: over the models of a group by Student's t where there
are several, which holds for other training runs; else over resampled images, which holds for this one. Distances that
are no larger than three times what the converged run itself still moves are not resolved, and no change is sure there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.statistics import Array, Estimate, t_interval
from pellucid.evidence.study.kernel import ProgressBar, ShardNumber, Study
from pellucid.evidence.study.samplers import DecidingMeasure, Judges, SamplerStudy, SamplerStudyConfig
from pellucid.evidence.study.samplers_results import Column, Measure, gap_of
from pellucid.evidence.study.samplers_verdict import UNRESOLVED
from pellucid.evidence.study.setups import SamplerCell
from pellucid.evidence.study.subject import Subject, read_prompts
from pellucid.interop import source
from pellucid.train.config import parse, read

_MODELS = "models"  # the folder of the sampler studies
JUDGED = ("kid", "image_text", "right")  # measures of the images themselves, for which scorers are needed


@dataclass(frozen=True)
class InteractionStudyConfig:
    """`models` are what `pellucid.load` takes, with `names` where their folders have none that tells them apart; the
    rest is as in a sampler study. `by` is the measure that decides."""

    models: tuple[str, ...]
    samplers: tuple[str, ...]
    steps: tuple[int, ...]
    names: tuple[str, ...] = ()
    prompts: str | None = None  # a file, or scenes:N, for the models that take text
    seeds: int = 32  # images of each prompt; of a model that takes none, of all
    seed: int = 0
    guidance: str | None = None
    batch: int = 16
    converged: str = "dpmpp_3m:karras"
    converged_steps: int = 200
    path_steps: int = 500
    dtype: str | None = "float32"
    by: str = "distance"
    inception: str | None = None
    reference: str | None = None
    clip: str | None = None

    def __post_init__(self) -> None:
        """Refuses at once what the last model would refuse after hours of the first."""
        if not self.models:
            raise PellucidError(rule("models", "at least one", "none"), "study-list")
        if self.names and len(self.names) != len(self.models):
            raise PellucidError(rule("names", f"one per model, {len(self.models)}", len(self.names)), "study-names")
        if len(set(self.labels)) != len(self.models) or not all(
            re.fullmatch(r"(?!\.)[\w.-]+", one) for one in self.labels
        ):
            must = "different, of letters, digits, dots, dashes and underscores"
            raise PellucidError(rule("names", must, list(self.labels), "Give --names."), "study-names")
        if self.by not in get_args(DecidingMeasure):
            raise PellucidError(rule("by", "one of " + ", ".join(get_args(DecidingMeasure)), self.by), "by")
        read_prompts(self.prompts)
        self.of_model(self.models[0], "nothing")

    @staticmethod
    def load(path: str | Path) -> InteractionStudyConfig:
        return read(InteractionStudyConfig, parse(Path(path)), "config")

    @property
    def labels(self) -> tuple[str, ...]:
        return self.names or tuple(map(label_of, self.models))

    def of_model(self, model: str, asks: str) -> SamplerStudyConfig:
        """The sampler study of one model, with prompts only where it takes them."""
        shared = {field.name for field in fields(SamplerStudyConfig)} & vars(self).keys()
        settings = {name: getattr(self, name) for name in shared - {"prompts"}}
        return SamplerStudyConfig(
            model=model, **settings, prompts=() if asks == "nothing" else read_prompts(self.prompts)
        )


def label_of(model: str) -> str:
    """The folder that names a model: `linear-0` of `runs/linear-0/model`."""
    parts = [part for part in Path(model).parts if part not in ("/", ".", "..", "model")]
    return parts[-1] if parts else model


@dataclass(frozen=True)
class ModelResult:
    """One model of the study: how it was trained, what was run, and the measure that decides."""

    name: str
    schedule: str
    target: str
    architecture: str
    cells: tuple[SamplerCell, ...]
    column: Column
    floor: float  # how far the converged run still moves, in the same measure; NaN where it has no such

    @property
    def group(self) -> str:
        return f"{self.schedule}, {self.target}, {self.architecture}"


class InteractionCell(NamedTuple):
    name: str
    model: str


class InteractionStudy(Study[InteractionStudyConfig, InteractionCell]):
    """Each model is a sampler study, which resumes by itself and has the records; `pipes` are used by name in place of
    loading. Models, samplers and steps may be added."""

    kind = "interaction"
    cell = InteractionCell
    fixed = ()
    parts = "models"

    def __init__(
        self,
        config: InteractionStudyConfig,
        folder: Path,
        shard: ShardNumber = (0, 1),
        *,
        pipes: Mapping[str, Any] | None = None,
        device: str | None = None,
    ) -> None:
        self.pipes, self.device = pipes or {}, device
        self.models: list[ModelResult] = []
        super().__init__(config, folder, shard)

    def cells(self) -> list[InteractionCell]:
        return list(map(InteractionCell, self.config.labels, self.config.models))

    def work(self, bar: ProgressBar, stopped: Callable[[], bool]) -> None:
        """Model by model, each with a bar of its own."""
        missing = self.missing()
        for name, model in missing:
            if name not in self.pipes:
                source.locate(model)  # the last model's absence is known before the first one's hours
        self.claim()
        self.models = []
        for cell in missing:
            study = self.study_of(cell)
            study.run(bar, stopped)
            if stopped():
                return
            self.models.append(self.result_of(cell.name, study))

    def study_of(self, cell: InteractionCell) -> SamplerStudy:
        """The sampler study of a model. Its images are not scored where the distance decides and no scorer is
        named: that costs more than making them."""
        c, pipe = self.config, self.pipes.get(cell.name)
        subject = Subject.open(cell.model, dtype=c.dtype, device=self.device) if pipe is None else Subject.of(pipe)
        study = SamplerStudy(c.of_model(cell.model, subject.asks), self.folder / _MODELS / cell.name, subject)
        study.progress = cell.name
        if c.by in JUDGED or c.inception or c.reference or c.clip:
            study.judges = Judges.open(study, inception=c.inception, clip=c.clip, reference=c.reference)
        return study

    def result_of(self, name: str, study: SamplerStudy) -> ModelResult:
        figures, by = study.results(), self.config.by
        if by not in figures.columns:
            raise PellucidError(rule("by", f"measured for {name}: {', '.join(figures.columns)}", by), "by")
        pipe = study.subject.pipe
        holder = getattr(pipe, "components", None) or getattr(pipe, "peer", None)
        floor = figures.results.floor(by) if by in ("distance", "latent") else {}
        return ModelResult(
            name=name,
            schedule=study.subject.schedule.name,
            target=str(study.subject.target),
            architecture=type(getattr(holder, "network", pipe)).__name__,  # UNet, DiT, …
            cells=tuple(study.table),
            column=figures.columns[by],
            floor=next(iter(floor.values()), float("nan")),
        )

    def results(self) -> InteractionResults:
        return InteractionResults(self.models, self.config.steps)

    def report(self) -> InteractionResults:
        from pellucid.evidence.study import interaction_report

        found = self.results()
        interaction_report.write(self, found)
        return found


# --- Where the best sampler changes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class BestSetup:
    """The best set-up of one model at a budget: its figure, how often it came first in the resamples, and who else
    cannot be distinguished from it (the interval of the difference holds zero)."""

    model: str
    budget: int
    setup: str
    figure: Estimate
    first: float
    rivals: tuple[str, ...]
    resolved: bool = True

    def plain(self) -> dict[str, Any]:
        held = {"model": self.model, "budget": self.budget, "setup": self.setup, **self.figure.plain()}
        return held | {"first": self.first, "rivals": self.rivals, "resolved": self.resolved}


@dataclass(frozen=True)
class BestSetupChange:
    """Two groups at a budget whose best set-ups differ. `kept_there`: what the first group's best costs in the second;
    `kept_here`: what the second's costs in the first: a factor where the measure is compared so, else a difference."""

    budget: int
    here: str
    there: str
    best_here: str
    best_there: str
    kept_there: Estimate
    kept_here: Estimate
    sure: bool

    def plain(self) -> dict[str, Any]:
        gaps = {name: gap for name, gap in vars(self).items() if isinstance(gap, Estimate)}
        words = {"images": "pictures"}  # as files of studies name it
        return vars(self) | {name: gap.plain() | {"over": words.get(gap.over, gap.over)} for name, gap in gaps.items()}


class InteractionResults:
    """All models of a study side by side."""

    def __init__(self, seen: Sequence[ModelResult], budgets: Sequence[int]) -> None:
        self.seen, self.budgets = tuple(seen), tuple(sorted(budgets))
        self.measure: Measure = seen[0].column.measure
        self.scaled = self.measure.scaled
        self.nothing = 1.0 if self.scaled else 0.0  # the gap of two equals

    @cached_property
    def setups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.setup.text for one in self.seen for cell in one.cells))

    @cached_property
    def groups(self) -> dict[str, list[ModelResult]]:
        found: dict[str, list[ModelResult]] = {}
        for one in self.seen:
            found.setdefault(one.group, []).append(one)
        return found

    # --- one model ------------------------------------------------------------------------------------------------

    def cell(self, one: ModelResult, setup: str, budget: int) -> int | None:
        """The number of a set-up's cell with the most calls that fit into a budget."""
        fit = [i for i, c in enumerate(one.cells) if c.setup.text == setup and c.nfe <= budget]
        good = [i for i in fit if math.isfinite(one.column.values[i])]
        return max(good, key=lambda i: (one.cells[i].nfe, one.cells[i].steps)) if good else None

    def loss(self, one: ModelResult, setup: str, budget: int) -> Array:
        """(1 + R,): the estimate and its resamples, less is better, as they are compared; NaN where it has none."""
        i, table = self.cell(one, setup, budget), self.measure.loss(one.column.compared())
        return np.full(table.shape[1], math.nan) if i is None else table[i]

    def table(self, one: ModelResult, budget: int) -> Array:
        """(S, 1 + R) of all set-ups; what has no cell is infinitely bad."""
        held = np.stack([self.loss(one, setup, budget) for setup in self.setups])
        return np.where(np.isfinite(held), held, math.inf)

    def best(self, one: ModelResult, budget: int) -> BestSetup | None:
        held = self.table(one, budget)
        if not np.isfinite(held[:, 0]).any():
            return None
        i = int(held[:, 0].argmin())
        first = float((held[:, 1:].argmin(0) == i).mean())
        rivals = [
            setup
            for j, setup in enumerate(self.setups)
            if j != i and math.isfinite(held[j, 0]) and np.quantile(held[j, 1:] - held[i, 1:], 0.025) <= 0
        ]
        number = self.cell(one, self.setups[i], budget)
        assert number is not None
        resolved = self.resolved(one, self.setups[i], budget)
        figure = one.column.estimate(number)
        return BestSetup(one.name, budget, self.setups[i], figure, first, tuple(rivals), resolved)

    def resolved(self, one: ModelResult, setup: str, budget: int) -> bool:
        """Whether a distance is well above what the converged run still moves; other measures have no such bound."""
        i = self.cell(one, setup, budget)
        return i is None or not one.column.values[i] < UNRESOLVED * one.floor

    # --- groups ---------------------------------------------------------------------------------------------------

    def mean(self, group: str, setup: str, budget: int) -> float:
        """Of the losses of a group's models; infinite where one has none."""
        held = [float(self.loss(one, setup, budget)[0]) for one in self.groups[group]]
        return float(np.mean(held)) if all(map(math.isfinite, held)) else math.inf

    def best_of(self, group: str, budget: int) -> str | None:
        means = {setup: self.mean(group, setup, budget) for setup in self.setups}
        name = min(means, key=means.__getitem__)
        return name if math.isfinite(means[name]) else None

    def gap(self, group: str, setup: str, other: str, budget: int) -> Estimate:
        """How much worse a set-up is than another in a group."""
        apart = [self.loss(one, setup, budget) - self.loss(one, other, budget) for one in self.groups[group]]
        if len(apart) > 1:
            value, half = t_interval([float(held[0]) for held in apart])
            found = Estimate(value, value - half, value + half, "models", len(apart))
        else:
            found = gap_of(apart[0])
        return found.map(math.exp) if self.scaled else found

    def changes(self) -> list[BestSetupChange]:
        """Every pair of groups at every budget whose best set-ups differ."""
        found = []
        for budget in self.budgets:
            for here, there in combinations(self.groups, 2):
                a, b = self.best_of(here, budget), self.best_of(there, budget)
                if a is None or b is None or a == b:
                    continue
                if not all(math.isfinite(self.mean(group, s, budget)) for group in (here, there) for s in (a, b)):
                    continue
                kept_there, kept_here = self.gap(there, a, b, budget), self.gap(here, b, a, budget)
                clear = all(
                    self.resolved(one, s, budget) for g in (here, there) for one in self.groups[g] for s in (a, b)
                )
                sure = clear and kept_there.low > self.nothing and kept_here.low > self.nothing
                found.append(BestSetupChange(budget, here, there, a, b, kept_there, kept_here, sure))
        return found

    def spreads(self, budget: int) -> tuple[float, float, float] | None:
        """How much of the losses (group × set-up) is the set-up's, the group's, and their interaction's: root mean
        squares of the two-way table. None where groups share fewer than two set-ups."""
        table = np.array([[self.mean(group, setup, budget) for setup in self.setups] for group in self.groups])
        kept = table[:, np.isfinite(table).all(0)]
        if kept.shape[0] < 2 or kept.shape[1] < 2:
            return None
        mean, rows, columns = kept.mean(), kept.mean(1, keepdims=True), kept.mean(0, keepdims=True)
        parts = (columns - mean, rows - mean, kept - rows - columns + mean)
        found = [float(np.sqrt((part**2).mean())) for part in parts]
        return tuple(math.exp(v) if self.scaled else v for v in found)  # type: ignore[return-value]
