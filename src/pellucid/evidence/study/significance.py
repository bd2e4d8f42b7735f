"""Is a difference more than chance: over seeds by Student's t, paired; of two single runs by their own intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pellucid.core.errors import PellucidError, rule

LEVEL = 0.95
Kind = Literal["seeds", "pictures", "none"]


@dataclass(frozen=True)
class Estimate:
    """A figure of one run with its interval, where one is known."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Difference:
    """`a` less `b`, and the 95 % interval of that. `kind` says what the interval holds for: other seeds, other images
    of the same two runs, or nothing (then there is no interval)."""

    value: float
    low: float | None
    high: float | None
    kind: Kind
    seeds: int

    @property
    def significant(self) -> bool | None:
        """Whether the interval leaves out zero; None without an interval."""
        return None if self.low is None or self.high is None else self.low > 0 or self.high < 0


def between(a: Sequence[Estimate], b: Sequence[Estimate]) -> Difference:
    """Of two set-ups with the same seeds, in the same order."""
    if not a or len(a) != len(b):
        raise PellucidError(rule("runs", "as many of each, at least one", (len(a), len(b))), "pairs")
    if len(a) == 1:
        return of_runs(a[0], b[0])
    apart = [x.value - y.value for x, y in zip(a, b, strict=True)]
    mean, half = t_interval(apart)
    return Difference(mean, mean - half, mean + half, "seeds", len(apart))


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of the width of its interval (Student 1908)."""
    count = len(values)
    mean, deviation = spread(values)
    return mean, t_quantile((1 + LEVEL) / 2, count - 1) * deviation / math.sqrt(count)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the standard deviation of a sample; that of a single value is 0."""
    mean = math.fsum(values) / len(values)
    square = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(square / max(len(values) - 1, 1))


def of_runs(a: Estimate, b: Estimate) -> Difference:
    """Of two runs whose images were drawn each on their own: the interval of a difference from those of its parts
    (Zou and Donner 2008, "MOVER"), which need not be symmetric."""
    value = a.value - b.value
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return Difference(value, None, None, "none", 1)
    low = value - math.hypot(a.value - a.low, b.high - b.value)
    high = value + math.hypot(a.high - a.value, b.value - b.low)
    return Difference(value, low, high, "pictures", 1)


def t_quantile(part: float, degrees: int) -> float:
    """The t below which this part of Student's distribution lies, for a whole number of degrees of freedom.

    With θ = atan(t / √degrees) the distribution is a finite sum (Abramowitz and Stegun 26.7.3 and 4), which is halved
    in on; a table would end somewhere.
    """
    if degrees < 1 or not 0.5 <= part < 1:
        raise PellucidError(rule("part, degrees", "from 0.5 to below 1, at least 1", (part, degrees)), "t-quantile")
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, degrees) < 2 * part - 1 else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def within(theta: float, degrees: int) -> float:
    """The part of Student's distribution between −t and t."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def in_words(a: str, b: str, found: Difference, unit: str, scale: float = 1.0) -> str:
    """A sentence: cosine is better than linear by 1.20 ± 0.30 FID (significant over 3 seeds). Less is better."""
    better, worse, sign = (a, b, -scale) if found.value <= 0 else (b, a, scale)
    size = abs(found.value) * scale
    if found.low is None or found.high is None:
        return f"{better} is ahead of {worse} by {size:.2f} {unit} (one run each, no interval known)."
    if found.kind == "seeds":
        amount = f"{size:.2f} ± {(found.high - found.low) / 2 * scale:.2f} {unit}"
        scope = f"{found.seeds} seeds"
    else:
        ends = sorted((found.low * sign, found.high * sign))
        amount = f"{size:.2f} ({ends[0]:.2f} to {ends[1]:.2f}) {unit}".replace("-", "−")
        scope = "the images of one run each; other seeds are not known"
    if found.significant:
        return f"{better} is better than {worse} by {amount} (significant over {scope})."
    return f"{better} and {worse} are not distinguishable: apart by {amount} (over {scope})."
