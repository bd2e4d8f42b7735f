"""The loop: the only one. It runs a plan over a batch, or a batch in which each image runs its own plan."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from pellucid.core import target as targets
from pellucid.core.dialect_diffusers import discards_noise
from pellucid.core.errors import Cancelled, PellucidError, PellucidWarning, PlanError, rule
from pellucid.core.noise import NoiseSource, Philox, draw, seed_list
from pellucid.core.plan import DEPTH, Plan, Row, Weights
from pellucid.core.schedule import Level, Schedule, to_dict

_MOST_POWER = (
    10.0  # mean square of an image at a run's end; measured: 2.7² with plain guidance 30, 1.2 at most with 7.5
)


@dataclass(frozen=True)
class Batched:
    """Levels of several images at once in float64, shaped to broadcast against x; reads like a `Level`."""

    alpha: Tensor
    sigma: Tensor


@dataclass(frozen=True)
class Prediction:
    """x0, for the CFG++ family the unconditional x0 beside it, and by name the x0 that led to it, for observers."""

    x0: Tensor
    uncond: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)


# (x, level, told time) → x0 at that level. In a mixed batch level is `Batched` and time a tensor, one per image.
Denoiser = Callable[[Tensor, Any, Any], "Tensor | Prediction"]


class BoundDenoiser(Protocol):
    """A denoiser of one run, with something of its own for each image: inputs, scales, a memory."""

    def __call__(self, x: Tensor, level: Any, time: Any) -> Tensor | Prediction: ...

    def select(self, images: Sequence[int]) -> BoundDenoiser:
        """What is left of it when only these positions of the batch run on."""


@runtime_checkable
class BindsToRun(Protocol):
    """A denoiser that wants to know the plan of each image; every run gets an object of its own from it."""

    def bind(self, plans: Sequence[Plan]) -> BoundDenoiser: ...


@dataclass(frozen=True)
class StepSeen:
    """What an observer sees after each row. `images` are the batch positions that the tensors hold.

    `parts` are the predictions that led to x0, by name, as x0 (`cond`, `uncond`, …), computed when they are read.
    """

    index: int
    rows: tuple[Row, ...]
    x: Tensor
    x0: Tensor
    x_next: Tensor
    next_levels: tuple[Level, ...]
    images: tuple[int, ...]
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def row(self) -> Row:
        return self.rows[0]


Observer = Callable[[StepSeen], None]
Constraint = Callable[[StepSeen], Tensor]
Work = Literal["noise", "model", "update", "constrain", "observe"]  # what the loop is at
Mark = Callable[[Work], None]


@dataclass(frozen=True)
class RunSeen:
    """What a run begins with: one plan an image, their first x, and where their noise comes from."""

    plans: tuple[Plan, ...]
    x: Tensor
    noise: NoiseSource


@runtime_checkable
class _RunObserver(Protocol):
    """An observer that is also told of the run before its first row, and at each turn what the loop is at from now."""

    def __call__(self, seen: StepSeen) -> None: ...

    def begin_run(self, run: RunSeen) -> None: ...

    def mark(self, work: Work) -> None: ...


@dataclass
class State:
    """The registers of the images that are still running."""

    x: Tensor
    anchor: Tensor | None
    history: list[Tensor]


def mix(weights: Sequence[tuple[int, Any]], registers: Sequence[Tensor | None]) -> Tensor:
    """Σ weight·register, in register order, so that any two ways of calling it round alike."""
    out: Tensor | None = None
    for register, weight in weights:
        value = registers[register]
        assert value is not None
        if out is None:
            out = value * weight
        elif isinstance(weight, float):
            out.add_(value, alpha=weight)
        else:
            out.addcmul_(value, weight)
    if out is None:  # a row may leave nothing: diffusers' iPNDM in one step does
        assert registers[0] is not None
        return torch.zeros_like(registers[0])
    return out


def run(
    plan: Plan,
    denoiser: Denoiser,
    x: Tensor | None = None,
    *,
    shape: Sequence[int] | None = None,
    seeds: int | Sequence[int] = 0,
    noise: NoiseSource | None = None,
    observers: Sequence[Observer] = (),
    constraints: Sequence[Constraint] = (),
    cancelled: Callable[[], bool] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    gradients: bool = False,
) -> Tensor:
    """Runs a plan. Give `x` (already at the plan's first level), or `shape` of one image and seeds.

    One seed for a batch gives consecutive ones. A `noise` source with seeds of its own brings these instead.
    No gradients are kept unless `gradients` asks for them; a denoiser of a network needs its own `gradients` too.

    Returns x at the plan's end, in float32 or better whatever dtype the network works in. Warns where it is far larger
    than data are: a network may send x0 out of their range where there is much noise, and never find back.
    """
    if x is not None and (x.ndim < 1 or len(x) == 0):
        raise PellucidError(rule("x", "a batch of at least one image", tuple(x.shape)), "shape")
    check_fits(plan, getattr(denoiser, "schedule", None), getattr(denoiser, "target", None))
    if gradients and getattr(denoiser, "gradients", True) is False:
        raise PellucidError(
            "gradients must be asked of the denoiser too; got a denoiser without. "
            "Make it with pellucid.denoiser(…, gradients=True).",
            "gradients",
        )
    x, source = starting_point(x, plan.initial_scale, shape, seeds, noise, dtype, device)
    plans = [plan] * len(x)
    with torch.set_grad_enabled(gradients):
        return _in_range(plans, denoiser, loop(plans, denoiser, x, source, observers, constraints, cancelled))


def check_fits(plan: Plan, schedule: object, target: object, owner: str = "denoiser") -> None:
    """Refuses a plan for another schedule or target than its owner's, where the owner says what these are."""
    own = to_dict(schedule) if isinstance(schedule, Schedule) else plan.schedule
    if plan.schedule == own and (target is None or plan.target == target):
        return
    names = own.get("name", "?"), plan.schedule.get("name", "?")
    detail = ", with other settings of the schedule" if names[0] == names[1] and plan.target == target else ""
    raise PlanError(
        f"plan must be made for the {owner}'s schedule and target ({names[0]}, {target}); "
        f"got one for {names[1]}, {plan.target}{detail}.",
        "plan-model",
    )


def starting_point(
    x: Tensor | None,
    scale: float,
    shape: Sequence[int] | None,
    seeds: int | Sequence[int],
    noise: NoiseSource | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[Tensor, NoiseSource]:
    """x as given, or the first noise of a shape; float32 or better; and where the other noise comes from."""
    if x is not None and shape is not None:
        raise PellucidError("x and shape must not be given together; x has a shape of its own.", "shape")
    own = getattr(noise, "seeds", None)
    listed = seed_list(seeds if own is None else own, None if x is None else len(x))
    source = noise or Philox(listed)
    if x is None:
        if shape is None:
            raise PellucidError("x or shape must be given; got neither.", "shape")
        like = torch.empty(0, dtype=dtype or torch.float32, device=device)
        x = source.first(shape, like, range(len(listed))) * scale
    else:
        x = x.to(device=device, dtype=dtype)
    if not x.is_floating_point() or x.dtype in (torch.float16, torch.bfloat16):
        x = x.to(torch.float32)
    return x, source


@dataclass(frozen=True)
class Job:
    """One image of a mixed batch: its own plan, seed, and first x (noise of the plan's scale where None)."""

    plan: Plan
    seed: int = 0
    x: Tensor | None = None


def run_batch(
    jobs: Sequence[Job],
    denoiser: Denoiser,
    *,
    shape: Sequence[int] | None = None,
    observers: Sequence[Observer] = (),
    constraints: Sequence[Constraint] = (),
    cancelled: Callable[[], bool] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Runs images with different plans in one batch, each at its own row; equal to running each alone."""
    if not jobs:
        raise PellucidError(rule("jobs", "at least one", 0), "jobs")
    source = Philox([job.seed for job in jobs])
    like = torch.empty(0, dtype=dtype, device=device)
    starts = []
    for i, job in enumerate(jobs):
        if job.x is None and shape is None:
            raise PellucidError("x or shape must be given; got neither.", "shape")
        own = job.x if job.x is not None else source.first(shape or (), like, [i])[0] * job.plan.initial_scale
        starts.append(own)
    plans = [job.plan for job in jobs]
    for plan in plans:
        check_fits(plan, getattr(denoiser, "schedule", None), getattr(denoiser, "target", None))
    x = torch.stack(starts)
    with torch.no_grad():
        return _in_range(plans, denoiser, loop(plans, denoiser, x, source, observers, constraints, cancelled))


def _in_range(plans: Sequence[Plan], denoiser: Denoiser, x: Tensor) -> Tensor:
    """x at the end of a run; with a warning where a network that is not clipped made it far too large.

    The scale of an exact density is its own affair: only what says that it is `unclipped` is judged.
    """
    clean = [i for i, plan in enumerate(plans) if plan.end.ratio < 1]
    if not clean or not getattr(denoiser, "unclipped", False):
        return x
    power = float(x.detach()[clean].reshape(len(clean), -1).square().mean(1).max())
    if power > _MOST_POWER:
        warnings.warn(
            f"x0 left the range of the data: x ends with a root mean square of {math.sqrt(power):.3g}, where images in "
            "[-1, 1] have at most 1 and latents about 1. For data in [-1, 1] use "
            "pellucid.denoiser(..., x0_filter=pellucid.Clip(1.0)).",
            PellucidWarning,
            stacklevel=3,
        )
    return x


def loop(
    everyones: Sequence[Plan],
    denoiser: Denoiser,
    x: Tensor,
    source: NoiseSource,
    observers: Sequence[Observer],
    constraints: Sequence[Constraint],
    cancelled: Callable[[], bool] | None,
) -> Tensor:
    """For each row: add churn, ask for x0, remember it, combine the registers, show the step."""
    if x.ndim < 1 or len(everyones) != len(x) or len(x) == 0:
        raise PellucidError(rule("x", "a batch of at least one image", tuple(x.shape)), "shape")
    if not x.is_floating_point() or x.dtype in (torch.float16, torch.bfloat16):
        x = x.to(torch.float32)
    result = torch.empty_like(x)
    depth = max(plan.depth for plan in everyones)
    state = State(x, None, [])
    active = list(range(len(everyones)))
    bound = _bound_to(everyones, denoiser)
    mark = _announced(RunSeen(tuple(everyones), x, source), observers)
    discard = getattr(source, "discard", None)
    index = 0
    while active:
        if cancelled is not None and cancelled():
            raise Cancelled(f"stopped before row {index}")
        plans = [everyones[i] for i in active]
        one = all(plan is plans[0] for plan in plans)
        rows = (plans[0].rows[index],) if one else tuple(plan.rows[index] for plan in plans)
        state, found, called = advance(plans, rows, state, bound or denoiser, source, active, depth, mark)
        if discard is not None:
            unused = [i for i, plan in zip(active, plans, strict=True) if discards_noise(plan, plan.rows[index])]
            if unused:
                discard(state.x, unused)
        if observers or constraints:
            mark("constrain" if constraints else "observe")
            levels = tuple(level_after(plan, index) for plan in (plans[:1] if one else plans))
            seen = StepSeen(index, rows, called, found.x0, state.x, levels, tuple(active), found.parts)
            for constrain in constraints:
                state.x = constrain(seen)
                seen = replace(seen, x_next=state.x)
            if constraints:
                mark("observe")
            for observe in observers:
                observe(seen)
            mark("update")
        index += 1
        done = [k for k, plan in enumerate(plans) if len(plan.rows) == index]
        if done:
            for k in done:
                result[active[k]] = state.x[k]
            keep = [k for k in range(len(active)) if k not in set(done)]
            active = [active[k] for k in keep]
            state = _select(state, keep)
            bound = bound.select(keep) if bound is not None and active else bound
    return result


def _unmarked(work: Work) -> None:
    """Nobody wants to know."""


def _announced(begun: RunSeen, observers: Sequence[Observer]) -> Mark:
    """Shows the beginning of a run to the observers that want it; and what tells them what the loop is at."""
    watching = [observe for observe in observers if isinstance(observe, _RunObserver)]
    for observe in watching:
        observe.begin_run(begun)
    if len(watching) < 2:
        return watching[0].mark if watching else _unmarked

    def mark(work: Work) -> None:
        for observe in watching:
            observe.mark(work)

    return mark


def _bound_to(plans: Sequence[Plan], denoiser: object) -> BoundDenoiser | None:
    return denoiser.bind(plans) if isinstance(denoiser, BindsToRun) else None


def _select(state: State, keep: Sequence[int]) -> State:
    if len(keep) == len(state.x):
        return state
    chosen = torch.tensor(list(keep), dtype=torch.int64, device=state.x.device)
    anchor = None if state.anchor is None else state.anchor[chosen]
    return State(state.x[chosen], anchor, [p[chosen] for p in state.history])


def level_after(plan: Plan, index: int) -> Level:
    """The level that x has after a row: that of the next call before its churn, or the plan's end."""
    if index + 1 == len(plan.rows):
        return plan.end
    following = plan.rows[index + 1]
    variance = following.level.sigma**2 - following.pre_noise**2
    return Level(following.level.alpha, math.sqrt(max(variance, 0.0)))


def advance(
    plans: Sequence[Plan],
    rows: tuple[Row, ...],
    state: State,
    denoiser: Denoiser,
    source: NoiseSource,
    active: Sequence[int],
    depth: int,
    mark: Mark = _unmarked,
) -> tuple[State, Prediction, Tensor]:
    """One row of every running image. One shared row works with numbers, a mixed one with a number an image."""
    x = state.x
    single = len(rows) == 1 and (len(plans) == 1 or plans[0] is plans[-1])
    if any(r.pre_noise for r in rows):
        mark("noise")
        x = x + _noise_of(rows, True, x, source, active, single) * column([r.pre_noise for r in rows], x, single)
    mark("model")
    if single:
        found = denoiser(x, rows[0].level, rows[0].time)
    else:
        alphas, sigmas = [r.level.alpha for r in rows], [r.level.sigma for r in rows]
        levels = Batched(column(alphas, x, False, torch.float64), column(sigmas, x, False, torch.float64))
        found = denoiser(x, levels, torch.tensor([r.time for r in rows], dtype=torch.float64, device=x.device))
    mark("update")
    made = found if isinstance(found, Prediction) else Prediction(found)
    x0, uncond = made.x0, made.uncond
    if x0.shape != x.shape:
        raise PellucidError(rule("x0", f"of the shape of x, {tuple(x.shape)}", tuple(x0.shape)), "shape")
    x0 = x0.to(x.dtype)
    bases = [targets.from_x0(p.basis, r.level) for p, r in zip(plans, rows, strict=False)]
    p0 = _basis_of(bases, x, x0, single)
    z = None
    if any(r.draws for r in rows):
        mark("noise")
        z = _noise_of(rows, False, x, source, active, single)
        mark("update")
    zero = torch.zeros_like(x) if not single else None
    anchor = state.anchor if state.anchor is not None else zero
    past = [*state.history, *([zero] * (DEPTH - 1 - len(state.history)))]
    other = (x0 if uncond is None else uncond.to(x.dtype)) if any(p.guided for p in plans) else None
    registers = [x, anchor, p0, *past, other if other is not None else zero, z if z is not None else zero]
    x_next = mix(_stack([r.x for r in rows], x, single), registers)
    new_anchor = state.anchor
    if any(r.anchor is not None for r in rows):
        kept: list[Weights] = [r.anchor if r.anchor is not None else ((1, 1.0),) for r in rows]
        new_anchor = mix(_stack(kept, x, single), registers)
    history = _remember(rows, state.history, p0, depth, single)
    return State(x_next, new_anchor, history), Prediction(x0, uncond, made.parts), x


def _remember(rows: tuple[Row, ...], history: list[Tensor], p0: Tensor, depth: int, single: bool) -> list[Tensor]:
    """The history after a call; held predictions do not enter it."""
    if single:
        return history if rows[0].held else [p0, *history][:depth]
    held = torch.tensor([r.held for r in rows], device=p0.device).reshape(-1, *([1] * (p0.ndim - 1)))
    longer = [*history, torch.zeros_like(p0)]
    pushed = [p0, *longer]
    if not any(r.held for r in rows):
        return pushed[:depth]
    return [torch.where(held, old, new) for old, new in zip([*longer, longer[-1]], pushed, strict=False)][:depth]


def column(values: Sequence[float], like: Tensor, single: bool, dtype: torch.dtype | None = None) -> Any:
    """A number, or one number an image shaped to broadcast."""
    if single:
        return values[0]
    return torch.tensor(values, dtype=dtype or like.dtype, device=like.device).reshape(-1, *([1] * (like.ndim - 1)))


def _basis_of(bases: Sequence[tuple[float, float]], x: Tensor, x0: Tensor, single: bool) -> Tensor:
    if all(b == (0.0, 1.0) for b in bases):
        return x0
    c_x, c_0 = column([b[0] for b in bases], x, single), column([b[1] for b in bases], x, single)
    return x * c_x + x0 * c_0


def _stack(weights: Sequence[Weights], like: Tensor, single: bool) -> Sequence[tuple[int, Any]]:
    """The weights of one row, or of a row an image: the registers that anybody uses, zeros for the others."""
    if single:
        return weights[0]
    used = sorted({register for row_weights in weights for register, _ in row_weights})
    tables = [dict(row_weights) for row_weights in weights]
    return [(register, column([t.get(register, 0.0) for t in tables], like, False)) for register in used]


def _noise_of(
    rows: tuple[Row, ...], pre: bool, x: Tensor, source: NoiseSource, active: Sequence[int], single: bool
) -> Tensor:
    """Fresh noise for each running image; images whose row draws none get zeros."""
    if single:
        return draw(source, rows[0], pre, x, active).to(x.dtype)
    out = torch.zeros_like(x)
    for k, r in enumerate(rows):
        if r.pre_draws if pre else r.draws:
            out[k] = draw(source, r, pre, x[k : k + 1], [active[k]])[0].to(x.dtype)
    return out
