"""The descent: Adam over a table's knobs, on the tuning pairs; the watched pairs say when to stop and what to keep."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.core.plan import Plan
from pellucid.evidence.tune import course
from pellucid.evidence.tune.errors import Truth, distance, errors
from pellucid.evidence.tune.subject import Subject
from pellucid.evidence.tune.table import KNOBS, WHAT, Table, What

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
class Lesson:
    """A model, the pairs that its table is tuned on, and those that are watched."""

    subject: Subject
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
    def of(table: Table, lesson: Lesson, at_once: int) -> Fit:
        knobs = table.zeros()
        found = errors(table.plan, lesson.subject, lesson.watch, at_once)
        error, root = float(found.mean()), float(found.sqrt().mean())
        return Fit(table, knobs, copied(knobs), error, root, error, [(0, error)])


def descend(fit: Fit, lesson: Lesson, how: Descent, done: Callable[[], object] = lambda: None) -> Fit:
    """Turns the knobs, from where the best was, until nothing improves or for so many iterations."""
    fit.knobs = copied(fit.best)
    turned = [fit.knobs[name].requires_grad_() for name in KNOBS[how.what]]
    optimiser = torch.optim.Adam(turned, lr=how.rate, betas=BETAS)
    order = Order(len(lesson.tune), how.batch, how.seed)
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


def is_heavy(table: Table, lesson: Lesson, how: Descent) -> bool:
    few = lesson.tune.pairs.first(min(how.at_once, how.batch, lesson.subject.most))
    return course.too_heavy(table, lesson.subject.denoiser(few), lesson.subject.noise(few))


def backward(fit: Fit, lesson: Lesson, chosen: list[int], at_once: int, recompute: bool = False) -> float:
    """The gradient of the mean of √error over some pairs, a part of them at a time. See 0017 for why the root."""
    subject, total = lesson.subject, 0.0
    size = min(at_once, subject.most)
    for start in range(0, len(chosen), size):
        part = chosen[start : start + size]
        pairs = lesson.tune.pairs.pick(part)
        values = fit.table.values(fit.knobs)
        noise, truth = (held[part].to(subject.device) for held in (lesson.tune.drawn.noise, lesson.tune.x0))
        x = course.travel(fit.table, values, subject.denoiser(pairs), noise, recompute)
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


def look(fit: Fit, lesson: Lesson, at_once: int) -> bool:
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


class Order:
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
