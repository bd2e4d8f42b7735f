"""For k-diffusion users: the same call, the same model convention, any of our samplers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError, rule
from pellucid.core.grid import Grid
from pellucid.core.loop import Batched, StepSeen, run
from pellucid.core.noise import NoiseSource
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

    `sigmas` decrease and usually end in 0. `callback` gets a dict with x, i, sigma, sigma_hat and denoised.
    """
    listed = [float(s) for s in (sigmas.tolist() if isinstance(sigmas, Tensor) else sigmas)]
    if len(listed) < 2:
        raise PellucidError(rule("sigmas", "at least 2 numbers", listed), "explicit")
    positive = [s for s in listed if s > 0]
    schedule = EDM(sigma_min=min(positive) * (1 - 1e-12), sigma_max=max(positive) * (1 + 1e-12), c_noise="sigma")
    plan = compile_plan(name, schedule=schedule, target="x0", grid=Grid(sigmas=tuple(listed)), **options)
    extra = dict(extra_args or {})

    def denoise(state: Tensor, level: Any, time: Any) -> Tensor:
        sigma = level.sigma.reshape(-1) if isinstance(level, Batched) else torch.full((len(state),), level.sigma)
        return model(state, sigma.to(state), **extra)

    def show(seen: StepSeen) -> None:
        if callback is not None:
            row = seen.row
            sigma = (row.level.sigma**2 - row.pre_noise**2) ** 0.5
            callback(
                {
                    "x": seen.x,
                    "i": seen.index,
                    "sigma": sigma,
                    "sigma_hat": row.level.sigma,
                    "denoised": seen.x0,
                }
            )

    return run(plan, denoise, x, seeds=seeds, noise=noise, observers=[show] if callback else [])
