"""`pellucid sample --grid-of`: one run a cell, then one labelled picture that carries its recipe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from pellucid.cli import sample_output, sample_repeat, sample_words
from pellucid.cli.sample_work import Job, Work, request_of
from pellucid.core.errors import PellucidError
from pellucid.core.samplers import resolve
from pellucid.pipeline.recipe import Recipe, write_png
from pellucid.pipeline.request import Request
from pellucid.pipeline.sheet import Axis, cells, draw_sheet, parse_axes

# What a cell may change, and as what it is read.
AXES: dict[str, type] = {
    "steps": int,
    "guidance": float,
    "sampler": str,
    "grid": str,
    "dialect": str,
    "seed": int,
    "strength": float,
    "clip_skip": int,
    "prompt": str,
    "negative": str,
    "label": str,
    "size": str,
    "noise": str,
    "lora": float,
    "control": float,
    "image_prompt": float,
    "denoising_start": float,
    "denoising_end": float,
}
SCALES = {"lora": "loras", "control": "controls", "image_prompt": "image_prompts"}


def axes_of(text: str, sampler: str | None) -> tuple[Axis, ...]:
    """The axes of a sheet: options of the command, and numeric options of the sampler. Guidance may be words too."""
    own = {} if sampler is None else resolve(sampler)[0].options()
    numeric = {name: type(value) for name, value in own.items() if type(value) in (int, float)}
    try:
        return parse_axes(text, {**numeric, **AXES})
    except PellucidError as error:
        if error.code != "grid-value" or "guidance" not in text:
            raise
        return parse_axes(text, {**numeric, **AXES, "guidance": str})


@dataclass(frozen=True)
class Cells:
    """The axes, the text that they were read from, and the settings and the request of each cell."""

    text: str
    axes: tuple[Axis, ...]
    settings: list[dict[str, Any]]
    requests: list[Request]


def cells_of(text: str, job: Job, fields: dict[str, Any], unguarded: bool) -> Cells:
    axes = axes_of(text, fields.get("sampler"))
    every = cells(axes)
    return Cells(text, axes, every, [cell_request(job, fields, settings, unguarded) for settings in every])


def sheet(work: Work, cells: Cells, keep: bool) -> None:
    """Every cell, then the sheet. All are planned before the first is run."""
    work.bar.unit = "cell"
    work.bar.begin(len(cells.requests), sum(work.steps(request) for request in cells.requests))
    work.check_recipe(cells.requests[0])
    goal = work.goal.file or free_sheet(work.goal.folder)
    folder = goal.with_name(f"{goal.stem}-cells") if keep else None
    if folder is not None:
        folder.mkdir(exist_ok=work.goal.overwrite)
    pictures = []
    for number, (settings, request) in enumerate(zip(cells.settings, cells.requests, strict=True), 1):
        result = work.run(request)
        pictures.append(result.images[0])
        if folder is not None:
            path = folder / sample_output.cell_name(number, settings)
            write_png(result.images[0], path, result.recipe)
            work.report.files.append(path)
        work.bar.done += 1
    first = work.report.recipes[0]
    title = None if any(axis.name == "prompt" for axis in cells.axes) else first.prompt
    drawn = draw_sheet(pictures, cells.axes, title=title, footer=footer(work.report.recipes))
    write_png(drawn, work.goal.free(goal), first, cells.text)
    if work.origin is not None and work.origin.axes == cells.text:
        work.compare_pixels(drawn, first)
    work.report.files.insert(0, goal)
    work.report.sheet = {"file": str(goal), "axes": cells.text, "cells": None if folder is None else str(folder)}


def free_sheet(folder: Path) -> Path:
    """A name that is not taken: sheet.png, sheet-2.png, …"""
    names = (folder / f"sheet{'' if i == 1 else f'-{i}'}.png" for i in count(1))
    return next(path for path in names if not os.path.lexists(path))


def cell_request(job: Job, fields: dict[str, Any], settings: dict[str, Any], unguarded: bool) -> Request:
    """The request of one cell: that of the sheet, with the cell's own settings."""
    changes: dict[str, Any] = {}
    for name, value in settings.items():
        if name in ("prompt", "seed", "label"):
            job = replace(job, **{name: sample_words.label(value) if name == "label" else value})
        elif name == "guidance":
            changes["guidance"] = sample_words.guidance(value, unguarded)
        elif name == "size":
            changes["width"], changes["height"] = sample_words.size("size", value)
        elif name in SCALES:
            changes[SCALES[name]] = rescaled(fields, name, value)
        elif name in AXES:
            changes["negative_prompt" if name == "negative" else name] = value
        else:
            changes["options"] = {**changes.get("options", {}), name: value}
    return request_of([job], sample_repeat.over(fields, changes))


def rescaled(fields: dict[str, Any], name: str, scale: float) -> list[Any]:
    """The adapters of the run at another scale."""
    held = fields.get(SCALES[name])
    if not held:
        flag = f"--{name.replace('_', '-')}"
        raise PellucidError(f"axis {name} must come with {flag}, whose scale it is; got none.", "grid-axis")
    return [replace(one, scale=scale) for one in held]


def footer(recipes: Sequence[Recipe]) -> str:
    """What all cells share, in a line."""
    lines = [
        (
            Path(recipe.model).name,
            f"seed {recipe.seed}",
            f"{recipe.size[0]}×{recipe.size[1]}" if recipe.size else "",
            str(recipe.sampler),
            str(recipe.grid.get("name", "")),
            f"{recipe.steps} steps",
            f"guidance {sample_repeat.shown(recipe.guidance)}",
        )
        for recipe in recipes
    ]
    shared = [texts[0] for texts in zip(*lines, strict=True) if len(set(texts)) == 1]
    return " · ".join(text for text in shared if text)
