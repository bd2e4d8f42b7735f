"""Which scales are useful under each rule, and which guidance to use.

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
from dataclasses import dataclass

from pellucid.core.wording import counted
from pellucid.evidence.metrics.bootstrap import mean_interval
from pellucid.evidence.study.guidance_figures import KINDS, Cell, Results

FEW = 10  # prompts below which the interval of a difference says little
WIDE = 0.25  # of a share: an interval so wide tells hardly any cell from the best
CLIPPED = 0.02  # of all values: as many more may be clipped than in the reference


@dataclass(frozen=True)
class Judged:
    """One cell under a rule: whether it is adherent enough, and what of its looks is out of tolerance, in words."""

    rule: str
    scale: float
    cell: Cell
    adherent: bool
    faults: tuple[str, ...]

    @property
    def useful(self) -> bool:
        return self.adherent and not self.faults


@dataclass(frozen=True)
class Line:
    """A rule: its cells by scale, and the useful ones that make its range."""

    rule: str
    cells: tuple[Judged, ...]
    range: tuple[Judged, ...]

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
    guidance: str | None
    chosen: Judged | None


def best(found: Results) -> Cell:
    """The most adherent cell; of equal ones the first, which has the smallest scale."""
    return max(found.cells.values(), key=lambda cell: cell.figures[found.adherence].value)


def lines(found: Results) -> list[Line]:
    made = []
    for words in found.study.config.rules:
        cells = tuple(
            Judged(words, scale, cell, adherent(found, cell), faults(found, cell)) for scale, cell in found.line(words)
        )
        made.append(Line(words, cells, around_best(cells, found.adherence)))
    return made


def adherent(found: Results, cell: Cell) -> bool:
    if found.adherence == "right" and value(found, cell) == 0:
        return False
    return not worse(found, cell, best(found))


def faults(found: Results, cell: Cell) -> tuple[str, ...]:
    """What of a cell's looks is out of tolerance: 'colourfulness +23 %'."""
    reference, tolerance = found.reference.values, found.study.config.tolerance
    said = []
    for name in ("colourfulness", "sharpness"):
        off = relative(cell.figures[name].value, reference[name])
        if not abs(off) <= tolerance:
            said.append(f"{name} {signed(100 * off)} %")
    more = cell.figures["saturation"].value - reference["saturation"]
    if more > CLIPPED:
        said.append(f"clipped values {signed(100 * more, 1)} points")
    return tuple(said)


def relative(value: float, reference: float) -> float:
    if reference > 0:
        return value / reference - 1
    return 0.0 if value == reference else math.inf


def signed(value: float, digits: int = 0) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def around_best(cells: tuple[Judged, ...], adherence: str) -> tuple[Judged, ...]:
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


def recommended(found: Results, given: list[Line]) -> Recommendation:
    """The most adherent useful scale of the first rule that is not measurably worse than the best useful one.

    Measurably: the 95 % interval of the mean difference, prompt by prompt, leaves out zero. Rules count in the order in
    which they were given, so that a plain one is not left for a difference that cannot be seen.
    """
    tops = [max(useful, key=lambda one: value(found, one.cell)) for line in given if (useful := useful_of(line))]
    if not tops:
        return nothing(found)
    top = max(tops, key=lambda one: value(found, one.cell))
    chosen = next(one for one in tops if not worse(found, one.cell, top.cell))
    return Recommendation(sentence(found, chosen, given), chosen.cell.guidance, chosen)


def useful_of(line: Line) -> list[Judged]:
    return [one for one in line.cells if one.useful]


def value(found: Results, cell: Cell) -> float:
    return cell.figures[found.adherence].value


def worse(found: Results, one: Cell, other: Cell) -> bool:
    """Whether a cell is measurably less adherent than another, from the same prompts and noise."""
    apart = one.by_prompt[found.adherence] - other.by_prompt[found.adherence]
    return len(apart) > 1 and mean_interval(apart).high < 0


def doubts(found: Results) -> list[str]:
    """Why cells that are called useful may not be: what was measured is too little to tell them from the best."""
    top, kind = best(found), KINDS[found.adherence]
    figure, prompts = top.figures[found.adherence], len(top.by_prompt[found.adherence])
    wide = kind.percent and figure.low is not None and figure.high is not None and figure.high - figure.low > WIDE
    if prompts >= FEW and not wide:
        return []
    return [
        f"Doubtful: {counted(prompts, 'prompt')} with {counted(top.count, 'image')} a guidance hardly tell one from "
        f"another ({kind.title} of the best: {figure.words(kind.percent)}), so that more seem useful than are. Give "
        "more --prompts."
    ]


def sentence(found: Results, chosen: Judged, given: list[Line]) -> str:
    line = next(line for line in given if line.rule == chosen.rule)
    kind, figure = KINDS[found.adherence], chosen.cell.figures[found.adherence]
    looks = [
        f"{name} {signed(100 * relative(chosen.cell.figures[name].value, found.reference.values[name]))} %"
        for name in ("colourfulness", "sharpness")
    ]
    span = f"useful from {line.words}" if len(line.range) > 1 else "useful at this scale alone"
    return (
        f"Use --guidance '{chosen.cell.guidance}' ({chosen.rule}, {span}): {kind.title} "
        f"{figure.words(kind.percent)}, {' and '.join(looks)} against {found.reference.name}."
    )


def nothing(found: Results) -> Recommendation:
    """No cell is useful: what is wrong with the most adherent one."""
    top = best(found)
    kind = KINDS[found.adherence]
    if not adherent(found, top):
        return Recommendation("No scale is useful: no image under any guidance is all right.", None, None)
    said = ", ".join(faults(found, top))
    figure = top.figures[found.adherence].words(kind.percent)
    words = (
        f"No scale is useful: the most adherent guidance, '{top.guidance}' ({kind.title} {figure}), is out "
        f"of tolerance against {found.reference.name}: {said}."
    )
    return Recommendation(words, None, None)
