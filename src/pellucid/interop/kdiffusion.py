"""For k-diffusion users: the same call, the same model convention, any of our samplers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count, pairwise
from typing import Any

from torch import Tensor

from pellucid.core.batch import BatchLevel, StepSeen, level_after
from pellucid.core.compile import compile_plan
from pellucid.core.dialect import K_DIFFUSION
from pellucid.core.errors import PellucidError, rule
from pellucid.core.grid import Grid
from pellucid.core.loop import run
from pellucid.core.noise import NoiseSource
from pellucid.core.plan import Plan, Row
from pellucid.core.samplers import resolve
from pellucid.core.schedule import EDM


def sample(
    name: str,
    model: Callable[..., Tensor],
    x: Tensor,
    sigmas: Sequence[float] | Tensor,
    extra_args: Mapping[str, Any] | None = None,
    callback: Callable[[dict[str, Any]], None] | None = None,
    *,
    seeds: int | Sequence[int] = 0,
    noise: NoiseSource | None = None,
    **options: Any,
) -> Tensor:
    """Runs a sampler on a k-diffusion style model: model(x, sigma, **extra_args) returns the denoised x.

    `sigmas` decrease, and the last one, usually 0, is where the run ends. `callback` gets a dict with x, i, sigma,
    sigma_hat and denoised, once a step: the first call of each.
    """
    listed = [float(s) for s in (sigmas.tolist() if isinstance(sigmas, Tensor) else sigmas)]
    if len(listed) < 2 or not all(a > b for a, b in pairwise(listed)) or not 0 <= listed[-1] < listed[0] < math.inf:
        raise PellucidError(rule("sigmas", "at least 2 numbers, decreasing and not negative", listed[:8]), "explicit")
    dialect = "k-diffusion" if resolve(name)[0].name in K_DIFFUSION else "exact"
    plan = compile_plan(name, target="x0", dialect=dialect, **_through(listed), **options)
    extra = dict(extra_args or {})
    shown = count()

    def denoise(state: Tensor, level: Any, time: Any) -> Tensor:
        sigma = level.sigma.reshape(-1).to(state) if isinstance(level, BatchLevel) else level.sigma
        return model(state, sigma if isinstance(sigma, Tensor) else state.new_full((len(state),), sigma), **extra)

    def show(seen: StepSeen) -> None:
        row = seen.row
        if callback is None or _inner(plan, row):
            return
        sigma = listed[0] if seen.index == 0 else level_after(plan, seen.index - 1).sigma
        callback({"x": seen.x, "i": next(shown), "sigma": sigma, "sigma_hat": row.level.sigma, "denoised": seen.x0})

    return run(plan, denoise, x, seeds=seeds, noise=noise, observers=[show] if callback else [])


def _through(sigmas: list[float]) -> dict[str, Any]:
    """The schedule and the grid that call the model at every sigma but the last, and end there."""
    if sigmas[-1] > 0:
        schedule = EDM(sigma_min=sigmas[-1], sigma_max=sigmas[0] * (1 + 1e-12), c_noise="sigma")
        return {"schedule": schedule, "grid": Grid(sigmas=tuple(sigmas[:-1]), final="sigma_min")}
    schedule = EDM(sigma_min=sigmas[-2] * (1 - 1e-12), sigma_max=sigmas[0] * (1 + 1e-12), c_noise="sigma")
    return {"schedule": schedule, "grid": Grid(sigmas=tuple(sigmas))}


def _inner(plan: Plan, row: Row) -> bool:
    """A later call of a step: it goes back to where the step began. One-call samplers have none."""
    return resolve(plan.name)[0].calls > 1 and row.uses("anchor") and row.anchor is None
