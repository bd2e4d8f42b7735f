"""The times that a network believes in: those at which it denoises best, found by telling it many."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from pellucid.core.denoiser import input_scale, read_output
from pellucid.core.schedule import Array, Schedule, Target, in_frame
from pellucid.evidence.doctor.hypotheses import log_square
from pellucid.evidence.doctor.probe import Probe

UNEXPLAINED = 1.15  # square error at the times of a schedule over that at the best times
BELIEVED_AT = (0.45, 1.2, 3.5)  # sigma / alpha
TIMES, FINER = 13, 8  # told at each of them, and about the best of them
FEW = 8  # images


@dataclass(frozen=True)
class Belief:
    """At a level, the time at which the network denoises best, and by what factor its square error is larger at the
    time that a schedule tells."""

    ratio: float
    time: float
    excess: float


def beliefs(probe: Probe, target: Target, curve: Schedule, count: int = FEW) -> list[Belief]:
    """The times that a network believes in, found by telling it many; free of any schedule but for the frame."""
    images = range(min(2 if probe.few else count, len(probe)))
    clean = probe.clean[: len(images)]
    found = []
    for k, ratio in enumerate(BELIEVED_AT):
        level = in_frame(ratio, "vp")
        x = clean * level.alpha + probe.noise(1000 + k, images) * level.sigma
        k_x, k_out = read_output(curve, target, "x0", level)
        scale = input_scale(curve, level)

        def told(times: Array, x: Tensor = x, k_x: float = k_x, k_out: float = k_out, scale: float = scale) -> Array:
            asked = [probe.ask(x * scale, float(time), images) for time in times]
            return np.array([float(log_square(x * k_x + out * k_out - clean).mean()) for out in asked])

        time, least = searched(told, *curve.span)
        own = told(np.array([float(curve.time_at(ratio))]))
        found.append(Belief(ratio, time, math.exp(min(float(own[0]) - least, 50.0))))
    return found


def searched(curve: Callable[[Array], Array], low: float, high: float) -> tuple[float, float]:
    """Where a curve is lowest and how low: over all of it, then finer about the lowest point."""
    times = np.linspace(low, high, TIMES)
    values = curve(times)
    i = int(values.argmin())
    finer = np.linspace(times[max(i - 1, 0)], times[min(i + 1, TIMES - 1)], FINER)[1:-1]
    times, values = np.append(times, finer), np.append(values, curve(finer))
    order = np.argsort(times)
    return lowest(times[order], values[order])


def lowest(times: Array, values: Array) -> tuple[float, float]:
    """Where a curve of points is lowest and how low, by the parabola through the lowest point and its neighbours."""
    i = int(values.argmin())
    if i in (0, len(times) - 1):
        return float(times[i]), float(values[i])
    (a, b, c), (p, q, r) = times[i - 1 : i + 2], values[i - 1 : i + 2]
    left, right = (b - a) * (q - r), (b - c) * (q - p)
    if left == right:
        return float(b), float(q)
    at = b - 0.5 * ((b - a) * left - (b - c) * right) / (left - right)
    return float(np.clip(at, a, c)), float(q)


def explained(seen: list[Belief]) -> bool:
    """Whether the schedule tells the network its times at every level."""
    return max(belief.excess for belief in seen) < UNEXPLAINED


def at_scale(probe: Probe, factor: float) -> list[Belief]:
    """What the network believes in under the probe's schedule, with data so many times as large."""
    return beliefs(replace(probe, clean=probe.clean * factor), probe.target, probe.schedule)
