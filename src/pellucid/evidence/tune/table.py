"""A plan with knobs that gradients reach: levels, weights and times. Whatever the knobs, it keeps the marginal law.

The knobs are dimensionless and 0 at the start: `gaps` stretch the steps in λ by a factor exp(knob), the first of them
moves the first call; `shares` are added to those of the start's own formula at the levels as they are now; `told` moves
the times that the network is passed, in units of their distance.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from pellucid.core import grid as grids
from pellucid.core.compile import compile_plan, drop_dead_anchors
from pellucid.core.dialect import on_frame
from pellucid.core.errors import PellucidError, rule
from pellucid.core.plan import Plan, Row, Weights, seal
from pellucid.core.samplers import Sampler, resolve
from pellucid.core.samplers.registry import Draft
from pellucid.core.schedule import Array, Frame, Level, Schedule, Target

# --- shares -------------------------------------------------------------------------------------------------------
#
# Shares are the weights of a row without the two numbers that the marginal law fixes. With a perfect denoiser of one
# point every register is a pair, (how much of the point, how much of the first noise). That of a prediction is the same
# at every level: (1, 0) for x0, (0, 1) for eps, (−1, 1) for the flow. `_across` is the coordinate of a pair in which
# predictions are 0, `_along` the one in which they are 1. A row lands where it should when both coordinates do:
#
# - across: x and the anchor together bring all of it; `mix` is the part that x brings;
# - along: the predictions together bring what x and the anchor leave; `c1…c3` are the parts of p1…p3, in units of the
#   row's first-order step, and p0 brings the rest.
#
# So any shares keep the law. See docs/decisions/0017-tuning-keeps-the-law.md.

_PAST = 3  # earlier predictions that a row may use
_WIDTH = 1 + _PAST  # mix, c1, c2, c3
_ROUNDING = 1e-13
_BASES = ("x0", "eps", "flow")
_Pair = tuple[Any, Any]  # (alpha, sigma), numbers or tensors


def _across(basis: Target, pair: _Pair) -> Any:
    """The coordinate of a pair in which predictions are 0."""
    alpha, sigma = pair
    return {"x0": sigma, "eps": alpha, "flow": alpha + sigma}[basis]


def _along(basis: Target, pair: _Pair) -> Any:
    """The coordinate of a pair in which predictions are 1."""
    alpha, sigma = pair
    return {"x0": alpha, "eps": sigma, "flow": (sigma - alpha) / 2}[basis]


def _first_step(basis: Target, start: _Pair, end: _Pair) -> Any:
    """The weight of the one prediction in a first-order step: the unit of the shares."""
    return _along(basis, end) - _along(basis, start) * (_across(basis, end) / _across(basis, start))


def _to_weights(
    basis: Target, shares: Sequence[Any], x: _Pair, anchor: _Pair | None, end: _Pair, back: _Pair
) -> list[Any]:
    """Weights of x, anchor, p0…p3 that land on `end`; `back` is where the first-order step of the unit begins."""
    mix, *rest = shares
    f_end = _across(basis, end)
    w_x = f_end / _across(basis, x) * (mix if anchor is not None else 1.0)
    w_anchor = f_end / _across(basis, anchor) * (1.0 - mix) if anchor is not None else 0.0
    left = _along(basis, end) - w_x * _along(basis, x)
    if anchor is not None:
        left = left - w_anchor * _along(basis, anchor)
    unit = _first_step(basis, back, end)
    past = [unit * share for share in rest]
    return [w_x, w_anchor, left - sum(past), *past]


def _from_weights(
    basis: Target, weights: Weights, x: _Pair, anchor: _Pair | None, end: _Pair, back: _Pair
) -> list[float]:
    """The shares of a row's weights; refuses a row that does not land on `end`."""
    held = dict(weights)
    f_end = _across(basis, end)
    mix = held.get(0, 0.0) * _across(basis, x) / f_end if f_end and anchor is not None else 1.0
    unit = _first_step(basis, back, end)
    shares = [_snapped(share) for share in (mix, *(held.get(2 + k, 0.0) / unit for k in range(1, _WIDTH)))]
    again = _to_weights(basis, shares, x, anchor, end, back)
    size = max(map(abs, held.values()), default=1.0)
    if any(abs(w - held.get(r, 0.0)) > 1e-9 * size for r, w in enumerate(again)) or max(held, default=0) > 5:
        raise PellucidError(rule("start", "a sampler whose rows all land on their level", "another"), "start")
    return shares


def _snapped(share: float) -> float:
    """0 or 1 for a share that only rounding keeps from it: an unused register stays unused."""
    near = round(share)
    return float(near) if near in (0, 1) and abs(share - near) < _ROUNDING else share


def _shares_of(basis: Target, rows: Sequence[Row], ends: Sequence[_Pair], lift: bool) -> list[list[list[float]]]:
    """Shares (N, 2, 4) of a start's rows: of x, and of the anchor; zeros where a row keeps its anchor.

    With `lift` the rows have no anchor of their own, and every row leaves x as it was called: what a corrector needs.
    """
    found = []
    for i, row in enumerate(rows):
        j = _anchor_index(rows, i, lift)
        here, back = _pair_of(row), None if j is None else _pair_of(rows[j])
        own = _from_weights(basis, row.x, here, back, ends[i], here)
        kept = [1.0, 0.0, 0.0, 0.0]
        if row.anchor is not None:
            kept = _from_weights(basis, row.anchor, here, back, here, back or here) if back else kept
        found.append([own, kept])
    return found


def _pair_of(row: Row) -> _Pair:
    return row.level.alpha, row.level.sigma


def _anchor_index(rows: Sequence[Row], i: int, lift: bool) -> int | None:
    """The row that wrote the anchor last when row i is called; the anchor is at its level."""
    if lift:
        return i - 1 if i else None
    return next((j for j in range(i - 1, -1, -1) if rows[j].anchor is not None), None)


# --- starts -----------------------------------------------------------------------------------------------------------

_ORDERED = re.compile(r"(?P<name>.+)-(?P<order>\d)")
FEWEST_STEPS, MOST_STEPS = 2, 100  # steps of a plan that is tuned


@dataclass(frozen=True)
class Start:
    """A sampler with its options, and a grid: what tuning begins with, or is compared with."""

    sampler: str
    grid: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    @staticmethod
    def parse(text: str) -> Start:
        """`unipc-3:kl_optimal`: a sampler, its order where it has one, and a grid."""
        name, sign, grid = text.partition(":")
        if not sign or not name or not grid:
            raise PellucidError(rule("--start", "SAMPLER:GRID, such as unipc-3:karras", text), "start")
        options: dict[str, Any] = {}
        if (ordered := _ORDERED.fullmatch(name)) and "order" in resolve(ordered["name"])[0].options():
            name, options = ordered["name"], {"order": int(ordered["order"])}
        start = Start(resolve(name)[0].name, grids.named(grid).name, options)
        start.check()
        return start

    @property
    def entry(self) -> Sampler:
        return resolve(self.sampler)[0]

    @property
    def text(self) -> str:
        """`unipc-3:karras`, as `parse` reads it, and further options."""
        order = f"-{self.options['order']}" if "order" in self.options else ""
        more = [f"{key}={value}" for key, value in self.options.items() if key != "order"]
        return ":".join([f"{self.sampler}{order}", self.grid, *more])

    def check(self) -> None:
        """Refuses what draws noise, and what spends more than one call on a step."""
        entry = self.entry
        if not entry.deterministic:
            advice = "Tuning compares images of one seed: use unipc-3, dpmpp_2m or deis."
            raise PellucidError(rule("--start", "a deterministic sampler", self.sampler, advice), "start-stochastic")
        if not tunable(entry):
            advice = "Use unipc-3, dpmpp_2m or deis."
            raise PellucidError(rule("--start", "a sampler with one call per step", self.sampler, advice), "start")

    def plan(self, schedule: Schedule, target: str, steps: int) -> Plan:
        return compile_plan(self.sampler, schedule=schedule, target=target, grid=self.grid, steps=steps, **self.options)

    def draft(self, schedule: Schedule, ratios: Sequence[float] | Array) -> Draft:
        """The sampler's own rows when it calls at these sigma / alpha, and ends clean."""
        times = schedule.time_at(np.asarray(ratios))
        ends = [*ratios[1:], 0.0]
        path = on_frame(self.entry, schedule, lambda frame: grids.build(schedule, frame, times, ratios, ends))
        return self.entry.draft(path, dict(self.options))


def tunable(entry: Sampler) -> bool:
    """Whether a sampler's rows can be tuned: one deterministic call a leg, over registers that the law pins."""
    if not entry.deterministic or entry.family in ("inversion", "distilled") or entry.calls != 1:
        return False
    try:
        plan = compile_plan(entry.name, schedule="linear", grid="exponential", steps=6)
    except PellucidError:
        return False
    return plan.nfe == 6 and not plan.guided and not plan.declared and plan.basis in _BASES and plan.end.sigma == 0.0


# --- the table --------------------------------------------------------------------------------------------------------

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
_LAMBDA_STEP, TIME_STEP = 1e-5, 1e-6  # of central differences, in λ


@dataclass(frozen=True)
class SoftLevel:
    """A level that gradients flow through; `ratio` is a number, for what only asks where a run stands."""

    alpha: Tensor
    sigma: Tensor
    ratio: float


@dataclass(frozen=True)
class TableValues:
    """The numbers of a table, in float64: levels (N + 1), times that the network is passed (N), weights."""

    alphas: Tensor
    sigmas: Tensor
    times: Tensor
    weights: list[tuple[Soft, Soft | None]]  # of x and of the anchor, by row
    ratios: list[float]


@dataclass(frozen=True)
class Table:
    """A start with its knobs: what stays while they are tuned."""

    start: Start
    schedule: Schedule
    plan: Plan
    lams: Array  # (N,) of the start's calls; the first may be −∞
    writes: tuple[bool, ...]  # which rows leave an anchor
    anchors: tuple[int | None, ...]  # the row that wrote the anchor of each
    lift: bool
    free: Tensor  # (N, 2, 4): the shares that change something
    pitch: Array  # (N,) distance of the times
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
        anchors = tuple(_anchor_index(draft.rows, i, lift) for i in range(steps))
        writes = tuple(i + 1 < steps and (lift or r.anchor is not None) for i, r in enumerate(draft.rows))
        times, lams = np.array([r.time for r in plan.rows]), np.array([r.level.lam for r in plan.rows])
        return Table(
            start, schedule, plan, lams, writes, anchors, lift,
            _free_shares(anchors, writes, plan.basis, steps), _pitch_of(times),
            *_reach(schedule, lams),
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
        """λ of all calls: increasing whatever the knobs, and within the schedule.

        The first knob moves the first call; of a start from pure noise, which has no λ, it moves the second.
        """
        lams = torch.from_numpy(np.array(self.lams))
        blind = int(math.isinf(float(self.lams[0])))
        base = torch.clamp(lams[blind] + gaps[0], self.least, self.most)
        walked = torch.cumsum((lams[blind + 1 :] - lams[blind:-1]) * torch.exp(gaps[1:]), 0)
        if len(walked) and float((base + walked[-1]).detach()) > self.most:
            walked = walked * ((self.most - base) / walked[-1])
        return torch.cat([lams[:blind], base[None], base + walked])

    def settle(self, knobs: Knobs) -> None:
        """Clamps the knob of the first call to where it acts."""
        first = float(self.lams[1 if math.isinf(float(self.lams[0])) else 0])
        knobs["gaps"].data[0].clamp_(self.least - first, self.most - first)

    def values(self, knobs: Knobs) -> TableValues:
        """The table at some knobs, in float64; gradients reach the knobs."""
        lams = self.lams_at(knobs["gaps"])
        ratios = [math.exp(-v) for v in lams.tolist()]
        alphas, sigmas = split_levels(lams, self.plan.frame)
        end = torch.tensor([self.plan.end.alpha, self.plan.end.sigma], dtype=torch.float64)
        alphas, sigmas = torch.cat([alphas, end[:1]]), torch.cat([sigmas, end[1:]])
        own = _StartShares.apply(lams, self)
        added = torch.zeros(self.free.shape, dtype=torch.float64).masked_scatter(self.free, knobs["shares"])
        times = _ScheduleTime.apply(lams, self.schedule) + knobs["told"] * torch.from_numpy(self.pitch)
        weights = self.weights(own + added, alphas, sigmas)
        return TableValues(alphas, sigmas, times.clamp(*self.schedule.span), weights, ratios)

    def shares_at(self, lams: Array) -> Array:
        """(N, 2, 4): the shares of the start's own formula with calls at these λ."""
        rows = self.start.draft(self.schedule, np.exp(-lams)).rows
        ends = [_pair_of(r) for r in rows[1:]] + [(self.plan.end.alpha, self.plan.end.sigma)]
        return np.array(_shares_of(self.plan.basis, rows, ends, self.lift))

    def weights(self, shares: Tensor, alphas: Tensor, sigmas: Tensor) -> list[tuple[Soft, Soft | None]]:
        """Of every row, the weights of the registers that are filled by then."""
        levels = list(zip(alphas.unbind(), sigmas.unbind(), strict=True))
        found: list[tuple[Soft, Soft | None]] = []
        for i, (own, kept) in enumerate(shares.unbind()):
            here, j = levels[i], self.anchors[i]
            back = None if j is None else levels[j]
            filled = [0, *([1] if j is not None else []), *range(2, 3 + min(i, _PAST))]
            x = _to_weights(self.plan.basis, own.unbind(), here, back, levels[i + 1], here)
            anchor: Soft | None = None
            if self.writes[i]:
                anchor = ((0, torch.ones((), dtype=torch.float64)),)
                if back is not None:
                    back_weights = _to_weights(self.plan.basis, kept.unbind(), here, back, here, back)
                    anchor = tuple((r, back_weights[r]) for r in filled)
            found.append((tuple((r, x[r]) for r in filled), anchor))
        return found

    # --- as a plan --------------------------------------------------------------------------------------------------

    def plan_at(self, knobs: Knobs, name: str | None = None) -> Plan:
        """The table at some knobs as a plan, whose law is checked."""
        with torch.no_grad():
            values = self.values(knobs)
        alphas, sigmas, times = (v.tolist() for v in (values.alphas, values.sigmas, values.times))
        rows = tuple(
            Row(Level(alphas[i], sigmas[i]), times[i], _hard(x), None if anchor is None else _hard(anchor))
            for i, (x, anchor) in enumerate(values.weights)
        )
        plan = replace(
            self.plan,
            name=name or self.plan.name,
            rows=drop_dead_anchors(rows),
            start=rows[0].level,
            initial_scale=rows[0].level.sigma,
            grid={**_grid_of(self.schedule, values.ratios), "steps": self.steps},
        )
        return seal(plan)


def _reach(schedule: Schedule, lams: Array) -> tuple[float, float]:
    """Between which λ calls may lie: those of the schedule, or of the start where it goes beyond."""
    most, least = (-math.log(float(r)) if 0 < r < math.inf else -math.inf for r in schedule.ratio_at(schedule.span))
    finite = lams[np.isfinite(lams)]
    return min(least, float(finite[0])), max(most, float(finite[-1]))


def _free_shares(anchors: tuple[int | None, ...], writes: tuple[bool, ...], basis: str, steps: int) -> Tensor:
    """Which shares change something: those of registers that are filled by then."""
    free = torch.zeros(steps, 2, _WIDTH, dtype=torch.bool)
    for i in range(steps):
        past = min(i, _PAST)
        ends_clean = i + 1 == steps and basis == "x0"  # x0 alone is left of a clean x
        free[i, 0, 0] = anchors[i] is not None and not ends_clean
        free[i, 0, 1 : 1 + past] = True
        if writes[i] and anchors[i] is not None:
            free[i, 1, : 1 + past] = True
    return free


def _pitch_of(times: Array) -> Array:
    """How far the times of a plan are apart, around each."""
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


def _hard(weights: Soft) -> Weights:
    """Weights as numbers, without zeros."""
    return tuple((r, float(w)) for r, w in weights if float(w) != 0.0)


def _grid_of(schedule: Schedule, ratios: list[float]) -> dict[str, Any]:
    """The calls of a table as an explicit grid."""
    if math.isinf(ratios[0]) and schedule.frame != "flow":
        return {"name": "explicit", "timesteps": [float(t) for t in schedule.time_at(np.array(ratios))]}
    return {"name": "explicit", "sigmas": [float(s) for s in schedule.sigma_of(np.array([*ratios, 0.0]))]}


class _StartShares(torch.autograd.Function):
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
            step[j] = _LAMBDA_STEP
            apart = ctx.table.shares_at(ctx.at + step) - ctx.table.shares_at(ctx.at - step)
            out[j] = float((apart * grad).sum()) / (2 * _LAMBDA_STEP)
        return torch.from_numpy(out), None


class _ScheduleTime(torch.autograd.Function):
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
