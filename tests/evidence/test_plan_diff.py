"""Two plans compared: what differs, and what it does on the exact oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pellucid
from pellucid import oracle
from pellucid.core.schedule import Level
from pellucid.evidence import plan_diff
from pellucid.evidence.plan_diff import TOLERANCE, compare, perfect_network, reframed

SMOOTH = oracle.smooth()


def result(plan, through=SMOOTH):
    return pellucid.run(plan, through, oracle.start_of(plan, SMOOTH, 8))


# Between them: history, anchor, fresh noise, overlapping noise, churn, held rows, every basis.
SHAPES = ["ddim", "euler_a", "heun", "unipc", "pndm", "dpmpp_sde", "edm_stochastic", "sa_solver", "lms"]


@pytest.mark.parametrize("frame", ["vp", "ve", "flow"])
@pytest.mark.parametrize("sampler", SHAPES)
def test_another_frame_is_the_same_plan(sampler, frame):
    plan = pellucid.compile_plan(sampler, steps=6)
    other = reframed(plan, frame)
    assert other.frame == frame
    scale = plan_diff.scale_of(plan.end, frame)
    assert oracle.distance(result(other), result(plan) * scale) < 1e-12
    for row in (r for r in other.rows if not r.pre_noise):
        norm = {"vp": row.level.alpha**2 + row.level.sigma**2, "ve": row.level.alpha, "flow": sum_of(row.level)}[frame]
        assert norm == pytest.approx(1.0, abs=1e-12)


def sum_of(level: Level) -> float:
    return level.alpha + level.sigma


@pytest.mark.parametrize(
    ("schedule", "target"),
    [("scaled_linear", "eps"), ("scaled_linear", "v"), ("edm", "edm"), ("flow", "flow"), ("vp_cosine", "x0")],
)
def test_a_network_that_is_told_the_right_time_is_the_oracle(schedule, target):
    plan = pellucid.compile_plan("dpmpp_2m", schedule=schedule, target=target, steps=6, grid="trailing")
    assert oracle.distance(result(plan, perfect_network(SMOOTH, plan)), result(plan)) < 1e-9


def test_a_network_that_is_told_a_wrong_time_is_not():
    plan = pellucid.compile_plan("dpmpp_2m", steps=6)
    late = replace(plan, rows=tuple(replace(r, time=max(r.time - 20, 0.0)) for r in plan.rows))
    assert result(late).equal(result(plan))
    assert oracle.distance(result(late, perfect_network(SMOOTH, plan)), result(plan)) > 1e-3


def effects(mine, theirs):
    return {effect.kind: effect for effect in compare(mine, theirs).effects}


def test_the_same_plan_does_nothing():
    plan = pellucid.compile_plan("euler_a", steps=4)
    found = compare(plan, plan)
    assert found.differences == []
    assert [effect.distance for effect in found.effects] == [0.0, 0.0]


def test_one_kind_alone_is_the_whole_where_it_is_alone():
    """Same grid, other weights: swapping the weights in is swapping the plan."""
    found = effects(pellucid.compile_plan("euler", steps=6), pellucid.compile_plan("dpmpp_2m", steps=6))
    assert "time passed" not in found
    assert "level" not in found
    assert found["weights"].distance > 0.01
    rest = found["all except the times passed and the initial scale"]
    assert found["weights"].distance == pytest.approx(rest.distance, rel=1e-9)


def test_rounded_times_reach_a_network_only():
    mine = pellucid.compile_plan("dpmpp_2m", grid="karras", steps=6)
    found = effects(mine, pellucid.compile_plan("dpmpp_2m", grid="karras", steps=6, dialect="diffusers"))
    assert set(found) == {"time passed", "initial scale", "all except the times passed and the initial scale", "all"}
    assert found["time passed"].rows == 4
    assert 1e-5 < found["time passed"].distance < 1e-2
    assert 1e-4 < found["initial scale"].distance < 1e-2
    assert found["all except the times passed and the initial scale"].distance <= TOLERANCE


def test_a_moved_level_is_a_level_and_a_start():
    mine = pellucid.compile_plan("ddim", steps=4)
    moved = replace(mine.rows[0], level=Level(mine.rows[0].level.alpha * 1.5, mine.rows[0].level.sigma))
    found = effects(mine, replace(mine, rows=(moved, *mine.rows[1:])))
    assert found["level"].rows == 1
    assert found["level"].distance > 1e-4
    assert "first level" not in found
    higher = replace(mine, start=Level(mine.start.alpha * 1.5, mine.start.sigma))
    assert effects(mine, higher)["first level"].distance > 1e-4


def test_churn_is_a_kind():
    plan = pellucid.compile_plan("edm_stochastic", schedule="edm", steps=6)
    other = pellucid.compile_plan("edm_stochastic", schedule="edm", steps=6, s_noise=1.0)
    found = effects(plan, other)
    assert found["churn"].rows == sum(r.pre_noise > 0 for r in plan.rows)
    assert found["churn"].distance > 1e-5
