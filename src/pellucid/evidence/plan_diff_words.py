"""A comparison of two plans in words: what they are, what changed in a row, and what it does."""

from __future__ import annotations

from typing import Any

from pellucid.core.plan import Difference, Plan
from pellucid.core.wording import named, short
from pellucid.evidence.plan_diff import KINDS, TOLERANCE, Effect


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
    return KINDS.get(d.field, "weights")


def change(d: Difference) -> str:
    """`p0 0.1234 → 0.1235 (0.08 %)`."""
    label = "" if d.field == "time" else f"{d.field} ".replace("x.", "").replace("anchor.", "anchor: ")
    size = relative(d)
    old, new = apart(*(0.0 if d.field == "time" and abs(v) < TOLERANCE else v for v in (d.mine, d.theirs)))
    return f"{label}{old} → {new}" + ("" if size is None else f" ({percent(size)})")


def percent(size: float) -> str:
    return f"{100 * size:.0f} %" if size >= 0.1 else f"{short(100 * size, 2)} %"


def relative(d: Difference) -> float | None:
    """The change relative to the larger of the two numbers: 0 to 2."""
    if isinstance(d.mine, bool) or not isinstance(d.mine, (int, float)) or not isinstance(d.theirs, (int, float)):
        return None
    return abs(d.mine - d.theirs) / max(abs(d.mine), abs(d.theirs))


def apart(a: Any, b: Any) -> tuple[str, str]:
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
