"""compile_plan: names find their sampler, bad input is refused with help, and a table is made in milliseconds."""

from __future__ import annotations

import math
import time

import pytest
import torch

from pellucid import Grid, Level, PellucidError, Plan, PlanError, compile_plan, oracle, run, schedules
from pellucid.core import grid as grids
from pellucid.core import samplers

SAMPLERS = samplers.names()


# --- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sampler", "grid"),
    [
        ("dpmpp_2m", "dpmpp_2m", "trailing"),
        ("DPM++ 2M", "dpmpp_2m", "trailing"),
        ("DPM++ 2M Karras", "dpmpp_2m", "karras"),
        ("dpm++ 2m karras", "dpmpp_2m", "karras"),
        ("DPM++ 2M SDE Karras", "dpmpp_2m_sde", "karras"),
        ("DPM++ 3M SDE Exponential", "dpmpp_3m_sde", "exponential"),
        ("DPM++ SDE Karras", "dpmpp_sde", "karras"),
        ("DPM++ 2S a Karras", "dpmpp_2s_a", "karras"),
        ("DPM2 a Karras", "dpm2_a", "karras"),
        ("DPM2 Karras", "dpm2", "karras"),
        ("LMS Karras", "lms", "karras"),
        ("Euler a", "euler_a", "trailing"),
        ("Euler ancestral", "euler_a", "trailing"),
        ("euler a sgm uniform", "euler_a", "sgm_uniform"),
        ("k_euler", "euler", "trailing"),
        ("sample_dpmpp_2m_sde", "dpmpp_2m_sde", "trailing"),
        ("DPMSolverMultistepScheduler", "dpm_multistep", "trailing"),
        ("DPMSolverSinglestepScheduler", "dpm_singlestep", "trailing"),
        ("EulerAncestralDiscreteScheduler", "euler_a", "trailing"),
        ("EulerDiscreteScheduler", "euler", "trailing"),
        ("HeunDiscreteScheduler", "heun", "trailing"),
        ("KDPM2DiscreteScheduler", "dpm2", "trailing"),
        ("LMSDiscreteScheduler", "lms", "trailing"),
        ("DDIMScheduler", "ddim", "trailing"),
        ("DDPMScheduler", "ddpm", "trailing"),
        ("PNDMScheduler", "pndm", "trailing"),
        ("UniPCMultistepScheduler", "unipc", "trailing"),
        ("DEISMultistepScheduler", "deis", "trailing"),
        ("SASolverScheduler", "sa_solver", "trailing"),
        ("LCMScheduler", "lcm", "lcm"),
        ("TCDScheduler", "tcd", "lcm"),
        ("UniPC", "unipc", "trailing"),
        ("Restart", "restart", "trailing"),
        ("Heun++ 2", "heunpp2", "trailing"),
    ],
)
def test_names_that_people_use(name: str, sampler: str, grid: str) -> None:
    plan = compile_plan(name, steps=4)
    assert (plan.name, plan.grid["name"]) == (sampler, grid)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_is_found_by_name_title_and_aliases(sampler: str) -> None:
    entry = samplers.REGISTRY[sampler]
    for name in (entry.name, entry.title, entry.title.upper(), *entry.aliases):
        assert samplers.resolve(name) == (entry, None)


def test_the_registry_is_these_samplers() -> None:
    assert set(SAMPLERS) == {
        *("ddpm", "ddim", "ddim_inversion", "lcm", "tcd"),
        *("euler", "euler_a", "heun", "edm_stochastic", "heunpp2", "dpm2", "dpm2_a", "lms", "gradient_estimation"),
        *("restart", "euler_cfgpp"),
        *("dpm_multistep", "dpmpp_2m", "dpmpp_3m", "dpmpp_2m_sde", "dpmpp_3m_sde", "dpm_singlestep", "dpmpp_2s_a"),
        *("dpmpp_sde", "dpm_fast", "dpmpp_2m_cfgpp"),
        *("unipc", "deis", "res_multistep", "sa_solver", "er_sde", "flow_euler", "flow_heun", "plms", "pndm", "ipndm"),
    }


def test_a_name_with_its_grid_given_again_is_fine() -> None:
    assert compile_plan("DPM++ 2M Karras", grid=Grid("karras", rho=5.0), steps=4).grid["rho"] == 5.0


def test_a_name_with_another_grid_is_refused() -> None:
    with pytest.raises(PlanError, match="as the sampler's name says") as refused:
        compile_plan("DPM++ 2M Karras", grid="trailing")
    assert refused.value.code == "grid-twice"


# --- unknown names list the nearest ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code", "hint"),
    [
        ({"sampler": "dpmpp_2mm"}, "unknown-sampler", "dpmpp_2m"),
        ({"sampler": "eular"}, "unknown-sampler", "euler"),
        ({"schedule": "scaled_liner"}, "unknown-schedule", "scaled_linear"),
        ({"grid": "karas"}, "unknown-grid", "karras"),
        ({"target": "epsilom"}, "unknown-target", "epsilon"),
        ({"dialect": "difusers"}, "unknown-dialect", "diffusers"),
    ],
)
def test_an_unknown_name_lists_the_nearest(options: dict, code: str, hint: str) -> None:
    with pytest.raises(PellucidError, match=rf"Nearest: .*{hint}") as refused:
        compile_plan(**{"sampler": "ddim", **options})
    assert refused.value.code == code


def test_an_unknown_option_lists_the_known() -> None:
    with pytest.raises(PlanError, match=r"Known: eta, keep_eps\.") as refused:
        compile_plan("ddim", etta=0.5)
    assert refused.value.code == "option"


def test_an_option_that_has_no_effect_is_refused() -> None:
    with pytest.raises(PlanError, match="one that heun reads") as refused:
        compile_plan("heun", eta=0.5)
    assert refused.value.code == "option"


# --- numbers out of range --------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, -1, 10_001, 10**9, 2.0, 2.5, math.nan, True, "20"])
def test_steps_out_of_range(steps: object) -> None:
    with pytest.raises(PlanError, match="steps must be a whole number from 1 to 10000") as refused:
        compile_plan("ddim", steps=steps)
    assert refused.value.code == "steps"


@pytest.mark.parametrize("sigmas", [(3.0, math.nan), (math.nan,), (math.inf, 1.0), (3.0, -1.0)])
def test_sigmas_that_are_not_numbers(sigmas: tuple) -> None:
    with pytest.raises(PlanError, match="sigmas must be finite") as refused:
        compile_plan("euler", grid=Grid(sigmas=sigmas))
    assert refused.value.code == "not-finite"


@pytest.mark.parametrize("sigmas", [(1.0, 3.0), (3.0, 3.0), (3.0, 1.0, 2.0, 0.0), (3.0, 0.0, 0.0)])
def test_levels_that_do_not_decrease(sigmas: tuple) -> None:
    with pytest.raises(PlanError, match="strictly decreasing") as refused:
        compile_plan("euler", grid=Grid(sigmas=sigmas))
    assert refused.value.code == "not-decreasing"


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if "eta" in samplers.REGISTRY[s].options()])
@pytest.mark.parametrize("eta", [-0.01, 1.01, math.nan, math.inf])
def test_eta_out_of_range(sampler: str, eta: float) -> None:
    with pytest.raises(PlanError, match="eta must be between 0 and 1") as refused:
        compile_plan(sampler, eta=eta)
    assert refused.value.code == "eta"


@pytest.mark.parametrize(
    ("sampler", "options", "code"),
    [
        ("lms", {"order": 0}, "order"),
        ("lms", {"order": 5}, "order"),
        ("unipc", {"order": 4}, "order"),
        ("unipc", {"order": 2.0}, "order"),
        ("unipc", {"variant": "bh3"}, "option"),
        ("deis", {"order": 4}, "order"),
        ("dpm_multistep", {"order": 4}, "order"),
        ("dpm_multistep", {"algorithm": "dpm"}, "option"),
        ("dpm_multistep", {"solver": "trapezoid"}, "option"),
        ("dpm_multistep", {"order": 3, "algorithm": "sde-dpmsolver"}, "order"),
        ("dpm_singlestep", {"order": 0}, "order"),
        ("ipndm", {"order": 5}, "order"),
        ("er_sde", {"order": 4}, "order"),
        ("sa_solver", {"tau": -1.0}, "eta"),
        ("sa_solver", {"predictor_order": 4}, "order"),
        ("ddpm", {"variance": "huge"}, "option"),
        ("dpmpp_sde", {"r": 0.0}, "option"),
        ("dpmpp_sde", {"r": 1.0}, "option"),
        ("euler", {"s_churn": -1.0}, "churn"),
        ("euler", {"s_churn": math.nan}, "churn"),
        ("edm_stochastic", {"s_noise": math.inf}, "churn"),
        ("restart", {"low": 3.0}, "restart"),
        ("restart", {"times": -1}, "restart"),
        ("restart", {"times": 10**6}, "restart"),
        ("restart", {"restart_steps": -1}, "restart"),
        ("plms", {"basis": "x0"}, "option"),
        ("gradient_estimation", {"gamma": math.nan}, "not-finite"),
        ("euler_a", {"s_noise": math.nan}, "not-finite"),
    ],
)
def test_options_out_of_range(sampler: str, options: dict, code: str) -> None:
    with pytest.raises(PlanError, match="must be") as refused:
        compile_plan(sampler, **options)
    assert refused.value.code == code


@pytest.mark.parametrize("skip", [-1, 20, 1.5, None])
def test_skip_out_of_range(skip: object) -> None:
    with pytest.raises(PlanError, match="skip must be") as refused:
        compile_plan("ddim", steps=20, skip=skip)
    assert refused.value.code == "skip"


# --- targets that a schedule cannot carry ----------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_eps_under_zero_terminal_snr_is_refused(sampler: str) -> None:
    """Peers give inf on the first step."""
    with pytest.raises(PlanError, match="use a v or x0 model") as refused:
        compile_plan(sampler, schedule=schedules.make("scaled_linear", zero_snr=True), target="eps")
    assert refused.value.code == "target-schedule"


@pytest.mark.parametrize(
    ("schedule", "target"),
    [("scaled_linear", "flow"), ("linear", "edm"), ("edm", "flow"), ("flow", "edm"), ("vp_cosine", "eps")],
)
def test_a_target_that_the_schedule_cannot_carry_is_refused(schedule: str, target: str) -> None:
    with pytest.raises(PlanError, match=f"one that schedule {schedule} carries") as refused:
        compile_plan("ddim", schedule=schedule, target=target)
    assert refused.value.code == "target-schedule"


@pytest.mark.parametrize("target", ["epsilon", "v_prediction", "sample"])
def test_the_target_changes_nothing_in_the_table(target: str) -> None:
    """A sampler never asks what the network predicts."""
    assert compile_plan("dpmpp_2m", steps=5, target=target).rows == compile_plan("dpmpp_2m", steps=5).rows


# --- defaults --------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    plan = compile_plan("ddim")
    assert plan.nfe == 20
    assert plan.schedule["name"] == "scaled_linear"
    assert (plan.target, plan.dialect, plan.grid["name"]) == ("eps", "exact", "trailing")
    assert compile_plan("ddim", schedule="edm").grid["name"] == "karras"
    assert compile_plan("lcm", steps=4).grid["name"] == "lcm"


def test_the_default_ends_clean_and_starts_at_the_levels_own_sigma() -> None:
    plan = compile_plan("euler")
    assert plan.end == Level(1.0, 0.0)
    assert plan.initial_scale == plan.rows[0].level.sigma == pytest.approx(14.6146, abs=1e-4)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_one_step_works_for_every_sampler(sampler: str) -> None:
    assert compile_plan(sampler, steps=1).nfe == 1  # k-diffusion's 2M SDE crashes here


@pytest.mark.parametrize("steps", [2, 3, 5, 8, 11])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_singlestep_takes_any_count(order: int, steps: int) -> None:
    assert compile_plan("dpm_singlestep", order=order, steps=steps).nfe == steps  # order 3 at 3n − 1: NaN in diffusers


@pytest.mark.parametrize("sampler", ["ddim", "pndm", "plms", "euler", "dpmpp_2m"])
def test_a_thousand_steps_work(sampler: str) -> None:
    assert compile_plan(sampler, steps=1000).nfe >= 1000  # IndexError in diffusers' DDIM


def test_skip_leaves_out_the_first_legs() -> None:
    whole, part = compile_plan("ddim", steps=10), compile_plan("ddim", steps=10, skip=4)
    assert part.rows == whole.rows[4:]
    assert part.start == whole.rows[4].level
    assert part.initial_scale == part.start.sigma
    assert part.grid["skip"] == 4


def test_skip_cuts_a_multistep_plan_where_it_has_no_history() -> None:
    part = compile_plan("dpmpp_2m", steps=10, skip=4)
    assert not part.rows[0].uses("p1")
    assert part.rows[1].uses("p1")


def test_a_plan_remembers_its_options() -> None:
    plan = compile_plan("ddim", steps=5, eta=0.25)
    assert plan.options == {"eta": 0.25}
    assert plan.grid == {"name": "trailing", "steps": 5}
    assert plan.schedule == schedules.to_dict(schedules.make("scaled_linear"))


# --- time ------------------------------------------------------------------------------------------------------


def best_time(**options: object) -> float:
    """The best of 5, so that a busy machine does not count."""
    best = math.inf
    for _ in range(5):
        begin = time.perf_counter()
        compile_plan(steps=50, **options)
        best = min(best, time.perf_counter() - begin)
    return best


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_fifty_steps_compile_within_twenty_milliseconds(sampler: str) -> None:
    assert best_time(sampler=sampler) < 0.020


@pytest.mark.parametrize("grid", [g for g in grids.names() if g != "explicit"])
def test_on_every_grid(grid: str) -> None:
    assert best_time(sampler="dpmpp_2m", grid=grid) < 0.020


# --- between two times, and stopping early -----------------------------------------------------------------------


@pytest.mark.parametrize("grid", ["trailing", "leading", "karras", "ays_sd15", "beta", "kl_optimal"])
@pytest.mark.parametrize("sampler", ["dpmpp_2m", "heun", "euler_a", "unipc"])
def test_a_cut_path_starts_and_ends_exactly_where_asked(sampler: str, grid: str) -> None:
    curve = schedules.make("scaled_linear")
    for strength in (1.0, 0.75, 0.31, 0.29, 0.05):
        plan = compile_plan(sampler, grid=grid, steps=20, between=(strength * 999, None))
        assert plan.start.ratio == pytest.approx(float(curve.ratio_at(strength * 999)), rel=1e-12)
        assert plan.rows[0].time == pytest.approx(strength * 999, rel=1e-9)
        assert plan.end.sigma == 0.0
        part = compile_plan(sampler, grid=grid, steps=20, between=(strength * 999, 20.0))
        assert part.end.ratio == pytest.approx(float(curve.ratio_at(20.0)), rel=1e-12)


def test_a_sliver_joins_its_neighbour() -> None:
    plan = compile_plan("euler", steps=20, between=(0.51 * 999, None))  # the grid has a point at 499, 10 below
    assert plan.timesteps == pytest.approx((509.49, *range(449, 0, -50)))


def test_a_run_in_two_parts_errs_as_one_run_does() -> None:
    model = oracle.smooth()
    noise = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def walk(*plans: Plan) -> torch.Tensor:
        x = noise * plans[0].initial_scale
        for plan in plans:
            x = run(plan, model, x)
        return x

    exact = walk(compile_plan("dpmpp_2m", steps=1000))
    for steps in (10, 40):
        parts = [compile_plan("dpmpp_2m", steps=steps, between=ends) for ends in ((None, 400.0), (400.0, None))]
        assert parts[0].end == parts[1].start
        whole = compile_plan("dpmpp_2m", steps=steps)
        split, single = (float((walk(*way) - exact).abs().max()) for way in (parts, [whole]))
        assert split == pytest.approx(single, rel=0.15)


def test_stop_keeps_the_first_rows_of_the_peer() -> None:
    whole = compile_plan("dpmpp_2m", steps=20, dialect="diffusers")
    part = compile_plan("dpmpp_2m", steps=20, dialect="diffusers", stop=12)
    assert [r.x for r in part.rows] == [r.x for r in whole.rows[:12]]
    assert part.end == whole.rows[12].level


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"between": (1200.0, None)}, "between"),
        ({"between": (300.0, 400.0)}, "between"),
        ({"between": (500.0, None), "skip": 2}, "between"),
        ({"between": (500.0, None), "dialect": "diffusers"}, "between"),
        ({"stop": 0}, "stop"),
        ({"stop": 21}, "stop"),
        ({"stop": 5, "skip": 5}, "stop"),
    ],
)
def test_cuts_that_make_no_sense_are_refused(given: dict, code: str) -> None:
    with pytest.raises(PlanError) as error:
        compile_plan("euler", steps=20, **given)
    assert error.value.code == code


@pytest.mark.parametrize("schedule", ["scaled_linear", "flow"])
def test_the_noise_of_sa_solver_begins_and_ends_where_it_is_said(schedule: str) -> None:
    """Of the training time, counted from 0 on a flow schedule too: 200 and 800 are within."""
    steps = {"scaled_linear": range(999, -1, -1), "flow": range(999, 0, -1)}[schedule]
    grid = Grid("explicit", timesteps=tuple(float(time) for time in steps))
    target = "flow" if schedule == "flow" else "eps"
    plan = compile_plan("sa_solver", schedule=schedule, target=target, grid=grid)
    noisy = [row.time for row in plan.rows if row.draws]
    assert (max(noisy), min(noisy)) == (800.0, 200.0)
