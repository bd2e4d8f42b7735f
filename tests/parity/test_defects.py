"""Where the peers fail their users, and that we do not: one test a defect, each shown on the peer first.

A numeric defect is reproduced by the diffusers dialect (a folder made with diffusers must give diffusers' image) and
absent from the exact one. The judges are the laws: a step lands on the level of the next call (marginal law), and
the weights integrate what they claim to integrate (order law).
"""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from itertools import pairwise
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from peers import in_float64, k_diffusion, network, our_run, peer_run, relative
from torch import Tensor

from pellucid import PellucidError, Plan, Scheduler, compile_plan, denoiser, run, samplers, schedules
from pellucid.core.dialect_diffusers import COUNTED
from pellucid.core.samplers.euler import MISSING
from pellucid.interop.kdiffusion import sample

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SCHEDULE = schedules.scaled_linear()
LAW = 1e-9  # what the marginal law allows for rounding


def landings(plan: Plan) -> list[float]:
    """How far each row of a deterministic plan lands off the level of the next call, from its own level exactly."""
    mu, noise = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    assert plan.depth == 0
    off = []
    for i, r in enumerate(plan.rows):
        x = r.level.alpha * mu + r.level.sigma * noise
        got = sum(w * {0: x, 2: mu}[register] for register, w in r.x)
        aim = plan.rows[i + 1].level if i + 1 < plan.nfe else plan.end
        off.append(float(np.abs(got - (aim.alpha * mu + aim.sigma * noise)).max()))
    return off


def peer_landings(class_name: str, config: dict[str, Any], steps: int) -> list[float]:
    """The same for a diffusers class on eps: one step at a time from the exact level, the last one left out."""
    alpha_bar = schedules.make(SCHEDULE).alpha_bar
    mu, noise = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.0, 1.0]]).double()
    off = []
    with in_float64(class_name, [torch.zeros(1, 2)] * steps, {"step": 0}):
        peer = getattr(diffusers, class_name)(**SD, **config)
        peer.set_timesteps(steps)
        for t, t_next in zip(peer.timesteps, peer.timesteps[1:], strict=False):
            bar, bar_next = alpha_bar[int(t)], alpha_bar[int(t_next)]
            x = bar**0.5 * mu + (1 - bar) ** 0.5 * noise
            got = peer.step(noise, t, x).prev_sample
            off.append(float((got - (bar_next**0.5 * mu + (1 - bar_next) ** 0.5 * noise)).abs().max()))
    return off


# --- levels and steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spacing", "steps", "wrong"), [("linspace", 10, 9), ("trailing", 13, 11)])
def test_ddim_previous_timestep_off_leading(spacing: str, steps: int, wrong: int) -> None:
    """scheduling_ddim.py `step` takes t − T // N for the previous timestep, whatever the spacing."""
    config = {"timestep_spacing": spacing, "clip_sample": False}
    off = peer_landings("DDIMScheduler", config, steps)
    assert len(off) == steps - 1
    assert sum(d > 1e-6 for d in off) == wrong
    exact = compile_plan("ddim", schedule=SCHEDULE, grid=spacing, steps=steps)
    assert max(landings(exact)) < 1e-14
    assert exact.deviation < LAW
    dialect = compile_plan("ddim", schedule=SCHEDULE, grid=spacing, steps=steps, dialect="diffusers")
    assert sum(d > 1e-6 for d in landings(dialect)[:-1]) == wrong
    assert dialect.deviation > 1e-3
    assert "previous timestep" in dialect.declared
    given = ("DDIMScheduler", {**SD, **config}, steps, {}, {})
    assert relative(our_run(*given)[0], peer_run(*given)[0]) < 1e-9


def test_ddim_on_leading_is_right_on_both_sides() -> None:
    """The control of the test above: where diffusers is right, the dialect has nothing to declare."""
    assert max(peer_landings("DDIMScheduler", {"clip_sample": False}, 10)) < 1e-12
    plan = compile_plan("ddim", schedule=SCHEDULE, grid="leading", steps=10, dialect="diffusers")
    assert not plan.declared
    assert plan.deviation < LAW


def test_1000_ddim_steps_with_an_offset() -> None:
    """scheduling_ddim.py: steps_offset=1 (Stable Diffusion's own config) and 1000 steps index past the table."""
    config = {**SD, "steps_offset": 1, "clip_sample": False}
    with pytest.raises(IndexError):
        peer_run("DDIMScheduler", config, 1000, {}, {})
    plan = compile_plan("ddim", schedule=SCHEDULE, grid="leading", steps=1000)
    x = run(plan, denoiser(network_batch, SCHEDULE), shape=(2, 3), seeds=0)
    assert plan.nfe == 1000
    assert x.isfinite().all()
    with pytest.raises(PellucidError, match=r"offset must be one that keeps 1000 steps below 1000; got 1"):
        Scheduler.from_config({"_class_name": "DDIMScheduler", **config}).set_timesteps(1000)


def network_batch(x: Tensor, time: Tensor) -> Tensor:
    return network(x, time[0])


def unshifted(sigmas: np.ndarray, shift: float) -> np.ndarray:
    return sigmas / (shift - (shift - 1.0) * sigmas)


@pytest.mark.parametrize("class_name", ["FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"])
def test_flow_shift_is_applied_twice_at_the_low_end(class_name: str) -> None:
    """scheduling_flow_match_*.py: sigma_min is shifted in `__init__`, and the grid down to it again afterwards."""
    shift, steps = 3.0, 10
    peer = getattr(diffusers, class_name)(shift=shift)
    peer.set_timesteps(steps)
    walked = unshifted(np.unique(peer.sigmas.double().numpy())[1:][::-1], shift)  # Heun lists each level twice
    assert walked[-1] == pytest.approx(shift * 1e-3 / (1 + (shift - 1) * 1e-3), rel=1e-4)  # 0.003: shifted once more
    sampler = {"FlowMatchEulerDiscreteScheduler": "flow_euler", "FlowMatchHeunDiscreteScheduler": "flow_heun"}[
        class_name
    ]
    made = {"schedule": schedules.flow(shift=shift), "target": "flow", "grid": "linspace", "steps": steps}
    exact = compile_plan(sampler, **made)
    ours = unshifted(np.unique([r.level.sigma for r in exact.rows])[::-1], shift)
    np.testing.assert_allclose(ours, np.linspace(1.0, 1e-3, steps), rtol=1e-12)
    dialect = compile_plan(sampler, **made, dialect="diffusers")
    np.testing.assert_allclose(
        np.unique([r.level.sigma for r in dialect.rows])[::-1],
        np.unique(peer.sigmas.double().numpy())[1:][::-1],
        rtol=1e-6,
    )


def test_eps_with_zero_terminal_snr() -> None:
    """scheduling_ddim.py divides by √ᾱ = 0 on the first step; an eps model has nothing to say there: we refuse."""
    config = {**SD, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "clip_sample": False}
    peer = diffusers.DDIMScheduler(**config)
    peer.set_timesteps(10)
    x = torch.ones(1, 1, 2, 2)
    assert not peer.step(0.5 * x, peer.timesteps[0], x).prev_sample.isfinite().all()
    ours = Scheduler.from_config({"_class_name": "DDIMScheduler", **config})
    with pytest.raises(PellucidError, match="target must be one that schedule scaled_linear carries") as caught:
        ours.set_timesteps(10)
    assert "pure noise" in str(caught.value)
    # with a v model both are finite and equal
    given = ("DDIMScheduler", {**config, "prediction_type": "v_prediction"}, 10, {}, {})
    ours_x, peer_x = our_run(*given)[0], peer_run(*given)[0]
    assert ours_x.isfinite().all()
    assert relative(ours_x, peer_x) < 1e-9


@pytest.mark.parametrize(
    ("class_name", "sampler"), [("DEISMultistepScheduler", "deis"), ("SASolverScheduler", "sa_solver")]
)
@pytest.mark.parametrize("key", ["use_karras_sigmas", "use_exponential_sigmas"])
def test_repeated_last_sigma_makes_a_null_last_step(class_name: str, sampler: str, key: str) -> None:
    """scheduling_deis_multistep.py and scheduling_sasolver.py `set_timesteps`: sigmas[-1] = sigmas[-2].

    The last call of the network is paid and changes nothing; the image keeps sigma_min of noise.
    """
    config = {**SD, key: True}
    peer = getattr(diffusers, class_name)(**config)
    peer.set_timesteps(8)
    assert peer.sigmas[-1] == peer.sigmas[-2]
    made = {"schedule": SCHEDULE, "grid": key.split("_")[1], "steps": 8}
    dialect = compile_plan(sampler, **made, dialect="diffusers")
    assert "repeated" in dialect.declared
    assert dialect.rows[-1].level == dialect.end
    if sampler == "deis":  # SA-Solver still corrects the step before
        assert dialect.rows[-1].x == ((0, 1.0),)
    given = (class_name, config, 8, {}, {})
    assert relative(our_run(*given)[0], peer_run(*given)[0]) < 1e-9
    exact = compile_plan(sampler, **made)
    levels = [r.level.ratio for r in exact.rows] + [exact.end.ratio]
    assert all(a > b for a, b in pairwise(levels))
    assert exact.end.sigma == 0.0
    assert dict(exact.rows[-1].x).get(2, 0.0) != 0.0  # the last call counts


@pytest.mark.parametrize(
    ("class_name", "sampler", "spacing"),
    [
        ("DDIMScheduler", "ddim", "leading"),
        ("DDIMScheduler", "ddim", "trailing"),
        ("DPMSolverMultistepScheduler", "dpmpp_2m", "linspace"),
        ("UniPCMultistepScheduler", "unipc", "leading"),
    ],
)
def test_initial_noise_is_one_and_not_the_sigma_of_the_level(class_name: str, sampler: str, spacing: str) -> None:
    """init_noise_sigma = 1.0 where the level at the first timestep has √(1 − ᾱ) = 0.998 and less."""
    peer = getattr(diffusers, class_name)(**SD, timestep_spacing=spacing)
    peer.set_timesteps(20)
    sigma = math.sqrt(1.0 - SCHEDULE.alpha_bar[int(peer.timesteps[0])])
    assert peer.init_noise_sigma == 1.0
    assert 1.0 - sigma > 1e-3
    dialect = compile_plan(sampler, schedule=SCHEDULE, grid=spacing, steps=20, dialect="diffusers")
    assert dialect.initial_scale == 1.0
    exact = compile_plan(sampler, schedule=SCHEDULE, grid=spacing, steps=20)
    assert exact.initial_scale == exact.start.sigma < 1.0


def test_euler_in_diffusers_starts_with_too_much_noise_on_leading() -> None:
    """scheduling_euler_discrete.py `init_noise_sigma`: √(σ² + 1) as if the latents' variance were 1 at σ."""
    peer = diffusers.EulerDiscreteScheduler(**SD, timestep_spacing="leading")
    peer.set_timesteps(20)
    sigma = float(peer.sigmas[0])
    assert float(peer.init_noise_sigma) == pytest.approx(math.hypot(sigma, 1.0), rel=1e-6)
    made = {"schedule": SCHEDULE, "grid": "leading", "steps": 20}
    assert compile_plan("euler", **made, dialect="diffusers").initial_scale == pytest.approx(math.hypot(sigma, 1.0))
    exact = compile_plan("euler", **made)
    assert exact.initial_scale == exact.start.sigma


def test_rounded_timesteps() -> None:
    """scheduling_dpmsolver_multistep.py rounds the times of Karras sigmas: the network is told another level."""
    peer = diffusers.DPMSolverMultistepScheduler(**SD, use_karras_sigmas=True)
    peer.set_timesteps(20)
    meant = SCHEDULE.time_at(peer.sigmas.double().numpy()[:-1])
    assert np.abs(peer.timesteps.numpy() - meant).max() > 0.3
    made = {"schedule": SCHEDULE, "grid": "karras", "steps": 20}
    exact, dialect = compile_plan("dpmpp_2m", **made), compile_plan("dpmpp_2m", **made, dialect="diffusers")
    for plan, told in (
        (exact, SCHEDULE.time_at([r.level.ratio for r in exact.rows])),
        (dialect, peer.timesteps.tolist()),
    ):
        np.testing.assert_allclose(plan.timesteps, told, atol=1e-9)
    # what it costs: the same table but for the told times, on a network that listens to them
    x = torch.ones(1, 2, 3, dtype=torch.float64)
    moved = relative(*(run(p, denoiser(network_batch, SCHEDULE), x) for p in (exact, dialect)))
    assert moved > 1e-5


def test_ddpm_fixed_large_with_trailing_adds_noise_to_the_image() -> None:
    """scheduling_ddpm.py `step` adds noise wherever t > 0; with trailing spacing the last t is not 0."""
    config = {**SD, "variance_type": "fixed_large", "timestep_spacing": "trailing", "clip_sample": False}
    steps = 10
    noises = [torch.ones(1, 2).double() * 3] * steps
    with in_float64("DDPMScheduler", noises, {"step": 0}):
        peer = diffusers.DDPMScheduler(**config)
        peer.set_timesteps(steps)
        last = peer.timesteps[-1]
        bar = SCHEDULE.alpha_bar[int(last)]
        clean = torch.tensor([[0.25, -0.5]]).double()
        x = bar**0.5 * clean + (1 - bar) ** 0.5 * 0.7
        got = peer.step(torch.full((1, 2), 0.7).double(), last, x).prev_sample
    assert int(last) == 99
    assert (got - clean).abs().max() == pytest.approx(3 * (1 - bar) ** 0.5, rel=1e-9)  # the true x0, and noise on it
    made = {"schedule": SCHEDULE, "grid": "trailing", "steps": steps, "variance": "large"}
    dialect, exact = compile_plan("ddpm", **made, dialect="diffusers"), compile_plan("ddpm", **made)
    assert dict(dialect.rows[-1].x)[7] == pytest.approx((1 - bar) ** 0.5, rel=1e-12)
    assert not exact.rows[-1].uses("z")
    given = ("DDPMScheduler", config, steps, {}, {})
    assert relative(our_run(*given)[0], peer_run(*given)[0]) < 1e-9


def test_ddpm_fixed_large_log_is_not_a_number() -> None:
    """scheduling_ddpm.py takes the root of log β for `fixed_large_log`: NaN. Ours is β, the same as fixed_large."""
    config = {**SD, "variance_type": "fixed_large_log", "clip_sample": False}
    given = ("DDPMScheduler", config, 5, {}, {})
    assert peer_run(*given)[0].isnan().all()
    ours = our_run(*given)[0]
    assert ours.isfinite().all()
    assert torch.equal(ours, our_run("DDPMScheduler", {**config, "variance_type": "fixed_large"}, 5, {}, {})[0])


# --- orders ----------------------------------------------------------------------------------------------------


def second_difference_weights(plan: Plan) -> list[tuple[float, float]]:
    """(step 2h, weight of D2 over alpha) of each third-order row, solved from the weight of the oldest prediction.

    D1 = a + (a − b)·r0 / (r0 + r1) and D2 = (a − b) / (r0 + r1), with a = (m0 − m1) / r0 and b = (m1 − m2) / r1: m2
    stands in both with 1 / (r1·(r0 + r1)).
    """
    found = []
    for i in range(2, plan.nfe - 1):
        lam = [plan.rows[i - k].level.lam for k in range(3)]
        there = plan.rows[i + 1].level
        h = there.lam - lam[0]
        r0, r1 = (lam[0] - lam[1]) / h, (lam[1] - lam[2]) / h
        on_m2 = dict(plan.rows[i].x).get(4)
        if on_m2 is not None:
            slope = math.expm1(-2 * h) / (2 * h) + 1.0
            found.append((2 * h, on_m2 / there.alpha * r1 * (r0 + r1) - slope * r0))
    return found


def quadratic_error(plan: Plan, rate: float) -> float:
    """How far the third-order rows are from rate·∫ e^{−rate·(λ_end − λ)}·x0(λ) dλ for an x0 that is quadratic in λ."""
    nodes, gauss = np.polynomial.legendre.leggauss(40)

    def x0(lam: Any) -> Any:
        return 0.3 - 0.8 * lam + 0.45 * lam**2

    worst = 0.0
    for i in range(2, plan.nfe - 1):
        here, there, weights = plan.rows[i].level, plan.rows[i + 1].level, dict(plan.rows[i].x)
        if 4 not in weights:
            continue
        half, middle = (there.lam - here.lam) / 2, (there.lam + here.lam) / 2
        at = half * nodes + middle
        exact = (rate * np.exp(-rate * (there.lam - at)) * x0(at) * gauss).sum() * half
        got = sum(weights[2 + k] * x0(plan.rows[i - k].level.lam) for k in range(3)) / there.alpha
        worst = max(worst, abs(got - exact))
    assert worst > 0.0
    return worst


def fall(rate: float, **made: Any) -> float:
    """By what the error of one step falls when the step is halved."""
    plans = (
        compile_plan("dpm_multistep", schedule=SCHEDULE, grid="exponential", steps=n + 1, **made) for n in (80, 160)
    )
    coarse, fine = (quadratic_error(p, rate) for p in plans)
    return coarse / fine


def test_third_order_sde_solver_has_a_wrong_sign() -> None:
    """scheduling_dpmsolver_multistep.py `multistep_dpm_solver_third_order_update`, algorithm sde-dpmsolver++.

    The weight of D2 = f″ / 2 is written (1 − e^{−2h} − 2h) / (2h)² − ½. With + ½ it would vanish with the step, as
    k-diffusion's does; diffusers' goes to −1, and its third order is first order. (And both are half of what f″ asks
    for: the next test.)
    """
    options = {"order": 3, "algorithm": "sde-dpmsolver++"}
    made = {"schedule": SCHEDULE, "grid": "exponential", "steps": 20}
    for extra, weight_of in (
        ({}, lambda phi: 2 * phi),
        ({"curvature_scale": 0.5}, lambda phi: phi),
        ({"curvature_scale": 0.5, "curvature_sign": -1.0}, lambda phi: phi - 1),
        ({"dialect": "diffusers"}, lambda phi: phi - 1),
    ):
        plan = compile_plan("dpm_multistep", **made, **options, **extra)
        rows = second_difference_weights(plan)
        assert len(rows) >= 16
        for rate, weight in rows:
            phi = (1 - math.exp(-rate) - rate) / rate**2 + 0.5
            assert weight == pytest.approx(weight_of(phi), abs=1e-9)
        assert plan.deviation < LAW  # the marginal law cannot see it: the differences of a constant are 0
    # the order law can: an error of one step that falls fourfold makes a first-order method
    assert fall(2.0, **options, curvature_scale=0.5, curvature_sign=-1.0) == pytest.approx(4.0, rel=0.1)
    assert fall(2.0, **options, curvature_scale=0.5) == pytest.approx(8.0, rel=0.1)
    # the dialect is what diffusers computes
    config = {**SD, "solver_order": 3, "algorithm_type": "sde-dpmsolver++", "use_exponential_sigmas": True}
    given = ("DPMSolverMultistepScheduler", config, 20, {}, {})
    assert relative(our_run(*given)[0], peer_run(*given)[0]) < 1e-9


@pytest.mark.parametrize(("algorithm", "rate"), [("dpmsolver++", 1.0), ("sde-dpmsolver++", 2.0)])
def test_third_order_multistep_takes_half_of_the_second_derivative(algorithm: str, rate: float) -> None:
    """The same function, and k_diffusion/sampling.py `sample_dpmpp_3m_sde`: D2 is a divided difference, f″ / 2, with
    the weight of f″. The error of one step is h³, so that their third order is second order; ours integrates a
    quadratic exactly."""
    options = {"order": 3, "algorithm": algorithm}
    exact = compile_plan("dpm_multistep", schedule=SCHEDULE, grid="exponential", steps=20, **options)
    assert quadratic_error(exact, rate) < 1e-12
    assert fall(rate, **options, curvature_scale=0.5) == pytest.approx(8.0, rel=0.1)
    if algorithm == "dpmsolver++":
        dialect = compile_plan(
            "dpm_multistep", schedule=SCHEDULE, grid="exponential", steps=20, **options, dialect="diffusers"
        )
        assert quadratic_error(dialect, rate) > 1e-3
        config = {**SD, "solver_order": 3, "use_exponential_sigmas": True}
        given = ("DPMSolverMultistepScheduler", config, 20, {}, {})
        assert relative(our_run(*given)[0], peer_run(*given)[0]) < 1e-9
    else:
        k_dialect = compile_plan("dpmpp_3m_sde", schedule=SCHEDULE, grid="exponential", steps=20, dialect="k-diffusion")
        ours = compile_plan("dpmpp_3m_sde", schedule=SCHEDULE, grid="exponential", steps=20)
        assert quadratic_error(k_dialect, rate) > 1e-3 > 1e9 * quadratic_error(ours, rate)


@pytest.mark.filterwarnings("ignore:.*dpmsolver.*deprecated:FutureWarning")
@pytest.mark.parametrize("algorithm", ["dpmsolver++", "dpmsolver", "sde-dpmsolver++"])
@pytest.mark.parametrize("steps", [2, 5, 8, 11, 14, 20])
def test_order_3_singlestep_at_3n_minus_1_steps(steps: int, algorithm: str) -> None:
    """NaN in older diffusers (scheduling_dpmsolver_singlestep.py `get_order_list`: a second-order group that ended at
    sigma 0). 0.42.1 ends such runs with a first-order step, as ours always did: finite, and no group reaches 0."""
    final = "sigma_min" if algorithm == "dpmsolver" else "zero"
    config = {**SD, "solver_order": 3, "algorithm_type": algorithm, "final_sigmas_type": final}
    given = ("DPMSolverSinglestepScheduler", {**config, "lower_order_final": True}, steps, {}, {})
    ours, peer = our_run(*given)[0], peer_run(*given)[0]
    assert ours.isfinite().all()
    assert relative(ours, peer) < 1e-9
    exact = compile_plan("dpm_singlestep", schedule=SCHEDULE, steps=steps, order=3, algorithm=algorithm)
    x = run(exact, denoiser(network_batch, SCHEDULE), shape=(2, 3))
    assert x.isfinite().all()
    assert exact.nfe == steps


@pytest.mark.parametrize(
    ("config", "flow"),
    [
        ({"solver_type": "bh1"}, False),
        ({"solver_type": "bh1", "solver_order": 3}, False),
        ({"lower_order_final": False}, False),
        ({"lower_order_final": False, "use_flow_sigmas": True, "prediction_type": "flow_prediction"}, True),
    ],
    ids=str,
)
def test_unipc_is_not_finite_at_a_clean_end(config: dict[str, Any], flow: bool) -> None:
    """scheduling_unipc_multistep.py: the last step to sigma 0 has h = ∞, and B(h) = h of bh1 turns it into NaN; so
    does bh2 when lower_order_final does not make that step first order. Both are options, and sigma 0 the default.
    """
    made = {**({} if flow else SD), **config}
    peer = diffusers.UniPCMultistepScheduler(**made)
    peer.set_timesteps(8)
    x = torch.ones(1, 1, 2, 2)
    crashed = False
    try:
        for t in peer.timesteps:
            x = peer.step(network(x, t), t, x).prev_sample
    except RuntimeError:  # torch.linalg.solve of a matrix that is not finite
        crashed = True
    assert crashed or not x.isfinite().all()
    ours = our_run("UniPCMultistepScheduler", made, 8, {}, {})[0]
    assert ours.isfinite().all()
    if not flow:  # where diffusers is finite, the two agree
        given = ("UniPCMultistepScheduler", {**made, "final_sigmas_type": "sigma_min"}, 8, {}, {})
        assert relative(our_run(*given)[0], peer_run(*given)[0]) < 1e-9


def test_k_diffusion_sde_samplers_crash_with_one_step() -> None:
    """k_diffusion/sampling.py: `h_last = h` before h exists."""
    sigmas, x = torch.tensor([5.0, 0.0]), torch.ones(1, 2, 2)
    for theirs, ours in (("sample_dpmpp_2m_sde", "dpmpp_2m_sde"), ("sample_dpmpp_3m_sde", "dpmpp_3m_sde")):
        with pytest.raises(UnboundLocalError):
            getattr(k_diffusion(), theirs)(lambda x, s: x / 2, x, sigmas, disable=True, noise_sampler=lambda a, b: 0)
        assert torch.equal(sample(ours, lambda x, s: x / 2, x, sigmas), x / 2)


# --- calls and state -------------------------------------------------------------------------------------------


def test_the_same_seed_at_another_batch_size() -> None:
    """diffusers draws a batch's noise from one generator: the first image of two is not the image alone."""

    def peer(batch: int) -> Tensor:
        made = diffusers.EulerAncestralDiscreteScheduler(**SD)
        made.set_timesteps(5)
        generator = torch.Generator().manual_seed(7)
        x = torch.randn((batch, 2, 8, 8), generator=generator) * made.init_noise_sigma
        for t in made.timesteps:
            x = made.step(network(made.scale_model_input(x, t), t), t, x, generator=generator).prev_sample
        return x

    assert relative(peer(2)[:1], peer(1)) > 0.1
    plan = compile_plan("euler_a", schedule=SCHEDULE, grid="linspace", steps=5)
    model = denoiser(network_batch, SCHEDULE)
    alone = run(plan, model, shape=(2, 8, 8), seeds=7)
    for seeds in ([7, 8], [9, 7], [1, 2, 7, 3]):
        batch = run(plan, model, shape=(2, 8, 8), seeds=seeds)
        assert torch.equal(batch[seeds.index(7)], alone[0]), seeds


def in_lockstep(scheduler: Any, counts: tuple[int, int]) -> list[Any]:
    """Two requests on one scheduler object, in two threads that take turns; each result, or its exception."""
    turns = threading.Barrier(2)
    results: list[Any] = [None, None]

    def pause() -> None:
        with suppress(threading.BrokenBarrierError):  # the other one has finished
            turns.wait(10)

    def request(which: int, count: int) -> None:
        try:
            scheduler.set_timesteps(count)
            pause()
            x = torch.full((1, 2, 2, 2), 1.0 + which)
            for t in scheduler.timesteps:
                x = scheduler.step(network(scheduler.scale_model_input(x, t), t), t, x, return_dict=False)[0]
                pause()
            results[which] = x
        except Exception as error:
            results[which] = error
        finally:
            turns.abort()

    threads = [threading.Thread(target=request, args=(i, n)) for i, n in enumerate(counts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def alone(scheduler: Any, which: int, count: int) -> Tensor:
    scheduler.set_timesteps(count)
    x = torch.full((1, 2, 2, 2), 1.0 + which)
    for t in scheduler.timesteps:
        x = scheduler.step(network(scheduler.scale_model_input(x, t), t), t, x, return_dict=False)[0]
    return x


@pytest.mark.parametrize(
    "class_name", ["EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler", "PNDMScheduler"]
)
def test_concurrent_calls_on_one_scheduler(class_name: str) -> None:
    """diffusers keeps the step and the history on the object: two requests at once crash or give wrong images."""
    config = {**SD, **({"skip_prk_steps": True} if class_name == "PNDMScheduler" else {})}
    peer = getattr(diffusers, class_name)(**config)
    right = [alone(peer, i, n) for i, n in enumerate((7, 4))]
    broken = in_lockstep(peer, (7, 4))
    assert any(isinstance(r, Exception) or relative(r, w) > 1e-3 for r, w in zip(broken, right, strict=True))
    ours = Scheduler.from_config({"_class_name": class_name, **config})
    expected = [alone(ours, i, n) for i, n in enumerate((7, 4))]
    for got, want, theirs in zip(in_lockstep(ours, (7, 4)), expected, right, strict=True):
        assert isinstance(got, Tensor), got
        assert torch.equal(got, want)
        assert relative(got, theirs) < 1e-5  # and it is diffusers' image: float32 on both sides


def late_error(scheduler: Any, begin: int, start: tuple[float, float]) -> float:
    """A run that begins late, as image-to-image does, on x = alpha·point + sigma·noise, with the true noise for eps.

    Any solver that follows the levels ends at the point.
    """
    point, noise = torch.full((1, 2), 0.25).double(), torch.tensor([[0.7, -1.1]]).double()
    times = scheduler.timesteps[begin:]
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(begin)
    x = start[0] * point + start[1] * noise
    for t in times:
        scheduler.scale_model_input(x, t)
        x = scheduler.step(noise, t, x).prev_sample
    return float((x - point).abs().max())


@pytest.mark.parametrize("strength", [0.3, 0.6, 0.9])
def test_img2img_strength_with_plms_is_off_by_one(strength: float) -> None:
    """pipeline_stable_diffusion_img2img.py `get_timesteps` slices by steps, but PNDM lists one call more than steps.

    Strength 0.6 of 50 steps keeps 30: the slice has 31 calls and starts one step further up the noise. And
    scheduling_pndm.py does its first leg twice without the repeated timestep that it counts on, so that from the third
    call on x is a whole step noisier than the network is told. The dialect does the same; the exact table does not.
    """
    steps = 50
    keep = int(steps * strength)
    config = {**SD, "skip_prk_steps": True, "set_alpha_to_one": True}
    with in_float64("PNDMScheduler", [], {"step": 0}):
        peer = diffusers.PNDMScheduler(**config)
        peer.set_timesteps(steps)
        assert len(peer.timesteps[steps - keep :]) == keep + 1
        level = SCHEDULE.level(float(peer.timesteps[steps - keep]))
        theirs = late_error(peer, steps - keep, (level.alpha, level.sigma))
        assert theirs > 0.01
    as_class = Scheduler.from_config({"_class_name": "PNDMScheduler", **config})
    as_class.set_timesteps(steps)
    assert torch.equal(as_class.timesteps, peer.timesteps)
    assert late_error(as_class, steps - keep, (level.alpha, level.sigma)) == pytest.approx(theirs, rel=1e-5)
    assert as_class.plan.declared == COUNTED
    exact = Scheduler("plms", schedule=SCHEDULE, grid="leading")
    exact.set_timesteps(steps)
    first = exact.plan.rows[steps - keep].level
    assert late_error(exact, steps - keep, (first.alpha, first.sigma)) < 1e-9
    assert exact.plan.deviation < LAW
    # without a pipeline in between, strength means the level that it names
    made = {"schedule": SCHEDULE, "grid": "leading", "steps": steps, "skip": steps - keep}
    assert compile_plan("plms", **made).start == compile_plan("ddim", **made).start


@pytest.mark.parametrize("begin", [1, 4, 9])
def test_lms_that_begins_late_uses_weights_of_a_history_it_has_not(begin: int) -> None:
    """scheduling_lms_discrete.py `step` takes the order from the step's index, not from the slopes that it has.

    In image-to-image the first steps drop all but one of four weights; the sum is no longer the step. The dialect does
    the same; the exact table begins with order 1.
    """
    with in_float64("LMSDiscreteScheduler", [], {"step": 0}):
        peer = diffusers.LMSDiscreteScheduler(**SD)
        peer.set_timesteps(12)
        start = (1.0, float(peer.sigmas[begin]))
        theirs = late_error(peer, begin, start)
        assert theirs > 0.1
    as_class = Scheduler.from_config({"_class_name": "LMSDiscreteScheduler", **SD})
    as_class.set_timesteps(12)
    assert late_error(as_class, begin, start) == pytest.approx(theirs, rel=1e-5)
    assert as_class.plan.declared == MISSING
    exact = Scheduler("lms", schedule=SCHEDULE)
    exact.set_timesteps(12)
    assert late_error(exact, begin, (1.0, exact.plan.rows[begin].level.sigma)) < 1e-9


NUDGE = 1e-6  # of the start: ten times what float32 rounds


@pytest.mark.parametrize("begin", range(1, 10))
def test_pndm_with_runge_kutta_that_begins_late(begin: int) -> None:
    """scheduling_pndm.py `step_prk` takes its first levels from the top of the run, wherever the run begins.

    Three times x is carried from there to where the network is told, so that rounding grows up to 1e7 times. In float64
    the two agree; in float32, where a pipeline runs, no two programs do: a nudge of diffusers' own start says how far.
    """
    config = {"_class_name": "PNDMScheduler", **SD}
    with in_float64("PNDMScheduler", [], {"step": 0}):
        want, moved = (late_run(diffusers.PNDMScheduler(**SD), begin, k) for k in (1.0, 1.0 + NUDGE))
    got = late_run(Scheduler.from_config(config), begin, 1.0)
    assert relative(got, want) < max(1e-9, 1e-5 * relative(moved, want))


def late_run(scheduler: Any, begin: int, scale: float) -> Tensor:
    scheduler.set_timesteps(10)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(begin)
    x = torch.linspace(-1.0, 1.0, 8, dtype=torch.float64).reshape(1, 2, 2, 2) * scale
    for t in scheduler.timesteps[begin:]:
        x = scheduler.step(network(x, t), t, x).prev_sample
    return x


def test_which_class_is_dpmpp_2m_karras() -> None:
    """In diffusers the name is a class and a flag to be known; here the name that people use is a name."""
    entry, grid = samplers.resolve("DPM++ 2M Karras")
    assert (entry.name, grid) == ("dpmpp_2m", "karras")
    exported = Scheduler("DPM++ 2M Karras").export()
    assert exported["_class_name"] == "DPMSolverMultistepScheduler"
    assert exported["use_karras_sigmas"] is True
