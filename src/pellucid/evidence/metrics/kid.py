"""The kernel distance of Bińkowski et al. 2018: MMD² with the kernel (x·y / D + 1)³, without bias at any count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.statistics import LEVEL, RESAMPLES, Estimate, draws, percentiles

SUBSETS, SUBSET = 100, 1_000  # the paper's
_BLOCK = 2_048  # rows of the kernel at once: at 50,000 columns 0.8 GB


@dataclass(frozen=True)
class Kid:
    """The mean over subsets and their standard deviation, which is not that of the mean."""

    value: float
    std: float
    subsets: int = SUBSETS
    size: int = SUBSET


def kid(x: Tensor, y: Tensor, subsets: int = SUBSETS, size: int = SUBSET, seed: int = 0) -> Kid:
    """Over random subsets of features (N, D) and (M, D), drawn without repetition, smaller where a set is."""
    _check(x, y)
    if subsets < 1 or size < 2:
        raise PellucidError(rule("KID subsets", "at least 1, of at least 2", (subsets, size)), "kid-subsets")
    size = min(size, len(x), len(y))
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(subsets):
        rows, columns = (torch.randperm(len(z), generator=generator)[:size].to(z.device) for z in (x, y))
        values.append(kid_exact(x[rows], y[columns]))
    found = torch.tensor(values, dtype=torch.float64)
    return Kid(float(found.mean()), float(found.std(correction=0)), subsets, size)


def kid_exact(x: Tensor, y: Tensor, block: int = _BLOCK) -> float:
    """Over all pairs of features (N, D) and (M, D), block by block in float64: the estimate without luck of subsets."""
    _check(x, y)
    within = sum(_inner_mean(z, block) for z in (x, y))
    across = sum(float(part.sum()) for _, part in _kernel_blocks(x, y, block)) / (len(x) * len(y))
    return within - 2 * across


def kid_resampled(x: Tensor, y: Tensor, rows: Tensor, columns: Tensor, block: int = _BLOCK) -> Tensor:
    """KID (R,) of R weightings of the images, (R, N) of `x` and (R, M) of `y`, in one pass over the kernel.

    A weight is how often an image was drawn. Pairs of an image with itself are left out, drawn twice or not:
    they would add the distance zero that no two different images have, and the estimate would not be unbiased.
    """
    _check(x, y)
    w, v = rows.to(x.device, torch.float64).T, columns.to(x.device, torch.float64).T  # (N, R), (M, R)
    across = sum((w[span] * (part @ v)).sum(0) for span, part in _kernel_blocks(x, y, block))
    return _weighted_mean(x, w, block) + _weighted_mean(y, v, block) - 2 * across / (w.sum(0) * v.sum(0))


def kid_paired(x: Tensor, y: Tensor, rows: Tensor, block: int = _BLOCK) -> Tensor:
    """KID (R,) of R weightings (R, N) of *pairs*: image n of `x` and image n of `y` share prompt and noise.

    Gretton et al. 2012, lemma 6: a pair is never compared within itself, neither in a set nor across. The plain
    estimate would count the likeness of each pair as likeness of the sets, and fall below zero for two equal sets.
    """
    _check(x, y)
    if len(x) != len(y):
        raise PellucidError(rule("pairs", "equally many on each side", (len(x), len(y))), "features")
    w = rows.to(x.device, torch.float64).T  # (N, R)
    across = sum((w[span] * (part @ w)).sum(0) for span, part in _kernel_blocks(x, y, block))
    own = _kernel((x.double() * y.to(x.device, torch.float64)).sum(1) / x.shape[1])  # (N,)
    pairs = w.sum(0).square() - w.square().sum(0)
    apart = (across - own @ w.square()) / pairs
    return _weighted_mean(x, w, block) + _weighted_mean(y.to(x.device), w, block) - 2 * apart


def _weighted_mean(x: Tensor, w: Tensor, block: int) -> Tensor:
    """(R,): the mean of the kernel over pairs of different images, each pair as often as it was drawn."""
    total = sum((w[span] * (part @ w)).sum(0) for span, part in _kernel_blocks(x, x, block))
    pairs = w.sum(0).square() - w.square().sum(0)
    return (total - _diagonal(x) @ w.square()) / pairs


def _inner_mean(x: Tensor, block: int) -> float:
    """The mean of the kernel over all pairs of different images of one set."""
    total = sum(float(part.sum()) for _, part in _kernel_blocks(x, x, block))
    return (total - float(_diagonal(x).sum())) / (len(x) * (len(x) - 1))


def _diagonal(x: Tensor) -> Tensor:
    """The kernel of each image with itself (N,)."""
    return _kernel(x.double().square().sum(1) / x.shape[1])


def _kernel(products: Tensor) -> Tensor:
    return (products + 1) ** 3


def _kernel_blocks(x: Tensor, y: Tensor, block: int = _BLOCK) -> Iterator[tuple[slice, Tensor]]:
    """Rows of the kernel matrix (N, M), as many at once as `block` says, with their place."""
    other = y.to(x.device, torch.float64)
    for start in range(0, len(x), block):
        span = slice(start, min(start + block, len(x)))
        yield span, _kernel(x[span].double() @ other.T / x.shape[1])


def _check(x: Tensor, y: Tensor) -> None:
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1]:
        got = (tuple(x.shape), tuple(y.shape))
        raise PellucidError(rule("features", "(N, D) and (M, D)", got), "features")
    if min(len(x), len(y)) < 2:
        raise PellucidError(rule("images for KID", "at least 2 on each side", min(len(x), len(y))), "pictures-few")


# --- Intervals ------------------------------------------------------------------------------------------------------


def kid_interval(
    x: Tensor,
    y: Tensor,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
    over: Literal["images", "both"] = "images",
    value: float | None = None,
) -> Estimate:
    """KID over all pairs of features, the images' (N, D) and the reference's (M, D), with percentiles of its resamples.

    Pairs of an image with itself are left out, so that resampling adds no bias. Where both sets have the same
    distribution the interval is too wide, never too narrow: the leading term of the statistic vanishes there. `value`
    is the estimate, where it is known already.
    """
    return percentiles(kid_draws(x, y, resamples, seed, over), kid_exact(x, y) if value is None else value, level)


def kid_draws(
    x: Tensor, y: Tensor, resamples: int = RESAMPLES, seed: int = 0, over: Literal["images", "both"] = "images"
) -> Tensor:
    """KID (R,) of every resample, all of them in one pass over the kernel; with "both" the reference is drawn too."""
    if over not in ("images", "both"):
        raise PellucidError(rule("over", "images or both", over), "resamples")
    rows = draws(len(x), resamples, seed)
    columns = draws(len(y), resamples, seed + 1) if over == "both" else torch.ones(1, len(y))
    return kid_resampled(x, y, rows, columns.expand(len(rows), -1)).cpu()
