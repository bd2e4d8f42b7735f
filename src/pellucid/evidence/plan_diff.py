"""Two plans side by side: what differs, and what each kind of difference does to the result on the exact oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pellucid.core import oracle
from pellucid.core import schedule as schedules
from pellucid.core import target as targets
from pellucid.core.batch import Denoiser
from pellucid.core.denoiser import denoiser, input_scale, sigma_data_of
from pellucid.core.loop import run
from pellucid.core.plan import Difference, Plan, Weights
from pellucid.core.schedule import Frame, Level
from pellucid.core.wording import named, short

TOLERANCE = 1e-12  # relative: below it two numbers differ by rounding alone
POINTS = 64
_FIELDS = {
    "time passed": ("time",),
    "level": ("level",),
    "weights": ("x", "anchor", "held", "span", "draws"),
    "churn": ("pre_noise", "pre_span", "pre_draws"),
}
_KINDS = {"time": "time passed", "alpha": "level", "sigma": "level", "pre_noise": "churn"}  # the rest are weights


@dataclass(frozen=True)
class Effect:
    """A kind of difference: in how many rows it shows, and how far the result moves when it alone is swapped in."""

    kind: str
    rows: int | None
    distance: float | None
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """`theirs` is in the frame of `mine`, so that numbers can be compared."""

    mine: Plan
    theirs: Plan
    differences: list[Difference]
    effects: list[Effect]


# --- one frame for both ----------------------------------------------------------------------------------------


def reframed(plan: Plan, frame: Frame) -> Plan:
    """The same plan with x scaled as another frame scales it. Predictions do not depend on the frame; x does."""
    if plan.frame == frame:
        return plan
    before = [Level(r.level.alpha, math.sqrt(max(r.level.sigma**2 - r.pre_noise**2, 0.0))) for r in plan.rows]
    scales = [scale_of(level, frame) for level in (*before, plan.end)]
    rows, anchor_scale = [], 1.0
    for r, here, there in zip(plan.rows, scales, scales[1:], strict=False):
        x = _scaled(r.x, there, (here, anchor_scale))
        kept = None if r.anchor is None else _scaled(r.anchor, here, (here, anchor_scale))
        rows.append(replace(r, level=_times(r.level, here), x=x, anchor=kept, pre_noise=r.pre_noise * here))
        anchor_scale = anchor_scale if r.anchor is None else here
    return replace(
        plan,
        rows=tuple(rows),
        frame=frame,
        start=_times(plan.start, scales[0]),
        end=_times(plan.end, scales[-1]),
        initial_scale=plan.initial_scale * scales[0],
    )


def scale_of(level: Level, frame: Frame) -> float:
    """What x is multiplied by; finite at both ends."""
    goal = level.to(frame)
    return (goal.alpha + goal.sigma) / (level.alpha + level.sigma)


def _times(level: Level, scale: float) -> Level:
    return Level(level.alpha * scale, level.sigma * scale)


def _scaled(weights: Weights, out: float, registers: tuple[float, float]) -> Weights:
    """Weights for registers x and anchor that were multiplied by these scales, and a result that is by `out`."""
    return tuple((r, w * out / (registers[r] if r < 2 else 1.0)) for r, w in weights)


# --- what it does on the oracle --------------------------------------------------------------------------------


def perfect_network(like: oracle.Mixture, plan: Plan) -> Denoiser:
    """A perfect network on the plan's schedule: it takes x to be at the level of the time that is passed to it."""
    curve, kind = schedules.from_dict(plan.schedule), plan.target

    def network(x: Tensor, time: Tensor) -> Tensor:
        level = curve.level(float(time[0]))
        seen = x / input_scale(curve, level)
        c_x, c_0 = targets.from_x0(kind, level, sigma_data_of(curve))
        return seen * c_x + like(seen, level) * c_0

    return denoiser(network, curve, kind)


def compare(mine: Plan, theirs: Plan, seen: Callable[[], None] = lambda: None, *, effects: bool = True) -> Comparison:
    """What differs, and with `effects` what it does. `seen` is called after each run on the oracle."""
    other = reframed(theirs, mine.frame)
    matched = mine.nfe == other.nfe
    differences = [d for d in mine.diff(other, TOLERANCE) if d.row < 0 or (matched and not _rounding(d))]
    found = _effects_of(mine, other, differences, _Bench(oracle.smooth(), seen)) if effects else []
    return Comparison(mine, other, differences, found)


def _effects_of(mine: Plan, other: Plan, differences: Sequence[Difference], bench: _Bench) -> list[Effect]:
    """Each kind of difference alone, then all of them."""
    effects = [found for kind in _FIELDS if (found := _swapped(kind, mine, other, differences, bench)) is not None]
    if mine.nfe != other.nfe:
        note = f"{mine.nfe} → {other.nfe}: rows have no partners, so no kind can be swapped in alone"
        effects.append(Effect("number of rows", None, None, note))
    if not _same(mine.start, other.start):
        effects.append(bench.effect("first level", (mine, bench.points(other)), (mine, bench.points(mine))))
    if not math.isclose(mine.initial_scale, other.initial_scale, rel_tol=TOLERANCE):
        pair = (mine, bench.noise(other)), (mine, bench.noise(mine))
        effects.append(bench.effect("initial scale", *pair, note="from noise of that scale"))
    pair = (other, bench.points(other)), (mine, bench.points(mine))
    note = "from the same points at the first levels"
    effects.append(bench.effect("all except the times passed and the initial scale", *pair, note=note))
    pair = (other, bench.noise(other)), (mine, bench.noise(mine))
    note = "through perfect networks that are passed the time, from noise of each initial scale"
    effects.append(bench.effect("all", *pair, timed=True, note=note))
    return effects


def _rounding(d: Difference) -> bool:
    """Whether a number differs from 0, or another from it, by rounding: a time of 1e-15 is time 0."""
    return max(abs(d.mine), abs(d.theirs)) < TOLERANCE


def _same(a: Level, b: Level) -> bool:
    return all(math.isclose(u, v, rel_tol=TOLERANCE) for u, v in ((a.alpha, b.alpha), (a.sigma, b.sigma)))


_PlanStart = tuple[Plan, Tensor]  # a plan, and the x that it begins with


class _Bench:
    """Runs plans on one mixture, from the same points and with the same noise, and measures their distance."""

    def __init__(self, like: oracle.Mixture, seen: Callable[[], None]) -> None:
        self.like, self.seen = like, seen

    def points(self, plan: Plan) -> Tensor:
        return oracle.start_of(plan, self.like, POINTS)

    def noise(self, plan: Plan) -> Tensor:
        """Pure noise at the plan's initial scale. An inversion starts at data instead."""
        if plan.start.sigma == 0.0:
            return self.points(plan)
        return self.points(replace(plan, start=Level(0.0, 1.0))) * plan.initial_scale

    def run(self, start: _PlanStart, timed: bool) -> Tensor:
        plan, x = start
        out = run(plan, perfect_network(self.like, plan) if timed else self.like, x)
        self.seen()
        return out

    def effect(
        self,
        kind: str,
        new: _PlanStart,
        old: _PlanStart,
        *,
        rows: int | None = None,
        timed: bool = False,
        note: str = "",
    ) -> Effect:
        """How far the new result is from the old one; why not, where a plan cannot run."""
        try:
            return Effect(kind, rows, oracle.distance(self.run(new, timed), self.run(old, timed)), note)
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:  # a file's schedule may be anything
            return Effect(kind, rows, None, str(error))


def _swapped(kind: str, mine: Plan, other: Plan, differences: Sequence[Difference], bench: _Bench) -> Effect | None:
    """One kind of difference alone: my rows with their values of these fields."""
    count = len({d.row for d in differences if d.row >= 0 and kind_of(d) == kind})
    if not count:
        return None
    timed = kind == "time passed"
    if timed and mine.schedule != other.schedule:
        return Effect(kind, count, None, "times of two schedules have no common meaning")
    bases = kind == "weights" and mine.basis != other.basis
    pairs = zip(mine.rows, other.rows, strict=True)
    rows = tuple(replace(a, **{field: getattr(b, field) for field in _FIELDS[kind]}) for a, b in pairs)
    plan = replace(mine, rows=rows, basis=other.basis if bases else mine.basis)
    note = f"with the basis, {other.basis}" if bases else ""
    if timed:
        note = f"through a perfect {mine.target} network that is passed the time"
    pair = (plan, bench.points(mine)), (mine, bench.points(mine))
    return bench.effect(kind, *pair, rows=count, timed=timed, note=note)


# --- In words -------------------------------------------------------------------------------------------------------


def facts(plan: Plan) -> dict[str, str]:
    """What a plan is, without its rows; what it does not say is empty."""
    return {
        "sampler": plan.name,
        "schedule": named(plan.schedule),
        "target": plan.target,
        "grid": named(plan.grid),
        "dialect": plan.dialect,
        "options": ", ".join(f"{k} = {v}" for k, v in plan.options.items()),
        "frame": plan.frame,
        "basis": plan.basis,
        "initial scale": short(plan.initial_scale, 8),
        "end": f"alpha {short(plan.end.alpha, 6)}, sigma {short(plan.end.sigma, 6)}",
        "NFE": str(plan.nfe),
        "deviation": short(plan.deviation, 3),
        "declared": plan.declared,
    }


def kind_of(d: Difference) -> str:
    return _KINDS.get(d.field, "weights")


def change(d: Difference) -> str:
    """`p0 0.1234 → 0.1235 (0.08 %)`."""
    label = "" if d.field == "time" else f"{d.field} ".replace("x.", "").replace("anchor.", "anchor: ")
    size = relative(d)
    old, new = _apart(*(0.0 if d.field == "time" and abs(v) < TOLERANCE else v for v in (d.mine, d.theirs)))
    return f"{label}{old} → {new}" + ("" if size is None else f" ({_percent(size)})")


def _percent(size: float) -> str:
    return f"{100 * size:.0f} %" if size >= 0.1 else f"{short(100 * size, 2)} %"


def relative(d: Difference) -> float | None:
    """The change relative to the larger of the two numbers: 0 to 2."""
    if isinstance(d.mine, bool) or not isinstance(d.mine, (int, float)) or not isinstance(d.theirs, (int, float)):
        return None
    return abs(d.mine - d.theirs) / max(abs(d.mine), abs(d.theirs))


def _apart(a: Any, b: Any) -> tuple[str, str]:
    """Two numbers with as few digits as tell them apart."""
    if isinstance(a, bool) or not isinstance(a, (int, float)):
        return str(a), str(b)
    for digits in (4, 6, 8, 10, 12, 15):
        if short(a, digits) != short(b, digits):
            break
    return short(a, digits), short(b, digits)


def size_of(effect: Effect) -> str:
    if effect.distance is None:
        return "–"
    return "no effect on the oracle" if effect.distance <= TOLERANCE else short(effect.distance, 3)
