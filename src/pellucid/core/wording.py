"""Numbers and settings as people read them; the same words in a terminal and on a page."""

from __future__ import annotations

import math
from collections.abc import Mapping


def short(value: float, digits: int = 4) -> str:
    """A number for people: `digits` significant ones, −∞ and ∞ as such."""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.{digits}g}".replace("-", "−")


def time_text(time: float, digits: int = 7) -> str:
    """A time that is passed to the network; what rounding left of time 0 is 0."""
    return short(0.0 if abs(time) < 1e-12 else time, digits)


def counted(count: int, word: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {word}" + ("" if count == 1 else "s")


def named(made: Mapping[str, object]) -> str:
    """`karras, steps 20`: the name, then the options; long lists by their length."""
    rest = [f"{k} {v if not isinstance(v, (list, tuple)) else f'({len(v)} values)'}" for k, v in made.items()]
    return ", ".join([str(made.get("name", "?")), *(r for r in rest if not r.startswith("name "))])
