"""Intervals by resampling the images (Efron 1979): how a figure would move with other images of one model.

The reference is the yardstick and stays as it is, unless `over="both"` asks that it be drawn anew too.
- A mean over images (precision, image-text) or over the reference (recall): percentiles of the resampled means. The
  manifolds of precision and recall stay; doubled images would shrink them to nothing.
- KID: percentiles. Pairs of an image with itself are left out, so that resampling adds no bias. Where both sets have
  the same distribution the interval is too wide, never too narrow: the leading term of the statistic vanishes there.
- FID: biased upwards at any finite count, and resampling adds the same bias once more: a resampled set holds about 63 %
  of the images, some of them twice. Plain percentiles would lie above the estimate, often all of them. So the
  resampled values are moved back by their mean excess, then reflected at the estimate (the "basic" interval): it is an
  interval for the expected FID *at this count*, and holds the estimate. The excess is given as `bias`; the estimate
  less it is about the FID of infinitely many images. Each resample costs a covariance and an eigenvalue problem, so
  there are few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.metrics.fid import Statistics, frechet, square_root
from pellucid.evidence.metrics.kid import kid_resampled

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
    return torch.cat(list(drawn(count, resamples, seed)))


def drawn(count: int, resamples: int, seed: int) -> Iterator[Tensor]:
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
    found = torch.cat([rows.double() @ given / len(given) for rows in drawn(len(given), resamples, seed)])
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
    for rows in drawn(len(features), resamples, seed):
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
    low, high = bounds(values, level)
    return Interval(low, high, level, len(values))


def reflected(values: Tensor, estimate: float, level: float = LEVEL) -> Interval:
    """Moved so that the mean of the resampled values is the estimate, then mirrored at it."""
    low, high = bounds(values, level)
    mean = float(values.mean())
    return Interval(estimate - (high - mean), estimate - (low - mean), level, len(values), mean - estimate)


def bounds(values: Tensor, level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise PellucidError(rule("level", "above 0 and below 1", level), "level")
    tail = (1 - level) / 2
    low, high = torch.quantile(values.double().cpu(), torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high
