"""Plans: exact as JSON, refused when one number changed, comparable, frozen, and addressed noise that adds up."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid import Grid, PellucidError, Plan, PlanError, compile_plan
from pellucid.core import samplers
from pellucid.core.plan import ANCHOR, P0, REGISTERS, X, Z, row, total
from pellucid.core.schedule import Level

SAMPLERS = samplers.names()
# Two samplers deviate on purpose by default. The law records only the largest deviation of a plan, so a small
# change in another row could hide below it: the exact variant of each is what is tampered with.
EXACT = {"edm_stochastic": {"s_noise": 1.0}, "lcm": {"timestep_scaling": 1e9}}


def plan_of(sampler: str, steps: int = 6) -> Plan:
    return compile_plan(sampler, steps=steps, **EXACT.get(sampler, {}))


def refused(data: object) -> str:
    with pytest.raises(PellucidError) as error:
        Plan.from_json(json.dumps(data))
    return error.value.code


# --- as JSON ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_plan_survives_json_to_the_last_bit(sampler: str, steps: int) -> None:
    plan = compile_plan(sampler, steps=steps)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.rows == plan.rows  # levels, times, weights, spans and the addresses of their noise
    assert again.to_json() == plan.to_json()


@given(
    sampler=st.sampled_from(SAMPLERS),
    steps=st.integers(1, 30),
    schedule=st.sampled_from(["linear", "scaled_linear", "cosine", "vp_linear", "edm"]),
    grid=st.sampled_from(["trailing", "leading", "karras", "beta", "kl_optimal"]),
)
@settings(max_examples=40, deadline=None)
def test_any_plan_survives_json(sampler: str, steps: int, schedule: str, grid: str) -> None:
    if (sampler, schedule) == ("tcd", "edm"):
        return  # tcd counts times from a clean 0, which EDM's ¼·ln sigma does not: see test_marginal
    refusal = None
    try:
        plan = compile_plan(sampler, schedule=schedule, grid=grid, steps=steps)
    except PellucidError as error:
        refusal = (sampler, schedule, error.code)
    if refusal is None:
        assert Plan.from_json(plan.to_json()) == plan
    else:  # the one refusal in this space: few steps from cosine's nearly pure noise
        assert refusal == ("pndm", "cosine", "ill-conditioned")


def test_evidence_is_kept_beside_the_rows_and_changes_nothing() -> None:
    plan = compile_plan("unipc", steps=4)
    assert "evidence" not in plan.to_dict()  # a plan that nobody tuned is written as it always was
    told = dataclasses.replace(plan, evidence={"says": "better", "held_out": {"mean": 0.25}})
    again = Plan.from_json(told.to_json())
    assert again == told
    assert (again.evidence, again.rows) == (told.evidence, plan.rows)
    assert not plan.diff(again)
    assert refused({**told.to_dict(), "evidence": 5}) == "plan-json"


def test_json_holds_no_infinity_at_pure_noise() -> None:
    plan = compile_plan("euler_a", schedule="flow", target="flow", steps=4)
    text = plan.to_json()
    assert "Infinity" not in text
    assert "NaN" not in text
    assert Plan.from_json(text) == plan


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "5", '"plan"', "{}", b"\xff\xfe"])
def test_what_is_no_plan_is_refused(text: str | bytes) -> None:
    with pytest.raises(PlanError) as error:
        Plan.from_json(text)
    assert error.value.code == "plan-json"


def test_another_schema_is_refused() -> None:
    data = plan_of("ddim").to_dict()
    assert refused({**data, "schema": 2}) == "schema"
    assert refused({k: v for k, v in data.items() if k != "schema"}) == "schema"
    assert refused({**data, "kind": "something"}) == "plan-json"


@pytest.mark.parametrize("field", [k for k in plan_of("ddim").to_dict() if k not in ("schema", "kind")])
def test_a_missing_field_is_refused(field: str) -> None:
    data = plan_of("ddim").to_dict()
    del data[field]
    assert refused(data) == "plan-json"


@pytest.mark.parametrize("field", ["alpha", "sigma", "time", "x"])
def test_a_missing_field_of_a_row_is_refused(field: str) -> None:
    data = plan_of("ddim").to_dict()
    del data["rows"][2][field]
    assert refused(data) == "plan-json"


@pytest.mark.parametrize(
    ("place", "value", "code"),
    [
        (("rows",), [], "plan-json"),
        (("rows",), None, "plan-json"),
        (("rows",), [5], "plan-json"),
        (("rows", 0, "later"), 1.0, "plan-json"),
        (("rows", 0, "x"), {"q": 1.0}, "plan-json"),
        (("rows", 0, "x"), [1.0], "plan-json"),
        (("rows", 0, "x"), {"x": math.nan}, "not-finite"),
        (("rows", 0, "x"), {"x": math.inf}, "not-finite"),
        (("rows", 0, "x"), {"x": "1.0"}, "not-finite"),
        (("rows", 0, "x"), {"x": True}, "not-finite"),
        (("rows", 0, "x"), {"x": 1e308, "p0": 1e308}, "marginal-law"),
        (("rows", 0, "x"), {}, "marginal-law"),
        (("rows", 0, "time"), math.nan, "not-finite"),
        (("rows", 0, "sigma"), math.nan, "not-finite"),
        (("rows", 0, "sigma"), 0.0, "marginal-law"),
        (("rows", 0, "sigma"), -1.0, "marginal-law"),
        (("rows", 0, "pre_noise"), 0.1, "plan-json"),
        (("rows", 0, "span"), [1.0, 2.0], "plan-json"),
        (("rows", 0, "span"), [math.nan, 1.0, 0], "not-finite"),
        (("rows", 0, "span"), [math.inf, 1.0, 0], "not-finite"),
        (("rows", 0, "span"), [-1.0, 1.0, 0], "plan-json"),
        (("rows", 0, "span"), None, "plan-json"),
        (("start",), [math.nan, 1.0], "not-finite"),
        (("start",), [1.0], "plan-json"),
        (("start",), [1.0, 1.0, 1.0], "plan-json"),
        (("start",), "ab", "not-finite"),
        (("end",), [1.0, 0.1], "marginal-law"),
        (("initial_scale",), math.nan, "not-finite"),
        (("initial_scale",), "14", "not-finite"),
        (("deviation",), 0.5, "marginal-law"),
        (("deviation",), math.nan, "not-finite"),
        (("frame",), "vx", "plan-json"),
        (("clock",), "noon", "plan-json"),
        (("basis",), "y0", "unknown-target"),
        (("target",), "y0", "unknown-target"),
        (("options",), 5, "plan-json"),
    ],
)
def test_a_wrong_value_is_refused_by_code(place: tuple, value: object, code: str) -> None:
    data = plan_of("ddpm").to_dict()
    inner = data
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    assert refused(data) == code


# --- one changed number ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_one_changed_weight_breaks_the_marginal_law(sampler: str) -> None:
    """A thousandth on one weight of one row, for every row."""
    data = plan_of(sampler).to_dict()
    for i, written in enumerate(data["rows"]):
        # the first weight of x; LCM's first is a trace of x of 1e-10, so its prediction's is taken
        register = next(r for r, w in written["x"].items() if abs(w) > 1e-6)
        changed = copy.deepcopy(data)
        changed["rows"][i]["x"][register] *= 1.001
        assert refused(changed) == "marginal-law", f"row {i}, weight of {register}"


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if not compile_plan(s, steps=6).declared])
def test_one_changed_level_breaks_the_marginal_law(sampler: str) -> None:
    data = plan_of(sampler).to_dict()
    for i in range(len(data["rows"])):
        for part in ("alpha", "sigma"):
            changed = copy.deepcopy(data)
            if changed["rows"][i][part] == 0.0:
                continue
            changed["rows"][i][part] *= 1.001
            assert refused(changed) == "marginal-law", f"row {i}, {part}"


def test_one_changed_noise_weight_breaks_the_marginal_law() -> None:
    data = plan_of("ddpm").to_dict()
    data["rows"][1]["x"]["z"] *= 1.001
    assert refused(data) == "marginal-law"


def test_noise_taken_from_the_wrong_place_breaks_the_marginal_law() -> None:
    """Two rows that draw the same noise are correlated: variances no longer add up."""
    data = plan_of("ddpm").to_dict()
    data["rows"][1]["span"] = data["rows"][0]["span"]
    assert refused(data) == "marginal-law"


# --- reading a plan --------------------------------------------------------------------------------------------


def test_the_number_of_rows_is_the_number_of_calls() -> None:
    assert compile_plan("euler", steps=7).nfe == 7
    assert compile_plan("heun", steps=7).nfe == 13  # two a step, one for the last
    assert compile_plan("pndm", steps=7).nfe == 16  # nine more, for three Runge-Kutta legs
    assert compile_plan("plms", steps=7).nfe == 8


def test_depth_counts_the_history_that_is_used() -> None:
    wanted = {"ddim": 0, "dpmpp_2m": 1, "dpmpp_3m": 2, "lms": 3, "heun": 1, "euler_cfgpp": 0}
    assert {name: compile_plan(name, steps=8).depth for name in wanted} == wanted


def test_stochastic_and_guided_are_read_from_the_rows() -> None:
    assert compile_plan("ddpm", steps=4).stochastic
    assert not compile_plan("ddim", steps=4).stochastic
    assert compile_plan("ddim", steps=4, eta=0.5).stochastic
    assert compile_plan("euler", steps=4, s_churn=1.0).stochastic
    assert compile_plan("euler_cfgpp", steps=4).guided
    assert not compile_plan("euler", steps=4).guided


def test_the_plan_says_where_it_starts_and_ends() -> None:
    plan = compile_plan("ddim", steps=5)
    assert plan.start == plan.rows[0].level
    assert plan.end == Level(1.0, 0.0)
    assert plan.initial_scale == plan.start.sigma
    assert plan.timesteps == tuple(r.time for r in plan.rows)
    assert compile_plan("ddim", steps=5, grid=Grid(final="sigma_min")).end.sigma == pytest.approx(0.0292, abs=1e-4)


def test_a_plan_is_frozen() -> None:
    plan = compile_plan("ddim", steps=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.name = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.rows[0].time = 3.0
    with pytest.raises(TypeError):
        plan.rows[0] = plan.rows[1]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.rows[0].level.alpha = 0.0


def test_only_weights_that_count_are_stored() -> None:
    for name in SAMPLERS:
        for r in compile_plan(name, steps=5).rows:
            for weights in (r.x, r.anchor or ()):
                registers = [register for register, _ in weights]
                assert registers == sorted(set(registers))
                assert all(weight != 0.0 for _, weight in weights)
            assert bool(r.draws) == (r.span is not None) == r.uses("z")


# --- differences -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_plan_does_not_differ_from_itself(sampler: str) -> None:
    assert plan_of(sampler).diff(plan_of(sampler)) == []


def test_diff_names_row_field_and_both_values() -> None:
    mine = compile_plan("dpmpp_2m", steps=4)
    theirs = dataclasses.replace(
        mine, rows=(mine.rows[0], dataclasses.replace(mine.rows[1], time=5.0, x=((0, 0.5),)), *mine.rows[2:])
    )
    found = {(d.row, d.field): (d.mine, d.theirs) for d in mine.diff(theirs)}
    assert found[1, "time"] == (mine.rows[1].time, 5.0)
    assert found[1, "x.x"] == (dict(mine.rows[1].x)[0], 0.5)
    assert found[1, "x.p1"] == (dict(mine.rows[1].x)[3], 0.0)
    assert {r for r, _ in found} == {1}


def test_diff_reads_the_plan_too() -> None:
    names = {d.field for d in compile_plan("ddim", steps=4).diff(compile_plan("deis", steps=5)) if d.row == -1}
    assert names == {"basis", "nfe"}


def test_the_first_step_of_samplers_of_one_formula_is_the_same() -> None:
    # DDIM is DPM-Solver++ of order 1: the rows differ by rounding alone
    assert compile_plan("ddim", steps=10).diff(compile_plan("dpm_multistep", order=1, steps=10), tolerance=1e-12) == []


def test_diff_tolerance_is_relative() -> None:
    mine = compile_plan("ddim", steps=4)
    data = mine.to_dict()
    theirs = Plan.from_dict(data | {"rows": [{**r, "time": r["time"] * (1 + 1e-7)} for r in data["rows"]]})
    assert len(mine.diff(theirs)) == 4
    assert mine.diff(theirs, tolerance=1e-6) == []


# --- noise addresses -------------------------------------------------------------------------------------------


def squares(draws: tuple) -> float:
    return sum(d.weight**2 for d in draws)


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if compile_plan(s, steps=6).stochastic])
def test_the_parts_of_a_draw_have_variance_one(sampler: str) -> None:
    for r in compile_plan(sampler, steps=6).rows:
        for draws in (r.draws, r.pre_draws):
            if draws:
                assert squares(draws) == pytest.approx(1.0, rel=1e-12)


def test_overlapping_spans_of_dpmpp_sde_share_their_first_interval() -> None:
    plan = compile_plan("dpmpp_sde", steps=5)
    pairs = [(plan.rows[i], plan.rows[i + 1]) for i in range(0, 8, 2)]
    for half, whole in pairs:
        assert half.span.start == whole.span.start
        assert len(half.draws) == 1
        assert len(whole.draws) == 2
        shared, fresh = whole.draws
        assert (shared.interval, shared.visit) == (half.draws[0].interval, half.draws[0].visit)
        # the σ clock: an increment over part of the span has that part of its variance
        a, m, b = whole.span.start, half.span.end, whole.span.end
        assert shared.weight**2 == pytest.approx((a - m) / (a - b), rel=1e-12)
        assert fresh.weight**2 == pytest.approx((m - b) / (a - b), rel=1e-12)


def test_disjoint_spans_never_share() -> None:
    for sampler in ("ddpm", "euler_a", "dpmpp_2m_sde", "dpm2_a", "sa_solver", "er_sde"):
        seen = Counter((d.interval, d.visit) for r in compile_plan(sampler, steps=12).rows for d in r.draws)
        assert max(seen.values()) == 1


def test_churn_draws_afresh_on_a_stretch_that_it_passes_twice() -> None:
    plan = compile_plan("edm_stochastic", schedule="edm", target="edm", steps=12, s_churn=80.0, s_tmin=0.0, s_tmax=1e9)
    addresses = [tuple((d.interval, d.visit) for d in r.pre_draws) for r in plan.rows if r.pre_draws]
    flat = [address for draws in addresses for address in draws]
    assert len(flat) == len(set(flat))
    assert len(addresses) == 12


def test_restart_numbers_its_visits() -> None:
    plan = compile_plan("restart", steps=20, times=3)
    climbs = [r for r in plan.rows if r.draws]
    assert [r.span.visit for r in climbs] == [0, 1, 2]
    assert len({(r.span.start, r.span.end) for r in climbs}) == 1  # the same stretch, three times over
    addresses = {(d.interval, d.visit) for r in climbs for d in r.draws}
    assert len(addresses) == 3 * len(climbs[0].draws)


# --- the algebra of forms --------------------------------------------------------------------------------------


@given(st.lists(st.floats(-5, 5), min_size=4, max_size=4))
@settings(max_examples=40, deadline=None)
def test_forms_add_and_scale(w: list[float]) -> None:
    form = X * w[0] + P0 * w[1] - (X - ANCHOR) * w[2] + 0.5 * (P0 * w[3])
    wanted = {"x": w[0] - w[2], "anchor": w[2], "p0": w[1] + 0.5 * w[3]}
    assert {REGISTERS[r]: v for r, v in form.weights()} == {k: v for k, v in wanted.items() if v != 0.0}
    halves = total([X * w[0], X * w[0]]) / 2.0
    assert dict(halves.weights()).get(0, 0.0) == w[0]


def test_a_form_that_is_not_finite_is_refused() -> None:
    with pytest.raises(PlanError, match="weight of p0") as error:
        (P0 * math.inf).weights()
    assert error.value.code == "not-finite"


def test_a_row_that_draws_names_its_span() -> None:
    with pytest.raises(AssertionError, match="span"):
        row(0.0, Level(1.0, 1.0), X + Z)


# --- times and the first noise ---------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["scaled_linear", "edm", "flow", "vp_linear"])
@pytest.mark.parametrize(("factor", "shift"), [(-1.0, 0.0), (50.0, 0.0), (1.0, 1e6), (1.0, -1e6)])
def test_times_that_are_not_the_schedules_are_refused(schedule: str, factor: float, shift: float) -> None:
    """The law does not see the time that the network is told, so a file may say any."""
    data = compile_plan("ddim", schedule=schedule, steps=5).to_dict()
    Plan.from_dict(data)
    data["rows"][0]["time"] = data["rows"][0]["time"] * factor + shift
    assert refused(data) == "plan-time"


@pytest.mark.parametrize("dialect", ["exact", "diffusers", "k-diffusion", "comfyui"])
@pytest.mark.parametrize("factor", [0.0, -1.0, 1.01, 1e3])
def test_a_first_noise_that_is_not_the_starts_is_refused(dialect: str, factor: float) -> None:
    data = compile_plan("euler", steps=5, dialect=dialect).to_dict()
    Plan.from_dict(data)
    data["initial_scale"] *= factor
    assert refused(data) == "plan-scale"


@pytest.mark.parametrize("schedule", ["scaled_linear", "edm", "flow"])
@pytest.mark.parametrize("dialect", ["exact", "diffusers", "k-diffusion", "comfyui"])
def test_what_the_compiler_makes_is_read_again(schedule: str, dialect: str) -> None:
    """Every sampler that the dialect has, with a first, a usual and a cut run: times and first noise agree."""
    read = 0
    for sampler in SAMPLERS:
        for words in ({"steps": 1}, {"steps": 6, "grid": "karras"}, {"steps": 6, "skip": 2}):
            try:
                plan = compile_plan(sampler, schedule=schedule, dialect=dialect, **words)
            except PellucidError:
                continue  # not in this dialect, or not from pure noise
            assert Plan.from_json(plan.to_json()) == plan
            read += 1
    assert read > 10


def test_a_time_that_was_tuned_is_read() -> None:
    """Tuning moves the told times, by less than a tenth of the schedule: ten hundredths are let through."""
    data = compile_plan("dpmpp_2m", steps=8).to_dict()
    for one in data["rows"]:
        one["time"] = min(one["time"] + 99.0, 999.0)
    assert Plan.from_dict(data).timesteps[1] == data["rows"][1]["time"]


@pytest.mark.parametrize("change", [{"initial_scale": 0.0}, {"times": -50.0}])
def test_a_plan_of_somebodys_own_schedule_is_checked_as_far_as_it_can_be(change: dict[str, float]) -> None:
    data = json.loads(compile_plan("euler", steps=4).to_json())
    data["schedule"] = {"name": "mine"}
    assert Plan.from_dict(data).nfe == 4
    for one in data["rows"]:
        one["time"] *= change.get("times", 1.0)
    data["initial_scale"] = change.get("initial_scale", data["initial_scale"])
    with pytest.raises(PlanError):
        Plan.from_dict(data)


@pytest.mark.parametrize("schedule", ["scaled_linear", "linear", "cosine"])
@pytest.mark.parametrize("sampler", ["pndm", "plms", "lms", "dpm_singlestep"])
def test_a_late_start_as_diffusers_reads_back(sampler: str, schedule: str) -> None:
    """PNDM counts calls there: the last of them alone is a plan too."""
    whole = compile_plan(sampler, schedule=schedule, grid="linspace", steps=5, dialect="diffusers")
    for skip in range(1, whole.nfe):
        plan = compile_plan(sampler, schedule=schedule, grid="linspace", steps=5, skip=skip, dialect="diffusers")
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.timesteps == whole.timesteps[skip:]
        assert plan.grid["steps"] == 5
