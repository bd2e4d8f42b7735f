"""The step batch: images that join, step and leave, each at its own row of its own plan. It owns the only state.

What joins is an `Entry`: images that begin together, with their plans, denoiser, noise, observers, constraints and
cancellation. A step takes every image through one row: add churn, ask for x0, remember it, combine the registers, show
the step. An image is the same whoever shares its batch; an entry that fails, or is cancelled, leaves the others alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from pellucid.core.dialect_diffusers import discards_noise
from pellucid.core.errors import Cancelled, PellucidError, rule
from pellucid.core.noise import NoiseSource, draw
from pellucid.core.plan import DEPTH, Plan, Row
from pellucid.core.schedule import Level
from pellucid.core.table import ANCHOR_WEIGHTS, COLUMNS, X_WEIGHTS, Table, Use, columns_of

# --- What a denoiser takes and gives ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchLevel:
    """Levels of several images at once in float64, shaped to broadcast against x; reads like a `Level`."""

    alpha: Tensor
    sigma: Tensor
    levels: tuple[Level, ...] = ()  # the same as numbers, so that nobody has to read them back from a device
    times: tuple[float, ...] = ()  # and the times of the call


@dataclass(frozen=True)
class Prediction:
    """x0, for the CFG++ family the unconditional x0 beside it, and by name the x0 that led to it, for observers."""

    x0: Tensor
    uncond: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)


# (x, level, told time) → x0 at that level. Where images differ, level is `BatchLevel` and time a tensor, one per image.
Denoiser = Callable[[Tensor, Any, Any], "Tensor | Prediction"]


class BoundDenoiser(Protocol):
    """A denoiser of one run, with something of its own for each image: inputs, scales, a memory."""

    def __call__(self, x: Tensor, level: Any, time: Any) -> Tensor | Prediction: ...

    def select(self, images: Sequence[int]) -> BoundDenoiser:
        """What is left of it when only these positions of the batch run on."""


@runtime_checkable
class _Merges(Protocol):
    """A bound denoiser that can call its network for the images of another run too."""

    def merge(self, other: BoundDenoiser) -> BoundDenoiser | None:
        """Both as one, the other's images behind its own; None where they cannot share a call."""


@runtime_checkable
class BindsToRun(Protocol):
    """A denoiser that wants to know the plan of each image; every run gets an object of its own from it."""

    def bind(self, plans: Sequence[Plan]) -> BoundDenoiser: ...


# --- What observers see -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepSeen:
    """What an observer sees after each row of its entry. `images` are the positions in it that the tensors hold.

    `index` is the row of these images in their own plans, whatever else is in the batch. `rows` and `next_levels` have
    one value for all images, or one per image. `parts` are the predictions that led to x0, by name, as x0 (`cond`,
    `uncond`, …), computed when they are read.
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
Work = Literal["noise", "model", "update", "constrain", "observe"]  # what a step is at
Mark = Callable[[Work], None]


@dataclass(frozen=True)
class RunSeen:
    """What an entry begins with: one plan per image, their first x, and where their noise comes from."""

    plans: tuple[Plan, ...]
    x: Tensor
    noise: NoiseSource


@runtime_checkable
class _RunObserver(Protocol):
    """An observer that is also told of the run before its first row, and at each turn what the loop is at from now."""

    def __call__(self, seen: StepSeen) -> None: ...

    def begin_run(self, run: RunSeen) -> None: ...

    def mark(self, work: Work) -> None: ...


class _Part(Mapping[str, Tensor]):
    """The predictions of some of a batch's images."""

    def __init__(self, whole: Mapping[str, Tensor], images: slice) -> None:
        self.whole, self.images = whole, images

    def __getitem__(self, name: str) -> Tensor:
        return self.whole[name][self.images]

    def __contains__(self, name: object) -> bool:
        return name in self.whole  # not by reading it, which would convert

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


# --- The state --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """The registers of the images that are running; an anchor or a prediction that no plan has used yet is missing."""

    x: Tensor
    anchor: Tensor | None = None
    history: tuple[Tensor, ...] = ()

    def select(self, keep: Sequence[int]) -> State:
        if len(keep) == len(self.x):
            return self
        chosen = torch.tensor(list(keep), dtype=torch.int64, device=self.x.device)
        anchor = None if self.anchor is None else self.anchor[chosen]
        return State(self.x[chosen], anchor, tuple(p[chosen] for p in self.history))

    def insert(self, at: int, x: Tensor) -> State:
        """The state with new images before position `at`; what they have not used yet is zero."""

        def wider(register: Tensor, new: Tensor) -> Tensor:
            return torch.cat([register[:at], new, register[at:]])

        zero = torch.zeros_like(x)
        anchor = None if self.anchor is None else wider(self.anchor, zero)
        return State(wider(self.x, x), anchor, tuple(wider(p, zero) for p in self.history))


def update(state: State, use: Use, values: Tensor, x: Tensor, found: Prediction, z: Tensor | None, depth: int) -> State:
    """One row of every image: the prediction enters the history, x and the anchor become sums over the registers.

    `values` are the rows' lines of the table, `x` is what the denoiser was called with, and `depth` is how many earlier
    predictions are kept.
    """
    weights = columns_of(values, x)
    p0 = found.x0 if not use.basis else x * weights[COLUMNS["b_x"]] + found.x0 * weights[COLUMNS["b_0"]]
    zero = _Zero(x)
    past = [*state.history, *([None] * (DEPTH - 1 - len(state.history)))]
    registers = [x, state.anchor, p0, *past, found.x0 if found.uncond is None else found.uncond, z]

    def combine(used: tuple[int, ...], first: int) -> Tensor:
        """Σ weight·register, in register order, so that any two ways of calling it round alike."""
        out: Tensor | None = None
        for register in used:
            held = registers[register]
            value = zero() if held is None else held
            weight = weights[first + register]
            out = value * weight if out is None else torch.addcmul(out, value, weight)
        return torch.zeros_like(x) if out is None else out  # a row may leave nothing: diffusers' iPNDM in one step does

    x_next = combine(use.x, X_WEIGHTS)
    anchor = state.anchor if use.anchor is None else combine(use.anchor, ANCHOR_WEIGHTS)
    return State(x_next, anchor, _remember(state.history, p0, use, weights[COLUMNS["held"]], depth))


class _Zero:
    """Zeros of x's shape, made once where somebody reads a register that nobody has written."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.made: Tensor | None = None

    def __call__(self) -> Tensor:
        self.made = torch.zeros_like(self.like) if self.made is None else self.made
        return self.made


def _remember(history: tuple[Tensor, ...], p0: Tensor, use: Use, held: Tensor, depth: int) -> tuple[Tensor, ...]:
    """The history after a call; held predictions do not enter it."""
    pushed = (p0, *history)[:depth]
    if not use.held:
        return pushed
    kept = held.bool()
    longer = (*history, *([torch.zeros_like(p0)] * (len(pushed) - len(history))))
    return tuple(torch.where(kept, old, new) for old, new in zip(longer, pushed, strict=False))


# --- Who is in it -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Entry:
    """Images that begin together at the first rows of their plans. `result` is x at the ends of the plans."""

    plans: Sequence[Plan]
    denoiser: Denoiser
    x: Tensor
    noise: NoiseSource
    observers: Sequence[Observer] = ()
    constraints: Sequence[Constraint] = ()
    cancelled: Callable[[], bool] | None = None
    index: int = field(default=0, init=False)  # the row that comes next, of each image
    images: list[int] = field(default_factory=list, init=False)  # that are still running
    first_end: int = field(default=0, init=False)  # the row at which the first of these ends
    result: Tensor = field(init=False, repr=False)
    error: Exception | None = field(default=None, init=False)  # why it left before its end

    def __post_init__(self) -> None:
        if self.x.ndim < 1 or len(self.plans) != len(self.x) or len(self.x) == 0:
            raise PellucidError(rule("x", "a batch of at least one image", tuple(self.x.shape)), "shape")
        if not self.x.is_floating_point() or self.x.dtype in (torch.float16, torch.bfloat16):
            self.x = self.x.to(torch.float32)
        self.images = list(range(len(self.plans)))
        self.first_end = self.soonest()
        self.result = torch.empty_like(self.x)
        self.table = Table(self.plans, self.x)
        self.depth = max(plan.depth for plan in self.plans)
        self.watching = [observe for observe in self.observers if isinstance(observe, _RunObserver)]

    def soonest(self) -> int:
        """The row at which the first of the running images ends."""
        return min((len(self.plans[i].rows) for i in self.images), default=0)

    @property
    def one_plan(self) -> bool:
        """Whether all images that run are at one row of one plan."""
        first = self.plans[self.images[0]]
        return all(self.plans[i] is first for i in self.images)

    @property
    def running(self) -> list[Plan]:
        return [self.plans[i] for i in self.images]

    @property
    def rows(self) -> list[Row]:
        """The row that comes next of each running image."""
        return [plan.rows[self.index] for plan in self.running]

    @property
    def lines(self) -> list[int]:
        """Where the table has the row that comes next of each running image."""
        return self.table.places(self.running, self.index)

    def noise_of(self, like: Tensor, pre: bool) -> Tensor:
        """Fresh noise for each running image; those whose row draws none get zeros."""
        rows = self.rows
        if self.one_plan:
            return draw(self.noise, rows[0], pre, like, self.images).to(like.dtype)
        out = torch.zeros_like(like)
        for k, row in enumerate(rows):
            if row.pre_draws if pre else row.draws:
                out[k] = draw(self.noise, row, pre, like[k : k + 1], [self.images[k]])[0].to(like.dtype)
        return out

    def discard(self, like: Tensor) -> None:
        """Moves streams of noise on where a peer draws noise that it does not use."""
        discard = getattr(self.noise, "discard", None)
        if discard is not None:
            unused = [i for i in self.images if discards_noise(self.plans[i], self.plans[i].rows[self.index])]
            if unused:
                discard(like, unused)


@dataclass(eq=False)
class _Lane:
    """Entries whose images share calls of a denoiser; their registers lie beside each other."""

    denoiser: Any
    bound: bool
    entries: list[Entry]

    @property
    def size(self) -> int:
        return sum(len(entry.images) for entry in self.entries)

    def takes(self, entry: Entry) -> Any:
        """The denoiser for the images of this lane and of another entry, or None where they cannot share calls."""
        if not self.bound:
            return self.denoiser if entry.denoiser is self.denoiser else None
        other: Any = entry.denoiser
        if not isinstance(self.denoiser, _Merges) or not isinstance(other, BindsToRun):
            return None
        return self.denoiser.merge(other.bind(entry.plans))

    def predict(self, x: Tensor) -> Prediction:
        """x0 of the lane's images at the levels of their rows."""
        rows = [row for entry in self.entries for row in entry.rows]
        first = rows[0]
        if all(row is first for row in rows):
            found = self.denoiser(x, first.level, first.time)
        else:
            numbers = [(row.level.alpha, row.level.sigma, row.time) for row in rows]
            table = torch.tensor(numbers, dtype=torch.float64).to(x.device).T  # one small copy
            alpha, sigma = table[:2].reshape(2, -1, *([1] * (x.ndim - 1)))
            levels, times = tuple(row.level for row in rows), tuple(row.time for row in rows)
            found = self.denoiser(x, BatchLevel(alpha, sigma, levels, times), table[2])
        made = found if isinstance(found, Prediction) else Prediction(found)
        if made.x0.shape != x.shape:
            raise PellucidError(rule("x0", f"of the shape of x, {tuple(x.shape)}", tuple(made.x0.shape)), "shape")
        uncond = None if made.uncond is None else made.uncond.to(x.dtype)
        return Prediction(made.x0.to(x.dtype), uncond, made.parts)

    def parts_of(self, found: Prediction) -> list[Mapping[str, Tensor]]:
        """What led to x0, by name, for each entry."""
        if len(self.entries) == 1:
            return [found.parts]
        parts: list[Mapping[str, Tensor]] = []
        at = 0
        for entry in self.entries:
            parts.append(_Part(found.parts, slice(at, at + len(entry.images))))
            at += len(entry.images)
        return parts


class Stepper(Protocol):
    """Takes all images of a batch through a row in a way of its own, such as a captured graph."""

    def step(self, batch: Batch) -> tuple[Tensor, Prediction, list[Mapping[str, Tensor]]] | None:
        """What the denoiser was called with, and what `predict` finds; the batch's state is set. None: step plainly."""

    def close(self) -> None:
        """The batch is over."""


class Batch:
    """Images at their own rows, in registers of one shape; at most `capacity` of them."""

    def __init__(self, capacity: int | None = None, stepper: Stepper | None = None) -> None:
        self.capacity, self.stepper = capacity, stepper
        self.lanes: list[_Lane] = []
        self.state: State | None = None
        self.depth = 0

    @property
    def entries(self) -> list[Entry]:
        return [entry for lane in self.lanes for entry in lane.entries]

    def __len__(self) -> int:
        """How many images are running."""
        return sum(lane.size for lane in self.lanes)

    def join(self, entry: Entry) -> None:
        """Takes in the images of an entry, at the first rows of their plans."""
        state, count = self.state, len(entry.plans)
        if state is not None and (entry.x.shape[1:], entry.x.dtype) != (state.x.shape[1:], state.x.dtype):
            have, got = ((tuple(x.shape[1:]), str(x.dtype)) for x in (state.x, entry.x))
            raise PellucidError(rule("x", f"of the shape and dtype of the batch, {have}", got), "shape")
        if self.capacity is not None and len(self) + count > self.capacity:
            free = self.capacity - len(self)
            raise PellucidError(rule("images", f"at most {free}, which the batch has room for", count), "capacity")
        if state is not None and entry.x.device != state.x.device:
            where = str(entry.x.device)
            raise PellucidError(rule("x", f"on the device of the batch, {state.x.device}", where), "device")
        lane, denoiser, at = self._lane_for(entry)
        begun = RunSeen(tuple(entry.plans), entry.x, entry.noise)
        for observe in entry.watching:  # one that fails leaves the batch as it was
            observe.begin_run(begun)
        lane.denoiser = denoiser
        lane.entries.append(entry)
        if lane not in self.lanes:
            self.lanes.append(lane)
        self.state = State(entry.x) if state is None else state.insert(at, entry.x)
        self.depth = max(self.depth, entry.depth)

    def _lane_for(self, entry: Entry) -> tuple[_Lane, Any, int]:
        """The lane whose calls an entry can share, or a new one; its denoiser with the entry; where its images go."""
        at = 0
        for lane in self.lanes:
            at += lane.size
            denoiser = lane.takes(entry)
            if denoiser is not None:
                return lane, denoiser, at
        own: Any = entry.denoiser
        bound = isinstance(own, BindsToRun)
        return _Lane(own, bound, []), own.bind(entry.plans) if bound else own, at

    def step(self) -> list[Entry]:
        """Takes every image through one row. Returns the entries that ended, failed or were cancelled."""
        for entry in self.entries:
            with _failing(entry):
                if entry.cancelled is not None and entry.cancelled():
                    entry.error = Cancelled(f"stopped before row {entry.index}")
        left = self._leave_ended()
        if self.state is None:
            return left
        entries, places = self.entries, self._places()
        mark = _mark_of(entries)
        taken = None
        if self.stepper is not None:
            mark("model")
            with _failing(*entries):
                taken = self.stepper.step(self)
            if taken is None and any(entry.error is not None for entry in entries):
                return left + self._leave_ended()
        x, found, parts = taken or self._step(entries, places, mark)
        for entry, place, seen_parts in zip(entries, places, parts, strict=True):
            with _failing(entry):
                entry.discard(x[place])
                if entry.observers or entry.constraints:
                    self._show(entry, place, x, found, seen_parts, mark)
            entry.index += 1
        return left + self._leave_ended()

    def _step(
        self, entries: Sequence[Entry], places: Sequence[slice], mark: Mark
    ) -> tuple[Tensor, Prediction, list[Mapping[str, Tensor]]]:
        """One row of every image, operation by operation."""
        assert self.state is not None
        x, lines = self.state.x, [entry.lines for entry in entries]
        use = Use.union([entry.table.uses[line] for entry, own in zip(entries, lines, strict=True) for line in own])
        values = [entry.table.gather(own) for entry, own in zip(entries, lines, strict=True)]
        if len(values) > 1:
            values = [torch.cat([v.expand(len(own), -1) for v, own in zip(values, lines, strict=True)])]
        if use.churn:
            mark("noise")
            x = x + _noise_of(entries, places, x, True) * columns_of(values[0], x)[COLUMNS["pre_noise"]]
        mark("model")
        found, parts = self._predict(x)
        mark("update")
        z = None
        if use.draws:
            mark("noise")
            z = _noise_of(entries, places, x, False)
            mark("update")
        self.state = update(self.state, use, values[0], x, found, z, self.depth)
        return x, found, parts

    def draw_into(self, register: Tensor, pre: bool) -> None:
        """Writes the noise of the rows that come next where there is some."""
        entries = self.entries
        if any(row.pre_draws if pre else row.draws for entry in entries for row in entry.rows):
            register.copy_(_noise_of(entries, self._places(), register, pre))

    def leave(self, entry: Entry) -> None:
        """Takes the images of an entry out before their ends."""
        entry.error = entry.error or Cancelled(f"stopped before row {entry.index}")
        self._leave_ended()

    def _places(self) -> list[slice]:
        """Where the images of each entry are in the registers."""
        places, at = [], 0
        for entry in self.entries:
            places.append(slice(at, at + len(entry.images)))
            at += len(entry.images)
        return places

    def _predict(self, x: Tensor) -> tuple[Prediction, list[Mapping[str, Tensor]]]:
        """x0 of every image, by one call per lane; and for each entry what led to it, by name."""
        made: list[Prediction] = []
        parts: list[Mapping[str, Tensor]] = []
        at = 0
        for lane in self.lanes:
            own = x if len(self.lanes) == 1 else x[at : at + lane.size]
            at += lane.size
            found = Prediction(own)
            with _failing(*lane.entries):
                found = lane.predict(own)
            made.append(found)
            parts += lane.parts_of(found)
        if len(made) == 1:
            return made[0], parts
        apart = any(one.uncond is not None for one in made)
        uncond = torch.cat([one.x0 if one.uncond is None else one.uncond for one in made]) if apart else None
        return Prediction(torch.cat([one.x0 for one in made]), uncond), parts

    def _show(
        self, entry: Entry, place: slice, x: Tensor, found: Prediction, parts: Mapping[str, Tensor], mark: Mark
    ) -> None:
        """Constraints change x after the row; then the observers see the step."""
        assert self.state is not None
        mark("constrain" if entry.constraints else "observe")
        whole = len(entry.images) == len(x)
        after = self.state.x if self.stepper is None else self.state.x.clone()  # a stepper may write into its own again
        own = [tensor if whole else tensor[place] for tensor in (x, found.x0, after)]
        one, plans = entry.one_plan, entry.running
        rows = tuple(entry.rows[:1] if one else entry.rows)
        levels = tuple(level_after(plan, entry.index) for plan in (plans[:1] if one else plans))
        seen = StepSeen(entry.index, rows, own[0], own[1], own[2], levels, tuple(entry.images), parts)
        for constrain in entry.constraints:
            seen = replace(seen, x_next=constrain(seen))
        if entry.constraints:
            kept = (
                seen.x_next
                if whole
                else torch.cat([self.state.x[: place.start], seen.x_next, self.state.x[place.stop :]])
            )
            self.state = replace(self.state, x=kept)
            mark("observe")
        for observe in entry.observers:
            observe(seen)
        mark("update")

    def _leave_ended(self) -> list[Entry]:
        """Takes out the images whose plans have ended, and all of the entries that have failed."""
        if all(entry.error is None and entry.index < entry.first_end for entry in self.entries):
            return []
        left: list[Entry] = []
        keep: list[int] = []
        at = 0
        for lane in self.lanes:
            first, own = at, []
            for entry in lane.entries:
                running = []
                for image in entry.images:
                    if entry.error is None and entry.index < len(entry.plans[image].rows):
                        running.append(image)
                        own.append(at - first)
                    elif entry.error is None and self.state is not None:
                        entry.result[image] = self.state.x[at]
                    at += 1
                if len(running) < len(entry.images):
                    entry.images = running
                    entry.first_end = entry.soonest()
                    left += [] if running else [entry]
            keep += [first + k for k in own]
            if own and len(own) < at - first and lane.bound:
                lane.denoiser = lane.denoiser.select(own)
            lane.entries = [entry for entry in lane.entries if entry.images]
        self.lanes = [lane for lane in self.lanes if lane.entries]
        if self.state is not None:
            self.state = self.state.select(keep) if keep else None
        return left


class _failing:  # noqa: N801
    """An error inside is theirs alone: they leave at the end of the step."""

    def __init__(self, *entries: Entry) -> None:
        self.entries = entries

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        for entry in self.entries:
            entry.error = entry.error or error
        return True


def _mark_of(entries: Sequence[Entry]) -> Mark:
    """What tells the observers that want to know it what the step is at."""
    watching = [observe for entry in entries for observe in entry.watching]
    if len(watching) == 1:
        return watching[0].mark

    def mark(work: Work) -> None:
        for observe in watching:
            observe.mark(work)

    return mark


def _noise_of(entries: Sequence[Entry], places: Sequence[slice], x: Tensor, pre: bool) -> Tensor:
    """Noise for the images whose rows draw some; the others have zeros."""
    out = x
    if len(entries) > 1:
        out = torch.zeros_like(x)
    for entry, place in zip(entries, places, strict=True):
        if any(row.pre_draws if pre else row.draws for row in entry.rows):
            with _failing(entry):
                own = entry.noise_of(x[place], pre)
                if len(entries) == 1:
                    return own
                out[place] = own
    return out


def level_after(plan: Plan, index: int) -> Level:
    """The level that x has after a row: that of the next call before its churn, or the plan's end."""
    if index + 1 == len(plan.rows):
        return plan.end
    following = plan.rows[index + 1]
    variance = following.level.sigma**2 - following.pre_noise**2
    return Level(following.level.alpha, math.sqrt(max(variance, 0.0)))
