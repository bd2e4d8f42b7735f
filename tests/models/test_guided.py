"""The guided denoiser: what it asks of the network, one image whatever the batch, spaces, and whole runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise

import diffusers.guiders as guiders
import pytest
import torch
from diffusers.guiders.guider_utils import rescale_noise_cfg
from torch import Tensor, nn

from pellucid import (
    Clip,
    Job,
    Level,
    PellucidError,
    Prediction,
    StepSeen,
    compile_plan,
    denoiser,
    run,
    run_batch,
    schedules,
)
from pellucid.core.batch import Batch, Entry
from pellucid.core.denoiser import input_scale, read_output
from pellucid.core.loop import loop
from pellucid.core.noise import Philox
from pellucid.core.oracle import Mixture
from pellucid.models.guidance import Guidance, Ramp
from pellucid.models.guided import GuidedDenoiser
from pellucid.models.rules import APG, CFG, PAG, AutoGuidance, CFGZero, Interval, Mimic, Rescale, Threshold

SCALED = schedules.make("scaled_linear")
FLOW = schedules.make("flow")
SHAPE = (4, 5, 7)
LEVEL = SCALED.level(500.0)
ALL_RULES = "6 + apg + pag + skip_layer start=0 stop=1 + rescale + mimic scale=4 percentile=0.9 + threshold most=3"


class Toy(nn.Module):
    """Treats each number by itself, so that it rounds alike in any batch; keeps what it was asked."""

    def __init__(self, bend: float = 1.0, variance: bool = False) -> None:
        super().__init__()
        self.bend, self.variance = bend, variance
        self.calls: list[tuple[int, str]] = []

    def forward(self, x: Tensor, time: Tensor, push: Tensor, *, perturbed: tuple = (), skipped: tuple = ()) -> Tensor:
        self.calls.append((len(x), "perturbed" if perturbed else "skipped" if skipped else ""))
        told = time.reshape(-1, 1, 1, 1) / 1000
        out = x * (0.2 + 0.6 * told) / (self.bend + x * x) + push[:, :, None, None]
        out = out * 0.75 if perturbed else out + 0.25 * x if skipped else out
        return torch.cat([out, out + 9.0], 1) if self.variance else out


def told(count: int, seed: int) -> dict[str, Tensor]:
    return {"push": torch.randn(count, SHAPE[0], generator=torch.Generator().manual_seed(seed)) * 0.3}


def noise(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed))


def guided(guidance: object, network: Callable | None = None, count: int = 2, **more) -> GuidedDenoiser:
    options = {"schedule": SCALED, "target": "eps", "cond": told(count, 1), "uncond": told(count, 2)} | more
    weak = Toy(3.0) if "autoguidance" in Guidance.parse(guidance).text() else None
    return GuidedDenoiser(network or Toy(), guidance=Guidance.parse(guidance), **{"weak": weak} | options)


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


# --- what it asks of the network ---------------------------------------------------------------------------------


def test_cond_and_uncond_are_one_call() -> None:
    network = Toy()
    run(compile_plan("euler", steps=4), guided("7", network), noise(2))
    assert network.calls == [(4, "")] * 4


def test_scale_1_does_not_pay_for_uncond_and_is_cond() -> None:
    network, plan = Toy(), compile_plan("dpmpp_2m", steps=4)
    found = run(plan, guided("1 + rescale + mimic + threshold", network), noise(2))
    assert network.calls == [(2, "")] * 4
    push = told(2, 1)["push"]
    assert torch.equal(found, run(plan, denoiser(lambda x, t: Toy()(x, t, push), SCALED, "eps"), noise(2)))


@pytest.mark.parametrize(("sampler", "calls"), [("euler", "ccbbbbbccc"), ("heun", "cccbbbbbbbbbbcccccc")])
def test_outside_of_its_interval_it_does_not_pay(sampler: str, calls: str) -> None:
    network = Toy()
    run(compile_plan(sampler, steps=10), guided("7 + interval start=0.2 stop=0.7", network), noise(2))
    assert "".join("b" if count == 4 else "c" for count, _ in network.calls) == calls


def test_a_sigma_interval_pays_between_its_sigmas() -> None:
    network, plan = Toy(), compile_plan("euler", steps=10)
    run(plan, guided("7 + sigma_interval low=0.5 high=3", network), noise(2))
    assert [count == 4 for count, _ in network.calls] == [0.5 < r.level.ratio <= 3 for r in plan.rows]
    assert 0 < sum(count == 4 for count, _ in network.calls) < 10


def test_a_ramp_that_passes_1_does_not_pay_there() -> None:
    network = Toy()
    run(compile_plan("euler", steps=3), guided("3,1,2", network), noise(2))
    assert [count for count, _ in network.calls] == [4, 2, 4]


def test_each_extra_term_is_one_call_on_cond_while_it_acts() -> None:
    network = Toy()
    weak = Toy(3.0)
    run(
        compile_plan("euler", steps=4),
        guided("1 + pag stop=0.5 + skip_layer start=0.5 stop=1 + autoguidance", network, weak=weak),
        noise(2),
    )
    assert network.calls == [(2, ""), (2, "perturbed")] * 2 + [(2, ""), (2, "skipped")] * 2
    assert weak.calls == [(2, "")] * 4


def test_zero_steps_do_not_call_at_all() -> None:
    network, seen = Toy(), []
    run(compile_plan("euler", steps=4), guided("5 + cfg_zero zero_steps=2", network), noise(2), observers=[seen.append])
    assert network.calls == [(4, "")] * 2
    assert [list(step.parts)[-1] for step in seen] == ["zero_init", "zero_init", "cfg_zero", "cfg_zero"]


def test_zero_steps_stand_still_on_a_flow() -> None:
    """The velocity is zero, so x is what it was."""
    plan = compile_plan("euler", schedule="flow", steps=4)
    seen: list[StepSeen] = []
    run(plan, guided("5 + cfg_zero", schedule=FLOW, target="flow"), noise(2), observers=[seen.append])
    assert off(seen[0].x_next, noise(2)) < 1e-6
    assert off(seen[1].x_next, seen[0].x_next) > 1e-2


def test_a_learned_variance_is_dropped() -> None:
    plan = compile_plan("ddim", steps=3)
    with_variance = run(plan, guided("4 + pag", Toy(variance=True)), noise(2))
    assert torch.equal(with_variance, run(plan, guided("4 + pag"), noise(2)))


def test_half_precision_is_the_networks_alone() -> None:
    """The network works in bfloat16; what it says is combined in float32."""
    asked = []

    def network(x: Tensor, time: Tensor, push: Tensor) -> Tensor:
        asked.append(x.dtype)
        return (x * 0.5 + push[:, :, None, None]).to(torch.bfloat16)

    found = guided("9", network, dtype=torch.bfloat16)(noise(2), LEVEL, 500.0)
    assert asked == [torch.bfloat16]
    assert found.x0.dtype == torch.float32
    cond, uncond = (network(noise(2).bfloat16(), None, told(2, s)["push"]).float() for s in (1, 2))
    k_x, k_out = read_output(SCALED, "eps", "x0", LEVEL)
    assert off(found.x0, noise(2) * k_x + (uncond + 9 * (cond - uncond)) * k_out) < 1e-6


def test_the_filter_comes_last() -> None:
    found = guided("9", x0_filter=Clip(0.5))(noise(2), LEVEL, 500.0)
    assert torch.equal(found.x0, guided("9")(noise(2), LEVEL, 500.0).x0.clamp(-0.5, 0.5))
    assert found.parts["cfg"].abs().max() > 0.5


# --- diffusers, on the raw output, in whole runs -----------------------------------------------------------------


def guider_of(name: str, rescale: float) -> guiders.guider_utils.BaseGuidance:
    more = {"guidance_rescale": rescale, "stop": 0.8}
    layers = {"perturbed_guidance_layers": [0], "perturbed_guidance_start": 0.0, "perturbed_guidance_stop": 1.0}
    skips = {"skip_layer_guidance_layers": [0], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
    if name == "cfg":
        return guiders.ClassifierFreeGuidance(5.0, **more)
    if name == "apg":
        momentum = {"adaptive_projected_guidance_momentum": -0.5, "adaptive_projected_guidance_rescale": 2.0}
        return guiders.AdaptiveProjectedGuidance(5.0, eta=0.3, **momentum, **more)
    if name == "cfg_zero":
        return guiders.ClassifierFreeZeroStarGuidance(5.0, zero_init_steps=0, **more)
    if name == "pag":
        return guiders.PerturbedAttentionGuidance(4.0, 2.5, use_original_formulation=True, **layers, **more)
    return guiders.SkipLayerGuidance(4.0, 2.5, use_original_formulation=True, **skips, **more)


OURS = {
    "cfg": "5",
    "apg": "5 + apg eta=0.3 norm=2 momentum=-0.5",
    "cfg_zero": "5 + cfg_zero zero_steps=0",
    "pag": "5 + pag scale=2.5 start=0.2",
    "skip_layer": "5 + skip_layer scale=2.5 start=0.2 stop=1",
}


@pytest.mark.parametrize("rescale", [0.0, 0.7])
@pytest.mark.parametrize("name", OURS)
def test_a_run_is_that_of_diffusers_guiders(name: str, rescale: float) -> None:
    """Their interval of the extra terms leaves out its first step (`<` where that of CFG has `<=`)."""
    plan, network = compile_plan("ddim", steps=5), Toy()
    first, second = told(2, 1)["push"], told(2, 2)["push"]
    guider = guider_of(name, rescale)

    def peer(x: Tensor, level: Level, time: float) -> Tensor:
        step = [r.time for r in plan.rows].index(time)
        guider.set_state(step, 5, None)
        guider.prepare_inputs({"a": (x, x)})
        t = torch.full((2,), time)
        term = {"pag": {"perturbed": (0,)}, "skip_layer": {"skipped": (0,)}}.get(name)
        more = [network(x, t, first, **term)] if term else []
        out = guider.forward(network(x, t, first), network(x, t, second), *more).pred
        k_x, k_out = read_output(SCALED, "eps", "x0", level)
        return x * k_x + out * k_out

    guidance = Guidance.parse(f"{OURS[name]} + interval stop=0.8 + rescale phi={rescale}").as_diffusers()
    assert off(run(plan, guided(guidance), noise(2)), run(plan, peer, noise(2))) < 1e-5


def test_autoguidance_is_diffusers() -> None:
    found = guided("1 + autoguidance scale=3 + rescale phi=0.4 space=raw")(noise(2), LEVEL, 500.0)
    cond, weak = (found.parts.within(name, "raw") for name in ("cond", "weak"))
    guider = guiders.AutoGuidance(3.0, auto_guidance_layers=[0], dropout=1.0, guidance_rescale=0.4)
    assert off(found.parts.within("rescale", "raw"), guider.forward(cond, weak).pred) < 1e-6


# --- spaces ------------------------------------------------------------------------------------------------------


def as_target(schedule: schedules.Schedule, target: str) -> Callable[..., Tensor]:
    """One and the same x0 for every target: the toy predicts x0, and this says it in the words of the target."""

    def network(x: Tensor, time: Tensor, push: Tensor) -> Tensor:
        level = schedule.level(float(time[0]))
        x0 = x / (1.0 + x * x) + push[:, :, None, None]
        seen = x / input_scale(schedule, level)
        k_x, k_out = read_output(schedule, target, "x0", level)
        return (x0 - seen * k_x) / k_out

    return network


SPACED = [
    (SCALED, "eps"),
    (SCALED, "v"),
    (SCALED, "x0"),
    (SCALED, "score"),
    (FLOW, "flow"),
    (FLOW, "v"),
    (schedules.make("edm"), "edm"),
]


@pytest.mark.parametrize(("schedule", "target"), SPACED, ids=lambda v: getattr(v, "name", v))
@pytest.mark.parametrize("space", ["raw", "eps", "x0", "v", "flow"])
def test_plain_cfg_is_the_same_in_every_space_and_for_every_target(
    schedule: schedules.Schedule, target: str, space: str
) -> None:
    time = float(schedule.time_at(1.3))
    level, x = schedule.level(time), noise(2).double()
    shown = guided(Guidance(6.0, (CFG(space=space),)), as_target(schedule, target), schedule=schedule, target=target)
    wanted = guided("6", as_target(schedule, "x0"), schedule=schedule, target="x0")(x, level, time).x0
    assert off(shown(x, level, time).x0, wanted) < 1e-6  # the told time is all that is float32


@pytest.mark.parametrize("rule", [Rescale(0.8, space="v"), APG(momentum=0.0), CFGZero(0), Mimic(3.0), Threshold(0.9)])
def test_a_rule_gives_the_same_for_every_target_in_its_own_space(rule: object) -> None:
    time = float(SCALED.time_at(1.3))
    level, x = SCALED.level(time), noise(2).double()
    found = [
        guided(Guidance(6.0, (rule,)), as_target(SCALED, target), target=target)(x, level, time).x0
        for target in ("eps", "v", "x0", "score")
    ]
    for other in found[1:]:
        assert off(other, found[0]) < 1e-6


def test_rescale_depends_on_its_space() -> None:
    """2–19 % apart, as the design says: so the space is part of the rule."""
    found = {s: guided(f"7 + rescale space={s}")(noise(2), LEVEL, 500.0).x0 for s in ("raw", "v", "x0")}
    assert off(found["raw"], found["v"]) > 0.01
    assert off(found["x0"], found["v"]) > 0.01


def test_rescale_on_raw_is_the_formula_of_diffusers_whatever_the_target() -> None:
    for target in ("eps", "v", "x0"):
        found = guided("7 + rescale phi=0.6 space=raw", target=target)(noise(2), LEVEL, 500.0)
        cond, plain = (found.parts.within(name, "raw") for name in ("cond", "cfg"))
        k_x, k_out = read_output(SCALED, target, "x0", LEVEL)
        wanted = noise(2) * k_x + rescale_noise_cfg(plain, cond, 0.6) * k_out
        assert off(found.x0, wanted) < 1e-5


def test_at_alpha_0_a_rule_in_eps_is_refused_and_the_others_work() -> None:
    time = FLOW.span[1]
    level = FLOW.level(time)
    assert level.alpha == 0.0
    for text in ("5", "5 + rescale", "5 + apg momentum=0", "5 + cfg_zero zero_steps=0", "5 + mimic"):
        found = guided(text, schedule=FLOW, target="flow")(noise(2), level, time)
        assert torch.isfinite(found.x0).all()
    with pytest.raises(PellucidError, match="alpha 0"):
        guided("5 + rescale space=eps", schedule=FLOW, target="flow")(noise(2), level, time)


# --- one image, whatever the batch -------------------------------------------------------------------------------


def test_a_mixed_batch_equals_each_image_alone() -> None:
    """Other samplers, steps, scales and intervals in one batch; images end at other times. To the last bit."""
    plans = [
        compile_plan("euler", steps=4),
        compile_plan("heun", steps=3),
        compile_plan("dpmpp_2m", steps=6),
        compile_plan("dpmpp_2m", steps=6),
    ]
    base = Guidance.parse(ALL_RULES)
    scales = [5.0, Ramp(8, 1), 1.0, (3.0, 2.0)]
    own = [Guidance(s, (*base.rules, Interval(0.0, 0.3 * i + 0.1))) for i, s in enumerate(scales)]
    cond, uncond = told(4, 1), told(4, 2)
    jobs = [Job(plan, seed) for seed, plan in enumerate(plans)]
    together = run_batch(jobs, GuidedDenoiser(Toy(), SCALED, "eps", cond, uncond, own), shape=SHAPE)
    for i, plan in enumerate(plans):
        one = {"push": cond["push"][i : i + 1]}, {"push": uncond["push"][i : i + 1]}
        alone = run(plan, GuidedDenoiser(Toy(), SCALED, "eps", *one, own[i]), shape=SHAPE, seeds=i)
        assert torch.equal(together[i], alone[0]), i


def test_scales_may_differ_in_a_batch_of_one_plan() -> None:
    plan, own = compile_plan("euler", steps=4), [Guidance(1.0), Guidance(3.0), Guidance(9.0)]
    cond, uncond = told(3, 1), told(3, 2)
    together = run(plan, GuidedDenoiser(Toy(), SCALED, "eps", cond, uncond, own), noise(3))
    for i in range(3):
        one = {"push": cond["push"][i : i + 1]}, {"push": uncond["push"][i : i + 1]}
        alone = run(plan, GuidedDenoiser(Toy(), SCALED, "eps", *one, own[i]), noise(3)[i : i + 1])
        assert torch.equal(together[i], alone[0])


def test_zero_steps_in_a_mixed_batch() -> None:
    plans = [compile_plan("euler", steps=3), compile_plan("euler", steps=30)]
    rules = (CFGZero(2), Rescale())
    jobs = [Job(plan, seed) for seed, plan in enumerate(plans)]
    shared = GuidedDenoiser(Toy(), SCALED, "eps", told(2, 1), told(2, 2), Guidance(4.0, rules))
    together = run_batch([jobs[0], Job(plans[1], 1)], shared, shape=SHAPE)
    for i, plan in enumerate(plans):
        one = [{"push": told(2, s)["push"][i : i + 1]} for s in (1, 2)]
        alone = run(plan, GuidedDenoiser(Toy(), SCALED, "eps", *one, Guidance(4.0, rules)), shape=SHAPE, seeds=i)
        assert torch.equal(together[i], alone[0])


def test_a_run_remembers_nothing_of_another() -> None:
    """APG's momentum lives in one run: the same denoiser gives the same image again, also from threads at once."""
    shared, plan = guided("6 + apg"), compile_plan("euler", steps=5)
    wanted = run(plan, shared, noise(2))
    assert torch.equal(run(plan, shared, noise(2)), wanted)
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(run(plan, shared, noise(2)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(other, wanted) for other in found)
    assert off(run(plan, guided("6 + apg momentum=0"), noise(2)), wanted) > 1e-3  # and momentum does something


# --- composition and observers -----------------------------------------------------------------------------------


def test_all_rules_compose_in_one_order_and_observers_see_each() -> None:
    seen: list[StepSeen] = []
    plan = compile_plan("euler", steps=3)
    run(plan, guided(ALL_RULES + " + autoguidance"), noise(2), observers=[seen.append])
    parts = [*("cond", "uncond", "perturbed", "skipped", "weak"), *("apg", "pag", "skip_layer", "autoguidance")]
    for step in seen:
        assert list(step.parts) == [*parts, "rescale", "mimic", "threshold"]
        assert torch.equal(step.parts["threshold"], step.x0)
        assert step.parts.scales == (6.0,)
        steps_apart = [off(step.parts[b], step.parts[a]) for a, b in pairwise(parts[5:])]
        assert min(steps_apart) > 1e-3  # every rule had its say


def test_the_parts_are_x0_predictions() -> None:
    found = guided("7 + pag")(noise(2), LEVEL, 500.0)
    alone = {s: guided("1", cond=told(2, s))(noise(2), LEVEL, 500.0).x0 for s in (1, 2)}
    assert off(found.parts["cond"], alone[1]) < 1e-6
    assert off(found.parts["uncond"], alone[2]) < 1e-6
    sum_of = alone[2] + 7 * (alone[1] - alone[2]) + 3 * (alone[1] - found.parts["perturbed"])
    assert off(found.x0, sum_of) < 1e-5


def test_a_denoiser_without_parts_shows_none() -> None:
    seen: list[StepSeen] = []
    run(compile_plan("euler", steps=1), lambda x, level, time: x, noise(1), observers=[seen.append])
    assert seen[0].parts == {}


# --- whole runs on an oracle -------------------------------------------------------------------------------------


def gaussian(mean: Tensor) -> Mixture:
    return Mixture(mean[None].double(), torch.tensor([0.4], dtype=torch.float64), torch.ones(1, dtype=torch.float64))


MEANS = torch.tensor([[0.3, -0.2, 0.5], [-0.4, 0.1, 0.2]])


def oracle_network(schedule: schedules.Schedule, target: str) -> Callable[..., Tensor]:
    """The exact network of two Gaussians of one width; `which` (B,) says whose."""

    def network(x: Tensor, time: Tensor, which: Tensor) -> Tensor:
        level = schedule.level(float(time[0]))
        seen = (x / input_scale(schedule, level)).double()
        x0 = torch.stack([gaussian(MEANS[w])(seen[i : i + 1], level)[0] for i, w in enumerate(which.tolist())])
        k_x, k_out = read_output(schedule, target, "x0", level)
        return ((x0 - seen * k_x) / k_out).to(x.dtype)

    return network


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpmpp_2m", "unipc", "ddim"])
@pytest.mark.parametrize(("schedule", "target"), [(SCALED, "eps"), (SCALED, "v"), (FLOW, "flow")])
def test_guiding_between_two_gaussians_is_the_gaussian_beyond_them(
    sampler: str, schedule: schedules.Schedule, target: str
) -> None:
    """Of one width, cond and uncond combine to the exact denoiser of mean m0 + w·(m1 − m0), at every level."""
    plan = compile_plan(sampler, schedule=schedule, target=target, steps=6)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * plan.initial_scale
    cond, uncond = ({"which": torch.full((2,), k)} for k in (1, 0))
    shown = GuidedDenoiser(oracle_network(schedule, target), schedule, target, cond, uncond, Guidance(4.0))
    beyond = gaussian(MEANS[0].double() + 4.0 * (MEANS[1] - MEANS[0]).double())
    # the oracle reads its level from the told time, which a schedule of tables gives back to about 1e-7
    assert off(run(plan, shown, x), run(plan, beyond, x)) < 1e-5


@pytest.mark.parametrize("scale", [0.6, 1.0])
def test_cfgpp_gets_uncond_apart(scale: float) -> None:
    """Also at scale 1, where guidance alone would not ask for it."""
    plan, network = compile_plan("euler_cfgpp", steps=4), Toy()
    found = run(plan, guided(str(scale), network), noise(2))
    assert [count for count, _ in network.calls] == [4] * 4

    def by_hand(x: Tensor, level: Level, time: float) -> Prediction:
        cond, uncond = (guided("1", cond=told(2, s))(x, level, time).x0 for s in (1, 2))
        return Prediction(uncond + scale * (cond - uncond), uncond)

    assert off(found, run(plan, by_hand, noise(2))) < 1e-5


def test_cfgpp_outside_of_the_interval_is_the_plain_sampler_on_cond() -> None:
    network, plan = Toy(), compile_plan("euler_cfgpp", steps=4)
    found = run(plan, guided("0.6 + interval stop=0", network), noise(2))
    assert [count for count, _ in network.calls] == [2] * 4
    assert off(found, run(compile_plan("euler", steps=4), guided("1"), noise(2))) < 1e-5


# --- refusals ----------------------------------------------------------------------------------------------------


def plain(x: Tensor, time: Tensor, push: Tensor) -> Tensor:
    return x


REFUSED = [
    (lambda: guided("7", uncond=None), "uncond must be given for guidance 7; got nothing."),
    (lambda: guided("7 + autoguidance", weak=None), "weak must be a second network for autoguidance; got nothing."),
    (lambda: guided("7", weak=Toy()), "weak must be None without the rule autoguidance; got 'Toy'."),
    (lambda: guided("7 + pag", plain), "network must be one that takes `perturbed` for pag; got 'function'."),
    (lambda: guided("7", target="epz"), "target must be one of"),
    (lambda: guided("linear:9:2")(noise(2), LEVEL, 500.0), "guidance linear:9:2 must be bound to a plan"),
    (lambda: guided("7 + apg")(noise(2), LEVEL, 500.0), r"guidance 7 \+ apg must be bound to a plan"),
    (lambda: guided("7")(noise(3), LEVEL, 500.0), r"inputs\.push must be a tensor with one row for each of 3 images"),
    (lambda: guided("7").bind([None, None])(noise(3), LEVEL, 500.0), "x must be a batch of 2 images, as bound; got 3."),
    (
        lambda: guided("7", lambda x, time, push: x[:, :3])(noise(2), LEVEL, 500.0),
        r"output of the network must be of shape \(4, 4, 5, 7\); got \(4, 3, 5, 7\)",
    ),
    (
        lambda: GuidedDenoiser(Toy(), SCALED, "eps", told(2, 1), told(2, 2), [Guidance(7.0)] * 3).bind([None] * 2),
        "guidance must be one, or one for each of 2 images; got 3.",
    ),
]


@pytest.mark.parametrize(("build", "line"), REFUSED, ids=[line[:40] for _, line in REFUSED])
def test_bad_input_is_one_clear_line(build: Callable[[], object], line: str) -> None:
    with pytest.raises(PellucidError, match=line) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_a_weight_of_0_costs_nothing() -> None:
    network = Toy()
    weak = Toy()
    rules = (PAG(0.0), AutoGuidance(1.0))
    found = GuidedDenoiser(network, SCALED, "eps", told(2, 1), None, Guidance(1.0, rules), weak)(noise(2), LEVEL, 500.0)
    assert network.calls == [(2, "")]
    assert weak.calls == []
    assert list(found.parts) == ["cond"]


# --- mixed batches ------------------------------------------------------------------------------------------------

MIXED = (
    "guarded 9",
    "9",
    "1",
    "7 + interval start=0.2 stop=0.7",
    "5 + apg",
    "4 + pag",
    "3 + rescale + mimic",
    "off",
    "2 + cfg_zero",
)


def tree(tree: dict[str, Tensor], images: list[int]) -> dict[str, Tensor]:
    return {name: leaf[images] for name, leaf in tree.items()}


def test_images_with_other_rules_share_a_batch_and_are_as_alone() -> None:
    guidances = [Guidance.parse(text) for text in MIXED]
    cond, uncond, x = told(len(MIXED), 1), told(len(MIXED), 2), noise(len(MIXED))
    plan = compile_plan("dpmpp_2m", steps=10)
    together = run(plan, GuidedDenoiser(Toy(), SCALED, "eps", cond, uncond, guidances), x)
    for i, guidance in enumerate(guidances):
        own = GuidedDenoiser(Toy(), SCALED, "eps", tree(cond, [i]), tree(uncond, [i]), guidance)
        assert torch.equal(together[i : i + 1], run(plan, own, x[i : i + 1])), MIXED[i]


def test_a_mixed_batch_pays_for_the_calls_of_each_image_alone() -> None:
    network, plan = Toy(), compile_plan("euler", steps=10)
    texts = ("7", "1", "7 + interval start=0.2 stop=0.7")
    mixed = GuidedDenoiser(network, SCALED, "eps", told(3, 1), told(3, 2), [Guidance.parse(t) for t in texts])
    run(plan, mixed, noise(3))
    assert [count for count, _ in network.calls] == [4, 4, 5, 5, 5, 5, 5, 4, 4, 4]


def test_parts_of_a_mixed_batch_have_every_image() -> None:
    seen = []
    guidances = [Guidance.parse("7 + rescale"), Guidance(1.0)]
    mixed = GuidedDenoiser(Toy(), SCALED, "eps", told(2, 1), told(2, 2), guidances)
    run(
        compile_plan("euler", steps=2),
        mixed,
        noise(2),
        observers=[lambda step: seen.append(dict(step.parts) | {"x0": step.x0})],
    )
    assert set(seen[0]) == {"cond", "uncond", "cfg", "rescale", "x0"}
    assert torch.equal(seen[0]["cond"][1], seen[0]["x0"][1])
    assert torch.equal(seen[0]["rescale"], seen[0]["x0"])
    assert not torch.equal(seen[0]["uncond"][0], seen[0]["cond"][0])
    assert torch.equal(seen[0]["uncond"][1], seen[0]["cond"][1])  # it made no unconditional call


class Texts(nn.Module):
    """Adds the mean of the tokens that are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int]] = []

    def forward(self, x: Tensor, time: Tensor, context: Tensor, *, context_mask: Tensor | None = None) -> Tensor:
        self.calls.append((len(x), context.shape[1]))
        mask = torch.ones(context.shape[:2]) if context_mask is None else context_mask.float()
        mean = (context * mask[:, :, None]).sum((1, 2)) / mask.sum(1)
        return x * 0.5 / (1.0 + x * x) + mean[:, None, None, None]


def text_entry(network: nn.Module, tokens: int, seed: int, guidance: str) -> Entry:
    generator = torch.Generator().manual_seed(seed)
    cond, uncond = ({"context": torch.randn(1, tokens, 8, generator=generator)} for _ in range(2))
    plan = compile_plan("dpmpp_2m", steps=6)
    own = GuidedDenoiser(network, SCALED, "eps", cond, uncond, Guidance.parse(guidance))
    return Entry([plan], own, noise(1, seed) * plan.initial_scale, Philox(seed))


def test_prompts_of_other_lengths_join_one_lane() -> None:
    network = Texts()
    asked = [(77, 1, "7"), (154, 2, "5 + rescale"), (77, 3, "1"), (231, 4, "guarded 9")]
    entries, batch = [text_entry(network, *one) for one in asked], Batch()
    for entry in entries:
        batch.join(entry)
    while batch.entries:
        batch.step()
    assert network.calls == [(7, 231)] * 6
    for one, entry in zip(asked, entries, strict=True):
        again = text_entry(network, *one)
        wanted = loop(again.plans, again.denoiser, again.x, again.noise, (), (), None)
        assert entry.error is None
        assert off(entry.result, wanted) < 1e-5  # sums over padded tokens round otherwise


def test_entries_of_other_networks_or_inputs_keep_lanes_of_their_own() -> None:
    first, other = text_entry(Texts(), 77, 1, "7"), text_entry(Texts(), 77, 2, "7")
    batch = Batch()
    for entry in (first, other):
        batch.join(entry)
    assert len(batch.lanes) == 2
