"""`pellucid plan --diff`: what differs, and what it does, for people and as JSON."""

from __future__ import annotations

import pytest

import pellucid
from pellucid.evidence.plan_diff import compare


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
    assert "all except the times passed and the initial scale no effect on the oracle" in text


def test_a_difference_of_frame_alone_is_none(tell):
    text = tell("plan", "dpmpp_2m", "--grid", "karras", "--steps", "5", "--diff", "--as k-diffusion").words
    assert "converted from frame ve to vp" in text
    assert "The rows are equal" in text


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
