"""The figures of a set of images against a reference and against their prompts, in one record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.metrics.bootstrap import (
    FID_RESAMPLES,
    LEVEL,
    RESAMPLES,
    Interval,
    fid_interval,
    kid_interval,
    mean_interval,
)
from pellucid.evidence.metrics.fid import FEW, fid, note_on
from pellucid.evidence.metrics.image_text import ImageText
from pellucid.evidence.metrics.kid import SUBSET, SUBSETS, Kid, kid, kid_exact
from pellucid.evidence.metrics.measured import Measured
from pellucid.evidence.metrics.precision_recall import NEIGHBOURS, precision_recall

VERSION = 1


@dataclass(frozen=True)
class Asked:
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
class Figure:
    """A value with its interval, where there is one."""

    value: float
    interval: Interval | None = None


@dataclass(frozen=True)
class Score:
    """Everything that was measured; what was not is None, and `notes` say why and what to heed."""

    images: str
    count: int
    reference: str | None = None
    reference_count: int | None = None
    fid: Figure | None = None
    kid: Figure | None = None  # over all pairs
    kid_subsets: Kid | None = None  # over random subsets, as papers report it
    precision: Figure | None = None
    recall: Figure | None = None
    image_text: Figure | None = None
    cosines: tuple[float, ...] | None = None  # of each image with its prompt
    notes: tuple[str, ...] = ()

    @property
    def prefers_kid(self) -> bool:
        """Whether there are too few images for FID to be read without care."""
        return min(self.count, self.count if self.reference_count is None else self.reference_count) < FEW

    def to_json(self) -> dict[str, Any]:
        """Plain data, without what was not measured."""
        held = {name: value for name, value in asdict(self).items() if value is not None}
        return {"version": VERSION, **held, "notes": list(self.notes)}


def score(
    images: Measured, reference: Measured, asked: Asked | None = None, progress: Callable[[], object] | None = None
) -> Score:
    """FID and, where both sides have features, KID, precision and recall. `progress`: called `stages(asked)` times."""
    asked, done = asked or Asked(), progress or (lambda: None)
    notes = [*images.notes(), *reference.notes(), *notes_on(images, reference)]
    x, y = images.features, reference.features
    value = fid(reference.statistics, images.statistics)
    done()
    interval = None
    if x is not None and asked.resamples:
        against = reference.statistics.to(x.device)
        interval = fid_interval(x, against, asked.fid_resamples, asked.seed, asked.level, done)
    found: dict[str, Any] = {} if x is None or y is None else pairwise(x, y.to(x.device), asked, done)
    return Score(
        images.name,
        images.count,
        reference.name,
        reference.count,
        Figure(value, interval),
        **found,
        notes=tuple(notes),
    )


def stages(asked: Asked) -> int:
    """How often `score` reports progress, at most."""
    return 1 + asked.fid_resamples + 4


def pairwise(x: torch.Tensor, y: torch.Tensor, asked: Asked, done: Callable[[], object]) -> dict[str, Any]:
    """What needs the features of both sides (N, D), (M, D)."""
    subsets = kid(x, y, asked.subsets, asked.subset, asked.seed)
    done()
    exact = kid_exact(x, y)
    done()
    spread = kid_interval(x, y, asked.resamples, asked.seed, asked.level) if asked.resamples else None
    done()
    both = precision_recall(x, y, asked.neighbours)
    done()
    shares = {}
    for name, value, inside in (
        ("precision", both.precision, both.inside),
        ("recall", both.recall, both.reached),
    ):
        interval = mean_interval(inside, asked.resamples, asked.seed, asked.level) if asked.resamples else None
        shares[name] = Figure(value, interval)
    return {"kid": Figure(exact, spread), "kid_subsets": subsets, **shares}


def notes_on(images: Measured, reference: Measured) -> Iterator[str]:
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
    figure = Figure(text.value, text.interval)
    return replace(found, image_text=figure, cosines=tuple(text.cosines.tolist()), notes=tuple(notes))
