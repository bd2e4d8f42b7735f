"""A table with knobs through the one loop: x at its end, with gradients back to the knobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from pellucid.core.loop import BindsToRun, Denoiser, Prediction, State, advance
from pellucid.core.noise import Philox
from pellucid.core.plan import Plan, Row
from pellucid.core.schedule import Level
from pellucid.evidence.tune.table import Soft, SoftLevel, Table, Values

KEEP_BYTES = 2 * 2**30  # of activations in a CPU's memory; above, they are computed a second time
SILENT = Philox(0)  # a deterministic plan draws nothing


@dataclass(frozen=True)
class SoftPlan:
    """As much of a plan as a row of the loop asks for."""

    basis: Any
    guided: bool = False


def travel(table: Table, values: Values, denoiser: Denoiser, noise: Tensor, recompute: bool) -> Tensor:
    """x at the end of a table, from unit noise (B, …)."""
    bound = denoiser.bind([plan_now(table, values)] * len(noise)) if isinstance(denoiser, BindsToRun) else denoiser
    call = again(bound) if recompute else plainly(bound)
    state = State(noise * values.sigmas[0].to(noise), None, [])
    active, plan = range(len(noise)), SoftPlan(table.plan.basis)
    for i in range(table.steps):
        row = row_at(values, i, noise)
        state, _, _ = advance([plan], (row,), state, call, SILENT, active, 3)  # type: ignore[list-item]
    return state.x


def row_at(values: Values, i: int, like: Tensor) -> Any:
    """One row of tensors, on x's device."""
    x, anchor = values.weights[i]
    level = SoftLevel(values.alphas[i].to(like.device), values.sigmas[i].to(like.device), values.ratios[i])
    told = values.told[i].to(like.device).expand(len(like))
    soft = None if anchor is None else soften(anchor, like)
    return Row(level, told, soften(x, like), soft)  # type: ignore[arg-type]


def soften(weights: Soft, like: Tensor) -> Any:
    """Weights in x's precision, on its device."""
    return tuple((r, w.to(like)) for r, w in weights)


def plan_now(table: Table, values: Values) -> Plan:
    """The table's levels as a plan, for guidance that asks where a run stands."""
    calls = zip(values.alphas.tolist(), values.sigmas.tolist(), values.told.tolist(), strict=False)
    return replace(table.plan, rows=tuple(Row(Level(alpha, sigma), told, ()) for alpha, sigma, told in calls))


def plainly(bound: Any) -> Callable[[Tensor, Any, Any], Tensor]:
    def call(x: Tensor, level: Any, time: Any) -> Tensor:
        return x0_of(bound(x, level, time))

    return call


def again(bound: Any) -> Callable[[Tensor, Any, Any], Tensor]:
    """The same denoiser, whose activations are computed a second time on the way back instead of kept."""

    def call(x: Tensor, level: Any, time: Any) -> Tensor:
        past = getattr(bound, "past", None)

        def inner(x: Tensor, alpha: Tensor, sigma: Tensor, told: Tensor) -> Tensor:
            if hasattr(bound, "past"):
                bound.past = past  # what guidance remembered before this call, also the second time
            return x0_of(bound(x, SoftLevel(alpha, sigma, level.ratio), told))

        return checkpoint(inner, x, level.alpha, level.sigma, time, use_reentrant=False, preserve_rng_state=False)

    return call


def x0_of(found: Any) -> Tensor:
    return found.x0 if isinstance(found, Prediction) else found


def too_heavy(table: Table, denoiser: Denoiser, noise: Tensor) -> bool:
    """Whether the activations of all rows are too much to keep for the way back: those of one call, times the rows."""
    seen: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        held = tensor.untyped_storage()
        seen[held.data_ptr()] = held.nbytes()
        return tensor

    values = table.values(table.zeros())
    bound = denoiser.bind([plan_now(table, values)] * len(noise)) if isinstance(denoiser, BindsToRun) else denoiser
    row = row_at(values, table.steps - 1, noise)
    with saved_tensors_hooks(count, lambda tensor: tensor):
        plainly(bound)(noise.detach().requires_grad_(), row.level, row.time)
    return table.steps * sum(seen.values()) > room(noise.device)


def room(device: torch.device) -> int:
    """Bytes of activations that may be kept: on a GPU half of what is free."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else KEEP_BYTES
