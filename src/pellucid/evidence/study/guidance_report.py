"""The figures of a guidance study, the useful scales of each rule, the guidance to use, and the report of them:
report.html, charts as PNG, and the figures as JSON and Markdown.

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

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError
from pellucid.core.wording import counted
from pellucid.evidence.report import charts
from pellucid.evidence.report.charts import Axis, Chart, Drawing, Mark, Series, Spot
from pellucid.evidence.report.page import Code, ImageCell, Images, Page, Table, Text
from pellucid.evidence.statistics import Estimate, Share, mean_interval, percent
from pellucid.evidence.study.guidance import LOOKS, TRUE_IMAGES, GuidanceStudy, GuidanceStudyConfig, joined_rows
from pellucid.interop.atomic_files import put

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


_KINDS = {
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
        """The figures that were measured, in the order of _KINDS."""
        held = {name for cell in self.cells.values() for name in cell.figures}
        return [name for name in _KINDS if name in held]

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
    top, kind = best_cell(found), _KINDS[found.adherence]
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
    kind, figure = _KINDS[found.adherence], chosen.cell.figures[found.adherence]
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
    top, kind = best_cell(found), _KINDS[found.adherence]
    if not _adherent(found, top):
        return Recommendation("No scale is useful: no image under any guidance is all right.")
    return Recommendation(
        f"No scale is useful: the most adherent guidance, '{top.guidance}' ({kind.title} "
        f"{kind.words(top.figures[found.adherence])}), is out of tolerance against {found.reference.name}: "
        f"{', '.join(faults_of(found, top))}."
    )


# --- The chart of useful ranges -------------------------------------------------------------------------------------

_BAR = "#bfe3c8"
_GREEN, _ORANGE, _RED = "#188a3b", "#e8710a", "#c5221f"
_STATES = (
    ("useful", _GREEN),
    ("looks out of tolerance", _ORANGE),
    ("not adherent enough", charts.PAPER),
    ("both", _RED),
)


def state_of(one: RatedScale) -> tuple[str, str]:
    """What a cell is, and its colour."""
    if one.useful:
        return _STATES[0]
    return _STATES[1] if one.adherent else _STATES[3] if one.faults else _STATES[2]


def _state_words(one: RatedScale) -> str:
    return ": ".join(filter(None, (state_of(one)[0], ", ".join(one.faults))))


def range_chart(lines: Sequence[RuleRange], scales: Sequence[float], chosen: RatedScale | None = None) -> Drawing:
    """A row for each rule, a point for each scale, and a bar where the scale is useful; `chosen` is ringed."""
    figure, title = charts.canvas(7.6, 1.3 + 0.4 * len(lines)), "Useful range of the scale"
    axes, spots = figure.add_subplot(), []
    for row, line in enumerate(lines):
        if line.range:
            ends = [line.range[0].scale, line.range[-1].scale]
            axes.plot(ends, [row] * 2, "-", color=_BAR, linewidth=11, solid_capstyle="round")
        for one in line.cells:
            axes.plot(one.scale, row, "o", color=state_of(one)[1], markeredgecolor=charts.SLATE, markersize=7)
            if one == chosen:
                axes.plot(one.scale, row, "o", markersize=14, markerfacecolor="none", color=charts.INK)
            words = f"{one.rule}, scale {one.scale:g}\n{_state_words(one)}\n{one.cell.guidance}"
            spots.append(Spot(axes, one.scale, row, words, one.cell.guidance, radius=5))
    charts.quiet(axes, title, "guidance scale")
    axes.set_xticks(list(scales), [f"{v:g}" for v in scales])
    axes.set_yticks(range(len(lines)), [line.rule for line in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    for name, colour in _STATES:
        axes.plot([], [], "o", color=colour, markeredgecolor=charts.SLATE, label=name)
    charts.legend(figure, axes)
    return Drawing(figure, title, spots=spots)


# --- The report -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GuidanceReport:
    """What was found, and what follows from it."""

    found: GuidanceResults
    lines: list[RuleRange]
    advice: Recommendation

    @staticmethod
    def of(study: GuidanceStudy) -> GuidanceReport:
        found = results_of(study)
        if found is None:
            raise PellucidError("a cell of the study must be finished for a report; got none yet.", "study-empty")
        ranges = rule_ranges(found)
        return GuidanceReport(found, ranges, recommendation_of(found, ranges))

    def plain(self) -> dict[str, Any]:
        found, config = self.found, self.found.study.config
        return {
            "model": config.model,
            "prompts": len(found.study.asked),
            "seeds": config.seeds,
            "adherence": found.adherence,
            "reference": {"name": found.reference.name, **found.reference.values},
            "tolerance": {"share": config.tolerance, "clipped": CLIPPED},
            "recommendation": self.advice.words,
            "guidance": self.advice.guidance,
            "doubts": doubts(found),
            "ranges": [line.plain() for line in self.lines],
            "cells": [
                {"rule": line.rule, "scale": one.scale, "guidance": one.cell.guidance, "count": one.cell.count}
                | {"useful": one.useful, "adherent": one.adherent, "faults": list(one.faults)}
                | {name: figure.plain() for name, figure in one.cell.figures.items()}
                for line in self.lines
                for one in line.cells
            ],
        }


def write(study: GuidanceStudy) -> GuidanceReport:
    """report.html, charts/*.png, figures.json and table.md, of the cells that are whole."""
    charts.require()
    report = GuidanceReport.of(study)
    folder = study.folder
    span = range_chart(report.lines, report.found.study.config.scales, report.advice.chosen)
    drawn = {name: _chart(report, name) for name in report.found.names if name != "attributes"}
    charts.write({"range": span, **drawn}, folder)
    _sheet(report, folder / "charts" / "pictures.png")
    put(folder / "figures.json", json.dumps(report.plain(), indent=1, allow_nan=False) + "\n")
    tables = [range_table(report).markdown(), _cell_table(report).markdown()]
    said = [f"{words}\n" for words in (f"**{report.advice.words}**", *doubts(report.found))]
    put(folder / "table.md", "\n".join(["# Guidance\n", headline(report) + "\n", *said, *tables]))
    _page(report, span, list(drawn.values())).write(folder / "report.html")
    return report


def headline(report: GuidanceReport) -> str:
    study = report.found.study
    config, prompts = study.config, study.asked
    complete = len(report.found.cells)
    words = (
        f"{config.model} · {len(prompts)} prompts × {config.seeds} seeds · {complete} guidances · {config.sampler}, "
        f"{config.steps} steps"
    )
    left = len(study.guidances) - complete
    return words if not left else f"{words} · unfinished: {left} guidances are missing"


# Tables


def range_table(report: GuidanceReport) -> Table:
    found, kind, rows = report.found, _KINDS[report.found.adherence], []
    for line in (line for line in report.lines if line.cells):
        top = max(line.cells, key=lambda one: one.cell.figures[found.adherence].value)
        figure = top.cell.figures[found.adherence]
        rows.append((line.rule, line.words, f"{top.scale:g}", kind.words(figure), _state_words(top)))
    columns = ("rule", "useful scales", "most adherent at", kind.title, "which is")
    return Table("Useful range", columns, tuple(rows), definition(report))


def definition(report: GuidanceReport) -> str:
    found, tolerance = report.found, report.found.study.config.tolerance
    return (
        f"Useful: {_KINDS[found.adherence].title} not measurably below that of the best guidance, colourfulness and "
        f"sharpness within {100 * tolerance:g} % of {found.reference.name}, and at most {100 * CLIPPED:g} points more "
        "clipped values."
    )


def _cell_table(report: GuidanceReport) -> Table:
    names = report.found.names
    rows: list[tuple[str, ...]] = []
    for line in report.lines:
        for one in line.cells:
            held = one.cell.figures
            own = (_KINDS[name].words(held[name]) if name in held else "–" for name in names)
            rows.append((line.rule, f"{one.scale:g}", *own, _state_words(one)))
    reference = report.found.reference
    known = {name: _KINDS[name].words(Estimate(value)) for name, value in reference.values.items()}
    shown = (known.get(name, "–") for name in names)
    rows.append((reference.name, "", *shown, ""))
    columns = ("rule", "scale", *(_KINDS[name].title for name in names), "")
    note = (
        "In brackets 95 % intervals, from drawing the prompts again. Cells share prompts and noise, so that their "
        "differences are surer than their intervals. At scale 1 most rules are the same images."
    )
    return Table("Every guidance", columns, tuple(rows), note)


# Charts


def _chart(report: GuidanceReport, name: str) -> Chart:
    kind = _KINDS[name]
    times = 100 if kind.percent else 1
    series = []
    for line in report.lines:
        held = [(one, figure) for one in line.cells if (figure := one.cell.figures.get(name)) is not None]
        scales, shown = [one.scale for one, _ in held], [figure.times(times) for _, figure in held]
        labels = [f"{_state_words(one)}\n{one.cell.guidance}" for one, _ in held]
        series.append(Series.of(line.rule, scales, shown, labels=labels, href=[one.cell.guidance for one, _ in held]))
    x = Axis("guidance scale", ticks=report.found.study.config.scales)
    y = Axis(kind.title + (", %" if kind.percent else ""))
    return Chart(kind.title.capitalize(), series, x, y, _marks(report, name))


def _marks(report: GuidanceReport, name: str) -> list[Mark]:
    """The reference, and what is tolerated around it."""
    reference, tolerance = report.found.reference, report.found.study.config.tolerance
    if name not in reference.values:
        return []
    value = reference.values[name]
    if name == "saturation":
        return [Mark("tolerated", y=100 * (value + CLIPPED))]
    ends = (("+", 1 + tolerance), ("−", 1 - tolerance))
    return [Mark(reference.name, y=value), *(Mark(f"{s}{100 * tolerance:g} %", y=value * part) for s, part in ends)]


def _sheet(report: GuidanceReport, path: Path) -> Path:
    """The first prompt under every guidance: a row for each rule, a column for each scale."""
    study = report.found.study
    scales, rows = study.config.scales, [line for line in report.lines if line.cells]
    figure = charts.canvas(0.9 + 1.45 * len(scales), 0.8 + 1.45 * len(rows))
    grid = figure.subplots(len(rows), len(scales), squeeze=False)
    for row, line in enumerate(rows):
        by_scale = {one.scale: one for one in line.cells}
        for column, scale in enumerate(scales):
            axes = grid[row][column]
            axes.set_xticks([])
            axes.set_yticks([])
            if scale in by_scale:
                axes.imshow(study.shown(by_scale[scale].cell.guidance)[0])
                for side in axes.spines.values():
                    useful = by_scale[scale].useful
                    side.set(color=_GREEN if useful else charts.FAINT, linewidth=2.5 if useful else 0.8)
            if row == 0:
                axes.set_title(f"{scale:g}", fontsize=10, color=charts.INK)
            if column == 0:
                axes.set_ylabel(line.rule, fontsize=9, color=charts.INK)
    title = f"guidance scale by rule: {study.asked.texts[0]}"
    figure.suptitle(title if len(title) <= 110 else title[:109] + "…", fontsize=9, color=charts.SLATE)
    figure.tight_layout()
    return charts.save(figure, path, dpi=120)


# The page


def _page(report: GuidanceReport, span: Drawing, drawn: list[Chart]) -> Page:
    page = Page("Guidance", headline(report)).add(Text(report.advice.words, "Recommendation"))
    if report.advice.guidance is not None:
        page.add(Code(command(report.found.study.config, report.advice.guidance)))
    page.add(*(Text(words) for words in doubts(report.found)))
    page.add(span, range_table(report), Text("", "Charts"), *drawn, _images(report), _cell_table(report))
    return page.add(Code(report.found.study.text, "Config"))


def command(config: GuidanceStudyConfig, guidance: str) -> str:
    """What to paste into a shell."""
    model = config.model if config.part == "unet" else f"{config.model}/{config.part}"
    how = f"--sampler {config.sampler} --steps {config.steps}"
    return f'pellucid sample {model} "…" {how} --guidance "{guidance}"'


def _images(report: GuidanceReport) -> Images:
    study, found = report.found.study, report.found
    cells = []
    for guidance, cell in found.cells.items():
        figure, kind = cell.figures[found.adherence], _KINDS[found.adherence]
        cells.append(ImageCell(guidance, study.shown(guidance), f"{kind.title} {kind.words(figure)}"))
    first = [guidance for guidance in ("1", report.advice.guidance) if guidance in found.cells]
    note = "The same prompts and the same noise in every cell, one image per prompt. Choose two to compare."
    return Images("Images", cells, note, [str(key) for key in first])
