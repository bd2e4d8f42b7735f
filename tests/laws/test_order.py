"""The order law: the error on an exact denoiser falls with the order that a sampler claims."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from orders import BOTTOM, SETUPS, TOP, Setup, error, measured_order, problem, runge_kutta_4, schedule_of

from pellucid.core.compile import compile_plan
from pellucid.core.grid import Grid
from pellucid.core.loop import run
from pellucid.core.plan import Plan, seal
from pellucid.core.samplers import REGISTRY

# Orders are reached from below or above as the step shrinks; at 96 to 192 steps they are within this.
SLACK = 0.2


def test_the_reference_has_converged() -> None:
    oracle, start, truth = problem()
    assert (runge_kutta_4(oracle, start, 2000) - truth).abs().max() < 1e-10


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_order(setup: Setup) -> None:
    assert measured_order(setup) >= setup.claimed - SLACK


def test_every_deterministic_sampler_is_measured() -> None:
    known = {name for name, entry in REGISTRY.items() if entry.deterministic and entry.family != "inversion"}
    assert known <= {setup.sampler for setup in SETUPS}


@pytest.mark.parametrize("name", [n for n, e in REGISTRY.items() if e.deterministic and e.family != "inversion"])
def test_the_registry_claims_what_is_measured(name: str) -> None:
    flow = REGISTRY[name].family == "flow"
    assert measured_order(Setup(name, 0, flow=flow)) == pytest.approx(REGISTRY[name].order, abs=0.25)


def test_inversion_and_back() -> None:
    """DDIM inversion is first order: twice the steps, half the error of the way there and back."""
    oracle, _, _ = problem()
    x = oracle.sample(8, torch.Generator().manual_seed(0))

    def round_trip(steps: int) -> float:
        up = compile_plan(
            "ddim_inversion", schedule=schedule_of(SETUPS[0])[0], target="edm", grid="exponential", steps=steps
        )
        down = compile_plan(
            "ddim",
            schedule=schedule_of(SETUPS[0])[0],
            target="edm",
            grid=Grid("exponential", final="sigma_min"),
            steps=steps,
        )
        return float((run(down, oracle, run(up, oracle, x)) - x).norm())

    assert round_trip(100) / round_trip(200) == pytest.approx(2.0, abs=0.2)


def with_wrong_history(plan: Plan) -> Plan:
    """One tenth of the newest prediction's weight moved to the one before it."""
    rows = list(plan.rows)
    for i in range(3, len(rows)):
        weights = dict(rows[i].x)
        if 3 in weights:
            weights[2], weights[3] = weights[2] - 0.1, weights[3] + 0.1
            rows[i] = replace(rows[i], x=tuple(sorted(weights.items())))
    return seal(replace(plan, rows=tuple(rows)))


def test_a_wrong_history_weight_passes_the_first_law_and_fails_the_second() -> None:
    oracle, start, truth = problem()
    schedule, target = schedule_of(SETUPS[0])
    errors = []
    for steps in (96, 192):
        plan = compile_plan(
            "dpmpp_2m", schedule=schedule, target=target, grid=Grid("exponential", final="sigma_min"), steps=steps
        )
        wrong = with_wrong_history(plan)
        assert wrong.deviation < 1e-9
        errors.append(float((run(wrong, oracle, start) - truth).norm()))
    assert errors[0] / errors[1] < 3  # second order would be 4


def test_third_order_needs_the_whole_second_derivative() -> None:
    """The published form (diffusers, k-diffusion) takes half of it, and measures 2."""
    published = Setup("dpmpp_3m", 2, {"curvature_scale": 0.5})
    assert measured_order(published) == pytest.approx(2.0, abs=0.15)
    assert measured_order(Setup("dpmpp_3m", 3)) == pytest.approx(3.0, abs=0.2)
    assert error(Setup("dpmpp_3m", 3), 192) < error(published, 192) / 10


def test_the_problem_is_as_described() -> None:
    _, start, truth = problem()
    assert start.std() == pytest.approx(TOP, rel=0.3)
    assert truth.std() < 3
    assert BOTTOM < 1
