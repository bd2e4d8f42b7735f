"""A run in one image: x, x0 and what guidance did to it, step by step, over the curves of its numbers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.core.wording import short
from pellucid.evidence.report import charts
from pellucid.evidence.trace import previews
from pellucid.evidence.trace.previews import Preview
from pellucid.evidence.trace.reading import Step, Trace

_COLUMNS = 12  # steps that are shown as images
_CELL = 1.15  # inches
_PANEL = 2.1  # inches of a chart's height
_LEFT, _TOP, _GAP, _RIGHT, _BOTTOM, _BETWEEN = 1.25, 0.95, 0.06, 0.25, 0.0, 0.62
_LEGEND = 0.2  # of a panel's height
_FLAT = 1e-3  # the part of its size within which a curve is flat
_WIDE = 30  # the range from which on a curve is drawn over a log axis
_FOOT: dict[str, Any] = {"fontsize": 7.5, "color": charts.SLATE}
_PERCENTILE = 0.995  # of differences, which becomes the end of the colours


@dataclass(frozen=True)
class _Strip:
    """One row of images: its name, a note under it, (H, W, 3) arrays, and a caption under each."""

    name: str
    note: str
    cells: list[Any]
    feet: list[str] = field(default_factory=list)


def draw(trace: Trace, path: Path, *, image: int = 0, vae: Any = None) -> Path:
    """Writes the image of one image of a run; with `vae`, latents are decoded."""
    charts.require()
    steps = [step for step in trace.steps if image in step.images]
    if not steps:
        must = f"one of the {trace.header.images} images that ran"
        raise PellucidError(rule("image", f"{must}, counted from 0", image), "trace-image")
    shown = previews.spaced([i for i in trace.has_images if image in trace.steps[i].images], _COLUMNS)
    strips = _strips_of(trace, shown, image, vae) if shown else []
    columns = max(len(shown), 8)
    width = _LEFT + columns * (_CELL + _GAP) + _RIGHT
    height = _TOP + len(strips) * (_CELL + _GAP) + (0.55 if strips else 0.1) + 2 * _PANEL + _BOTTOM
    figure = charts.canvas(width, height)
    _title(figure, trace, image, width, height)
    for row, strip in enumerate(strips):
        _draw_strip(figure, strip, [trace.steps[i] for i in shown] if row == 0 else [], row)
    _curves(figure, steps, image, trace)
    return charts.save(figure, path, dpi=140)


def _strips_of(trace: Trace, indices: list[int], image: int, vae: Any) -> list[_Strip]:
    places = {i: trace.steps[i].of(image) for i in indices}

    def stacked(name: str) -> Tensor:
        return torch.stack([trace.tensor(name, i)[places[i]] for i in indices])

    x, x0 = stacked("x"), stacked("x0")
    levels = [trace.steps[i].levels[places[i]] for i in indices]
    look = previews.preview_for(torch.nan_to_num(x0), vae)
    if look is None:
        return []
    sizes = torch.tensor([math.hypot(level.alpha, level.sigma) for level in levels], dtype=x.dtype)
    unit = x / sizes.reshape(-1, *([1] * (x.ndim - 1)))
    found = [
        _Strip("x", "scaled to size 1", _arrays(look.colours(unit))),
        _Strip("x0", look.name, _arrays(look.image(x0))),
    ]
    if "delta" in trace.header.kept:
        found.append(_guidance_strip(look, x0, stacked("delta")))
    return found


def _guidance_strip(look: Preview, x0: Tensor, delta: Tensor) -> _Strip:
    """What guidance and clipping did to the prediction with the prompt, each step on its own scale."""
    change = torch.nan_to_num(look.change(x0, torch.nan_to_num(delta))).double()
    flat = change.abs().flatten(1)
    most = torch.quantile(flat[:, :: max(1, flat.shape[1] // 2**16)], _PERCENTILE, dim=1).tolist()
    cells = [previews.signed(one, size) for one, size in zip(change, most, strict=True)]
    feet = ["none" if size == 0 else f"±{short(size, 3)}" for size in most]
    return _Strip("x0 − cond", "guidance and clips, around grey", _arrays(torch.stack(cells)), feet)


def _arrays(images: Tensor) -> list[Any]:
    return [np.nan_to_num(one.movedim(0, -1).double().numpy()) for one in images]


# --- drawing ---------------------------------------------------------------------------------------------------


def _title(figure: Any, trace: Trace, image: int, width: float, height: float) -> None:
    header = trace.header
    plan = header.plans[image]
    seeds = header.noise.get("seeds") or []
    about = [
        f"{plan.name}, {plan.grid.get('name', '')} grid, {plan.nfe} model calls",
        f"seed {seeds[image]}" if image < len(seeds) else "",
        f"index {image} of a batch of {header.images}" if header.images > 1 else "",
        "" if trace.whole else f"broken off after {len(trace.steps)} of {header.steps} steps",
    ]
    prompt = header.recipes[image]["prompt"] if image < len(header.recipes) else ""
    first = f"“{prompt[:110]}”" if prompt else trace.path.name
    left = 0.3 / width
    figure.text(left, 1 - 0.16 / height, first, fontsize=13, fontweight="bold", color=charts.INK, va="top")
    line = " · ".join(filter(None, about))
    figure.text(left, 1 - 0.43 / height, line, fontsize=9.5, color=charts.SLATE, va="top")


def _place(figure: Any, x: float, y: float, wide: float, high: float) -> Any:
    """Axes at inches from the upper left."""
    width, height = figure.get_size_inches()
    return figure.add_axes((x / width, 1 - (y + high) / height, wide / width, high / height))


def _draw_strip(figure: Any, strip: _Strip, heads: list[Step], row: int) -> None:
    y = _TOP + row * (_CELL + _GAP)
    width, height = figure.get_size_inches()
    for column, cell in enumerate(strip.cells):
        axes = _place(figure, _LEFT + column * (_CELL + _GAP), y, _CELL, _CELL)
        axes.imshow(cell, interpolation="nearest" if max(cell.shape[:2]) < 96 else "antialiased")
        axes.set_axis_off()
        if heads:
            step = heads[column]
            head = f"{step.index} · σ/α {short(step.level.ratio, 3)}"
            axes.set_title(head, fontsize=8, color=charts.SLATE, pad=3)
        if strip.feet:
            axes.text(0.5, -0.03, strip.feet[column], transform=axes.transAxes, ha="center", va="top", **_FOOT)
    middle = 1 - (y + _CELL / 2) / height
    name = {"ha": "right", "va": "bottom", "fontsize": 11, "fontweight": "bold", "color": charts.INK}
    note = {"ha": "right", "va": "top", "fontsize": 7.5, "color": charts.SLATE, "linespacing": 1.3}
    right = (_LEFT - 0.12) / width
    figure.text(right, middle + 0.02 / height, strip.name, **name)
    figure.text(right, middle - 0.02 / height, textwrap.fill(strip.note, 17), **note)


def _curves(figure: Any, steps: list[Step], image: int, trace: Trace) -> None:
    """Six panels in two rows."""
    at = [step.index for step in steps]
    root = math.sqrt(trace.header.numbers)

    def series(get: Callable[[Step], Any]) -> Any:
        return np.array([get(step)[step.of(image)] for step in steps], dtype=float)

    def norm(name: str) -> Any:
        return series(lambda step: step.norms[name])

    panels = _panels_of(figure)
    sizes = {"x": norm("x") / root, "x0": norm("x0") / root, "eps": norm("eps") / root}
    _panel(panels[0], "root mean square", at, sizes, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        _panel(panels[1], "size of x0 − cond, of x0", at, {"": norm("delta") / norm("x0")}, 3)
    _panel(panels[2], "cosine of cond and uncond", at, {"": series(lambda step: step.cosine)}, 4)
    _panel(panels[3], "local error, of x", at, {"": series(lambda step: step.local_error)}, 5, log=True)
    limit = f"saturated: share of |x0| ≥ {trace.header.limit:g}"
    _panel(panels[4], limit, at, {"": series(lambda step: step.saturation)}, 6)
    on_device = any(step.device_seconds for step in steps)
    spent = [step.device_seconds if on_device else step.seconds for step in steps]
    works = {
        work: np.array([one.get(work, math.nan) for one in spent]) * 1e3
        for work in ("model", "update", "noise", "observe")
    }
    _panel(panels[5], "ms per step" + (", on the device" if on_device else ""), at, works, 0, log=True)
    for axes in panels[3:]:
        axes.set_xlabel("step", fontsize=9, color=charts.INK)


def _panels_of(figure: Any) -> list[Any]:
    width, height = figure.get_size_inches()
    wide = (width - _LEFT - _RIGHT - 2 * _BETWEEN) / 3
    tops = (height - _BOTTOM - 2 * _PANEL, height - _BOTTOM - _PANEL)
    return [_place(figure, _LEFT + k * (wide + _BETWEEN), top, wide, _PANEL - 0.62) for top in tops for k in range(3)]


def _panel(axes: Any, name: str, at: list[int], lines: dict[str, Any], colour: int, *, log: bool = False) -> None:
    """Curves over the steps, or the words "not measured"."""
    charts.quiet(axes, name)
    axes.title.set_fontsize(9.5)
    axes.tick_params(labelsize=8)
    drawn = {label: values for label, values in lines.items() if np.isfinite(values).any()}
    if not drawn:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=charts.FAINT, fontsize=9)
        axes.set_yticks([])
    for k, (label, values) in enumerate(drawn.items()):
        look = {"color": charts.COLOURS[colour + k], "marker": "o", "markersize": 2.5, "linewidth": 1.4}
        axes.plot(at, values, label=label, **look)
    positive = bool(drawn) and all((values[np.isfinite(values)] > 0).all() for values in drawn.values())
    low, high = axes.dataLim.ymin, axes.dataLim.ymax
    if positive and (log or high > _WIDE * low):
        charts.log_y(axes)
    elif drawn and high - low < _FLAT * max(abs(low), abs(high), _FLAT):  # rounding is not worth an axis
        middle, half = (low + high) / 2, _FLAT * max(abs(low), abs(high), _FLAT)
        axes.set_ylim(middle - half, middle + half)
    if not drawn or axes.get_yscale() == "linear":
        axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_xlim(at[0] - 0.5, at[-1] + 0.5)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(drawn) > 1:
        _headroom(axes)
        look = {"frameon": False, "fontsize": 7.5, "labelcolor": charts.INK, "borderaxespad": 0.1}
        close = {"handlelength": 1.2, "handletextpad": 0.4, "columnspacing": 0.9}
        axes.legend(loc="upper right", ncols=len(drawn), **look, **close)


def _headroom(axes: Any) -> None:
    """A line of room for the legend above the curves."""
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        axes.set_ylim(low, high * (high / low) ** _LEGEND)
    else:
        axes.set_ylim(low, high + _LEGEND * (high - low))
