"""A set of images as Inception sees it: statistics, features where they are kept, and a cache of both."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import whole
from pellucid.evidence.metrics.fid import Statistics
from pellucid.evidence.metrics.images import ImageSet
from pellucid.evidence.metrics.inception import BATCH, Inception, feature_batches
from pellucid.interop import weights
from pellucid.interop.atomic_files import are_whole, digests_in, put

MANY = 100_000  # images beyond which only statistics are kept: their features would be 0.8 GB
FEATURES_FORMAT = "pellucid-features-1"
NAMED_SKIPS = 8  # unreadable files that are named; the rest are counted


@dataclass(frozen=True)
class Measured:
    """What is known of a set. `features` (N, 2048) float32 is None for statistics alone and for very large sets."""

    name: str
    statistics: Statistics
    features: Tensor | None = field(default=None, repr=False)
    skipped: tuple[str, ...] = ()  # why each image that could not be read was left out

    @property
    def count(self) -> int:
        return self.statistics.count

    def to(self, device: torch.device) -> Measured:
        features = None if self.features is None else self.features.to(device)
        return replace(self, statistics=self.statistics.to(device), features=features)

    def notes(self) -> Iterator[str]:
        """Which images were left out, in words."""
        yield from self.skipped[:NAMED_SKIPS]
        if self.skipped:
            yield f"{len(self.skipped):,} of {self.count + len(self.skipped):,} images of {self.name} were skipped."


@torch.no_grad()
def measure(
    images: ImageSet, network: Inception, batch: int = BATCH, progress: Callable[[int], object] | None = None
) -> Measured:
    """Runs the network over all images. Beyond MANY of them features are summed up and not kept."""
    skipped: list[str] = []
    name = network.digest()
    found = feature_batches(images.chunks(lambda _, why: skipped.append(why)), network, batch, progress)
    if len(images) > MANY:
        statistics = replace(Statistics.streamed(found), network=name)
        return Measured(images.name, statistics, None, tuple(skipped))
    parts = list(found)
    if not parts:
        got = skipped[0] if skipped else "none"
        raise PellucidError(f"images of {images.name} must be readable, at least one; got: {got}", "pictures-empty")
    features = torch.cat(parts)
    return Measured(images.name, replace(Statistics.of(features), network=name), features, tuple(skipped))


def measure_cached(
    images: ImageSet,
    network: Inception,
    folder: Path,
    batch: int = BATCH,
    progress: Callable[[int], object] | None = None,
) -> Measured:
    """The same from a file of an earlier run, whose name is made of the images' digest and the network's."""
    key = hashlib.sha256(f"{images.digest()}\n{network.digest()}".encode()).hexdigest()[:32]
    path = folder / f"features-{key}.safetensors"
    if path.is_file():
        with contextlib.suppress(PellucidError):  # a damaged cache is no error: it is made again
            return read(path, images.name).to(network.device)
    found = measure(images, network, batch, progress)
    if not found.skipped:  # what was skipped would not be told the next time
        with contextlib.suppress(OSError):  # a full or read-only disk costs time, not the result
            folder.mkdir(parents=True, exist_ok=True)
            write(found, path)
    return found


def write(found: Measured, path: Path) -> None:
    """Whole or not at all."""
    statistics = found.statistics
    tensors = {"mean": statistics.mean, "covariance": statistics.covariance}
    if found.features is not None:
        tensors["features"] = found.features
    words = {"format": FEATURES_FORMAT, "count": str(statistics.count), "network": statistics.network}
    plain = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    put(path, partial(save_file, plain, metadata={**words, "digests": digests_in(plain)}))


def read(path: Path, name: str) -> Measured:
    """What `write` wrote."""
    tensors, words = weights.read_safetensors(path), weights.metadata_of(path)
    features, count = tensors.get("features"), whole(words.get("count", ""))
    known = words.get("format") == FEATURES_FORMAT and {"mean", "covariance"} <= set(tensors)
    if not are_whole(tensors, words.get("digests")):
        raise PellucidError(rule(path.name, "as it was written", "other bits than its digests say"), "features-file")
    if not known or count is None or (features is not None and len(features) != count):
        raise PellucidError(rule(path.name, f"of format {FEATURES_FORMAT}", words.get("format")), "features-file")
    statistics = Statistics(tensors["mean"], tensors["covariance"], count, words.get("network", ""))
    return Measured(name, statistics, features)
