"""A diffusers scheduler config, understood → the plan of its sampler: for the three-call API and for pipelines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError, rule
from pellucid.core.grid import Grid
from pellucid.core.plan import Plan
from pellucid.core.samplers import resolve
from pellucid.core.schedule import Flow, Schedule
from pellucid.interop.diffusers_config import SchedulerSettings

BLIND_START = {"plms": 1, "pndm": 9}  # rows that the start of a run adds to one per leg
# the classes that take their noise from torchsde, not from a generator
_BROWNIAN = {"DPMSolverSDEScheduler": "dpmpp_sde", "CosineDPMSolverMultistepScheduler": "dpm_multistep"}
_SIGMA_RULES = ("karras", "exponential", "beta", "lu")


def compile_reading(
    reading: SchedulerSettings,
    steps: int | None,
    *,
    dialect: str = "diffusers",
    timesteps: Sequence[float] | None = None,
    sigmas: Sequence[float] | None = None,
    mu: float | None = None,
    skip: int = 0,
    overrides: dict[str, Any] | None = None,
    **cuts: Any,
) -> Plan:
    """The plan that a config asks for; `mu` is the shift that flow pipelines take from the image size.

    `overrides` are options of the sampler that a call sets (`eta`).
    """
    lay, curve = _explicit(reading.grid, steps, timesteps, sigmas), reading.schedule
    if reading.values.get("use_dynamic_shifting"):
        curve = shifted(reading, dialect, mu)
    elif mu is not None and not isinstance(curve, Flow):  # flow pipelines pass it whether it is wanted or not
        raise PellucidError(rule("mu", "left out without use_dynamic_shifting", mu), "mu")
    options = dict(reading.options)
    if reading.x0_filter is not None and reading.sampler in ("ddim", "ddim_inversion") and dialect == "diffusers":
        options["keep_eps"] = True
    if skip and reading.sampler in BLIND_START and dialect != "diffusers":
        options["warm"] = False
    options |= overrides or {}
    return compile_plan(
        reading.sampler,
        schedule=curve,
        target=reading.target,
        grid=lay,
        steps=steps,
        dialect=dialect,
        skip=skip,
        **cuts,
        **options,
    )


def distilled_times(
    reading: SchedulerSettings,
    steps: int | None,
    timesteps: Sequence[float] | None,
    original: int | None,
    strength: float = 1.0,
) -> Sequence[float]:
    """Times out of the part of the distillation's times that `strength` leaves (Luo et al. 2023, alg. 3)."""
    if resolve(reading.sampler)[0].family != "distilled":
        name = "original_inference_steps" if original is not None else "strength"
        raise PellucidError(rule(name, f"left out for {reading.sampler}", original or strength), "distilled")
    count = reading.grid.original if original is None else original
    total = reading.schedule.num_train or 1000
    if timesteps is not None:
        keep = min(int(len(timesteps) * strength), len(timesteps))
        return timesteps[len(timesteps) - keep :]
    if reading.sampler == "tcd" and original is not None:
        count = total  # TCD then takes any training time
    known = [float(i * (total // count) - 1) for i in range(int(count * strength), 0, -1)]
    if steps is None or not 1 <= steps <= len(known):
        raise PellucidError(rule("steps", f"from 1 to {len(known)}, the times that are left", steps), "steps")
    return [known[int(i)] for i in np.floor(np.linspace(0, len(known), steps, endpoint=False))]


def pipeline_options(reading: SchedulerSettings, passes_eta: bool) -> dict[str, Any]:
    """What diffusers' text pipelines pass to `step`: eta 0, also to TCD, whose own default is 0.3."""
    return {"eta": 0.0} if passes_eta and reading.sampler == "tcd" else {}


def noise_notes(plan: Plan, class_name: str) -> tuple[str, ...]:
    """Says where the image that diffusers makes from a seed is not ours; the class is that of the model's scheduler."""
    name = "DPMSolverSDEScheduler" if plan.name == "dpmpp_sde" else class_name
    if plan.dialect != "diffusers" or _BROWNIAN.get(name) != plan.name:
        return ()
    return (
        f"{name} takes its noise from torchsde's Brownian tree in diffusers: the distribution is the same here, "
        "the image of a seed is not",
    )


def _explicit(lay: Grid, steps: int | None, timesteps: Sequence[float] | None, sigmas: Sequence[float] | None) -> Grid:
    if timesteps is None and sigmas is None:
        if steps is None and lay.name != "explicit":
            raise PellucidError("num_inference_steps, timesteps or sigmas must be given; got none.", "steps")
        return lay
    if timesteps is not None and sigmas is not None:
        raise PellucidError("timesteps, sigmas must be given one at a time; got both.", "explicit")
    if lay.name in _SIGMA_RULES and timesteps is not None:
        raise PellucidError(rule("timesteps", f"left out with the {lay.name} grid", "timesteps"), "explicit")
    return replace(
        lay,
        timesteps=None if timesteps is None else tuple(float(t) for t in timesteps),
        sigmas=None if sigmas is None else tuple(float(s) for s in sigmas),
    )


def shifted(reading: SchedulerSettings, dialect: str, mu: float | None) -> Schedule:
    """The flow schedule bent by a shift that depends on the image; without flow sigmas there is nothing to bend."""
    curve = reading.schedule
    if not isinstance(curve, Flow):
        return curve
    if mu is None:
        raise PellucidError(
            "mu must be given with use_dynamic_shifting; got nothing. Pipelines pass it from the image size.", "mu"
        )
    shift = math.exp(mu) if reading.values["time_shift_type"] == "exponential" else float(mu)
    bent = replace(curve, shift=shift)
    if dialect != "diffusers" or resolve(reading.sampler)[0].peer != "flow":
        return bent
    # the dialect shifts sigma_min twice, as diffusers does, except with a dynamic shift, where diffusers does it once
    return replace(bent, sigma_min=curve.sigma_min / (shift - (shift - 1.0) * curve.sigma_min))
