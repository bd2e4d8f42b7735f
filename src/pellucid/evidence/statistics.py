"""What a few numbers say: estimates with their intervals, shares, resampling, significance, and the knee of a front."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pellucid.core.errors import PellucidError, rule

Array = NDArray[np.float64]
LEVEL = 0.95
# What an interval holds for: other images, other seeds, other models, other rounds of timing; or there is none.
Scope = Literal["images", "seeds", "models", "rounds", "none"]


@dataclass(frozen=True)
class Estimate:
    """A value and the interval around it at this level, which has no ends where one of what varies says nothing.

    `over` is what varies and `count` how many of that, or how many resamples, the interval was made of. `bias` is what
    resampling added to the value, already taken out of the interval.
    """

    value: float
    low: float = -math.inf
    high: float = math.inf
    over: Scope = "images"
    count: int = 1
    level: float = LEVEL
    bias: float = 0.0

    @property
    def ends(self) -> tuple[float, float] | None:
        """The interval, where it is known."""
        return (self.low, self.high) if math.isfinite(self.low) and math.isfinite(self.high) else None

    @property
    def significant(self) -> bool | None:
        """Of a difference: whether the interval leaves out zero; None without an interval."""
        return None if self.ends is None else self.low > 0 or self.high < 0

    def map(self, change: Callable[[float], float]) -> Estimate:
        """The same after a rising function."""
        ends = () if self.ends is None else map(change, self.ends)
        return replace(Estimate(change(self.value), *ends), over=self.over, count=self.count, level=self.level)

    def times(self, factor: float) -> Estimate:
        """In other units."""
        return self.map(lambda value: value * factor)

    def words(self, form: Callable[[float], str], unit: str = "") -> str:
        """'96.2 % (94.9 to 97.2)'"""
        if self.ends is None:
            return f"{form(self.value)}{unit}"
        return f"{form(self.value)}{unit} ({form(self.low)} to {form(self.high)})"

    def plain(self) -> dict[str, float | None]:
        """For a JSON file: None for what is not known."""
        low, high = self.ends or (None, None)
        return {"value": self.value if math.isfinite(self.value) else None, "low": low, "high": high}


def percent(value: float) -> str:
    """'96.2', of a share."""
    return f"{100 * value:.1f}"


# --- Shares ---------------------------------------------------------------------------------------------------------

_Z = 1.959963984540054  # of the normal distribution, for 95 %


@dataclass(frozen=True)
class Share:
    """`right` of `count` images. Its 95 % interval is Wilson's (1927), which holds near 0 and 1 too."""

    right: int
    count: int

    @property
    def value(self) -> float:
        return self.right / self.count if self.count else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        if not self.count:
            return 0.0, 1.0
        n, p = self.count, self.value
        middle = p + _Z * _Z / (2 * n)
        half = _Z * math.sqrt(p * (1 - p) / n + _Z * _Z / (4 * n * n))
        low, high = ((middle + sign * half) / (1 + _Z * _Z / n) for sign in (-1, 1))
        return low if self.right else 0.0, high if self.right < n else 1.0  # exactly, where rounding would leave a rest

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.value, *self.interval, count=self.count)

    @staticmethod
    def of(marks: Iterable[bool | None]) -> Share:
        """Of the marks that are known; None is not."""
        known = [mark for mark in marks if mark is not None]
        return Share(sum(known), len(known))

    @property
    def words(self) -> str:
        """'96.2 % (94.9 to 97.2)'"""
        return self.estimate.words(percent, " %") if self.count else "–"

    def plain(self) -> dict[str, float | int | None]:
        low, high = self.interval
        value = self.value if self.count else None
        return {"right": self.right, "count": self.count, "share": value, "low": low, "high": high}


# --- Resampling: how a figure would move with other images (Efron 1979) ---------------------------------------------

RESAMPLES = 1_000
_AT_ONCE = 100  # resamples whose weights are held together: at 50,000 images 40 MB


def draws(count: int, resamples: int, seed: int = 0) -> Tensor:
    """(R, N) int32: how often each of `count` images was drawn, `count` times with repetition, in each resample."""
    return torch.cat(list(draw_batches(count, resamples, seed)))


def draw_batches(count: int, resamples: int, seed: int) -> Iterator[Tensor]:
    """The same, in parts of at most AT_ONCE resamples."""
    if resamples < 2:
        raise PellucidError(rule("resamples", "at least 2", resamples), "resamples")
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, resamples, _AT_ONCE):
        rows = min(_AT_ONCE, resamples - start)
        picks = torch.randint(count, (rows, count), generator=generator)
        yield torch.zeros(rows, count, dtype=torch.int32).scatter_add_(1, picks, torch.ones_like(picks).int())


def mean_interval(values: Tensor, resamples: int = RESAMPLES, seed: int = 0, level: float = LEVEL) -> Estimate:
    """The mean of one number for each image (N,), with the percentiles of its resampled means."""
    numbers = values.double().cpu()
    batches = draw_batches(len(numbers), resamples, seed)
    means = torch.cat([rows.double() @ numbers / len(numbers) for rows in batches])
    return percentiles(means, float(numbers.mean()), level)


def percentiles(resampled: Tensor, value: float, level: float = LEVEL) -> Estimate:
    """A value, from the lower to the upper percentile of its resamples (R,)."""
    return Estimate(value, *_quantiles(resampled, level), count=len(resampled), level=level)


def reflected(resampled: Tensor, value: float, level: float = LEVEL) -> Estimate:
    """The resamples are moved so that their mean is the value, then mirrored at it (the "basic" interval)."""
    low, high = _quantiles(resampled, level)
    mean = float(resampled.mean())
    ends = (value - (high - mean), value - (low - mean))
    return Estimate(value, *ends, count=len(resampled), level=level, bias=mean - value)


def _quantiles(values: Tensor, level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise PellucidError(rule("level", "above 0 and below 1", level), "level")
    tail = (1 - level) / 2
    low, high = torch.quantile(values.double().cpu(), torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


# --- Significance: over seeds by Student's t, paired; of two single runs by their own intervals ---------------------


def between(a: Sequence[Estimate], b: Sequence[Estimate]) -> Estimate:
    """`a` less `b`, of two set-ups with the same seeds in the same order."""
    if not a or len(a) != len(b):
        raise PellucidError(rule("runs", "equally many of each, at least one", (len(a), len(b))), "pairs")
    if len(a) == 1:
        return _of_runs(a[0], b[0])
    apart = [x.value - y.value for x, y in zip(a, b, strict=True)]
    mean, half = t_interval(apart)
    return Estimate(mean, mean - half, mean + half, "seeds", len(apart))


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


def _of_runs(a: Estimate, b: Estimate) -> Estimate:
    """Of two runs whose images were drawn each on their own: the interval of a difference from those of its parts
    (Zou and Donner 2008, "MOVER"), which need not be symmetric."""
    value = a.value - b.value
    if a.ends is None or b.ends is None:
        return Estimate(value, over="none")
    low = value - math.hypot(a.value - a.low, b.high - b.value)
    high = value + math.hypot(a.high - a.value, b.value - b.low)
    return Estimate(value, low, high)


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
        low, high = (middle, high) if _central_part(middle, degrees) < 2 * part - 1 else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _central_part(theta: float, degrees: int) -> float:
    """The part of Student's distribution between −t and t."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def in_words(a: str, b: str, found: Estimate, unit: str, scale: float = 1.0) -> str:
    """A sentence: cosine is better than linear by 1.20 ± 0.30 FID (significant over 3 seeds). Less is better."""
    better, worse, sign = (a, b, -scale) if found.value <= 0 else (b, a, scale)
    size = abs(found.value) * scale
    if found.ends is None:
        return f"{better} is ahead of {worse} by {size:.2f} {unit} (one run each, no interval known)."
    if found.over == "seeds":
        amount = f"{size:.2f} ± {(found.high - found.low) / 2 * scale:.2f} {unit}"
        scope = f"{found.count} seeds"
    else:
        ends = sorted(end * sign for end in found.ends)
        amount = f"{size:.2f} ({ends[0]:.2f} to {ends[1]:.2f}) {unit}".replace("-", "−")
        scope = "the images of one run each; other seeds are not known"
    if found.significant:
        return f"{better} is better than {worse} by {amount} (significant over {scope})."
    return f"{better} and {worse} are not distinguishable: apart by {amount} (over {scope})."


# --- Front and knee: what is worth its price ------------------------------------------------------------------------

# What lies beyond a cell: gains below the average, no gain, a gain up to the most expensive cell, or nothing at all.
Beyond = Literal["less", "nothing", "more", "unknown"]


def front(costs: Sequence[float] | Array, losses: Sequence[float] | Array) -> list[int]:
    """The cells that no other one beats in both, by cost; of equals the first. What is not finite is on no front."""
    price, loss = np.asarray(costs, float), np.asarray(losses, float)
    if price.shape != loss.shape or price.ndim != 1:
        raise PellucidError(rule("costs, losses", "one of each per cell", (price.shape, loss.shape)), "front")
    known = [i for i in range(len(price)) if np.isfinite(price[i]) and np.isfinite(loss[i])]
    kept: list[int] = []
    for i in sorted(known, key=lambda i: (price[i], loss[i], i)):
        if not kept or loss[i] < loss[kept[-1]]:
            kept.append(i)
    return kept


def knee(costs: Sequence[float] | Array, losses: Sequence[float] | Array) -> int | None:
    """The cell of the front that lies farthest below the straight line between its ends (Satopää et al. 2011).

    Costs count by their logarithm: from 5 calls to 10 is as far as from 50 to 100. Where no cell lies below that line
    the best is taken, which is a knee only if costlier cells gain nothing (`_beyond`). None where no cell is known.
    """
    kept = front(costs, losses)
    if len(kept) < 3:
        return kept[-1] if kept else None
    price, loss = np.log(np.asarray(costs, float)[kept]), np.asarray(losses, float)[kept]
    along = (price - price[0]) / (price[-1] - price[0])
    down = (loss - loss[-1]) / (loss[0] - loss[-1])
    below = 1 - along - down
    return kept[int(np.argmax(below[:-1]))] if below.max() > 0 else kept[-1]


@dataclass(frozen=True)
class Knee:
    """The cell, its cost with the interval that resampling gives, and how often each cell was taken there. Where
    nothing more expensive was measured, it is the best and yet no knee."""

    cell: int
    cost: Estimate
    shares: dict[int, float]
    beyond: Beyond

    @property
    def found(self) -> bool:
        return self.beyond in ("less", "nothing")


def _beyond(costs: Sequence[float] | Array, losses: Sequence[float] | Array, cell: int) -> Beyond:
    """What the cells that cost more than a cell of the front say."""
    kept, price = front(costs, losses), np.asarray(costs, float)
    if cell != kept[-1]:
        return "less"
    known = price[np.isfinite(price) & np.isfinite(np.asarray(losses, float))]
    if price[cell] < known.max():
        return "nothing"
    return "more" if len(kept) > 1 else "unknown"


def knee_of(costs: Sequence[float] | Array, losses: Sequence[float] | Array, drawn: Array) -> Knee | None:
    """The knee of estimates (C,), and its interval over resampled losses (C, R), or costs too: (2, C, R)."""
    found = knee(costs, losses)
    if found is None:
        return None
    price = np.asarray(costs, float)
    both = drawn.ndim == 3
    picks = []
    for r in range(drawn.shape[-1]):
        at, loss = (drawn[0, :, r], drawn[1, :, r]) if both else (price, drawn[:, r])
        pick = knee(at, loss)
        if pick is not None:
            picks.append(pick)
    tail = (1 - LEVEL) / 2
    ends = np.quantile(price[picks], [tail, 1 - tail], method="inverted_cdf") if picks else [price[found]] * 2
    shares = {i: picks.count(i) / len(picks) for i in sorted(set(picks), key=lambda i: -picks.count(i))}
    cost = Estimate(float(price[found]), float(ends[0]), float(ends[1]), count=len(picks))
    return Knee(found, cost, shares, _beyond(costs, losses, found))
