"""What a few numbers say: shares, resampling, significance, and the knee of a front, each with its interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.metrics.fid import Statistics, frechet, square_root
from pellucid.evidence.metrics.kid import kid_resampled

# --- Shares ---------------------------------------------------------------------------------------------------------

Z = 1.959963984540054  # of the normal distribution, for 95 %


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
        middle = p + Z * Z / (2 * n)
        half = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        low, high = ((middle + sign * half) / (1 + Z * Z / n) for sign in (-1, 1))
        return low if self.right else 0.0, high if self.right < n else 1.0  # exactly, where rounding would leave a rest

    @staticmethod
    def of(marks: Iterable[bool | None]) -> Share:
        """Of what was asked: None is not."""
        asked = [mark for mark in marks if mark is not None]
        return Share(sum(asked), len(asked))

    @property
    def words(self) -> str:
        """'96.2 % (94.9 to 97.2)'"""
        if not self.count:
            return "–"
        return percent(self.value, *self.interval)

    def plain(self) -> dict[str, float | int | None]:
        low, high = self.interval
        value = self.value if self.count else None
        return {"right": self.right, "count": self.count, "share": value, "low": low, "high": high}


def percent(value: float, low: float, high: float) -> str:
    return f"{100 * value:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


# --- Resampling -----------------------------------------------------------------------------------------------------

LEVEL = 0.95
RESAMPLES = 1_000
FID_RESAMPLES = 50
AT_ONCE = 100  # resamples whose weights are held together: at 50,000 images 40 MB


@dataclass(frozen=True)
class Interval:
    """From `low` to `high` at this level; `bias` is what resampling added to the estimate, already taken out."""

    low: float
    high: float
    level: float = LEVEL
    resamples: int = RESAMPLES
    bias: float = 0.0


def draws(count: int, resamples: int, seed: int = 0) -> Tensor:
    """(R, N) int32: how often each of `count` images was drawn, `count` times with repetition, in each resample."""
    return torch.cat(list(draw_batches(count, resamples, seed)))


def draw_batches(count: int, resamples: int, seed: int) -> Iterator[Tensor]:
    """The same, in parts of at most AT_ONCE resamples."""
    if resamples < 2:
        raise PellucidError(rule("resamples", "at least 2", resamples), "resamples")
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, resamples, AT_ONCE):
        rows = min(AT_ONCE, resamples - start)
        picks = torch.randint(count, (rows, count), generator=generator)
        yield torch.zeros(rows, count, dtype=torch.int32).scatter_add_(1, picks, torch.ones_like(picks).int())


def mean_interval(values: Tensor, resamples: int = RESAMPLES, seed: int = 0, level: float = LEVEL) -> Interval:
    """Of the mean of one number an image (N,)."""
    given = values.double().cpu()
    found = torch.cat([rows.double() @ given / len(given) for rows in draw_batches(len(given), resamples, seed)])
    return percentiles(found, level)


def kid_interval(
    x: Tensor,
    y: Tensor,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
    over: Literal["images", "both"] = "images",
) -> Interval:
    """Of KID over all pairs of features, the images' (N, D) and the reference's (M, D)."""
    return percentiles(kid_draws(x, y, resamples, seed, over), level)


def kid_draws(
    x: Tensor, y: Tensor, resamples: int = RESAMPLES, seed: int = 0, over: Literal["images", "both"] = "images"
) -> Tensor:
    """KID (R,) of every resample, all of them in one pass over the kernel."""
    if over not in ("images", "both"):
        raise PellucidError(rule("over", "images or both", over), "resamples")
    rows = draws(len(x), resamples, seed)
    columns = draws(len(y), resamples, seed + 1) if over == "both" else torch.ones(1, len(y))
    return kid_resampled(x, y, rows, columns.expand(len(rows), -1)).cpu()


def fid_interval(
    features: Tensor,
    reference: Statistics,
    resamples: int = FID_RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
    progress: Callable[[], object] | None = None,
) -> Interval:
    """Of FID of features (N, D) against a reference: see the head of this file for how its bias is taken out."""
    estimate = frechet(reference, Statistics.of(features).to(reference.mean.device), square_root(reference.covariance))
    return reflected(fid_draws(features, reference, resamples, seed, progress), estimate, level)


def fid_draws(
    features: Tensor,
    reference: Statistics,
    resamples: int = FID_RESAMPLES,
    seed: int = 0,
    progress: Callable[[], object] | None = None,
) -> Tensor:
    """FID (R,) of every resample, its bias in it. A resample is XᵀWX: the features are weighted, not copied."""
    device = features.device
    against = reference.to(device)
    root = square_root(against.covariance)
    found = []
    for rows in draw_batches(len(features), resamples, seed):
        for row in rows.to(device):
            found.append(frechet(against, weighted(features, row), root))
            if progress is not None:
                progress()
    return torch.tensor(found, dtype=torch.float64)


def weighted(features: Tensor, row: Tensor) -> Statistics:
    """Statistics of features of which each counts as often as `row` (N,) says."""
    there = row > 0
    counts, kept = row[there].double(), features[there].double()
    total = counts.sum()
    mean = counts @ kept / total
    scaled = (kept - mean) * counts.sqrt()[:, None]
    return Statistics(mean, scaled.T @ scaled / (total - 1), int(total))


def percentiles(values: Tensor, level: float = LEVEL) -> Interval:
    low, high = quantiles(values, level)
    return Interval(low, high, level, len(values))


def reflected(values: Tensor, estimate: float, level: float = LEVEL) -> Interval:
    """Moved so that the mean of the resampled values is the estimate, then mirrored at it."""
    low, high = quantiles(values, level)
    mean = float(values.mean())
    return Interval(estimate - (high - mean), estimate - (low - mean), level, len(values), mean - estimate)


def quantiles(values: Tensor, level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise PellucidError(rule("level", "above 0 and below 1", level), "level")
    tail = (1 - level) / 2
    low, high = torch.quantile(values.double().cpu(), torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


# --- Significance ---------------------------------------------------------------------------------------------------

Scope = Literal["seeds", "pictures", "none"]


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
    kind: Scope
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
        low, high = (middle, high) if central_part(middle, degrees) < 2 * part - 1 else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def central_part(theta: float, degrees: int) -> float:
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


# --- Front and knee -------------------------------------------------------------------------------------------------

Array = NDArray[np.float64]
# What was seen beyond a cell: gains below the average, none, still some up to the dearest cell, or that there is none.
Beyond = Literal["less", "nothing", "more", "unknown"]


def front(costs: Sequence[float] | Array, losses: Sequence[float] | Array) -> list[int]:
    """The cells that no other one beats in both, by cost; of equals the first. What is not finite is on no front."""
    price, loss = np.asarray(costs, float), np.asarray(losses, float)
    if price.shape != loss.shape or price.ndim != 1:
        raise PellucidError(rule("costs, losses", "one each a cell", (price.shape, loss.shape)), "front")
    known = [i for i in range(len(price)) if np.isfinite(price[i]) and np.isfinite(loss[i])]
    kept: list[int] = []
    for i in sorted(known, key=lambda i: (price[i], loss[i], i)):
        if not kept or loss[i] < loss[kept[-1]]:
            kept.append(i)
    return kept


def knee(costs: Sequence[float] | Array, losses: Sequence[float] | Array) -> int | None:
    """The cell of the front that lies farthest below the straight line between its ends (Satopää et al. 2011).

    Costs count by their logarithm: from 5 calls to 10 is as far as from 50 to 100. Where no cell lies below that line
    the best is taken, which is a knee only if dearer cells gain nothing (`beyond`). None where no cell is known.
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
    """The cell, its cost with the interval that resampling gives, and how often each cell was taken there. It is no
    knee, though the best, where nothing dearer was asked."""

    cell: int
    cost: float
    low: float
    high: float
    shares: dict[int, float]
    beyond: Beyond

    @property
    def found(self) -> bool:
        return self.beyond in ("less", "nothing")


def beyond(costs: Sequence[float] | Array, losses: Sequence[float] | Array, cell: int) -> Beyond:
    """What the cells that are dearer than a cell of the front say about more."""
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
    return Knee(found, float(price[found]), float(ends[0]), float(ends[1]), shares, beyond(costs, losses, found))
