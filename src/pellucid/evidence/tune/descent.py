"""Gradient descent over a table's knobs, through the one loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from pellucid.core import target as targets
from pellucid.core.batch import BindsToRun, Denoiser, Prediction, State, update
from pellucid.core.errors import PellucidError, rule
from pellucid.core.plan import Plan, Row
from pellucid.core.schedule import Level
from pellucid.core.table import ANCHOR_WEIGHTS, COLUMNS, X_WEIGHTS, Use
from pellucid.evidence.study.kernel import check_whole
from pellucid.evidence.tune.model import TuningModel
from pellucid.evidence.tune.table import KNOBS, WHAT, SoftLevel, Table, TableValues, What
from pellucid.evidence.tune.teacher import Truth, distance, errors

# --- a table through the loop -------------------------------------------------------------------------------------

KEEP_BYTES = 2 * 2**30  # of activations in a CPU's memory; beyond that they are computed a second time
_Call = Callable[[Tensor, Any, Any], Tensor]


def travel(table: Table, values: TableValues, denoiser: Denoiser, noise: Tensor, recompute: bool) -> Tensor:
    """x at the end of a table, from unit noise (B, …)."""
    call = _called(table, values, denoiser, len(noise), recompute)
    state = State(noise * values.sigmas[0].to(noise))
    for i in range(table.steps):
        level, time = _call_at(values, i, noise)
        found = Prediction(call(state.x, level, time))
        use, line = _line_at(table, values, i, level, noise)
        state = update(state, use, line, state.x, found, None, 3)
    return state.x


def _call_at(values: TableValues, i: int, like: Tensor) -> tuple[SoftLevel, Tensor]:
    """The level and the times of one row, on x's device."""
    level = SoftLevel(values.alphas[i].to(like.device), values.sigmas[i].to(like.device), values.ratios[i])
    return level, values.times[i].to(like.device).expand(len(like))


def _line_at(table: Table, values: TableValues, i: int, level: SoftLevel, like: Tensor) -> tuple[Use, Tensor]:
    """One line of the device table (1, columns) that gradients flow through, and which registers it uses."""
    x, anchor = values.weights[i]
    basis = targets.from_x0(table.plan.basis, level)  # type: ignore[arg-type]
    cells: dict[int, Any] = {X_WEIGHTS + r: w for r, w in x} | {ANCHOR_WEIGHTS + r: w for r, w in anchor or ()}
    cells |= dict(zip((COLUMNS["b_x"], COLUMNS["b_0"]), basis, strict=True))
    line = [torch.as_tensor(cells.get(column, 0.0)).to(like) for column in range(len(COLUMNS))]
    kept = None if anchor is None else tuple(r for r, _ in anchor)
    use = Use(tuple(r for r, _ in x), kept, basis != (0.0, 1.0), held=False, churn=False, draws=False)
    return use, torch.stack(line)[None]


def _called(table: Table, values: TableValues, denoiser: Denoiser, count: int, recompute: bool) -> _Call:
    """The denoiser of a run, x0 alone; with `recompute` activations are computed again on the way back, not kept."""
    bound: Any = denoiser
    if isinstance(denoiser, BindsToRun):  # guidance may want to know where the run is
        numbers = zip(values.alphas.tolist(), values.sigmas.tolist(), values.times.tolist(), strict=False)
        rows = tuple(Row(Level(alpha, sigma), time, ()) for alpha, sigma, time in numbers)
        bound = denoiser.bind([replace(table.plan, rows=rows)] * count)

    def predict(x: Tensor, level: Any, time: Any) -> Tensor:
        found = bound(x, level, time)
        return found.x0 if isinstance(found, Prediction) else found

    def predict_again(x: Tensor, level: Any, time: Any) -> Tensor:
        past = getattr(bound, "past", None)

        def inner(x: Tensor, alpha: Tensor, sigma: Tensor, time: Tensor) -> Tensor:
            if hasattr(bound, "past"):
                bound.past = past  # what guidance remembered before this call, also the second time
            return predict(x, SoftLevel(alpha, sigma, level.ratio), time)

        return checkpoint(inner, x, level.alpha, level.sigma, time, use_reentrant=False, preserve_rng_state=False)

    return predict_again if recompute else predict


def too_heavy(table: Table, denoiser: Denoiser, noise: Tensor) -> bool:
    """Whether the activations of all rows are too large to keep for the way back: those of one call times the rows."""
    sizes: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    values = table.values(table.zeros())
    level, time = _call_at(values, table.steps - 1, noise)
    with saved_tensors_hooks(count, lambda tensor: tensor):
        _called(table, values, denoiser, len(noise), False)(noise.detach().requires_grad_(), level, time)
    on_gpu = noise.device.type == "cuda"
    room = torch.cuda.mem_get_info(noise.device)[0] // 2 if on_gpu else KEEP_BYTES  # on a GPU half of what is free
    return table.steps * sum(sizes.values()) > room


# --- the descent --------------------------------------------------------------------------------------------------

_BETAS = (0.9, 0.99)
_LEAST_RATE = 0.02  # of the first rate, at the end
_ROUND = 1e-12  # under the root of an error that is 0
_CLIP = 10.0  # times the usual length of the gradient: pairs between two basins have any


@dataclass(frozen=True)
class Descent:
    """How the knobs are tuned. `batch` pairs make one step, at most `at_once` of them at a time."""

    what: What = "all"
    iterations: int = 400
    rate: float = 0.05
    batch: int = 64
    at_once: int = 64
    every: int = 10  # steps between two evaluations of the watched pairs
    patience: int = 20  # evaluations without a better one before it stops; the rate must have time to fall
    seed: int = 0

    def __post_init__(self) -> None:
        if self.what not in WHAT:
            raise PellucidError(rule("--what", "one of " + ", ".join(WHAT), self.what), "what")
        for name in ("iterations", "batch", "at_once"):
            check_whole(name, getattr(self, name), 1, 100_000, "tune")
        if not (math.isfinite(self.rate) and 0 < self.rate <= 1):
            raise PellucidError(rule("rate", "above 0 and at most 1", self.rate), "tune")


@dataclass(frozen=True)
class TuningData:
    """A model, the pairs that its table is tuned on, and those that decide when to stop."""

    model: TuningModel
    tune: Truth
    watch: Truth


@dataclass
class TableFit:
    """A table that is being tuned: the knobs now, the best so far, and the errors of the watched pairs."""

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
    def of(table: Table, data: TuningData, at_once: int) -> TableFit:
        knobs = table.zeros()
        found = errors(table.plan, data.model, data.watch, at_once)
        error, root = float(found.mean()), float(found.sqrt().mean())
        return TableFit(table, knobs, copied(knobs), error, root, error, [(0, error)])


def descend(fit: TableFit, data: TuningData, how: Descent, done: Callable[[], object] = lambda: None) -> TableFit:
    """Tunes the knobs from the best ones, until nothing improves or the iterations are used up."""
    fit.knobs = copied(fit.best)
    turned = [fit.knobs[name].requires_grad_() for name in KNOBS[how.what]]
    optimiser = torch.optim.Adam(turned, lr=how.rate, betas=_BETAS)
    order = batches(len(data.tune), how.batch, how.seed)
    few = data.tune.pairs.first(min(how.at_once, how.batch, data.model.most))
    recompute = too_heavy(fit.table, data.model.denoiser(few), data.model.noise(few))
    usual: list[float] = []
    stale = 0
    for i in range(how.iterations):
        for group in optimiser.param_groups:
            group["lr"] = how.rate * falling(i / how.iterations)
        optimiser.zero_grad()
        backward(fit, data, next(order), how.at_once, recompute)
        if tame(turned, usual):
            optimiser.step()
            fit.table.settle(fit.knobs)
        fit.iterations += 1
        done()
        if (i + 1) % how.every == 0 or i + 1 == how.iterations:
            stale = 0 if _look(fit, data, how.at_once) else stale + 1
            if stale >= how.patience:
                break
    fit.knobs = copied(fit.knobs)
    return fit


def backward(fit: TableFit, data: TuningData, chosen: list[int], at_once: int, recompute: bool = False) -> float:
    """The gradient of the mean of √error over some pairs, a part of them at a time; 0017 says why the root."""
    model, total = data.model, 0.0
    size = min(at_once, model.most)
    for start in range(0, len(chosen), size):
        part = chosen[start : start + size]
        pairs = data.tune.pairs.pick(part)
        values = fit.table.values(fit.knobs)
        noise, truth = (held[part].to(model.device) for held in (data.tune.noise, data.tune.x0))
        x = travel(fit.table, values, model.denoiser(pairs), noise, recompute)
        found = (distance(x, truth).double() + _ROUND).sqrt().sum() / len(chosen)
        found.backward()
        total += float(found.detach())
    return total


def tame(turned: list[Tensor], usual: list[float]) -> bool:
    """Clips a gradient that is much longer than those before it; False where it is not finite."""
    length = math.sqrt(sum(float(knob.grad.square().sum()) for knob in turned if knob.grad is not None))
    if not math.isfinite(length):
        return False
    middle = sorted(usual[-20:])[len(usual[-20:]) // 2] if usual else length
    usual.append(length)
    if length > _CLIP * middle > 0:
        for knob in turned:
            if knob.grad is not None:
                knob.grad.mul_(_CLIP * middle / length)
    return True


def _look(fit: TableFit, data: TuningData, at_once: int) -> bool:
    """Evaluates the knobs as they are now, and keeps them where the mean of the roots is the least so far.

    Not the mean of the errors: a few outliers decide it, and with other seeds these would be others.
    """
    try:
        plan = fit.table.plan_at(fit.knobs)
    except PellucidError:  # knobs that make no plan: levels that meet, weights that amplify rounding
        return False
    found = errors(plan, data.model, data.watch, at_once)
    fit.looks.append((fit.iterations, float(found.mean())))
    root = float(found.sqrt().mean())
    if not root < fit.best_root:
        return False
    fit.best, fit.best_root, fit.best_error = copied(fit.knobs), root, float(found.mean())
    return True


def batches(count: int, batch: int, seed: int) -> Iterator[list[int]]:
    """Endless batches: every pair once before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    left: list[int] = []
    batch = min(batch, count)
    while True:
        while len(left) < batch:
            left += torch.randperm(count, generator=generator).tolist()
        chosen, left = left[:batch], left[batch:]
        yield chosen


def falling(part: float) -> float:
    """A cosine from 1 to nearly 0."""
    return _LEAST_RATE + (1.0 - _LEAST_RATE) * 0.5 * (1.0 + math.cos(math.pi * part))


def copied(knobs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: knob.detach().clone() for name, knob in knobs.items()}
