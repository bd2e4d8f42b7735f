"""One-step and Runge-Kutta samplers along the straight lines of the ve and flow frames, where dx/dσ = (x − x0)/σ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from pellucid.core.errors import PlanError, rule
from pellucid.core.grid import Leg, Path, karras
from pellucid.core.plan import ANCHOR, P0, P1, P2, Form, Row, Span, U, X, Z, row
from pellucid.core.samplers.registry import Draft, sampler
from pellucid.core.samplers.steps import (
    S_NOISE,
    ancestral,
    check_eta,
    check_order,
    combine,
    first_order,
    integrate,
    line_basis,
    span,
)
from pellucid.core.schedule import Level

MISSING = "the weights of calls that were not made are dropped (scheduling_lms_discrete.py, `step`)"
_CHURNED = "s_noise other than 1 adds more or less noise than churn removed"


class _Churn:
    """EDM's churn: before a call, noise is raised from sigma to sigma·(1 + gamma) (Karras et al. 2022, alg. 2)."""

    def __init__(self, path: Path, amount: float, low: float, high: float, s_noise: float) -> None:
        if not (math.isfinite(amount) and amount >= 0 and math.isfinite(s_noise) and s_noise >= 0):
            raise PlanError(rule("s_churn, s_noise", "finite and not negative", (amount, s_noise)), "churn")
        if path.frame != "ve" and amount > 0:
            raise PlanError(
                rule("s_churn", "0 where x does not keep its signal (flow, zero terminal SNR)", amount, "Use euler_a."),
                "churn",
            )
        self.path, self.low, self.high, self.s_noise = path, low, high, s_noise
        self.gamma = min(amount / len(path.legs), math.sqrt(2.0) - 1.0)
        self.declared = _CHURNED if self.gamma > 0 and s_noise != 1.0 else ""

    def raised(self, leg: Leg, visit: int) -> tuple[float, Level, float, Span | None]:
        """(time, level, noise, its address) of the call after churn."""
        a = leg.start
        if self.gamma == 0 or not self.low <= a.ratio <= self.high:
            return leg.time, a, 0.0, None
        up = a.ratio * (1.0 + self.gamma)
        noise = a.alpha * math.sqrt(up**2 - a.ratio**2) * self.s_noise
        return self.path.time_at(up), Level(a.alpha, a.alpha * up), noise, Span(up, a.ratio, visit + 1)


def _time_after(path: Path, i: int, level: Level) -> float:
    """The network's time at a level that is the start of the next leg, or is between legs."""
    if i + 1 < len(path.legs) and path.legs[i + 1].start == level:
        return path.legs[i + 1].time
    return path.time_at(level.ratio)


@sampler(
    name="euler",
    title="Euler",
    family="euler",
    order=1,
    deterministic=True,
    suits="any model, the plain reference; the same step as DDIM",
    paper="Karras et al. 2022, Elucidating the Design Space, alg. 2 without correction",
    frame="line",
    peer="k",
    aliases=("EulerDiscreteScheduler", "k_euler", "sample_euler", "EDMEulerScheduler"),
)
def euler(
    path: Path,
    *,
    s_churn: float = 0.0,
    s_tmin: float = 0.0,
    s_tmax: float = math.inf,
    s_noise: float = 1.0,
) -> Draft:
    """x moves along its slope to the next sigma."""
    churn = _Churn(path, s_churn, s_tmin, s_tmax, s_noise)
    rows = []
    for i, leg in enumerate(path.legs):
        time, level, noise, address = churn.raised(leg, i)
        rows.append(row(time, level, first_order(level, leg.end), pre_noise=noise, pre_span=address))
    return Draft(rows, declared=churn.declared)


@sampler(
    name="euler_a",
    title="Euler a",
    family="euler",
    order=1,
    deterministic=False,
    suits="creative variety; does not converge to one image as steps grow",
    paper="Karras et al. 2022, with the ancestral split of Song et al. 2020",
    frame="line",
    peer="k",
    aliases=(
        "euler_ancestral",
        "EulerAncestralDiscreteScheduler",
        "k_euler_a",
        "sample_euler_ancestral",
        "Euler ancestral",
    ),
)
def euler_a(path: Path, *, eta: float = 1.0, s_noise: float = 1.0) -> Draft:
    """Euler to a level below the next one, then noise up to it."""
    check_eta(eta)
    rows = []
    for leg in path.legs:
        down, up = ancestral(leg.start, leg.end, eta)
        moved = first_order(leg.start, down) + Z * (up * s_noise)
        rows.append(row(leg.time, leg.start, moved, span=span(leg.start, leg.end)))
    return Draft(rows, declared=S_NOISE if s_noise != 1.0 else "")


def _heun_leg(path: Path, i: int, leg: Leg, start: tuple[float, Level, float, Span | None]) -> Iterator[Row]:
    """Two rows: to the end along the slope here, then from where the leg began along the mean slope."""
    time, level, noise, address = start
    step = leg.end.sigma - level.sigma
    if leg.end.sigma == 0.0:
        yield row(time, level, X + P0 * step, pre_noise=noise, pre_span=address)
        return
    yield row(time, level, X + P0 * step, X, pre_noise=noise, pre_span=address)
    mean = ANCHOR + (P0 + P1) * (step / 2)
    yield row(_time_after(path, i, leg.end), leg.end, mean)


@sampler(
    name="heun",
    title="Heun",
    family="runge-kutta",
    order=2,
    deterministic=True,
    suits="accuracy at 15 or more steps; two calls per step",
    paper="Karras et al. 2022, Elucidating the Design Space, alg. 1",
    frame="line",
    straight=True,
    calls=2,
    peer="k",
    aliases=("HeunDiscreteScheduler", "k_heun", "sample_heun"),
)
def heun(path: Path) -> Draft:
    """The trapezoid rule in sigma; a last step to 0 is Euler's."""
    rows = [r for i, leg in enumerate(path.legs) for r in _heun_leg(path, i, leg, (leg.time, leg.start, 0.0, None))]
    return Draft(rows, line_basis(path))


@sampler(
    name="edm_stochastic",
    title="EDM stochastic",
    family="runge-kutta",
    order=2,
    deterministic=False,
    suits="EDM-trained pixel models, where churn mends errors; tune s_churn",
    paper="Karras et al. 2022, Elucidating the Design Space, alg. 2",
    frame="line",
    straight=True,
    calls=2,
    peer="none",
    aliases=("edm", "heun_churn", "churn"),
)
def edm_stochastic(
    path: Path,
    *,
    s_churn: float = 40.0,
    s_tmin: float = 0.05,
    s_tmax: float = 50.0,
    s_noise: float = 1.003,
) -> Draft:
    """Heun with churn."""
    churn = _Churn(path, s_churn, s_tmin, s_tmax, s_noise)
    rows = [r for i, leg in enumerate(path.legs) for r in _heun_leg(path, i, leg, churn.raised(leg, i))]
    return Draft(rows, line_basis(path), declared=churn.declared)


@sampler(
    name="heunpp2",
    title="Heun++ 2",
    family="runge-kutta",
    order=1,
    deterministic=True,
    suits="ComfyUI users of heunpp2; looks up to two levels ahead",
    paper="after Karras et al. 2022; weights as practised in ComfyUI",
    frame="line",
    straight=True,
    calls=3,
    peer="none",
    aliases=("heun++", "heunpp"),
)
def heunpp2(path: Path) -> Draft:
    """Slopes here and one and two levels ahead, weighted by sigma against the first sigma."""
    legs, rows = path.legs, []
    top = legs[0].start.sigma
    for i, leg in enumerate(legs):
        step = leg.end.sigma - leg.start.sigma
        left = len(legs) - i
        if left == 1 or leg.end.sigma == 0.0:
            rows.append(row(leg.time, leg.start, X + P0 * step))
            continue
        rows.append(row(leg.time, leg.start, X + P0 * step, X))
        if left == 2:
            w2 = leg.end.sigma / (2 * top)
            rows.append(row(legs[i + 1].time, leg.end, ANCHOR + (P1 * (1 - w2) + P0 * w2) * step))
            continue
        ahead = legs[i + 1].end
        rows.append(row(legs[i + 1].time, leg.end, X + P0 * (ahead.sigma - leg.end.sigma)))
        w2, w3 = leg.end.sigma / (3 * top), ahead.sigma / (3 * top)
        mean = P2 * (1 - w2 - w3) + P1 * w2 + P0 * w3
        rows.append(row(legs[i + 2].time, ahead, ANCHOR + mean * step))
    return Draft(rows, line_basis(path))


@sampler(
    name="dpm2",
    title="DPM2",
    family="runge-kutta",
    order=2,
    deterministic=True,
    suits="accuracy at 15 or more steps; the midpoint rule, two calls per step",
    paper="Lu et al. 2022, DPM-Solver-2, as in k-diffusion",
    frame="line",
    straight=True,
    calls=2,
    peer="k",
    aliases=("dpm_2", "KDPM2DiscreteScheduler", "k_dpm_2", "sample_dpm_2"),
)
def dpm2(path: Path) -> Draft:
    """The slope at the middle in λ carries the whole step."""
    rows = []
    for leg in path.legs:
        if leg.end.sigma == 0.0:
            rows.append(row(leg.time, leg.start, X + P0 * (leg.end.sigma - leg.start.sigma)))
            continue
        rows += _midpoint(path, leg, leg.end)
    return Draft(rows, line_basis(path))


def _midpoint(path: Path, leg: Leg, goal: Level) -> list[Row]:
    middle = path.between(leg.start, goal, 0.5)
    whole = ANCHOR + P0 * (goal.sigma - leg.start.sigma)
    return [
        row(leg.time, leg.start, X + P0 * (middle.sigma - leg.start.sigma), X),
        row(path.time_at(middle.ratio), middle, whole),
    ]


@sampler(
    name="dpm2_a",
    title="DPM2 a",
    family="runge-kutta",
    order=2,
    deterministic=False,
    suits="variety with a second-order step; two calls per step",
    paper="Lu et al. 2022, with the ancestral split, as in k-diffusion",
    frame="line",
    straight=True,
    calls=2,
    peer="k",
    aliases=("dpm_2_ancestral", "KDPM2AncestralDiscreteScheduler", "k_dpm_2_a", "sample_dpm_2_ancestral"),
)
def dpm2_a(path: Path, *, eta: float = 1.0, s_noise: float = 1.0) -> Draft:
    """The midpoint rule to a level below the next one, then noise up to it."""
    check_eta(eta)
    rows = []
    for leg in path.legs:
        down, up = ancestral(leg.start, leg.end, eta)
        if down.sigma == 0.0:
            lift = leg.end.alpha / path.level(0.0).alpha
            clean = (X + P0 * -leg.start.sigma) * lift + Z * (up * s_noise)
            rows.append(row(leg.time, leg.start, clean, span=span(leg.start, leg.end)))
            continue
        goal = path.level(down.ratio)
        lift = leg.end.alpha / goal.alpha
        pair = _midpoint(path, leg, goal)
        scaled = Form({r: w * lift for r, w in pair[1].x}) + Z * (up * s_noise)
        rows += [pair[0], row(pair[1].time, pair[1].level, scaled, span=span(leg.start, leg.end))]
    return Draft(rows, line_basis(path), declared=S_NOISE if s_noise != 1.0 else "")


@sampler(
    name="lms",
    title="LMS",
    family="multistep",
    order=4,
    deterministic=True,
    suits="smooth models at 20 or more steps; unstable on coarse grids",
    paper="Adams-Bashforth in sigma, as in k-diffusion",
    frame="line",
    straight=True,
    peer="k",
    aliases=("LMSDiscreteScheduler", "k_lms", "sample_lms"),
)
def lms(path: Path, *, order: int = 4, earlier: tuple[float, ...] = ()) -> Draft:
    """The slopes of the last calls, interpolated in sigma and integrated exactly.

    `earlier` are sigmas before the first call: diffusers interpolates through them too, and drops their slopes.
    """
    check_order(order, 4)
    sigmas, rows = [*earlier, *(leg.start.sigma for leg in path.legs)], []
    for i, leg in enumerate(path.legs):
        nodes = sigmas[: len(earlier) + i + 1][: -order - 1 : -1]
        weights = integrate(nodes, leg.start.sigma, leg.end.sigma)[: i + 1]
        rows.append(row(leg.time, leg.start, X + combine(weights)))
    return Draft(rows, line_basis(path), declared=MISSING if earlier else "")


@sampler(
    name="gradient_estimation",
    title="Gradient estimation",
    family="multistep",
    order=1,
    deterministic=True,
    suits="few steps on guided models; gamma 2 corrects the slope with the last one",
    paper="Permenter and Yuan 2023, Interpreting and Improving Diffusion Models",
    frame="line",
    straight=True,
    peer="none",
    aliases=("ge",),
)
def gradient_estimation(path: Path, *, gamma: float = 2.0) -> Draft:
    """Euler along gamma·slope + (1 − gamma)·last slope; gamma 1 is Euler."""
    rows = []
    for i, leg in enumerate(path.legs):
        slope = P0 if i == 0 or leg.end.sigma == 0.0 else P0 * gamma + P1 * (1.0 - gamma)
        rows.append(row(leg.time, leg.start, X + slope * (leg.end.sigma - leg.start.sigma)))
    return Draft(rows, line_basis(path))


@sampler(
    name="restart",
    title="Restart",
    family="runge-kutta",
    order=2,
    deterministic=False,
    suits="quality at 30 or more calls: goes back up to contract errors, then down again",
    paper="Xu et al. 2023, Restart Sampling",
    frame="line",
    straight=True,
    calls=2,
    peer="none",
    aliases=("restart_sampler",),
)
def restart(path: Path, *, low: float = 0.1, high: float = 2.0, times: int = 1, restart_steps: int = 0) -> Draft:
    """Heun; where the path first comes to sigma / alpha `low` (or nearest above), back up to `high`, `times` times."""
    if not 0 < low < high or not isinstance(times, int) or not 0 <= times <= 100:
        raise PlanError(rule("low, high, times", "0 < low < high, times from 0 to 100", (low, high, times)), "restart")
    if not isinstance(restart_steps, int) or not 0 <= restart_steps <= 1000:
        raise PlanError(rule("restart_steps", "a whole number from 0 to 1000", restart_steps), "restart")
    rows: list[Row] = []
    legs = path.legs
    inner = restart_steps or max(3, len(legs) // 4)
    noisy = [i for i, leg in enumerate(legs) if 0.0 < leg.end.ratio < high]
    turn = next((i for i in noisy if legs[i].end.ratio <= low), noisy[-1] if noisy else None)
    for i, leg in enumerate(legs):
        back = i == turn and times > 0
        rows += _climb(path, i, leg, high, 0) if back else _heun_leg(path, i, leg, (leg.time, leg.start, 0.0, None))
        if not back:
            continue
        for visit in range(1, times + 1):
            rungs = karras(inner + 1, leg.end.ratio, high, 7.0)
            knots = [*(path.level(float(r)) for r in rungs[:-1]), leg.end]
            for k, (a, b) in enumerate(pairwise(knots)):
                again = Leg(path.time_at(a.ratio), a, b)
                up = k == inner - 1 and visit < times
                rows += (
                    _climb(path, i, again, high, visit) if up else _heun_leg(path, i, again, (again.time, a, 0.0, None))
                )
    return Draft(rows, line_basis(path))


def _climb(path: Path, i: int, leg: Leg, high: float, visit: int) -> list[Row]:
    """A Heun leg whose last row also adds the noise that leads from its end back up to `high`."""
    first, second = _heun_leg(path, i, leg, (leg.time, leg.start, 0.0, None))
    top = path.level(high)
    noise = top.alpha * math.sqrt(high**2 - leg.end.ratio**2)
    moved = Form({r: w * top.alpha / leg.end.alpha for r, w in second.x}) + Z * noise
    return [first, row(second.time, second.level, moved, span=Span(high, leg.end.ratio, visit))]


@sampler(
    name="euler_cfgpp",
    title="Euler CFG++",
    family="euler",
    order=1,
    deterministic=True,
    suits="guided models at low scales (0.5 to 2): re-noises with the unconditional prediction",
    paper="Chung et al. 2024, CFG++",
    frame="line",
    peer="none",
    aliases=("euler_cfg_pp", "Euler CFG pp"),
)
def euler_cfgpp(path: Path) -> Draft:
    """x0 of the guided prediction, noise direction of the unconditional one."""
    rows = []
    for leg in path.legs:
        a, b = leg.start, leg.end
        rows.append(row(leg.time, a, P0 * b.alpha + (X - U * a.alpha) * (b.sigma / a.sigma)))
    return Draft(rows)
