"""The figures of a guidance study, the useful scales of each rule, and the guidance to use.

Prompts are resampled for an interval, because images of one prompt are alike; of a single prompt it is images. An
interval of shares is never narrower than Wilson's for as many images: where all are right, resampling them would say
that no other image could be wrong.

A scale is *useful* under a rule when
1. it is not measurably less adherent than the most adherent cell of the whole study: the 95 % interval of the mean
   difference, prompt by prompt, from the same noise, does not lie below zero; some image of it must be all right; and
2. mean colourfulness and mean sharpness are each within `tolerance` (a share) of the reference's, and the share of
   clipped values is at most CLIPPED above the reference's.
The *useful range* of a rule is the run of neighbouring tested scales, all of them useful, that holds the most adherent
useful one: between two of them nothing was measured, beyond the outer ones nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pellucid.core.wording import counted
from pellucid.evidence.statistics import Estimate, Share, mean_interval, percent
from pellucid.evidence.study.guidance import LOOKS, TRUE_IMAGES, GuidanceStudy, joined_rows

# --- Figures --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FigureKind:
    """A figure in words; `percent` where it is a share, `more` whether more of it is better (None: neither)."""

    title: str
    percent: bool = False
    more: bool | None = None

    def words(self, figure: Estimate) -> str:
        """'96.2 % (94.9 to 97.2)', or with three significant digits."""
        return figure.words(percent, " %") if self.percent else figure.words("{:.3g}".format)


KINDS = {
    "right": FigureKind("all right", True, True),
    "attributes": FigureKind("attributes right", True, True),
    "image_text": FigureKind("image-text score", False, True),
    "bled": FigureKind("colour of another object", True, False),
    "saturation": FigureKind("clipped values", True, False),
    "colourfulness": FigureKind("colourfulness"),
    "sharpness": FigureKind("sharpness"),
    "diversity": FigureKind("diversity", False, True),
}

_SHARES = ("right", "bled")  # of images: each is 0 or 1


@dataclass(frozen=True)
class GuidanceCell:
    """One guidance: its figures, and for each the mean of every prompt (P,), NaN where a prompt does not tell."""

    guidance: str
    count: int  # images
    figures: dict[str, Estimate]
    by_prompt: dict[str, Tensor]


@dataclass(frozen=True)
class LooksReference:
    """What looks are compared with: true images, or those without guidance."""

    name: str
    values: dict[str, float]


@dataclass(frozen=True)
class GuidanceResults:
    """The cells of a study that are whole, by their guidance."""

    study: GuidanceStudy
    cells: dict[str, GuidanceCell]
    reference: LooksReference

    @property
    def adherence(self) -> str:
        """The figure that says whether images show what their prompts say."""
        return "right" if self.study.asked.queries is not None else "image_text"

    @property
    def names(self) -> list[str]:
        """The figures that were measured, in the order of KINDS."""
        held = {name for cell in self.cells.values() for name in cell.figures}
        return [name for name in KINDS if name in held]

    def line(self, words: str) -> list[tuple[float, GuidanceCell]]:
        """The cells of a rule, by scale."""
        pairs = [(scale, self.study.guidance(words, scale)) for scale in self.study.config.scales]
        return [(scale, self.cells[guidance]) for scale, guidance in pairs if guidance in self.cells]


def results_of(study: GuidanceStudy) -> GuidanceResults | None:
    """Of what is done; None before a first cell and its reference are whole."""
    cells = {}
    for guidance in study.guidances:
        if rows := study.rows(guidance):
            cells[guidance] = cell_of_rows(guidance, [row["figures"] for row in rows], study.config.seeds)
    reference = _reference_of(study, cells)
    return None if not cells or reference is None else GuidanceResults(study, cells, reference)


def _reference_of(study: GuidanceStudy, cells: Mapping[str, GuidanceCell]) -> LooksReference | None:
    true = [row for row in study.records.rows if row["guidance"] == TRUE_IMAGES]
    if true:
        values = true[0]["figures"]
        return LooksReference("true images", {name: math.fsum(values[name]) / len(values[name]) for name in LOOKS})
    if (plain := cells.get("1")) is None:
        return None
    return LooksReference("unguided ones", {name: plain.figures[name].value for name in LOOKS})


def cell_of_rows(guidance: str, rows: Sequence[Mapping[str, Any]], seeds: int) -> GuidanceCell:
    """From the records of one cell."""
    joined = joined_rows(rows)
    figures: dict[str, Estimate] = {}
    means: dict[str, Tensor] = {}
    for name, listed in joined.items():
        values = torch.tensor([math.nan if value is None else float(value) for value in listed], dtype=torch.float64)
        means[name] = values if name == "diversity" else values.reshape(-1, seeds).mean(1)
        drawn = values if len(means[name]) == 1 else means[name]
        drawn = drawn[~drawn.isnan()]
        if len(drawn):
            mean = mean_interval(drawn) if len(drawn) > 1 else Estimate(float(drawn.mean()))
            figures[name] = _share_figure(mean, values) if name in _SHARES else mean
    return GuidanceCell(guidance, len(joined[LOOKS[0]]), figures, means)


def _share_figure(found: Estimate, values: Tensor) -> Estimate:
    """With Wilson's interval of all images, where that is wider."""
    low, high = Share.of(value == 1 for value in values.tolist() if not math.isnan(value)).interval
    if found.ends is None:
        return replace(found, low=low, high=high)
    return replace(found, low=min(found.low, low), high=max(found.high, high))


# --- Useful scales --------------------------------------------------------------------------------------------------

_FEW_PROMPTS = 10  # prompts below which the interval of a difference says little
_WIDE_INTERVAL = 0.25  # of a share: an interval so wide tells hardly any cell from the best
CLIPPED = 0.02  # of all values: as many more may be clipped than in the reference


@dataclass(frozen=True)
class RatedScale:
    """One cell under a rule: whether it is adherent enough, and what of its looks is out of tolerance, in words."""

    rule: str
    scale: float
    cell: GuidanceCell
    adherent: bool
    faults: tuple[str, ...]

    @property
    def useful(self) -> bool:
        return self.adherent and not self.faults


@dataclass(frozen=True)
class RuleRange:
    """A rule: its cells by scale, and the useful ones that make its range."""

    rule: str
    cells: tuple[RatedScale, ...]
    range: tuple[RatedScale, ...]

    @property
    def words(self) -> str:
        """'2 to 7'"""
        if not self.range:
            return "none"
        low, high = self.range[0].scale, self.range[-1].scale
        return f"{low:g}" if low == high else f"{low:g} to {high:g}"

    def plain(self) -> dict[str, object]:
        ends = [self.range[0].scale, self.range[-1].scale] if self.range else None
        return {"rule": self.rule, "range": ends, "useful": [one.scale for one in self.cells if one.useful]}


@dataclass(frozen=True)
class Recommendation:
    """One sentence, and the guidance to paste; None where no cell is useful."""

    words: str
    guidance: str | None = None
    chosen: RatedScale | None = None


def best_cell(found: GuidanceResults) -> GuidanceCell:
    """The most adherent cell; of equal ones the first, which has the smallest scale."""
    return max(found.cells.values(), key=lambda cell: _adherence_value(found, cell))


def rule_ranges(found: GuidanceResults) -> list[RuleRange]:
    ranges = []
    for words in found.study.config.rules:
        cells = tuple(
            RatedScale(words, scale, cell, _adherent(found, cell), faults_of(found, cell))
            for scale, cell in found.line(words)
        )
        ranges.append(RuleRange(words, cells, _range_around_best(cells, found.adherence)))
    return ranges


def _adherent(found: GuidanceResults, cell: GuidanceCell) -> bool:
    if found.adherence == "right" and _adherence_value(found, cell) == 0:
        return False
    return not worse(found, cell, best_cell(found))


def faults_of(found: GuidanceResults, cell: GuidanceCell) -> tuple[str, ...]:
    """What of a cell's looks is out of tolerance: 'colourfulness +23 %'."""
    reference, tolerance = found.reference.values, found.study.config.tolerance
    said = []
    for name in ("colourfulness", "sharpness"):
        off = _relative_change(cell.figures[name].value, reference[name])
        if not abs(off) <= tolerance:
            said.append(f"{name} {_signed_words(100 * off)} %")
    more = cell.figures["saturation"].value - reference["saturation"]
    if more > CLIPPED:
        said.append(f"clipped values {_signed_words(100 * more, 1)} points")
    return tuple(said)


def _relative_change(value: float, reference: float) -> float:
    if reference > 0:
        return value / reference - 1
    return 0.0 if value == reference else math.inf


def _signed_words(value: float, digits: int = 0) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _range_around_best(cells: tuple[RatedScale, ...], adherence: str) -> tuple[RatedScale, ...]:
    """The run of useful neighbours that holds the most adherent useful cell."""
    useful = [i for i, one in enumerate(cells) if one.useful]
    if not useful:
        return ()
    first = last = max(useful, key=lambda i: cells[i].cell.figures[adherence].value)
    while first - 1 in useful:
        first -= 1
    while last + 1 in useful:
        last += 1
    return cells[first : last + 1]


def recommendation_of(found: GuidanceResults, ranges: list[RuleRange]) -> Recommendation:
    """The most adherent useful scale of the first rule that is not measurably worse than the best useful one.

    Measurably: the 95 % interval of the mean difference, prompt by prompt, leaves out zero. Rules count in the order in
    which they were given, so that a plain one is not left for a difference that cannot be seen.
    """
    useful = ([one for one in line.cells if one.useful] for line in ranges)
    tops = [max(own, key=lambda one: _adherence_value(found, one.cell)) for own in useful if own]
    if not tops:
        return _no_recommendation(found)
    top = max(tops, key=lambda one: _adherence_value(found, one.cell))
    chosen = next(one for one in tops if not worse(found, one.cell, top.cell))
    return Recommendation(_recommendation_words(found, chosen, ranges), chosen.cell.guidance, chosen)


def _adherence_value(found: GuidanceResults, cell: GuidanceCell) -> float:
    return cell.figures[found.adherence].value


def worse(found: GuidanceResults, one: GuidanceCell, other: GuidanceCell) -> bool:
    """Whether a cell is measurably less adherent than another, from the same prompts and noise."""
    apart = one.by_prompt[found.adherence] - other.by_prompt[found.adherence]
    return len(apart) > 1 and mean_interval(apart).high < 0


def doubts(found: GuidanceResults) -> list[str]:
    """Why cells that are called useful may not be: what was measured is too little to tell them from the best."""
    top, kind = best_cell(found), KINDS[found.adherence]
    figure, prompts = top.figures[found.adherence], len(top.by_prompt[found.adherence])
    wide = kind.percent and figure.ends is not None and figure.high - figure.low > _WIDE_INTERVAL
    if prompts >= _FEW_PROMPTS and not wide:
        return []
    return [
        f"Doubtful: {counted(prompts, 'prompt')} with {counted(top.count, 'image')} a guidance hardly tell one from "
        f"another ({kind.title} of the best: {kind.words(figure)}), so that more seem useful than are. Give "
        "more --prompts."
    ]


def _recommendation_words(found: GuidanceResults, chosen: RatedScale, ranges: list[RuleRange]) -> str:
    line = next(line for line in ranges if line.rule == chosen.rule)
    kind, figure = KINDS[found.adherence], chosen.cell.figures[found.adherence]
    figures, known = chosen.cell.figures, found.reference.values
    looks = [
        f"{name} {_signed_words(100 * _relative_change(figures[name].value, known[name]))} %"
        for name in ("colourfulness", "sharpness")
    ]
    span = f"useful from {line.words}" if len(line.range) > 1 else "useful at this scale alone"
    return (
        f"Use --guidance '{chosen.cell.guidance}' ({chosen.rule}, {span}): {kind.title} "
        f"{kind.words(figure)}, {' and '.join(looks)} against {found.reference.name}."
    )


def _no_recommendation(found: GuidanceResults) -> Recommendation:
    """No cell is useful: what is wrong with the most adherent one."""
    top, kind = best_cell(found), KINDS[found.adherence]
    if not _adherent(found, top):
        return Recommendation("No scale is useful: no image under any guidance is all right.")
    return Recommendation(
        f"No scale is useful: the most adherent guidance, '{top.guidance}' ({kind.title} "
        f"{kind.words(top.figures[found.adherence])}), is out of tolerance against {found.reference.name}: "
        f"{', '.join(faults_of(found, top))}."
    )
