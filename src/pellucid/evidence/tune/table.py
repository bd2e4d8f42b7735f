"""A table with knobs: levels, shares and told times that gradients reach, and the plan that they make.

The knobs are dimensionless and 0 at the start: `gaps` stretch the steps in λ by a factor exp(knob), the first of them
moves the first call; `shares` are added to those of the start's own formula at the levels as they are now; `told` moves
the told times in units of their distance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from pellucid.core.compile import drop_dead_anchors
from pellucid.core.errors import PellucidError, rule
from pellucid.core.plan import Plan, Row, Weights, seal
from pellucid.core.schedule import Array, Frame, Level, Schedule
from pellucid.evidence.tune import shares as law
from pellucid.evidence.tune.shares import PAST, WIDTH
from pellucid.evidence.tune.start import Start

What = Literal["grid", "weights", "told", "both", "all"]
WHAT: tuple[What, ...] = get_args(What)
KNOBS: dict[What, tuple[str, ...]] = {
    "grid": ("gaps",),
    "weights": ("shares",),
    "told": ("told",),
    "both": ("gaps", "shares"),
    "all": ("gaps", "shares", "told"),
}
Knobs = Mapping[str, Tensor]
Soft = tuple[tuple[int, Tensor], ...]  # register, weight
LAMBDA_STEP, TIME_STEP = 1e-5, 1e-6  # of central differences, in λ


@dataclass(frozen=True)
class SoftLevel:
    """A level that gradients flow through; `ratio` is a number, for what only asks where a run stands."""

    alpha: Tensor
    sigma: Tensor
    ratio: float


@dataclass(frozen=True)
class Values:
    """The numbers of a table, in float64: levels (N + 1), told times (N), weights."""

    alphas: Tensor
    sigmas: Tensor
    told: Tensor
    weights: list[tuple[Soft, Soft | None]]  # of x and of the anchor, a row
    ratios: list[float]


@dataclass(frozen=True)
class Table:
    """What of a start stays while its knobs turn."""

    start: Start
    schedule: Schedule
    plan: Plan
    lams: Array  # (N,) of the start's calls; the first may be −∞
    writes: tuple[bool, ...]  # which rows leave an anchor
    anchors: tuple[int | None, ...]  # whose anchor a row finds
    lift: bool
    free: Tensor  # (N, 2, 4): the shares that change something
    pitch: Array  # (N,) distance of the told times
    least: float  # the smallest finite λ where a call may be
    most: float  # the largest one

    @staticmethod
    def of(start: Start, schedule: Schedule, target: str, steps: int) -> Table:
        plan = start.plan(schedule, target, steps)
        start.check()
        ratios = [r.level.ratio for r in plan.rows]
        draft = start.draft(schedule, ratios)
        if plan.nfe != steps or len(draft.rows) != steps or plan.end.sigma != 0.0 or plan.declared:
            raise PellucidError(rule("--start", f"a sampler of {steps} calls that ends clean", start.text), "start")
        lift = all(r.anchor is None for r in draft.rows)
        anchors = tuple(law.anchor_index(draft.rows, i, lift) for i in range(steps))
        writes = tuple(i + 1 < steps and (lift or r.anchor is not None) for i, r in enumerate(draft.rows))
        times, lams = np.array([r.time for r in plan.rows]), np.array([r.level.lam for r in plan.rows])
        return Table(
            start, schedule, plan, lams, writes, anchors, lift,
            free_shares(anchors, writes, plan.basis, steps), pitch_of(times),
            *reach(schedule, lams),
        )  # fmt: skip

    @property
    def steps(self) -> int:
        return len(self.writes)

    def zeros(self) -> dict[str, Tensor]:
        """The knobs of the start."""
        counts = {
            "gaps": self.steps - int(math.isinf(self.lams[0])),
            "shares": int(self.free.sum()),
            "told": self.steps,
        }
        return {name: torch.zeros(count, dtype=torch.float64) for name, count in counts.items()}

    # --- levels -----------------------------------------------------------------------------------------------------

    def lams_at(self, gaps: Tensor) -> Tensor:
        """λ of all calls: increasing whatever the knobs, and inside of the schedule.

        The first knob moves the first call, by itself; pure noise, which has no λ, stays, and the second call moves so.
        """
        lams = torch.from_numpy(np.array(self.lams))
        blind = int(math.isinf(float(self.lams[0])))
        base = torch.clamp(lams[blind] + gaps[0], self.least, self.most)
        walked = torch.cumsum((lams[blind + 1 :] - lams[blind:-1]) * torch.exp(gaps[1:]), 0)
        if len(walked) and float((base + walked[-1]).detach()) > self.most:
            walked = walked * ((self.most - base) / walked[-1])
        return torch.cat([lams[:blind], base[None], base + walked])

    def settle(self, knobs: Knobs) -> None:
        """Brings the knob of the first call back to where it acts."""
        first = float(self.lams[1 if math.isinf(float(self.lams[0])) else 0])
        knobs["gaps"].data[0].clamp_(self.least - first, self.most - first)

    def values(self, knobs: Knobs) -> Values:
        """The table at some knobs, in float64; gradients reach the knobs."""
        lams = self.lams_at(knobs["gaps"])
        ratios = [math.exp(-v) for v in lams.tolist()]
        alphas, sigmas = split_levels(lams, self.plan.frame)
        alphas = torch.cat([alphas, lone(self.plan.end.alpha)])
        sigmas = torch.cat([sigmas, lone(self.plan.end.sigma)])
        own = Followed.apply(lams, self)
        added = torch.zeros(self.free.shape, dtype=torch.float64).masked_scatter(self.free, knobs["shares"])
        told = Told.apply(lams, self.schedule) + knobs["told"] * torch.from_numpy(self.pitch)
        weights = self.weights(own + added, alphas, sigmas)
        return Values(alphas, sigmas, told.clamp(*self.schedule.span), weights, ratios)

    def shares_at(self, lams: Array) -> Array:
        """(N, 2, 4): the shares of the start's own formula with calls at these λ."""
        rows = self.start.draft(self.schedule, np.exp(-lams)).rows
        ends = [law.pair_of(r) for r in rows[1:]] + [(self.plan.end.alpha, self.plan.end.sigma)]
        return np.array(law.shares_of(self.plan.basis, rows, ends, self.lift))

    def weights(self, shares: Tensor, alphas: Tensor, sigmas: Tensor) -> list[tuple[Soft, Soft | None]]:
        """Of every row, those of the registers that are filled by then."""
        levels = list(zip(alphas.unbind(), sigmas.unbind(), strict=True))
        found: list[tuple[Soft, Soft | None]] = []
        for i, (own, kept) in enumerate(shares.unbind()):
            here, j = levels[i], self.anchors[i]
            back = None if j is None else levels[j]
            filled = [0, *([1] if j is not None else []), *range(2, 3 + min(i, PAST))]
            x = law.to_weights(self.plan.basis, own.unbind(), here, back, levels[i + 1], here)
            anchor: Soft | None = None
            if self.writes[i]:
                anchor = ((0, torch.ones((), dtype=torch.float64)),)
                if back is not None:
                    made = law.to_weights(self.plan.basis, kept.unbind(), here, back, here, back)
                    anchor = tuple((r, made[r]) for r in filled)
            found.append((tuple((r, x[r]) for r in filled), anchor))
        return found

    # --- as a plan --------------------------------------------------------------------------------------------------

    def plan_at(self, knobs: Knobs, name: str | None = None) -> Plan:
        """The table at some knobs as a plan, proven."""
        with torch.no_grad():
            values = self.values(knobs)
        alphas, sigmas, told = (v.tolist() for v in (values.alphas, values.sigmas, values.told))
        rows = tuple(
            Row(Level(alphas[i], sigmas[i]), told[i], hard(x), None if anchor is None else hard(anchor))
            for i, (x, anchor) in enumerate(values.weights)
        )
        made = replace(
            self.plan,
            name=name or self.plan.name,
            rows=drop_dead_anchors(rows),
            start=rows[0].level,
            initial_scale=rows[0].level.sigma,
            grid={**grid_of(self.schedule, values.ratios), "steps": self.steps},
        )
        return seal(made)


def reach(schedule: Schedule, lams: Array) -> tuple[float, float]:
    """Between which λ calls may lie: those of the schedule, or of the start where it goes beyond."""
    most, least = (-math.log(float(r)) if 0 < r < math.inf else -math.inf for r in schedule.ratio_at(schedule.span))
    finite = lams[np.isfinite(lams)]
    return min(least, float(finite[0])), max(most, float(finite[-1]))


def free_shares(anchors: tuple[int | None, ...], writes: tuple[bool, ...], basis: str, steps: int) -> Tensor:
    """Which shares change something: those of registers that are filled by then."""
    free = torch.zeros(steps, 2, WIDTH, dtype=torch.bool)
    for i in range(steps):
        past = min(i, PAST)
        ends_clean = i + 1 == steps and basis == "x0"  # x0 alone is left of a clean x
        free[i, 0, 0] = anchors[i] is not None and not ends_clean
        free[i, 0, 1 : 1 + past] = True
        if writes[i] and anchors[i] is not None:
            free[i, 1, : 1 + past] = True
    return free


def pitch_of(times: Array) -> Array:
    """How far the told times of a plan are apart, around each."""
    if len(times) == 1:
        return np.ones(1)
    gaps = np.abs(np.diff(times))
    return np.minimum(np.append(gaps, gaps[-1]), np.insert(gaps, 0, gaps[0]))


def split_levels(lams: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
    """alpha and sigma of λ = log(alpha / sigma) in a frame."""
    if frame == "ve":
        return torch.ones_like(lams), torch.exp(-lams)
    if frame == "flow":
        return torch.sigmoid(lams), torch.sigmoid(-lams)
    return torch.sigmoid(2 * lams).sqrt(), torch.sigmoid(-2 * lams).sqrt()


def lone(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def hard(weights: Soft) -> Weights:
    """Weights as numbers, without zeros."""
    return tuple((r, float(w)) for r, w in weights if float(w) != 0.0)


def grid_of(schedule: Schedule, ratios: list[float]) -> dict[str, Any]:
    """The calls of a table as an explicit grid."""
    if math.isinf(ratios[0]) and schedule.frame != "flow":
        return {"name": "explicit", "timesteps": [float(t) for t in schedule.time_at(np.array(ratios))]}
    return {"name": "explicit", "sigmas": [float(s) for s in schedule.sigma_of(np.array([*ratios, 0.0]))]}


class Followed(torch.autograd.Function):
    """λ (N,) → the start's own shares (N, 2, 4). Its derivative is a central difference of the start's formula."""

    @staticmethod
    def forward(ctx: Any, lams: Tensor, table: Table) -> Tensor:
        ctx.at, ctx.table = lams.detach().numpy().copy(), table
        return torch.from_numpy(table.shares_at(ctx.at))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad, out = grads[0].numpy(), np.zeros_like(ctx.at)
        for j in np.flatnonzero(np.isfinite(ctx.at)):
            step = np.zeros_like(out)
            step[j] = LAMBDA_STEP
            apart = ctx.table.shares_at(ctx.at + step) - ctx.table.shares_at(ctx.at - step)
            out[j] = float((apart * grad).sum()) / (2 * LAMBDA_STEP)
        return torch.from_numpy(out), None


class Told(torch.autograd.Function):
    """λ → the schedule's time. Its derivative is a central difference."""

    @staticmethod
    def forward(ctx: Any, lams: Tensor, schedule: Schedule) -> Tensor:
        at = lams.detach().numpy()
        slope = schedule.time_at(np.exp(-at - TIME_STEP)) - schedule.time_at(np.exp(-at + TIME_STEP))
        slope = np.where(np.isfinite(at), slope, 0.0)
        ctx.slope = torch.from_numpy(slope / (2 * TIME_STEP))
        return torch.from_numpy(np.array(schedule.time_at(np.exp(-at))))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.slope, None
