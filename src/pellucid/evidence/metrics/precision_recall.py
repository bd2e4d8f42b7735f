"""Improved precision and recall (Kynkäänniemi et al. 2019), on Inception's features instead of VGG's.

A set's manifold is the union of balls around its features, each as large as the distance to the k-th neighbour of its
own set. Precision: the share of images inside the reference's manifold. Recall: the share of the reference inside
that of the images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule

NEIGHBOURS = 3  # the paper's
_BLOCK = 2_048  # rows of the distances at once: at 50,000 columns 0.8 GB
_ROUNDING = 1e-12  # of a squared distance, relative to the squared norms that it is the difference of


@dataclass(frozen=True)
class PrecisionRecall:
    """Both shares, and of each image (N,) and each of the reference (M,) whether it is inside."""

    precision: float
    recall: float
    inside: Tensor
    reached: Tensor
    neighbours: int = NEIGHBOURS


def precision_recall(
    images: Tensor, reference: Tensor, neighbours: int = NEIGHBOURS, block: int = _BLOCK
) -> PrecisionRecall:
    """Of features (N, D) and (M, D), in float64, block by block."""
    if images.ndim != 2 or reference.ndim != 2 or images.shape[1] != reference.shape[1]:
        got = (tuple(images.shape), tuple(reference.shape))
        raise PellucidError(rule("features", "(N, D) and (M, D)", got), "features")
    few = min(len(images), len(reference))
    if not 1 <= neighbours < few:
        must = f"from 1 to {few - 1}, below the number of images"
        raise PellucidError(rule("neighbours", must, neighbours), "neighbours")
    reference = reference.to(images.device)
    inside = _within(images, reference, radii(reference, neighbours, block), block)
    reached = _within(reference, images, radii(images, neighbours, block), block)
    return PrecisionRecall(_share(inside), _share(reached), inside, reached, neighbours)


def _share(found: Tensor) -> float:
    return float(found.double().mean())


def radii(x: Tensor, neighbours: int, block: int = _BLOCK) -> Tensor:
    """Squared distance of each feature to its k-th neighbour (N,), itself not counted."""
    found = []
    for span, part in _squared_distances(x, x, block):
        own = torch.arange(span.start, span.stop, device=x.device)
        part[own - span.start, own] = torch.inf
        found.append(part.kthvalue(neighbours, dim=1).values)
    return torch.cat(found)


def _within(x: Tensor, centres: Tensor, squares: Tensor, block: int = _BLOCK) -> Tensor:
    """Of each feature (N,) whether a ball around one of the centres holds it."""
    return torch.cat([(part <= squares).any(1) for _, part in _squared_distances(x, centres, block)])


def _squared_distances(x: Tensor, y: Tensor, block: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows of the matrix of squared distances (N, M), with their place. What is only rounding is zero."""
    other = y.double()
    lengths = other.square().sum(1)
    for start in range(0, len(x), block):
        rows = x[start : start + block].double()
        sums = rows.square().sum(1, keepdim=True) + lengths
        squares = sums - 2 * rows @ other.T
        yield slice(start, start + len(rows)), squares.where(squares > _ROUNDING * sums, 0.0)
