"""Gradient descent over a table's knobs, through the one loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from pellucid.core.errors import PellucidError, rule
from pellucid.core.loop import BindsToRun, Denoiser, Prediction, State, advance
from pellucid.core.noise import Philox
from pellucid.core.plan import Plan, Row
from pellucid.core.schedule import Level
from pellucid.evidence.tune.model import TuningModel
from pellucid.evidence.tune.table import KNOBS, WHAT, Soft, SoftLevel, Table, Values, What
from pellucid.evidence.tune.teacher import Truth, distance, errors

# --- A table through the loop ---------------------------------------------------------------------------------------

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
    call = recomputed(bound) if recompute else plainly(bound)
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


def recomputed(bound: Any) -> Callable[[Tensor, Any, Any], Tensor]:
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


# --- The descent ----------------------------------------------------------------------------------------------------

BETAS = (0.9, 0.99)
LEAST_RATE = 0.02  # of the first rate, at the end
ROUND = 1e-12  # under the root of an error that is 0
CLIP = 10.0  # times the usual length of the gradient: pairs between two basins have any


@dataclass(frozen=True)
class Descent:
    """How the knobs are turned. `batch` pairs make one step, at most `at_once` of them at a time."""

    what: What = "all"
    iterations: int = 400
    rate: float = 0.05
    batch: int = 64
    at_once: int = 64
    every: int = 10  # steps between two looks at the watched pairs
    patience: int = 20  # looks without a better one before it stops; the rate must have time to fall
    seed: int = 0

    def __post_init__(self) -> None:
        if self.what not in WHAT:
            raise PellucidError(rule("--what", "one of " + ", ".join(WHAT), self.what), "what")
        for name, most in (("iterations", 100_000), ("batch", 100_000), ("at_once", 100_000)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise PellucidError(rule(name, f"a whole number from 1 to {most:,}", value), "tune")
        if not (math.isfinite(self.rate) and 0 < self.rate <= 1):
            raise PellucidError(rule("rate", "above 0 and at most 1", self.rate), "tune")


@dataclass(frozen=True)
class TuningData:
    """A model, the pairs that its table is tuned on, and those that are watched."""

    subject: TuningModel
    tune: Truth
    watch: Truth


@dataclass
class Fit:
    """A table on its way: the knobs now, the best so far, and what was watched."""

    table: Table
    knobs: dict[str, Tensor]
    best: dict[str, Tensor]
    best_error: float  # the mean over the watched pairs
    best_root: float  # the mean of the roots
    start_error: float
    looks: list[tuple[int, float]] = field(default_factory=list)  # (iteration, watched error)
    iterations: int = 0

    @property
    def plan(self) -> Plan:
        return self.table.plan_at(self.best)

    @staticmethod
    def of(table: Table, lesson: TuningData, at_once: int) -> Fit:
        knobs = table.zeros()
        found = errors(table.plan, lesson.subject, lesson.watch, at_once)
        error, root = float(found.mean()), float(found.sqrt().mean())
        return Fit(table, knobs, copied(knobs), error, root, error, [(0, error)])


def descend(fit: Fit, lesson: TuningData, how: Descent, done: Callable[[], object] = lambda: None) -> Fit:
    """Turns the knobs, from where the best was, until nothing improves or for so many iterations."""
    fit.knobs = copied(fit.best)
    turned = [fit.knobs[name].requires_grad_() for name in KNOBS[how.what]]
    optimiser = torch.optim.Adam(turned, lr=how.rate, betas=BETAS)
    order = Batches(len(lesson.tune), how.batch, how.seed)
    recompute = is_heavy(fit.table, lesson, how)
    usual: list[float] = []
    stale = 0
    for i in range(how.iterations):
        for group in optimiser.param_groups:
            group["lr"] = how.rate * falling(i / how.iterations)
        optimiser.zero_grad()
        backward(fit, lesson, next(order), how.at_once, recompute)
        if tame(turned, usual):
            optimiser.step()
            fit.table.settle(fit.knobs)
        fit.iterations += 1
        done()
        if (i + 1) % how.every == 0 or i + 1 == how.iterations:
            stale = 0 if look(fit, lesson, how.at_once) else stale + 1
            if stale >= how.patience:
                break
    fit.knobs = copied(fit.knobs)
    return fit


def is_heavy(table: Table, lesson: TuningData, how: Descent) -> bool:
    few = lesson.tune.pairs.first(min(how.at_once, how.batch, lesson.subject.most))
    return too_heavy(table, lesson.subject.denoiser(few), lesson.subject.noise(few))


def backward(fit: Fit, lesson: TuningData, chosen: list[int], at_once: int, recompute: bool = False) -> float:
    """The gradient of the mean of √error over some pairs, a part of them at a time. See 0017 for why the root."""
    subject, total = lesson.subject, 0.0
    size = min(at_once, subject.most)
    for start in range(0, len(chosen), size):
        part = chosen[start : start + size]
        pairs = lesson.tune.pairs.pick(part)
        values = fit.table.values(fit.knobs)
        noise, truth = (held[part].to(subject.device) for held in (lesson.tune.drawn.noise, lesson.tune.x0))
        x = travel(fit.table, values, subject.denoiser(pairs), noise, recompute)
        found = (distance(x, truth).double() + ROUND).sqrt().sum() / len(chosen)
        found.backward()
        total += float(found.detach())
    return total


def tame(turned: list[Tensor], usual: list[float]) -> bool:
    """Shortens a gradient that is much longer than those before it; whether there is one at all."""
    length = math.sqrt(sum(float(knob.grad.square().sum()) for knob in turned if knob.grad is not None))
    if not math.isfinite(length):
        return False
    middle = sorted(usual[-20:])[len(usual[-20:]) // 2] if usual else length
    usual.append(length)
    if length > CLIP * middle > 0:
        for knob in turned:
            if knob.grad is not None:
                knob.grad.mul_(CLIP * middle / length)
    return True


def look(fit: Fit, lesson: TuningData, at_once: int) -> bool:
    """Watches the knobs as they are now, and keeps them where the mean of the roots is the least so far.

    Not the mean of the errors: a few pairs that end elsewhere decide it, and with other seeds it would be others.
    """
    try:
        plan = fit.table.plan_at(fit.knobs)
    except PellucidError:  # knobs that make no plan: levels that meet, weights that amplify rounding
        return False
    found = errors(plan, lesson.subject, lesson.watch, at_once)
    fit.looks.append((fit.iterations, float(found.mean())))
    root = float(found.sqrt().mean())
    if not root < fit.best_root:
        return False
    fit.best, fit.best_root, fit.best_error = copied(fit.knobs), root, float(found.mean())
    return True


class Batches:
    """Batches without end: every pair once before any comes again."""

    def __init__(self, count: int, batch: int, seed: int) -> None:
        self.count, self.batch = count, min(batch, count)
        self.generator = torch.Generator().manual_seed(seed)
        self.left: list[int] = []

    def __next__(self) -> list[int]:
        while len(self.left) < self.batch:
            self.left += torch.randperm(self.count, generator=self.generator).tolist()
        chosen, self.left = self.left[: self.batch], self.left[self.batch :]
        return chosen


def falling(part: float) -> float:
    """A cosine from 1 to nearly 0."""
    return LEAST_RATE + (1.0 - LEAST_RATE) * 0.5 * (1.0 + math.cos(math.pi * part))


def copied(knobs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: knob.detach().clone() for name, knob in knobs.items()}
