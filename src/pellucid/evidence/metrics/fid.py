"""The Fréchet distance between Gaussians that are fitted to features (Heusel et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import whole
from pellucid.evidence.statistics import LEVEL, Estimate, draw_batches, reflected
from pellucid.interop import weights
from pellucid.interop.atomic_files import are_whole, digests_in, put

FORMAT = "pellucid-statistics-1"
FEW = 10_000  # images below which FID says more about their number than about their quality
RESAMPLES = 50  # each costs a covariance and an eigenvalue problem


@dataclass(frozen=True)
class Statistics:
    """Mean (D,) and covariance (D, D) of `count` features, float64; the covariance of a single one is zero.

    `network` is the digest of the weights that made the features, where it is known: others cannot be compared.
    """

    mean: Tensor
    covariance: Tensor
    count: int
    network: str = ""

    @staticmethod
    def of(features: Tensor) -> Statistics:
        """Of features (N, D), in float64 on the device where they are."""
        if features.ndim != 2 or not len(features):
            raise PellucidError(rule("shape of features", "(N, D), N at least 1", tuple(features.shape)), "features")
        found = features.double()
        mean = found.mean(0)
        centred = found - mean
        return Statistics(mean, centred.T @ centred / max(len(found) - 1, 1), len(found))

    @staticmethod
    def streamed(batches: Iterable[Tensor]) -> Statistics:
        """Of features that come batch by batch and are not kept."""
        found: Statistics | None = None
        for batch in batches:
            part = Statistics.of(batch)
            found = part if found is None else found.merge(part)
        if found is None:
            raise PellucidError(rule("images", "at least one", "none"), "pictures-empty")
        return found

    def merge(self, other: Statistics) -> Statistics:
        """Of both sets together (Chan et al. 1979): no feature is seen twice."""
        if self.mean.shape != other.mean.shape:
            raise PellucidError(rule("features", f"of width {len(self.mean)}", len(other.mean)), "features")
        mean, covariance = other.mean.to(self.mean), other.covariance.to(self.covariance)
        count = self.count + other.count
        apart = mean - self.mean
        scatter = (self.count - 1) * self.covariance + (other.count - 1) * covariance
        scatter = scatter + torch.outer(apart, apart) * (self.count * other.count / count)
        return Statistics(self.mean + apart * (other.count / count), scatter / max(count - 1, 1), count, self.network)

    def to(self, device: torch.device | str) -> Statistics:
        return replace(self, mean=self.mean.to(device), covariance=self.covariance.to(device))

    def save(self, path: str | Path) -> None:
        """As one safetensors file, whole or not at all."""
        self.write(Path(path), FORMAT)

    def write(self, path: Path, form: str, **more: Tensor) -> None:
        """In a file of this format, with further tensors of the same images."""
        held = {"mean": self.mean, "covariance": self.covariance, **more}
        tensors = {name: tensor.cpu().contiguous() for name, tensor in held.items()}
        words = {"format": form, "count": str(self.count), "network": self.network}
        put(path, partial(save_file, tensors, metadata={**words, "digests": digests_in(tensors)}))

    @staticmethod
    def load(path: str | Path) -> Statistics:
        """From a file that `save` wrote."""
        place = Path(path)
        if weights.kind_of(place) != "safetensors":
            raise PellucidError(rule(place.name, "statistics in a safetensors file", "another format"), "statistics")
        tensors, words = weights.read_safetensors(place), weights.metadata_of(place)
        if not are_whole(tensors, words.get("digests")):
            advice = "Make it again."
            raise PellucidError(
                rule(place.name, "as it was written", "other bits than its digests say", advice), "statistics"
            )
        mean, covariance, count = tensors.get("mean"), tensors.get("covariance"), whole(words.get("count", ""))
        if words.get("format") != FORMAT or mean is None or covariance is None or count is None:
            got = words.get("format", "a file without that mark")
            raise PellucidError(rule(place.name, f"statistics of format {FORMAT}", got), "statistics")
        square = mean.ndim == 1 and covariance.shape == (len(mean), len(mean))
        if not square or not (mean.isfinite().all() and covariance.isfinite().all()) or count < 1:
            raise PellucidError(rule(place.name, "finite, (D,) and (D, D)", tuple(covariance.shape)), "statistics")
        return Statistics(mean.double(), covariance.double(), count, words.get("network", ""))


def fid(a: Statistics | Tensor, b: Statistics | Tensor) -> float:
    """|m₁ − m₂|² + tr C₁ + tr C₂ − 2 tr √(C₁C₂), of statistics or of features (N, D), on the device of `a`."""
    first = a if isinstance(a, Statistics) else Statistics.of(a)
    second = b if isinstance(b, Statistics) else Statistics.of(b)
    if first.mean.shape != second.mean.shape:
        raise PellucidError(rule("features", f"of width {len(first.mean)}", len(second.mean)), "features")
    if first.network and second.network and first.network != second.network:
        must = f"of one network, {first.network[:8]}"
        raise PellucidError(rule("features", must, second.network[:8], "Make them again with its weights."), "features")
    if min(first.count, second.count) < 2:
        count = min(first.count, second.count)
        raise PellucidError(rule("images for FID", "at least 2 on each side", count), "pictures-few")
    return frechet(first, second.to(first.mean.device), square_root(first.covariance))


def frechet(a: Statistics, b: Statistics, root: Tensor) -> float:
    """The distance, given the root of a's covariance: to compare many with `a` it is computed once.

    C₁C₂ has the eigenvalues of the symmetric √C₁ C₂ √C₁, so that no root of a general matrix is needed.
    """
    values = torch.linalg.eigvalsh(root @ b.covariance @ root)
    overlap = values.clamp(min=0).sqrt().sum()
    apart = (a.mean - b.mean).square().sum()
    # Above 0 by definition; rounding may leave the distance of a set from itself a little below.
    return max(0.0, float(apart + a.covariance.trace() + b.covariance.trace() - 2 * overlap))


def square_root(covariance: Tensor) -> Tensor:
    """The symmetric root of a symmetric matrix; eigenvalues that rounding pushed below 0 are 0."""
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def note_on(count: int) -> str | None:
    """The caution that an FID of this many images needs; none from 10,000 on."""
    if count >= FEW:
        return None
    words = f"FID of {count:,} images is biased upwards and must not be compared with FID of other counts"
    return f"{words}; below {FEW:,} prefer KID."


# --- Intervals ------------------------------------------------------------------------------------------------------


def fid_interval(
    features: Tensor,
    reference: Statistics,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
    progress: Callable[[], object] | None = None,
) -> Estimate:
    """FID of features (N, D) against a reference, with its interval; the reference stays as it is.

    FID is biased upwards at any finite count, and resampling adds the same bias once more: a resampled set holds about
    63 % of the images, some of them twice. Plain percentiles would lie above the estimate, often all of them. So the
    resamples are moved back by their mean excess, then reflected at the estimate: an interval for the expected FID *at
    this count*. The excess is given as `bias`; the estimate less it is about the FID of infinitely many images.
    """
    estimate = frechet(reference, Statistics.of(features).to(reference.mean.device), square_root(reference.covariance))
    return reflected(fid_draws(features, reference, resamples, seed, progress), estimate, level)


def fid_draws(
    features: Tensor,
    reference: Statistics,
    resamples: int = RESAMPLES,
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
