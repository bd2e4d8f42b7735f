"""The marginal law: with a perfect denoiser of one point, every row of every table lands on its level."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import Coordinates
from torch import Tensor

from pellucid import Grid, Level, PellucidError, Plan, PlanError, StepSeen, compile_plan, run, samplers, schedules
from pellucid.core import grid as grids
from pellucid.core.plan import P0, TOLERANCE, X, deviation, row, seal

SAMPLERS = samplers.names()
STEPS = (1, 2, 3, 5, 10, 20)
CURVES = {
    **{name: schedules.make(name) for name in schedules.names()},
    "scaled_linear+zero_snr": schedules.make("scaled_linear", zero_snr=True),
    "cosine+zero_snr": schedules.make("cosine", zero_snr=True),
    "flow shift 3": schedules.make("flow", shift=3.0),
}
SOME_GRIDS = ("trailing", "leading", "karras", "beta")
EVERY_GRID = tuple(name for name in grids.names() if name != "explicit")

# Samplers that deviate by default, and say so.
DECLARED = {
    "lcm": "c_skip and c_out keep a trace of x in the clean image",
    "edm_stochastic": "s_noise other than 1 adds more or less noise than churn removed",
}
# Samplers on straight lines or on eps cannot leave pure noise; on a flow, the straight lines can.
NOT_FROM_NOISE = {"deis", "dpm_fast", "ipndm", "plms", "pndm"}
NOT_FROM_NOISE_IN_VP = NOT_FROM_NOISE | {
    *("heun", "heunpp2", "dpm2", "dpm2_a", "lms", "gradient_estimation", "edm_stochastic", "restart", "flow_heun"),
}
# Steps over many orders of magnitude of sigma in these methods multiply rounding by sigma / sigma_next a stage:
# the table is right, float64 is not enough for 1e-9, and where no digit is left the plan is refused. Which samplers,
# from a first sigma above which.
AMPLIFIES = {
    **dict.fromkeys(
        ("heun", "flow_heun", "edm_stochastic", "dpm2", "dpm2_a", "dpm_fast", "restart", "plms", "lms"), 1e4
    ),
    **dict.fromkeys(("heunpp2", "gradient_estimation", "deis", "ipndm"), 1e7),
    "pndm": 5.0,  # four stages
}


def compiled(sampler: str, curve: schedules.Schedule, grid: str | Grid, steps: int, **options) -> Plan:
    return compile_plan(sampler, schedule=curve, target=curve.carries[0], grid=grid, steps=steps, **options)


def why_refused(sampler: str, curve: schedules.Schedule, grid: str) -> str | None:
    """The code with which a combination must be refused, or None where it must work."""
    blind = math.isinf(float(curve.ratio_at(curve.span[1])))
    if curve.frame == "flow":
        if grid in grids.AYS:
            return "grid-schedule"
        if sampler == "edm_stochastic":
            return "churn"  # raising sigma alone leaves the flow's frame
        starts_blind = grid not in ("leading", "quadratic")
        return "alpha-zero" if starts_blind and sampler in NOT_FROM_NOISE else None
    if not blind:
        return None
    if grid in grids.OVER_SIGMA:
        return "sigmas"
    starts_blind = grid not in ("leading", "quadratic", *grids.AYS)
    return "alpha-zero" if starts_blind and sampler in NOT_FROM_NOISE_IN_VP else None


def check(sampler: str, grid_names: tuple[str, ...]) -> None:
    for name, curve in CURVES.items():
        for grid in grid_names:
            code = why_refused(sampler, curve, grid)
            for steps in STEPS:
                where = f"{sampler} on {name}, {grid}, {steps} steps"
                if code is not None:
                    with pytest.raises(PellucidError) as refused:
                        compiled(sampler, curve, grid, steps)
                    assert refused.value.code == code, where
                    continue
                judge(sampler, curve, grid, steps, where)


def attempt(sampler: str, curve: schedules.Schedule, grid: str, steps: int, options: dict) -> Plan | str:
    """The plan, or the code with which it is refused."""
    try:
        return compiled(sampler, curve, grid, steps, **options)
    except PellucidError as error:
        return error.code


def judge(sampler: str, curve: schedules.Schedule, grid: str, steps: int, where: str, **options) -> None:
    top = AMPLIFIES.get(sampler, math.inf)
    plan = attempt(sampler, curve, grid, steps, options)
    if isinstance(plan, str):
        assert plan == "ill-conditioned", where
        assert float(curve.ratio_at(curve.span[1])) > top, where
        return
    assert plan.declared == ("" if options else DECLARED.get(sampler, "")), where
    if not plan.declared:
        blur = deviation(plan)[1] if plan.start.ratio > top else 0.0  # the bound that runs beside the law
        assert plan.deviation <= TOLERANCE + blur, where


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_keeps_the_law_on_every_schedule(sampler: str) -> None:
    check(sampler, SOME_GRIDS)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_keeps_the_law_on_every_schedule_and_grid(sampler: str) -> None:
    check(sampler, tuple(g for g in EVERY_GRID if g not in SOME_GRIDS))


ON_X0 = [
    ("ddim", {"eta": 1.0}),
    ("ddim", {"keep_eps": True}),
    ("euler_a", {"eta": 0.5}),
    ("dpm_multistep", {"order": 3}),
    ("dpm_multistep", {"order": 3, "algorithm": "sde-dpmsolver++"}),
    ("dpm_multistep", {"algorithm": "sde-dpmsolver++", "eta": 0.5}),
    ("dpm_singlestep", {"order": 3}),
    ("dpm_singlestep", {"order": 3, "solver": "heun"}),
    ("dpm_singlestep", {"algorithm": "sde-dpmsolver++"}),
    ("dpmpp_2m", {"lower_order_final": True}),
    ("dpmpp_2s_a", {"eta": 0.5}),
    ("dpmpp_sde", {"r": 0.3, "eta": 0.5}),
    ("unipc", {"order": 3}),
    ("unipc", {"order": 3, "lower_order_final": True}),
    ("sa_solver", {"tau_range": (0.0, 1.0)}),
    ("sa_solver", {"tau": 0.0, "predictor_order": 3, "corrector_order": 4}),
    ("res_multistep", {"eta": 1.0}),
    ("er_sde", {"order": 2}),
    ("flow_euler", {"stochastic": True}),
    ("tcd", {"eta": 1.0}),
    ("tcd", {"eta": 0.0}),
]
ON_EPS = [
    ("dpm_multistep", {"algorithm": "dpmsolver"}),
    ("dpm_multistep", {"algorithm": "dpmsolver", "order": 3, "solver": "heun"}),
    ("dpm_singlestep", {"algorithm": "dpmsolver", "order": 3}),
    ("unipc", {"predict_x0": False}),
    ("sa_solver", {"tau": 0.0, "predict_x0": False}),
    ("dpm_fast", {"eta": 1.0}),
    ("plms", {"warm": False}),
    ("pndm", {"warm": False}),
    ("deis", {"lower_order_final": True}),
]
ON_LINES = [
    ("edm_stochastic", {"s_noise": 1.0}),
    ("euler", {"s_churn": 1.0}),
    ("restart", {"times": 3}),
    ("restart", {"low": 0.5, "high": 20.0}),
    ("dpm2_a", {"eta": 0.5}),
    ("gradient_estimation", {"gamma": 1.5}),
]


def told(value: object) -> str:
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("sampler", "options"), ON_X0 + ON_EPS + ON_LINES, ids=told)
def test_options_keep_the_law(sampler: str, options: dict) -> None:
    curves = ["scaled_linear", "vp_linear", "edm"]
    curves += ["flow shift 3", "scaled_linear+zero_snr"] if (sampler, options) in ON_X0 else []
    for name in curves:
        for grid in ("trailing", "beta"):
            for steps in STEPS:
                judge(sampler, CURVES[name], grid, steps, f"{sampler} {options} on {name}", **options)


@given(
    sampler=st.sampled_from([s for s in SAMPLERS if s not in DECLARED]),
    curve=st.sampled_from(["linear", "scaled_linear", "vp_linear", "edm", "laplace", "exponential"]),
    times=st.lists(st.floats(0.02, 1.0), min_size=1, max_size=12, unique=True),
)
@settings(max_examples=60, deadline=None)
def test_any_times_keep_the_law(sampler: str, curve: str, times: list[float]) -> None:
    schedule = CURVES[curve]
    low, high = schedule.span
    chosen = sorted((low + (high - low) * u for u in times), reverse=True)
    if any(a - b < 1e-3 * (high - low) for a, b in itertools.pairwise(chosen)):
        return
    plan = compile_plan(sampler, schedule=schedule, grid=Grid(timesteps=tuple(chosen)))
    assert plan.deviation <= TOLERANCE + deviation(plan)[1]


# --- the law by another way: in the loop -----------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if s != "lcm"])  # declared: LCM keeps a trace of x
@pytest.mark.parametrize("curve", ["scaled_linear", "edm", "flow shift 3"])
def test_the_loop_lands_on_every_level(sampler: str, curve: str) -> None:
    """x as coordinates: how much of the point, of the first noise, and of each drawn noise it holds."""
    schedule = CURVES[curve]
    options = {"edm_stochastic": {"s_noise": 1.0, "s_churn": 0.0 if schedule.frame == "flow" else 40.0}}.get(
        sampler, {}
    )
    grid = Grid("linspace", start=900.0 if curve == "flow shift 3" else None)  # below pure noise
    plan = compiled(sampler, schedule, grid, 8, **options)
    noise = Coordinates(plan)
    x = torch.zeros(1, len(noise.place) + 2, dtype=torch.float64)
    x[0, 0], x[0, -1] = plan.start.sigma, plan.start.alpha  # the first noise; the last coordinate is the point
    landed: list[tuple[float, float, Level]] = []

    def point(x: Tensor, level: Level, time: float) -> Tensor:
        out = torch.zeros_like(x)
        out[0, -1] = 1.0
        return out

    def look(seen: StepSeen) -> None:
        landed.append((seen.x_next[0, -1].item(), seen.x_next[0, :-1].norm().item(), seen.next_levels[0]))

    run(plan, point, x, noise=noise, observers=[look])
    assert len(landed) == plan.nfe
    for signal, spread, level in landed:
        size = math.hypot(level.alpha, level.sigma)
        assert signal == pytest.approx(level.alpha, abs=1e-9 * size)
        assert spread == pytest.approx(level.sigma, abs=1e-9 * size)


# --- what deviates says so -------------------------------------------------------------------------------------


def test_by_default_two_samplers_deviate() -> None:
    found = {name: compile_plan(name, steps=6).declared for name in SAMPLERS}
    assert {name: why for name, why in found.items() if why} == DECLARED


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if "s_noise" in samplers.REGISTRY[s].options()])
def test_more_noise_than_the_law_allows_is_declared(sampler: str) -> None:
    noisy = {"euler": {"s_churn": 4.0}, "dpm_fast": {"eta": 1.0}, "res_multistep": {"eta": 1.0}}.get(sampler, {})
    if sampler == "dpm_multistep":
        noisy = {"algorithm": "sde-dpmsolver++"}
    exact = compile_plan(sampler, steps=6, s_noise=1.0, **noisy)
    more = compile_plan(sampler, steps=6, s_noise=1.2, **noisy)
    assert not exact.declared
    assert exact.deviation < TOLERANCE
    assert "s_noise" in more.declared
    assert more.deviation > 1e-3


@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        ("ddpm", {"variance": "large"}),
        ("dpm_multistep", {"algorithm": "sde-dpmsolver"}),
        ("sa_solver", {"predict_x0": False}),
    ],
)
def test_options_that_deviate_are_declared(sampler: str, options: dict) -> None:
    # to the least noise: sde-dpmsolver, on eps, has no step to a clean x
    plan = compile_plan(sampler, steps=6, grid=Grid(final="sigma_min"), **options)
    assert plan.declared
    assert plan.deviation > 1e-6


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_deviation_is_recorded_and_comes_back(sampler: str) -> None:
    plan = compile_plan(sampler, steps=6)
    assert plan.deviation == deviation(plan)[0]
    assert (plan.deviation > TOLERANCE) == bool(plan.declared)


# --- a wrong table is caught -----------------------------------------------------------------------------------


def wrong(plan: Plan, index: int, factor: float, declared: str = "") -> Plan:
    rows = list(plan.rows)
    weights = list(rows[index].x)
    weights[0] = (weights[0][0], weights[0][1] * factor)
    rows[index] = dataclasses.replace(rows[index], x=tuple(weights))
    return dataclasses.replace(plan, rows=tuple(rows), declared=declared)


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if s not in DECLARED])
def test_an_undeclared_deviation_raises(sampler: str) -> None:
    plan = compile_plan(sampler, steps=6)
    with pytest.raises(PlanError, match="marginal law") as refused:
        seal(wrong(plan, plan.nfe // 2, 1.0 + 1e-6))
    assert refused.value.code == "marginal-law"


def test_a_declared_one_is_recorded() -> None:
    plan = seal(wrong(compile_plan("ddim", steps=6), 3, 1.01, declared="for a test"))
    assert 1e-4 < plan.deviation < 0.1


@given(factor=st.floats(0.5, 2.0), index=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_the_deviation_grows_with_the_mistake(factor: float, index: int) -> None:
    plan = compile_plan("ddim", steps=6)
    found, _ = deviation(wrong(plan, index, factor))
    # x's weight of row i lands x at the next level: (factor − 1)·weight·x, and x has size 1 in the vp frame
    weight = plan.rows[index].x[0][1]
    assert found <= abs(factor - 1) * weight * 1.0000001 + 1e-15
    if abs(factor - 1) > 1e-6:
        assert found > 1e-9


def test_a_table_made_by_hand_is_judged() -> None:
    """Euler from sigma 2 to 1 to 0 with x = x0 + sigma·eps: half of x and half of x0, then x0."""
    two, one = Level(1.0, 2.0), Level(1.0, 1.0)
    right = Plan(
        "by_hand", (row(0.0, two, X * 0.5 + P0 * 0.5), row(0.0, one, P0)), "x0", two, Level(1.0, 0.0), "ve", 2.0
    )
    assert seal(right).deviation == 0.0
    bad = dataclasses.replace(right, rows=(row(0.0, two, X * 0.5 + P0 * 0.4), right.rows[1]))
    with pytest.raises(PlanError) as refused:
        seal(bad)
    assert refused.value.code == "marginal-law"


def test_a_nan_does_not_pass() -> None:
    plan = compile_plan("ddim", steps=3)
    rows = (dataclasses.replace(plan.rows[0], x=((0, math.nan),)), *plan.rows[1:])
    with pytest.raises(PlanError) as refused:
        seal(dataclasses.replace(plan, rows=rows))
    assert refused.value.code == "marginal-law"


# --- pure noise ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_who_can_start_at_pure_noise(sampler: str) -> None:
    for name, refusers in (("scaled_linear+zero_snr", NOT_FROM_NOISE_IN_VP), ("flow", NOT_FROM_NOISE)):
        options = {"s_churn": 0.0} if sampler == "edm_stochastic" else {}
        if sampler in refusers:
            with pytest.raises(PellucidError) as refused:
                compiled(sampler, CURVES[name], "trailing", 6, **options)
            assert refused.value.code == "alpha-zero"
        else:
            plan = compiled(sampler, CURVES[name], "trailing", 6, **options)
            noisy = plan.end if sampler == "ddim_inversion" else plan.start
            assert noisy == Level(0.0, 1.0)


@pytest.mark.parametrize("sampler", sorted(NOT_FROM_NOISE_IN_VP))
def test_just_below_pure_noise_they_can(sampler: str) -> None:
    plan = compiled(sampler, CURVES["scaled_linear+zero_snr"], Grid(start=990.0), 6)
    assert plan.declared == DECLARED.get(sampler, "")
    assert math.isfinite(plan.start.ratio)
