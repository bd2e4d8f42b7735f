"""The three-call API: the same plan as pellucid.run, the same numbers as diffusers' classes, and clear errors."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor

from pellucid import Clip, Grid, PellucidError, Scheduler, compile_plan, denoiser, run, samplers, schedules
from pellucid.core.plan import Draw, Row, Span

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def network(x: Tensor, time: Any) -> Tensor:
    t = float(time[0]) if isinstance(time, Tensor) and time.ndim else float(time)
    return 0.6 * torch.sin(1.3 * x + 0.002 * t) + 0.3 * x


def start(scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn((2, 3, 4), generator=torch.Generator().manual_seed(3), dtype=torch.float64) * scale).to(dtype)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


class ByAddress:
    """Noise from the address of a row alone, for run and for the three calls."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    def first(self, shape: Sequence[int], like: Tensor, images: Sequence[int]) -> Tensor:
        raise AssertionError("x is given")

    def step(self, draws: Sequence[Draw], span: Span, like: Tensor, images: Sequence[int]) -> Tensor:
        return self.of(draws)

    def of(self, draws: Sequence[Draw]) -> Tensor:
        seed = hash(tuple((d.interval, d.visit) for d in draws)) % 2**31
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def walk(scheduler: Scheduler, x: Tensor, **step_kwargs: Any) -> Tensor:
    """What a pipeline does."""
    noise = ByAddress(x.shape)
    rows: tuple[Row, ...] = scheduler.plan.rows
    for r, t in zip(rows, scheduler.timesteps, strict=True):
        shown = scheduler.scale_model_input(x, t)
        given = {**step_kwargs, "variance_noise": noise.of(r.draws) if r.draws else None}
        x = scheduler.step(network(shown, r.time), t, x, return_dict=False, **given)[0]
    return x


# --- the same plan as run --------------------------------------------------------------------------------------

FLOW = {"schedule": "flow", "target": "flow"}
SETUPS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in samplers.names() if not name.startswith("flow")),
    ("flow_euler", FLOW),
    ("flow_heun", FLOW),
    ("flow_euler", {**FLOW, "stochastic": True}),
    *((name, {"target": "v"}) for name in ("ddim", "euler", "heun", "dpmpp_2m", "unipc", "deis", "pndm", "lms")),
    *((name, {"schedule": "edm", "target": "edm"}) for name in ("euler", "heun", "dpmpp_2m", "dpmpp_2s_a")),
    *((name, FLOW) for name in ("euler", "dpmpp_2m", "unipc", "euler_a", "er_sde")),
    ("ddim", {"eta": 0.7}),
    ("ddim", {"x0_filter": Clip(1.5)}),
    ("dpmpp_2m", {"target": "x0", "x0_filter": Clip(0.5)}),
    ("dpmpp_2m", {"grid": "karras", "dialect": "diffusers"}),
    ("unipc", {"order": 3, "grid": "linspace", "dialect": "diffusers"}),
]
UNFIT = {"edm_stochastic": "churn", "euler_cfgpp": "guided", "dpmpp_2m_cfgpp": "guided"}


@pytest.mark.parametrize(
    ("name", "setup"), SETUPS, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values()))
)
def test_three_calls_equal_run(name: str, setup: dict[str, Any]) -> None:
    x0_filter = setup.get("x0_filter")
    made = {"schedule": "scaled_linear", "target": "eps", **{k: v for k, v in setup.items() if k != "x0_filter"}}
    if name in UNFIT:
        with pytest.raises(PellucidError) as caught:
            Scheduler(name, **made)
        assert caught.value.code == UNFIT[name]
        assert "pellucid.run" in str(caught.value)
        return
    scheduler = Scheduler(name, **made, x0_filter=x0_filter)
    scheduler.set_timesteps(7)
    plan = scheduler.plan
    assert plan == compile_plan(name, steps=7, **{"grid": scheduler.reading.grid, **made})
    x = start(scheduler.init_noise_sigma)
    model = denoiser(network, made["schedule"], made["target"], x0_filter)
    want = run(plan, model, x, noise=ByAddress(x.shape))
    got = walk(scheduler, x)
    assert scheduler.step_index == plan.nfe
    assert apart(got, want) < 1e-11
    assert apart(walk_again(scheduler, x * 1.5), want) > 1e-3


def walk_again(scheduler: Scheduler, x: Tensor) -> Tensor:
    """set_timesteps begins a new run: nothing of the last one is left."""
    scheduler.set_timesteps(7)
    return walk(scheduler, x)


def test_every_sampler_is_tried() -> None:
    assert {name for name, _ in SETUPS} == set(samplers.names())


def test_set_timesteps_resets_the_history() -> None:
    for name in ("dpmpp_3m", "unipc", "lms", "pndm", "heun", "sa_solver"):
        scheduler = Scheduler(name)
        scheduler.set_timesteps(6)
        first = walk(scheduler, start())
        scheduler.set_timesteps(6)
        for t in scheduler.timesteps[:3]:  # a run that is given up in the middle
            scheduler.step(start(), t, start(), variance_noise=start())
        scheduler.set_timesteps(6)
        assert torch.equal(walk(scheduler, start()), first), name


# --- what diffusers' classes say -------------------------------------------------------------------------------

CLASSES: list[tuple[str, dict[str, Any]]] = [
    ("DDIMScheduler", SD),
    ("DDIMScheduler", {**SD, "timestep_spacing": "trailing"}),
    ("DDPMScheduler", SD),
    ("PNDMScheduler", {**SD, "skip_prk_steps": True}),
    ("PNDMScheduler", SD),
    ("EulerDiscreteScheduler", SD),
    ("EulerDiscreteScheduler", {**SD, "timestep_spacing": "leading", "steps_offset": 1}),
    ("EulerDiscreteScheduler", {**SD, "use_karras_sigmas": True, "final_sigmas_type": "sigma_min"}),
    ("EulerAncestralDiscreteScheduler", SD),
    ("HeunDiscreteScheduler", SD),
    ("LMSDiscreteScheduler", {**SD, "use_exponential_sigmas": True}),
    ("KDPM2DiscreteScheduler", SD),
    ("KDPM2AncestralDiscreteScheduler", SD),
    ("DPMSolverMultistepScheduler", {**SD, "use_karras_sigmas": True}),
    ("DPMSolverMultistepScheduler", {**SD, "use_lu_lambdas": True}),
    ("DPMSolverSinglestepScheduler", SD),
    ("UniPCMultistepScheduler", {**SD, "use_beta_sigmas": True}),
    ("UniPCMultistepScheduler", {"use_flow_sigmas": True, "flow_shift": 3.0, "prediction_type": "flow_prediction"}),
    ("DEISMultistepScheduler", SD),
    ("SASolverScheduler", SD),
    ("LCMScheduler", SD),
    ("TCDScheduler", SD),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    ("FlowMatchHeunDiscreteScheduler", {"shift": 3.0}),
    ("EDMEulerScheduler", {}),
    ("EDMDPMSolverMultistepScheduler", {}),
]
MIDDLE = ("KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler")  # keeps the middle sigmas in another list


def both(class_name: str, config: dict[str, Any]) -> tuple[Any, Scheduler]:
    peer = getattr(diffusers, class_name)(**config)
    return peer, Scheduler.from_config(peer)


def label(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(str(v) for k, v in value.items() if k not in SD)


@pytest.mark.parametrize(("class_name", "config"), CLASSES, ids=label)
def test_timesteps_sigmas_scale_order_and_length(class_name: str, config: dict[str, Any]) -> None:
    peer, ours = both(class_name, config)
    for steps in (7, 12):
        peer.set_timesteps(steps)
        ours.set_timesteps(steps)
        assert ours.timesteps.dtype == peer.timesteps.dtype
        assert ours.timesteps.shape == peer.timesteps.shape
        torch.testing.assert_close(ours.timesteps, peer.timesteps, rtol=1e-6, atol=2e-3)  # float32 of times to 1000
        assert ours.num_inference_steps == steps
        if hasattr(peer, "sigmas") and class_name not in MIDDLE:
            kept = peer.sigmas[: len(ours.sigmas)]  # two-call classes pad their list
            # diffusers multiplies a thousand alphas in float32
            torch.testing.assert_close(ours.sigmas, kept.float(), rtol=2e-5, atol=1e-6)
    if hasattr(peer, "init_noise_sigma"):
        assert float(ours.init_noise_sigma) == pytest.approx(float(peer.init_noise_sigma), rel=1e-6)
    assert ours.order == peer.order
    assert len(ours) == len(peer) == 1000


@pytest.mark.parametrize(("class_name", "config"), CLASSES, ids=label)
def test_scale_model_input_along_a_run(class_name: str, config: dict[str, Any]) -> None:
    peer, ours = both(class_name, {**config, **({"clip_sample": False} if class_name.startswith("DD") else {})})
    if not hasattr(peer, "scale_model_input"):
        return
    peer.set_timesteps(6)
    ours.set_timesteps(6)
    x = start(3.0, torch.float32)
    for t, t_ours in zip(peer.timesteps, ours.timesteps, strict=True):
        shown = peer.scale_model_input(x, t)
        torch.testing.assert_close(ours.scale_model_input(x, t_ours), shown, rtol=1e-5, atol=1e-6)
        peer.step(x, t, x)
        ours.step(x, t_ours, x, variance_noise=x)


NOISES = [c for c in CLASSES if c[0] not in ("FlowMatchHeunDiscreteScheduler",)]


@pytest.mark.parametrize(("class_name", "config"), NOISES, ids=label)
def test_add_noise_equals_diffusers(class_name: str, config: dict[str, Any]) -> None:
    """In each frame: vp (DDIM, solvers), ve (Euler and the like), flow; before a run too, as training uses it."""
    peer, ours = both(class_name, config)
    image, noise = start(dtype=torch.float32), start(dtype=torch.float32).flip(0)
    flow = class_name.startswith("FlowMatch")
    if hasattr(peer, "alphas_cumprod") and not config.get("use_flow_sigmas"):
        times = torch.tensor([10, 700])
        sigma = ((1 - peer.alphas_cumprod[times].double()) / peer.alphas_cumprod[times].double()).sqrt().view(-1, 1, 1)
        scale = 1.0 if peer_frame(peer) == "ve" else 1 / (1 + sigma**2).sqrt()
        torch.testing.assert_close(ours.add_noise(image, noise, times), (scale * (image + sigma * noise)).float())
    peer.set_timesteps(6)
    ours.set_timesteps(6)
    # at a middle call, diffusers' two-call classes give the sigma of the step's end to the time of its middle
    where = torch.tensor([0, 4] if class_name in MIDDLE else [1, 4])
    add = (
        (lambda s, i: s.scale_noise(image, s.timesteps[i], noise))
        if flow
        else (lambda s, i: s.add_noise(image, noise, s.timesteps[i]))
    )
    torch.testing.assert_close(add(ours, where), add(peer, where), rtol=2e-5, atol=2e-5)


def peer_frame(peer: Any) -> str:
    return "ve" if float(getattr(peer, "init_noise_sigma", 1.0)) > 1.5 else "vp"


def test_add_noise_before_a_run_equals_diffusers_where_diffusers_can() -> None:
    """Training use: whole times, no set_timesteps."""
    image, noise, times = start(dtype=torch.float32), start(dtype=torch.float32).flip(0), torch.tensor([999, 3])
    for class_name in (
        "DDPMScheduler",
        "DDIMScheduler",
        "PNDMScheduler",
        "LCMScheduler",
        "EulerDiscreteScheduler",
        "LMSDiscreteScheduler",
        "EulerAncestralDiscreteScheduler",
    ):
        peer, ours = both(class_name, SD)
        given = times if class_name in ("LCMScheduler", "PNDMScheduler") else times.to(peer.timesteps.dtype)
        want = peer.add_noise(image, noise, given)
        torch.testing.assert_close(ours.add_noise(image, noise, times), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "class_name",
    [
        "DPMSolverMultistepScheduler",
        "DPMSolverSinglestepScheduler",
        "UniPCMultistepScheduler",
        "DEISMultistepScheduler",
    ],
)
def test_add_noise_of_solvers_before_a_run(class_name: str) -> None:
    """docs/refused.md: diffusers reads its table from the wrong end there; ours is the noise of the time."""
    peer, ours = both(class_name, SD)
    image, noise, times = start(dtype=torch.float32), start(dtype=torch.float32).flip(0), torch.tensor([990, 3])
    want = diffusers.DDIMScheduler(**SD).add_noise(image, noise, times)
    torch.testing.assert_close(ours.add_noise(image, noise, times), want, rtol=2e-5, atol=2e-5)
    turned = peer.add_noise(image, noise, 999 - times.to(peer.timesteps.dtype))
    torch.testing.assert_close(turned, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("class_name", ["DDIMScheduler", "DDPMScheduler"])
def test_get_velocity_equals_diffusers(class_name: str) -> None:
    peer, ours = both(class_name, SD)
    image, noise, times = start(dtype=torch.float32), start(dtype=torch.float32).flip(0), torch.tensor([0, 990])
    torch.testing.assert_close(ours.get_velocity(image, noise, times), peer.get_velocity(image, noise, times))


@pytest.mark.parametrize(
    ("class_name", "config"),
    [
        ("DDIMScheduler", {**SD, "clip_sample": False}),
        ("DDIMScheduler", {**SD, "clip_sample": True}),
        ("DDIMScheduler", {**SD, "prediction_type": "v_prediction", "clip_sample": False}),
        ("DDPMScheduler", {**SD, "prediction_type": "sample", "clip_sample": False}),
        ("EulerDiscreteScheduler", SD),
        ("EulerDiscreteScheduler", {**SD, "prediction_type": "v_prediction"}),
        ("EulerAncestralDiscreteScheduler", SD),
        ("LMSDiscreteScheduler", SD),
        ("HeunDiscreteScheduler", SD),
        ("EDMEulerScheduler", {}),
    ],
    ids=label,
)
def test_pred_original_sample_equals_diffusers(class_name: str, config: dict[str, Any]) -> None:
    peer, ours = both(class_name, config)
    peer.set_timesteps(5)
    ours.set_timesteps(5)
    x = start(2.0, torch.float32)
    for t, t_ours in zip(peer.timesteps, ours.timesteps, strict=True):
        out = network(peer.scale_model_input(x, t), t).float()
        theirs = (
            peer.step(out, t, x, generator=torch.Generator().manual_seed(0))
            if "generator" in peer.step.__code__.co_varnames
            else peer.step(out, t, x)
        )
        mine = ours.step(out, t_ours, x, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(mine.pred_original_sample, theirs.pred_original_sample, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(mine.prev_sample, theirs.prev_sample, rtol=1e-4, atol=1e-4)
        assert mine["prev_sample"] is mine.prev_sample is mine[0]
        x = theirs.prev_sample


def test_return_dict() -> None:
    scheduler = Scheduler("euler")
    for wanted, kind in ((True, "StepOutput"), (False, "tuple")):
        scheduler.set_timesteps(3)
        got = scheduler.step(start(), scheduler.timesteps[0], start(), return_dict=wanted)
        assert type(got).__name__ == kind
        assert got[0].shape == start().shape


def test_lcm_gives_its_clean_answer_too() -> None:
    """LCM's pipelines unpack (sample, denoised)."""
    peer, ours = both("LCMScheduler", SD)
    peer.set_timesteps(3)
    ours.set_timesteps(3)
    x = start(1.0, torch.float32)
    for t in peer.timesteps:
        out = network(x, t).float()
        theirs = peer.step(out, t, x, generator=torch.Generator().manual_seed(0), return_dict=False)
        mine = ours.step(out, t, x, generator=torch.Generator().manual_seed(0), return_dict=False)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        x = theirs[0]


@pytest.mark.parametrize("class_name", ["LCMScheduler", "TCDScheduler"])
@pytest.mark.parametrize(
    "setting",
    [{}, {"original_inference_steps": 40}, {"strength": 0.5}, {"original_inference_steps": 100, "strength": 0.33}],
    ids=str,
)
def test_distilled_times_and_strength(class_name: str, setting: dict[str, Any]) -> None:
    peer, ours = both(class_name, SD)
    for steps in (1, 4, 7):
        peer.set_timesteps(steps, **setting)
        ours.set_timesteps(steps, **setting)
        assert ours.timesteps.tolist() == peer.timesteps.tolist()


def test_strength_is_for_distilled_samplers() -> None:
    with pytest.raises(PellucidError, match=r"strength must be left out for euler; got 0\.5"):
        Scheduler("euler").set_timesteps(5, strength=0.5)
    with pytest.raises(PellucidError, match="from 1 to 5, the times that are left; got 8"):
        Scheduler("lcm").set_timesteps(8, strength=0.1)


# --- explicit times and sigmas ---------------------------------------------------------------------------------

EXPLICIT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("EulerDiscreteScheduler", SD, {"timesteps": [900, 555, 201, 20]}),
    ("EulerDiscreteScheduler", SD, {"sigmas": [12.0, 5.0, 1.5, 0.3, 0.0]}),
    ("EulerDiscreteScheduler", {**SD, "timestep_spacing": "leading"}, {"timesteps": [950, 400, 50]}),
    ("HeunDiscreteScheduler", SD, {"timesteps": [900, 555, 201, 20]}),
    ("DPMSolverMultistepScheduler", SD, {"timesteps": [900, 555, 201, 20]}),
    ("DPMSolverMultistepScheduler", {**SD, "solver_order": 3}, {"timesteps": [999, 777, 555, 333, 111, 5]}),
    ("DPMSolverSinglestepScheduler", SD, {"timesteps": [900, 555, 201, 20]}),
    ("DDPMScheduler", {**SD, "clip_sample": False}, {"timesteps": [900, 555, 201, 20]}),
    ("LCMScheduler", SD, {"timesteps": [999, 499]}),
    ("FlowMatchEulerDiscreteScheduler", {}, {"sigmas": [1.0, 0.7, 0.4, 0.1]}),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}, {"sigmas": [1.0, 0.7, 0.4, 0.1]}),
    ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}, {"sigmas": [1.0, 0.7, 0.4, 0.1], "mu": 0.8}),
    (
        "FlowMatchEulerDiscreteScheduler",
        {"use_dynamic_shifting": True, "time_shift_type": "linear"},
        {"num_inference_steps": 5, "mu": 1.7},
    ),
]


@pytest.mark.parametrize(
    ("class_name", "config", "setting"), EXPLICIT, ids=lambda v: label(v) if isinstance(v, dict) else v
)
def test_explicit_times_and_sigmas_equal_diffusers(
    class_name: str, config: dict[str, Any], setting: dict[str, Any]
) -> None:
    peer, ours = both(class_name, config)
    for kind in (list, np.asarray) if "sigmas" in setting or "timesteps" in setting else (list,):
        given = {k: kind(v) if isinstance(v, list) else v for k, v in setting.items()}
        peer.set_timesteps(**given)
        ours.set_timesteps(**given)
        torch.testing.assert_close(ours.timesteps, peer.timesteps, rtol=1e-6, atol=2e-3)
        x = y = start(float(getattr(peer, "init_noise_sigma", 1.0)), torch.float32)
        for t, t_ours in zip(peer.timesteps, ours.timesteps, strict=True):
            shown = peer.scale_model_input(x, t) if hasattr(peer, "scale_model_input") else x
            more = {"generator": torch.Generator().manual_seed(int(t))} if class_name[:2] in ("DD", "LC") else {}
            x = peer.step(network(shown, t).float(), t, x, **more).prev_sample
            more = {"generator": torch.Generator().manual_seed(int(t))}
            y = ours.step(network(ours.scale_model_input(y, t_ours), t).float(), t_ours, y, **more).prev_sample
        assert apart(y, x) < 1e-4


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({}, "num_inference_steps, timesteps or sigmas must be given"),
        ({"timesteps": [9, 5], "sigmas": [1.0, 0.0]}, "one at a time"),
        ({"timesteps": [5, 9]}, "strictly decreasing"),
        ({"timesteps": [1000, 5]}, "between 0 and 999"),
        ({"timesteps": [500, -5]}, "finite and not negative"),
        ({"sigmas": [float("nan"), 0.0]}, "finite and not negative"),
        ({"sigmas": [0.0]}, "more than a final 0"),
        ({"num_inference_steps": 0}, "a whole number from 1"),
        ({"num_inference_steps": 2.5}, "a whole number from 1"),
        ({"num_inference_steps": 5, "timesteps": [900, 100]}, "left out with timesteps given"),
        ({"num_inference_steps": 5, "mu": 0.5}, "left out without use_dynamic_shifting"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dialect", ["exact", "diffusers"])
def test_set_timesteps_refuses(setting: dict[str, Any], message: str, dialect: str) -> None:
    with pytest.raises(PellucidError, match=message):
        Scheduler("euler", dialect=dialect).set_timesteps(**setting)


def test_a_sigma_rule_takes_no_timesteps() -> None:
    """As in diffusers: the rule already says where to go."""
    peer, ours = both("DPMSolverMultistepScheduler", {**SD, "use_karras_sigmas": True})
    for scheduler in (peer, ours):
        with pytest.raises(ValueError, match="timesteps"):
            scheduler.set_timesteps(timesteps=[900, 100])


def test_an_explicit_grid_needs_no_steps() -> None:
    scheduler = Scheduler("dpmpp_2m", grid=Grid(timesteps=(999.0, 500.5, 20.25)))
    assert scheduler.init_noise_sigma < 1.0  # before a run: the plan of the grid
    scheduler.set_timesteps()
    assert scheduler.timesteps.tolist() == [999.0, 500.5, 20.25]


def test_fractional_timesteps_are_told_as_they_are() -> None:
    scheduler = Scheduler("euler", grid="karras")
    scheduler.set_timesteps(5)
    assert scheduler.timesteps.dtype == torch.float32
    assert not torch.equal(scheduler.timesteps, scheduler.timesteps.round())
    np.testing.assert_allclose(scheduler.timesteps.numpy(), scheduler.plan.timesteps, rtol=1e-7)


# --- where a run begins, and errors ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["euler", "heun", "dpmpp_2m", "unipc", "ddim", "deis", "dpmpp_3m"])
@pytest.mark.parametrize("how", ["begin_index", "timestep"])
def test_a_later_begin_is_the_plan_without_the_first_legs(name: str, how: str) -> None:
    scheduler = Scheduler(name)
    scheduler.set_timesteps(8)
    full = scheduler.plan
    at = 3 * scheduler.order
    times = scheduler.timesteps
    if how == "begin_index":
        scheduler.set_begin_index(at)
        assert scheduler.begin_index == at
    x = start()
    want = run(compile_plan(name, steps=8, grid=full.grid["name"], skip=3), denoiser(network), x)
    for t, r in zip(times[at:], full.rows[at:], strict=True):
        x = scheduler.step(network(scheduler.scale_model_input(x, t), r.time), t, x).prev_sample
    assert apart(x, want) < 1e-11
    assert torch.equal(scheduler.timesteps, times)  # the list that a pipeline slices does not move


@pytest.mark.parametrize("index", [-1, 8, 100])
def test_begin_index_must_be_in_the_run(index: int) -> None:
    scheduler = Scheduler("ddim")
    scheduler.set_timesteps(8)
    with pytest.raises(PellucidError, match=r"begin_index must be from 0 to 7"):
        scheduler.set_begin_index(index)


def test_a_two_call_sampler_begins_with_a_first_call() -> None:
    scheduler = Scheduler("heun")
    scheduler.set_timesteps(8)
    with pytest.raises(PellucidError, match="a multiple of 2 for heun; got 3"):
        scheduler.set_begin_index(3)


@pytest.mark.parametrize(("name", "index"), [("dpm_fast", 3), ("restart", 14), ("pndm", 5)])
def test_a_run_whose_calls_depend_on_its_begin_cannot_begin_later(name: str, index: int) -> None:
    """The times that a pipeline slices off the full list would not be the times of the shorter run."""
    scheduler = Scheduler(name)
    scheduler.set_timesteps(8)
    with pytest.raises(PellucidError, match=f"begin_index must be 0 for {name}"):
        scheduler.set_begin_index(index)


@pytest.mark.parametrize("begin", range(9))
def test_plms_begins_anywhere(begin: int) -> None:
    """Its list repeats the second time; wherever a pipeline cuts it, a perfect denoiser ends at its point.

    Not in the diffusers dialect, which reproduces a defect (tests/parity/test_defects.py).
    """
    scheduler = Scheduler("plms", grid="leading")
    scheduler.set_timesteps(8)
    assert len(scheduler.timesteps) == 9
    scheduler.set_begin_index(begin)
    times = scheduler.timesteps[begin:]
    point, noise = start() * 0.3, start().flip(0)
    x = scheduler.add_noise(point, noise, times[:1])
    for t in times:
        x = scheduler.step(noise, t, x).prev_sample
    assert apart(x, point) < 1e-11


def test_calls_in_the_wrong_order_say_so() -> None:
    scheduler = Scheduler("dpmpp_2m")
    for call in (
        lambda: scheduler.timesteps,
        lambda: scheduler.sigmas,
        lambda: scheduler.plan,
        lambda: scheduler.num_inference_steps,
        lambda: scheduler.scale_model_input(start(), 5),
        lambda: scheduler.step(start(), 5, start()),
        lambda: scheduler.set_begin_index(1),
    ):
        with pytest.raises(PellucidError, match="set_timesteps must be called first") as caught:
            call()
        assert caught.value.code == "no-run"
    assert scheduler.step_index is None
    assert scheduler.begin_index is None


def test_one_step_too_many() -> None:
    scheduler = Scheduler("euler")
    scheduler.set_timesteps(2)
    for t in scheduler.timesteps:
        scheduler.step(start(), t, start())
    for call in (scheduler.step, lambda out, t, x: scheduler.scale_model_input(x, t)):
        with pytest.raises(PellucidError, match="called 2 times per run; this is one more"):
            call(start(), scheduler.timesteps[-1], start())
    scheduler.set_timesteps(2)
    scheduler.step(start(), scheduler.timesteps[0], start())


def test_a_foreign_timestep() -> None:
    scheduler = Scheduler("euler")
    scheduler.set_timesteps(4)
    for call in (lambda: scheduler.step(start(), 123.456, start()), lambda: scheduler.scale_model_input(start(), 7.5)):
        with pytest.raises(PellucidError, match=r"timestep must be one of scheduler\.timesteps; got"):
            call()


def test_eta_belongs_to_its_call() -> None:
    """As in diffusers: each call says its own eta, and a call without one has the default."""
    peer, ours = both("DDIMScheduler", {**SD, "clip_sample": False})
    x = start(dtype=torch.float32)
    for scheduler in (peer, ours):
        scheduler.set_timesteps(4)
    for t, eta in zip(peer.timesteps, (0.5, 0.9, None, 1.0), strict=True):
        given = {} if eta is None else {"eta": eta}
        seeds = [torch.Generator().manual_seed(int(t)) for _ in range(2)]
        want = peer.step(network(x, t), t, x, generator=seeds[0], **given).prev_sample
        got = ours.step(network(x, t), t, x, generator=seeds[1], **given).prev_sample
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        x = want
    named = Scheduler("ddim")
    named.set_timesteps(4)
    with pytest.raises(PellucidError, match="eta must be between 0 and 1"):
        named.step(start(), named.timesteps[0], start(), eta=1.5)
    euler = Scheduler("euler")
    euler.set_timesteps(4)
    euler.step(start(), euler.timesteps[0], start(), eta=0.0)  # pipelines pass 0 to everybody
    with pytest.raises(PellucidError, match=r"eta must be 0 or left out for euler; got 0\.5"):
        euler.step(start(), euler.timesteps[1], start(), eta=0.5)


def test_eta_in_a_run_that_begins_late() -> None:
    """Image-to-image with eta: set_begin_index first, eta with the first step."""
    want = None
    for order in ("begin then eta", "made with eta"):
        scheduler = Scheduler("ddim", **({"eta": 0.6} if order == "made with eta" else {}))
        scheduler.set_timesteps(6)
        scheduler.set_begin_index(2)
        x = start()
        for i, t in enumerate(scheduler.timesteps[2:]):
            out = network(scheduler.scale_model_input(x, t), float(t))
            more = {"eta": 0.6} if order == "begin then eta" else {}
            x = scheduler.step(out, t, x, variance_noise=start(1.0 + i), **more).prev_sample
        want = x if want is None else want
        assert torch.equal(x, want)
    assert scheduler.step_index == 6


def test_dynamic_shift_needs_mu() -> None:
    scheduler = Scheduler.from_config(diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True))
    with pytest.raises(PellucidError, match="mu must be given with use_dynamic_shifting"):
        scheduler.set_timesteps(5)


def test_a_dynamic_shift_without_flow_sigmas_shifts_nothing() -> None:
    """As in diffusers, where users make a solver from a flow scheduler's config."""
    theirs = diffusers.DPMSolverMultistepScheduler(use_dynamic_shifting=True)
    ours = Scheduler.from_config(theirs)
    for scheduler in (ours, theirs):
        scheduler.set_timesteps(5)
    assert ours.timesteps.tolist() == theirs.timesteps.tolist()


# --- copies, dtypes, channels, noise ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copying", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s)), copy.copy], ids=["deepcopy", "pickle", "copy"]
)
@pytest.mark.parametrize(
    "scheduler",
    [
        Scheduler("dpmpp_2m", grid="karras"),
        Scheduler("ddim", x0_filter=Clip(2.0), eta=0.3),
        Scheduler("unipc", schedule=schedules.make("scaled_linear", zero_snr=True), target="v", order=3),
        Scheduler.from_config({"_class_name": "EulerDiscreteScheduler", **SD}),
    ],
    ids=repr,
)
def test_copies_are_the_same_sampler(copying: Any, scheduler: Scheduler) -> None:
    scheduler.set_timesteps(5)
    other = copying(scheduler)
    assert repr(other) == repr(scheduler)
    other.set_timesteps(5)
    assert other.plan == scheduler.plan
    got, want = (walk(s, start()) for s in (other, scheduler))
    assert torch.equal(got, want)
    other.set_timesteps(3)
    scheduler.set_timesteps(4)
    assert (len(other.timesteps), len(scheduler.timesteps)) == (3, 4)  # the runs are apart


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["ddim", "euler", "dpmpp_2m", "unipc", "euler_a"])
def test_half_precision_in_and_out(dtype: torch.dtype, name: str) -> None:
    """The state is mixed in float32 and given back in the network's dtype; it stays near the float64 run."""
    scheduler = Scheduler(name)
    scheduler.set_timesteps(6)
    wide = walk(scheduler, start(scheduler.init_noise_sigma))
    scheduler.set_timesteps(6)
    x = start(scheduler.init_noise_sigma, dtype)
    noise = ByAddress(x.shape)
    for r, t in zip(scheduler.plan.rows, scheduler.timesteps, strict=True):
        out = network(scheduler.scale_model_input(x, t), r.time)
        assert out.dtype == dtype
        x = scheduler.step(out, t, x, variance_noise=noise.of(r.draws) if r.draws else None).prev_sample
        assert x.dtype == dtype
    assert apart(x, wide) < 20 * torch.finfo(dtype).eps


def test_a_float32_state_with_a_half_network_is_mixed_in_float32() -> None:
    """Like diffusers, `step` gives back the dtype of the network's output."""
    peer, ours = both("EulerDiscreteScheduler", SD)
    x, out = start(5.0, torch.float32), start(1.0, torch.float16)
    results = []
    for scheduler in (peer, ours):
        scheduler.set_timesteps(5)
        scheduler.scale_model_input(x, scheduler.timesteps[0])
        results.append(scheduler.step(out, scheduler.timesteps[0], x).prev_sample)
    assert results[0].dtype == results[1].dtype == torch.float16
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-2)


def test_variance_channels_are_split_off() -> None:
    """A network with learned variance (DiT) gives twice the channels: the first half is the prediction."""
    for name in ("ddim", "dpmpp_2m", "euler"):
        scheduler = Scheduler(name)
        scheduler.set_timesteps(3)
        t, x = scheduler.timesteps[0], start()
        plain = scheduler.step(network(x, 5), t, x).prev_sample
        scheduler.set_timesteps(3)
        doubled = torch.cat([network(x, 5), torch.full_like(x, 1e6)], dim=1)
        assert torch.equal(scheduler.step(doubled, t, x).prev_sample, plain)


def test_noise_is_drawn_from_the_callers_generators() -> None:
    def once(generator: Any, x: Tensor) -> Tensor:
        scheduler = Scheduler("euler_a")
        scheduler.set_timesteps(3)
        return scheduler.step(x, scheduler.timesteps[0], x, generator=generator).prev_sample

    x = start(dtype=torch.float32)
    one = once(torch.Generator().manual_seed(5), x)
    assert torch.equal(one, once(torch.Generator().manual_seed(5), x))
    assert not torch.equal(one, once(torch.Generator().manual_seed(6), x))
    each = once([torch.Generator().manual_seed(s) for s in (5, 6)], x)
    assert torch.equal(each[:1], once(torch.Generator().manual_seed(5), x[:1]))
    torch.manual_seed(5)
    assert torch.equal(once(None, x), one)  # torch's own generator where none is given


def test_reading_a_scheduler_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for class_name, config in CLASSES:
            both(class_name, config)[1].set_timesteps(5)
