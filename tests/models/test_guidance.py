"""Guidance as a value and its rules: laws, diffusers' guiders as oracles, JSON and text, the guarded preset."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import diffusers.guiders as guiders
import pytest
import torch
from diffusers.guiders.guider_utils import rescale_noise_cfg
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pellucid import Level, PellucidError, compile_plan, schedules
from pellucid.models.guidance import GUARDED_SCALE, Guidance, Ramp, ScaleList, guarded
from pellucid.models.rules import (
    APG,
    CFG,
    PAG,
    RULES,
    AutoGuidance,
    CFGZero,
    Interval,
    Mimic,
    Rescale,
    SigmaInterval,
    SkipLayer,
    Threshold,
)

SCALED = schedules.make("scaled_linear")
SHAPE = (3, 4, 6, 5)


def noise(seed: int, spread: float = 1.0) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * spread + 0.1


def off(found: Tensor, wanted: Tensor) -> float:
    """Relative error, as the parity of networks is measured."""
    return float((found - wanted).abs().max() / wanted.abs().max())


COND, UNCOND = noise(1), noise(2)


# --- diffusers as the oracle: in float32 the two ways of writing one formula differ by rounding alone ------------


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.5, 7.5, 30.0])
def test_cfg_is_diffusers(scale: float) -> None:
    wanted = guiders.ClassifierFreeGuidance(guidance_scale=scale)(data(COND, UNCOND)).pred
    assert off(CFG().combine(COND, UNCOND, scale, None)[0], wanted) < 1e-6


def data(cond: Tensor, uncond: Tensor) -> list:
    """What a guider's call takes: one object a prediction, with its name on it."""

    class Block:
        def __init__(self, name: str, value: Tensor) -> None:
            self.__guidance_identifier__, self.noise_pred = name, value

    return [Block("pred_cond", cond), Block("pred_uncond", uncond)]


@pytest.mark.parametrize("phi", [0.0, 0.3, 1.0])
def test_rescale_is_diffusers(phi: float) -> None:
    guided = UNCOND + 7.5 * (COND - UNCOND)
    assert off(Rescale(phi).correct(guided, COND, None), rescale_noise_cfg(guided, COND, phi)) < 1e-6


@pytest.mark.parametrize(("eta", "norm"), [(1.0, 0.0), (0.0, 2.5), (0.4, 15.0), (0.0, 1000.0)])
@pytest.mark.parametrize("momentum", [0.0, -0.75, 0.5])
@pytest.mark.parametrize("base", ["cond", "uncond"])
def test_apg_is_diffusers_over_several_calls(eta: float, norm: float, momentum: float, base: str) -> None:
    """From cond it is their `use_original_formulation`, whose scale counts from 0."""
    rule = APG(eta, norm, momentum, base)
    guider = guiders.AdaptiveProjectedGuidance(
        guidance_scale=4.0 if base == "cond" else 5.0,
        adaptive_projected_guidance_momentum=momentum or None,
        adaptive_projected_guidance_rescale=norm,
        eta=eta,
        use_original_formulation=base == "cond",
    )
    past = None
    for step in range(3):
        guider.set_state(step, 3, None)
        guider.prepare_inputs({"a": (COND, UNCOND)})
        cond, uncond = noise(10 + step), noise(20 + step, 0.8)
        found, past = rule.combine(cond, uncond, 5.0, past)
        assert off(found, guider.forward(cond, uncond).pred) < 1e-5  # theirs takes the angle in float64


def test_cfg_zero_is_diffusers() -> None:
    guider = guiders.ClassifierFreeZeroStarGuidance(guidance_scale=5.0, zero_init_steps=1)
    guider.set_state(3, 10, None)
    assert off(CFGZero().combine(COND, UNCOND, 5.0, None)[0], guider.forward(COND, UNCOND).pred) < 1e-5


def test_the_scale_of_cfg_zero_is_the_best_one() -> None:
    """At scale 0 what is left is s·uncond, the multiple of uncond that is nearest to cond."""
    nearest = CFGZero().combine(COND, UNCOND, 0.0, None)[0]
    across = ((COND - nearest) * UNCOND).sum((1, 2, 3)) / (UNCOND**2).sum((1, 2, 3))
    assert across.abs().max() < 1e-5


@given(st.integers(1, 60), st.floats(0, 0.99), st.floats(0, 1))
def test_the_interval_is_diffusers(steps: int, start: float, stop: float) -> None:
    start, stop = min(start, stop), max(start, stop)
    guider = guiders.ClassifierFreeGuidance(guidance_scale=5.0, start=min(start, 0.99), stop=stop)
    guidance = Guidance(5.0, (Interval(min(start, 0.99), stop),))
    bound = guidance.bind(compile_plan("euler", steps=steps), SCALED)
    for step, ratio in enumerate(bound.ratios):
        guider.set_state(step, steps, None)
        assert bound.at(Level(1.0, ratio)).guided == guider._is_cfg_enabled()


# --- laws of single rules ----------------------------------------------------------------------------------------


def test_apg_without_projection_bound_and_momentum_is_cfg() -> None:
    plain = CFG().combine(COND, UNCOND, 6.0, None)[0]
    for base in ("cond", "uncond"):
        assert off(APG(1.0, 0.0, 0.0, base).combine(COND, UNCOND, 6.0, None)[0], plain) < 1e-6


def test_apg_with_eta_0_leaves_the_length_along_cond() -> None:
    guided = APG(0.0, 0.0, 0.0).combine(COND, UNCOND, 6.0, None)[0]
    along = ((guided - COND) * COND).sum((1, 2, 3)) / (COND**2).sum((1, 2, 3))
    assert along.abs().max() < 1e-5


def test_apg_bounds_the_step_of_each_image() -> None:
    guided = APG(1.0, 2.0, 0.0).combine(COND, UNCOND, 4.0, None)[0]
    assert torch.allclose((guided - COND).flatten(1).norm(dim=1), torch.full((3,), 6.0), rtol=1e-5)


def test_rescale_brings_back_the_spread_of_cond() -> None:
    guided = UNCOND + 9 * (COND - UNCOND)
    full = Rescale(1.0).correct(guided, COND, None)
    assert torch.allclose(full.std((1, 2, 3)), COND.std((1, 2, 3)), rtol=1e-5)
    assert torch.equal(Rescale(0.0).correct(guided, COND, None), guided)
    flat = torch.full_like(COND, 0.5)
    assert torch.equal(Rescale(0.7).correct(flat, COND, None), flat)  # no spread to rescale: no 0 / 0


def test_mimic_at_its_own_scale_changes_nothing_and_never_grows() -> None:
    own = UNCOND + 7 * (COND - UNCOND)
    assert off(Mimic(7.0).correct(own, COND, UNCOND), own) < 1e-6
    small = UNCOND + 3 * (COND - UNCOND)
    assert off(Mimic(7.0).correct(small, COND, UNCOND), small) < 1e-6


@pytest.mark.parametrize("percentile", [1.0, 0.9])
def test_mimic_gives_each_channel_the_range_of_the_smaller_scale(percentile: float) -> None:
    found = Mimic(5.0, percentile).correct(UNCOND + 15 * (COND - UNCOND), COND, UNCOND).flatten(2)
    model = (UNCOND + 5 * (COND - UNCOND)).flatten(2)
    wide = (model - model.mean(2, keepdim=True)).abs().amax(2)
    around = UNCOND + 15 * (COND - UNCOND)
    mean = around.flatten(2).mean(2, keepdim=True)  # the centre is that of the guided prediction
    assert torch.allclose((found - mean).abs().amax(2), wide, rtol=1e-5)


def test_half_of_mimic_is_half_of_the_way() -> None:
    guided = UNCOND + 15 * (COND - UNCOND)
    full = Mimic(5.0).correct(guided, COND, UNCOND)
    assert off(Mimic(5.0, phi=0.5).correct(guided, COND, UNCOND), (full + guided) / 2) < 1e-6


def test_threshold_is_diffusers() -> None:
    """Imagen's: the bound of diffusers' scheduler is `most`."""
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler(thresholding=True, dynamic_thresholding_ratio=0.9, sample_max_value=3.0)
    guided = UNCOND + 7 * (COND - UNCOND)
    assert off(Threshold(0.9, 3.0).correct(guided, COND, None), scheduler._threshold_sample(guided)) < 1e-6
    assert Threshold(0.9).correct(guided, COND, None).abs().max() <= 1.0
    inside = COND / COND.abs().max()
    assert torch.equal(Threshold(1.0).correct(inside, COND, None), inside)


# --- scales over a run -------------------------------------------------------------------------------------------


def doses(guidance: Guidance, sampler: str = "euler", steps: int = 5, **options) -> list[float]:
    plan = compile_plan(sampler, steps=steps, **options)
    bound = guidance.bind(plan, SCALED)
    return [bound.at(r.level).scale for r in plan.rows]


def test_ramps_and_lists() -> None:
    assert doses(Guidance(Ramp(10, 2))) == [10, 8, 6, 4, 2]
    cosine = [2 + 8 * (1 + math.cos(math.pi * i / 4)) / 2 for i in range(5)]
    assert doses(Guidance(Ramp(10, 2, "cosine"))) == pytest.approx(cosine, abs=1e-12)
    assert doses(Guidance(Ramp(10, 2)), steps=1) == [10]
    assert doses(Guidance((5.0, 4.0, 3.0, 2.0, 1.0))) == [5, 4, 3, 2, 1]
    assert doses(Guidance((5.0, 1.0)), steps=4) == [5, 5, 1, 1]
    with pytest.raises(PellucidError, match="a list of at most 2 values, one per step"):
        doses(Guidance((5.0, 4.0, 3.0)), steps=2)


def test_a_level_has_one_scale_however_often_it_is_called() -> None:
    """Heun calls s0, s1, s1, s2, s2: the end of one step and the start of the next are one level."""
    assert doses(Guidance(Ramp(10, 2)), "heun") == [10, 8, 8, 6, 6, 4, 4, 2, 2]
    restart = compile_plan("restart", steps=20)
    bound = Guidance(Ramp(10, 2)).bind(restart, SCALED)
    by_ratio = sorted((r.level.ratio, bound.at(r.level).scale) for r in restart.rows)
    assert by_ratio == sorted(by_ratio, key=lambda pair: pair[1])  # falls with the noise, also in the passes back


def test_an_inversion_runs_the_other_way() -> None:
    assert doses(Guidance(Ramp(10, 2)), "ddim_inversion") == [10, 8, 6, 4, 2]


def test_a_level_between_two_steps_counts_as_the_later_one() -> None:
    plan = compile_plan("euler", steps=5)
    bound = Guidance(Ramp(10, 2)).bind(plan, SCALED)
    between = math.sqrt(plan.rows[1].level.ratio * plan.rows[2].level.ratio)
    assert bound.at(Level(1.0, between)).scale == 6
    assert bound.at(Level(1.0, 1e-9)).scale == 2
    assert bound.at(Level(0.0, 1.0)).scale == 10


def test_a_sigma_interval_is_half_open_and_speaks_the_schedules_sigma() -> None:
    guidance = Guidance(7.0, (SigmaInterval(0.3, 0.8),))
    on_ve = [guidance.bind(None, SCALED).at(Level(1.0, s)).guided for s in (0.3, 0.31, 0.8, 0.81)]
    assert on_ve == [False, True, True, False]
    flow = schedules.make("flow")
    on_flow = [guidance.bind(None, flow).at(Level(1.0 - s, s)).guided for s in (0.29, 0.31, 0.79, 0.81)]
    assert on_flow == [False, True, True, False]


# --- as a value --------------------------------------------------------------------------------------------------

NUMBER = st.floats(0, 1, allow_nan=False)
SCALES = st.one_of(
    st.floats(0, 1000),
    st.builds(Ramp, st.floats(0, 1000), st.floats(0, 1000), st.sampled_from(["linear", "cosine"])),
    st.lists(st.floats(0, 1000), min_size=1, max_size=4).map(lambda v: ScaleList(tuple(v))),
)
SPACE = st.sampled_from(["raw", "eps", "x0", "v", "flow"])
LAYERS = st.lists(st.one_of(st.integers(0, 40), st.sampled_from(["mid", "up.1"])), min_size=1, max_size=3).map(tuple)
ORDERED = st.tuples(NUMBER, NUMBER).map(sorted)
WHEN = st.one_of(ORDERED.map(lambda p: Interval(*p)), NUMBER.map(lambda low: SigmaInterval(low, low + 1.5)), st.none())
COMBINE = st.one_of(
    st.builds(CFG, space=SPACE),
    st.builds(APG, NUMBER, st.floats(0, 100), st.floats(-1, 1), st.sampled_from(["cond", "uncond"]), space=SPACE),
    st.builds(CFGZero, st.integers(0, 5), space=SPACE),
    st.none(),
)
EXTRAS = st.tuples(
    st.one_of(st.none(), st.tuples(ORDERED, LAYERS).map(lambda p: PAG(2.0, *p[0], p[1]))),
    st.one_of(st.none(), st.builds(SkipLayer, st.floats(0, 10), layers=LAYERS)),
    st.one_of(st.none(), st.builds(AutoGuidance, st.floats(0, 10))),
)
CORRECT = st.tuples(
    st.one_of(st.none(), st.builds(Rescale, NUMBER, space=SPACE)),
    st.one_of(st.none(), st.builds(Mimic, st.floats(0, 20), NUMBER, NUMBER, space=SPACE)),
    st.one_of(st.none(), st.builds(Threshold, st.floats(0.01, 1), st.one_of(st.none(), st.floats(1, 9)), space=SPACE)),
)


@st.composite
def any_guidance(draw) -> Guidance:
    drawn = [draw(WHEN), draw(COMBINE), *draw(EXTRAS), *draw(CORRECT)]
    return Guidance(draw(SCALES), tuple(draw(st.permutations([r for r in drawn if r is not None]))))


@given(any_guidance())
def test_json_and_text_bring_back_the_same_guidance(guidance: Guidance) -> None:
    assert Guidance.parse(json.loads(json.dumps(guidance.to_dict(), allow_nan=False))) == guidance
    assert Guidance.parse(guidance.text()) == guidance
    assert hash(Guidance.parse(guidance.text())) == hash(guidance)


def test_parse_reads_what_people_give() -> None:
    assert Guidance.parse(5) == Guidance(5.0) == Guidance.parse("5") == Guidance.parse({"scale": 5})
    assert Guidance.parse("off") == Guidance(1.0)
    assert Guidance.parse([3, 2.5]) == Guidance.parse("3,2.5") == Guidance(ScaleList((3, 2.5)))
    assert Guidance.parse("cosine:9:3") == Guidance(Ramp(9, 3, "cosine"))
    text = "7.5 + rescale phi=0.5 space=raw + pag scale=2 layers=mid,down.1 + interval start=0.1 stop=0.8"
    assert Guidance.parse(text) == Guidance(
        7.5, (Interval(0.1, 0.8), PAG(2, layers=("mid", "down.1")), Rescale(0.5, space="raw"))
    )
    same = Guidance(3.0)
    assert Guidance.parse(same) is same


def test_the_order_in_which_rules_are_given_does_not_matter() -> None:
    assert Guidance(5.0, (Threshold(), Rescale(), PAG(), APG())) == Guidance(
        5.0, (APG(), PAG(), Rescale(), Threshold())
    )


BAD = [
    (math.nan, "guidance scale must be a number from 0 to 1000; got nan."),
    ("nan", "guidance scale must be a number from 0 to 1000; got nan."),
    (math.inf, "guidance scale must be a number from 0 to 1000; got inf."),
    (-1, "guidance scale must be a number from 0 to 1000; got -1."),
    (True, "guidance scale must be a number"),
    (None, "guidance scale must be a number"),
    ("seven", "guidance must be a number, `off`"),
    ("", "guidance must be a number, `off`"),
    ("7 + rescal", "rule must be one of .* Nearest: rescale"),
    ("7 + ", "guidance must be a number|rule must be one of"),
    ("7 + rescale phi", "options of rescale must be words such as"),
    ("7 + rescale phi=2", "phi of rescale must be a number from 0 to 1; got 2."),
    ("7 + rescale fi=1", "option of rescale must be one of"),
    ("7 + rescale space=latent", "space of rescale must be one of raw, eps, x0, v, flow; got 'latent'."),
    ("7 + rescale + rescale", "at most one rescale"),
    ("7 + apg + cfg_zero", "at most one cfg or apg or cfg_zero"),
    ("7 + interval start=0.9 stop=0.1", "start of interval must be at most its stop 0.1; got 0.9."),
    ("7 + sigma_interval low=2 high=1", "low of sigma_interval must be below its high 1; got 2."),
    ("7 + sigma_interval", "sigma_interval must have low and high; got none."),
    ("7 + cfg_zero zero_steps=0.5", "zero_steps of cfg_zero must be a whole number; got 0.5."),
    ("7 + apg base=left", "base of apg must be one of cond, uncond; got 'left'."),
    ("linear:1:nan", "last of the scale must be a number"),
    ("linear:1", "guidance must be a number"),
    ([], "scale must be a number, or a list of at least one"),
    ([1, math.nan], "scale must be a number from 0 to 1000; got nan."),
    ({"skale": 1}, "guidance must be an object with scale, rules and notes"),
    ({"scale": {"first": 1}}, "scale must be a number, a list, or first, last and shape"),
    ({"rules": [{"phi": 1}]}, "rules must be objects with a rule's name"),
    ({"rules": 3}, "guidance must be an object"),
]


@pytest.mark.parametrize(("value", "line"), BAD, ids=[str(b[0]) for b in BAD])
def test_bad_input_is_one_clear_line(value: object, line: str) -> None:
    with pytest.raises(PellucidError, match=line) as caught:
        Guidance.parse(value)
    assert "\n" not in str(caught.value)
    assert caught.value.code.startswith("guidance")


def test_every_rule_has_a_name_and_says_its_space() -> None:
    spaces = {name: kind.space for name, kind in RULES.items() if hasattr(kind, "space")}
    assert spaces == {
        "cfg": "raw",
        "apg": "x0",
        "cfg_zero": "flow",
        "rescale": "v",
        "mimic": "x0",
        "threshold": "x0",
    }
    assert all(kind.name == name for name, kind in RULES.items())


def test_as_diffusers_works_on_the_raw_output() -> None:
    found = Guidance(5.0, (APG(), Rescale(), Mimic(), PAG())).as_diffusers()
    assert found.rules == (APG(base="uncond", space="raw"), PAG(), Rescale(space="raw"), Mimic(space="raw"))
    assert found.scale == 5.0


# --- guarded -----------------------------------------------------------------------------------------------------


def test_guarded_caps_the_scale_and_says_so() -> None:
    found = guarded(12)
    assert found == Guidance(GUARDED_SCALE, (Rescale(0.7),))
    assert found.notes == ("guidance scale 12 was capped at 7 by the guarded preset",)
    assert Guidance.parse(json.loads(json.dumps(found.to_dict()))).notes == found.notes


def test_guarded_leaves_what_is_within_and_turns_rescale_on() -> None:
    assert guarded(5) == Guidance(5.0, (Rescale(0.7),))
    assert guarded(5).notes == guarded().notes == ()
    assert guarded("5 + rescale phi=0.3 + pag").rules == (PAG(), Rescale(0.3))
    assert guarded("5 + rescale phi=0").rules == (Rescale(0.7),)


def test_guarded_caps_every_form_of_scale() -> None:
    assert guarded("linear:12:2").scale == Ramp(7, 2)
    assert guarded([12, 5]).scale == ScaleList((7, 5))
    assert Guidance.parse("guarded 9") == guarded(9)
    assert Guidance.parse("guarded 9").notes == guarded(9).notes != ()
    assert Guidance.parse("guarded + pag") == replace(guarded(), rules=(PAG(), Rescale(0.7)))


@given(any_guidance())
def test_nothing_guarded_is_above_the_cap(guidance: Guidance) -> None:
    found = guarded(guidance)
    most = found.scale if isinstance(found.scale, float) else max(found.scale.ends)
    assert most <= GUARDED_SCALE
    assert any(isinstance(r, Rescale) and r.phi > 0 for r in found.rules)
