"""How the order of a sampler is measured: for the law of orders, for docs/results/orders.md and for studies.

Set-up. The denoiser is exact: `oracle.smooth()`, a mixture of Gaussians in 4 dimensions. 16 points start at the
noisiest level and go to the least noisy one. The truth is the flow of dx/dλ = x0(x, λ) − x (alpha 1, sigma = e^−λ),
by Runge-Kutta's classical rule of order 4 in 2,500 steps, written here and sharing no code with the samplers; its
error, by the step-doubling rule, is below 1e-11. Everything is float64.

The order is the slope of log(error) against log(steps) between the last two of some step counts. The path runs from
sigma 300 to 0.05 on a grid even in λ. Why 300: multistep methods begin with a first-order step, whose error h² caps
the order at 2 in theory. At sigma 300 that step is nearly exact (x0 hardly moves there, and the flow forgets errors
on its way down by the factor 600), so what is seen is the order of the method itself, not that of its first step.
Why not to 0: the last step to a clean x is first order in every method, and exact if x0 is.

Stochastic samplers are measured with their noise off, as above, and with it on: by the variance of the result on a
Gaussian (`weak_error`), where every register is a combination of independent normal numbers, so that it is computed
without drawing any; and, where the noise is that of a diffusion, by the distance from the solution of the same
Brownian path (`_strong_error`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pellucid.core import oracle
from pellucid.core import schedule as schedules
from pellucid.core.compile import compile_plan
from pellucid.core.grid import Grid
from pellucid.core.loop import run
from pellucid.core.noise import Brownian
from pellucid.core.plan import Plan
from pellucid.core.schedule import Level, Schedule
from pellucid.evidence.study.setups import SamplerSetup, entry_of

TOP, BOTTOM = 300.0, 0.05
COUNTS = (20, 40, 80, 160, 320, 640)
THIRDS = (18, 36, 72, 144, 288, 576)  # for methods that group their calls by two or three
REFERENCE_STEPS = 2500
MIXTURE = oracle.smooth()


@dataclass(frozen=True)
class _OrderSetup:
    """A schedule and the grid on which orders are measured."""

    schedule: Schedule
    target: str
    grid: Grid


_TO_THE_END = Grid("exponential", final="sigma_min")
SETTINGS = {
    # c_noise sigma: the time is sigma itself, so that grids over time are even in sigma
    "edm": _OrderSetup(schedules.EDM(sigma_min=BOTTOM, sigma_max=TOP, c_noise="sigma"), "edm", _TO_THE_END),
    "vp": _OrderSetup(schedules.vp_linear(), "eps", _TO_THE_END),
    # A flow starts at pure noise, where λ is infinite; the grid starts just below it.
    "flow": _OrderSetup(schedules.flow(sigma_min=0.05), "flow", Grid("linspace", final="sigma_min", start=950.0)),
    # The range of image models, for the errors that people would see.
    "edm80": _OrderSetup(schedules.EDM(sigma_min=0.1, sigma_max=80.0, c_noise="sigma"), "edm", _TO_THE_END),
}


@dataclass(frozen=True)
class Case:
    """A sampler with options, and the order that it is said to have."""

    sampler: str
    order: int
    options: dict[str, Any] = field(default_factory=dict)
    counts: tuple[int, ...] = COUNTS
    setting: str = "edm"

    @property
    def remarks(self) -> str:
        """The options, and what else sets this case apart."""
        parts = [f"{k}={v}" for k, v in self.options.items()]
        parts += [] if self.setting == "edm" else [f"schedule {self.setting}"]
        parts += [f"steps = {self.counts[0] % 3} mod 3"] if self.sampler == "dpm_fast" else []
        return ", ".join(parts)

    @property
    def name(self) -> str:
        return f"{self.sampler}({self.remarks})"


@dataclass(frozen=True)
class OrderMeasurement:
    """The errors at the case's step counts, the slope at the end, and the calls that a step costs."""

    case: Case
    errors: tuple[float, ...]
    calls_a_step: float

    @property
    def order(self) -> float:
        few, many = self.case.counts[-2:]
        return math.log(self.errors[-2] / self.errors[-1]) / math.log(many / few)


def compiled(case: Case, steps: int) -> Plan:
    setting = SETTINGS[case.setting]
    about: dict[str, Any] = {"schedule": setting.schedule, "target": setting.target, "grid": setting.grid}
    return compile_plan(case.sampler, **about, steps=steps, **case.options)


# --- the truth -------------------------------------------------------------------------------------------------


@cache
def _starting_points(top: float) -> Tensor:
    """16 points of x / alpha at sigma / alpha = top, [16, 4]."""
    generator = torch.Generator().manual_seed(3)
    data = MIXTURE.sample(16, generator)
    return data + top * torch.randn(data.shape, generator=generator, dtype=torch.float64)


@cache
def _truth(top: float, bottom: float, steps: int = REFERENCE_STEPS) -> Tensor:
    """x / alpha at the bottom, by the classical Runge-Kutta rule in λ."""
    x, lam = _starting_points(top), -math.log(top)
    h = math.log(top / bottom) / steps

    return runge_kutta(lambda x, lam: MIXTURE(x, Level(1.0, math.exp(-lam))) - x, x, lam, h, steps)


def runge_kutta(slope: Callable[[Tensor, float], Tensor], x: Tensor, lam: float, h: float, steps: int) -> Tensor:
    """The classical rule of order 4, from λ in this many steps of h."""
    for i in range(steps):
        now = lam + i * h
        k1 = slope(x, now)
        k2 = slope(x + h / 2 * k1, now + h / 2)
        k3 = slope(x + h / 2 * k2, now + h / 2)
        k4 = slope(x + h * k3, now + h)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return x


def reference_error(top: float, bottom: float) -> float:
    """The error of the truth: twice the step errs 16 times as much, so a fifteenth of the difference."""
    return oracle.distance(_truth(top, bottom, REFERENCE_STEPS // 2), _truth(top, bottom)) / 15


def _rounded(level: Level) -> float:
    """sigma / alpha without the last digits that frames differ by."""
    return float(f"{level.ratio:.12g}")


def ends(case: Case) -> tuple[float, float]:
    """sigma / alpha at both ends of a case's path."""
    plan = compiled(case, 20)
    return _rounded(plan.start), _rounded(plan.end)


def error_of(plan: Plan) -> float:
    """The distance from the truth of a plan's result, relative."""
    top, bottom = _rounded(plan.start), _rounded(plan.end)
    x = run(plan, MIXTURE, _starting_points(top) * plan.start.alpha)
    return oracle.distance(x / plan.end.alpha, _truth(top, bottom))


def measure(case: Case, how: Callable[[Plan], float] = error_of) -> OrderMeasurement:
    plans = [compiled(case, steps) for steps in case.counts]
    return OrderMeasurement(case, tuple(how(plan) for plan in plans), round(plans[-1].nfe / case.counts[-1], 2))


# --- with the noise on: the variance ---------------------------------------------------------------------------

SPREAD = 0.6  # of the Gaussian data


class Coordinates:
    """A source of noise that answers with unit vectors: one coordinate for each independent normal number."""

    def __init__(self, plan: Plan) -> None:
        addresses = {(d.interval, d.visit) for r in plan.rows for d in (*r.pre_draws, *r.draws)}
        self.place = {address: i + 1 for i, address in enumerate(sorted(addresses))}

    def step(self, draws: Sequence[Any], span: Any, like: Tensor, images: Any) -> Tensor:
        out = torch.zeros_like(like)
        for d in draws:
            out[:, self.place[d.interval, d.visit]] += d.weight
        return out


def _wiener(x: Tensor, level: Level, time: float) -> Tensor:
    """The exact denoiser of N(0, SPREAD²): linear, so that it acts on the coefficients of the noises."""
    return x * (level.alpha * SPREAD**2 / (level.alpha**2 * SPREAD**2 + level.sigma**2))


def weak_error(plan: Plan) -> float:
    """The relative error of the variance at the plan's end, where it starts with the true one."""
    noise: Any = Coordinates(plan)
    x = torch.zeros(1, len(noise.place) + 1, dtype=torch.float64)
    x[0, 0] = math.hypot(plan.start.alpha * SPREAD, plan.start.sigma)
    end = run(plan, _wiener, x, noise=noise)
    true = (plan.end.alpha * SPREAD) ** 2 + plan.end.sigma**2
    return abs(float((end**2).sum()) / true - 1.0)


# --- with the noise on: the same path --------------------------------------------------------------------------

_STRONG_COUNTS = (40, 80, 160)
_STRONG_REFERENCE = 1280
# These solve the reverse diffusion that has the noise of the forward one (eta 1): one path, one solution.
ONE_DIFFUSION = ("ddpm", "euler_a", "dpm2_a", "dpmpp_2s_a", "dpmpp_sde", "dpmpp_2m_sde", "dpmpp_3m_sde", "sa_solver")
# These solve diffusions of their own, and are compared with themselves at many steps.
OWN_DIFFUSION = ("er_sde",)
# The step at which SA-Solver's noise begins by default moves with the grid; from end to end it is the diffusion.
_ALL_ALONG = {"sa_solver": {"tau_range": (0.0, 1.0)}}


class _KeptPath(Brownian):
    """A Brownian path that remembers all points: grids that halve their steps ask for half of them again."""

    def at(self, seeds: tuple[int, ...], ratio: float, visit: int, like: Tensor) -> Tensor:
        key = (f"{ratio:.10g}", visit)
        if key not in self.cache:
            self.cache[key] = self.descend(seeds, ratio, visit, like)
        return self.cache[key]


_PATH = _KeptPath(7)


@cache
def on_path(sampler: str, steps: int) -> Tensor:
    """x / alpha at the bottom, [16, 4], where the noise is that of the path."""
    plan = compiled(Case(sampler, 0, _ALL_ALONG.get(sampler, {})), steps)
    x = (_starting_points(_rounded(plan.start)) * plan.start.alpha)[None]
    end = run(plan, lambda x, level, time: MIXTURE(x[0], level)[None], x, noise=_PATH)
    return end[0] / plan.end.alpha


def _strong_error(sampler: str, steps: int) -> float:
    """The distance from the solution of the same path, relative: at eta 1 that of the best of its solvers."""
    limit = "dpmpp_2m_sde" if sampler in ONE_DIFFUSION else sampler
    return oracle.distance(on_path(sampler, steps), on_path(limit, _STRONG_REFERENCE))


# --- the samplers of the registry ------------------------------------------------------------------------------

# How to take the noise out of a stochastic sampler.
NOISE_OFF: dict[str, dict[str, Any]] = {
    "euler_a": {"eta": 0.0},
    "dpm2_a": {"eta": 0.0},
    "dpmpp_2s_a": {"eta": 0.0},
    "dpmpp_sde": {"eta": 0.0},
    "dpmpp_2m_sde": {"eta": 0.0},
    "dpmpp_3m_sde": {"eta": 0.0},
    "sa_solver": {"tau": 0.0},
    "edm_stochastic": {"s_churn": 0.0},
    "restart": {"times": 0},
    "tcd": {"eta": 0.0},
}
# The noise of these two cannot be taken out: the registry has their weak order.
ALWAYS_NOISY = ("ddpm", "er_sde")
# No order to measure: an inversion goes the other way, and LCM's network is no denoiser but jumps to x0.
NO_ORDER = ("ddim_inversion", "lcm")
# Noise for which the variance has no order: TCD adds a part of it again at each step, however short.
_NO_WEAK_ORDER = ("lcm", "tcd")
_NOISE_KEPT = {"edm_stochastic": {"s_noise": 1.0}}  # its default adds more than the law allows, and says so
# The slope between the last two step counts is within these of the claim. Below: the next term of the error, one h
# smaller; the largest gap measured is 0.07 (lms). Above: SA-Solver's third order on eps, whose term of order 3 is so
# small that it shows late, by 0.5.
BELOW, ABOVE = 0.15, 0.6


def counts_of(sampler: str) -> tuple[int, ...]:
    return THIRDS if sampler in ("dpm_singlestep", "dpm_fast") else COUNTS


def _claim_of(setup: SamplerSetup) -> int | None:
    """The order of the registry, or the one that is named, which UniPC's corrector raises by one; None for other
    options, which the registry says nothing of."""
    if not setup.options:
        return entry_of(setup).order
    own = dict(setup.options)
    return own["order"] + (setup.sampler == "unipc") if list(own) == ["order"] else None


def of_sampler(setup: SamplerSetup) -> dict[str, Any]:
    """The orders that a sampler has, with the noise off, in the variance and on a path, as far as each is defined."""
    name, own, claimed = setup.sampler, dict(setup.options), _claim_of(setup)
    found: dict[str, Any] = {"claimed": claimed}
    case = Case(name, claimed or 0, own, counts_of(name)[-3:-1])
    if name not in (*ALWAYS_NOISY, *NO_ORDER):
        found["order"] = measure(replace(case, options={**NOISE_OFF.get(name, {}), **own})).order
    if not entry_of(setup).deterministic and name not in _NO_WEAK_ORDER:
        found["weak"] = measure(replace(case, options={**_NOISE_KEPT.get(name, {}), **own}), weak_error).order
    if not own and name in (*ONE_DIFFUSION, *OWN_DIFFUSION):
        few, many = _STRONG_COUNTS[-2:]
        errors = [_strong_error(name, steps) for steps in (few, many)]
        found["strong"] = math.log(errors[0] / errors[1]) / math.log(many / few)
        found["strong_error"] = errors[-1]
    order = found.get("order", found.get("weak"))
    if order is not None and claimed is not None:
        found["as_claimed"] = bool(claimed - BELOW <= order <= claimed + ABOVE)
    return found
