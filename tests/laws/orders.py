"""How the order of a sampler is measured: its error on an exact denoiser, against an independent reference.

The oracle is a smooth Gaussian mixture. The reference is classical Runge-Kutta of order 4 on dx/ds = x − D(x, e^s),
s = log sigma, written here and shared with no sampler. Both go from sigma 80 to sigma 0.1 on a grid that is even in
λ, so that a run of N steps and one of 2N differ in the step alone. A multistep method starts with a first-order step;
at sigma 80 the denoiser hardly depends on x, so that this start costs little, as it does in practice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.core.compile import compile_plan
from pellucid.core.grid import Grid
from pellucid.core.loop import run
from pellucid.core.oracle import Mixture, smooth
from pellucid.core.schedule import EDM, Flow, Level, Schedule

TOP, BOTTOM = 80.0, 0.1
COUNT = 16


@dataclass(frozen=True)
class Setup:
    """One sampler with its options; `claimed` is what the method's formula promises."""

    sampler: str
    claimed: float
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    flow: bool = False

    def __str__(self) -> str:
        words = [f"{k}={v}" for k, v in self.options.items()]
        return " ".join([self.sampler, *words, *(["on flow"] if self.flow else [])])


SETUPS = (
    Setup("ddim", 1),
    Setup("euler", 1),
    Setup("flow_euler", 1, flow=True),
    Setup("euler_cfgpp", 1),
    Setup("gradient_estimation", 1),
    Setup("heunpp2", 1),
    Setup("heun", 2),
    Setup("flow_heun", 2, flow=True),
    Setup("dpm2", 2),
    Setup("dpmpp_2m_cfgpp", 2),
    *(Setup("lms", k, {"order": k}) for k in (1, 2, 3, 4)),
    *(
        Setup("dpm_multistep", k, {"order": k, "algorithm": a, "solver": s})
        for a in ("dpmsolver++", "dpmsolver")
        for k in (1, 2, 3)
        for s in ("midpoint", "heun")
    ),
    Setup("dpmpp_2m", 2),
    Setup("dpmpp_3m", 3),
    *(
        Setup("dpm_singlestep", k, {"order": k, "algorithm": a, "solver": s})
        for a in ("dpmsolver++", "dpmsolver")
        for k in (1, 2, 3)
        for s in ("midpoint", "heun")
    ),
    Setup("dpm_fast", 2),
    *(
        Setup("unipc", k + 1, {"order": k, "variant": b, "predict_x0": x})
        for k in (1, 2, 3)
        for b in ("bh1", "bh2")
        for x in (True, False)
    ),
    *(Setup("deis", k, {"order": k}) for k in (1, 2, 3)),
    Setup("res_multistep", 2),
    *(
        Setup("sa_solver", min(p, c), {"tau": 0.0, "predictor_order": p, "corrector_order": c})
        for p, c in ((1, 1), (2, 2), (3, 3))
    ),
    Setup("plms", 2),
    Setup("pndm", 2),
    *(Setup("ipndm", min(k, 2), {"order": k}) for k in (1, 2, 3, 4)),
)


def schedule_of(setup: Setup) -> tuple[Schedule, str]:
    if setup.flow:
        return Flow(sigma_min=BOTTOM / (1 + BOTTOM)), "flow"
    return EDM(sigma_min=BOTTOM, sigma_max=TOP), "edm"


@cache
def problem() -> tuple[Mixture, Tensor, Tensor]:
    """(the oracle, x at sigma TOP in the ve frame, x at sigma BOTTOM by the reference)."""
    oracle = smooth()
    generator = torch.Generator().manual_seed(3)
    data = oracle.sample(COUNT, generator)
    start = data + TOP * torch.randn(data.shape, generator=generator, dtype=torch.float64)
    return oracle, start, runge_kutta_4(oracle, start, 3000)


def runge_kutta_4(oracle: Mixture, x: Tensor, steps: int) -> Tensor:
    """dx/ds = x − D(x, e^s) from log TOP to log BOTTOM."""

    def slope(value: Tensor, s: float) -> Tensor:
        return value - oracle(value, Level(1.0, math.exp(s)))

    s, h = math.log(TOP), (math.log(BOTTOM) - math.log(TOP)) / steps
    for _ in range(steps):
        k1 = slope(x, s)
        k2 = slope(x + h / 2 * k1, s + h / 2)
        k3 = slope(x + h / 2 * k2, s + h / 2)
        k4 = slope(x + h * k3, s + h)
        x, s = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), s + h
    return x


def error(setup: Setup, steps: int) -> float:
    """The relative error of a run of so many steps."""
    oracle, start, truth = problem()
    schedule, target = schedule_of(setup)
    if setup.flow:
        ratios = TOP * (BOTTOM / TOP) ** (np.arange(steps) / steps)
        grid = Grid(sigmas=tuple(float(r / (1 + r)) for r in ratios), final="sigma_min")
    else:
        grid = Grid("exponential", final="sigma_min")
    count = None if setup.flow else steps
    plan = compile_plan(setup.sampler, schedule=schedule, target=target, grid=grid, steps=count, **setup.options)
    found = run(plan, oracle, start * plan.start.alpha)
    return float((found / plan.end.alpha - truth).norm() / truth.norm())


def measured_order(setup: Setup, few: int = 96, many: int = 192) -> float:
    """The slope of log error over log steps."""
    return math.log(error(setup, few) / error(setup, many)) / math.log(many / few)
