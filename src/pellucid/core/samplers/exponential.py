"""Exponential integrators beyond DPM-Solver: UniPC, DEIS, RES, SA-Solver and ER-SDE."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pellucid.core.errors import PlanError, rule
from pellucid.core.grid import Leg, Path
from pellucid.core.plan import ANCHOR, HISTORY, P0, P1, P2, Form, X, Z, row, total
from pellucid.core.samplers.registry import Draft, sampler
from pellucid.core.samplers.steps import (
    GAUSS_NODES,
    GAUSS_WEIGHTS,
    S_NOISE,
    ancestral,
    check_choice,
    check_eta,
    check_order,
    combine,
    finite_nodes,
    first_order,
    first_order_eps,
    integrate,
    lams,
    multistep_order,
    span,
)
from pellucid.core.schedule import Array

_EDGE = 1e-9  # of a part of time: what rounding moves over the end of a range belongs to it


def _bh_scale(h: float, variant: str, predict_x0: bool) -> float:
    """UniPC's B(h), which may be any function of order h: h itself (bh1), or e^h − 1 (bh2)."""
    hh = -h if predict_x0 else h
    return hh if variant == "bh1" else math.expm1(hh)


def _bh_shares(h: float, nodes: list[float], variant: str, predict_x0: bool) -> list[float]:
    """The shares of the differences at the nodes, the last one at 1: matches as many moments as there are nodes.

    One node takes a half, as its authors do (Zhao et al. 2023, eq. 8 to 11).
    """
    if len(nodes) == 1:
        return [0.5]
    hh, scale = (-h if predict_x0 else h), _bh_scale(h, variant, predict_x0)
    moments, phi, factorial = [], math.expm1(hh) / hh - 1.0, 1.0
    for k in range(1, len(nodes) + 1):
        moments.append(phi * factorial / scale)
        factorial *= k + 1
        phi = phi / hh - 1.0 / factorial
    powers = np.vander(np.array(nodes), increasing=True).T
    return [float(share) for share in np.linalg.solve(powers, np.array(moments))]


@sampler(
    name="unipc",
    title="UniPC",
    family="exponential",
    order=3,
    deterministic=True,
    suits="5 to 15 steps; corrects each step with the next call at no cost",
    paper="Zhao et al. 2023, UniPC",
    aliases=("UniPCMultistepScheduler", "uni_pc", "uni_pc_bh2"),
)
def unipc(
    path: Path,
    *,
    order: int = 2,
    variant: str = "bh2",
    predict_x0: bool = True,
    lower_order_final: bool = False,
    disable_corrector: tuple[int, ...] = (),
) -> Draft:
    """Predictor and corrector of one order: the corrected x becomes the anchor, and the predictor leaves from it."""
    check_order(order, 3)
    check_choice("variant", variant, ("bh1", "bh2"))
    legs, rows, last = path.legs, [], 0
    step = first_order if predict_x0 else first_order_eps

    def bend(leg: Leg, differences: list[Form], nodes: list[float]) -> Form:
        """The correction of a leg from differences of predictions at nodes, in units of the leg."""
        shares = _bh_shares(leg.h, nodes, variant, predict_x0)
        size = (leg.end.alpha if predict_x0 else leg.end.sigma) * _bh_scale(leg.h, variant, predict_x0)
        return total(d * (-size * r / n) for d, r, n in zip(differences, shares, nodes, strict=True))

    for i, leg in enumerate(legs):
        here: Form = X
        if i > 0 and i - 1 not in disable_corrector and math.isfinite(legs[i - 1].h):
            was = legs[i - 1]
            nodes = [(legs[i - 1 - k].start.lam - was.start.lam) / was.h for k in range(1, last)]
            past = [HISTORY[k + 1] - P1 for k in range(1, last)]
            here = step(was.start, was.end, ANCHOR, P1) + bend(was, [*past, P0 - P1], [*nodes, 1.0])
        last = min(order, finite_nodes(legs, i, order), len(legs) - i if lower_order_final else order)
        last = 1 if not math.isfinite(leg.h) else last
        ahead = step(leg.start, leg.end, here, P0)
        if last > 1:
            nodes = [(legs[i - k].start.lam - leg.start.lam) / leg.h for k in range(1, last)]
            ahead = ahead + bend(leg, [HISTORY[k] - P0 for k in range(1, last)], nodes)
        rows.append(row(leg.time, leg.start, ahead, here))
    return Draft(rows, "x0" if predict_x0 else "eps")


@sampler(
    name="deis",
    title="DEIS",
    family="exponential",
    order=3,
    deterministic=True,
    suits="10 to 20 steps on unguided models",
    paper="Zhang and Chen 2022, DEIS (log-rho)",
    aliases=("DEISMultistepScheduler", "deis_3m"),
)
def deis(path: Path, *, order: int = 3, lower_order_final: bool = False) -> Draft:
    """eps interpolated in λ through the last calls, and integrated exactly."""
    check_order(order, 3)
    rows = []
    for i, leg in enumerate(path.legs):
        a, b = leg.start, leg.end
        k = multistep_order(path.legs, i, order, lower_order_final)
        if k == 1:
            rows.append(row(leg.time, a, first_order_eps(a, b)))
            continue
        weights = integrate(lams(path.legs, i, k), a.lam, b.lam, rate=-1.0)
        rows.append(row(leg.time, a, X * (b.alpha / a.alpha) - combine(weights) * b.sigma))
    return Draft(rows, "eps")


@sampler(
    name="res_multistep",
    title="RES multistep",
    family="exponential",
    order=2,
    deterministic=True,
    suits="10 to 30 steps; second order on x0 with exact weights; eta makes it ancestral",
    paper="Zhang et al. 2023, Refined Exponential Solver",
    frame="line",
    peer="none",
    aliases=("res_2m",),
)
def res_multistep(path: Path, *, eta: float = 0.0, s_noise: float = 1.0) -> Draft:
    """x0 interpolated in λ through the last two calls, integrated exactly to a level `eta` below the next."""
    check_eta(eta)
    rows = []
    for i, leg in enumerate(path.legs):
        a = leg.start
        down, up = ancestral(a, leg.end, eta)
        noise, address = Z * (up * s_noise), span(a, leg.end)
        if i == 0 or down.sigma == 0.0 or finite_nodes(path.legs, i, 2) < 2:
            rows.append(row(leg.time, a, first_order(a, down) + noise, span=address))
            continue
        weights = integrate(lams(path.legs, i, 2), a.lam, down.lam, rate=1.0)
        form = X * (down.sigma / a.sigma) + combine(weights) * down.alpha + noise
        rows.append(row(leg.time, a, form, span=address))
    return Draft(rows, declared=S_NOISE if s_noise != 1.0 and eta else "")


def _adams_weights(nodes: list[float], leg: Leg, rate: float, corrector: bool) -> list[float]:
    """SA-Solver's weights; at order 2 its authors replace the slope's moment by the h²/2 of small steps."""
    weights = integrate(nodes, leg.start.lam, leg.end.lam, rate)
    if rate > 0 and len(nodes) == 2 and leg.h > 0:
        h = leg.h
        moment = h * h / 2 - (h * rate - 1 + math.exp(-rate * h)) / rate**2
        shift = moment / h if corrector else moment / (nodes[0] - nodes[1])
        weights = [weights[0] + shift, weights[1] - shift]
    return weights


@sampler(
    name="sa_solver",
    title="SA-Solver",
    family="exponential",
    order=2,
    deterministic=False,
    suits="15 to 50 steps with tunable noise (tau) in the middle of the path",
    paper="Xue et al. 2023, SA-Solver",
    aliases=("SASolverScheduler",),
)
def sa_solver(
    path: Path,
    *,
    predictor_order: int = 2,
    corrector_order: int = 2,
    tau: float = 1.0,
    tau_range: tuple[float, float] = (0.2, 0.8),
    predict_x0: bool = True,
    lower_order_final: bool = False,
) -> Draft:
    """A stochastic Adams predictor and corrector; tau is the share of noise where time is in `tau_range`."""
    check_order(predictor_order, 3)
    check_order(corrector_order, 4)
    check_eta(tau, 10.0)
    if len(tau_range) != 2 or not tau_range[0] <= tau_range[1]:
        raise PlanError(rule("tau_range", "two parts of the training time, the lower first", tau_range), "option")
    legs, rows, count = path.legs, [], len(path.legs)
    low, high = path.schedule.span
    if path.schedule.num_train is not None or path.schedule.frame == "flow":  # their time begins at 0
        low, high = 0.0, path.schedule.num_train or high

    def amount(leg: Leg) -> float:
        part = (leg.time - low) / (high - low)
        return tau if tau_range[0] - _EDGE <= part <= tau_range[1] + _EDGE else 0.0

    def gradient(leg: Leg, nodes: list[float], corrector: bool) -> Form:
        t2 = amount(leg) ** 2
        if predict_x0:
            scale, rate = (1 + t2) * leg.end.alpha, 1 + t2
        else:
            scale, rate = -(1 + t2) * leg.end.sigma, -1.0
        return combine(_adams_weights(nodes, leg, rate, corrector)) * scale

    for i, leg in enumerate(legs):
        a, b, t2 = leg.start, leg.end, amount(leg) ** 2
        here: Form = X
        if i > 0 and math.isfinite(legs[i - 1].h):
            size = min(corrector_order, i + 1, finite_nodes(legs, i, corrector_order))
            size = min(size, count - i + 2) if lower_order_final else size
            here = ANCHOR + gradient(legs[i - 1], lams(legs, i, size), corrector=True)
        if not math.isfinite(leg.h):
            moved = first_order(a, b, here) if predict_x0 else first_order_eps(a, b, here)
            rows.append(row(leg.time, a, moved, here))
            continue
        size = min(predictor_order, finite_nodes(legs, i, predictor_order))
        size = min(size, count - i) if lower_order_final else size
        if predict_x0:
            kept = here * (b.sigma / a.sigma * math.exp(-t2 * leg.h))
            noise = b.sigma * math.sqrt(-math.expm1(-2 * t2 * leg.h))
        else:
            kept = here * (b.alpha / a.alpha)
            noise = math.sqrt(t2) * b.sigma * math.sqrt(math.expm1(2 * leg.h))
        base = kept + Z * noise
        moved = base + gradient(leg, lams(legs, i, size), corrector=False)
        rows.append(row(leg.time, a, moved, base, span=span(a, b)))
    declared = "" if predict_x0 or tau == 0 else "the eps form adds noise to first order only"
    return Draft(rows, basis="x0" if predict_x0 else "eps", declared=declared)


def _er_log_scale(ratio: npt.ArrayLike) -> Array:
    """log φ, φ the noise scale of ER-SDE that its authors found best (Cui et al. 2023, eq. 31)."""
    r = np.asarray(ratio, np.float64)
    return np.asarray(np.log(r) + np.logaddexp(r**0.3, math.log(10.0)))  # φ = r·(exp(r^0.3) + 10) overflows


@sampler(
    name="er_sde",
    title="ER-SDE",
    family="exponential",
    order=2,
    deterministic=False,
    suits="few-step stochastic sampling (8 to 20 steps)",
    paper="Cui et al. 2023, Elucidating the Solution Space of Extended Reverse-Time SDE",
    clock="sigma",
    peer="none",
    aliases=("er_sde_solver",),
)
def er_sde(path: Path, *, order: int = 3, s_noise: float = 1.0) -> Draft:
    """The extended reverse SDE in sigma / alpha, with x0 expanded to `order` terms."""
    check_order(order, 3)
    rows, legs = [], path.legs
    for i, leg in enumerate(legs):
        a, b = leg.start, leg.end
        r0, r1 = a.ratio, b.ratio
        if b.sigma == 0.0 or math.isinf(r0):
            rows.append(row(leg.time, a, first_order(a, b)))
            continue
        fade = float(np.exp(_er_log_scale(r1) - _er_log_scale(r0)))
        # in units of x / alpha
        out = X * (fade / a.alpha) + P0 * (1.0 - fade)
        usable = min(order, finite_nodes(legs, i, order))
        if usable > 1:
            out = out + _er_bends(legs, i, usable)
        noise = math.sqrt(max(r1 * r1 - (r0 * fade) ** 2, 0.0)) * s_noise
        rows.append(row(leg.time, a, (out + Z * noise) * b.alpha, span=span(a, b)))
    return Draft(rows, declared=S_NOISE if s_noise != 1.0 else "")


def _er_bends(legs: tuple[Leg, ...], i: int, usable: int) -> Form:
    """The terms of the first and second derivative of x0 with respect to sigma / alpha."""
    r0, r1 = legs[i].start.ratio, legs[i].end.ratio
    back = [legs[i - k].start.ratio for k in range(usable)]
    half, middle = (r0 - r1) / 2, (r0 + r1) / 2
    s = half * GAUSS_NODES + middle
    share = GAUSS_WEIGHTS * half * np.exp(_er_log_scale(r1) - _er_log_scale(s))  # φ(r1) / φ(s)
    first = (P0 - P1) / (back[0] - back[1])
    out = first * (r1 - r0 + float(share.sum()))
    if usable < 3:
        return out
    second = (first - (P1 - P2) / (back[1] - back[2])) * (2.0 / (back[0] - back[2]))
    return out + second * ((r1 - r0) ** 2 / 2 + float((share * (s - r0)).sum()))
