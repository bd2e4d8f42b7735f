"""Which scales are useful, by the definition; which guidance is recommended; and how rules are spelled."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pellucid.core.errors import PellucidError
from pellucid.evidence.statistics import Estimate
from pellucid.evidence.study.guidance import (
    INTERVAL_SPAN,
    RULE_NAMES,
    GuidanceStudyConfig,
    ModelTraits,
    check_rule,
    guidance_of,
)
from pellucid.evidence.study.guidance_report import (
    CLIPPED,
    GuidanceCell,
    GuidanceResults,
    LooksReference,
    best_cell,
    cell_of_rows,
    doubts,
    faults_of,
    range_chart,
    recommendation_of,
    rule_ranges,
    state_of,
    worse,
)
from pellucid.models.guidance import Guidance

TRUTH = {"saturation": 0.01, "colourfulness": 0.2, "sharpness": 2.0}


def made(guidance: str, right: float, prompts: int = 100, **looks: float) -> GuidanceCell:
    """A cell of which a share of the prompts is right."""
    marks = (torch.arange(prompts) < round(right * prompts)).double()
    half = 0.03
    figures = {"right": Estimate(right, max(0.0, right - half), min(1.0, right + half))}
    figures |= {name: Estimate(value) for name, value in {**TRUTH, **looks}.items()}
    return GuidanceCell(guidance, prompts, figures, {"right": marks})


def found(table: dict[str, dict[float, GuidanceCell]], **changes: Any) -> GuidanceResults:
    """Results of hand-made cells, by rule and scale."""
    scales = tuple(sorted({scale for line in table.values() for scale in line}))
    config = GuidanceStudyConfig("x", scales, tuple(table), **changes)
    study = SimpleNamespace(
        config=config,
        asked=SimpleNamespace(queries=()),
        guidance=lambda words, scale: table[words][scale].guidance if scale in table[words] else "not done",
    )
    cells = {one.guidance: one for line in table.values() for one in line.values()}
    return GuidanceResults(study, cells, LooksReference("true images", TRUTH))  # type: ignore[arg-type]


# Useful


def test_adherence_is_not_measurably_below_the_best_of_all_rules() -> None:
    table = {
        "plain": {1.0: made("1", 0.5), 4.0: made("4", 0.88), 7.0: made("7", 0.871), 10.0: made("10", 0.86)},
        "apg": {4.0: made("4 + apg", 0.9), 7.0: made("7 + apg", 0.7)},
    }
    plain, apg = rule_ranges(found(table))
    assert [one.adherent for one in plain.cells] == [False, True, True, False]  # 3 of 100 prompts are chance
    assert [one.adherent for one in apg.cells] == [True, False]
    assert plain.words == "4 to 7"
    assert apg.words == "4"


def test_cells_are_compared_prompt_by_prompt() -> None:
    """Two cells of one share: one fails six prompts more and wins none, the other fails fourteen and wins eight."""
    best, less, other = (made(name, share, 40) for name, share in (("4", 0.8), ("7", 0.65), ("10", 0.65)))
    other.by_prompt["right"] = other.by_prompt["right"].flip(0)
    (line,) = rule_ranges(found({"plain": {4.0: best, 7.0: less, 10.0: other}}))
    assert [one.adherent for one in line.cells] == [True, False, True]


@pytest.mark.parametrize(
    ("looks", "said"),
    [
        ({}, ()),
        ({"colourfulness": 0.2199}, ()),
        ({"colourfulness": 0.2201}, ("colourfulness +10 %",)),
        ({"colourfulness": 0.15}, ("colourfulness −25 %",)),
        ({"sharpness": 1.81}, ()),
        ({"sharpness": 1.5}, ("sharpness −25 %",)),
        ({"sharpness": 2.6}, ("sharpness +30 %",)),
        ({"saturation": 0.01 + CLIPPED}, ()),
        ({"saturation": 0.06}, ("clipped values +5.0 points",)),
        ({"saturation": 0.0}, ()),
        ({"sharpness": 0.0, "saturation": 1.0}, ("sharpness −100 %", "clipped values +99.0 points")),
    ],
)
def test_looks_stay_within_the_tolerance(looks: dict[str, float], said: tuple[str, ...]) -> None:
    assert faults_of(found({"plain": {4.0: made("4", 1.0)}}), made("4", 1.0, **looks)) == said


def test_the_tolerance_is_the_config_s() -> None:
    wide = found({"plain": {4.0: made("4", 1.0)}}, tolerance=0.3)
    assert faults_of(wide, made("4", 1.0, colourfulness=0.25, sharpness=1.5)) == ()
    flat = replace(wide, reference=LooksReference("x", {**TRUTH, "sharpness": 0.0}))
    assert faults_of(flat, made("4", 1.0)) == ("sharpness +inf %",)
    assert faults_of(flat, made("4", 1.0, sharpness=0.0)) == ()


def test_the_range_is_the_run_around_the_most_adherent_useful_scale() -> None:
    pale = {"colourfulness": 0.1}
    table = {
        "plain": {
            1.0: made("1", 0.91),
            2.0: made("2", 0.92),
            3.0: made("3", 0.93, **pale),
            4.0: made("4", 0.925),
            5.0: made("5", 0.92),
            6.0: made("6", 0.91),
        }
    }
    (line,) = rule_ranges(found(table))
    assert [one.useful for one in line.cells] == [True, True, False, True, True, True]
    assert [one.scale for one in line.range] == [4, 5, 6]
    assert line.plain() == {"rule": "plain", "range": [4.0, 6.0], "useful": [1.0, 2.0, 4.0, 5.0, 6.0]}


def test_what_has_nothing_right_is_not_useful_however_few_images_tell() -> None:
    table = {"plain": {1.0: made("1", 0.0, 4), 4.0: made("4", 0.5, 4), 7.0: made("7", 0.25, 4)}}
    one = found(table)
    assert not worse(one, one.cells["1"], one.cells["4"])  # four prompts do not tell
    (line,) = rule_ranges(one)
    assert [judged.useful for judged in line.cells] == [False, True, True]


@pytest.mark.parametrize(
    ("prompts", "half", "doubtful"),
    [(4, 0.03, True), (9, 0.03, True), (10, 0.03, False), (48, 0.12, False), (48, 0.13, True)],
)
def test_few_prompts_or_a_wide_interval_are_doubtful(prompts: int, half: float, doubtful: bool) -> None:
    top = made("4", 0.5, prompts)
    top.figures["right"] = Estimate(0.5, 0.5 - half, 0.5 + half)
    said = doubts(found({"plain": {1.0: made("1", 0.0, prompts), 4.0: top}}))
    assert bool(said) == doubtful
    ends = f"{50 - 100 * half:.1f} to {50 + 100 * half:.1f}"
    for words in said:
        assert words.startswith(f"Doubtful: {prompts} prompts with {prompts} images a guidance hardly tell")
        assert f"(all right of the best: 50.0 % ({ends}))" in words


# Recommended


def test_a_plain_rule_is_kept_while_no_other_is_measurably_better() -> None:
    table = {"plain": {4.0: made("4", 0.95)}, "apg": {4.0: made("4 + apg", 0.96)}}
    one = found(table)
    assert best_cell(one).guidance == "4 + apg"
    assert not worse(one, one.cells["4"], one.cells["4 + apg"])  # of a hundred prompts one differs
    assert recommendation_of(one, rule_ranges(one)).guidance == "4"


def test_another_rule_is_taken_where_it_is_measurably_better() -> None:
    table = {
        "plain": {4.0: made("4", 0.96, colourfulness=0.3), 7.0: made("7", 0.8)},
        "apg": {4.0: made("4 + apg", 0.95)},
    }
    one = found(table)
    assert recommendation_of(one, rule_ranges(one)).guidance == "4 + apg"  # plain is useful nowhere
    table = {"plain": {4.0: made("4", 0.90, 1000)}, "apg": {4.0: made("4 + apg", 0.92, 1000)}}
    one = found(table)
    assert worse(one, one.cells["4"], one.cells["4 + apg"])
    assert recommendation_of(one, rule_ranges(one)).guidance == "4 + apg"


def test_the_sentence_says_what_was_measured() -> None:
    table = {"plain": {2.0: made("2", 0.9), 4.0: made("4", 0.92, sharpness=1.9, colourfulness=0.21)}}
    one = found(table)
    assert recommendation_of(one, rule_ranges(one)).words == (
        "Use --guidance '4' (plain, useful from 2 to 4): all right 92.0 % (89.0 to 95.0), "
        "colourfulness +5 % and sharpness −5 % against true images."
    )


def test_where_nothing_is_useful_the_sentence_says_why() -> None:
    one = found({"plain": {4.0: made("4", 0.9, sharpness=1.0)}})
    said = recommendation_of(one, rule_ranges(one))
    assert said.guidance is None
    assert said.words == (
        "No scale is useful: the most adherent guidance, '4' (all right 90.0 % (87.0 to 93.0)), is out of tolerance "
        "against true images: sharpness −50 %."
    )
    nothing = found({"plain": {4.0: made("4", 0.0), 7.0: made("7", 0.0)}})
    assert recommendation_of(nothing, rule_ranges(nothing)).words == (
        "No scale is useful: no image under any guidance is all right."
    )
    assert [line.words for line in rule_ranges(nothing)] == ["none"]


def test_the_range_chart_tells_every_state() -> None:
    grey = {"colourfulness": 0.1}
    table = {
        "plain": {
            1.0: made("1", 0.5),
            2.0: made("2", 0.9),
            4.0: made("4", 0.9, **grey),
            7.0: made("7", 0.1, **grey),
        }
    }
    one = found(table)
    given = rule_ranges(one)
    names = [state_of(cell)[0] for cell in given[0].cells]
    assert names == ["not adherent enough", "useful", "looks out of tolerance", "both"]
    drawing = range_chart(given, one.study.config.scales, recommendation_of(one, given).chosen)
    page = drawing.html()
    assert page.count("data-tip=") == 4
    assert [line.get_xdata() for line in drawing.figure.axes[0].lines if line.get_markersize() > 10] == [
        [2.0]
    ]  # ringed
    assert "looks out of tolerance: colourfulness −50 %" in page


# Figures


def test_prompts_are_drawn_again_and_not_their_images() -> None:
    """Pictures of a prompt that are all alike say no more than one of them."""
    marks = [i % 3 == 0 for i in range(30)]
    looks = {"saturation": [0.0] * 30, "colourfulness": [0.1] * 30, "sharpness": [float(m) for m in marks]}
    once = cell_of_rows("4", [looks], 1)
    often = cell_of_rows("4", [{name: [v for v in values for _ in range(8)] for name, values in looks.items()}], 8)
    assert once.figures == often.figures
    assert often.count == 240
    assert once.figures["sharpness"].high - once.figures["sharpness"].low > 0.2


def test_a_share_s_interval_is_never_narrower_than_wilson_s() -> None:
    rows = {"right": [1] * 50, "bled": [None] * 49 + [0], "saturation": [0.0] * 50, "sharpness": [1.0] * 50}
    found_here = cell_of_rows("4", [{**rows, "colourfulness": [0.1] * 50}], 1)
    assert found_here.figures["right"].low == pytest.approx(0.9287, abs=1e-3)
    assert found_here.figures["right"].high == 1
    assert found_here.figures["bled"].value == 0
    assert found_here.figures["bled"].high > 0.7
    assert math.isnan(found_here.by_prompt["bled"][0])
    nothing = cell_of_rows("4", [{**rows, "bled": [None] * 50, "colourfulness": [0.1] * 50}], 1)
    assert "bled" not in nothing.figures


def test_of_one_prompt_images_are_drawn_again() -> None:
    rows = {"saturation": [0.0, 1.0] * 20, "colourfulness": [0.1] * 40, "sharpness": [1.0] * 40, "diversity": [0.3]}
    one = cell_of_rows("4", [rows], 40)
    assert 0.2 < one.figures["saturation"].low < 0.5 < one.figures["saturation"].high < 0.8
    assert one.figures["diversity"] == Estimate(pytest.approx(0.3))


# Rules


@pytest.mark.parametrize(
    ("words", "nature", "text"),
    [
        ("plain", ModelTraits(), "7"),
        ("rescale", ModelTraits(), "7 + rescale"),
        ("rescale phi=0.5", ModelTraits(), "7 + rescale phi=0.5"),
        ("dynamic", ModelTraits(latent=False), "7 + threshold"),
        ("dynamic percentile=0.9", ModelTraits(latent=False), "7 + threshold percentile=0.9"),
        ("dynamic", ModelTraits(latent=True), "7 + mimic"),
        ("dynamic scale=4", ModelTraits(latent=True), "7 + mimic scale=4"),
        ("interval", ModelTraits(), "7 + sigma_interval low=0.28 high=5.42"),
        ("interval", ModelTraits(flow=True), "7 + sigma_interval low=0.2188 high=0.8442"),
        ("interval start=0.2 stop=0.8", ModelTraits(flow=True), "7 + interval start=0.2 stop=0.8"),
        ("apg", ModelTraits(), "7 + apg"),
        ("cfg_zero", ModelTraits(), "7 + cfg_zero"),
        ("sigma_interval low=1 high=2", ModelTraits(), "7 + sigma_interval low=1 high=2"),
    ],
)
def test_rules_are_spelled_for_the_model(words: str, nature: ModelTraits, text: str) -> None:
    told = guidance_of(words, 7.0, nature)
    assert told.text() == text
    assert Guidance.parse(text) == told


def test_the_span_is_one_of_signal_to_noise() -> None:
    """A flow's sigma t has sigma / alpha = t / (1 − t)."""
    (flow,) = guidance_of("interval", 3.0, ModelTraits(flow=True)).rules
    for end, ratio in zip((flow.low, flow.high), INTERVAL_SPAN, strict=True):
        assert end / (1 - end) == pytest.approx(ratio, rel=1e-3)


def test_at_scale_one_only_what_acts_is_a_cell_of_its_own() -> None:
    told = {name: guidance_of(name, 1.0, ModelTraits()).text() for name in RULE_NAMES}
    assert told == {
        **dict.fromkeys(RULE_NAMES, "1"),
        "cfg_zero": "1 + cfg_zero",
    }  # it zeroes the first step at any scale
    assert guidance_of("cfg_zero zero_steps=0", 1.0, ModelTraits()).text() == "1"
    assert guidance_of("pag scale=2", 1.0, ModelTraits()).text() == "1 + pag scale=2"


def test_a_rule_that_one_kind_of_model_takes_is_not_refused_early() -> None:
    check_rule("dynamic most=2", 4.0)  # of a threshold
    check_rule("dynamic scale=2", 4.0)  # of a mimic
    with pytest.raises(PellucidError, match="option of threshold must be one of"):
        check_rule("dynamic bogus=2", 4.0)
    with pytest.raises(PellucidError, match="option of mimic must be one of"):
        guidance_of("dynamic most=2", 4.0, ModelTraits(latent=True))
