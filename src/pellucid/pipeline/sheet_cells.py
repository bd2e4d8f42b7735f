"""The cells of an X/Y sheet: which settings may vary, what each cell asks for, and what all of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pellucid.core.errors import PellucidError, rule
from pellucid.core.samplers import resolve
from pellucid.models.guidance import Guidance
from pellucid.pipeline import request_words
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.repeat import over
from pellucid.pipeline.sheet import Axis, parse_axes

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


def axes_of(text: str, sampler: str | None, names: Mapping[str, type] = AXES) -> tuple[Axis, ...]:
    """The axes of a sheet: the settings `names`, and numeric options of the sampler. Guidance may be words too."""
    own = {} if sampler is None else resolve(sampler)[0].options()
    numeric = {name: type(value) for name, value in own.items() if type(value) in (int, float)}
    try:
        return parse_axes(text, {**numeric, **names})
    except PellucidError as error:
        if error.code != "grid-value" or "guidance" not in text:
            raise
    axes = parse_axes(text, {**numeric, **names, "guidance": str})
    return tuple(as_run(axis) if axis.name == "guidance" else axis for axis in axes)


def as_run(axis: Axis) -> Axis:
    """Guidance in words, labelled with what is run: `guarded 9` is `7 + rescale`."""
    meant = [Guidance.parse(value).text() for value in axis.values]
    for at, text in enumerate(meant):
        if text in meant[:at]:
            first = axis.values[meant.index(text)]
            got = f"{first} and {axis.values[at]}, which are both {text}"
            raise PellucidError(rule("values of guidance", "all different", got), "grid-value")
    return replace(axis, values=tuple(meant))


def cell_fields(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the request of one cell: those of the sheet, with the cell's own settings."""
    changes: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "label":
            changes["label"] = request_words.label(value)
        elif name == "guidance":
            changes["guidance"] = Guidance.parse(value)
        elif name == "size":
            changes["width"], changes["height"] = request_words.size("size", value)
        elif name in SCALES:
            changes[SCALES[name]] = rescaled(fields, name, value)
        elif name in AXES:
            changes["negative_prompt" if name == "negative" else name] = value
        else:
            changes["options"] = {**changes.get("options", {}), name: value}
    return over(fields, changes)


def rescaled(fields: Mapping[str, Any], name: str, scale: float) -> list[Any]:
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
            f"guidance {Guidance.parse(recipe.guidance).text()}" if "scale" in recipe.guidance else "",
        )
        for recipe in recipes
    ]
    shared = [texts[0] for texts in zip(*lines, strict=True) if len(set(texts)) == 1]
    return " · ".join(text for text in shared if text)
