"""The report of a study of oracles: tables, charts as PNG and hoverable in one page, and the same for programs."""

from __future__ import annotations

import json
from typing import Any

from pellucid.evidence.study import charts, oracle_charts, oracle_tables
from pellucid.evidence.study import oracle_truth as truth
from pellucid.evidence.study.oracle import MIXTURES, OracleStudy, Study, same_levels
from pellucid.evidence.study.oracle_results import Results
from pellucid.evidence.study.page import Code, Page, Text
from pellucid.interop.atomic_files import put

CHARTS = (
    (
        "samplers",
        "sampler",
        "Every sampler on its best grid",
        "Each sampler on its best grid at each NFE. Errors above 1 are not drawn.",
    ),
    (
        "grids",
        "grid",
        "Every grid with its best sampler",
        "Each grid with its best sampler at each NFE. Errors above 1 are not drawn.",
    ),
    ("laws", "law", "With noise and without, as laws", "Dotted: true draws, as many. Dashed: samplers with noise."),
)


def write(study: Study) -> dict[str, Any]:
    """charts/*.png, table.md, figures.json and report.html in the study's folder, finished or not; the figures."""
    charts.require()
    found = Results.of(study.records.rows)
    floors = floors_of(study.config)
    folder = study.folder / "charts"
    folder.mkdir(exist_ok=True)
    made = oracle_tables.tables(found, floors)
    page = Page("Samplers on exact denoisers", headline(study, found))
    page.add(*(Text(words) for words in oracle_tables.sentences(found)), *made[: len(found.mixtures) + 1])
    for name, what, title, note in CHARTS:
        panels = oracle_charts.panels(found, what, floors)
        if panels:
            oracle_charts.draw(panels, len(found.schedules), folder / f"{name}.png", note)
            page.add(Text(note, title), *panels)
    page.add(*made[len(found.mixtures) + 1 :], *equal_grids(study.config), Code(study.config.text, "Config"))
    page.write(study.folder / "report.html")
    put(study.folder / "table.md", markdown(study, found, made))
    figures = oracle_tables.plain(found, floors)
    put(study.folder / "figures.json", json.dumps(figures, indent=1) + "\n")
    return figures


def floors_of(config: OracleStudy) -> dict[str, float]:
    """What true draws, as many as a run has points, measure as a distance of laws."""
    mixtures = {name: MIXTURES[name]() for name in config.mixtures}
    return {name: truth.Slices.of(one, config.points).floor(one) for name, one in mixtures.items()}


def headline(study: Study, found: Results) -> str:
    c = study.config
    words = (
        f"{len(c.samplers)} samplers, {len(c.grids)} grids, schedules {', '.join(c.schedules)}, {c.points:,} points of "
        "each mixture, float64."
    )
    left = len(study.missing())
    return words + (f" Unfinished: {left} cells are missing." if left else "")


def equal_grids(config: OracleStudy) -> list[Text]:
    said = []
    for schedule in config.schedules:
        twins = same_levels(schedule, config.grids)
        if twins:
            pairs = ", ".join(f"{name} = {first}" for name, first in twins.items())
            said.append(f"On {schedule} these grids lay the same levels and are run once: {pairs}.")
    return [Text(words, kind="note") for words in said]


def markdown(study: Study, found: Results, made: list[Any]) -> str:
    said = "\n".join(f"- {words}" for words in oracle_tables.sentences(found))
    parts = ["# Samplers on exact denoisers\n", headline(study, found) + "\n", said + "\n"]
    return "\n".join([*parts, *(table.markdown() for table in made)])
