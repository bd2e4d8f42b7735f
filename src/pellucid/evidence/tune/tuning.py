"""Tuning from end to end: teacher, starts, heats, descent, judgement; a plan with its evidence inside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pellucid import __version__
from pellucid.core.errors import PellucidError, rule
from pellucid.core.plan import Plan
from pellucid.evidence.statistics import mean_interval
from pellucid.evidence.tune import model, table, teacher
from pellucid.evidence.tune import sweep as sweeps
from pellucid.evidence.tune.descent import Descent, Fit, TuningData, descend
from pellucid.evidence.tune.model import PairSets, TuningModel
from pellucid.evidence.tune.sweep import SAMPLERS, shortlist
from pellucid.evidence.tune.table import Start, Table
from pellucid.evidence.tune.teacher import ErrorSummary, Truth, errors

NAME = "tuned"
HEAT = 4  # a heat has one part in so many of the iterations
FINALISTS = 2  # of the starts go on after the heats
OBJECTIVE = "the mean over pairs of √(rms distance of x0 from the converged one)"
Stage = Callable[[str, int], AbstractContextManager[Callable[[], object]]]  # a bar: what, how many


@dataclass(frozen=True)
class TuningConfig:
    """What is asked. Pairs are numbered by their seeds: first those to tune on, then those watched, then the judges."""

    steps: int = 8
    descent: Descent = field(default_factory=Descent)
    pairs: int = 512
    watched: int | None = None  # half as many as are tuned on, and at most 512
    held_out: int = 512
    starts: tuple[Start, ...] = ()  # none: a short list of the best
    teacher: int = teacher.STEPS
    prompts: str | None = None  # a file, or `scenes`
    sweep: tuple[int, ...] = ()  # budgets of calls at which all that is untuned is measured too
    seed: int = 0

    def __post_init__(self) -> None:
        table.check_steps(self.steps)
        teacher.check_teacher_steps(self.teacher, self.steps)
        for words, count in (("--pairs", self.pairs), ("watched", self.counts[1]), ("--held-out", self.held_out)):
            model.check_count(words, count)
        sweeps.check_calls(self.sweep)
        for one in self.starts:
            one.check()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Pairs to tune on, watched ones, judges."""
        half = self.pairs // 2 if isinstance(self.pairs, int) else 0
        return (
            self.pairs,
            max(min(half, 512), model.FEWEST_PAIRS) if self.watched is None else self.watched,
            self.held_out,
        )


@dataclass(frozen=True)
class TuningResult:
    """The plan that was kept, its evidence in it, and the errors of the held-out pairs (N,)."""

    plan: Plan
    errors: torch.Tensor

    @property
    def evidence(self) -> dict[str, Any]:
        return self.plan.evidence


def quietly(what: str, count: int) -> AbstractContextManager[Callable[[], object]]:
    return nullcontext(lambda: None)


def tune(
    subject: TuningModel,
    asked: TuningConfig,
    stage: Stage = quietly,
    folder: Path | None = None,
    keep: Callable[[TuningResult], object] = lambda tuned: None,
) -> TuningResult:
    """Tunes a plan for a model. `folder` keeps what a sweep has measured; `keep` is given the plan as soon as it is
    there, and again with what a sweep has found, which may take longer than the tuning."""
    divided = divide(subject, asked)
    with stage("asking the teacher", sum(map(len, (divided.tune, divided.watch, divided.judge)))) as done:
        truths = [ask_teacher(subject, pairs, asked, done) for pairs in (divided.tune, divided.watch, divided.judge)]
    lesson, judge = TuningData(subject, truths[0], truths[1]), truths[2]
    fits = run_heats(lesson, asked, stage)
    best = run_finals(fits, lesson, asked, stage)
    plan, found, told = judged(best, fits, subject, judge, asked)
    told = {**about(subject, asked, divided, lesson), **told}
    tuned = TuningResult(replace(plan, evidence={"says": sentence(told), **told}), found)
    keep(tuned)
    if asked.sweep:
        told["untuned"] = sweep_rows(subject, judge, asked, found, stage, folder)
        tuned = replace(tuned, plan=replace(plan, evidence={"says": sentence(told), **told}))
        keep(tuned)
    return tuned


def divide(subject: TuningModel, asked: TuningConfig) -> PairSets:
    """The three sets of pairs; prompts for a model that takes them, and only for one."""
    counts = asked.counts
    if subject.takes_text != (asked.prompts is not None):
        must = "given for a model that takes text" if subject.takes_text else "left out: the model takes no text"
        raise PellucidError(rule("--prompts", must, asked.prompts), "prompts")
    texts = None if asked.prompts is None else model.read_prompts(asked.prompts, 2 * sum(counts), asked.seed)
    return model.make_sets(counts, asked.seed, texts, subject.classes)


def ask_teacher(subject: TuningModel, pairs: model.Pairs, asked: TuningConfig, done: Callable[[], object]) -> Truth:
    def more(count: int) -> None:
        for _ in range(count):
            done()

    truth = teacher.teach(subject, pairs, asked.teacher, asked.descent.at_once, more)
    if not bool(truth.x0.isfinite().all()):
        raise PellucidError(rule("the teacher's images", "finite", "others", "Is the model whole?"), "teacher")
    return truth


def run_heats(lesson: TuningData, asked: TuningConfig, stage: Stage) -> list[Fit]:
    """Every start a little way down; a single one waits for the descent itself."""
    subject, at_once = lesson.subject, asked.descent.at_once
    chosen = list(asked.starts)
    if not chosen:
        with stage("choosing starts", len(SAMPLERS) * len(sweeps.GRIDS)) as done:
            chosen = shortlist(subject, lesson.tune, asked.steps, at_once, done)
    tables = [Table.of(start, subject.schedule, subject.target, asked.steps) for start in chosen]
    fits = [Fit.of(table, lesson, at_once) for table in tables]
    short = replace(asked.descent, iterations=max(asked.descent.iterations // HEAT, 1))
    if len(fits) > 1:
        with stage("heats", len(fits) * short.iterations) as done:
            for fit in fits:
                descend(fit, lesson, short, done)
    return fits


def run_finals(fits: list[Fit], lesson: TuningData, asked: TuningConfig, stage: Stage) -> Fit:
    """The best of the heats all the way down; which of them is best after it."""
    finalists = sorted(fits, key=lambda fit: fit.best_root)[:FINALISTS]
    with stage("tuning", len(finalists) * asked.descent.iterations) as done:
        for fit in finalists:
            descend(fit, lesson, asked.descent, done)
    return min(finalists, key=lambda fit: fit.best_root)


def judged(
    best: Fit, fits: list[Fit], subject: TuningModel, judge: Truth, asked: TuningConfig
) -> tuple[Plan, torch.Tensor, dict[str, Any]]:
    """The tuned plan against its start and the best start, on pairs that nobody has seen; the better one is kept."""
    at_once = asked.descent.at_once
    first = min(fits, key=lambda fit: fit.start_error)
    tuned, own, other = best.plan, best.table.plan, first.table.plan
    found = {"tuned": errors(tuned, subject, judge, at_once), "start": errors(own, subject, judge, at_once)}
    found["best start"] = found["start"] if other is own else errors(other, subject, judge, at_once)
    plans = {"tuned": tuned, "start": own, "best start": other}
    kept = min(plans, key=lambda name: float(found[name].mean()))
    told = {
        "kept": kept,
        "start": best.table.start.text,
        "best_start": first.table.start.text,
        "starts": [
            {"start": fit.table.start.text, "watched": fit.start_error, "tuned": fit.best_error} for fit in fits
        ],
        "iterations": best.iterations,
        "watched": [[i, round(e, 9)] for i, e in best.looks],
        "held_out": {name.replace(" ", "_"): ErrorSummary.of(e).to_dict() for name, e in found.items()},
        "gain": gain(found["tuned"], found["best start"]),
    }
    plan = replace(plans[kept], name=NAME) if kept == "tuned" else plans[kept]
    return plan, found[kept], told


def gain(mine: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """How much less the mean error is, pair by pair, with its 95 % interval."""
    apart = (other - mine).double()
    interval = mean_interval(apart)
    return {"mean": float(apart.mean()), "low": interval.low, "high": interval.high}


def about(subject: TuningModel, asked: TuningConfig, divided: PairSets, lesson: TuningData) -> dict[str, Any]:
    """How the plan came to be."""
    return {
        "kind": "pellucid-tune",
        "pellucid": __version__,
        "model": subject.name,
        "model_hash": subject.fingerprint,
        "guidance": subject.guidance,
        "what": asked.descent.what,
        "steps": asked.steps,
        "objective": OBJECTIVE,
        "error": "rms distance of x0 from the teacher's of the same seed and prompt, in the units of x0",
        "prompts": asked.prompts,
        "seeds": {
            name: [pairs.seeds[0], pairs.seeds[-1]]
            for name, pairs in (("tune", divided.tune), ("watch", divided.watch), ("judge", divided.judge))
        },
        "teacher": {
            "sampler": teacher.SAMPLER,
            "steps": asked.teacher,
            "doubt": teacher.doubt(subject, lesson.watch, asked.teacher, asked.descent.at_once),
        },
    }


def sweep_rows(
    subject: TuningModel, judge: Truth, asked: TuningConfig, mine: torch.Tensor, stage: Stage, folder: Path | None
) -> list[dict[str, Any]]:
    """The best that is untuned at each budget, on the same held-out pairs, and how it stands to the tuned plan."""
    rows = []
    count = len(asked.sweep) * (len(sweeps.candidates()) + 2 * sweeps.KEPT)
    with stage("everything untuned", count) as done:
        question = sweeps.Sweep(subject, judge, asked.descent.at_once, folder, done=done)
        for calls in asked.sweep:
            for label, cell in (("best", question.best(calls)[0]), ("usual", question.usual(calls))):
                if cell.refused:
                    continue
                theirs = errors(question.plan(cell), subject, judge, asked.descent.at_once)
                row = {"calls": calls, "which": label, "name": cell.name, "nfe": cell.nfe, **cell.summary}
                rows.append({**row, "gain": gain(mine, theirs)})
    return rows


def sentence(told: dict[str, Any]) -> str:
    """What was found, in one line."""
    held = told["held_out"]
    kept, best = held[told["kept"].replace(" ", "_")], held["best_start"]
    words = (
        f"{told['steps']} calls, mean error {kept['mean']:.4g} ({kept['low']:.4g} to {kept['high']:.4g}) on "
        f"{kept['pairs']} held-out pairs; {told['best_start']}, the best start before tuning, has {best['mean']:.4g}"
    )
    if told["kept"] != "tuned":
        words += "; tuning made nothing better, and the start is kept"
    for row in told.get("untuned", ()):
        words += f"; untuned at {row['calls']}, {row['name']} has {row['mean']:.4g}"
    return words
