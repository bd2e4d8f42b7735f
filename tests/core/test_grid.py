"""Grids: strictly decreasing paths of the right length between the right ends, and the formulas behind the names."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pellucid import Grid, PlanError, compile_plan
from pellucid.core import grid as G
from pellucid.core import schedule as S

STEPS = (1, 2, 3, 5, 10, 13, 20, 50, 999, 1000, 1500)
NAMED = tuple(name for name in G.names() if name not in ("lcm", "explicit"))
SCHEDULES = {
    **{name: S.make(name) for name in S.names()},
    "scaled_linear+zero_snr": S.make("scaled_linear", zero_snr=True),
    "sqrt_beta+zero_snr": S.make("sqrt_beta", zero_snr=True),
    "flow shift 3": S.make("flow", shift=3.0),
    "flow terminal 0.1": S.make("flow", terminal=0.1),
}


def lay(schedule: S.Schedule, grid: Grid | str, steps: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(told times, sigma / alpha at the start of each leg, and at its end)."""
    path = G.make_path(schedule, G.named(grid), steps, schedule.frame)
    return (
        np.array([leg.time for leg in path.legs]),
        np.array([leg.start.ratio for leg in path.legs]),
        np.array([leg.end.ratio for leg in path.legs]),
    )


def why_refused(schedule: S.Schedule, grid: str) -> str | None:
    """The two kinds of pairs that have no path: sigma rules up to an infinite sigma, and AYS's sigmas on a flow."""
    if grid in G.AYS:
        return "grid-schedule" if schedule.frame == "flow" else None
    endless = math.isinf(schedule.sigma_range[1])
    return "sigmas" if grid in G.OVER_SIGMA and endless else None


def test_the_names_are_these() -> None:
    assert G.names() == (
        *("leading", "linspace", "trailing", "simple", "sgm_uniform", "quadratic", "beta"),
        *("karras", "exponential", "lu", "polyexponential", "kl_optimal", "linear_quadratic"),
        *("ays", "ays_sdxl", "ays_svd", "lcm", "explicit"),
    )


# --- every grid on every schedule ------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("grid", NAMED)
def test_every_path_loses_noise_at_each_leg(grid: str, schedule: str) -> None:
    curve = SCHEDULES[schedule]
    code = why_refused(curve, grid)
    for steps in STEPS:
        if code is not None:
            with pytest.raises(PlanError) as refused:
                lay(curve, grid, steps)
            assert refused.value.code == code
            continue
        times, starts, ends = lay(curve, grid, steps)
        assert len(times) == steps
        assert np.all(ends < starts)
        assert np.array_equal(starts[1:], ends[:-1])
        assert ends[-1] == 0.0
        # a level outside the schedule's range is told as the nearest end, so times may repeat there
        low, high = curve.ratio_at(np.array(curve.span))
        inside = times[(starts > low) & (starts <= high)]
        assert np.all(np.diff(inside) < 0)
        assert np.all(np.diff(times) <= 0)
        assert times.max() <= curve.span[1]
        assert times.min() >= (0.0 if curve.frame == "flow" else curve.span[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("grid", NAMED)
def test_a_path_to_the_least_noise_has_no_null_step(grid: str, schedule: str) -> None:
    curve = SCHEDULES[schedule]
    if why_refused(curve, grid) is not None:
        return
    least = float(curve.ratio_at(curve.span[0]))
    for steps in (1, 2, 3, 10, 50):
        if lay(curve, grid, steps)[1][-1] < least * (1 - 1e-9):
            continue  # AYS and linear_quadratic may go below a schedule's least noise
        _, starts, ends = lay(curve, Grid(grid, final="sigma_min"), steps)
        assert len(starts) == steps
        assert np.all(ends < starts)
        assert ends[-1] == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("grid", ["linspace", "trailing", "simple", "sgm_uniform", "beta", *G.OVER_SIGMA])
def test_paths_start_at_the_most_noise(grid: str, schedule: str) -> None:
    curve = SCHEDULES[schedule]
    if why_refused(curve, grid) is not None:
        return
    for steps in STEPS:
        times, starts, _ = lay(curve, grid, steps)
        assert times[0] == pytest.approx(curve.span[1], rel=1e-9)
        assert starts[0] == pytest.approx(float(curve.ratio_at(curve.span[1])), rel=1e-9)


@pytest.mark.parametrize("grid", ["linspace", "beta", "karras", "exponential", "lu", "polyexponential", "kl_optimal"])
@pytest.mark.parametrize("schedule", ["scaled_linear", "vp_linear", "edm"])
def test_paths_that_call_at_the_least_noise_too(grid: str, schedule: str) -> None:
    curve = SCHEDULES[schedule]
    for steps in STEPS[1:]:
        assert lay(curve, grid, steps)[1][-1] == pytest.approx(float(curve.ratio_at(curve.span[0])), rel=1e-9)


# --- grids over time -------------------------------------------------------------------------------------------


def test_trailing_leading_linspace_as_in_the_survey_of_lin() -> None:
    # Lin et al. 2023, table 2, for 10 of 1000 steps, times counted from 0: here fractional, not rounded
    curve = S.scaled_linear()
    assert lay(curve, "leading", 10)[0] == pytest.approx(np.arange(900, -1, -100))
    assert lay(curve, "trailing", 10)[0] == pytest.approx(np.arange(999, 98, -100))
    assert lay(curve, "linspace", 10)[0] == pytest.approx(np.linspace(999, 0, 10))


def test_thirteen_trailing_steps_are_even() -> None:
    # diffusers rounds 1000/13 and its DDIM then takes the wrong previous time on 11 of 12 steps
    times = lay(S.scaled_linear(), "trailing", 13)[0]
    assert np.diff(times) == pytest.approx(np.full(12, -1000 / 13))


def test_more_steps_than_training_times_keep_both_ends() -> None:
    for grid in ("leading", "trailing", "linspace"):
        times = lay(S.scaled_linear(), grid, 1500)[0]
        assert (times[0], times[-1]) == pytest.approx((999.0, 0.0), abs=1e-9)


def test_sgm_uniform_leaves_the_last_point_out() -> None:
    assert lay(S.scaled_linear(), "sgm_uniform", 4)[0] == pytest.approx(np.linspace(999, 0, 5)[:-1])


def test_quadratic_roots_are_even_and_start_at_four_fifths() -> None:
    times = lay(S.linear(), "quadratic", 7)[0]
    assert times[0] == pytest.approx(0.8 * 999)  # Song et al. 2020, appendix D.3
    assert np.diff(np.sqrt(times)) == pytest.approx(np.full(6, -math.sqrt(0.8 * 999) / 6))


def test_an_offset_moves_leading_times() -> None:
    assert lay(S.scaled_linear(), Grid("leading", offset=1.0), 10)[0] == pytest.approx(np.arange(901, 0, -100))


@given(p=st.lists(st.floats(1e-9, 1 - 1e-6), min_size=1, max_size=20), a=st.floats(0.3, 3), b=st.floats(0.3, 3))
@settings(max_examples=30, deadline=None)
def test_the_beta_quantile_is_scipys(p: list[float], a: float, b: float) -> None:
    assert G.beta_quantile(np.array(p), a, b) == pytest.approx(stats.beta.ppf(p, a, b), abs=1e-10)


def test_the_beta_quantile_of_nothing_and_all() -> None:
    assert G.beta_quantile(np.array([0.0, 1.0]), 0.6, 0.6).tolist() == [0.0, 1.0]


def test_beta_times_are_quantiles_of_beta_06() -> None:
    times = lay(S.scaled_linear(), "beta", 20)[0]
    assert times == pytest.approx(999 * stats.beta.ppf(1 - np.arange(20) / 19, 0.6, 0.6), abs=1e-7)


def test_flow_grids_are_bent_once() -> None:
    # "a shift applied twice": sigma at half of the time is 3·½ / (1 + 2·½) = ¾, and the network is told 750
    times, starts, _ = lay(SCHEDULES["flow shift 3"], "linspace", 3)
    assert S.flow().sigma_of(starts[1]) == pytest.approx(3 * 0.5005 / (1 + 2 * 0.5005))
    assert times[1] == pytest.approx(1000 * 3 * 0.5005 / (1 + 2 * 0.5005))
    assert times[0] == 1000


def test_a_stretched_terminal_ends_there() -> None:
    for steps in (2, 5, 30):
        times = lay(SCHEDULES["flow terminal 0.1"], "trailing", steps)[0]
        assert (times[0], times[-1]) == pytest.approx((1000.0, 100.0))


# --- grids over sigma ------------------------------------------------------------------------------------------


@given(steps=st.integers(2, 60), rho=st.floats(1, 12), low=st.floats(1e-3, 0.5), high=st.floats(1, 100))
@settings(max_examples=50, deadline=None)
def test_karras(steps: int, rho: float, low: float, high: float) -> None:
    _, starts, _ = lay(S.EDM(), Grid("karras", rho=rho, sigma_min=low, sigma_max=high), steps)
    i = np.arange(steps)
    # Karras et al. 2022, eq. 5
    wanted = (high ** (1 / rho) + i / (steps - 1) * (low ** (1 / rho) - high ** (1 / rho))) ** rho
    assert starts == pytest.approx(wanted, rel=1e-10)


def test_karras_has_rho_7_and_the_schedules_ends() -> None:
    _, starts, _ = lay(S.EDM(), "karras", 3)
    assert starts == pytest.approx([80.0, ((80 ** (1 / 7) + 0.002 ** (1 / 7)) / 2) ** 7, 0.002], rel=1e-12)


@pytest.mark.parametrize("grid", ["exponential", "lu"])
@given(steps=st.integers(2, 60))
@settings(max_examples=25, deadline=None)
def test_exponential_is_even_in_lambda(grid: str, steps: int) -> None:
    _, starts, _ = lay(S.scaled_linear(), grid, steps)
    low, high = S.scaled_linear().sigma_range
    assert starts == pytest.approx(high * (low / high) ** (np.arange(steps) / (steps - 1)), rel=1e-12)


@given(steps=st.integers(2, 60), rho=st.floats(0.2, 5))
@settings(max_examples=25, deadline=None)
def test_polyexponential(steps: int, rho: float) -> None:
    _, starts, _ = lay(S.scaled_linear(), Grid("polyexponential", rho=rho), steps)
    low, high = S.scaled_linear().sigma_range
    ramp = (1 - np.arange(steps) / (steps - 1)) ** rho  # k-diffusion's formula
    assert starts == pytest.approx(low * (high / low) ** ramp, rel=1e-12)


@given(steps=st.integers(2, 60))
@settings(max_examples=25, deadline=None)
def test_kl_optimal_is_even_in_the_angle(steps: int) -> None:
    _, starts, _ = lay(S.EDM(), "kl_optimal", steps)
    angles = np.arctan(starts)  # Sabour et al. 2024, theorem 3.1
    assert np.diff(angles) == pytest.approx(np.full(steps - 1, (math.atan(0.002) - math.atan(80)) / (steps - 1)))


@given(steps=st.integers(4, 100), threshold=st.floats(0.01, 0.2))
@settings(max_examples=40, deadline=None)
def test_linear_quadratic_joins_smoothly_and_would_end_at_zero(steps: int, threshold: float) -> None:
    sigmas = G.linear_quadratic(steps, 1e-3, 1.0, threshold)
    half = steps // 2
    assert sigmas[0] == 1.0
    assert sigmas[half] == pytest.approx(1 - threshold)
    assert np.diff(sigmas[: half + 1]) == pytest.approx(np.full(half, -threshold / half))
    if steps - half >= 3:
        a, b, c = np.polyfit(np.arange(3), sigmas[half : half + 3], 2)  # the parabola from its first points
        assert b == pytest.approx(-threshold / half, abs=1e-9)  # its slope at the join is the line's
        assert np.polyval([a, b, c], steps - half) == pytest.approx(0.0, abs=1e-8)


# --- align your steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", G.AYS)
def test_ten_steps_are_the_published_table(grid: str) -> None:
    _, starts, ends = lay(S.EDM(sigma_max=800.0), grid, 10)
    assert starts == pytest.approx(G.AYS[grid][:-1], rel=1e-12)
    assert ends[-1] == 0.0


def test_the_published_times_of_stable_diffusion() -> None:
    times, _, _ = lay(S.scaled_linear(), "ays", 10)
    # Sabour et al. 2024 publish sigmas with three digits, and times as whole numbers
    assert times == pytest.approx([999, 850, 736, 645, 545, 455, 343, 233, 124, 24], abs=1)


@given(steps=st.integers(1, 60))
@settings(max_examples=25, deadline=None)
def test_other_counts_pass_through_the_knots_in_log_sigma(steps: int) -> None:
    _, fine, _ = lay(S.EDM(), "ays", 10 * steps)
    assert fine[::steps] == pytest.approx(G.AYS["ays"][:-1], rel=1e-12)
    assert np.diff(np.log(fine[: steps + 1])) == pytest.approx(np.full(steps, np.log(6.475 / 14.615) / steps))


# --- distilled -------------------------------------------------------------------------------------------------


def test_lcm_calls_at_the_times_of_the_distillation() -> None:
    # Luo et al. 2023: 50 times, 20 apart, ending at 999; four of them, evenly picked from the noisiest
    assert lay(S.scaled_linear(), "lcm", 4)[0].tolist() == [999.0, 759.0, 499.0, 259.0]
    assert lay(S.scaled_linear(), "lcm", 50)[0].tolist() == (np.arange(50, 0, -1) * 20.0 - 1).tolist()


# --- explicit --------------------------------------------------------------------------------------------------


def test_explicit_timesteps() -> None:
    curve = S.scaled_linear()
    times, starts, ends = lay(curve, Grid(timesteps=(900.5, 400.0, 3.25)), None)
    assert times.tolist() == [900.5, 400.0, 3.25]
    assert starts == pytest.approx(curve.ratio_at(times), rel=1e-15)
    assert ends[-1] == 0.0


def test_explicit_sigmas_with_and_without_the_final_zero() -> None:
    curve = S.scaled_linear()
    for sigmas in ((10.0, 3.0, 0.5), (10.0, 3.0, 0.5, 0.0)):
        times, starts, ends = lay(curve, Grid(sigmas=sigmas), None)
        assert starts == pytest.approx([10.0, 3.0, 0.5])
        assert ends == pytest.approx([3.0, 0.5, 0.0])
        assert times == pytest.approx(curve.time_at([10.0, 3.0, 0.5]))


def test_explicit_flow_sigmas_are_taken_as_they_are() -> None:
    times, starts, _ = lay(SCHEDULES["flow shift 3"], Grid(sigmas=(1.0, 0.5)), None)
    assert math.isinf(starts[0])
    assert starts[1] == pytest.approx(1.0)  # sigma ½ is not shifted again
    assert times.tolist() == [1000.0, 500.0]


def test_explicit_flow_times_are_the_networks() -> None:
    _, starts, _ = lay(SCHEDULES["flow shift 3"], Grid(timesteps=(1000.0, 500.0)), None)
    assert starts[1] == pytest.approx(1.0)


# --- start -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", ["trailing", "linspace", "beta", "sgm_uniform", "karras", "exponential", "kl_optimal"])
@given(start=st.floats(1, 999), steps=st.integers(1, 40))
@settings(max_examples=15, deadline=None)
def test_start_begins_there_with_all_steps(grid: str, start: float, steps: int) -> None:
    curve = S.scaled_linear()
    times, starts, ends = lay(curve, Grid(grid, start=start), steps)
    assert len(times) == steps
    assert times[0] == pytest.approx(start, rel=1e-9)
    assert starts[0] == pytest.approx(float(curve.ratio_at(start)), rel=1e-9)
    assert np.all(ends < starts)
    assert ends[-1] == 0.0


def test_start_lets_a_sigma_rule_work_under_zero_terminal_snr() -> None:
    _, starts, _ = lay(SCHEDULES["scaled_linear+zero_snr"], Grid("karras", start=998.0), 5)
    assert np.all(np.isfinite(starts))


# --- as data and by name ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "grid",
    [Grid(), Grid("karras", rho=5.0), Grid(sigmas=(3.0, 1.0)), Grid("leading", offset=1.0, final="sigma_min")],
)
def test_a_grid_survives_its_dictionary(grid: Grid) -> None:
    assert Grid.from_dict(grid.to_dict()) == grid


@pytest.mark.parametrize(
    ("alias", "name"),
    [("normal", "linspace"), ("polyexp", "polyexponential"), ("ays_sd15", "ays"), ("ddim_uniform", "leading")],
)
def test_other_peoples_names(alias: str, name: str) -> None:
    assert G.named(alias).name == name


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "steps", "code"),
    [
        ("karas", 5, "unknown-grid"),
        ("trailing", 0, "steps"),
        ("trailing", -1, "steps"),
        ("trailing", 10_001, "steps"),
        ("trailing", 2.0, "steps"),
        ("trailing", True, "steps"),
        ("trailing", None, "steps"),
        ("lcm", 51, "steps"),
        (Grid("lcm", original=0), 1, "steps"),
        (Grid(final="nought"), 5, "final"),
        (Grid("karras", rho=0.0), 5, "rho"),
        (Grid("karras", rho=math.nan), 5, "rho"),
        (Grid("karras", sigma_min=-1.0), 5, "sigmas"),
        (Grid("karras", sigma_min=0.0), 5, "sigmas"),
        (Grid("karras", sigma_min=20.0), 5, "sigmas"),
        (Grid("karras", sigma_max=math.inf), 5, "sigmas"),
        (Grid(start=0.0), 5, "start"),
        (Grid(start=-5.0), 5, "start"),
        (Grid(start=1000.0), 5, "start"),
        (Grid(start=math.nan), 5, "start"),
        (Grid(offset=5000.0), 5, "not-decreasing"),
        (Grid("explicit"), 5, "explicit"),
        (Grid(timesteps=(5.0,), sigmas=(1.0,)), None, "explicit"),
        (Grid(sigmas=()), None, "explicit"),
        (Grid(sigmas=(0.0,)), None, "explicit"),
        (Grid(sigmas=((2.0, 1.0),)), None, "explicit"),
        (Grid(timesteps=(1500.0, 3.0)), None, "explicit"),
        (Grid(sigmas=(3.0, math.nan, 1.0)), None, "not-finite"),
        (Grid(sigmas=(math.inf, 1.0)), None, "not-finite"),
        (Grid(sigmas=(3.0, -1.0)), None, "not-finite"),
        (Grid(sigmas=(1.0, 3.0)), None, "not-decreasing"),
        (Grid(sigmas=(3.0, 3.0)), None, "not-decreasing"),
        (Grid(timesteps=(3.0, 900.0)), None, "not-decreasing"),
        (Grid(sigmas=(3.0, 1.0)), 7, "steps"),
    ],
)
def test_bad_input_is_refused_by_name(grid: Grid | str, steps: int | None, code: str) -> None:
    with pytest.raises(PlanError, match="must be") as refused:
        lay(S.scaled_linear(), grid, steps)
    assert refused.value.code == code


@pytest.mark.parametrize("option", ["rho", "sigma_min", "sigma_max"])
@pytest.mark.parametrize("value", [-1.0, 0.0, math.inf, math.nan])
def test_a_sigma_or_rho_that_is_not_positive_is_refused(option: str, value: float) -> None:
    """A root of a negative sigma is complex."""
    for dialect in ("exact", "diffusers"):
        with pytest.raises(PlanError, match=f"{option} must be a positive number"):
            compile_plan("euler", grid=Grid("karras", **{option: value}), steps=4, dialect=dialect)
