"""What a study's images are scored with: an Inception, and the training data as it sees them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pellucid.evidence.metrics.bootstrap import Interval, draws, kid_interval, reflected, weighted
from pellucid.evidence.metrics.fid import Statistics, frechet, square_root
from pellucid.evidence.metrics.images import Pixels
from pellucid.evidence.metrics.inception import Inception, features
from pellucid.evidence.metrics.kid import kid_exact
from pellucid.evidence.metrics.measured import measure_cached
from pellucid.evidence.metrics.precision_recall import precision_recall

KID_RESAMPLES = 200
AT_ONCE = 256  # images in an Inception: 4 GB of activations
FEWEST = 4  # images that are scored: a radius needs three neighbours


@dataclass(frozen=True)
class Judge:
    """FID against all of the reference; KID, precision and recall against `some` of it (≤ neighbours, 2048)."""

    network: Inception
    statistics: Statistics
    root: Tensor  # of the covariance: the dear part of an FID, computed once
    some: Tensor

    @staticmethod
    def of(images: Tensor, network: Inception, count: int, neighbours: int, cache: Path) -> Judge:
        """Knows `count` of the images (N, 3, H, W) uint8, or all of them where there are fewer; what Inception says of
        them is kept in the folder `cache`."""
        chosen = shuffled(len(images))[:count].to(images.device)
        seen = measure_cached(Pixels(images[chosen]), network, cache, AT_ONCE)
        assert seen.features is not None
        return Judge(
            network, seen.statistics, square_root(seen.statistics.covariance), seen.features[:neighbours].clone()
        )

    def features(self, images: Tensor) -> Tensor:
        return features(images, self.network, AT_ONCE)

    def score(self, found: Tensor) -> dict[str, Any]:
        """Of the features of images, (N, 2048)."""
        some = found[: len(self.some)]
        closeness = precision_recall(some, self.some)
        spread = kid_interval(some, self.some, resamples=KID_RESAMPLES)
        return {
            "samples": len(found),
            "fid": self.fid(found),
            "kid": self.kid(found),
            "kid_low": spread.low,
            "kid_high": spread.high,
            "precision": closeness.precision,
            "recall": closeness.recall,
        }

    def fid(self, found: Tensor) -> float:
        return frechet(self.statistics, Statistics.of(found), self.root)

    def kid(self, found: Tensor) -> float:
        return kid_exact(found[: len(self.some)], self.some)

    def fid_interval(self, found: Tensor, estimate: float, resamples: int) -> Interval:
        """As `metrics.bootstrap.fid_interval`, with the root that is known."""
        rows = draws(len(found), resamples).to(found.device)
        values = [frechet(self.statistics, weighted(found, row), self.root) for row in rows]
        return reflected(torch.tensor(values, dtype=torch.float64), estimate)


def shuffled(count: int) -> Tensor:
    """The order in which training images are known: the first are compared with, and always the same."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))
