"""PNDM, PLMS and iPNDM: Adams-Bashforth on eps, with the coefficients of an even grid whatever the grid."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from pellucid.core.errors import PlanError, rule
from pellucid.core.grid import Leg, Path
from pellucid.core.plan import ANCHOR, P0, P1, Form, Row, X, row
from pellucid.core.samplers.registry import Draft, sampler
from pellucid.core.samplers.steps import check_order, combine, refuse_blind
from pellucid.core.schedule import Level, Target

_ADAMS = {
    1: [Fraction(1)],
    2: [Fraction(3, 2), Fraction(-1, 2)],
    3: [Fraction(23, 12), Fraction(-16, 12), Fraction(5, 12)],
    4: [Fraction(55, 24), Fraction(-59, 24), Fraction(37, 24), Fraction(-9, 24)],
}


def _adams(order: int) -> Form:
    return combine([float(c) for c in _ADAMS[order]])


def _carry(a: Level, b: Level, basis: Target) -> tuple[float, float]:
    """(A, B): x at b = A·x + B·p for a prediction p in the basis, taken at a.

    In the basis `v` the mixed prediction is read as v at a, which is how diffusers treats v models here.
    """
    refuse_blind(a)
    on_x, on_eps = b.alpha / a.alpha, b.sigma - b.alpha * a.sigma / a.alpha
    return (on_x, on_eps) if basis == "eps" else (on_x + on_eps * a.sigma, on_eps * a.alpha)


def _check_basis(basis: str) -> Target:
    if basis not in ("eps", "v"):
        raise PlanError(rule("basis", "eps or v", basis), "option")
    return basis  # type: ignore[return-value]


_V_BASIS = "v predictions of several levels are mixed and read at one of them"


def _plms_rows(legs: Sequence[Leg], basis: Target, known: int) -> list[Row]:
    """Adams-Bashforth rows, of the order that the history allows."""
    rows = []
    for i, leg in enumerate(legs):
        on_x, on_p = _carry(leg.start, leg.end, basis)
        rows.append(row(leg.time, leg.start, X * on_x + _adams(min(known + i + 1, 4)) * on_p))
    return rows


@sampler(
    name="plms",
    title="PLMS",
    family="multistep",
    order=2,
    deterministic=True,
    suits="Stable Diffusion 1 as released; 50 steps; one call more than steps",
    paper="Liu et al. 2022, Pseudo Numerical Methods (without the Runge-Kutta start)",
    peer="training",
    aliases=("pndm_plms", "k_plms"),
)
def plms(path: Path, *, basis: str = "eps", bases: tuple[Level, ...] | None = None, warm: bool = True) -> Draft:
    """The first leg is done twice (`warm`), the second time with the mean of both ends; then Adams-Bashforth.

    With `bases` the path has a leg for each call, as diffusers counts them, and the second one goes from that level.
    """
    kind = _check_basis(basis)
    legs, declared = path.legs, _V_BASIS if kind == "v" else ""
    if not warm:
        return Draft(_plms_rows(legs, kind, 0), kind, declared=declared)
    if bases is None and len(legs) > 1:
        bases = (legs[0].start,)
        legs = (legs[0], Leg(legs[1].time, legs[0].end, legs[0].end), *legs[1:])
    on_x, on_p = _carry(legs[0].start, legs[0].end, kind)
    rows = [row(legs[0].time, legs[0].start, X * on_x + P0 * on_p, X)]
    if len(legs) > 1 and bases:
        back_x, back_p = _carry(bases[0], legs[1].end, kind)
        mean = ANCHOR * back_x + (P0 + P1) * (back_p / 2)
        rows.append(row(legs[1].time, legs[1].start, mean, held=True))
    return Draft(rows + _plms_rows(legs[2:], kind, 1), kind, declared=declared)


@sampler(
    name="pndm",
    title="PNDM",
    family="multistep",
    order=2,
    deterministic=True,
    suits="models published with PNDM; three Runge-Kutta legs first, nine calls more than steps",
    paper="Liu et al. 2022, Pseudo Numerical Methods for Diffusion Models on Manifolds",
    peer="training",
    aliases=("PNDMScheduler", "pndm_rk"),
)
def pndm(path: Path, *, basis: str = "eps", bases: tuple[Level, ...] | None = None, warm: bool = True) -> Draft:
    """Runge-Kutta for the first three legs (`warm`), then Adams-Bashforth on eps.

    With `bases` the path has a leg for each call, as diffusers counts them, and four calls go from each such level.
    """
    kind = _check_basis(basis)
    if not warm:
        return plms(path, basis=basis, warm=False)
    legs = path.legs
    if bases is None:
        early = legs[: min(3, len(legs) - 1)]
        bases = tuple(leg.start for leg in early)
        legs = (*(call for i in range(len(early)) for call in _stages_of(path, i)), *legs[len(early) :])
    start = 4 * len(bases)
    rows = [r for i, base in enumerate(bases) for r in _runge_kutta(base, legs[4 * i : 4 * i + 4], kind)]
    rows += _plms_rows(legs[start:], kind, len(bases))
    return Draft(rows, kind, declared=_V_BASIS if kind == "v" else "")


def _stages_of(path: Path, i: int) -> list[Leg]:
    """The four calls of a leg: to the middle in time twice, then to the end twice."""
    begin, end = path.legs[i].time, path.legs[i + 1].time
    middle = (begin + end) / 2
    here, half, whole = path.legs[i].start, path.at_time(middle), path.legs[i].end
    return [Leg(begin, here, half), Leg(middle, half, half), Leg(middle, half, whole), Leg(end, whole, whole)]


def _runge_kutta(base: Level, calls: Sequence[Leg], basis: Target) -> list[Row]:
    """Up to four rows. The anchor gathers the answer; only the first prediction enters the history.

    Where the leg began (`here`) is not kept: it is solved from x and the first prediction in stage 2, and from x
    and the anchor in stage 3.
    """
    if not calls:
        return []
    goals = [call.end for call in calls] + [calls[-1].end] * (4 - len(calls))  # a run may end before its stages do
    (a1, b1), (a2, b2), (a3, b3), (a4, b4) = (_carry(base, goal, basis) for goal in goals)
    here_2 = (X - P1 * b1) / a1
    share = b4 / (3 * b2)
    here_3 = (ANCHOR - P1 * (b4 / 6) - X * share) / (a4 - share * a2)
    forms = (
        (X * a1 + P0 * b1, X * a4 + P0 * (b4 / 6)),
        (here_2 * a2 + P0 * b2, ANCHOR + P0 * (b4 / 3)),
        (here_3 * a3 + P0 * b3, ANCHOR + P0 * (b4 / 3)),
        (ANCHOR + P0 * (b4 / 6), None),
    )
    stages = enumerate(zip(calls, forms, strict=False))
    return [row(call.time, call.start, x, anchor, held=i > 0) for i, (call, (x, anchor)) in stages]


_BLIND = 1e-6  # alpha below which there is nothing of x0 in x


@sampler(
    name="ipndm",
    title="iPNDM",
    family="multistep",
    order=2,
    deterministic=True,
    suits="few steps (5 to 10) on EDM-like models; one call a step from the first",
    paper="Liu et al. 2022; Zhang and Chen 2022 (iPNDM)",
    peer="ipndm",
    aliases=("IPNDMScheduler", "ipndm_4"),
)
def ipndm(path: Path, *, order: int = 4, blind_start: bool = False) -> Draft:
    """Adams-Bashforth on eps with even-grid coefficients. `blind_start` drops x0 at alpha 0, as diffusers does."""
    check_order(order, 4)
    rows = []
    for i, leg in enumerate(path.legs):
        a, b = leg.start, leg.end
        if blind_start and i == 0 and a.alpha < _BLIND:
            rows.append(row(leg.time, a, P0 * b.sigma))
            continue
        on_x, on_p = _carry(a, b, "eps")
        rows.append(row(leg.time, a, X * on_x + _adams(min(order, i + 1)) * on_p))
    return Draft(rows, "eps", declared="the first step takes x0 as 0" if blind_start else "")
