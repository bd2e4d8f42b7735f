"""What follows from the figures of a sampler study: fronts, the knee, the ranking, one recommendation, and doubts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.metrics.fid import FEW, Statistics
from pellucid.evidence.metrics.images import open_images
from pellucid.evidence.metrics.score import measure_cached
from pellucid.evidence.report.charts import number_text
from pellucid.evidence.statistics import Array, Estimate, Knee, front, knee_of
from pellucid.evidence.study.samplers import ClipScorer, InceptionScorer, Judges, SamplerStudy
from pellucid.evidence.study.samplers_results import (
    RESAMPLES,
    Column,
    Latency,
    LatencyClock,
    Measure,
    SamplerResults,
    gap_of,
)
from pellucid.evidence.study.setups import SamplerCell
from pellucid.pipeline.pipeline import Pipeline

# --- The recommendation ---------------------------------------------------------------------------------------------

_POINTS = 65  # of the common range of model calls at which samplers are compared
_TIE = 1e-4  # a part of a figure: samplers that make the same images differ by less
_TIE_OF_DISTANCES = 5e-3  # on a GPU by up to 3e-3, since rounding moves some images far


@dataclass(frozen=True)
class SamplerRank:
    """A sampler over the whole range of model calls that all have: its mean figure, how often it came first in the
    resamples, and how many times worse than the first it is (the difference, where less is not better)."""

    sampler: str
    value: float
    first: float
    behind: Estimate


@dataclass(frozen=True)
class Verdict:
    """Fronts are cells by number, cheapest first. `knee` is the cell to use: a knee, or (not `found`) the best
    of the asked. `sentence` is the recommendation, `words` its command, `call` the same for a pipeline's call."""

    by: str
    by_calls: list[int]
    by_seconds: list[int]
    knee: Knee | None
    knee_seconds: Knee | None
    ranking: list[SamplerRank]
    sentence: str
    words: str
    call: dict[str, Any] = field(default_factory=dict)
    comparison: str = ""  # who comes first over the whole range, and how given plans compare at their calls

    def place(self, cell: int) -> str:
        """'knee', 'front' or nothing, for the table."""
        if self.knee is not None and self.knee.found and cell == self.knee.cell:
            return "knee"
        return "front" if cell in self.by_calls else ""


def verdict(
    cells: list[SamplerCell], column: Column, latencies: list[Latency], guidance: Any, start: str | None
) -> Verdict:
    """`start` begins the command to paste: the model and its prompt; None for what has no name to load by."""
    measure, drawn = column.measure, column.drawn
    assert drawn is not None
    calls = np.array([cell.nfe for cell in cells], float)
    seconds = np.array([one.estimate.value for one in latencies])
    part = _TIE_OF_DISTANCES if measure.scaled else _TIE
    loss, losses = (_tied(measure.loss(values), part) for values in (column.values, drawn))
    count = losses.shape[1]
    times = np.stack([one.drawn(count, seed) for seed, one in enumerate(latencies)])
    knee = knee_of(calls, loss, losses)
    timed = bool(np.isfinite(seconds).all())
    pick = None if knee is None else cells[knee.cell]
    scale = "" if guidance is None else f' --guidance "{guidance}"'
    order = ranking(cells, column)
    return Verdict(
        by=measure.name,
        by_calls=front(calls, loss),
        by_seconds=front(seconds, loss) if timed else [],
        knee=knee,
        knee_seconds=knee_of(seconds, loss, np.stack([times, losses])) if timed else None,
        ranking=order,
        sentence=_recommendation_of(cells, column, latencies, knee),
        words="" if pick is None or start is None else f"pellucid sample {start} {pick.setup.words(pick.steps)}{scale}",
        call={} if pick is None else pick.asks() | ({} if guidance is None else {"guidance": guidance}),
        comparison=" ".join(filter(None, [comparison_of(order, column, pick), *_of_plans(cells, column)])),
    )


def _tied(losses: Array, part: float) -> Array:
    """(C, …): what differs by rounding alone is equal, and of equals the first is taken."""
    found = losses.copy()
    with np.errstate(invalid="ignore"):
        for i, j in combinations(range(len(found)), 2):
            found[j] = np.where(np.abs(found[j] - found[i]) <= part * np.abs(found[i]), found[i], found[j])
    return found


def _recommendation_of(cells: list[SamplerCell], column: Column, latencies: list[Latency], knee: Knee | None) -> str:
    """What to use, what it costs, what it gives, and how sure the knee is, or that none was found."""
    if knee is None:
        return "No sampler can be recommended: no cell has finite figures."
    cell, measure, i = cells[knee.cell], column.measure, knee.cell
    seconds = latencies[i].estimate.value
    cost = f"{cell.nfe} model calls" + (f", {number_text(seconds, 3)} s per image," if np.isfinite(seconds) else "")
    figure = with_interval(column, i)
    gives = {
        "distance": f"leave it {figure} RMSE from the converged image",
        "latent": f"leave it {figure} RMSE from the converged latents",
    }.get(measure.name, f"give {measure.amount(figure)}")
    steps = f"with {cell.steps} steps" if cell.setup.file is None else "as it is"
    return f"Use {cell.setup.label} {steps}: {cost} {gives}{_about_knee(knee)}."


def _about_knee(knee: Knee) -> str:
    """Where the knee is, and what more calls bring; or that none was found."""
    cost = knee.cost
    if knee.beyond == "more":
        return (
            f", the best of those measured. No knee was found: at {cost.value:g} calls, the most that were measured, "
            "images still improve. Measure more steps"
        )
    if knee.beyond == "unknown":
        return f", the best of those measured. No knee can be found from {cost.value:g} calls alone: measure more steps"
    span = f"{cost.low:g}" if cost.low == cost.high else f"{cost.low:g} to {cost.high:g}"
    less = "a doubling of the calls gains less than it does on the average of the range"
    more = less if knee.beyond == "less" else "more calls gained nothing"
    return f", at the knee of the front (in 95 % of resamples at {span} calls), beyond which {more}"


def with_interval(column: Column, i: int) -> str:
    """'0.0123 (0.0119 to 0.0127)'"""
    return column.shown(i).words(three_digits)


def three_digits(value: float) -> str:
    return number_text(value, 3)


# --- who comes first -------------------------------------------------------------------------------------------


def ranking(cells: list[SamplerCell], column: Column) -> list[SamplerRank]:
    """Samplers by their mean over the range of model calls that all of them cover, in equal parts of its logarithm.

    Distances are averaged as logarithms, so that a factor counts the same at 5 calls and at 100. Samplers with one
    step count, such as plans, have no range: `_of_plans` compares these at their own calls.
    """
    finite = np.isfinite(column.values)
    groups = {text: held for text, held in by_sampler(cells).items() if len(held) > 1 and finite[held].all()}
    if not groups:
        return []
    low = max(cells[held[0]].nfe for held in groups.values())
    high = min(cells[held[-1]].nfe for held in groups.values())
    if low > high:
        return []
    at = np.linspace(np.log(low), np.log(high), _POINTS)
    table = column.compared()
    means = {text: _over_range(at, np.log([cells[i].nfe for i in own]), table[own]) for text, own in groups.items()}
    return _ranked_by_loss(means, column.measure)


def by_sampler(cells: list[SamplerCell]) -> dict[str, list[int]]:
    """The cells of each sampler by number, cheapest first."""
    held: dict[str, list[int]] = {}
    for i, cell in enumerate(cells):
        held.setdefault(cell.setup.label, []).append(i)
    return {label: sorted(own, key=lambda i: cells[i].nfe) for label, own in held.items()}


def _over_range(at: Array, calls: Array, table: Array) -> Array:
    """The mean of each column of a table (steps, R) over places between its calls."""
    found = np.stack([np.interp(at, calls, table[:, r]) for r in range(table.shape[1])])
    return np.asarray(found.mean(1), float)


def _ranked_by_loss(means: dict[str, Array], measure: Measure) -> list[SamplerRank]:
    """The first comes first; of samplers that differ by rounding alone, the one that was named first."""
    scaled, table = measure.scaled, np.stack(list(means.values()))  # (S, 1 + R)
    table = measure.loss(np.log(_tied(np.exp(table), _TIE_OF_DISTANCES)) if scaled else _tied(table, _TIE))
    order = np.argsort(table[:, 0], kind="stable")
    table, texts = table[order], [list(means)[i] for i in order]
    first = np.bincount(table[:, 1:].argmin(0), minlength=len(texts)) / (table.shape[1] - 1)
    found = []
    for i, text in enumerate(texts):
        apart = table[i] - table[0]
        gap = (apart[0] + 0.0, *np.quantile(apart[1:], [0.025, 0.975]))
        behind = Estimate(*(float(np.exp(g) if scaled else g) for g in gap))
        value = float(np.exp(means[text][0]) if scaled else means[text][0])
        found.append(SamplerRank(text, value, float(first[i]), behind))
    return found


def comparison_of(found: list[SamplerRank], column: Column, pick: SamplerCell | None = None) -> str:
    """Who is first over the whole range, and by how much; and where that is not `pick`, why `pick` is to be used."""
    if len(found) < 2:
        return ""
    least = found[0].behind.value
    alike = [one for one in found if one.behind == Estimate(least, least, least)]  # in every resample too
    rest = [one for one in found if one not in alike]
    names = [one.sampler for one in alike]
    if len(alike) > 1:
        lead = f"{', '.join(names[:-1])} and {names[-1]} come first over the whole range, with the same figures"
    else:
        lead = f"{names[0]} comes first over the whole range (in {100 * alike[0].first:.0f} % of resamples)"
    if rest:
        behind = rest[0].behind
        sure = "" if behind.low > (1.0 if column.measure.scaled else 0.0) else "; they are not distinguishable"
        lead += f", then {rest[0].sampler}, {_gap_words(column, behind)}{sure}"
    if pick is not None and pick.setup.label not in names:
        lead += f". With {pick.nfe} calls or fewer nothing that was asked is better than {pick.setup.label}"
    return f"{lead}."


def _gap_words(column: Column, behind: Estimate) -> str:
    if column.measure.scaled:
        return f"whose distance is {behind.words('{:.2f}'.format)} times as large"
    return "behind by " + column.measure.amount(behind.times(column.measure.scale).words(number_text))


def _of_plans(cells: list[SamplerCell], column: Column) -> list[str]:
    """Each plan that was given as a file, beside the best of the samplers at its own number of calls."""
    return [words for i, cell in enumerate(cells) if cell.setup.file and (words := _of_plan(i, cells, column))]


def _of_plan(i: int, cells: list[SamplerCell], column: Column) -> str:
    label, nfe, scaled, table = cells[i].setup.label, cells[i].nfe, column.measure.scaled, column.compared()
    others = {}
    for text, held in by_sampler(cells).items():
        calls = [cells[j].nfe for j in held]
        if cells[held[0]].setup.file is None and calls[0] <= nfe <= calls[-1] and np.isfinite(table[held, 0]).all():
            others[text] = _over_range(np.log([nfe]), np.log(calls), table[held])
    if not others or not np.isfinite(table[i, 0]):
        return f"{label}: no other sampler was measured at {nfe} calls to compare it with."
    sign = 1.0 if column.measure.less else -1.0
    least = min(sign * held[0] for held in others.values())
    best = next(text for text, held in others.items() if sign * held[0] <= least + _TIE_OF_DISTANCES * scaled)
    behind = gap_of(sign * (table[i] - others[best]))
    if scaled:
        gap = f"{behind.map(math.exp).words('{:.2f}'.format)} times that of"
    else:
        gap = column.measure.amount(behind.times(column.measure.scale).words(number_text)) + " behind"
    sure = "" if behind.significant else "; they are not distinguishable"
    figure = with_interval(column, i)
    return f"{label}: {figure} with {nfe} calls, {gap} {best}, the best of the samplers at as many calls{sure}."


# --- All figures of a study -----------------------------------------------------------------------------------------

_SAME_SAMPLER = (
    1e-2  # distances that agree to this part in the median are those of one sampler; rounding moves some far
)
UNRESOLVED = 3.0  # times what the converged run still moves: a smaller distance is not resolved


class SamplerFigures:
    """The figures of a study, computed on demand."""

    def __init__(self, study: SamplerStudy, judges: Judges, resamples: int = RESAMPLES) -> None:
        self.study, self.judges, self.cells = study, judges, study.table
        self.results = SamplerResults(study, resamples)
        if not self.results.firsts:
            raise PellucidError(rule("study", "of at least one complete batch", "none"), "study-empty")
        self.clock = LatencyClock(study)

    @cached_property
    def latencies(self) -> list[Latency]:
        return [self.clock.of(cell) for cell in self.cells]

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Every measure that can be taken, the distances first."""
        found = {name: self.results.means(name, "pictures", name) for name in ("distance", "latent")}
        for scorer in self.judges.scorers:
            if not self.results.scored(scorer.what):
                continue
            if isinstance(scorer, InceptionScorer):
                found |= self.inception_columns(scorer)
            elif isinstance(scorer, ClipScorer):
                found["image_text"] = self.results.means("image_text", scorer.what, "cosines", 100.0)
                if self.judges.inception is None and self.results.count > 1:
                    found["kid"] = self.results.kid(scorer.what, None, self.study.subject.device)
            else:
                found["right"] = self.results.right()
        return found

    def inception_columns(self, scorer: InceptionScorer) -> dict[str, Column]:
        if self.results.count < 2:
            return {}
        (features, statistics), device, found = self.reference, self.study.subject.device, {}
        if features is not None or self.judges.reference is None:
            found["kid"] = self.results.kid(scorer.what, features, device)
        fid = self.results.fid(scorer.what, statistics, device)
        return found | ({} if fid is None else {"fid": fid})

    @cached_property
    def reference(self) -> tuple[Tensor | None, Statistics | None]:
        """Features and statistics of the reference images, where there are some: computed once for the folder."""
        if self.judges.reference is None:
            return None, None
        images = open_images(self.judges.reference)
        if isinstance(images, Statistics):
            return None, images
        assert self.judges.inception is not None
        held = measure_cached(images, self.judges.inception, self.study.folder / "features")
        return held.features, held.statistics

    @cached_property
    def main(self) -> Column:
        """The measure that decides."""
        by = self.study.config.by
        if by not in self.columns:
            raise PellucidError(rule("--by", f"measured: {', '.join(self.columns)}", by), "by")
        return self.columns[by]

    @cached_property
    def verdict(self) -> Verdict:
        config = self.study.config
        condition = {"prompt": ' "…"', "label": " --label …", "nothing": ""}[self.study.subject.asks]
        start = config.model + condition if isinstance(self.study.subject.pipe, Pipeline) else None
        return verdict(self.cells, self.main, self.latencies, config.guidance, start)

    # --- what a reader must know -----------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        unit = "prompts" if self.results.by_prompt else "images"
        intervals = (
            f"Intervals hold 95 % of {self.results.resamples:,} resamples in which {unit} were drawn again, the same "
            "ones for every cell: differences between cells are surer than their intervals. They say nothing of other "
            "models."
        )
        found = [intervals, *self.about_converged(), *self.about_noise(), *self.about_kid(), *self.about_twins()]
        if old := len(self.study.files.unchecked):
            found.append(f"{old} files were written by an older version without digests: they were read unchecked.")
        found += [f"{name} is left out: {why}." for name, why in self.judges.reasons.items()]
        broken = [c.key for c, v in zip(self.cells, self.columns["distance"].values, strict=True) if not np.isfinite(v)]
        found += [f"{key} made images that are not finite; it is on no front." for key in broken]
        return found

    def about_converged(self) -> list[str]:
        """Each converged run: how far it still moved when its steps were doubled, in latents, which nothing rounds."""
        found = []
        for key, floor in self.results.floor("latent").items():
            words = (
                f"{key}: its latents moved by {number_text(floor, 3)} RMSE when its steps were doubled to that many."
            )
            own, near = self.unresolved(key, floor)
            if near:
                words += (
                    f" {len(near)} of {len(own)} distances to it are below {UNRESOLVED:g} times that: not resolved."
                )
            found.append(words)
        return found

    def unresolved(self, key: str, floor: float) -> tuple[list[int], list[int]]:
        """The cells that are compared with a converged run, and those of them that cannot be distinguished from it."""
        own = [i for i, cell in enumerate(self.cells) if cell.against == key]
        return own, [i for i in own if self.columns["latent"].values[i] < UNRESOLVED * floor]

    def doubts(self) -> list[str]:
        """Why the recommendation may be wrong: what it was measured with is not converged."""
        if not self.main.measure.scaled:
            return []
        found = []
        for cell in self.study.converged:
            floor = self.results.floor("latent").get(cell.key, 0.0)
            own, near = self.unresolved(cell.key, floor)
            if 2 * len(near) > len(own):
                steps = "--path-steps" if cell.stochastic else "--converged-steps"
                found.append(
                    f"Doubtful: {cell.setup.text} with {cell.steps} steps, which stands for the converged images, is "
                    f"not converged: {len(near)} of {len(own)} distances to it are not resolved. Give more {steps}."
                )
        return found

    def about_noise(self) -> list[str]:
        noisy = dict.fromkeys(c.setup.label for c in self.cells if c.stochastic)
        words = (
            f"{', '.join(noisy)}: stochastic. Their distances are to their own converged image on the same Brownian "
            "path, which is another image than the deterministic samplers' one."
        )
        return [words] if noisy else []

    def about_twins(self) -> list[str]:
        """Samplers that are one and the same under two names: in a chart one line hides the other."""
        kept: list[tuple[list[str], list[Array]]] = []
        for text, own in by_sampler(self.cells).items():
            far = [self.results.per_image(self.cells[i], "pictures", "latent") for i in sorted(own)]
            same = (held for held, other in kept if len(far) == len(other) and all(map(same_sampler, far, other)))
            if (twin := next(same, None)) is not None:
                twin.append(text)
            else:
                kept.append(([text], far))
        words = "make the same images, except for rounding: in charts one line hides the other."
        return [f"{' and '.join(held)} {words}" for held, _ in kept if len(held) > 1]

    def about_kid(self) -> list[str]:
        if "kid" not in self.columns:
            return []
        against = self.judges.reference or "the converged images of the same prompts"
        eyes = "Inception" if self.judges.inception is not None else "CLIP embeddings"
        words = f"KID is on {eyes}, against {against}"
        paired = "" if self.judges.reference else "; an image is never compared with its own twin"
        few = "" if self.results.count >= FEW else f". FID needs {FEW:,} images; here are {self.results.count:,}"
        return [f"{words}{paired}{few}."]


def same_sampler(a: Array, b: Array) -> bool:
    """Whether the distances of two cells, image by image, are those of one sampler."""
    return len(a) == len(b) and bool(np.median(np.abs(a - b)) <= _SAME_SAMPLER * np.median(np.abs(a)))
