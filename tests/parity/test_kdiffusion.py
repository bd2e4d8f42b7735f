"""Parity with k-diffusion in float64: its samplers, its grids, its discrete schedule, its callback.

Both sides get the same network and the same noise. k-diffusion draws noise by noise_sampler(sigma, sigma_next) or,
for churn, by one randn_like a step; ours asks for a span of sigma. So the noise is a function of the two sigmas
(to nine digits: the peer takes exp(−log sigma) here and there), or of the step.
"""

from __future__ import annotations

import importlib
import inspect
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from peers import Wide, k_diffusion, relative
from torch import Tensor

from pellucid import compile_plan, denoiser, run, run_adaptive, schedules
from pellucid.core import grid as grids
from pellucid.core.plan import Draw, Span
from pellucid.core.schedule import EDM
from pellucid.interop.kdiffusion import sample

SIGMA_MIN, SIGMA_MAX = 0.0292, 14.6146
STEPS = (1, 2, 3, 5, 10, 13, 20)
# float64 on both sides. What is left is rounding: sigma_down = √(sigma_to² − sigma_up²) loses (from / to)² · 2⁻⁵³,
# which is 3e-11 where one step spans the whole range.
TIGHT = 1e-10


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    """k-diffusion makes tensors in the default dtype here and there."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class SharedNoise:
    """Noise by address, for both sides."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape, self.step_index = tuple(shape), 0

    def keyed(self, key: str) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        return torch.randn(self.shape, generator=generator, dtype=torch.float64)

    def sampler(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        return self.keyed(f"{float(sigma):.9e} {float(sigma_next):.9e}")

    def next_churn(self, x: Tensor) -> Tensor:
        self.step_index += 1
        return self.keyed(f"churn {self.step_index}")

    def first(self, shape: Sequence[int], like: Tensor, images: Sequence[int]) -> Tensor:
        raise AssertionError("x is given")

    def step(self, draws: Sequence[Draw], span: Span, like: Tensor, images: Sequence[int]) -> Tensor:
        if span.visit:  # churn: the pass over this stretch is numbered by the step
            return self.keyed(f"churn {span.visit}")
        return self.keyed(f"{span.start:.9e} {span.end:.9e}")


@contextmanager
def churn_from(noise: SharedNoise) -> Iterator[None]:
    module = k_diffusion()
    kept = module.torch
    module.torch = Wide(torch, randn_like=noise.next_churn)
    try:
        yield
    finally:
        module.torch = kept


def model(x: Tensor, sigma: Tensor, **_: Any) -> Tensor:
    """A smooth denoiser in k-diffusion's convention; it depends on sigma, so a wrong sigma shows."""
    s = sigma.reshape(-1, *([1] * (x.ndim - 1)))
    return torch.tanh(x / (1.0 + s)) * (0.8 + 0.1 * torch.cos(s)) + 0.05 * x / (1.0 + s)


def start(scale: float = SIGMA_MAX) -> Tensor:
    return torch.randn((2, 2, 3), generator=torch.Generator().manual_seed(5), dtype=torch.float64) * scale


def karras(count: int, clean: bool = True) -> Tensor:
    """Sigmas from SIGMA_MAX down in `count` steps, to 0 or to SIGMA_MIN."""
    if clean:
        return torch.tensor([*grids.karras(count, SIGMA_MIN, SIGMA_MAX, 7.0), 0.0])
    return torch.tensor(grids.karras(count + 1, SIGMA_MIN, SIGMA_MAX, 7.0))


# k-diffusion's function, our name, the options of both
SDE = [{}, {"eta": 0.0}, {"eta": 0.5}, {"s_noise": 0.9}]
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("sample_euler", "euler", {}, {}),
    ("sample_euler", "euler", {"s_churn": 5.0}, {"s_churn": 5.0}),
    *(
        (theirs, ours, dict(churn), dict(churn))
        for theirs, ours in (("sample_euler", "euler"), ("sample_heun", "edm_stochastic"))
        for churn in (
            {"s_churn": 40.0, "s_tmin": 0.05, "s_tmax": 50.0, "s_noise": 1.003},
            {"s_churn": 3.0, "s_tmin": 0.5, "s_tmax": 5.0, "s_noise": 1.0},
        )
    ),
    ("sample_heun", "heun", {}, {}),
    ("sample_dpm_2", "dpm2", {}, {}),
    *(("sample_lms", "lms", {"order": k}, {"order": k}) for k in (1, 2, 3, 4)),
    ("sample_dpmpp_2m", "dpmpp_2m", {}, {}),
    *(
        (theirs, ours, dict(extra), dict(extra))
        for theirs, ours in (
            ("sample_euler_ancestral", "euler_a"),
            ("sample_dpm_2_ancestral", "dpm2_a"),
            ("sample_dpmpp_2s_ancestral", "dpmpp_2s_a"),
            ("sample_dpmpp_sde", "dpmpp_sde"),
            ("sample_dpmpp_2m_sde", "dpmpp_2m_sde"),
            ("sample_dpmpp_3m_sde", "dpmpp_3m_sde"),
        )
        for extra in SDE
    ),
    ("sample_dpmpp_sde", "dpmpp_sde", {"r": 1 / 3}, {"r": 1 / 3}),
    ("sample_dpmpp_sde", "dpmpp_sde", {"r": 0.7, "eta": 0.6}, {"r": 0.7, "eta": 0.6}),
    *(
        ("sample_dpmpp_2m_sde", "dpmpp_2m_sde", {"solver_type": "heun", "eta": e}, {"solver": "heun", "eta": e})
        for e in (0.0, 0.5, 1.0)
    ),
]
ONE_STEP_CRASHES = ("sample_dpmpp_2m_sde", "sample_dpmpp_3m_sde")  # see test_defects.py


def theirs_run(name: str, x: Tensor, sigmas: Tensor, options: dict[str, Any], **more: Any) -> Tensor:
    noise = SharedNoise(x.shape)
    function = getattr(k_diffusion(), name)
    if "noise_sampler" in inspect.signature(function).parameters:
        more["noise_sampler"] = noise.sampler
    with churn_from(noise):
        return function(more.pop("model", model), x, sigmas, disable=True, **options, **more)


def label(case: Any) -> str:
    return f"{case[1]}-" + ",".join(f"{k}={v:.2g}" if isinstance(v, float) else f"{k}={v}" for k, v in case[2].items())


@pytest.mark.parametrize("clean", [True, False], ids=["to0", "to-sigma-min"])
@pytest.mark.parametrize("case", CASES, ids=label)
def test_sample_equals_k_diffusion(case: Any, clean: bool) -> None:
    theirs, ours, their_options, our_options = case
    x = start()
    for steps in STEPS:
        if steps == 1 and clean and theirs in ONE_STEP_CRASHES:
            continue
        sigmas = karras(steps, clean)
        expected = theirs_run(theirs, x, sigmas, their_options)
        got = sample(ours, model, x, sigmas, noise=SharedNoise(x.shape), **our_options)
        assert relative(got, expected) < TIGHT, steps
        if steps > 1:  # the noise and the network matter, so that equal is not vacuous
            assert relative(sample(ours, lambda x, s: 0.9 * model(x, s), x, sigmas, **our_options), expected) > 1e-3


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("nfe", [1, 2, 3, 4, 5, 6, 10, 13, 20])
def test_dpm_fast_equals_k_diffusion(nfe: int, eta: float) -> None:
    """k-diffusion takes the ends and the number of calls; ours reads the same from a list of sigmas."""
    x = start()
    noise = SharedNoise(x.shape)
    expected = k_diffusion().sample_dpm_fast(
        model, x, SIGMA_MIN, SIGMA_MAX, nfe, disable=True, eta=eta, noise_sampler=noise.sampler
    )
    got = sample("dpm_fast", model, x, karras(nfe, clean=False), noise=SharedNoise(x.shape), eta=eta)
    assert relative(got, expected) < TIGHT


def network(x: Tensor, time: Tensor) -> Tensor:
    """An eps network that is told fractional training times."""
    t = time.reshape(-1, *([1] * (x.ndim - 1)))
    return 0.6 * torch.sin(1.3 * x + 0.002 * t) + 0.3 * x


def eps_model(alpha_bar: np.ndarray) -> Callable[..., Tensor]:
    """k-diffusion's wrapper of a discrete eps network, with times that are not rounded."""
    k_diffusion()
    external = importlib.import_module("k_diffusion.external")
    return external.DiscreteEpsDDPMDenoiser(network, torch.tensor(alpha_bar), quantize=False)


GRIDS: dict[str, Callable[[Any, int], Tensor]] = {
    "karras": lambda k, n: k.get_sigmas_karras(n, *SCHEDULE.sigma_range),
    "exponential": lambda k, n: k.get_sigmas_exponential(n, *SCHEDULE.sigma_range),
    "polyexponential": lambda k, n: k.get_sigmas_polyexponential(n, *SCHEDULE.sigma_range, rho=1.0),
}
SCHEDULE = schedules.scaled_linear()


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_dialect_equals_k_diffusion_on_a_discrete_eps_network(case: Any, grid: str) -> None:
    """compile_plan(dialect="k-diffusion") on Stable Diffusion's schedule: same sigmas, same told times, same x."""
    theirs, ours, their_options, our_options = case
    wrapped = eps_model(SCHEDULE.alpha_bar)
    for steps in (2, 3, 10, 13) if grid == "karras" else (5,):
        sigmas = GRIDS[grid](k_diffusion(), steps)
        x = start(float(sigmas[0]))
        expected = theirs_run(theirs, x, sigmas, their_options, model=wrapped)
        plan = compile_plan(
            ours, schedule=SCHEDULE, target="eps", grid=grid, steps=steps, dialect="k-diffusion", **our_options
        )
        assert plan.initial_scale == pytest.approx(float(sigmas[0]), rel=1e-14)
        got = run(plan, denoiser(network, SCHEDULE, "eps"), x, noise=SharedNoise(x.shape))
        assert relative(got, expected) < TIGHT, steps


@pytest.mark.parametrize("nfe", [3, 7, 20])
def test_dpm_fast_in_the_dialect(nfe: int) -> None:
    low, high = SCHEDULE.sigma_range
    x = start(high)
    expected = k_diffusion().sample_dpm_fast(eps_model(SCHEDULE.alpha_bar), x, low, high, nfe, disable=True)
    plan = compile_plan("dpm_fast", schedule=SCHEDULE, grid="exponential", steps=nfe, dialect="k-diffusion")
    assert plan.nfe == nfe
    assert relative(run(plan, denoiser(network, SCHEDULE, "eps"), x), expected) < TIGHT


def test_the_dialect_refuses_what_k_diffusion_has_not() -> None:
    with pytest.raises(ValueError, match="one that k-diffusion has; got 'unipc'"):
        compile_plan("unipc", dialect="k-diffusion")


# --- adaptive --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"order": 2},
        {"order": 2, "rtol": 0.01, "atol": 0.001},
        {"rtol": 1e-4, "atol": 1e-5},
        {"eta": 1.0},
        {"eta": 0.5, "order": 2},
        {"h_init": 2.0, "rtol": 1e-3, "atol": 1e-4},
    ],
    ids=str,
)
def test_dpm_adaptive_equals_k_diffusion(options: dict[str, Any]) -> None:
    """The same x, the same accepted and rejected steps; ours keeps the first call of a rejected step."""
    x = start()
    noise = SharedNoise(x.shape)
    expected, info = k_diffusion().sample_dpm_adaptive(
        model, x, SIGMA_MIN, SIGMA_MAX, disable=True, return_info=True, noise_sampler=noise.sampler, **options
    )
    schedule = EDM(SIGMA_MIN, SIGMA_MAX, c_noise="sigma")

    def denoise(state: Tensor, level: Any, time: Any) -> Tensor:
        return model(state, torch.full((len(state),), float(level.sigma)))

    found = run_adaptive(denoise, x, budget=5000, schedule=schedule, target="x0", noise=SharedNoise(x.shape), **options)
    assert info["n_reject"] > 0 or "h_init" not in options
    assert (found.accepted, len(found.rejected)) == (info["n_accept"], info["n_reject"])
    assert found.calls == info["nfe"] - info["n_reject"]
    assert found.plan.nfe == options.get("order", 3) * info["n_accept"]
    # k-diffusion's steps depend on a float32 error estimate no more than ours: the same to rounding
    assert relative(found.x, expected) < 1e-9
    # the discovered plan is a plan: run again, with the same noise, it gives the same x
    again = run(found.plan, denoise, x, noise=SharedNoise(x.shape))
    assert relative(again, found.x) < 1e-9


# --- grids and the discrete schedule ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 40])
@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        ("karras", "get_sigmas_karras", {}),
        ("karras", "get_sigmas_karras", {"rho": 3.0}),
        ("exponential", "get_sigmas_exponential", {}),
        ("polyexponential", "get_sigmas_polyexponential", {}),
        ("polyexponential", "get_sigmas_polyexponential", {"rho": 2.5}),
    ],
)
def test_sigma_grids(ours: str, theirs: str, options: dict[str, float], count: int) -> None:
    expected = getattr(k_diffusion(), theirs)(count, SIGMA_MIN, SIGMA_MAX, **options)
    schedule = EDM(SIGMA_MIN, SIGMA_MAX)
    plan = compile_plan(
        "euler", schedule=schedule, target="edm", grid=grids.Grid(ours, **options), steps=count, dialect="k-diffusion"
    )
    got = [r.level.sigma for r in plan.rows] + [plan.end.sigma]
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-13)


@pytest.mark.parametrize("count", [2, 7, 40])
def test_vp_grid(count: int) -> None:
    """k-diffusion's VP sigmas are ours on the schedule vp_linear with a grid even in time."""
    expected = k_diffusion().get_sigmas_vp(count)
    plan = compile_plan("euler", schedule=schedules.vp_linear(), grid="linspace", steps=count, dialect="k-diffusion")
    got = [r.level.sigma for r in plan.rows] + [plan.end.sigma]
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-12)
    np.testing.assert_allclose(plan.timesteps, 999.0 * np.linspace(1, 1e-3, count), rtol=1e-13)


@pytest.mark.parametrize("name", ["scaled_linear", "linear", "cosine"])
def test_discrete_schedule_times_and_sigmas(name: str) -> None:
    schedule = schedules.make(name)
    peer = eps_model(schedule.alpha_bar)
    sigmas = torch.tensor(np.geomspace(*schedule.sigma_range, 301)[1:-1])
    np.testing.assert_allclose(schedule.time_at(sigmas.numpy()), peer.sigma_to_t(sigmas).numpy(), rtol=1e-11)
    times = torch.arange(0, 999, 1.3125)  # sixteenths: k-diffusion casts times to float32
    np.testing.assert_allclose(schedule.ratio_at(times.numpy()), peer.t_to_sigma(times).numpy(), rtol=1e-11)
    # outside of the table both stay at its ends
    outside = torch.tensor([schedule.sigma_range[0] / 3, schedule.sigma_range[1] * 3])
    np.testing.assert_allclose(schedule.time_at(outside.numpy()), peer.sigma_to_t(outside).numpy(), atol=1e-9)


def test_get_sigmas_of_a_discrete_model_is_the_linspace_grid() -> None:
    expected = eps_model(SCHEDULE.alpha_bar).get_sigmas(9)  # times 124.875 apart, exact in its float32
    plan = compile_plan("euler", schedule=SCHEDULE, grid="linspace", steps=9, dialect="k-diffusion")
    got = [r.level.sigma for r in plan.rows] + [plan.end.sigma]
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-11)


# --- the call itself -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours", "options"),
    [
        ("sample_euler", "euler", {"s_churn": 20.0}),
        ("sample_heun", "edm_stochastic", {"s_churn": 20.0, "s_tmin": 0.0, "s_tmax": math.inf, "s_noise": 1.0}),
        ("sample_heun", "heun", {}),
        ("sample_dpm_2", "dpm2", {}),
        ("sample_dpmpp_sde", "dpmpp_sde", {}),
        ("sample_dpmpp_2s_ancestral", "dpmpp_2s_a", {}),
        ("sample_dpmpp_3m_sde", "dpmpp_3m_sde", {}),
    ],
)
def test_callback_gets_what_k_diffusion_gives(theirs: str, ours: str, options: dict[str, Any]) -> None:
    """The same keys and values, once a step, `i` counting steps and not calls."""
    x, sigmas = start(), karras(5)
    expected: list[dict[str, Any]] = []
    got: list[dict[str, Any]] = []
    theirs_run(theirs, x, sigmas, options, callback=lambda d: expected.append(dict(d)))
    sample(ours, model, x, sigmas, callback=got.append, noise=SharedNoise(x.shape), **options)
    assert [d["i"] for d in got] == [d["i"] for d in expected] == list(range(5))
    for mine, peer in zip(got, expected, strict=True):
        assert set(mine) == set(peer) == {"x", "i", "sigma", "sigma_hat", "denoised"}
        assert float(mine["sigma"]) == pytest.approx(float(peer["sigma"]), rel=1e-12)
        assert float(mine["sigma_hat"]) == pytest.approx(float(peer["sigma_hat"]), rel=1e-12)
        assert relative(mine["x"], peer["x"]) < TIGHT
        assert relative(mine["denoised"], peer["denoised"]) < TIGHT


def test_extra_args_reach_the_model_and_seeds_are_per_image() -> None:
    seen: list[Any] = []

    def told(x: Tensor, sigma: Tensor, cond: str, scale: float) -> Tensor:
        seen.append((cond, scale, sigma.dtype, tuple(sigma.shape)))
        return model(x, sigma)

    x, sigmas = start(), karras(4)
    both = sample("euler_a", told, x, sigmas, {"cond": "cat", "scale": 7.0}, seeds=[3, 4])
    assert seen == [("cat", 7.0, torch.float64, (2,))] * 4
    alone = sample("euler_a", model, x[1:], sigmas, seeds=[4])
    assert torch.equal(both[1:], alone)


def test_sigma_reaches_the_model_in_full_precision() -> None:
    got: list[float] = []

    def told(x: Tensor, sigma: Tensor) -> Tensor:
        got.append(float(sigma[0]))
        return model(x, sigma)

    sigmas = karras(6)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        sample("euler", told, start(), sigmas)
    finally:
        torch.set_default_dtype(before)
    assert got == sigmas[:-1].tolist()


def test_any_of_our_samplers_runs_on_a_k_diffusion_model() -> None:
    """Samplers that k-diffusion has not, on its model convention: near to the fine Heun solution."""
    x = start()
    truth = sample("heun", model, x, karras(150))
    for name in ("unipc", "dpmpp_3m", "deis", "res_multistep"):
        assert relative(sample(name, model, x, karras(40)), truth) < 0.03, name


@pytest.mark.parametrize("sigmas", [[1.0], [1.0, 2.0, 0.0], [1.0, 1.0, 0.0], [math.nan, 0.0], [1.0, -0.5]])
def test_sigmas_that_are_no_path_are_refused(sigmas: list[float]) -> None:
    with pytest.raises(ValueError, match="sigma"):
        sample("euler", model, start(), sigmas)
