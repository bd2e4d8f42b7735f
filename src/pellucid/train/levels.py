"""The numbers of an objective at many times at once: the same as `Objective.row` says plainly, one by one."""

from __future__ import annotations

import numpy as np

from pellucid.core.denoiser import sigma_data_of
from pellucid.core.schedule import EDM, Array, Level, Schedule, Target
from pellucid.train.weighting import Weighting


def columns(schedule: Schedule, target: Target, weighting: Weighting, times: Array) -> Array:
    """(9, B) float64, in the order of `Objective.row`; not finite where a time has no signal or no noise."""
    with np.errstate(all="ignore"):
        alpha, sigma = split(schedule, schedule.ratio_at(times))
        data, weight = sigma_data_of(schedule), np.ones_like(times)
        if weighting.kind != "uniform":
            weight = on_x0(weighting, alpha, sigma, data) * to_x0(target, alpha, sigma, data)[1] ** 2
        asked = answer(target, alpha, sigma, data)
        return np.stack(
            [times, alpha, sigma, input_scale(schedule, alpha, sigma), *asked, weight, np.log(alpha / sigma)]
        )


def answer(target: Target, alpha: Array, sigma: Array, data: float) -> tuple[Array, Array, Array]:
    """(c_x, c_noise, c_x0): from the noise where there is little of it, and from x0 where there is much."""
    none, one = np.zeros_like(alpha), np.ones_like(alpha)
    if target in ("x0", "eps"):
        return (none, one, none) if target == "eps" else (none, none, one)
    (k_x, k_out), (e_x, e_out) = to_x0(target, alpha, sigma, data), to_eps(target, alpha, sigma, data)
    little = alpha >= sigma
    c_x = -np.where(little, e_x / e_out, k_x / k_out)
    return c_x, np.where(little, 1.0 / e_out, 0.0), np.where(little, 0.0, 1.0 / k_out)


def split(schedule: Schedule, ratio: Array) -> tuple[Array, Array]:
    """Alpha and sigma of sigma / alpha, in the schedule's frame."""
    norm = {"vp": np.hypot(1.0, ratio), "ve": np.ones_like(ratio), "flow": 1.0 + ratio}[schedule.frame]
    return 1.0 / norm, ratio / norm


def input_scale(schedule: Schedule, alpha: Array, sigma: Array) -> Array:
    if isinstance(schedule, EDM):
        return 1.0 / np.hypot(sigma, schedule.sigma_data * alpha)
    return 1.0 / (alpha + sigma if schedule.frame == "flow" else np.hypot(alpha, sigma))


def to_x0(target: Target, a: Array, s: Array, data: float) -> tuple[Array, Array]:
    """(k_x, k_out) with x0 = k_x·x + k_out·out, as `core.target` has it."""
    norm, edm = np.hypot(a, s), np.hypot(s, data * a)
    return {
        "x0": (np.zeros_like(a), np.ones_like(a)),
        "eps": (1.0 / a, -s / a),
        "score": (1.0 / a, s * s / a),
        "v": (a / norm**2, -s / norm),
        "flow": (1.0 / (a + s), -s / (a + s)),
        "edm": (data**2 * a / edm**2, s * data / edm),
    }[target]


def to_eps(target: Target, a: Array, s: Array, data: float) -> tuple[Array, Array]:
    """(k_x, k_out) with eps = k_x·x + k_out·out."""
    norm, edm = np.hypot(a, s), np.hypot(s, data * a)
    return {
        "score": (np.zeros_like(a), -s),
        "v": (s / norm**2, a / norm),
        "flow": (1.0 / (a + s), a / (a + s)),
        "edm": (s / edm**2, -a * data / edm),
    }[target]


def on_x0(weighting: Weighting, alpha: Array, sigma: Array, data: float) -> Array:
    """The weights on the squared error of x0."""
    if weighting.kind == "min_snr":
        return np.minimum((alpha / sigma) ** 2, weighting.gamma)
    return np.asarray(weighting.on_x0(Level(alpha, sigma), data))  # type: ignore[arg-type]  # plain arithmetic
