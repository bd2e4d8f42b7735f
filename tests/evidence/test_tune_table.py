"""Tables with knobs: the start at rest, the law at any knobs, gradients that are differences, one loop."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pellucid import PellucidError, Plan, compile_plan, run
from pellucid.core import oracle
from pellucid.core import schedule as schedules
from pellucid.core.samplers import REGISTRY
from pellucid.evidence.tune import descent
from pellucid.evidence.tune.descent import TableFit, TuningData
from pellucid.evidence.tune.model import Pairs, TuningModel, oracle_model
from pellucid.evidence.tune.table import KNOBS, Start, Table, split_levels, tunable
from pellucid.evidence.tune.teacher import NoisePairs, Truth
from pellucid.models.guidance import Guidance
from pellucid.models.guided import GuidedDenoiser

SCHEDULES: dict[str, schedules.Schedule] = {
    "linear": schedules.make("linear"),
    "edm": schedules.make("edm"),
    "flow": schedules.make("flow"),
    "zero": schedules.make("scaled_linear", zero_snr=True),
}
# One of each basis (x0, eps, flow), with and without an anchor of its own, and one whose anchor stays for several rows.
STARTS = ["unipc-3:trailing", "dpmpp_2m:trailing", "dpm_singlestep-2:trailing", "deis-3:quadratic", "lms-3:quadratic"]


def table_of(start: str, schedule: str = "linear", steps: int = 6) -> Table:
    curve = SCHEDULES[schedule]
    return Table.of(Start.parse(start), curve, curve.carries[0], steps)


def turned(table: Table, seed: int = 0, size: float = 0.2) -> dict[str, Tensor]:
    """Knobs anywhere."""
    generator = torch.Generator().manual_seed(seed)
    knobs = table.zeros()
    for knob in knobs.values():
        knob += size * torch.randn(knob.shape, generator=generator, dtype=torch.float64)
    return knobs


def lesson_of(schedule: str, count: int = 5) -> TuningData:
    subject = oracle_model("smooth", oracle.smooth(), SCHEDULES[schedule])
    drawn = NoisePairs.of(subject, Pairs(tuple(range(count))))
    goal = torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    truth = Truth(drawn.pairs, drawn.noise, goal)
    return TuningData(subject, truth, truth)


# --- at rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sampler", [name for name, entry in REGISTRY.items() if tunable(entry)])
def test_knobs_at_zero_are_the_start(sampler: str, schedule: str) -> None:
    """Every start that is offered is reproduced by its shares, on every kind of schedule that it can run on."""
    blind = schedule in ("flow", "zero") and sampler in ("deis", "ipndm")
    lines = schedule == "zero" and sampler in ("lms", "gradient_estimation")
    if blind or lines:  # eps says nothing at pure noise
        with pytest.raises(PellucidError) as error:
            table_of(f"{sampler}:trailing", schedule)
        assert error.value.code == "alpha-zero"
        return
    table = table_of(f"{sampler}:trailing", schedule)
    again, plan = table.plan_at(table.zeros()), table.plan
    for mine, theirs in zip(again.rows, plan.rows, strict=True):
        assert (mine.level.alpha, mine.level.sigma, mine.time) == pytest.approx(
            (theirs.level.alpha, theirs.level.sigma, theirs.time), rel=1e-12
        )
        assert dict(mine.x) == pytest.approx(dict(theirs.x), rel=1e-10, abs=1e-12)
    mixture = oracle.smooth()
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * plan.initial_scale
    torch.testing.assert_close(run(again, mixture, x), run(plan, mixture, x), rtol=0, atol=1e-12)


def test_the_registry_offers_what_can_be_tuned() -> None:
    known = {name for name, entry in REGISTRY.items() if tunable(entry)}
    assert {"unipc", "dpmpp_2m", "dpmpp_3m", "deis", "ipndm", "lms", "ddim", "euler", "dpm_singlestep"} <= known
    assert not known & {"heun", "euler_a", "ddim_inversion", "euler_cfgpp", "dpm_fast", "pndm", "lcm", "er_sde"}


# --- the law ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("seed", range(3))
def test_any_knobs_keep_the_law(start: str, schedule: str, seed: int) -> None:
    if start.startswith("deis") and schedule in ("flow", "zero"):
        return  # an eps sampler does not leave pure noise
    table = table_of(start, schedule)
    knobs = turned(table, seed)
    plan = table.plan_at(knobs)  # proves it too, to 1e-9
    assert plan.deviation < 1e-12
    assert plan.nfe == 6
    assert plan.end.sigma == 0.0
    assert Plan.from_json(plan.to_json()) == plan


def test_the_law_would_break_without_the_parametrisation() -> None:
    """One weight turned by itself lands elsewhere: what the shares are for."""
    table = table_of("unipc-3:trailing")
    plan = table.plan_at(turned(table)).to_dict()
    plan["rows"][3]["x"]["p1"] += 1e-6
    with pytest.raises(PellucidError, match="marginal law"):
        Plan.from_dict(plan)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_levels_stay_in_order_and_inside_of_the_schedule(schedule: str) -> None:
    table = table_of("unipc-3:trailing", schedule)
    low, high = SCHEDULES[schedule].ratio_at(SCHEDULES[schedule].span)
    for seed in range(5):
        knobs = turned(table, seed, size=2.0)
        table.settle(knobs)
        values = table.values(knobs)
        assert all(a > b for a, b in pairwise(values.ratios))
        assert values.ratios[0] <= high * (1 + 1e-12)
        assert values.ratios[-1] >= low * (1 - 1e-12)
        assert bool(((values.times >= table.schedule.span[0]) & (values.times <= table.schedule.span[1])).all())


def test_levels_of_a_frame() -> None:
    lams = torch.tensor([-2.0, 0.5, 3.0], dtype=torch.float64)
    for frame, norm in (("vp", lambda a, s: a**2 + s**2), ("ve", lambda a, s: a), ("flow", lambda a, s: a + s)):
        alpha, sigma = split_levels(lams, frame)  # type: ignore[arg-type]
        torch.testing.assert_close(norm(alpha, sigma), torch.ones_like(lams))
        torch.testing.assert_close(torch.log(alpha / sigma), lams)


# --- gradients -------------------------------------------------------------------------------------------------------


def loss_of(table: Table, knobs: dict[str, Tensor], lesson: TuningData) -> float:
    """The objective by the plain loop over the plan that the knobs make: nothing of the soft table."""
    plan = table.plan_at(knobs)
    pairs = lesson.tune.pairs
    x = run(plan, lesson.model.denoiser(pairs), lesson.tune.noise * plan.initial_scale)
    return float((x - lesson.tune.x0).square().mean(1).sqrt().sqrt().mean())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("start", "schedule"),
    [("unipc-3:trailing", "linear"), ("deis-3:quadratic", "linear"), ("dpmpp_2m:karras", "edm"), ("lms-3:beta", "flow"),
     ("unipc-2:trailing", "zero")],
)  # fmt: skip
def test_gradients_are_differences(start: str, schedule: str, recompute: bool) -> None:
    """Of every knob, in float64, against central differences of the plain loop; also with the network asked twice."""
    table, lesson = table_of(start, schedule), lesson_of(schedule)
    knobs = {name: knob.requires_grad_() for name, knob in turned(table, 3, 0.05).items()}
    knobs["gaps"].data[0] = 0.05  # off the edge of the schedule
    state = TableFit(table, knobs, knobs, 0.0, 0.0, 0.0)
    descent.backward(state, lesson, [0, 1, 2, 3, 4], 3, recompute)  # in two parts
    step = 1e-6
    for name in KNOBS["all"]:
        found = knobs[name].grad
        assert found is not None
        for i in range(len(found)):
            ends = []
            for sign in (1, -1):
                moved = descent.copied(knobs)
                moved[name][i] += sign * step
                ends.append(loss_of(table, moved, lesson))
            assert float(found[i]) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4, abs=1e-7), (name, i)
    assert all(float(knob.grad.abs().max()) > 1e-5 for knob in knobs.values())  # type: ignore[union-attr]


class Wavy(torch.nn.Module):
    """A small network of x, time and a condition, in float64."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.inner = torch.nn.Parameter(
            torch.randn(4, 4, generator=generator, dtype=torch.float64), requires_grad=False
        )

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        return 0.5 * torch.sin(x @ self.inner + context + time[:, None] / 400) + 0.4 * x


@pytest.mark.parametrize(
    "guidance", ["3", "3 + rescale phi=0.7", "4 + apg momentum=-0.5", "3 + threshold", "linear:5:1"]
)
def test_gradients_of_guided_models(guidance: str) -> None:
    """Rules in any space, rules that remember, and scales that ask where the run stands."""
    curve, network = SCHEDULES["linear"], Wavy()
    context = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    told = Guidance.parse(guidance)

    def denoiser(pairs: Pairs) -> Any:
        cond, uncond = ({"context": c[: len(pairs)]} for c in (context, 0 * context))
        return GuidedDenoiser(network, curve, "eps", cond, uncond, told)

    subject = TuningModel("wavy", curve, "eps", (4,), denoiser, dtype=torch.float64)
    drawn = NoisePairs.of(subject, Pairs((0, 1, 2)))
    truth = Truth(drawn.pairs, drawn.noise, torch.zeros(3, 4, dtype=torch.float64))
    lesson = TuningData(subject, truth, truth)
    table = table_of("unipc-3:quadratic", "linear", 4)
    found = []
    for recompute in (False, True):
        knobs = {name: knob.requires_grad_() for name, knob in turned(table, 3, 0.05).items()}
        descent.backward(TableFit(table, knobs, knobs, 0.0, 0.0, 0.0), lesson, [0, 1, 2], 3, recompute)
        found.append({name: knob.grad for name, knob in knobs.items()})
    step = 1e-6
    for name in KNOBS["all"]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-9, atol=1e-12)
        for i in range(len(found[0][name])):  # type: ignore[arg-type]
            ends = []
            for sign in (1, -1):
                moved = turned(table, 3, 0.05)
                moved[name][i] += sign * step
                ends.append(loss_of(table, moved, lesson))
            expected = (ends[0] - ends[1]) / (2 * step)
            assert float(found[0][name][i]) == pytest.approx(expected, rel=1e-4, abs=1e-7), (name, i)  # type: ignore


# --- the loop --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", STARTS)
def test_the_soft_table_runs_as_its_plan_does(start: str) -> None:
    table, lesson = table_of(start), lesson_of("linear")
    knobs = turned(table, 1)
    noise, denoiser = lesson.tune.noise, lesson.model.denoiser(lesson.tune.pairs)
    plan = table.plan_at(knobs)
    soft = descent.travel(table, table.values(knobs), denoiser, noise, recompute=False)
    torch.testing.assert_close(soft, run(plan, denoiser, noise * plan.initial_scale), rtol=0, atol=1e-12)


def test_activations_that_are_too_many_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table, lesson = table_of("unipc-3:trailing"), lesson_of("linear")
    denoiser, noise = lesson.model.denoiser(lesson.tune.pairs), lesson.tune.noise
    assert not descent.too_heavy(table, denoiser, noise)
    monkeypatch.setattr(descent, "KEEP_BYTES", 6 * noise.nbytes)
    assert descent.too_heavy(table, denoiser, noise)


def test_the_exact_network_at_its_own_level_is_the_oracle() -> None:
    for name, curve in SCHEDULES.items():
        subject = oracle_model("smooth", oracle.smooth(), curve)
        plan = compile_plan("dpmpp_2m", schedule=curve, target=subject.target, steps=6)
        x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * plan.initial_scale
        exact = run(plan, oracle.smooth(), x)
        torch.testing.assert_close(run(plan, subject.denoiser(Pairs(())), x), exact, rtol=0, atol=1e-9, msg=name)


def test_another_told_time_changes_what_the_exact_network_says() -> None:
    subject = oracle_model("smooth", oracle.smooth(), SCHEDULES["linear"])
    level, x = SCHEDULES["linear"].level(500.0), torch.ones(1, 4, dtype=torch.float64)
    denoiser = subject.denoiser(Pairs(()))
    apart = denoiser(x, level, 500.0) - denoiser(x, level, 480.0)  # type: ignore[operator]
    assert float(apart.abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("start", "code", "says"),
    [
        ("unipc", "start", "SAMPLER:GRID"),
        ("unipc-3:nowhere", "unknown-grid", "known name"),
        ("unknown:karras", "unknown-sampler", "known name"),
        ("euler_a:karras", "start-stochastic", "deterministic"),
        ("heun:karras", "start", "one call per step"),
        ("euler_cfgpp:karras", "start", "one call per step"),
        ("unipc-9:karras", "order", "from 1 to 3"),
    ],
)
def test_starts_that_are_refused(start: str, code: str, says: str) -> None:
    with pytest.raises(PellucidError, match=says) as error:
        table_of(start)
    assert error.value.code == code


def test_a_start_is_named_as_it_is_read() -> None:
    for text in ("unipc-3:karras", "dpmpp_2m:exponential", "deis-2:quadratic"):
        assert Start.parse(text).text == text
    assert Start.parse("DPM++ 2M:normal").text == "dpmpp_2m:linspace"
    assert math.isclose(Start.parse("unipc-3:karras").options["order"], 3)
    assert np.isfinite(table_of("unipc-3:karras").lams).all()
