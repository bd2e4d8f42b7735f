"""How the order of a sampler is measured. `docs/make.py` publishes what `test_order.py` checks.

Set-up. The denoiser is exact: `oracle.smooth()`, a mixture of Gaussians in 4 dimensions. 16 points start at the
noisiest level and go to the least noisy one. The truth is the flow of dx/dλ = x0(x, λ) − x (alpha 1, sigma = e^−λ),
by Runge-Kutta's classical rule of order 4 in 2,500 steps, written here and sharing no code with the samplers; its
error, by the step-doubling rule, is below 1e-11. Everything is float64.

The order is the slope of log(error) against log(steps) between the last two of six step counts. The path runs from
sigma 300 to 0.05 on a grid even in λ. Why 300: multistep methods begin with a first-order step, whose error h² caps
the order at 2 in theory. At sigma 300 that step is nearly exact (x0 hardly moves there, and the flow forgets errors
on its way down by the factor 600), so what is seen is the order of the method itself, not that of its first step.
Why not to 0: the last step to a clean x is first order in every method, and exact if x0 is.

Stochastic samplers are measured twice: with their noise off, as above, and with it on by the variance of the result
on a Gaussian (`weak_error`). There every register is a combination of independent normal numbers, so the variance is
computed without drawing any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pellucid import Grid, Level, Plan, compile_plan, oracle, run, samplers, schedules

TOP, BOTTOM = 300.0, 0.05
COUNTS = (20, 40, 80, 160, 320, 640)
THIRDS = (18, 36, 72, 144, 288, 576)  # for methods that group their calls by two or three
REFERENCE_STEPS = 2500
MIXTURE = oracle.smooth()


@dataclass(frozen=True)
class Setting:
    """A schedule and the grid on which orders are measured."""

    name: str
    schedule: schedules.Schedule
    target: str
    grid: Grid


SETTINGS = {
    setting.name: setting
    for setting in (
        # c_noise sigma: the time is sigma itself, so that grids over time are even in sigma
        Setting(
            "edm",
            schedules.EDM(sigma_min=BOTTOM, sigma_max=TOP, c_noise="sigma"),
            "edm",
            Grid("exponential", final="sigma_min"),
        ),
        Setting("vp", schedules.vp_linear(), "eps", Grid("exponential", final="sigma_min")),
        # A flow starts at pure noise, where λ is infinite; the grid starts just below it.
        Setting("flow", schedules.flow(sigma_min=0.05), "flow", Grid("linspace", final="sigma_min", start=950.0)),
        # The range of image models, for the errors that people would see.
        Setting(
            "edm80",
            schedules.EDM(sigma_min=0.1, sigma_max=80.0, c_noise="sigma"),
            "edm",
            Grid("exponential", final="sigma_min"),
        ),
    )
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
    def told(self) -> str:
        """The options, and what else sets this case apart."""
        parts = [f"{k}={v}" for k, v in self.options.items()]
        parts += [] if self.setting == "edm" else [f"schedule {self.setting}"]
        parts += [f"steps = {self.counts[0] % 3} mod 3"] if self.sampler == "dpm_fast" else []
        return ", ".join(parts)

    @property
    def name(self) -> str:
        return f"{self.sampler}({self.told})"


@dataclass(frozen=True)
class Measured:
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
    return compile_plan(
        case.sampler,
        schedule=setting.schedule,
        target=setting.target,
        grid=setting.grid,
        steps=steps,
        **case.options,
    )


# --- the truth -------------------------------------------------------------------------------------------------


@cache
def starting_points(top: float) -> Tensor:
    """16 points of x / alpha at sigma / alpha = top, [16, 4]."""
    generator = torch.Generator().manual_seed(3)
    data = MIXTURE.sample(16, generator)
    return data + top * torch.randn(data.shape, generator=generator, dtype=torch.float64)


@cache
def truth(top: float, bottom: float, steps: int = REFERENCE_STEPS) -> Tensor:
    """x / alpha at the bottom, by the classical Runge-Kutta rule in λ."""
    x, lam = starting_points(top), -math.log(top)
    h = math.log(top / bottom) / steps

    def slope(x: Tensor, lam: float) -> Tensor:
        return MIXTURE(x, Level(1.0, math.exp(-lam))) - x

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
    return oracle.distance(truth(top, bottom, REFERENCE_STEPS // 2), truth(top, bottom)) / 15


def ends(case: Case) -> tuple[float, float]:
    """sigma / alpha at both ends of a case's path, without the last digits that frames differ by."""
    plan = compiled(case, 20)
    return float(f"{plan.start.ratio:.12g}"), float(f"{plan.end.ratio:.12g}")


def error_of(plan: Plan) -> float:
    """The distance from the truth of a plan's result, relative."""
    top, bottom = (float(f"{level.ratio:.12g}") for level in (plan.start, plan.end))
    x = run(plan, MIXTURE, starting_points(top) * plan.start.alpha)
    return oracle.distance(x / plan.end.alpha, truth(top, bottom))


def measure(case: Case, how: Callable[[Plan], float] = error_of) -> Measured:
    plans = [compiled(case, steps) for steps in case.counts]
    return Measured(case, tuple(how(plan) for plan in plans), round(plans[-1].nfe / case.counts[-1], 2))


# --- with the noise on -----------------------------------------------------------------------------------------

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


def wiener(x: Tensor, level: Level, time: float) -> Tensor:
    """The exact denoiser of N(0, SPREAD²): linear, so that it acts on the coefficients of the noises."""
    return x * (level.alpha * SPREAD**2 / (level.alpha**2 * SPREAD**2 + level.sigma**2))


def weak_error(plan: Plan) -> float:
    """The relative error of the variance at the plan's end, where it starts with the true one."""
    noise = Coordinates(plan)
    x = torch.zeros(1, len(noise.place) + 1, dtype=torch.float64)
    x[0, 0] = math.hypot(plan.start.alpha * SPREAD, plan.start.sigma)
    end = run(plan, wiener, x, noise=noise)
    true = (plan.end.alpha * SPREAD) ** 2 + plan.end.sigma**2
    return abs(float((end**2).sum()) / true - 1.0)


# --- what is claimed -------------------------------------------------------------------------------------------

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


def counts_of(sampler: str) -> tuple[int, ...]:
    return THIRDS if sampler in ("dpm_singlestep", "dpm_fast") else COUNTS


def registered() -> list[Case]:
    """Every sampler with its default options, noise off, and the order of the registry."""
    return [
        Case(name, entry.order, NOISE_OFF.get(name, {}), counts_of(name))
        for name, entry in samplers.REGISTRY.items()
        if name not in (*ALWAYS_NOISY, *NO_ORDER)
    ]


def variants() -> list[Case]:
    """Options that change the order, and frames that must not."""
    cases: list[Case] = []
    for algorithm in ("dpmsolver++", "dpmsolver"):
        for solver in ("midpoint", "heun"):
            for order in (1, 2, 3):
                options = {"order": order, "algorithm": algorithm, "solver": solver}
                cases += [Case("dpm_multistep", order, options), Case("dpm_singlestep", order, options, THIRDS)]
    # the published third order takes half of the curvature: the peers' dialects keep it, and it costs an order
    cases.append(Case("dpm_multistep", 2, {"order": 3, "curvature_scale": 0.5}))
    for order in (1, 2, 3):
        # the corrector raises the order by one (Zhao et al. 2023, theorem 3.1)
        for variant in ("bh1", "bh2"):
            for predict_x0 in (True, False):
                options = {"order": order, "variant": variant, "predict_x0": predict_x0}
                cases.append(Case("unipc", order + 1, options))
        cases.append(Case("deis", order, {"order": order}))
    # a first-order last step errs by h² once: order 2, whatever the method
    cases += [Case("unipc", 2, {"order": order, "lower_order_final": True}) for order in (1, 2, 3)]
    for predictor in (1, 2, 3):
        for corrector in (1, 2, 3, 4):
            options = {"tau": 0.0, "predictor_order": predictor, "corrector_order": corrector}
            cases.append(Case("sa_solver", min(predictor + 1, corrector), options))
    for order in (1, 2, 3):
        options = {"tau": 0.0, "predict_x0": False, "predictor_order": order, "corrector_order": order}
        cases.append(Case("sa_solver", order, options))
    cases += [Case("lms", order, {"order": order}) for order in (1, 2, 3, 4)]
    # coefficients of an even grid: on a grid that is only smooth, order 2 at most
    cases += [Case("ipndm", min(order, 2), {"order": order}) for order in (1, 2, 3, 4)]
    cases += [
        Case("plms", 2, {"warm": False}),
        Case("gradient_estimation", 1, {"gamma": 1.0}),
        Case("gradient_estimation", 2, {"gamma": 1.5}),  # Adams-Bashforth
        Case("dpmpp_2m", 2, {"solver": "heun"}),
        Case("dpmpp_sde", 2, {"eta": 0.0, "r": 0.3}),
        # the calls that are left over after the groups of three make the last steps
        Case("dpm_fast", 2, {}, tuple(n + 1 for n in THIRDS)),
        Case("dpm_fast", 3, {}, tuple(n + 2 for n in THIRDS)),
    ]
    in_vp = {"ddim": 1, "euler": 1, "heun": 2, "plms": 2, "dpmpp_2m": 2, "dpmpp_3m": 3, "unipc": 3, "deis": 3}
    cases += [Case(name, order, {}, setting="vp") for name, order in in_vp.items()]
    # This path starts at sigma / alpha 19, where x0 moves already: the first-order first step caps multistep at 2.
    in_flow = {"flow_euler": 1, "ddim": 1, "flow_heun": 2, "heun": 2, "dpm2": 2, "dpmpp_2m": 2, "res_multistep": 2}
    in_flow |= {"dpmpp_3m": 2, "deis": 2, "lms": 2}
    return cases + [Case(name, order, {}, setting="flow") for name, order in in_flow.items()]


def weak_cases() -> list[Case]:
    """Stochastic samplers with their noise on: the order of the variance on a Gaussian."""
    claims: list[tuple[str, int, dict[str, Any]]] = [
        ("ddpm", 1, {}),
        ("euler_a", 1, {}),
        ("ddim", 1, {"eta": 1.0}),
        ("dpm2_a", 2, {}),
        ("dpmpp_2s_a", 2, {}),
        ("dpmpp_sde", 2, {}),
        ("dpmpp_2m_sde", 2, {}),
        ("dpmpp_3m_sde", 2, {}),  # three with the noise off: the history of a noisy path is rough
        ("dpm_multistep", 2, {"algorithm": "sde-dpmsolver"}),
        ("sa_solver", 2, {}),
        ("sa_solver", 2, {"tau_range": (0.0, 1.0)}),
        ("er_sde", 1, {"order": 1}),
        ("er_sde", 2, {"order": 2}),
        ("er_sde", 2, {}),
        ("edm_stochastic", 2, {"s_noise": 1.0}),
        ("restart", 2, {}),
        ("res_multistep", 1, {"eta": 1.0}),  # two with the noise off: the last slope is that of another noise
    ]
    return [Case(name, order, options) for name, order, options in claims]
