"""A graded image for a table: which attributes are right, whether it could be read, whether colours bled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pellucid.scenes.grading import Mark, graded
from pellucid.scenes.grammar import Query
from pellucid.scenes.reading import ObjectReading, Reading

ATTRIBUTES = ("count", "shape", "colour", "texture", "size", "place", "relation", "background", "background kind")


@dataclass(frozen=True)
class Verdict:
    """`marks`: for each attribute of the prompt, whether all of it is right; what cannot be read is not.

    `bled` is whether an object has the colour that the prompt gives to another one: None where there is no other.
    """

    right: bool
    marks: dict[str, bool]
    readable: bool
    bled: bool | None
    faults: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return "right" if self.right else "; ".join(self.faults)


def judge(reading: Reading, query: Query) -> Verdict:
    """A reading against a query. Of an image with trouble nothing is sure, so that nothing of it is right."""
    grade = graded(reading, query)
    sure = grade.trouble is None
    marks: dict[str, bool] = {}
    for mark in grade.marks:
        marks[mark.what] = marks.get(mark.what, sure) and mark.verdict == "right"
    faults = [] if sure else [str(grade.trouble)]
    faults += [_fault(mark) for mark in grade.marks if mark.verdict != "right"]
    return Verdict(grade.right, marks, reading.readable, bleeding(reading, query), tuple(dict.fromkeys(faults)))


def _fault(mark: Mark) -> str:
    if mark.what == "count":
        return f"{mark.seen} objects, not {mark.wanted}"
    if mark.what == "relation":
        return f"{mark.seen or 'apart'}, not {mark.wanted}"
    seen = "unclear" if mark.verdict == "unreadable" else mark.seen or "missing"
    return f"{mark.what} {seen}, not {mark.wanted}"


def bleeding(reading: Reading, query: Query) -> bool | None:
    """Whether a shape of the prompt has the colour of another one; unknown for two of the same shape."""
    pairs = [(a.shape, b.colour) for a in query.objects for b in query.objects if a.shape != b.shape]
    return any((seen.shape, seen.colour) in pairs for seen in reading.objects) if pairs else None


def reading_to_json(reading: Reading) -> dict[str, Any]:
    """A reading for a JSON file; positions to a tenth of a thousandth."""
    plain = asdict(reading)
    for seen in plain["objects"]:
        seen |= {name: round(seen[name], 4) for name in ("x", "y", "radius", "fit")}
    return plain


def reading_from_json(raw: Mapping[str, Any]) -> Reading:
    return Reading(
        objects=tuple(ObjectReading(**seen) for seen in raw["objects"]),
        relations=tuple((i, name, j) for i, name, j in raw["relations"]),
        background=raw["background"],
        kind=raw["kind"],
        trouble=raw["trouble"],
    )
