"""The DPM-Solver family: exponential integrators in λ, on x0 (DPM-Solver++) or on eps (DPM-Solver)."""

from __future__ import annotations

import math

from pellucid.core.errors import PlanError, rule
from pellucid.core.grid import Leg, Path
from pellucid.core.plan import ANCHOR, P0, P1, P2, Form, Row, U, X, Z, row
from pellucid.core.samplers.registry import Draft, sampler
from pellucid.core.samplers.steps import (
    S_NOISE,
    ancestral,
    check_choice,
    check_eta,
    check_order,
    first_order,
    first_order_eps,
    multistep_order,
    refuse_blind,
    span,
)
from pellucid.core.schedule import Level, Target

_ALGORITHMS = ("dpmsolver++", "dpmsolver", "sde-dpmsolver++", "sde-dpmsolver")
_EPS_SDE = "the eps form of the SDE solver adds noise to first order only"


def _phi_terms(h: float) -> tuple[float, float]:
    """The integrals of x0's slope and curvature over a step (Lu et al. 2022b, eq. 9): φ₂, and φ₂ / h − ½."""
    slope = math.expm1(-h) / h + 1.0
    return slope, slope / h - 0.5


def _slopes(r0: float, r1: float | None, m0: Form, m1: Form, m2: Form) -> tuple[Form, Form]:
    """The first and second derivative of the prediction, from the last two or three, in units of the step."""
    d10 = (m0 - m1) / r0
    if r1 is None:
        return d10, d10 * 0.0
    d11 = (m1 - m2) / r1
    return d10 + (d10 - d11) * (r0 / (r0 + r1)), (d10 - d11) * (2.0 / (r0 + r1))


def _solver_step(
    a: Level,
    b: Level,
    algorithm: str,
    start: Form,
    d0: Form,
    d1: Form | None = None,
    d2: Form | None = None,
    *,
    eta: float = 1.0,
    s_noise: float = 1.0,
    slope_rule: str = "midpoint",
    curvature_sign: float = 1.0,
) -> Form:
    """One step from a to b: `start` is x at a, d0 the prediction, d1 and d2 its derivatives over the step.

    `curvature_sign` −1 turns the ½ in d2's weight around, as diffusers' SDE solvers do.
    """
    if b.sigma == 0.0 and "++" in algorithm:
        return d0 * b.alpha  # all orders meet in x0 at a clean end
    if a.alpha == 0.0 and algorithm == "sde-dpmsolver++":
        return d0 * b.alpha + Z * (b.sigma * s_noise) if eta > 0 else first_order(a, b, start, d0)
    if "++" not in algorithm:
        refuse_blind(a)
    h = b.lam - a.lam
    if algorithm == "dpmsolver++":
        out = first_order(a, b, start, d0)
        scale, rate, noise = b.alpha, h, 0.0
    elif algorithm == "sde-dpmsolver++":
        fade = math.exp(-eta * h)
        out = start * (b.sigma / a.sigma * fade) + d0 * (-b.alpha * math.expm1(-(1 + eta) * h))
        scale, rate, noise = b.alpha, (1 + eta) * h, b.sigma * math.sqrt(-math.expm1(-2 * eta * h))
    else:
        twice = 2.0 if algorithm == "sde-dpmsolver" else 1.0
        out = start * (b.alpha / a.alpha) + d0 * (twice * (b.sigma - b.alpha * a.sigma / a.alpha))
        scale, rate = -twice * b.sigma, -h
        noise = b.sigma * math.sqrt(math.expm1(2 * h)) if twice == 2.0 else 0.0
    if d1 is not None:
        slope, curve = _phi_terms(rate) if rate > 0 else _eps_terms(h)
        if slope_rule == "midpoint" and d2 is None:
            slope = -0.5 * math.expm1(-rate) if rate > 0 else 0.5 * math.expm1(h)
        out = out + d1 * (scale * slope)
        if d2 is not None:
            out = out + d2 * (scale * (curve if rate < 0 else -(curve if curvature_sign > 0 else curve + 1.0)))
    return out + Z * (noise * s_noise)


def _eps_terms(h: float) -> tuple[float, float]:
    slope = math.expm1(h) / h - 1.0
    return slope, slope / h - 0.5


def _lam_ratio(legs: tuple[Leg, ...], i: int) -> tuple[float, float | None]:
    """The last one and the one before of the λ steps, over this one."""
    h = legs[i].h
    r0 = (legs[i].start.lam - legs[i - 1].start.lam) / h
    return r0, (legs[i - 1].start.lam - legs[i - 2].start.lam) / h if i >= 2 else None


@sampler(
    name="dpm_multistep",
    title="DPM-Solver multistep",
    family="dpm-solver",
    order=2,
    deterministic=True,
    suits="10 to 30 steps on guided models; algorithm and order are options",
    paper="Lu et al. 2022, DPM-Solver and DPM-Solver++",
    aliases=("DPMSolverMultistepScheduler", "EDMDPMSolverMultistepScheduler"),
)
def dpm_multistep(
    path: Path,
    *,
    order: int = 2,
    algorithm: str = "dpmsolver++",
    solver: str = "midpoint",
    eta: float = 1.0,
    s_noise: float = 1.0,
    lower_order_final: bool = False,
    euler_at_final: bool = False,
    curvature_scale: float = 1.0,
    curvature_sign: float = 1.0,
) -> Draft:
    """Order 1 to 3, deterministic or not, on x0 or on eps; the history costs no call.

    `curvature_scale` ½ takes half of the second derivative at order 3, as the published code of DPM-Solver,
    diffusers and k-diffusion do: their third order then measures 2.
    """
    check_order(order, 3)
    check_choice("algorithm", algorithm, _ALGORITHMS)
    check_choice("solver", solver, ("midpoint", "heun"))
    check_eta(eta)
    basis: Target = "x0" if "++" in algorithm else "eps"
    rows = []
    for i, leg in enumerate(path.legs):
        k = multistep_order(path.legs, i, order, lower_order_final)
        k = 1 if euler_at_final and i == len(path.legs) - 1 else k
        if k == 3 and algorithm == "sde-dpmsolver":
            raise PlanError(rule("order", "1 or 2 for sde-dpmsolver", order), "order")
        d1, d2 = None, None
        if k > 1:
            r0, r1 = _lam_ratio(path.legs, i)
            d1, d2 = _slopes(r0, r1 if k == 3 else None, P0, P1, P2)
            d2 = d2 * curvature_scale
        if k == 1 and leg.end.sigma == 0.0 and algorithm == "dpmsolver":
            form = first_order_eps(leg.start, leg.end)
        else:
            form = _solver_step(
                leg.start, leg.end, algorithm, X, P0, d1, d2 if k == 3 else None,
                eta=eta, s_noise=s_noise, slope_rule=solver, curvature_sign=curvature_sign,
            )  # fmt: skip
        rows.append(row(leg.time, leg.start, form, span=span(leg.start, leg.end)))
    declared = _EPS_SDE if algorithm == "sde-dpmsolver" else (S_NOISE if s_noise != 1.0 and "sde" in algorithm else "")
    return Draft(rows, basis, declared=declared)


@sampler(
    name="dpmpp_2m",
    title="DPM++ 2M",
    family="dpm-solver",
    order=2,
    deterministic=True,
    suits="the usual choice at 15 to 30 steps; the karras grid is for schedules that end at a sigma of about 14",
    paper="Lu et al. 2022, DPM-Solver++",
    aliases=("sample_dpmpp_2m", "k_dpmpp_2m", "dpm++2m"),
)
def dpmpp_2m(path: Path, *, solver: str = "midpoint", lower_order_final: bool = False) -> Draft:
    """Second order on x0 from the last two predictions."""
    return dpm_multistep(path, order=2, solver=solver, lower_order_final=lower_order_final)


@sampler(
    name="dpmpp_3m",
    title="DPM++ 3M",
    family="dpm-solver",
    order=3,
    deterministic=True,
    suits="unguided or weakly guided models at 8 to 20 steps",
    paper="Lu et al. 2022, DPM-Solver++",
    aliases=("dpm++3m",),
)
def dpmpp_3m(path: Path, *, lower_order_final: bool = False, curvature_scale: float = 1.0) -> Draft:
    """Third order on x0 from the last three predictions."""
    return dpm_multistep(path, order=3, lower_order_final=lower_order_final, curvature_scale=curvature_scale)


@sampler(
    name="dpmpp_2m_sde",
    title="DPM++ 2M SDE",
    family="dpm-solver",
    order=2,
    deterministic=False,
    suits="texture and variety at 20 to 50 steps",
    paper="Lu et al. 2022, DPM-Solver++, section on SDEs",
    clock="sigma",
    aliases=("sample_dpmpp_2m_sde", "k_dpmpp_2m_sde"),
)
def dpmpp_2m_sde(path: Path, *, eta: float = 1.0, s_noise: float = 1.0, solver: str = "midpoint") -> Draft:
    """Second order on x0 with eta of the reverse SDE's noise."""
    return dpm_multistep(path, order=2, algorithm="sde-dpmsolver++", solver=solver, eta=eta, s_noise=s_noise)


@sampler(
    name="dpmpp_3m_sde",
    title="DPM++ 3M SDE",
    family="dpm-solver",
    order=3,
    deterministic=False,
    suits="texture and variety at 30 or more steps, best on the exponential grid",
    paper="Lu et al. 2022, DPM-Solver++; third order by Crowson",
    clock="sigma",
    aliases=("sample_dpmpp_3m_sde", "k_dpmpp_3m_sde"),
)
def dpmpp_3m_sde(
    path: Path,
    *,
    eta: float = 1.0,
    s_noise: float = 1.0,
    lower_order_final: bool = False,
    curvature_scale: float = 1.0,
    curvature_sign: float = 1.0,
) -> Draft:
    """Third order on x0 with eta of the reverse SDE's noise."""
    return dpm_multistep(
        path,
        order=3,
        algorithm="sde-dpmsolver++",
        solver="heun",
        eta=eta,
        s_noise=s_noise,
        lower_order_final=lower_order_final,
        curvature_scale=curvature_scale,
        curvature_sign=curvature_sign,
    )


@sampler(
    name="dpm_singlestep",
    title="DPM-Solver singlestep",
    family="dpm-solver",
    order=2,
    deterministic=True,
    suits="unguided models; every grid point is one call, legs are grouped by order",
    paper="Lu et al. 2022, DPM-Solver and DPM-Solver++",
    aliases=("DPMSolverSinglestepScheduler", "dpmpp_2s", "dpm++2s"),
)
def dpm_singlestep(
    path: Path,
    *,
    order: int = 2,
    algorithm: str = "dpmsolver++",
    solver: str = "midpoint",
    orders: tuple[int, ...] | None = None,
    skipped: int = 0,
    lower_order_final: bool = False,
    curvature_sign: float = 1.0,
) -> Draft:
    """Groups of `order` calls: each call of a group steps again from where the group began, at a higher order.

    A run that `skipped` legs keeps the orders of the whole run, as diffusers does, as far as it has outputs for them.
    """
    check_order(order, 3)
    check_choice("algorithm", algorithm, ("dpmsolver++", "dpmsolver", "sde-dpmsolver++"))
    check_choice("solver", solver, ("midpoint", "heun"))
    legs = path.legs
    blind = legs[0].start.alpha == 0.0  # λ is infinite there: that leg is a group of its own
    clean = legs[-1].end.sigma == 0.0
    whole = _single_orders(skipped + len(legs) - blind, order, clean, lower_order_final)[skipped:]
    whole = tuple(min(k, i + 1) for i, k in enumerate(whole))
    ladder = orders or ((1, *whole) if blind else whole)
    if len(ladder) != len(legs) or any(not 1 <= k <= min(order, i + 1) for i, k in enumerate(ladder)):
        raise PlanError(
            rule("orders", f"{len(legs)} numbers from 1 to {order}, each within its calls", ladder), "order"
        )
    rows = []
    for i, (leg, k) in enumerate(zip(legs, ladder, strict=True)):
        start = legs[i - k + 1].start  # where this group of calls began
        h = leg.end.lam - start.lam if k > 1 else 1.0
        base = X if k == 1 else ANCHOR
        d0, d1, d2 = P0, None, None
        if k == 2:
            d0, d1 = P1, (P0 - P1) / ((leg.start.lam - start.lam) / h)
        if k == 3:
            r0, r1 = (leg.start.lam - start.lam) / h, (legs[i - 1].start.lam - start.lam) / h
            d0, early, late = P2, (P1 - P2) / r1, (P0 - P2) / r0
            d1, d2 = late, None
            if solver == "heun":
                d1, d2 = (early * r0 - late * r1) / (r0 - r1), (late - early) * (2.0 / (r0 - r1))
        rule_of_slope = "heun" if k == 3 else solver
        form = _solver_step(
            start,
            leg.end,
            algorithm,
            base,
            d0,
            d1,
            d2,
            slope_rule=rule_of_slope,
            curvature_sign=curvature_sign,
        )
        keep = X if k == 1 and order > 1 else None
        rows.append(row(leg.time, leg.start, form, keep, span=span(start, leg.end)))
    return Draft(rows, "x0" if "++" in algorithm else "eps")


def _single_orders(count: int, order: int, ends_clean: bool, lower_order_final: bool) -> tuple[int, ...]:
    """1 … order, over and over; a clean end is first order, and so is a last full group's end if asked."""
    ladder = [i % order + 1 for i in range(count)]
    if count and (ends_clean or (lower_order_final and ladder[-1] == order)):
        ladder[-1] = 1
    return tuple(ladder)


@sampler(
    name="dpmpp_2s_a",
    title="DPM++ 2S a",
    family="dpm-solver",
    order=2,
    deterministic=False,
    suits="variety with a second-order step; two calls per step",
    paper="Lu et al. 2022, DPM-Solver++(2S), with the ancestral split",
    frame="line",
    calls=2,
    peer="none",
    aliases=("dpmpp_2s_ancestral", "sample_dpmpp_2s_ancestral", "k_dpmpp_2s_a"),
)
def dpmpp_2s_a(path: Path, *, eta: float = 1.0, s_noise: float = 1.0) -> Draft:
    """x0 in the middle (in λ) carries the step to a level below the next one; then noise."""
    check_eta(eta)
    rows = []
    for leg in path.legs:
        down, up = ancestral(leg.start, leg.end, eta)
        noise, address = Z * (up * s_noise), span(leg.start, leg.end)
        if down.sigma == 0.0:
            rows.append(row(leg.time, leg.start, first_order(leg.start, down) + noise, span=address))
            continue
        middle = path.between(leg.start, down, 0.5)
        rows.append(row(leg.time, leg.start, first_order(leg.start, middle), X))
        rows.append(
            row(
                path.time_at(middle.ratio),
                middle,
                first_order(leg.start, down, ANCHOR, P0) + noise,
                span=address,
            )
        )
    return Draft(rows, declared=S_NOISE if s_noise != 1.0 else "")


@sampler(
    name="dpmpp_sde",
    title="DPM++ SDE",
    family="dpm-solver",
    order=2,
    deterministic=False,
    suits="texture at few steps (8 to 15); two calls per step",
    paper="Lu et al. 2022, DPM-Solver++, with overlapping noise as in k-diffusion",
    frame="line",
    calls=2,
    clock="sigma",
    peer="k",
    aliases=("sample_dpmpp_sde", "k_dpmpp_sde", "DPMSolverSDEScheduler"),
)
def dpmpp_sde(path: Path, *, eta: float = 1.0, s_noise: float = 1.0, r: float = 0.5) -> Draft:
    """A noisy step to the part r of the leg, then the whole leg with noise that continues the same path."""
    check_eta(eta)
    if not 0 < r < 1:
        raise PlanError(rule("r", "between 0 and 1", r), "option")
    rows = []
    for leg in path.legs:
        a, b = leg.start, leg.end
        if b.sigma == 0.0:
            rows.append(row(leg.time, a, first_order(a, b)))
            continue
        middle = path.between(a, b, r)
        down, up = ancestral(a, middle, eta)
        half = first_order(a, down) + Z * (up * s_noise)
        rows.append(row(leg.time, a, half, X, span=span(a, middle)))
        down, up = ancestral(a, b, eta)
        mixed = P1 * (1 - 1 / (2 * r)) + P0 * (1 / (2 * r))
        whole = first_order(a, down, ANCHOR, mixed) + Z * (up * s_noise)
        rows.append(row(path.time_at(middle.ratio), middle, whole, span=span(a, b)))
    return Draft(rows, declared=S_NOISE if s_noise != 1.0 else "")


def single_step(path: Path, a: Level, b: Level, order: int, time: float) -> list[Row]:
    """DPM-Solver-1, -2 or -3 from a to b on eps, with its own middle levels (Lu et al. 2022, alg. 1 and 2)."""
    refuse_blind(a)
    if order == 1:
        return [row(time, a, first_order_eps(a, b))]
    h = b.lam - a.lam
    r1 = 1 / 3 if order == 3 else 1 / 2
    s1 = path.between(a, b, r1)
    rows = [row(time, a, first_order_eps(a, s1), X)]
    if order == 2:
        step = first_order_eps(a, b, ANCHOR, P1 + (P0 - P1) / (2 * r1))
        return [*rows, row(path.time_at(s1.ratio), s1, step)]
    r2 = 2 / 3
    s2 = path.between(a, b, r2)
    bend = -s2.sigma * (r2 / r1) * (math.expm1(r2 * h) / (r2 * h) - 1.0)
    rows.append(row(path.time_at(s1.ratio), s1, first_order_eps(a, s2, ANCHOR, P1) + (P0 - P1) * bend))
    bend = -b.sigma / r2 * (math.expm1(h) / h - 1.0)
    rows.append(row(path.time_at(s2.ratio), s2, first_order_eps(a, b, ANCHOR, P2) + (P0 - P2) * bend))
    return rows


@sampler(
    name="dpm_fast",
    title="DPM fast",
    family="dpm-solver",
    order=2,
    deterministic=True,
    suits="a fixed number of calls; lays its own grid, even in λ, and stops at the least sigma",
    paper="Lu et al. 2022, DPM-Solver, section 3.4",
    frame="line",
    peer="none",
    aliases=("DPM-Solver-fast", "sample_dpm_fast"),
)
def dpm_fast(path: Path, *, eta: float = 0.0, s_noise: float = 1.0) -> Draft:
    """As many third-order steps as the calls allow, the rest at a lower order; `steps` counts calls."""
    check_eta(eta)
    calls = len(path.legs)
    top = path.legs[0].start
    least = path.legs[-1].end if path.legs[-1].end.sigma > 0 else path.at_time(path.schedule.span[0])
    groups = calls // 3 + 1
    orders = [3] * (groups - 2) + [2, 1] if calls % 3 == 0 else [3] * (groups - 1) + [calls % 3]
    knots = [path.between(top, least, i / groups) for i in range(groups + 1)]
    rows: list[Row] = []
    for a, b, order in zip(knots, knots[1:], orders, strict=False):
        down, _ = ancestral(a, b, eta)
        ratio = max(down.ratio, least.ratio)
        noise = Z * (b.alpha * math.sqrt(max(b.ratio**2 - ratio**2, 0.0)) * s_noise)
        goal = path.level(ratio)
        group = single_step(path, a, goal, order, path.time_at(a.ratio) if rows else path.legs[0].time)
        last = Form({r: w * b.alpha / goal.alpha for r, w in group[-1].x}) + noise
        rows += [*group[:-1], row(group[-1].time, group[-1].level, last, span=span(a, b))]
    return Draft(rows, "eps", end=least, declared=S_NOISE if s_noise != 1.0 and eta else "")


@sampler(
    name="dpmpp_2m_cfgpp",
    title="DPM++ 2M CFG++",
    family="dpm-solver",
    order=2,
    deterministic=True,
    suits="guided models at low scales (0.5 to 2), with a second-order correction",
    paper="Chung et al. 2024, CFG++",
    frame="line",
    peer="none",
    aliases=("dpmpp_2m_cfg_pp",),
)
def dpmpp_2m_cfgpp(path: Path) -> Draft:
    """The guided x0, re-noised along the unconditional prediction; the anchor keeps the last unconditional one."""
    rows = []
    for i, leg in enumerate(path.legs):
        a, b = leg.start, leg.end
        form = P0 * b.alpha + (X - U * a.alpha) * (b.sigma / a.sigma)
        if i > 0 and b.sigma > 0 and math.isfinite(path.legs[i - 1].start.lam):
            r0, _ = _lam_ratio(path.legs, i)
            form = form + (P0 - ANCHOR) * (-b.alpha * math.expm1(-leg.h) / (2 * r0))
        rows.append(row(leg.time, a, form, U))
    return Draft(rows)
