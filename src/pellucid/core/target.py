"""Prediction targets: what a network's output means, and the only place that converts one into another.

Every target is linear in (x, x0) at a level, so a conversion is two numbers. They hold in any frame: `v` is the
velocity of x scaled to alpha² + sigma² = 1, `flow` that of x scaled to alpha + sigma = 1, `edm` the raw output F
under EDM preconditioning, and `score` that of x as it is.
"""

from __future__ import annotations

import math
from typing import Any, get_args

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.core.schedule import Level, Target

SIGMA_DATA = 0.5
TARGETS: tuple[Target, ...] = get_args(Target)

ALIASES: dict[str, Target] = {
    "epsilon": "eps",
    "noise": "eps",
    "sample": "x0",
    "original_sample": "x0",
    "denoised": "x0",
    "v_prediction": "v",
    "velocity": "v",
    "flow_prediction": "flow",
    "F": "edm",
}


def length(a: Any, b: Any) -> Any:
    """√(a² + b²) of two numbers, or of two tensors: tuning sends gradients through levels."""
    return math.hypot(a, b) if isinstance(a, int | float) else a.hypot(b)


def root(square: Any) -> Any:
    """√ of a number, or of a tensor."""
    return math.sqrt(square) if isinstance(square, int | float) else square.sqrt()


def named(name: str) -> Target:
    """The target that a name or a diffusers `prediction_type` means."""
    if name in TARGETS:
        return name
    if name in ALIASES:
        return ALIASES[name]
    raise PellucidError(
        rule("target", "one of " + ", ".join(TARGETS), name, nearest(name, [*TARGETS, *ALIASES])),
        "unknown-target",
    )


def to_x0(target: Target, level: Level, sigma_data: float = SIGMA_DATA) -> tuple[float, float]:
    """(k_x, k_out) with x0 = k_x·x + k_out·out."""
    a, s = level.alpha, level.sigma
    if target == "x0":
        return 0.0, 1.0
    if target == "v":
        norm = length(a, s)
        return a / norm / norm, -s / norm
    if target == "flow":
        return 1.0 / (a + s), -s / (a + s)
    if target == "edm":
        square = s * s + (sigma_data * a) ** 2
        return sigma_data**2 * a / square, s * sigma_data / root(square)
    if a == 0.0:
        raise PellucidError(
            f"target must not be {target} at alpha 0: pure noise determines no x0 from {target}. "
            "Train for v or x0 under zero terminal SNR, or start below the last level.",
            code="alpha-zero",
        )
    return (1.0 / a, -s / a) if target == "eps" else (1.0 / a, s * s / a)


def from_x0(target: Target, level: Level, sigma_data: float = SIGMA_DATA) -> tuple[float, float]:
    """(c_x, c_0) with out = c_x·x + c_0·x0."""
    k_x, k_out = to_x0(target, level, sigma_data) if (target, level.alpha) != ("eps", 0.0) else (0.0, 0.0)
    if target == "eps" and level.alpha == 0.0:
        return 1.0 / level.sigma, 0.0  # x is sigma·eps, whatever x0 is
    if k_out == 0.0:
        raise PellucidError(
            f"target must not be {target} at sigma 0: a clean x determines no {target}. "
            "Stop at x0, or take the level just before.",
            code="sigma-zero",
        )
    return -k_x / k_out, 1.0 / k_out


def convert(source: Target, to: Target, level: Level, sigma_data: float = SIGMA_DATA) -> tuple[float, float]:
    """(k_x, k_out) with `to` = k_x·x + k_out·out, taken in the limit at the two ends where the limit exists.

    The way goes through eps at low noise and through x0 at high noise: each is finite at its end.
    """
    if source == to:
        return 0.0, 1.0
    if to == "x0":
        return to_x0(source, level, sigma_data)
    if source == "x0":
        return from_x0(to, level, sigma_data)
    if "eps" in (source, to) or "score" in (source, to) or level.alpha >= level.sigma:
        return _chain(_to_eps(source, level, sigma_data), from_eps(to, level, sigma_data))
    return _chain(to_x0(source, level, sigma_data), from_x0(to, level, sigma_data))


def _chain(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """middle = first·(x, out), then result = second·(x, middle)."""
    return second[0] + second[1] * first[0], second[1] * first[1]


def _to_eps(target: Target, level: Level, sigma_data: float) -> tuple[float, float]:
    """(k_x, k_out) with eps = k_x·x + k_out·out; finite at sigma 0, where x0 = x / alpha says nothing about eps."""
    a, s = level.alpha, level.sigma
    if target == "v":
        norm = length(a, s)
        return s / norm / norm, a / norm
    if target == "flow":
        return 1.0 / (a + s), a / (a + s)
    if target == "edm":
        square = s * s + (sigma_data * a) ** 2
        return s / square, -a * sigma_data / root(square)
    return (0.0, -s) if target == "score" else (0.0, 1.0)


def from_eps(target: Target, level: Level, sigma_data: float) -> tuple[float, float]:
    """(c_x, c_eps) with out = c_x·x + c_eps·eps."""
    if target == "score" and level.sigma == 0.0:
        raise PellucidError(
            "target must not be score at sigma 0: it is −eps / sigma there. Take eps.", code="sigma-zero"
        )
    k_x, k_out = _to_eps(target, level, sigma_data)
    if k_out == 0.0:
        raise PellucidError(
            f"{target} cannot be made from eps at alpha 0: pure noise says nothing about x0, nor about {target}.",
            code="alpha-zero",
        )
    return -k_x / k_out, 1.0 / k_out


def change(out: Any, source: Target, to: Target, x: Any, level: Level, sigma_data: float = SIGMA_DATA) -> Any:
    """Converts a prediction made on x at a level from one target to another."""
    k_x, k_out = convert(source, to, level, sigma_data)
    return out * k_out if k_x == 0.0 else x * k_x + out * k_out
