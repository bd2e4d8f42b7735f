"""Tuning from end to end: teacher, starts, heats, descent, judgement; a plan with its evidence inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pellucid._version import __version__
from pellucid.core.errors import PellucidError, rule
from pellucid.core.plan import Plan
from pellucid.evidence.statistics import mean_interval
from pellucid.evidence.study.kernel import ProgressBar, check_whole, no_bar
from pellucid.evidence.tune import sweep as sweeps
from pellucid.evidence.tune import table, teacher
from pellucid.evidence.tune.descent import Descent, TableFit, TuningData, descend
from pellucid.evidence.tune.model import FEWEST_PAIRS, MOST_PAIRS, Pairs, PairSets, TuningModel, make_sets, read_prompts
from pellucid.evidence.tune.sweep import SAMPLERS, shortlist
from pellucid.evidence.tune.table import Start, Table
from pellucid.evidence.tune.teacher import ErrorSummary, Truth, errors

_NAME = "tuned"
HEAT = 4  # a heat has one in four of the iterations
FINALISTS = 2  # starts that go on after the heats
_MOST_WATCHED = 512  # unless more are named
_OBJECTIVE = "the mean over pairs of √(rms distance of x0 from the converged one)"


@dataclass(frozen=True)
class TuningConfig:
    """How to tune. Pairs are numbered by their seeds: first those to tune on, then the watched, then the judges."""

    steps: int = 8
    descent: Descent = field(default_factory=Descent)
    pairs: int = 512
    watched: int | None = None  # half as many as are tuned on, and at most MOST_WATCHED
    held_out: int = 512
    starts: tuple[Start, ...] = ()  # none: a short list of the best
    teacher: int = teacher.STEPS
    prompts: str | None = None  # a file, or `scenes`
    sweep: tuple[int, ...] = ()  # budgets of calls at which everything untuned is measured too
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("--steps", self.steps, table.FEWEST_STEPS, table.MOST_STEPS, "steps")
        least, most = max(teacher.FEWEST_STEPS, 4 * self.steps), teacher.MOST_STEPS
        must = f"from {least} to {most} steps for a plan of {self.steps}"
        check_whole("--teacher", self.teacher, least, most, "teacher", must)
        for name, count in (("--pairs", self.pairs), ("watched", self.counts[1]), ("--held-out", self.held_out)):
            check_whole(name, count, FEWEST_PAIRS, MOST_PAIRS, "pairs")
        for calls in self.sweep:
            check_whole("--sweep", calls, 1, 1000, "sweep", "numbers of calls from 1 to 1000")
        for start in self.starts:
            start.check()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Pairs to tune on, watched ones, judges."""
        half = self.pairs // 2 if isinstance(self.pairs, int) else 0
        watched = max(min(half, _MOST_WATCHED), FEWEST_PAIRS) if self.watched is None else self.watched
        return self.pairs, watched, self.held_out


@dataclass(frozen=True)
class TuningResult:
    """The plan that was kept, its evidence in it, and the errors of the held-out pairs (N,)."""

    plan: Plan
    errors: torch.Tensor

    @property
    def evidence(self) -> dict[str, Any]:
        return self.plan.evidence


def tune(
    model: TuningModel,
    config: TuningConfig,
    bar: ProgressBar = no_bar,
    folder: Path | None = None,
    keep: Callable[[TuningResult], object] = lambda tuned: None,
) -> TuningResult:
    """Tunes a plan for a model. `folder` keeps what a sweep has measured; `keep` is called with the plan as soon as
    there is one, and again with what a sweep has found, which may take longer than the tuning."""
    sets = divide(model, config)
    with bar("asking the teacher", sum(map(len, sets))) as done:
        truths = [ask_teacher(model, pairs, config, done) for pairs in sets]
    data, judge = TuningData(model, truths[0], truths[1]), truths[2]
    fits = _run_heats(data, config, bar)
    best = _run_finals(fits, data, config, bar)
    plan, found, evidence = _judged(best, fits, model, judge, config)
    evidence = {**_about(model, config, sets, data), **evidence}
    tuned = TuningResult(replace(plan, evidence={"says": _sentence(evidence), **evidence}), found)
    keep(tuned)
    if config.sweep:
        evidence["untuned"] = _sweep_rows(model, judge, config, found, bar, folder)
        tuned = replace(tuned, plan=replace(plan, evidence={"says": _sentence(evidence), **evidence}))
        keep(tuned)
    return tuned


def divide(model: TuningModel, config: TuningConfig) -> PairSets:
    """The three sets of pairs; prompts for a model that takes them, and only for one."""
    if model.takes_text != (config.prompts is not None):
        must = "given for a model that takes text" if model.takes_text else "left out: the model takes no text"
        raise PellucidError(rule("--prompts", must, config.prompts), "prompts")
    count = 2 * sum(config.counts)
    texts = None if config.prompts is None else read_prompts(config.prompts, count, config.seed)
    return make_sets(config.counts, config.seed, texts, model.classes)


def ask_teacher(model: TuningModel, pairs: Pairs, config: TuningConfig, done: Callable[[int], object]) -> Truth:
    truth = teacher.teach(model, pairs, config.teacher, config.descent.at_once, done)
    if not bool(truth.x0.isfinite().all()):
        raise PellucidError(rule("the teacher's images", "finite", "others", "Is the model complete?"), "teacher")
    return truth


def _run_heats(data: TuningData, config: TuningConfig, bar: ProgressBar) -> list[TableFit]:
    """Every start a little way down; a single one waits for the descent itself."""
    model, at_once = data.model, config.descent.at_once
    chosen = list(config.starts)
    if not chosen:
        with bar("choosing starts", len(SAMPLERS) * len(sweeps.GRIDS)) as done:
            chosen = shortlist(model, data.tune, config.steps, at_once, done)
    tables = [Table.of(start, model.schedule, model.target, config.steps) for start in chosen]
    fits = [TableFit.of(table, data, at_once) for table in tables]
    short = replace(config.descent, iterations=max(config.descent.iterations // HEAT, 1))
    if len(fits) > 1:
        with bar("heats", len(fits) * short.iterations) as done:
            for fit in fits:
                descend(fit, data, short, done)
    return fits


def _run_finals(fits: list[TableFit], data: TuningData, config: TuningConfig, bar: ProgressBar) -> TableFit:
    """The best of the heats all the way down; which of them is best after it."""
    finalists = sorted(fits, key=lambda fit: fit.best_root)[:FINALISTS]
    with bar("tuning", len(finalists) * config.descent.iterations) as done:
        for fit in finalists:
            descend(fit, data, config.descent, done)
    return min(finalists, key=lambda fit: fit.best_root)


def _judged(
    best: TableFit, fits: list[TableFit], model: TuningModel, judge: Truth, config: TuningConfig
) -> tuple[Plan, torch.Tensor, dict[str, Any]]:
    """The tuned plan against its start and the best start, on pairs that were not used before; the better is kept."""
    at_once = config.descent.at_once
    first = min(fits, key=lambda fit: fit.start_error)
    plans = {"tuned": best.plan, "start": best.table.plan, "best start": first.table.plan}
    found = {name: errors(plans[name], model, judge, at_once) for name in ("tuned", "start")}
    same = first.table.plan is best.table.plan
    found["best start"] = found["start"] if same else errors(plans["best start"], model, judge, at_once)
    kept = min(plans, key=lambda name: float(found[name].mean()))
    starts = [{"start": fit.table.start.text, "watched": fit.start_error, "tuned": fit.best_error} for fit in fits]
    evidence = {
        "kept": kept,
        "start": best.table.start.text,
        "best_start": first.table.start.text,
        "starts": starts,
        "iterations": best.iterations,
        "watched": [[i, round(e, 9)] for i, e in best.looks],
        "held_out": {name.replace(" ", "_"): ErrorSummary.of(e).to_dict() for name, e in found.items()},
        "gain": gain(found["tuned"], found["best start"]),
    }
    plan = replace(plans[kept], name=_NAME) if kept == "tuned" else plans[kept]
    return plan, found[kept], evidence


def gain(mine: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """By how much the mean error is smaller, pair by pair, with its 95 % interval."""
    apart = (other - mine).double()
    interval = mean_interval(apart)
    return {"mean": float(apart.mean()), "low": interval.low, "high": interval.high}


def _about(model: TuningModel, config: TuningConfig, sets: PairSets, data: TuningData) -> dict[str, Any]:
    """How the plan came to be."""
    return {
        "kind": "pellucid-tune",
        "pellucid": __version__,
        "model": model.name,
        "model_hash": model.fingerprint,
        "guidance": model.guidance,
        "what": config.descent.what,
        "steps": config.steps,
        "objective": _OBJECTIVE,
        "error": "rms distance of x0 from the teacher's of the same seed and prompt, in the units of x0",
        "prompts": config.prompts,
        "seeds": {name: [pairs.seeds[0], pairs.seeds[-1]] for name, pairs in sets._asdict().items()},
        "teacher": {
            "sampler": teacher.SAMPLER,
            "steps": config.teacher,
            "doubt": teacher.doubt(model, data.watch, config.teacher, config.descent.at_once),
        },
    }


def _sweep_rows(
    model: TuningModel, judge: Truth, config: TuningConfig, mine: torch.Tensor, bar: ProgressBar, folder: Path | None
) -> list[dict[str, Any]]:
    """The best untuned plan at each budget, on the same held-out pairs, compared with the tuned one."""
    rows = []
    count = len(config.sweep) * (len(sweeps.candidates()) + 2 * sweeps.KEPT)
    with bar("everything untuned", count) as done:
        question = sweeps.Sweep(model, judge, config.descent.at_once, folder, done=done)
        for calls in config.sweep:
            for label, cell in (("best", question.best(calls)[0]), ("usual", question.usual(calls))):
                if cell.refused:
                    continue
                theirs = errors(question.plan(cell), model, judge, config.descent.at_once)
                row = {"calls": calls, "which": label, "name": cell.name, "nfe": cell.nfe, **cell.summary}
                rows.append({**row, "gain": gain(mine, theirs)})
    return rows


def _sentence(evidence: dict[str, Any]) -> str:
    """What was found, in one line."""
    held = evidence["held_out"]
    kept, best = held[evidence["kept"].replace(" ", "_")], held["best_start"]
    words = (
        f"{evidence['steps']} calls, mean error {kept['mean']:.4g} ({kept['low']:.4g} to {kept['high']:.4g}) on "
        f"{kept['pairs']} held-out pairs; {evidence['best_start']}, the best untuned start, has {best['mean']:.4g}"
    )
    if evidence["kept"] != "tuned":
        words += "; tuning made nothing better, and the start is kept"
    for row in evidence.get("untuned", ()):
        words += f"; untuned at {row['calls']}, {row['name']} has {row['mean']:.4g}"
    return words
