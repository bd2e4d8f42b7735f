"""`pellucid plan --diff`: what differs, and what it does on the exact oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pellucid
from pellucid import oracle
from pellucid.cli import plan_diff
from pellucid.cli.plan_diff import TOLERANCE, compare, reframed, told_network
from pellucid.core.schedule import Level

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
    assert oracle.distance(result(plan, told_network(SMOOTH, plan)), result(plan)) < 1e-9


def test_a_network_that_is_told_a_wrong_time_is_not():
    plan = pellucid.compile_plan("dpmpp_2m", steps=6)
    late = replace(plan, rows=tuple(replace(r, time=max(r.time - 20, 0.0)) for r in plan.rows))
    assert result(late).equal(result(plan))
    assert oracle.distance(result(late, told_network(SMOOTH, plan)), result(plan)) > 1e-3


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
    assert "told time" not in found
    assert "level" not in found
    assert found["weights"].distance > 0.01
    assert found["weights"].distance == pytest.approx(found["all but told times and initial scale"].distance, rel=1e-9)


def test_rounded_times_reach_a_network_only():
    mine = pellucid.compile_plan("dpmpp_2m", grid="karras", steps=6)
    found = effects(mine, pellucid.compile_plan("dpmpp_2m", grid="karras", steps=6, dialect="diffusers"))
    assert set(found) == {"told time", "initial scale", "all but told times and initial scale", "all"}
    assert found["told time"].rows == 4
    assert 1e-5 < found["told time"].distance < 1e-2
    assert 1e-4 < found["initial scale"].distance < 1e-2
    assert found["all but told times and initial scale"].distance <= TOLERANCE


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


def test_rows_without_partners_are_not_swapped(tell):
    text = tell("plan", "euler", "--steps", "4", "--diff", "--steps 5").words
    assert "number of rows – 4 → 5: rows have no partners" in text
    assert "Rows that differ" not in text


def test_words_are_inherited(tell):
    found = tell("plan", "DPM++ 2M Karras", "--steps", "5", "--diff", "--as diffusers", "--json").json
    assert (found["mine"]["dialect"], found["theirs"]["dialect"]) == ("exact", "diffusers")
    for side in (found["mine"], found["theirs"]):
        assert (side["name"], side["grid"]["name"], side["nfe"]) == ("dpmpp_2m", "karras", 5)


def test_options_pass_to_the_same_sampler_only(tell):
    main = ("plan", "euler_a", "--steps", "3", "--option", "eta=0.5", "--json", "--diff")
    assert tell(*main, "--grid karras").json["theirs"]["options"] == {"eta": 0.5}
    assert tell(*main, "--option s_noise=1.0").json["theirs"]["options"] == {"eta": 0.5, "s_noise": 1.0}
    assert tell(*main, "euler").json["theirs"]["options"] == {}
    assert tell(*main, "'DPM++ 2M Karras'").json["theirs"]["grid"]["name"] == "karras"


def test_a_file_is_compared_and_inherited_from(tell):
    tell("plan", "dpmpp_2m", "--grid", "karras", "--steps", "4", "--save", "plan.json")
    found = tell("plan", "plan.json", "--diff", "euler", "--json").json
    assert (found["theirs"]["name"], found["theirs"]["grid"]) == ("euler", {"name": "karras", "steps": 4})
    found = tell("plan", "dpmpp_2m", "--grid", "karras", "--steps", "4", "--diff", "plan.json", "--json").json
    assert found["differences"] == []


def test_the_table_says_old_and_new(tell):
    text = tell("plan", "dpmpp_2m", "--grid", "karras", "--steps", "6", "--diff", "--as diffusers").words
    assert "dialect exact diffusers" in text
    assert "2 593.5 → 594 (0.084 %)" in text
    assert "all but told times and initial scale no effect on the oracle" in text


def test_a_difference_of_frame_alone_is_none(tell):
    text = tell("plan", "dpmpp_2m", "--grid", "karras", "--steps", "5", "--diff", "--as k-diffusion").words
    assert "rewritten from the frame ve to vp" in text
    assert "The rows are the same" in text


def test_json_has_the_numbers_of_the_table(tell):
    found = tell("plan", "euler", "--steps", "3", "--diff", "dpmpp_2m", "--json").json
    mine, theirs = (pellucid.compile_plan(name, steps=3) for name in ("euler", "dpmpp_2m"))
    comparison = compare(mine, theirs)
    rows = [d for d in found["differences"] if d["row"] >= 0]
    assert [(d["row"], d["field"], d["mine"], d["theirs"]) for d in rows] == [
        (d.row, d.field, d.mine, d.theirs) for d in comparison.differences if d.row >= 0
    ]
    assert all(0 < d["relative"] <= 2 for d in rows)
    assert found["effects"] == [vars(effect) for effect in comparison.effects]


def test_a_plan_that_cannot_run_says_why(tell):
    text = tell("plan", "ddim_inversion", "--as", "diffusers", "--steps", "3", "--diff", "--grid trailing").words
    assert "a clean x determines no eps" in text


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("eulr", "unknown-sampler"),
        ("euler --steps", "usage"),
        ("euler --bogus", "usage"),
        ("euler more", "usage"),
        ("euler --json", "usage"),
        ("euler --diff heun", "usage"),
        ("'euler", "usage"),
        ("missing.json", "file"),
    ],
)
def test_bad_words(refuse, words, code):
    assert refuse("plan", "ddim", "--steps", "3", "--diff", words).startswith(f"error[{code}]: ")
