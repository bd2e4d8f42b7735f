"""Adaptive step size: a run whose table is discovered on the way (DPM-Solver-12 and -23 with a PID controller).

It is a type of its own: it needs a budget and has no number of calls before it has run. What it returns is a plan
again, that of the accepted steps, and the steps that were rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pellucid.core import schedule as schedules
from pellucid.core import target as targets
from pellucid.core.batch import Denoiser, Prediction
from pellucid.core.errors import Cancelled, PlanError, rule
from pellucid.core.grid import Path
from pellucid.core.loop import starting_point
from pellucid.core.noise import NoiseSource
from pellucid.core.plan import ANCHOR, P0, P1, Draw, Form, Plan, Row, Span, Z, row, seal
from pellucid.core.samplers.dpm import single_step
from pellucid.core.samplers.steps import S_NOISE, ancestral, check_eta, first_order_eps, span
from pellucid.core.schedule import Level, Schedule, in_frame
from pellucid.core.table import mix


@dataclass(frozen=True)
class RejectedStep:
    """A step that was tried and not taken."""

    start: Level
    end: Level
    error: float


@dataclass(frozen=True)
class AdaptiveResult:
    """x at the end, the plan that was discovered, what was rejected, and the calls that it all cost."""

    x: Tensor
    plan: Plan
    rejected: tuple[RejectedStep, ...]
    calls: int
    accepted: int


@dataclass
class _Controller:
    """A PID controller of the step in λ (Söderlind 2003), with the limiter of k-diffusion."""

    h: float
    order: float
    pcoeff: float = 0.0
    icoeff: float = 1.0
    dcoeff: float = 0.0
    accept_safety: float = 0.81
    past: list[float] = field(default_factory=list)

    def propose(self, error: float) -> bool:
        inverse = 1.0 / (error + 1e-8)
        if not self.past:
            self.past = [inverse] * 3
        self.past[0] = inverse
        powers = (
            (self.pcoeff + self.icoeff + self.dcoeff) / self.order,
            -(self.pcoeff + 2 * self.dcoeff) / self.order,
            self.dcoeff / self.order,
        )
        factor = math.prod(e**p for e, p in zip(self.past, powers, strict=True))
        factor = 1.0 + math.atan(factor - 1.0)
        accepted = factor >= self.accept_safety
        if accepted:
            self.past = [self.past[0], self.past[0], self.past[1]]
        self.h *= factor
        return accepted


@torch.no_grad()
def run_adaptive(
    denoiser: Denoiser,
    x: Tensor | None = None,
    *,
    budget: int,
    schedule: str | Schedule = "scaled_linear",
    target: str | None = None,
    shape: Sequence[int] | None = None,
    seeds: int | Sequence[int] = 0,
    order: int = 3,
    rtol: float = 0.05,
    atol: float = 0.0078,
    h_init: float = 0.05,
    eta: float = 0.0,
    s_noise: float = 1.0,
    sigma_min: float | None = None,
    sigma_max: float | None = None,
    noise: NoiseSource | None = None,
    cancelled: Callable[[], bool] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> AdaptiveResult:
    """k-diffusion's dpm_adaptive: from the most noise to the least, steps as long as the tolerances allow.

    `budget` is the largest number of model calls; a run that would need more is refused with what it reached. The
    images of a batch share their steps, so that an image depends on its batch here, unlike in `run`.
    """
    _check(budget, order, rtol, atol, h_init, eta)
    curve = schedules.make(schedule)
    kind = curve.carries[0] if target is None else targets.named(target)
    if kind not in curve.carries:
        raise PlanError(rule("target", f"one that schedule {curve.name} carries", target), "target-schedule")
    own = getattr(denoiser, "schedule", None)
    if isinstance(own, Schedule) and schedules.to_dict(own) != schedules.to_dict(curve):
        raise PlanError(rule("schedule", f"the denoiser's, {own.name}", curve.name), "plan-model")
    if getattr(denoiser, "target", kind) != kind:
        raise PlanError(rule("target", f"the denoiser's, {denoiser.target}", kind), "plan-model")  # type: ignore[attr-defined]
    frame: schedules.Frame = "flow" if curve.frame == "flow" else "ve"
    least, most = curve.sigma_range
    most = 1.0 - least if frame == "flow" else most  # a flow's sigma 1 is pure noise, where eps says nothing
    asked = (most if sigma_max is None else sigma_max, least if sigma_min is None else sigma_min)
    ends = [float(r) for r in curve.ratio_of_sigma(np.array(asked))]
    if not 0 < ends[1] < ends[0] < math.inf:
        advice = "Under zero terminal SNR, and at a flow's sigma 1, give a smaller sigma_max."
        raise PlanError(rule("sigma_max, sigma_min", "finite, with 0 < sigma_min < sigma_max", asked, advice), "sigmas")
    path = Path((), frame, curve, lambda ratio: float(curve.time_at(ratio)))
    start, goal = in_frame(ends[0], frame), in_frame(ends[1], frame)
    x, source = starting_point(x, start.sigma, shape, seeds, noise, dtype, device)
    walk = _Walk(path, denoiser, source, order, rtol, atol, eta, s_noise, budget, cancelled)
    x = walk.go(x, start, goal, _Controller(h_init, 1.5 if eta else float(order)))
    plan = seal(
        Plan(
            name="dpm_adaptive",
            rows=tuple(walk.rows),
            basis="eps",
            start=start,
            end=goal,
            frame=frame,
            initial_scale=start.sigma,
            clock="sigma",
            target=kind,
            schedule=schedules.to_dict(curve),
            grid={"name": "adaptive", "steps": walk.accepted},
            options={"order": order, "rtol": rtol, "atol": atol, "eta": eta},
            declared=S_NOISE if s_noise != 1.0 and eta else "",
        )
    )
    return AdaptiveResult(x, plan, tuple(walk.rejected), walk.calls, walk.accepted)


def _check(budget: int, order: int, rtol: float, atol: float, h_init: float, eta: float) -> None:
    if isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget <= 100_000:
        raise PlanError(rule("budget", "a whole number from 1 to 100000", budget), "budget")
    if order not in (2, 3):
        raise PlanError(rule("order", "2 or 3", order), "order")
    if not all(math.isfinite(v) and v > 0 for v in (rtol, atol, h_init)):
        raise PlanError(rule("rtol, atol, h_init", "positive", (rtol, atol, h_init)), "tolerance")
    check_eta(eta)


@dataclass
class _Walk:
    """The walk from noise to data, step by step, with what it has found so far."""

    path: Path
    denoiser: Denoiser
    source: NoiseSource
    order: int
    rtol: float
    atol: float
    eta: float
    s_noise: float
    budget: int
    cancelled: Callable[[], bool] | None
    rows: list[Row] = field(default_factory=list)
    rejected: list[RejectedStep] = field(default_factory=list)
    calls: int = 0
    accepted: int = 0

    def go(self, x: Tensor, here: Level, goal: Level, pid: _Controller) -> Tensor:
        before, first = x, None
        while here.lam < goal.lam - 1e-5:
            if self.cancelled is not None and self.cancelled():
                raise Cancelled(f"stopped after {self.calls} calls")
            lam = min(goal.lam, here.lam + pid.h)
            lam = goal.lam if goal.lam - lam < 1e-5 else lam  # no tiny step is left for the end
            there = goal if lam == goal.lam else self.path.level(math.exp(-lam))
            down, _ = ancestral(here, there, self.eta)
            aim = self.path.level(max(down.ratio, goal.ratio))
            steps = single_step(self.path, here, aim, self.order, self.path.time_at(here.ratio))
            high, low, first = self.attempt(x, steps, here, aim, first)
            delta = torch.maximum(
                torch.tensor(self.atol, dtype=x.dtype), self.rtol * torch.maximum(low.abs(), before.abs())
            )
            error = float(torch.linalg.norm((low - high) / delta) / x.numel() ** 0.5)
            if not math.isfinite(error):
                raise PlanError(
                    f"the denoiser must return finite numbers; got an error of {error} at {here}.",
                    "not-finite",
                )
            if not pid.propose(error):
                self.rejected.append(RejectedStep(here, there, error))
                continue
            before, first = low, None
            x = self.accept(high, steps, here, aim, there)
            here = there
        return x

    def attempt(
        self, x: Tensor, steps: list[Row], here: Level, aim: Level, first: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The two estimates of one step. The first call is kept when a step is tried again from the same x."""
        history: list[Tensor] = []
        state, anchor = x, x
        # DPM-Solver-2 with its middle at one third is made from the first two calls of DPM-Solver-3
        low_form = first_order_eps(here, aim, ANCHOR, P0 if self.order == 2 else P1 + (P0 - P1) * 1.5)
        low, opening = x, first
        for k, step in enumerate(steps):
            if k == 0 and first is not None:
                eps = first
            else:
                eps = self.ask(state, step)
                opening = eps if k == 0 else opening
            registers = [state, anchor, eps, *history, *([None] * (3 - len(history))), None, None]
            if k == self.order - 2:
                low = mix(low_form.weights(), registers)
            state = mix(step.x, registers)
            history = [eps, *history]
        assert opening is not None
        return state, low, opening

    def ask(self, x: Tensor, step: Row) -> Tensor:
        if self.calls >= self.budget:
            raise PlanError(
                rule(
                    "budget",
                    "enough for the tolerances",
                    self.budget,
                    f"Reached λ {step.level.lam:.3f} in {self.accepted} steps.",
                ),
                "budget",
            )
        self.calls += 1
        found = self.denoiser(x, step.level, step.time)
        x0 = found.x0 if isinstance(found, Prediction) else found
        c_x, c_0 = targets.from_x0("eps", step.level)
        return x * c_x + x0.to(x.dtype) * c_0

    def accept(self, high: Tensor, steps: list[Row], here: Level, aim: Level, there: Level) -> Tensor:
        """Takes the step: noise up from where it aimed, and its rows go into the plan."""
        lift = there.alpha / aim.alpha
        up = there.alpha * math.sqrt(max(there.ratio**2 - aim.ratio**2, 0.0)) * self.s_noise
        last = steps[-1]
        form = Form({r: w * lift for r, w in last.x}) + Z * up
        self.rows += [*steps[:-1], row(last.time, last.level, form, span=span(here, there))]
        self.accepted += 1
        if up == 0.0:
            return high * lift if lift != 1.0 else high
        draw = Draw(self.accepted - 1, 0, 1.0)  # intervals are numbered as they are found, as in the sealed plan
        z = self.source.step((draw,), Span(here.ratio, there.ratio), high, range(len(high)))
        return high * lift + z * up
