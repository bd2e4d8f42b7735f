"""Noise schedules for the page: their curves, the points of a grid on them, and an image noised along them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from pellucid.core import grid as grids
from pellucid.core import schedule as schedules
from pellucid.core.errors import PellucidError, rule
from pellucid.core.noise import Philox
from pellucid.core.schedule import Array, Level, Schedule
from pellucid.pipeline.images import flatten, to_images, to_tensor
from pellucid.scenes import Scene, Scenes, Thing, render
from pellucid.studio import asking

MOST = 6  # schedules at a time
MOST_STEPS = 200  # points of a grid that can still be told apart
DRAWN = 160  # points of a curve
COLUMNS = 8  # times at which an image is noised
SIDE = 96  # pixels of it
SEED = 7
SCENE = Scene((Thing("star", "red", "solid", 0.38, 0.42, 0.24), Thing("circle", "blue", "striped", 0.7, 0.7, 0.17)))


@dataclass(frozen=True)
class Curve:
    """A schedule as columns over normalised time (0 is data, 1 is noise), and a grid's points on it."""

    name: str
    schedule: Schedule
    time: Array
    columns: dict[str, Array]
    call_time: Array  # empty where the schedule does not carry the grid
    calls: dict[str, Array]


@dataclass(frozen=True)
class Curves:
    """The curves, and a line for each thing that could not be."""

    found: tuple[Curve, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Noised:
    """An image at a time of a schedule, scaled to one size for the eye."""

    time: float
    level: Level
    image: Image.Image


def curves(names: Sequence[str], grid: str, steps: Any, zero_snr: bool) -> Curves:
    """The chosen schedules; what one of them cannot take is said and left out for that one alone."""
    if not 1 <= len(names) <= MOST:
        raise PellucidError(rule("schedules", f"one to {MOST}", len(names)), "schedules")
    count = steps_of(steps)
    found, notes = [], []
    for name in names:
        schedule = schedules.make(name)
        if zero_snr:
            try:
                schedule = schedules.make(schedule, zero_snr=True)
            except PellucidError as error:
                notes.append(f"{name} is drawn as it is: {error}")
        times, ratios = np.empty(0), np.empty(0)
        try:
            ratios, times = grids.points(schedule, grids.named(grid), count)
        except PellucidError as error:
            notes.append(f"{name} is drawn without the grid {grid}: {error}")
        found.append(curve(name, schedule, times, ratios))
    return Curves(tuple(found), tuple(notes))


def steps_of(given: Any) -> int:
    """As many points as the charts have room for."""
    try:
        steps = asking.steps_of(given)
    except PellucidError:
        steps = 0
    if not 1 <= steps <= MOST_STEPS:
        got = "none" if given in (None, "") else given
        raise PellucidError(rule("steps", f"a whole number from 1 to {MOST_STEPS} here", got), "steps")
    return steps


def curve(name: str, schedule: Schedule, times: Array, ratios: Array) -> Curve:
    table = schedule.table()
    low, high = schedule.span
    kept = np.unique(np.linspace(0, len(table["time"]) - 1, DRAWN).round().astype(np.int64))
    with np.errstate(divide="ignore"):
        calls = {
            "beta": np.interp(times, table["time"], table["beta"]),
            "alpha_bar": 1.0 / (1.0 + ratios**2),
            "snr": 1.0 / ratios**2,
            "lam": -np.log(ratios),
        }
    columns = {column: table[column][kept] for column in calls}
    time = (table["time"][kept] - low) / (high - low)
    return Curve(name, schedule, time, columns, (np.asarray(times) - low) / (high - low), calls)


def scene() -> Tensor:
    """(3, S, S): the image that is noised where nobody gave one."""
    return render(Scenes.of([SCENE]), SIDE)[0]


def square(image: Image.Image) -> Tensor:
    """(3, S, S): the middle of an image somebody gave."""
    return to_tensor(ImageOps.fit(flatten(image), (SIDE, SIDE)))[0]


def noised(schedule: Schedule, x0: Tensor) -> list[Noised]:
    """x = alpha·x0 + sigma·eps at a few times, evenly, with one noise; shown at the size that x0 has."""
    eps = Philox(SEED).first(x0.shape, x0, [0])[0]
    made = []
    for time in np.linspace(*schedule.span, COLUMNS):
        level = schedule.level(float(time))
        x = level.alpha * x0 + level.sigma * eps
        shown = x / float(np.hypot(level.alpha, level.sigma))
        made.append(Noised(float(time), level, to_images(torch.clamp(shown, -1, 1)[None])[0]))
    return made
