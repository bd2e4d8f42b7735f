"""Dialects: the same sampler, laid out and rounded as a peer does it.

The default, `exact`, keeps fractional times, starts at the level's own sigma and ends at sigma 0. A dialect
reproduces a peer's rounding, first noise, last step and known defects, so that a table can be compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pellucid.core import grid as grids
from pellucid.core.dialect_diffusers import as_diffusers
from pellucid.core.dialect_diffusers import start_late as diffusers_late
from pellucid.core.errors import PellucidError, PlanError, nearest, rule
from pellucid.core.grid import Grid, Path, Setup
from pellucid.core.samplers.registry import Sampler
from pellucid.core.schedule import Array, DiscreteVP, Frame, Schedule, Target

_DIALECTS = ("exact", "diffusers", "k-diffusion", "comfyui")
_ALIASES = {"kdiffusion": "k-diffusion", "k_diffusion": "k-diffusion", "comfy": "comfyui", "hf": "diffusers"}


def named(name: str) -> str:
    key = _ALIASES.get(name, name)
    if key not in _DIALECTS:
        raise PlanError(rule("dialect", "a known name", name, nearest(name, _DIALECTS)), "unknown-dialect")
    return key


def set_up(
    dialect: str, sampler: Sampler, schedule: Schedule, grid: Grid, steps: int | None, target: Target,
    options: dict[str, Any],
) -> Setup:  # fmt: skip
    """The path and the first noise of a sampler in a dialect."""
    if dialect == "diffusers":
        return as_diffusers(sampler, schedule, grid, steps, target, options)
    if dialect == "k-diffusion":
        return _as_k_diffusion(sampler, schedule, grid, steps)
    if dialect == "comfyui":
        return _as_comfyui(sampler, schedule, grid, steps)
    path = on_frame(sampler, schedule, lambda frame: grids.make_path(schedule, grid, steps, frame))
    return Setup(path, path.legs[0].start.sigma)


def start_late(dialect: str, sampler: Sampler, setup: Setup, skip: int) -> Setup:
    """The same from a later leg on."""
    if setup.late is not None:
        return setup.late(skip)
    if dialect == "diffusers":
        return diffusers_late(sampler, setup, skip)
    return replace(setup, path=replace(setup.path, legs=setup.path.legs[skip:]))


def on_frame(sampler: Sampler, schedule: Schedule, make: Callable[[Frame], Path]) -> Path:
    """The frame that the state lives in: the schedule's own, or ve for samplers made for straight lines."""
    if schedule.frame == "flow" or sampler.frame == "native":
        return make(schedule.frame)
    try:
        return make("ve")
    except PellucidError as error:
        if error.code != "alpha-zero" or sampler.straight:
            raise
        return make("vp")


# --- k-diffusion and ComfyUI -----------------------------------------------------------------------------------

K_DIFFUSION = (
    "euler", "euler_a", "heun", "edm_stochastic", "dpm2", "dpm2_a", "lms", "dpm_fast", "dpmpp_2s_a", "dpmpp_sde",
    "dpmpp_2m", "dpmpp_2m_sde", "dpmpp_3m_sde",
)  # fmt: skip


def _as_k_diffusion(sampler: Sampler, schedule: Schedule, grid: Grid, steps: int | None) -> Setup:
    """Sigmas as k-diffusion lays them, x = x0 + sigma·eps throughout, first noise sigma_max."""
    if sampler.name not in K_DIFFUSION:
        raise PlanError(
            rule("sampler", "one that k-diffusion has", sampler.name, nearest(sampler.name, K_DIFFUSION)),
            "dialect",
        )
    frame: Frame = "flow" if schedule.frame == "flow" else "ve"
    path = grids.make_path(schedule, grid, steps, frame)
    return Setup(path, path.legs[0].start.sigma, _half_curvature(sampler))


def _half_curvature(sampler: Sampler) -> dict[str, Any]:
    """Third order in k-diffusion and after it takes half of the second derivative (`sample_dpmpp_3m_sde`, d2)."""
    return {"curvature_scale": 0.5} if "curvature_scale" in sampler.options() else {}


def _as_comfyui(sampler: Sampler, schedule: Schedule, grid: Grid, steps: int | None) -> Setup:
    """Sigmas as ComfyUI lays them; the nearest whole training time is passed to the network."""
    if not isinstance(schedule, DiscreteVP):
        frame: Frame = schedule.frame
        path = grids.make_path(schedule, grid, steps, frame)
        return Setup(path, path.legs[0].start.sigma, _half_curvature(sampler))

    def time_at(ratio: float) -> float:
        return float(np.argmin(np.abs(np.log(schedule.ratios) - math.log(max(ratio, 1e-300)))))

    if grid.name == "explicit":
        exact = grids.make_path(schedule, grid, steps, "ve")
        starts = np.array([leg.start.ratio for leg in exact.legs])
        ends = np.array([leg.end.ratio for leg in exact.legs])
    else:
        starts = _comfy_ratios(schedule, grid, grids.check_steps(steps))
        ends = np.append(starts[1:], 0.0)
    path = grids.build(schedule, "ve", [time_at(r) for r in starts], starts, ends, time_at)
    return Setup(path, math.hypot(1.0, starts[0]), _half_curvature(sampler))


def _comfy_ratios(schedule: DiscreteVP, grid: Grid, count: int) -> Array:
    table, last = schedule.ratios, schedule.num_train - 1
    if grid.name == "simple":
        return table[[last - int(i * len(table) / count) for i in range(count)]]
    if grid.name == "beta":
        quantiles = grids.beta_quantile(1.0 - np.linspace(0, 1, count, endpoint=False), 0.6, 0.6)
        times = list(dict.fromkeys(np.rint(quantiles * last).astype(int).tolist()))
        return table[times]
    if grid.name == "leading":
        stride = max(len(table) // count, 1)
        return table[list(range(1, len(table), stride))[::-1]]
    return grids.points(schedule, grid, count)[0]
