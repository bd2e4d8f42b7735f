"""Adaptive steps: what is discovered is a plan, the budget holds, tighter tolerances cost calls and buy accuracy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pellucid import (
    AdaptiveResult,
    Cancelled,
    Level,
    PellucidError,
    Plan,
    PlanError,
    denoiser,
    oracle,
    run,
    run_adaptive,
    schedules,
)

MIXTURE = oracle.smooth()
CURVE = schedules.make("edm", sigma_min=0.05, sigma_max=10.0)


def start(count: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    data = MIXTURE.sample(count, generator)
    return data + 10.0 * torch.randn(data.shape, generator=generator, dtype=torch.float64)


def go(**options) -> AdaptiveResult:
    settings = {"budget": 2000, "schedule": CURVE, "x": start()} | options
    return run_adaptive(settings.pop("denoiser", MIXTURE), settings.pop("x"), **settings)


def reference() -> Tensor:
    """dx/dλ = x0 − x by Runge-Kutta's classical rule, apart from the code under test; 600 steps err by 1e-10."""
    x, steps = start(), 600
    lam, h = -math.log(10.0), math.log(200.0) / 600

    def slope(x: Tensor, lam: float) -> Tensor:
        return MIXTURE(x, Level(1.0, math.exp(-lam))) - x

    for _ in range(steps):
        k1 = slope(x, lam)
        k2 = slope(x + h / 2 * k1, lam + h / 2)
        k3 = slope(x + h / 2 * k2, lam + h / 2)
        k4 = slope(x + h * k3, lam + h)
        x, lam = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), lam + h
    return x


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("rtol", [0.3, 0.02])
def test_the_discovered_plan_gives_the_same_x(order: int, rtol: float) -> None:
    found = go(order=order, rtol=rtol, atol=rtol / 10)
    assert torch.equal(run(found.plan, MIXTURE, start()), found.x)


@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_with_noise_too(eta: float) -> None:
    seeds = [3, 1, 4, 1]
    found = go(eta=eta, seeds=seeds)
    assert found.plan.stochastic
    # the loop adds up x, history and noise in register order, the walk adds the noise last: a few roundings of 1
    assert torch.allclose(run(found.plan, MIXTURE, start(), seeds=seeds), found.x, rtol=1e-13, atol=1e-13)
    assert torch.equal(found.x, go(eta=eta, seeds=seeds).x)
    assert not torch.equal(found.x, go(eta=eta, seeds=[9, 1, 4, 1]).x)


@pytest.mark.parametrize(
    "options", [{}, {"eta": 0.7}, {"schedule": "scaled_linear"}, {"schedule": "linear", "order": 2}]
)
def test_the_plan_is_proven_and_survives_json(options: dict) -> None:
    plan = go(**options).plan
    assert plan.deviation < 1e-12
    assert not plan.declared
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.name == "dpm_adaptive"


def test_it_goes_from_the_most_noise_to_the_least() -> None:
    plan = go().plan
    assert (plan.start.ratio, plan.end.ratio) == pytest.approx((10.0, 0.05))
    narrower = go(sigma_max=5.0, sigma_min=0.1).plan
    assert (narrower.start.ratio, narrower.end.ratio) == pytest.approx((5.0, 0.1))


@pytest.mark.parametrize("order", [2, 3])
def test_the_calls_are_counted(order: int) -> None:
    calls = 0

    def count(x: Tensor, level: Level, time: float) -> Tensor:
        nonlocal calls
        calls += 1
        return MIXTURE(x, level)

    found = go(denoiser=count, order=order, rtol=0.003, atol=1e-4)
    assert found.calls == calls
    assert found.plan.nfe == order * found.accepted
    assert len(found.rejected) > 0
    # a rejected step is tried again from the same x, so its first call is not made twice
    assert calls == order * found.accepted + (order - 1) * len(found.rejected)


def test_rejected_steps_are_kept() -> None:
    found = go(rtol=0.003, atol=1e-4, h_init=2.0)
    assert len(found.rejected) >= 1
    for step in found.rejected:
        assert step.error > 1.0
        assert step.end.lam > step.start.lam


def test_tighter_tolerances_cost_calls_and_buy_accuracy() -> None:
    truth = reference()
    results = [go(rtol=tol, atol=tol / 10) for tol in (0.1, 0.01, 1e-3, 1e-4)]
    errors = [oracle.distance(r.x, truth) for r in results]
    calls = [r.calls for r in results]
    assert calls == sorted(calls)
    assert errors == sorted(errors, reverse=True)
    # the controller holds the local error at the tolerance, and the global error stays within ten of them
    for tol, error in zip((0.1, 0.01, 1e-3, 1e-4), errors, strict=True):
        assert error < 10 * tol
    assert errors[-1] < 1e-4


# --- budget ----------------------------------------------------------------------------------------------------


def test_a_budget_is_required() -> None:
    with pytest.raises(TypeError, match="budget"):
        run_adaptive(MIXTURE, start(), schedule=CURVE)


@pytest.mark.parametrize("budget", [1, 2, 7, 20])
def test_the_budget_is_never_passed(budget: int) -> None:
    calls = 0

    def count(x: Tensor, level: Level, time: float) -> Tensor:
        nonlocal calls
        calls += 1
        return MIXTURE(x, level)

    with pytest.raises(PlanError, match="Reached λ") as refused:
        go(denoiser=count, budget=budget, rtol=0.01, atol=1e-3)
    assert refused.value.code == "budget"
    assert calls == budget


def test_a_budget_that_is_just_enough() -> None:
    needed = go().calls
    assert go(budget=needed).calls == needed
    with pytest.raises(PlanError):
        go(budget=needed - 1)


# --- the rest of the loop's manners ----------------------------------------------------------------------------


def test_cancellation_stops_between_steps() -> None:
    calls = 0

    def count(x: Tensor, level: Level, time: float) -> Tensor:
        nonlocal calls
        calls += 1
        return MIXTURE(x, level)

    with pytest.raises(Cancelled):
        go(denoiser=count, cancelled=lambda: calls >= 6)
    assert calls == 6


def test_it_can_begin_from_seeds() -> None:
    found = go(x=None, shape=(4,), seeds=[5, 6])
    assert found.x.shape == (2, 4)
    assert found.x.dtype == torch.float32


def test_the_state_is_float32_or_better() -> None:
    assert go(x=start().half()).x.dtype == torch.float32
    assert go().x.dtype == torch.float64


def test_the_callers_x_is_left_alone() -> None:
    x = start()
    go(x=x)
    assert torch.equal(x, start())


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": -3}, "budget"),
        ({"budget": 2.5}, "budget"),
        ({"budget": True}, "budget"),
        ({"budget": 10**7}, "budget"),
        ({"order": 1}, "order"),
        ({"order": 4}, "order"),
        ({"rtol": 0.0}, "tolerance"),
        ({"rtol": -1.0}, "tolerance"),
        ({"atol": math.nan}, "tolerance"),
        ({"h_init": 0.0}, "tolerance"),
        ({"h_init": math.inf}, "tolerance"),
        ({"eta": 1.5}, "eta"),
        ({"eta": -0.1}, "eta"),
        ({"sigma_min": 20.0}, "sigmas"),
        ({"sigma_min": 0.0}, "sigmas"),
        ({"sigma_max": math.inf}, "sigmas"),
        ({"schedule": "vp_cosine", "target": "v"}, "sigmas"),  # from pure noise λ has no beginning
        ({"schedule": "flow", "sigma_max": 1.0}, "sigmas"),
        ({"schedule": "scaled_linear", "target": "flow"}, "target-schedule"),
        ({"seeds": [1, 2]}, "seed"),
        ({"schedule": "flo"}, "unknown-schedule"),
        ({"target": "epz"}, "unknown-target"),
        ({"x": None}, "shape"),
        ({"x": None, "shape": (4,), "seeds": -1}, "seed"),
        ({"denoiser": lambda x, level, time: x * math.nan}, "not-finite"),
    ],
)
def test_bad_input_is_refused_by_name(options: dict, code: str) -> None:
    with pytest.raises(PellucidError) as refused:
        go(**options)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("schedule", "target", "what"), [("cosine", "eps", "schedule"), ("scaled_linear", "v", "target")]
)
def test_a_denoiser_of_another_schedule_or_target_is_refused(schedule: str, target: str, what: str) -> None:
    other = denoiser(lambda x, time: x, schedule, target)
    with pytest.raises(PellucidError, match=f"{what} must be the denoiser's"):
        run_adaptive(other, shape=(2,), budget=50, target="eps")
