"""The figures of a set of images against a reference and against their prompts, in one record."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import whole
from pellucid.evidence.metrics.fid import FEW, Statistics, fid, fid_interval, note_on
from pellucid.evidence.metrics.fid import RESAMPLES as FID_RESAMPLES
from pellucid.evidence.metrics.image_text import ImageText, Judge, image_text, read_prompts
from pellucid.evidence.metrics.images import ImageSet, open_images
from pellucid.evidence.metrics.inception import BATCH, Inception, cache_folder, feature_batches, load_inception
from pellucid.evidence.metrics.kid import SUBSET, SUBSETS, Kid, kid, kid_exact, kid_interval
from pellucid.evidence.metrics.precision_recall import NEIGHBOURS, precision_recall
from pellucid.evidence.statistics import LEVEL, RESAMPLES, Estimate, mean_interval
from pellucid.evidence.study.kernel import ProgressBar, no_bar
from pellucid.interop import source, weights
from pellucid.interop.atomic_files import are_whole
from pellucid.pipeline.load import default_device

# --- Features of a set ----------------------------------------------------------------------------------------------

MANY = 100_000  # images beyond which only statistics are kept: their features would be 0.8 GB
_FEATURES_FORMAT = "pellucid-features-1"
_NAMED_SKIPS = 8  # unreadable files that are named; the rest are counted


@dataclass(frozen=True)
class FeatureSet:
    """What is known of a set. `features` (N, 2048) float32 is None for statistics alone and for very large sets."""

    name: str
    statistics: Statistics
    features: Tensor | None = field(default=None, repr=False)
    skipped: tuple[str, ...] = ()  # why each image that could not be read was left out

    @property
    def count(self) -> int:
        return self.statistics.count

    def to(self, device: torch.device) -> FeatureSet:
        features = None if self.features is None else self.features.to(device)
        return replace(self, statistics=self.statistics.to(device), features=features)

    def notes(self) -> Iterator[str]:
        """Which images were left out, in words."""
        yield from self.skipped[:_NAMED_SKIPS]
        if self.skipped:
            yield f"{len(self.skipped):,} of {self.count + len(self.skipped):,} images of {self.name} were skipped."


@torch.no_grad()
def measure(
    images: ImageSet, network: Inception, batch: int = BATCH, progress: Callable[[int], object] | None = None
) -> FeatureSet:
    """Runs the network over all images. Beyond MANY of them features are summed up and not kept."""
    skipped: list[str] = []
    name = network.digest()
    found = feature_batches(images.chunks(lambda _, why: skipped.append(why)), network, batch, progress)
    if len(images) > MANY:
        statistics = replace(Statistics.streamed(found), network=name)
        return FeatureSet(images.name, statistics, None, tuple(skipped))
    parts = list(found)
    if not parts:
        got = skipped[0] if skipped else "none"
        raise PellucidError(f"images of {images.name} must be readable, at least one; got: {got}", "pictures-empty")
    features = torch.cat(parts)
    return FeatureSet(images.name, replace(Statistics.of(features), network=name), features, tuple(skipped))


def measure_cached(
    images: ImageSet,
    network: Inception,
    folder: Path,
    batch: int = BATCH,
    progress: Callable[[int], object] | None = None,
) -> FeatureSet:
    """The same from a file of an earlier run, whose name is made of the images' digest and the network's."""
    key = hashlib.sha256(f"{images.digest()}\n{network.digest()}".encode()).hexdigest()[:32]
    path = folder / f"features-{key}.safetensors"
    if path.is_file():
        with contextlib.suppress(PellucidError):  # a damaged cache is no error: it is made again
            return _read_features(path, images.name).to(network.device)
    found = measure(images, network, batch, progress)
    if not found.skipped:  # or what was skipped would not be named the next time
        with contextlib.suppress(OSError):  # a full or read-only disk costs time, not the result
            folder.mkdir(parents=True, exist_ok=True)
            features = {} if found.features is None else {"features": found.features}
            found.statistics.write(path, _FEATURES_FORMAT, **features)
    return found


def _read_features(path: Path, name: str) -> FeatureSet:
    """What `measure_cached` wrote."""
    tensors, words = weights.read_safetensors(path), weights.metadata_of(path)
    features, count = tensors.get("features"), whole(words.get("count", ""))
    known = words.get("format") == _FEATURES_FORMAT and {"mean", "covariance"} <= set(tensors)
    if not are_whole(tensors, words.get("digests")):
        raise PellucidError(rule(path.name, "as it was written", "other bits than its digests say"), "features-file")
    if not known or count is None or (features is not None and len(features) != count):
        raise PellucidError(rule(path.name, f"of format {_FEATURES_FORMAT}", words.get("format")), "features-file")
    statistics = Statistics(tensors["mean"], tensors["covariance"], count, words.get("network", ""))
    return FeatureSet(name, statistics, features)


# --- Score ----------------------------------------------------------------------------------------------------------

_SCORE_VERSION = 1


@dataclass(frozen=True)
class ScoreConfig:
    """How to score. `resamples` 0 leaves the intervals away; FID takes at most FID_RESAMPLES of them."""

    subsets: int = SUBSETS
    subset: int = SUBSET
    neighbours: int = NEIGHBOURS
    resamples: int = RESAMPLES
    level: float = LEVEL
    seed: int = 0

    def __post_init__(self) -> None:
        if self.resamples < 0 or self.resamples == 1:
            raise PellucidError(rule("resamples", "0, or at least 2", self.resamples), "resamples")

    @property
    def fid_resamples(self) -> int:
        return min(self.resamples, FID_RESAMPLES)


@dataclass(frozen=True)
class Score:
    """Everything that was measured; what was not is None, and `notes` say why, and what to be careful with."""

    images: str
    count: int
    reference: str | None = None
    reference_count: int | None = None
    fid: Estimate | None = None
    kid: Estimate | None = None  # over all pairs
    kid_subsets: Kid | None = None  # over random subsets, as papers report it
    precision: Estimate | None = None
    recall: Estimate | None = None
    image_text: Estimate | None = None
    cosines: tuple[float, ...] | None = None  # of each image with its prompt
    notes: tuple[str, ...] = ()

    @property
    def prefers_kid(self) -> bool:
        """Whether there are too few images for FID to be read without care."""
        return min(self.count, self.count if self.reference_count is None else self.reference_count) < FEW

    def to_json(self) -> dict[str, Any]:
        """Plain data, without what was not measured."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        held |= {name: _estimate_json(one) for name, one in held.items() if isinstance(one, Estimate)}
        held |= {"kid_subsets": None if self.kid_subsets is None else asdict(self.kid_subsets)}
        held = {name: value for name, value in held.items() if value is not None}
        return {"version": _SCORE_VERSION, **held, "notes": list(self.notes)}


def _estimate_json(one: Estimate) -> dict[str, Any]:
    if one.ends is None:
        return {"value": one.value, "interval": None}
    about = {"level": one.level, "resamples": one.count, "bias": one.bias}
    return {"value": one.value, "interval": {"low": one.low, "high": one.high, **about}}


def score(
    images: FeatureSet,
    reference: FeatureSet,
    config: ScoreConfig | None = None,
    progress: Callable[[], object] | None = None,
) -> Score:
    """FID and, where both sides have features, KID, precision and recall. `progress`: called `stages(config)` times."""
    config, done = config or ScoreConfig(), progress or (lambda: None)
    notes = [*images.notes(), *reference.notes(), *_notes_on(images, reference)]
    x, y = images.features, reference.features
    distance = Estimate(fid(reference.statistics, images.statistics))
    done()
    if x is not None and config.resamples:
        against = reference.statistics.to(x.device)
        resampled = fid_interval(x, against, config.fid_resamples, config.seed, config.level, done)
        distance = replace(resampled, value=distance.value)
    found: dict[str, Any] = {} if x is None or y is None else _pairwise(x, y.to(x.device), config, done)
    return Score(
        images.name,
        images.count,
        reference.name,
        reference.count,
        distance,
        **found,
        notes=tuple(notes),
    )


def stages(config: ScoreConfig) -> int:
    """How often `score` reports progress, at most."""
    return 1 + config.fid_resamples + 4


def _pairwise(x: torch.Tensor, y: torch.Tensor, config: ScoreConfig, done: Callable[[], object]) -> dict[str, Any]:
    """What needs the features of both sides (N, D), (M, D)."""
    subsets = kid(x, y, config.subsets, config.subset, config.seed)
    done()
    exact = Estimate(kid_exact(x, y))
    done()
    if config.resamples:
        exact = kid_interval(x, y, config.resamples, config.seed, config.level, value=exact.value)
    done()
    both = precision_recall(x, y, config.neighbours)
    done()
    shares = {"precision": Estimate(both.precision), "recall": Estimate(both.recall)}
    if config.resamples:
        for name, inside in (("precision", both.inside), ("recall", both.reached)):
            found = mean_interval(inside, config.resamples, config.seed, config.level)
            shares[name] = replace(found, value=shares[name].value)
    return {"kid": exact, "kid_subsets": subsets, **shares}


def _notes_on(images: FeatureSet, reference: FeatureSet) -> Iterator[str]:
    """What a reader of the figures must know."""
    if words := note_on(min(images.count, reference.count)):
        yield words
    width = len(images.statistics.mean)
    if min(images.count, reference.count) <= width:
        few = min(images.count, reference.count)
        yield f"The covariance of {width:,} features cannot have full rank from {few:,} images."
    bare = [side.name for side in (images, reference) if side.features is None]
    if bare:
        yield f"KID, precision and recall need features; {' and '.join(bare)} gave statistics alone."


def with_image_text(found: Score, text: ImageText) -> Score:
    """The same record, and how well the images fit their prompts."""
    notes = list(found.notes)
    if text.cut:
        notes.append(f"{text.cut:,} prompts were longer than the encoder's window and were cut there.")
    if text.skipped and found.reference is None:
        notes.append(f"{text.skipped:,} images could not be read and were skipped.")
    return replace(found, image_text=text.estimate, cosines=tuple(text.cosines.tolist()), notes=tuple(notes))


# --- A whole run ----------------------------------------------------------------------------------------------------

_MEGABYTES = 92  # of Inception's weights, when they are downloaded


class ScoreRun:
    """The sets and networks of a score; what is missing is found before the long work begins."""

    def __init__(
        self,
        images: str,
        reference: str | None = None,
        config: ScoreConfig | None = None,
        batch: int = BATCH,
        device: str | None = None,
        *,
        cached: bool = True,
        bar: ProgressBar = no_bar,
    ) -> None:
        self.names, self.config = (images, reference), config or ScoreConfig()
        self.images = open_images(images)
        self.reference = None if reference is None else open_images(reference)
        self.batch, self.cached, self.bar = batch, cached, bar
        self.device = source.place(device) or default_device()

    def score(
        self, inception: Path | None = None, save: Callable[[Callable[[Path], None]], object] | None = None
    ) -> Score:
        """The figures against the reference; without one, only the count. `save` is called with a function that writes
        the images' statistics into a file."""
        name, against = self.names
        if against is None and save is None:
            return Score(name, len(self.image_set("--clip")))
        if save is not None:
            self.image_set("--save")
        network = self.network(inception)
        mine = self.measured(name, self.images, network, False)
        if save is not None:
            save(mine.statistics.save)
        if against is None:
            return Score(name, mine.count, notes=tuple(mine.notes()))
        other = self.measured(against, self.reference, network, self.cached)
        with self.bar("scoring", stages(self.config)) as done:
            return score(mine, other, self.config, done)

    def network(self, path: Path | None) -> Inception | None:
        """FID's network, unless both sides are statistics already."""
        if all(isinstance(side, Statistics) for side in (self.images, self.reference) if side is not None):
            if path is not None:
                raise PellucidError(rule("--inception", "left out for statistics", str(path)), "usage")
            return None
        with self.bar("Inception's weights", _MEGABYTES) as done:
            return load_inception(path, self.device, lambda *_: done())

    def measured(self, name: str, side: Any, network: Inception | None, cached: bool) -> FeatureSet:
        """One side as the network sees it."""
        if network is None or isinstance(side, Statistics):
            return FeatureSet(name, side.to(self.device))
        with self.bar(name, len(side)) as done:
            if cached:
                return measure_cached(side, network, cache_folder(), self.batch, done)
            return measure(side, network, self.batch, done)

    def image_set(self, option: str) -> ImageSet:
        if isinstance(self.images, Statistics):
            raise PellucidError(rule(f"IMAGES of {option}", "images", "statistics"), "usage")
        return self.images

    def judge(self, clip: str, prompts: Path) -> Callable[[], ImageText]:
        """What says how well each image fits its prompt, ready to run."""
        images = self.image_set("--clip")
        texts, judge = read_prompts(prompts, images), Judge.load(clip, self.device)

        def run() -> ImageText:
            with self.bar("prompts", len(images)) as done:
                return image_text(images, texts, judge, self.config.resamples, self.config.seed, done)

        return run
