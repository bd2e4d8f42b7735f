"""Plans as tables of numbers on a device: one line for each row, made once from float64, gathered by a cursor.

A line holds all that a step multiplies with. The plan fills the level, the time, the basis and the weights over the
registers (`plan_lines`); the denoiser fills what x is multiplied by before the network (`in_scale`) and how the output
becomes x0 = k_x·x + k_out·output; guidance fills its `scale`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.core import target as targets
from pellucid.core.plan import REGISTERS, Plan, Weights
from pellucid.core.schedule import Array

_NAMES = ("alpha", "sigma", "time", "in_scale", "k_x", "k_out", "b_x", "b_0", "pre_noise", "held", "scale")
COLUMNS = {
    name: column
    for column, name in enumerate((*_NAMES, *(f"x.{r}" for r in REGISTERS), *(f"anchor.{r}" for r in REGISTERS)))
}
X_WEIGHTS, ANCHOR_WEIGHTS = COLUMNS["x.x"], COLUMNS["anchor.x"]  # where the weights over the registers begin
_ANCHOR = REGISTERS.index("anchor")


def plan_lines(plan: Plan) -> Array:
    """(rows, columns) in float64: what the plan knows of each row; the columns of others are 0, the scale is 1."""
    lines = np.zeros((len(plan.rows), len(COLUMNS)))
    lines[:, COLUMNS["scale"]] = 1.0
    for line, row in zip(lines, plan.rows, strict=True):
        basis = targets.from_x0(plan.basis, row.level)
        line[:3] = row.level.alpha, row.level.sigma, row.time
        line[COLUMNS["b_x"] : COLUMNS["held"] + 1] = *basis, row.pre_noise, float(row.held)
        for register, weight in row.x:
            line[X_WEIGHTS + register] = weight
        for register, weight in ((_ANCHOR, 1.0),) if row.anchor is None else row.anchor:
            line[ANCHOR_WEIGHTS + register] = weight
    return lines


@dataclass(frozen=True)
class Use:
    """What the rows of one step do, known to the host: which registers count, so that no others are computed."""

    x: tuple[int, ...]
    anchor: tuple[int, ...] | None  # None: no row changes its anchor
    basis: bool  # whether a prediction enters the history as something else than x0
    held: bool  # whether a row keeps its prediction out of the history
    churn: bool
    draws: bool

    @staticmethod
    def of(plan: Plan, index: int) -> Use:
        """What one row of a plan does."""
        row = plan.rows[index]
        anchor = None if row.anchor is None else tuple(r for r, _ in row.anchor)
        plain = targets.from_x0(plan.basis, row.level) == (0.0, 1.0)
        return Use(tuple(r for r, _ in row.x), anchor, not plain, row.held, bool(row.pre_noise), bool(row.draws))

    @staticmethod
    def union(each: Sequence[Use]) -> Use:
        """What several rows do together."""
        if all(use is each[0] for use in each):
            return each[0]
        kept = [use.anchor if use.anchor is not None else (_ANCHOR,) for use in each]
        changed = any(use.anchor is not None for use in each)
        return Use(
            tuple(sorted({register for use in each for register in use.x})),
            tuple(sorted({register for anchor in kept for register in anchor})) if changed else None,
            *(any(getattr(use, name) for use in each) for name in ("basis", "held", "churn", "draws")),
        )


class Table:
    """The lines of several plans on a device, in x's precision; plans are found by identity."""

    def __init__(self, plans: Sequence[Plan], like: Tensor) -> None:
        distinct = list({id(plan): plan for plan in plans}.values())
        offsets = np.cumsum([0, *(len(plan.rows) for plan in distinct)])
        self.first = {id(plan): int(offset) for plan, offset in zip(distinct, offsets, strict=False)}
        lines = torch.from_numpy(np.concatenate([plan_lines(plan) for plan in distinct]))
        self.lines = lines.to(device=like.device, dtype=like.dtype)
        self.uses = [Use.of(plan, index) for plan in distinct for index in range(len(plan.rows))]
        self.plans = distinct  # held, so that no other plan gets the identity of one that is gone

    def places(self, plans: Sequence[Plan], index: int) -> list[int]:
        """Where the lines of a row of each plan are."""
        return [self.first[id(plan)] + index for plan in plans]

    def gather(self, places: Sequence[int]) -> Tensor:
        """(images, columns), or (1, columns) where all images are at one row of one plan."""
        if all(place == places[0] for place in places):
            return self.lines[places[0] : places[0] + 1]
        return self.lines[torch.tensor(places, device=self.lines.device)]


def columns_of(values: Tensor, like: Tensor) -> Tensor:
    """(columns, images or 1, 1, …): each column shaped to broadcast against x."""
    return values.T.reshape(values.shape[1], len(values), *([1] * (like.ndim - 1)))


def column(values: Sequence[float], like: Tensor, single: bool, dtype: torch.dtype | None = None) -> Any:
    """A number, or one number per image shaped to broadcast against x."""
    if single:
        return values[0]
    return torch.tensor(values, dtype=dtype or like.dtype, device=like.device).reshape(-1, *([1] * (like.ndim - 1)))


@lru_cache(4096)
def _scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight as a tensor, which rounds as the cells of a table do; made once for all steps that have it."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device=device)


def mix(weights: Weights, registers: Sequence[Tensor | None]) -> Tensor:
    """Σ weight·register for one row, in register order: what a step of a batch does, for who steps by hand."""
    out: Tensor | None = None
    for register, weight in weights:
        value = registers[register]
        assert value is not None
        factor = _scalar(weight, value.dtype, value.device)
        out = value * factor if out is None else torch.addcmul(out, value, factor)
    if out is None:  # a row may leave nothing: diffusers' iPNDM in one step does
        assert registers[0] is not None
        return torch.zeros_like(registers[0])
    return out
