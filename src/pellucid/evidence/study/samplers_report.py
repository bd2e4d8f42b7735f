"""The report of a sampler study: report.html with charts to hover and images by cell, PNG charts, table.md and
results.json, of whatever is there so far."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from pellucid.evidence.report import charts
from pellucid.evidence.report.charts import Axis, Chart, Mark, Series, number_text
from pellucid.evidence.report.page import Code, ImageCell, Images, Page, Table, Text
from pellucid.evidence.statistics import Estimate, Knee
from pellucid.evidence.study.samplers_results import Column
from pellucid.evidence.study.samplers_verdict import SamplerFigures, by_sampler, three_digits, with_interval
from pellucid.interop.atomic_files import put

_IMAGES_SHOWN = 8  # images of a cell on the page
_CONVERGED = "converged"


def write(found: SamplerFigures) -> Path:
    """All files of the report; the path of the page."""
    charts.require()
    folder = found.study.folder
    drawn = all_charts(found)
    charts.write(drawn, folder)
    put(folder / "results.json", json.dumps(plain(found), indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    put(folder / "table.md", _markdown(found))
    page = Page(f"Samplers for {found.study.subject.name}", headline(found))
    page.add(Text(found.verdict.sentence, "Recommendation"))
    if found.verdict.call:
        page.add(Code("\n".join(filter(None, (found.verdict.words, _python(found.verdict.call))))))
    if found.verdict.comparison:
        page.add(Text(found.verdict.comparison))
    page.add(*(Text(words) for words in found.doubts()))
    page.add(*drawn.values())
    page.add(*_tables(found), _images(found), *(Text(words, kind="note") for words in found.notes()))
    page.add(Code(found.study.text, "Config"))
    return page.write(folder / "report.html")


def _python(call: dict[str, Any]) -> str:
    """The same in Python, for a pipeline that is loaded or wrapped."""
    return f"pipe(…, {', '.join(f'{name}={value!r}' for name, value in call.items())})"


def headline(found: SamplerFigures) -> str:
    """What was compared, on what, and how far it is."""
    config, results = found.study.config, found.results
    prompts = f"{len(config.prompts):,} prompts × " if config.prompts else ""
    seeds = "1 seed" if config.seeds == 1 else f"{config.seeds:,} seeds"
    guidance = f"guidance {found.study.subject.guidance if config.guidance is None else config.guidance}"
    words = [f"{results.count:,} images per cell ({prompts}{seeds})", guidance, f"times on {found.clock.machine}"]
    if results.count < config.images:
        words.append(f"unfinished: {results.count:,} of {config.images:,} images")
    return " · ".join(words)


# --- charts ----------------------------------------------------------------------------------------------------


def all_charts(found: SamplerFigures) -> dict[str, Chart]:
    calls = Axis("model calls (NFE)", True, _ticks(found))
    seconds = Axis("seconds per image", True)
    counts = [float(cell.nfe) for cell in found.cells]
    drawn = {f"{name}_calls": curve(found, column, calls, counts) for name, column in found.columns.items()}
    timed = [one.estimate.value for one in found.latencies]
    if all(map(math.isfinite, timed)):
        drawn[f"{found.main.measure.name}_seconds"] = curve(found, found.main, seconds, timed)
        drawn["seconds_calls"] = _latency(found, calls, counts)
    return drawn


def _ticks(found: SamplerFigures) -> tuple[float, ...]:
    """The calls that were studied, as far as there is room for their numbers."""
    kept: list[float] = []
    for value in sorted({float(cell.nfe) for cell in found.cells}):
        if not kept or value / kept[-1] > 1.18:
            kept.append(value)
    return tuple(kept)


def curve(found: SamplerFigures, column: Column, axis: Axis, costs: list[float]) -> Chart:
    """One measure against its cost, one line per sampler; of the main one also front (dashed) and knee (ringed)."""
    measure, scale = column.measure, column.measure.scale
    known = column.values[np.isfinite(column.values)]
    log = measure.scaled and bool((known > 0).all())
    series: list[Series] = []
    marks: list[Mark] = []
    if column is found.main:
        by_time = axis.name.startswith("seconds")
        ahead = found.verdict.by_seconds if by_time else found.verdict.by_calls
        best = [float(column.values[i]) * scale for i in ahead]
        look: dict[str, Any] = {"colour": charts.FAINT, "dashed": True, "points": False}
        series.append(Series("Pareto front", [costs[i] for i in ahead], best, **look))
        knee = found.verdict.knee_seconds if by_time else found.verdict.knee
        if knee is not None and knee.found:
            marks.append(Mark("knee", costs[knee.cell], float(column.values[knee.cell]) * scale))
    labels = [f"{cell.steps} steps, {seconds_of(found, i)}" for i, cell in enumerate(found.cells)]
    series += _lines(found, costs, [column.shown(i) for i in range(len(costs))], labels)
    if column.of_converged is not None:
        marks.append(Mark("converged", y=column.of_converged * scale))
    better = "Less is better." if measure.less else "More is better."
    note = f"{better} Bars are 95 % intervals over the same resampled images; a click on a point shows its images."
    title = f"{measure.title[:1].upper()}{measure.title[1:]} against {axis.name.partition(' (')[0]}"
    return Chart(title, series, axis, Axis(measure.title, log), marks, note)


def _latency(found: SamplerFigures, axis: Axis, calls: list[float]) -> Chart:
    series = _lines(found, calls, [one.estimate for one in found.latencies])
    note = f"One image at a time, warm: median and quartiles of {found.study.config.rounds} rounds."
    return Chart("Seconds per image against model calls", series, axis, Axis("seconds per image", True), (), note)


def _lines(found: SamplerFigures, x: list[float], y: list[Estimate], labels: list[str] | None = None) -> list[Series]:
    """A line a sampler over its cells, in the same colour in every chart."""
    series = []
    for number, (text, own) in enumerate(by_sampler(found.cells).items()):
        held = sorted(own, key=lambda i: x[i])
        look: dict[str, Any] = {} if labels is None else {"labels": [labels[i] for i in held]}
        look |= {"href": [found.cells[i].label for i in held], "colour": charts.COLOURS[number % len(charts.COLOURS)]}
        series.append(Series.of(text, [x[i] for i in held], [y[i] for i in held], **look))
    return series


def seconds_of(found: SamplerFigures, i: int) -> str:
    value = found.latencies[i].estimate.value
    return f"{number_text(value, 3)} s" if math.isfinite(value) else "not timed"


# --- tables ----------------------------------------------------------------------------------------------------


def _tables(found: SamplerFigures) -> list[Table]:
    tables = [main_table(found), _ranking_table(found)]
    if "right" in found.columns:
        tables.append(_scene_table(found))
    return [table for table in tables if table.rows]


def main_table(found: SamplerFigures) -> Table:
    rows = []
    for i, cell in enumerate(found.cells):
        seconds = found.latencies[i].estimate
        time = "–" if seconds.ends is None else seconds.words(three_digits, " s")
        figures = [with_interval(column, i) for column in found.columns.values()]
        tails = np.quantile(found.results.per_image(cell, "pictures", "distance"), [0.5, 0.95]).tolist()
        row = (cell.setup.label, str(cell.steps), str(cell.nfe), time, *figures, *map(three_digits, tails))
        rows.append((*row, found.verdict.place(i)))
    titles = [column.measure.title for column in found.columns.values()]
    columns = ("sampler", "steps", "calls", "seconds", *titles, "median distance", "95th of 100", "")
    note = (
        "In brackets 95 % intervals, of seconds quartiles. 'Front': no cell has fewer calls and a better "
        f"{found.main.measure.title}. Distances are root mean square differences of pixels in [0, 1] (8 bits) and of "
        "latents to the converged image of the same prompt and noise: their mean over images, and for pixels the "
        "median and the image that is worse than 95 of 100."
    )
    return Table("All cells", columns, tuple(rows), note)


def _ranking_table(found: SamplerFigures) -> Table:
    scaled = found.main.measure.scaled
    rows = []
    for one in found.verdict.ranking:
        factor = 1.0 if scaled else found.main.measure.scale
        own = number_text(one.value * found.main.measure.scale, 3)
        gap = one.behind.times(factor).words(three_digits)
        behind = "–" if one is found.verdict.ranking[0] else gap
        rows.append((one.sampler, own, f"{100 * one.first:.0f} %", behind))
    unit = "times the first's" if scaled else "behind the first"
    columns = ("sampler", f"mean {found.main.measure.title}", "came first", unit)
    note = (
        "The mean over the range of model calls that all of them cover, in equal parts of its logarithm"
        + (", of logarithms" if scaled else "")
        + ". 'Came first': the share of resamples."
    )
    return Table("Who comes first", columns, tuple(rows), note)


def _scene_table(found: SamplerFigures) -> Table:
    by_cell = [found.results.attributes(cell) for cell in found.cells]
    kinds = list(dict.fromkeys(name for one in by_cell for name in one))
    rows = []
    for cell, shares in zip(found.cells, by_cell, strict=True):
        told_of = [shares.get(name, (0, 0)) for name in kinds]
        rows.append((cell.label, *(f"{100 * good / count:.1f} %" if count else "–" for good, count in told_of)))
    note = "Shares of the images whose prompt asks for it. What cannot be read is not right."
    return Table("What the images show", ("cell", *kinds), tuple(rows), note)


def _markdown(found: SamplerFigures) -> str:
    parts = [f"# Samplers for {found.study.subject.name}\n", headline(found) + "\n", found.verdict.sentence + "\n"]
    if found.verdict.call:
        parts.append(f"```\n{found.verdict.words}\n{_python(found.verdict.call)}\n```\n")
    if found.verdict.comparison:
        parts.append(found.verdict.comparison + "\n")
    parts += [words + "\n" for words in found.doubts()]
    parts += [table.markdown() for table in _tables(found)]
    return "\n".join([*parts, *(f"- {words}" for words in found.notes())]) + "\n"


# --- images --------------------------------------------------------------------------------------------------


def _images(found: SamplerFigures) -> Images:
    """The first images of every cell, and the converged ones."""
    study = found.study
    first = found.results.firsts[0]
    count = len(study.config.numbers(first))
    best = study.converged[0]
    rows = [(best, _CONVERGED, f"{best.setup.text} × {best.steps}")]
    for i, cell in enumerate(found.cells):
        rows.append((cell, cell.label, f"{cell.nfe} calls, {found.main.measure.title} {with_interval(found.main, i)}"))
    rows += [(one, one.key, "the same sampler's own") for one in study.converged[1:]]
    cells = [ImageCell(key, study.files.images(of, first, count)[:_IMAGES_SHOWN], note) for of, key, note in rows]
    knee = found.verdict.knee
    shown = (_CONVERGED, found.cells[knee.cell].label if knee is not None else found.cells[0].label)
    return Images("Images by cell", cells, "The same prompts and noise in every cell.", shown)


# --- for programs ----------------------------------------------------------------------------------------------


def plain(found: SamplerFigures) -> dict[str, Any]:
    rows = []
    for i, cell in enumerate(found.cells):
        figures = {name: column.estimate(i).plain() for name, column in found.columns.items()}
        times = found.latencies[i].estimate.plain()
        seconds = {"median": times.pop("value"), **times}
        about = {"sampler": cell.setup.text, "steps": cell.steps, "nfe": cell.nfe, "stochastic": cell.stochastic}
        rows.append({**about, "seconds": seconds, **figures})
    v = found.verdict
    return {
        "model": found.study.subject.name,
        "machine": found.clock.machine,
        "pictures": found.results.count,
        "by": v.by,
        "cells": rows,
        "front": [found.cells[i].key for i in v.by_calls],
        "front_by_seconds": [found.cells[i].key for i in v.by_seconds],
        "knee": _knee_plain(found, v.knee),
        "knee_by_seconds": _knee_plain(found, v.knee_seconds),
        "ranking": [vars(one) | {"behind": list(one.behind.plain().values())} for one in v.ranking],
        "recommendation": {"sentence": v.sentence, "command": v.words, "call": v.call},
        "converged_moved": {
            name: {key: Estimate(value).plain()["value"] for key, value in found.results.floor(name).items()}
            for name in ("distance", "latent")
        },
        "doubts": found.doubts(),
        "notes": found.notes(),
    }


def _knee_plain(found: SamplerFigures, knee: Knee | None) -> dict[str, Any] | None:
    """None where no knee was found."""
    if knee is None or not knee.found:
        return None
    shares = {found.cells[i].key: share for i, share in knee.shares.items()}
    return {
        "cell": found.cells[knee.cell].key,
        "cost": knee.cost.value,
        "low": knee.cost.low,
        "high": knee.cost.high,
        "share_of_resamples": shares,
    }
