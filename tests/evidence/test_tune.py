"""Tuning from end to end on mixtures: better and never worse, the same each time, judged by what nobody saw."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pellucid import PellucidError, Plan, compile_plan, run
from pellucid.core import oracle
from pellucid.core import schedule as schedules
from pellucid.core.samplers import REGISTRY
from pellucid.evidence.study.kernel import RECORDS
from pellucid.evidence.tune import sweep, teacher, tuning
from pellucid.evidence.tune.descent import Descent, TableFit, TuningData, batches, descend, falling, tame
from pellucid.evidence.tune.model import Pairs, TuningModel, make_sets, oracle_model, read_prompts
from pellucid.evidence.tune.sweep import Sweep, plan_within
from pellucid.evidence.tune.table import Start, Table
from pellucid.evidence.tune.teacher import ErrorSummary, NoisePairs, Truth, distance, ends, errors
from pellucid.evidence.tune.tuning import TuningConfig, TuningResult, tune

FEW = Descent(iterations=30, batch=32, at_once=512, rate=0.05, every=5)
ASKED = TuningConfig(
    steps=5, pairs=64, watched=64, held_out=64, teacher=60, descent=FEW, starts=(Start.parse("unipc-3:ays"),)
)


def subject_of(schedule: str = "linear") -> TuningModel:
    return oracle_model("smooth", oracle.smooth(), schedules.make(schedule))


@pytest.fixture(scope="module")
def tuned() -> tuning.TuningResult:
    return tune(subject_of(), ASKED)


# --- the result ------------------------------------------------------------------------------------------------------


def test_tuning_helps_and_its_evidence_is_what_its_plan_does(tuned: tuning.TuningResult) -> None:
    """The figures in the plan are measured again here, from its JSON, by the plain loop and an independent truth."""
    subject, plan = subject_of(), Plan.from_json(tuned.plan.to_json())
    assert plan == tuned.plan
    held = plan.evidence["held_out"]
    first, last = plan.evidence["seeds"]["judge"]
    noise = subject.noise(Pairs(tuple(range(first, last + 1))))
    long = compile_plan("unipc", schedule="linear", steps=500, grid="exponential")
    truth = run(long, oracle.smooth(), noise * long.initial_scale)
    x = run(plan, subject.denoiser(Pairs(())), noise * plan.initial_scale)
    found = (x - truth).square().mean(1).sqrt()
    assert held["tuned"]["mean"] == pytest.approx(float(found.mean()), rel=1e-2)
    assert plan.evidence["kept"] == "tuned"
    assert held["tuned"]["mean"] < 0.5 * held["start"]["mean"]
    assert plan.name == "tuned"
    assert plan.nfe == 5
    assert plan.deviation < 1e-12
    assert plan.evidence["gain"]["low"] > 0


def test_the_told_times_differ_from_the_levels_only_where_they_are_tuned(tuned: tuning.TuningResult) -> None:
    def apart(plan: Plan) -> float:
        own = [float(schedules.make("linear").time_at(r.level.ratio)) for r in plan.rows]
        return max(abs(a - b) for a, b in zip(own, plan.timesteps, strict=True))

    assert apart(tuned.plan) > 1.0
    few = replace(FEW, iterations=5)
    for what in ("grid", "weights", "both"):
        assert apart(tune(subject_of(), replace(ASKED, descent=replace(few, what=what))).plan) < 1e-6


def test_what_is_not_asked_for_stays() -> None:
    subject = subject_of()
    table = Table.of(ASKED.starts[0], subject.schedule, subject.target, 5)
    truth = teacher.teach(subject, Pairs(tuple(range(16))), 60, 64)
    lesson = TuningData(subject, truth, truth)
    for what, moved in (("grid", {"gaps"}), ("weights", {"shares"}), ("told", {"told"}), ("both", {"gaps", "shares"})):
        fit = TableFit.of(table, lesson, 64)
        descend(fit, lesson, replace(FEW, iterations=3, what=what))
        assert {name for name, knob in fit.knobs.items() if bool(knob.any())} == moved


def test_the_same_words_give_the_same_plan(tuned: tuning.TuningResult) -> None:
    assert tune(subject_of(), ASKED).plan.to_json() == tuned.plan.to_json()
    other = tune(subject_of(), replace(ASKED, descent=replace(FEW, seed=1)))
    assert other.plan.to_json() != tuned.plan.to_json()


@pytest.mark.parametrize("rate", [0.05, 1.0])
def test_never_worse_than_the_start_on_what_is_held_out(rate: float) -> None:
    """At a rate that throws the table about, too: what is worse is not kept."""
    found = tune(subject_of("flow"), replace(ASKED, descent=replace(FEW, iterations=6, rate=rate), starts=(
        Start.parse("dpmpp_2m:trailing"), Start.parse("unipc-3:trailing"))))  # fmt: skip
    held = found.evidence["held_out"]
    kept = found.evidence["kept"].replace(" ", "_")
    assert held[kept]["mean"] <= min(held["start"]["mean"], held["best_start"]["mean"])
    assert float(found.errors.mean()) == held[kept]["mean"]


def test_a_table_that_got_worse_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(fit: TableFit, *_: Any) -> TableFit:
        fit.best["shares"] += 0.3
        return fit

    monkeypatch.setattr(tuning, "descend", spoil)
    found = tune(subject_of(), ASKED)
    assert found.evidence["kept"] in ("start", "best start")
    assert "the start is kept" in found.evidence["says"]
    assert found.plan.name == "unipc"
    start = ASKED.starts[0].plan(schedules.make("linear"), "eps", 5)
    assert found.plan.rows == start.rows


def test_the_best_of_the_heats_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, int]] = []

    def watched(fit: TableFit, lesson: TuningData, how: Descent, *rest: Any) -> TableFit:
        begun.append((fit.table.start.text, how.iterations))
        return descend(fit, lesson, replace(how, iterations=2), *rest)

    monkeypatch.setattr(tuning, "descend", watched)
    names = ["ddim:karras", "unipc-3:ays", "dpmpp_2m:ays"]
    found = tune(subject_of(), replace(ASKED, starts=tuple(map(Start.parse, names))))
    assert begun[:3] == [(name, FEW.iterations // tuning.HEAT) for name in names]
    assert [iterations for _, iterations in begun[3:]] == [FEW.iterations] * tuning.FINALISTS
    assert "ddim:karras" not in [name for name, _ in begun[3:]]  # which is far behind
    assert found.evidence["start"] in names[1:]


def test_starts_are_found_where_none_is_given() -> None:
    subject = subject_of()
    truth = teacher.teach(subject, Pairs(tuple(range(16))), 60, 64)
    chosen = sweep.shortlist(subject, truth, 5, 64)
    assert len(chosen) == sweep.SHORTLIST
    assert len({start.sampler for start in chosen}) == len(chosen)
    assert sweep.SURE in {start.sampler for start in chosen}
    best = sweep.trial(chosen[0], subject, truth, 5, 64)
    assert best is not None
    assert all(best <= (sweep.trial(start, subject, truth, 5, 64) or 9.0) for start in chosen)


def test_no_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "trial", lambda *_: None)
    subject = subject_of()
    with pytest.raises(PellucidError, match="--start"):
        sweep.shortlist(subject, teacher.teach(subject, Pairs((0, 1)), 60, 64), 5, 64)


# --- the descent -----------------------------------------------------------------------------------------------------


def test_a_descent_that_finds_nothing_stops_early() -> None:
    """The tuned pairs pull away from the watched ones: nothing that is watched improves."""
    subject = subject_of()
    truth = teacher.teach(subject, Pairs(tuple(range(16))), 60, 64)
    table = Table.of(ASKED.starts[0], subject.schedule, subject.target, 5)
    exact = replace(truth, x0=ends(table.plan, subject, truth, 64))  # the start itself is the watched truth
    lesson = TuningData(subject, truth, exact)
    fit = descend(TableFit.of(table, lesson, 64), lesson, Descent(iterations=100, every=2, patience=3, batch=16))
    assert fit.iterations == 6
    assert fit.best_error == fit.start_error == 0.0
    assert not any(bool(knob.any()) for knob in fit.best.values())


def test_every_pair_comes_once_before_any_comes_again() -> None:
    order = batches(10, 4, seed=0)
    drawn = [i for _ in range(5) for i in next(order)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert len(next(batches(3, 64, seed=0))) == 3


def test_a_wild_gradient_is_shortened_and_none_is_not_taken() -> None:
    knob = torch.zeros(2, requires_grad=True)
    usual: list[float] = []
    for size, length in ((1.0, 1.0), (1.0, 1.0), (1e6, 10.0)):
        knob.grad = torch.tensor([size, 0.0])
        assert tame([knob], usual)
        assert float(knob.grad.norm()) == pytest.approx(length)
    knob.grad = torch.tensor([np.nan, 0.0])
    assert not tame([knob], usual)


def test_the_rate_falls() -> None:
    rates = [falling(i / 50) for i in range(51)]
    assert rates[0] == 1.0
    assert all(a > b for a, b in pairwise(rates))
    assert rates[-1] == pytest.approx(0.02)


# --- the teacher -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule", [schedules.make("linear"), schedules.make("edm"), schedules.make("flow"),
                 schedules.make("scaled_linear", zero_snr=True), schedules.make("cosine")],
    ids=lambda schedule: schedule.name,
)  # fmt: skip
def test_the_teacher_converges(schedule: schedules.Schedule) -> None:
    """Against a solver of another family; from pure noise too. Twice the steps: a fraction of the distance."""
    subject = oracle_model("smooth", oracle.smooth(), schedule)
    pairs = Pairs(tuple(range(8)))
    noise = subject.noise(pairs)
    long = compile_plan("heun", schedule=schedule, target=subject.target, steps=1500, grid="trailing") if (
        schedule.frame == "flow") else teacher.teacher_plan(schedule, subject.target, 1500)  # fmt: skip
    exact = run(long, oracle.smooth(), noise * long.initial_scale)
    found = [float(distance(teacher.teach(subject, pairs, n, 8).x0, exact).max()) for n in (50, 100)]
    assert found[1] < 1e-3
    assert found[1] < 0.5 * found[0]
    truth = teacher.teach(subject, pairs, 100, 8)
    assert found[1] < teacher.doubt(subject, truth, 100, 8) < 2 * found[0]


# --- pairs -----------------------------------------------------------------------------------------------------------


def test_no_seed_and_no_prompt_is_in_two_sets() -> None:
    for count in (8, 500):
        made = make_sets((10, 5, 5), 7, [f"prompt {i}" for i in range(count)])
        every = (made.tune, made.watch, made.judge)
        seeds = [seed for pairs in every for seed in pairs.seeds]
        assert seeds == list(range(7, 27))
        texts = [set(pairs.prompts or ()) for pairs in every]
        assert all(not a & b for i, a in enumerate(texts) for b in texts[:i])
        assert all(texts)
    labels = make_sets((10, 5, 5), 7, classes=3).judge.labels
    assert labels is not None
    assert set(labels) <= {0, 1, 2}


def test_prompts_of_the_world_and_of_a_file(tmp_path: Path) -> None:
    captions = read_prompts("scenes", 50, 3)
    assert len(captions) == 50
    assert captions == read_prompts("scenes", 50, 3) != read_prompts("scenes", 50, 4)
    (tmp_path / "p.txt").write_text("a\n\n b \nc\n", encoding="utf-8")
    assert read_prompts(str(tmp_path / "p.txt"), 50, 3) == ["a", "b", "c"]
    with pytest.raises(PellucidError, match="at least 4 different"):
        make_sets((4, 4, 4), 0, ["a", "b", "c", "a"])
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PellucidError, match="UTF-8"):
        read_prompts(str(tmp_path / "bad.txt"), 50, 3)
    with pytest.raises(PellucidError, match="exists, or scenes"):
        read_prompts(str(tmp_path / "none.txt"), 50, 3)


def test_a_batch_decides_nothing() -> None:
    subject, pairs = subject_of(), Pairs(tuple(range(10)))
    plan = compile_plan("dpmpp_2m", schedule="linear", steps=5)
    drawn = NoisePairs.of(subject, pairs)
    torch.testing.assert_close(ends(plan, subject, drawn, 3), ends(plan, subject, drawn, 10), rtol=0, atol=1e-14)


def test_a_summary_is_of_its_errors() -> None:
    found = ErrorSummary.of(torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0]))
    assert (found.mean, found.median, found.worst, found.pairs) == (22.0, 3.0, 100.0, 5)
    assert found.low < 22.0 < found.high


# --- what is untuned -------------------------------------------------------------------------------------------------


def judged(count: int = 8) -> tuple[TuningModel, Truth]:
    subject = subject_of()
    return subject, teacher.teach(subject, Pairs(tuple(range(count))), 60, 64)


def test_the_sweep_has_every_deterministic_sampler_and_grid() -> None:
    every = sweep.candidates()
    names = {one.sampler for one in every}
    assert names == {n for n, e in REGISTRY.items() if e.deterministic and e.family not in ("inversion", "distilled")}
    assert {one.grid for one in every} == set(sweep.GRIDS)
    assert {one.options.get("order") for one in every if one.sampler == "unipc"} == {1, 2, 3}
    assert {one.options.get("order") for one in every if one.sampler == "lms"} == {1, 2, 3, 4}
    assert len({one.text for one in every}) == len(every)
    assert {"dpmpp_2m:karras", "unipc-3:kl_optimal", "heun:karras"} <= {one.text for one in every}


@pytest.mark.parametrize(("name", "calls", "nfe"), [("heun", 8, 7), ("heun", 9, 9), ("plms", 8, 8), ("dpmpp_2m", 8, 8)])
def test_a_budget_is_kept_to(name: str, calls: int, nfe: int) -> None:
    assert plan_within(Start(name, "karras"), schedules.make("linear"), "eps", calls).nfe == nfe


def test_the_best_is_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against all of a small registry, one by one."""
    few = [Start(n, g) for n in ("ddim", "dpmpp_2m", "heun") for g in ("karras", "trailing", "quadratic")]
    monkeypatch.setattr(sweep, "candidates", lambda: few)
    monkeypatch.setattr(sweep, "KEPT", 4)
    subject, truth = judged()
    found = Sweep(subject, truth, sifted=4).best(6, 3)
    means = {
        one.text: float(errors(plan_within(one, subject.schedule, "eps", 6), subject, truth, 64).mean()) for one in few
    }
    assert found[0].name == min(means, key=means.__getitem__)
    assert [cell.mean for cell in found] == sorted(cell.mean for cell in found)
    assert all(cell.mean == pytest.approx(means[cell.name]) and cell.pairs == 8 for cell in found)


def test_a_sweep_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [Start(n, "karras") for n in ("ddim", "dpmpp_2m", "heun")]
    monkeypatch.setattr(sweep, "candidates", lambda: few)
    subject, truth = judged()
    asked = Sweep(subject, truth, folder=tmp_path / "s", sifted=4)
    measured: list[str] = []
    inner = Sweep.measured

    def counted(self: Sweep, calls: int, name: str, count: int) -> dict[str, Any]:
        measured.append(name)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return inner(self, calls, name, count)

    monkeypatch.setattr(Sweep, "measured", counted)
    with pytest.raises(KeyboardInterrupt):
        asked.best(6)
    assert len((tmp_path / "s" / RECORDS).read_text().splitlines()) == 2
    first = asked.best(6)
    assert measured == [f"{n}:karras" for n in ("ddim", "dpmpp_2m", "heun", "heun", "ddim", "dpmpp_2m", "heun")]
    assert asked.best(6) == first
    assert len(measured) == 7
    other = Sweep(subject, truth.first(6), folder=tmp_path / "s", sifted=4)
    with pytest.raises(PellucidError) as error:
        other.best(6)
    assert error.value.code == "resume-config"


def test_what_makes_no_plan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "candidates", lambda: [Start("deis", "trailing"), Start("dpmpp_2m", "karras")])
    subject = subject_of("flow")
    asked = Sweep(subject, teacher.teach(subject, Pairs((0, 1, 2, 3)), 60, 64))
    with asked.records() as records:
        assert asked.cell(records, 6, "deis:trailing", 4).refused == "alpha-zero"
    assert asked.best(6)[0].name == "dpmpp_2m:karras"


def test_the_evidence_says_how_the_untuned_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [Start("dpmpp_2m", "karras"), Start("deis", "quadratic")]
    monkeypatch.setattr(sweep, "candidates", lambda: few)
    early: list[TuningResult] = []
    asked = replace(ASKED, sweep=(5, 7), descent=replace(FEW, iterations=5))
    found = tune(subject_of(), asked, keep=early.append)
    assert "untuned" not in early[0].evidence  # kept before the sweep, which may be killed
    assert early[0].plan.rows == found.plan.rows
    rows = found.evidence["untuned"]
    assert [(row["calls"], row["which"]) for row in rows] == [(5, "best"), (5, "usual"), (7, "best"), (7, "usual")]
    assert all(row["gain"]["mean"] == pytest.approx(row["mean"] - float(found.errors.mean())) for row in rows)
    assert json.loads(found.plan.to_json())["evidence"]["untuned"] == rows


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": 1}, "--steps must be a whole number from 2 to 100"),
        ({"steps": 101}, "--steps must be"),
        ({"steps": True}, "--steps must be"),
        ({"pairs": 3}, "--pairs must be"),
        ({"held_out": 0}, "--held-out must be"),
        ({"teacher": 10}, "--teacher must be from 20"),
        ({"steps": 40, "teacher": 100}, "from 160"),
        ({"sweep": (0,)}, "--sweep must be"),
        ({"starts": (Start("euler_a", "karras"),)}, "deterministic"),
    ],
)
def test_a_tuning_that_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PellucidError, match=says):
        replace(ASKED, **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"what": "times"}, "--what must be one of"), ({"iterations": 0}, "iterations"), ({"rate": 2.0}, "rate")],
)
def test_a_descent_that_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PellucidError, match=says):
        replace(FEW, **changes)


def test_prompts_are_for_models_that_take_them() -> None:
    with pytest.raises(PellucidError, match="left out"):
        tune(subject_of(), replace(ASKED, prompts="scenes"))
    with pytest.raises(PellucidError, match="given for a model that takes text"):
        tune(replace(subject_of(), takes_text=True), ASKED)


def test_a_broken_model_is_named() -> None:
    def broken(pairs: Pairs) -> Any:
        return lambda x, level, time: x * float("nan")

    with pytest.raises(PellucidError, match="finite"):
        tune(replace(subject_of(), denoiser=broken), ASKED)
