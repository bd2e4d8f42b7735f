"""The figures of a guidance study: every cell's means with intervals, and what they are compared with.

Prompts are what is drawn again for an interval: images of one prompt are alike. Of a single prompt it is images.
An interval of shares is never narrower than Wilson's for as many images: where all are right, drawing them again
would say that no other image could be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pellucid.evidence.adherence.shares import Share
from pellucid.evidence.metrics.bootstrap import mean_interval
from pellucid.evidence.study.guidance import TRUE, Study
from pellucid.evidence.study.guidance_measures import LOOKS


@dataclass(frozen=True)
class Kind:
    """A figure in words; `percent` where it is a share, `more` whether more of it is better (None: neither)."""

    title: str
    percent: bool = False
    more: bool | None = None


KINDS = {
    "right": Kind("all right", True, True),
    "attributes": Kind("attributes right", True, True),
    "image_text": Kind("image-text score", False, True),
    "bled": Kind("colour of another object", True, False),
    "saturation": Kind("clipped values", True, False),
    "colourfulness": Kind("colourfulness"),
    "sharpness": Kind("sharpness"),
    "diversity": Kind("diversity", False, True),
}

SHARES = ("right", "bled")  # of images: each is 0 or 1


@dataclass(frozen=True)
class Figure:
    """A mean and its 95 % interval, None where there is but one of what is drawn again."""

    value: float
    low: float | None = None
    high: float | None = None

    def plain(self) -> dict[str, float | None]:
        return {"value": self.value, "low": self.low, "high": self.high}

    def words(self, percent: bool = False) -> str:
        """'96.2 % (94.9 to 97.2)', or with three significant digits."""
        if self.low is None or self.high is None:
            return f"{number(self.value, percent)}{' %' if percent else ''}"
        ends = f"{number(self.low, percent)} to {number(self.high, percent)}"
        return f"{number(self.value, percent)}{' %' if percent else ''} ({ends})"


def number(value: float, percent: bool) -> str:
    return f"{100 * value:.1f}" if percent else f"{value:.3g}"


@dataclass(frozen=True)
class Cell:
    """One guidance: its figures, and for each the mean of every prompt (P,), NaN where a prompt does not tell."""

    guidance: str
    count: int  # images
    figures: dict[str, Figure]
    by_prompt: dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """What looks are compared with: true images, or those without guidance."""

    name: str
    values: dict[str, float]


@dataclass(frozen=True)
class Results:
    """The cells of a study that are whole, by their guidance."""

    study: Study
    cells: dict[str, Cell]
    reference: Reference

    @property
    def adherence(self) -> str:
        """The figure that says whether images are what was asked for."""
        return "right" if self.study.asked.queries is not None else "image_text"

    @property
    def names(self) -> list[str]:
        """The figures that were measured, in the order of KINDS."""
        held = {name for cell in self.cells.values() for name in cell.figures}
        return [name for name in KINDS if name in held]

    def line(self, words: str) -> list[tuple[float, Cell]]:
        """The cells of a rule, by scale."""
        pairs = [(scale, self.study.guidance(words, scale)) for scale in self.study.config.scales]
        return [(scale, self.cells[guidance]) for scale, guidance in pairs if guidance in self.cells]


def results(study: Study) -> Results | None:
    """Of what is done; None before a first cell and its reference are whole."""
    cells = {}
    for guidance in study.guidances:
        if rows := study.rows(guidance):
            cells[guidance] = cell(guidance, [row["figures"] for row in rows], study.config.seeds)
    reference = compared_with(study, cells)
    return None if not cells or reference is None else Results(study, cells, reference)


def compared_with(study: Study, cells: Mapping[str, Cell]) -> Reference | None:
    true = [row for row in study.records.rows if row["guidance"] == TRUE]
    if true:
        values = true[0]["figures"]
        return Reference("true images", {name: math.fsum(values[name]) / len(values[name]) for name in LOOKS})
    plain = cells.get("1")
    return None if plain is None else Reference("unguided ones", {name: plain.figures[name].value for name in LOOKS})


def cell(guidance: str, rows: Sequence[Mapping[str, Any]], seeds: int) -> Cell:
    """From the records of one cell."""
    joined = {name: [value for row in rows for value in row[name]] for name in rows[0]}
    figures: dict[str, Figure] = {}
    means: dict[str, Tensor] = {}
    for name, listed in joined.items():
        values = torch.tensor([math.nan if value is None else float(value) for value in listed], dtype=torch.float64)
        means[name] = values if name == "diversity" else values.reshape(-1, seeds).mean(1)
        drawn = values if len(means[name]) == 1 else means[name]
        drawn = drawn[~drawn.isnan()]
        if len(drawn):
            figures[name] = of_share(figure(drawn), values) if name in SHARES else figure(drawn)
    return Cell(guidance, len(joined[LOOKS[0]]), figures, means)


def of_share(found: Figure, values: Tensor) -> Figure:
    """With Wilson's interval of all images, where that is wider."""
    low, high = Share.of(value == 1 for value in values.tolist() if not math.isnan(value)).interval
    if found.low is None or found.high is None:
        return Figure(found.value, low, high)
    return Figure(found.value, min(found.low, low), max(found.high, high))


def figure(values: Tensor) -> Figure:
    mean = float(values.mean())
    if len(values) < 2:
        return Figure(mean)
    spread = mean_interval(values)
    return Figure(mean, spread.low, spread.high)
