"""Grade an image against what its caption asks for: every attribute right, wrong or unreadable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.scenes.grammar import ObjectQuery, Query
from pellucid.scenes.reading import ObjectReading, Reading, read

Verdict = Literal["right", "wrong", "unreadable"]
_OWN = ("shape", "colour", "texture", "size", "place")


@dataclass(frozen=True)
class Mark:
    """One requirement of a caption, and what the image has."""

    what: str  # "count", "shape", "relation", "background", …
    wanted: object
    seen: object
    verdict: Verdict


@dataclass(frozen=True)
class Grade:
    """All marks of one image, which is right if all of them are."""

    marks: tuple[Mark, ...]
    trouble: str | None = None

    @property
    def right(self) -> bool:
        return self.trouble is None and all(mark.verdict == "right" for mark in self.marks)

    def share(self, what: str) -> float | None:
        """The share of right marks of a kind; None if the caption has no such requirement."""
        own = [mark.verdict == "right" for mark in self.marks if mark.what == what]
        return sum(own) / len(own) if own else None


def grade(images: Tensor, queries: Query | Sequence[Query]) -> list[Grade]:
    """Grades of images (N, 3, H, W) in [−1, 1], one query each; one image (3, H, W) takes one query."""
    asked = [queries] if isinstance(queries, Query) else list(queries)
    found = read(images)
    if len(found) != len(asked):
        raise PellucidError(rule("queries", f"one for each of {len(found)} images", len(asked)), "grade")
    return [graded(reading, query) for reading, query in zip(found, asked, strict=True)]


def graded(reading: Reading, query: Query) -> Grade:
    """A reading against a query, with the objects matched so that most is right."""
    marks = [_verdict("count", len(query.objects), len(reading.objects))]
    seen = list(reading.objects)[: len(query.objects) + 3]
    best: list[Mark] = []
    places = list(range(len(seen))) + [None] * max(0, len(query.objects) - len(seen))
    for order in permutations(places, len(query.objects)):
        found = _matched(query, seen, order, reading)
        if not best or _score(found) > _score(best):
            best = found
    frame = [("background", query.background, reading.background), ("background kind", query.kind, reading.kind)]
    marks += best + [_verdict(what, asked, is_) for what, asked, is_ in frame if asked is not None]
    return Grade(tuple(marks), reading.trouble)


def _matched(query: Query, seen: list[ObjectReading], order: tuple[int | None, ...], reading: Reading) -> list[Mark]:
    """The marks of objects and relations when the queried objects are taken to be those of `order`."""
    marks = []
    for wanted, i in zip(query.objects, order, strict=True):
        marks += _own_marks(wanted, None if i is None else seen[i])
    for i, name, j in query.relations:
        a, b = order[i], order[j]
        held = sorted(r for p, r, q in reading.relations if (p, q) == (a, b))
        doubtful = reading.trouble is not None or a is None or b is None
        doubtful = doubtful or None in (seen[a].shape, seen[b].shape)  # type: ignore[index]
        result: Verdict = "right" if name in held else "unreadable" if doubtful else "wrong"
        marks.append(Mark("relation", name, ", ".join(held) or None, result))
    return marks


def _own_marks(wanted: ObjectQuery, seen: ObjectReading | None) -> list[Mark]:
    asked = [(what, getattr(wanted, what)) for what in _OWN if getattr(wanted, what) is not None]
    if seen is None:
        return [Mark(what, value, None, "wrong") for what, value in asked]
    return [_verdict(what, value, getattr(seen, what)) for what, value in asked]


def _verdict(what: str, wanted: object, seen: object) -> Mark:
    return Mark(what, wanted, seen, "right" if wanted == seen else "unreadable" if seen is None else "wrong")


def _score(marks: list[Mark]) -> int:
    """How much is right; a colour weighs more, because it tells objects apart."""
    return sum((3 if mark.what == "colour" else 2) * (mark.verdict == "right") for mark in marks)
