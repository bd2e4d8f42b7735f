"""`pellucid sample --grid-of`: one run a cell, then one labelled image that carries its recipe."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from pellucid.cli import output, sample_output
from pellucid.cli.sample_output import OutputPaths
from pellucid.cli.sample_work import ImageJob, SampleRun, request_of
from pellucid.pipeline.request import Request
from pellucid.pipeline.sheet import Axis, axes_of, cell_fields, cells, draw_sheet, shared_settings


@dataclass(frozen=True)
class SheetCells:
    """The axes, the text that they were read from, and the settings and the request of each cell."""

    text: str
    axes: tuple[Axis, ...]
    settings: list[dict[str, Any]]
    requests: list[Request]


def cells_of(text: str, job: ImageJob, fields: dict[str, Any]) -> SheetCells:
    axes = axes_of(text, fields.get("sampler"))
    every = cells(axes)
    return SheetCells(text, axes, every, [cell_request(job, fields, settings) for settings in every])


def sheet_places(goal: OutputPaths, keep: bool) -> tuple[Path, Path | None]:
    """The file of the sheet and the folder of its cells, where they are kept; both are new, or may be replaced."""
    file = goal.file or free_sheet(goal.folder)
    folder = file.with_name(f"{file.stem}-cells") if keep else None
    if folder is not None and os.path.lexists(folder) and not (goal.overwrite and folder.is_dir()):
        raise output.exists_error("--keep-cells", folder)
    return file, folder


def make_sheet(work: SampleRun, cells: SheetCells, goal: Path, folder: Path | None) -> None:
    """Every cell, then the sheet. All are planned before the first is run."""
    work.bar.unit = "cell"
    work.bar.begin(len(cells.requests), sum(work.steps(request) for request in cells.requests))
    work.check_recipe(cells.requests[0])
    if folder is not None:
        folder.mkdir(exist_ok=work.goal.overwrite)
    images = []
    for number, (settings, request) in enumerate(zip(cells.settings, cells.requests, strict=True), 1):
        result = work.run(request)
        images.append(result.images[0])
        if folder is not None:
            path = folder / sample_output.cell_name(number, settings)
            work.goal.write(path, result.images[0], result.recipe)
            work.report.files.append(path)
        work.bar.done += 1
    first = work.report.recipes[0]
    title = None if any(axis.name == "prompt" for axis in cells.axes) else first.prompt
    drawn = draw_sheet(images, cells.axes, title=title, footer=shared_settings(work.report.recipes))
    work.goal.write(goal, drawn, first, cells.text)
    if work.origin is not None and work.origin.axes == cells.text:
        work.compare_pixels(drawn, first)
    work.report.files.insert(0, goal)
    work.report.sheet = {"file": str(goal), "axes": cells.text, "cells": None if folder is None else str(folder)}


def free_sheet(folder: Path) -> Path:
    """A name that is not taken: sheet.png, sheet-2.png, …"""
    names = (folder / f"sheet{'' if i == 1 else f'-{i}'}.png" for i in count(1))
    return next(path for path in names if not os.path.lexists(path))


def cell_request(job: ImageJob, fields: dict[str, Any], settings: dict[str, Any]) -> Request:
    """The request of one cell: that of the sheet, with the cell's own settings."""
    held = cell_fields(fields, settings)
    own = {name: held.pop(name) for name in ("prompt", "label", "seed") if name in settings}
    return request_of([replace(job, **own)], held)
