"""The steps that samplers share, as linear forms. Each holds in every frame: alpha and sigma are general."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pellucid.core.errors import PlanError, rule
from pellucid.core.grid import Leg, Path
from pellucid.core.plan import HISTORY, P0, Form, Span, X, total
from pellucid.core.schedule import Array, Level, Target

S_NOISE = "s_noise scales the noise of each step"  # why a plan that uses it deviates
GAUSS_NODES, GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(32)  # type: ignore[no-untyped-call]


def first_order(a: Level, b: Level, x: Form = X, x0: Form = P0) -> Form:
    """The exact step for a constant x0: DDIM, Euler and flow Euler are this one formula."""
    return x * (b.sigma / a.sigma) + x0 * (b.alpha - a.alpha * b.sigma / a.sigma)


def first_order_eps(a: Level, b: Level, x: Form = X, eps: Form = P0) -> Form:
    """The exact step for a constant eps; it also leaves a clean x."""
    refuse_blind(a)
    return x * (b.alpha / a.alpha) + eps * (b.sigma - b.alpha * a.sigma / a.alpha)


def refuse_blind(a: Level) -> None:
    """A sampler that remembers eps cannot leave pure noise: eps there says nothing about x0."""
    if a.alpha == 0.0:
        raise PlanError(
            "start must be below pure noise for a sampler on eps; got alpha 0. Use ddim, euler, dpmpp_2m or unipc, "
            "or give the grid a start below the last time.",
            "alpha-zero",
        )


def ancestral(a: Level, b: Level, eta: float) -> tuple[Level, float]:
    """Where to go without noise, and how much noise then leads to b (Song et al. 2020, eq. 16)."""
    r0, r1 = a.ratio, b.ratio
    kept = 1.0 if math.isinf(r0) else 1.0 - (r1 / r0) ** 2
    up = min(r1, eta * r1 * math.sqrt(max(kept, 0.0)))
    down = math.sqrt(max(r1 * r1 - up * up, 0.0))
    return Level(b.alpha, b.alpha * down), b.alpha * up


def span(a: Level, b: Level, visit: int = 0) -> Span:
    """The address of the noise of a step; pure noise is written as a ratio above that of any schedule."""
    return Span(a.ratio if math.isfinite(a.ratio) else 1e150, b.ratio, visit)


def check_eta(eta: float, most: float = 1.0) -> float:
    if not isinstance(eta, (int, float)) or not (math.isfinite(eta) and 0.0 <= eta <= most):
        raise PlanError(rule("eta", f"between 0 and {most:g}", eta), "eta")
    return float(eta)


def check_order(order: int, most: int) -> int:
    if not isinstance(order, int) or not 1 <= order <= most:
        raise PlanError(rule("order", f"a whole number from 1 to {most}", order), "order")
    return order


def check_choice(name: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise PlanError(rule(name, "one of " + ", ".join(known), value), "option")
    return value


def finite_nodes(legs: Sequence[Leg], i: int, most: int) -> int:
    """How many of the latest calls, this one included, were made where λ is finite."""
    count = 0
    while count < most and i - count >= 0 and math.isfinite(legs[i - count].start.lam):
        count += 1
    return max(count, 1)


def multistep_order(legs: Sequence[Leg], i: int, order: int, lower_order_final: bool = False) -> int:
    """The order that leg i can have: the history so far, no infinite λ, and a low order at the end if asked."""
    k = min(order, finite_nodes(legs, i, order))
    left = len(legs) - i
    if legs[i].h == 0.0:  # a repeated level: nothing to integrate
        return 1
    if left == 1 and (lower_order_final or legs[i].end.sigma == 0.0):
        return 1
    return min(k, 2) if left == 2 and lower_order_final else k


def _lagrange(nodes: Sequence[float], at: Array) -> Array:
    """Row j: the polynomial that is 1 at node j and 0 at the others, at the points `at`."""
    out = np.ones((len(nodes), len(at)))
    for j, own in enumerate(nodes):
        for other in (n for k, n in enumerate(nodes) if k != j):
            out[j] *= (at - other) / (own - other)
    return out


def integrate(nodes: Sequence[float], start: float, end: float, rate: float = 0.0) -> list[float]:
    """∫ exp(rate·(s − end))·l_j(s) ds from start to end, for each node's Lagrange polynomial l_j."""
    half, middle = (end - start) / 2, (end + start) / 2
    s = half * GAUSS_NODES + middle
    kernel = GAUSS_WEIGHTS * half * np.exp(rate * (s - end))
    return [float(w) for w in _lagrange(nodes, s) @ kernel]


def lams(legs: Sequence[Leg], i: int, count: int) -> list[float]:
    """λ at this call and at the count − 1 before it."""
    return [legs[i - j].start.lam for j in range(count)]


def combine(weights: Sequence[float]) -> Form:
    """weights[0]·p0 + weights[1]·p1 + …"""
    return total(p * w for p, w in zip(HISTORY, weights, strict=False))


def line_basis(path: Path) -> Target:
    """In the ve and flow frames x moves with slope (x − x0) / sigma, which is eps, or the flow velocity."""
    if path.frame == "vp":
        raise PlanError(
            "frame must be ve or flow for this sampler; got vp, since the path starts at alpha 0 (zero terminal "
            "SNR). Use ddim, euler, dpmpp_2m or unipc, or start below the last level.",
            "alpha-zero",
        )
    return "eps" if path.frame == "ve" else "flow"
