"""The order law: on an exact denoiser the error falls with the order that a sampler claims."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from orders import (
    ABOVE,
    ALWAYS_NOISY,
    BELOW,
    COUNTS,
    MIXTURE,
    NO_ORDER,
    NOISE_OFF,
    SETTINGS,
    Case,
    compiled,
    ends,
    error_of,
    measure,
    reference_error,
    registered,
    variants,
    weak_cases,
    weak_error,
)

from pellucid import Plan, compile_plan, run, samplers
from pellucid.core.plan import TOLERANCE, deviation


def last_two(case: Case) -> Case:
    return dataclasses.replace(case, counts=case.counts[-2:])


def check(case: Case, how=error_of) -> None:
    found = measure(last_two(case), how)
    assert case.order - BELOW <= found.order <= case.order + ABOVE, f"{case.name}: measured {found.order:.2f}"


@pytest.mark.parametrize("case", registered(), ids=lambda c: c.name)
def test_every_registered_sampler_has_the_order_of_the_registry(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", variants(), ids=lambda c: c.name)
def test_variants_have_their_orders(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", weak_cases(), ids=lambda c: c.name)
def test_the_variance_converges_with_the_noise_on(case: Case) -> None:
    check(case, weak_error)


@pytest.mark.parametrize("name", ALWAYS_NOISY)
def test_the_registry_has_the_weak_order_where_noise_cannot_be_taken_out(name: str) -> None:
    assert samplers.REGISTRY[name].order == next(c.order for c in weak_cases() if (c.sampler, c.options) == (name, {}))


def test_no_sampler_is_forgotten() -> None:
    measured = {case.sampler for case in registered()}
    assert measured | {*ALWAYS_NOISY, *NO_ORDER} == set(samplers.REGISTRY)
    stochastic = {name for name, entry in samplers.REGISTRY.items() if not entry.deterministic}
    assert stochastic == {*NOISE_OFF, *ALWAYS_NOISY, "lcm"}
    assert stochastic - {"lcm", "tcd"} <= {case.sampler for case in weak_cases()}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_truth_is_accurate(setting: str) -> None:
    assert reference_error(*ends(Case("ddim", 1, setting=setting))) < 1e-11


def test_noise_off_means_no_noise() -> None:
    for case in registered():
        assert not compiled(case, 20).stochastic, case.name


# --- why both laws are needed ----------------------------------------------------------------------------------


def with_wrong_history(plan: Plan) -> Plan:
    """Moves a tenth of p1's weight to p0 in every row: the sum, which is all that one point can see, is kept."""
    rows = []
    for r in plan.rows:
        w = dict(r.x)
        if 3 in w:
            w[2], w[3] = w[2] + 0.1 * w[3], 0.9 * w[3]
        rows.append(dataclasses.replace(r, x=tuple(sorted(w.items()))))
    return dataclasses.replace(plan, rows=tuple(rows))


@pytest.mark.parametrize("sampler", ["dpmpp_2m", "unipc", "deis", "lms", "res_multistep"])
def test_a_wrong_history_weight_passes_the_marginal_law_and_fails_the_order_law(sampler: str) -> None:
    wrong = [with_wrong_history(compiled(Case(sampler, 0), steps)) for steps in COUNTS[-2:]]
    for plan in wrong:
        assert deviation(plan)[0] < TOLERANCE
        assert Plan.from_json(plan.to_json()) == plan  # even from a file
    few, many = (error_of(plan) for plan in wrong)
    assert math.log2(few / many) < samplers.REGISTRY[sampler].order - 0.5


def test_a_wrong_noise_weight_fails_the_marginal_law() -> None:
    """And the order law with the noise off cannot see it."""
    plan = compiled(Case("ddpm", 1), 20)
    rows = [dataclasses.replace(r, x=tuple((k, w * (1.01 if k == 7 else 1.0)) for k, w in r.x)) for r in plan.rows]
    assert deviation(dataclasses.replace(plan, rows=tuple(rows)))[0] > 1e-3


def test_third_order_needs_the_whole_second_derivative() -> None:
    """Half of it, as DPM-Solver's code, diffusers and k-diffusion have it, keeps the marginal law and measures 2."""
    half = Case("dpmpp_3m", 2, {"curvature_scale": 0.5})
    whole = Case("dpmpp_3m", 3)
    assert compiled(half, 20).deviation < TOLERANCE
    assert measure(last_two(half)).order == pytest.approx(2.0, abs=BELOW)
    assert measure(last_two(whole)).order == pytest.approx(3.0, abs=BELOW)
    assert error_of(compiled(whole, 160)) < error_of(compiled(half, 160)) / 10


def test_inversion_and_back() -> None:
    """DDIM inversion is first order: twice the steps, half the error of the way there and back."""
    setting = SETTINGS["edm"]
    x = MIXTURE.sample(8, torch.Generator().manual_seed(0))

    def round_trip(steps: int) -> float:
        about = {"schedule": setting.schedule, "target": setting.target, "grid": setting.grid, "steps": steps}
        up, down = compile_plan("ddim_inversion", **about), compile_plan("ddim", **about)
        return float((run(down, MIXTURE, run(up, MIXTURE, x)) - x).norm())

    assert round_trip(200) / round_trip(400) == pytest.approx(2.0, abs=0.2)
