"""What a guidance study writes: report.html, charts as PNG, and the figures as JSON and Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.core.errors import PellucidError
from pellucid.evidence.report import charts
from pellucid.evidence.report.charts import Axis, Chart, Drawing, Mark, Series, Spot
from pellucid.evidence.report.page import Code, ImageCell, Images, Page, Table, Text
from pellucid.evidence.statistics import Estimate
from pellucid.evidence.study.guidance import GuidanceStudy, GuidanceStudyConfig
from pellucid.evidence.study.guidance_results import (
    CLIPPED,
    KINDS,
    GuidanceResults,
    RatedScale,
    Recommendation,
    RuleRange,
    doubts,
    recommendation_of,
    results_of,
    rule_ranges,
)
from pellucid.interop.atomic_files import put

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
            raise PellucidError("a cell of the study must be whole for a report; got none yet.", "study-empty")
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
    found, kind, rows = report.found, KINDS[report.found.adherence], []
    for line in (line for line in report.lines if line.cells):
        top = max(line.cells, key=lambda one: one.cell.figures[found.adherence].value)
        figure = top.cell.figures[found.adherence]
        rows.append((line.rule, line.words, f"{top.scale:g}", kind.words(figure), _state_words(top)))
    columns = ("rule", "useful scales", "most adherent at", kind.title, "which is")
    return Table("Useful range", columns, tuple(rows), definition(report))


def definition(report: GuidanceReport) -> str:
    found, tolerance = report.found, report.found.study.config.tolerance
    return (
        f"Useful: {KINDS[found.adherence].title} not measurably below that of the best guidance, colourfulness and "
        f"sharpness within {100 * tolerance:g} % of {found.reference.name}, and at most {100 * CLIPPED:g} points more "
        "clipped values."
    )


def _cell_table(report: GuidanceReport) -> Table:
    names = report.found.names
    rows: list[tuple[str, ...]] = []
    for line in report.lines:
        for one in line.cells:
            held = one.cell.figures
            own = (KINDS[name].words(held[name]) if name in held else "–" for name in names)
            rows.append((line.rule, f"{one.scale:g}", *own, _state_words(one)))
    reference = report.found.reference
    known = {name: KINDS[name].words(Estimate(value)) for name, value in reference.values.items()}
    shown = (known.get(name, "–") for name in names)
    rows.append((reference.name, "", *shown, ""))
    columns = ("rule", "scale", *(KINDS[name].title for name in names), "")
    note = (
        "In brackets 95 % intervals, from drawing the prompts again. Cells share prompts and noise, so that their "
        "differences are surer than their intervals. At scale 1 most rules are the same images."
    )
    return Table("Every guidance", columns, tuple(rows), note)


# Charts


def _chart(report: GuidanceReport, name: str) -> Chart:
    kind = KINDS[name]
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
                    side.set(color="#188a3b" if useful else charts.FAINT, linewidth=2.5 if useful else 0.8)
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
        figure, kind = cell.figures[found.adherence], KINDS[found.adherence]
        cells.append(ImageCell(guidance, study.shown(guidance), f"{kind.title} {kind.words(figure)}"))
    first = [guidance for guidance in ("1", report.advice.guidance) if guidance in found.cells]
    note = "The same prompts and the same noise in every cell, one image a prompt. Choose two to compare."
    return Images("Images", cells, note, [str(key) for key in first])
