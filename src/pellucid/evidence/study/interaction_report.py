"""The report of an interaction study: who is best where, where that changes, heat maps, and each model's curves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pellucid.evidence.report import charts
from pellucid.evidence.report.charts import Axis, Chart, Drawing, Series, Spot, number_text
from pellucid.evidence.report.page import Code, Page, Table, Text
from pellucid.evidence.statistics import Estimate
from pellucid.evidence.study.interaction import BestSetupChange, InteractionResults, InteractionStudy, ModelResult
from pellucid.interop.atomic_files import put

_WORST_COLOUR = (201, 68, 40)  # what a factor of four and more looks like
_HEAT_WIDTH = 7.0  # inches of panels side by side: wider ones could not be read on a page
_NOTE = (
    "Each interval holds for its own comparison at 95 %: of twenty that do not differ one would seem to. Over models: "
    "Student's t over the runs of a group, which holds for other runs. Over images: these models alone."
)


def write(opened: InteractionStudy, found: InteractionResults) -> Path:
    """charts/*.png, table.md, figures.json and report.html."""
    heats, curves = _heat(found), {one.name: _curve(found, one) for one in found.seen}
    charts.write({"heat": heats, **curves}, opened.folder)
    all_tables = tables(found)
    page = Page("Schedule × sampler × steps", _headline(found))
    said = [*sentences(found), *about_converged(found)]
    page.add(*map(Text, said), Text(_NOTE, kind="note"), *all_tables)
    page.add(
        Text("", "How far behind the best"),
        heats,
        Text("", "Each model"),
        *curves.values(),
        Code(opened.text, "Config"),
    )
    listed = "\n".join(f"- {words}" for words in said)
    parts = ["# Schedule × sampler × steps\n", _headline(found) + "\n", listed + "\n", _NOTE + "\n"]
    put(opened.folder / "table.md", "\n".join([*parts, *(table.markdown() for table in all_tables)]))
    put(opened.folder / "figures.json", json.dumps(_plain(found), indent=1) + "\n")
    return page.write(opened.folder / "report.html")


def _headline(found: InteractionResults) -> str:
    groups = "; ".join(f"{name} ({len(held)})" for name, held in found.groups.items())
    return f"{found.measure.title}, {len(found.setups)} samplers, models of {groups}."


# --- words -----------------------------------------------------------------------------------------------------


def sentences(found: InteractionResults) -> list[str]:
    """Where the best changes, the sure ones first; or that it does not."""
    changes = found.changes()
    if not changes:
        pairs = len(found.groups) > 1
        return ["The best sampler is the same in all groups at every number of model calls."] if pairs else []
    return [change_words(found, one) for one in sorted(changes, key=lambda one: (not one.sure, one.budget))]


def about_converged(found: InteractionResults) -> list[str]:
    """Whose yardstick moves so much that its figures say little."""
    said = []
    for one in found.seen:
        bests = [found.best(one, budget) for budget in found.budgets]
        near = [str(best.budget) for best in bests if best is not None and not best.resolved]
        if near:
            said.append(
                f"{one.name}: its converged run still moved by {number_text(one.floor)} when its steps were doubled, "
                f"so that the best at {', '.join(near)} calls is not resolved. Give more --converged-steps."
            )
    return said


def change_words(found: InteractionResults, one: BestSetupChange) -> str:
    verdict = "a sure change" if one.sure else "not sure"
    return (
        f"At {one.budget} calls {one.best_here} is best for {one.here}, {one.best_there} for {one.there} ({verdict}): "
        f"the first costs {_gap_words(found, one.kept_there)} in {one.there}, the second "
        f"{_gap_words(found, one.kept_here)} in {one.here}, over {one.kept_there.over}."
    )


def _gap_words(found: InteractionResults, gap: Estimate) -> str:
    if found.scaled:
        ends = "" if gap.ends is None else f" ({gap.low:.2f} to {gap.high:.2f})"
        return f"{gap.value:.2f} times{ends}"
    return f"{gap.times(found.measure.scale).words(number_text)} more"


# --- tables ----------------------------------------------------------------------------------------------------


def tables(found: InteractionResults) -> list[Table]:
    return [_best_by_group(found), _best_by_model(found), _shares(found)]


def _best_by_group(found: InteractionResults) -> Table:
    rows = [
        (f"{group} ({len(held)})", *(found.best_of(group, budget) or "−" for budget in found.budgets))
        for group, held in found.groups.items()
    ]
    note = "By the mean over the models of a group, of logarithms where the measure is a distance."
    return Table("The best of each group", ("group (models)", *_calls(found)), tuple(rows), note)


def _best_by_model(found: InteractionResults) -> Table:
    rows = []
    for one in found.seen:
        cells = []
        for budget in found.budgets:
            best = found.best(one, budget)
            if best is None:
                cells.append("−")
                continue
            ends = best.figure.times(found.measure.scale).words(number_text)
            also = f"; not distinguishable from {', '.join(best.rivals)}" if best.rivals else ""
            also += "" if best.resolved else "; not resolved"
            cells.append(f"{best.setup} {ends}, first in {100 * best.first:.0f} %{also}")
        rows.append((one.name, *cells))
    note = f"{found.measure.title} with its 95 % interval over resampled images, and how often it came first in them."
    return Table("The best of each model", ("model", *_calls(found)), tuple(rows), note)


def _shares(found: InteractionResults) -> Table:
    rows = []
    for budget in found.budgets:
        parts = found.spreads(budget)
        rows.append((str(budget), *("−" if parts is None else f"{part:.2f}" for part in parts or (0, 0, 0))))
    unit = "a factor" if found.scaled else "a difference"
    note = (
        f"Root mean square effects in the table of groups and samplers, each as {unit}: what is the sampler's alone, "
        "the group's alone, and what only their combination explains."
    )
    columns = ("calls", "sampler", "group", "sampler × group")
    return Table("How much is interaction", columns, tuple(rows), note)


def _calls(found: InteractionResults) -> tuple[str, ...]:
    return tuple(f"{budget} calls" for budget in found.budgets)


# --- charts ----------------------------------------------------------------------------------------------------


def _behind(found: InteractionResults, one: ModelResult, setup: str, budget: int) -> float:
    """How much worse than the model's best: a factor or a difference; NaN where it was not run."""
    held = found.table(one, budget)[:, 0]
    mine = held[found.setups.index(setup)]
    if not math.isfinite(mine):
        return math.nan
    apart = float(mine - held.min())
    return math.exp(apart) if found.scaled else apart * found.measure.scale


def _tint(found: InteractionResults, value: float, most: float) -> tuple[float, float, float]:
    """White for the best, deep for what is `most` behind."""
    if not math.isfinite(value):
        return (0.93, 0.94, 0.95)
    part = math.log(max(value, 1.0)) / math.log(4.0) if found.scaled else value / (most or 1.0)
    part = min(max(part, 0.0), 1.0) ** 0.8
    return tuple(1.0 + part * (c / 255 - 1.0) for c in _WORST_COLOUR)  # type: ignore[return-value]


def _heat(found: InteractionResults) -> Drawing:
    """A table of colours for each budget: set-ups down, models across; the numbers are how much worse than the best."""
    across, down = len(found.seen), len(found.setups)
    width, height = 0.7 * across + 0.3, 0.34 * down + 1.3
    columns = max(1, min(len(found.budgets), int(_HEAT_WIDTH / width)))
    rows = -(-len(found.budgets) // columns)
    drawing, spots = charts.canvas(1.9 + width * columns, height * rows + 0.3), []
    for i, budget in enumerate(found.budgets):
        axes = drawing.add_subplot(rows, columns, i + 1)
        values = [[_behind(found, one, setup, budget) for one in found.seen] for setup in found.setups]
        most = max((v for row in values for v in row if math.isfinite(v)), default=1.0)
        axes.imshow([[_tint(found, v, most) for v in row] for row in values], aspect="auto")
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                words = "−" if not math.isfinite(value) else f"{value:.2f}" if value < 10 else f"{value:.0f}"
                weight = "bold" if value == found.nothing else "normal"
                ink = charts.PAPER if sum(_tint(found, value, most)) < 1.7 else charts.INK
                axes.text(x, y, words, ha="center", va="center", fontsize=8, color=ink, fontweight=weight)
                spots.append(Spot(axes, x, y, _cell_words(found, found.seen[x], found.setups[y], budget), radius=11))
        axes.set_title(f"{budget} calls", fontsize=10, fontweight="bold", color=charts.INK, loc="left")
        axes.set_xticks(range(across), [one.name for one in found.seen], rotation=40, ha="right", fontsize=8.5)
        axes.set_yticks(range(down), found.setups if i % columns == 0 else [""] * down, fontsize=8.5)
        axes.tick_params(length=0, colors=charts.INK)
        for side in axes.spines.values():
            side.set_visible(False)
    unit = "times the distance of each model's best" if found.scaled else f"{found.measure.title} behind the best"
    drawing.text(0.01, 0.01, f"{unit}; bold: the best", fontsize=8.5, color=charts.SLATE)
    drawing.tight_layout(rect=(0, 0.22 / drawing.get_figheight(), 1, 1), w_pad=0.6, pad=0.6)
    return Drawing(drawing, f"How far each sampler is behind the best of a model: {unit}", spots=spots)


def _cell_words(found: InteractionResults, one: ModelResult, setup: str, budget: int) -> str:
    number = found.cell(one, setup, budget)
    if number is None:
        return f"{one.name}, {setup}: not run"
    return f"{one.name}, {one.cells[number].key}: {one.column.shown(number).words(number_text)}"


def _curve(found: InteractionResults, one: ModelResult) -> Chart:
    """One model: every set-up over model calls, with intervals."""
    series = []
    for setup in found.setups:
        held = (i for i, cell in enumerate(one.cells) if cell.setup.text == setup)
        own = sorted(held, key=lambda i: one.cells[i].nfe)
        labels = [f"{one.cells[i].steps} steps" for i in own]
        calls, shown = [float(one.cells[i].nfe) for i in own], [one.column.shown(i) for i in own]
        noisy = any(one.cells[i].stochastic for i in own)
        series.append(Series.of(setup, calls, shown, labels=labels, dashed=noisy))
    floor = "" if not math.isfinite(one.floor) else f" The converged run still moves by {number_text(one.floor)}."
    x = Axis("model calls", log=True, ticks=tuple(map(float, found.budgets)))
    y = Axis(found.measure.title, log=found.scaled)
    return Chart(f"{one.name} ({one.group})", series, x, y, note=floor.strip())


# --- for programs ----------------------------------------------------------------------------------------------


def _plain(found: InteractionResults) -> dict[str, Any]:
    bests = [best for one in found.seen for budget in found.budgets if (best := found.best(one, budget)) is not None]
    models = [
        {
            **{key: getattr(one, key) for key in ("name", "schedule", "target", "architecture", "group")},
            "floor": one.floor if math.isfinite(one.floor) else None,
            "cells": [
                {"cell": cell.key, "nfe": cell.nfe, **one.column.estimate(i).plain()}
                for i, cell in enumerate(one.cells)
            ],
        }
        for one in found.seen
    ]
    return {
        "measure": found.measure.name,
        "models": models,
        "best_of_models": [best.plain() for best in bests],
        "best_of_groups": [
            {"group": group, "calls": budget, "setup": found.best_of(group, budget)}
            for group in found.groups
            for budget in found.budgets
        ],
        "changes": [change.plain() for change in found.changes()],
        "effects": [{"calls": budget, "sampler_group_both": found.spreads(budget)} for budget in found.budgets],
        "sentences": sentences(found),
    }
