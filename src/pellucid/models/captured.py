"""A whole step of a batch on the device: gather, network, guidance, update and cursor, as one captured CUDA graph.

`StepGraphs` belongs to a model and keeps what was captured; `stepper` gives one batch its own `DeviceStepper`. A
program is what one graph computes, on registers and inputs that stay where they are; requests are copied into them.
Without CUDA the same program runs as it is, which is how tests compare it with the plain step.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from pellucid.core import target as targets
from pellucid.core.batch import Batch, Prediction, State, update
from pellucid.core.denoiser import input_scale, read_output, sigma_data_of
from pellucid.core.errors import PellucidError, is_out_of_memory
from pellucid.core.noise import WORD, Philox
from pellucid.core.plan import DEPTH, Plan
from pellucid.core.schedule import Array, Level, Schedule, Target
from pellucid.core.table import COLUMNS, Use, columns_of, plan_lines
from pellucid.models import attention, ops
from pellucid.models import inputs as trees
from pellucid.models.guidance import Dose
from pellucid.models.guided import GuidedRun, ImageGuidance, Sources, Terms, without_variance

_SPACES = ("x0", "eps", "v", "flow")
_PAIRS = tuple((a, b) for a in ("raw", *_SPACES) for b in _SPACES if a != b)
_FLAGS = ("guided", "changed", "moved", "apart")
_MORE = {
    name: column
    for column, name in enumerate((*_FLAGS, *(f"{a}>{b}.{part}" for a, b in _PAIRS for part in ("x", "k"))))
}
_Noise = tuple[int, Plan]  # an image's seed, and the plan whose rows say where its noise is addressed
_EVERYTHING = Use(tuple(range(8)), tuple(range(8)), basis=True, held=True, churn=False, draws=True)
_PATIENCE = 1000  # steps after a graph that found no room
_PROGRAMS = 24  # that are kept; each holds the activations of one call in the graphs' common pool


def bucket(count: int) -> int:
    """The next size that is captured: every one up to 8, then four between two powers of two."""
    if count <= 8:
        return count
    step = 1 << (count - 1).bit_length() - 3
    return -(-count // step) * step


def _power(count: int, least: int = 32) -> int:
    return max(least, 1 << (count - 1).bit_length())


# --- Lines of the table -----------------------------------------------------------------------------------------------


def lines_of(image: ImageGuidance, schedule: Schedule, target: Target) -> tuple[Array, Array]:
    """What the device needs of each row of an image's plan: (rows, COLUMNS) and, for the rules, (rows, _MORE)."""
    plan = image.plan
    assert plan is not None
    lines, more = plan_lines(plan), np.zeros((len(plan.rows), len(_MORE)))
    pairs = _pairs_of(image)
    for line, beside, row in zip(lines, more, plan.rows, strict=True):
        dose = image.bound.at(row.level)
        line[COLUMNS["in_scale"]] = input_scale(schedule, row.level)
        line[COLUMNS["k_x"] : COLUMNS["k_out"] + 1] = read_output(schedule, target, "x0", row.level)
        line[COLUMNS["scale"]] = dose.scale
        beside[: len(_FLAGS)] = dose.guided, dose.changed, dose.moved, image.apart_at(dose)
        for source, to in pairs:
            column = _MORE[f"{source}>{to}.x"]
            beside[column : column + 2] = _numbers(schedule, target, source, to, row.level, dose)
    return lines, more


def _pairs_of(image: ImageGuidance) -> list[tuple[str, str]]:
    """The spaces between which the rules of an image take predictions."""
    guidance = image.bound.guidance
    used = {guidance.combination.space, *(way.space for way in guidance.corrections), "x0"} - {"raw"}
    return [(a, b) for a in ("raw", *sorted(used)) for b in sorted(used) if a != b]


def _numbers(schedule: Schedule, target: Target, source: str, to: str, level: Level, dose: Dose) -> tuple[float, float]:
    """(k_x, k) with `to` = k_x·x + k·source; NaN where it does not exist and no rule asks for it."""
    try:
        if source == "raw":
            return read_output(schedule, target, to, level)  # type: ignore[arg-type]
        return targets.convert(source, to, level, sigma_data_of(schedule))  # type: ignore[arg-type]
    except PellucidError:
        if dose.changed:
            raise
        return float("nan"), float("nan")


class _LineDoses:
    """Doses that a program reads from its table; `present` are the flags that some image has at this row."""

    alike = False

    def __init__(self, line: Mapping[str, Tensor], present: frozenset[str]) -> None:
        self.line, self.present = line, present

    @property
    def scale(self) -> Tensor:
        return self.line["scale"]

    def weight(self, extra: int) -> Tensor:
        raise NotImplementedError  # a run with extra terms is stepped plainly

    def any(self, what: str) -> bool:
        return what in self.present

    def mask(self, what: str) -> Tensor:
        return self.line[what] > 0.5


# --- What stays where it is -------------------------------------------------------------------------------------------


class _Registers:
    """The state of up to `count` images, with the lines of their plans; one batch uses it at a time."""

    def __init__(self, count: int, rows: int, draws: int, like: Tensor) -> None:
        shape = (count, *like.shape[1:])
        self.count, self.rows = count, rows
        self.kind = count, rows, draws, like.shape[1:], like.dtype, like.device
        self.x, self.anchor, self.z, self.pre, self.called, self.x0 = like.new_zeros((6, *shape)).unbind()
        self.history = like.new_zeros((DEPTH - 1, *shape)).unbind()
        self.table = like.new_zeros((count, rows, len(COLUMNS)))
        self.settled = like.new_zeros((count, rows, len(COLUMNS)))  # the same for rows that are given x0 itself
        self.more = like.new_zeros((count, rows, len(_MORE)))
        self.cursor = torch.zeros(count, dtype=torch.int64, device=like.device)
        self.active = torch.zeros(count, dtype=torch.bool, device=like.device)
        self.seeds = torch.zeros(count, dtype=torch.int64, device=like.device)
        self.draws = torch.zeros((2, count, rows, draws, 2), dtype=torch.int32, device=like.device)  # of pre and z
        self.weights = torch.zeros((2, count, rows, draws), dtype=torch.float32, device=like.device)
        self.drawn = (False, False)  # whether some row draws noise of these
        self.programs: OrderedDict[tuple[Any, ...], _Program] = OrderedDict()

    def load(
        self, state: State, lines: Sequence[tuple[Array, Array]], index: Sequence[int], noise: Sequence[_Noise]
    ) -> None:
        """Takes in the state and the plans of images, and where their noise is addressed."""
        count = len(lines)
        self.load_noise(noise)
        self.pre.zero_()
        self.z.zero_()  # whatever a run before has left: nothing times infinity is no number
        self.x[:count].copy_(state.x)
        self.anchor[:count].copy_(torch.zeros_like(state.x) if state.anchor is None else state.anchor)
        for k, register in enumerate(self.history):
            register[:count].copy_(state.history[k] if k < len(state.history) else torch.zeros_like(state.x))
        table = np.zeros((count, self.rows, len(COLUMNS) + len(_MORE)))
        for own, (base, more) in zip(table, lines, strict=True):
            own[: len(base), : len(COLUMNS)], own[: len(more), len(COLUMNS) :] = base, more
        both = torch.from_numpy(table).to(self.table)  # one copy, from float64
        self.table[:count], self.more[:count] = both[:, :, : len(COLUMNS)], both[:, :, len(COLUMNS) :]
        self.settled[:count] = self.table[:count]
        self.settled[:count, :, COLUMNS["k_x"]], self.settled[:count, :, COLUMNS["k_out"]] = 0.0, 1.0
        on = torch.arange(self.count) < count
        self.active.copy_(on)
        self.cursor.copy_(torch.tensor([*index, *([0] * (self.count - count))]))

    def load_noise(self, noise: Sequence[_Noise]) -> None:
        """The seeds, and for every row (interval, visit) and weight of its draws; images beyond these draw nothing."""
        seeds = np.zeros(self.count, np.uint64)
        draws, weights = np.zeros(self.draws.shape, np.uint32), np.zeros(self.weights.shape, np.float32)
        for i, (seed, plan) in enumerate(noise):
            seeds[i] = seed
            for k, row in enumerate(plan.rows):
                for kind, own in enumerate((row.pre_draws, row.draws)):
                    for j, one in enumerate(own):
                        draws[kind, i, k, j] = one.interval & WORD, one.visit & WORD
                        weights[kind, i, k, j] = one.weight
        self.drawn = bool(weights[0].any()), bool(weights[1].any())
        self.seeds.copy_(torch.from_numpy(seeds.view(np.int64)))
        self.draws.copy_(torch.from_numpy(draws.view(np.int32)))
        self.weights.copy_(torch.from_numpy(weights))

    def state(self, count: int, depth: int) -> State:
        """The registers of the images, as views."""
        return State(self.x[:count], self.anchor[:count], tuple(p[:count] for p in self.history[:depth]))


@dataclass(frozen=True)
class _Pattern:
    """The calls of one step: which images make an unconditional one, and what the rules find at the rows."""

    asking: tuple[int, ...]
    flags: tuple[frozenset[str], ...]  # that some image of each group has
    ruled: bool  # whether more than the update has to be done with the outputs

    @staticmethod
    def of(run: GuidedRun, levels: Sequence[Level]) -> _Pattern:
        doses = [image.bound.at(level) for image, level in zip(run.images, levels, strict=True)]
        flags = []
        for group in run.groups:
            own = [(run.images[i], doses[i]) for i in group.at]
            present = {name for name in _FLAGS[:-1] if any(getattr(dose, name) for _, dose in own)}
            flags.append(frozenset(present | ({"apart"} if any(i.apart_at(dose) for i, dose in own) else set())))
        ruled = any(
            not group.plain and (present or group.filters) for group, present in zip(run.groups, flags, strict=True)
        )
        return _Pattern(tuple(run.asks_uncond(doses)), tuple(flags) if ruled else (), ruled)


class _Program:
    """What one graph computes, and the inputs that it reads."""

    def __init__(self, registers: _Registers, run: GuidedRun, pattern: _Pattern, calls: int, sources: Sources) -> None:
        self.registers, self.network, self.pattern = registers, run.owner.network, pattern
        self.drawn = registers.drawn
        self.schedule, self.target, self.dtype = run.owner.schedule, run.owner.target, run.owner.dtype
        device, count = registers.x.device, registers.count
        self.slot = torch.zeros(calls, dtype=torch.int64, device=device)  # whose call each one is
        self.cond_at = torch.zeros(count, dtype=torch.int64, device=device)
        self.uncond_at = torch.full((count,), -1, dtype=torch.int64, device=device)  # −1: no unconditional call
        self.own, self.nobody = torch.arange(count, device=device), torch.full_like(self.uncond_at, -1)
        self.inputs: Any = trees.over(lambda _, leaf: leaf[:1].repeat_interleave(calls, 0), "inputs", sources.inputs)
        table = sources.table
        self.times = None if table is None else table.new_zeros((_power(len(table)), table.shape[1]))
        self.time_row = torch.zeros((calls, registers.rows), dtype=torch.int64, device=device)
        self.groups = list(zip(run.groups, pattern.flags, strict=False))  # none where nothing is ruled
        self.whose = [torch.zeros(count, dtype=torch.bool, device=device) for _ in self.groups]
        self.output = registers.x
        self.graph: torch.cuda.CUDAGraph | None = None
        self.steps = 0
        self.why = ""  # it is not captured though it could be

    def load(self, run: GuidedRun, pattern: _Pattern, sources: Sources) -> None:
        """Copies the inputs of a run's calls to where the program reads them."""
        count, calls, device = len(run.images), run.calls, self.slot.device
        rows = [*(row for i in pattern.asking if (row := calls.uncond[i]) is not None), *calls.cond]
        slots = [*pattern.asking, *range(count)]
        spare = len(self.slot) - len(slots)  # calls of nobody, whose results nobody reads
        at_rows, at_slots = (torch.tensor(own + own[-1:] * spare, device=device) for own in (rows, slots))
        self.slot.copy_(at_slots)
        first, place = len(pattern.asking), {image: k for k, image in enumerate(pattern.asking)}
        self.cond_at[:count].copy_(torch.arange(first, first + count))
        self.uncond_at[:count].copy_(torch.tensor([place.get(i, -1) for i in range(count)]))

        def take(_: str, to: Tensor, leaf: Tensor) -> None:
            torch.index_select(leaf, 0, at_rows, out=to)

        trees.over(take, "inputs", self.inputs, sources.inputs)
        if self.times is not None and sources.table is not None:
            assert sources.index is not None
            self.times[: len(sources.table)].copy_(sources.table)
            own = sources.index[at_rows] if len(sources.index) > 1 else sources.index.expand(len(rows) + spare, -1)
            self.time_row.copy_(own.gather(1, self.places(run, sources)[at_slots]))
        for whose, group in zip(self.whose, run.groups, strict=False):
            members = set(group.at)
            whose.copy_(torch.tensor([i in members for i in range(len(whose))]))

    def places(self, run: GuidedRun, sources: Sources) -> Tensor:
        """(images, rows): which of the run's times each row of each image has."""
        plans = [image.plan.rows if image.plan else () for image in run.images]
        spare = self.registers.rows
        at = [[sources.place[row.time] for row in rows] + [0] * (spare - len(rows)) for rows in plans]
        return torch.tensor(at, device=self.slot.device)

    def predictions(self, count: int) -> dict[str, Tensor]:
        """The raw outputs of the last step with the prompt, and without it where some image asked for that."""
        dtype = self.registers.x.dtype
        found = {"cond": self.output[self.cond_at[:count]].to(dtype)}
        if self.pattern.asking:
            at = self.uncond_at[:count]
            found["uncond"] = self.output[torch.where(at < 0, self.cond_at[:count], at)].to(dtype)
        return found

    def step(self, capture: Capture | None) -> None:
        """One row of every image: captured when it comes the second time, and replayed from then on."""
        if self.graph is None and capture is not None and self.steps > 0:
            self.graph, self.why = capture(self.body)
            if self.graph is None:
                self.steps = -_PATIENCE  # before it is tried again
        if self.graph is not None:
            self.graph.replay()
        else:
            self.body()
        self.steps += 1

    def body(self) -> None:
        r = self.registers
        self.draw()
        at = r.cursor[:, None, None]
        line = columns_of(r.table.gather(1, at.expand(-1, 1, r.table.shape[2]))[:, 0], r.x)
        r.x.addcmul_(r.pre, line[COLUMNS["pre_noise"]])
        r.called.copy_(r.x)
        out = self.call(line)
        self.output = out
        if not self.pattern.ruled:
            self.update(r.table, out, self.cond_at, self.uncond_at)
        else:
            more = columns_of(r.more.gather(1, at.expand(-1, 1, r.more.shape[2]))[:, 0], r.x)
            numbers = {name: more[column] for name, column in _MORE.items()} | {"scale": line[COLUMNS["scale"]]}
            found = self.guide(out, numbers)
            self.update(r.settled, found.x0, self.own, self.nobody, found.uncond)
        r.cursor.add_(r.active)

    def draw(self) -> None:
        """The noise of every image's row, where its address is in the registers."""
        r = self.registers
        for drawn, register, draws, weights in zip(self.drawn, (r.pre, r.z), r.draws, r.weights, strict=True):
            if drawn:
                at = r.cursor[:, None, None]
                own = weights.gather(1, at.expand(-1, 1, weights.shape[2]))[:, 0]
                where = draws.gather(1, at[..., None].expand(-1, 1, *draws.shape[2:]))[:, 0]
                ops.kernels().normals(r.seeds, where, own, register[0].numel(), register)

    def call(self, line: Tensor) -> Tensor:
        """The network's output for the packed list of calls."""
        r = self.registers
        x = _packed_input(r, self.slot, self.dtype or r.x.dtype)
        if self.times is None:
            time = line[COLUMNS["time"]].reshape(-1)[self.slot]
            out = self.network(x, time, **self.inputs)
        else:
            row = self.time_row.gather(1, r.cursor[self.slot][:, None])[:, 0]
            out = self.network(x, hoisted=self.times[row], **self.inputs)
        return without_variance(out, x)

    def guide(self, out: Tensor, line: Mapping[str, Tensor]) -> Prediction:
        """The rules of every group, on all images; each image takes what its own make of it."""
        r = self.registers
        cond = out[self.cond_at].to(r.x.dtype)
        uncond = out[torch.where(self.uncond_at < 0, self.cond_at, self.uncond_at)].to(r.x.dtype)
        x0, apart = None, None
        for (group, flags), whose in zip(self.groups, self.whose, strict=True):
            terms = Terms(r.called, (), self.schedule, self.target, line)
            terms.put("cond", "raw", cond)
            terms.put("uncond", "raw", uncond)
            made = group.apply(terms, _LineDoses(line, flags))
            mine = whose.reshape(-1, *([1] * (cond.ndim - 1)))
            beside = made.x0 if made.uncond is None else made.uncond
            x0 = made.x0 if x0 is None else torch.where(mine, made.x0, x0)
            apart = beside if apart is None else torch.where(mine, beside, apart)
        assert x0 is not None
        wanted = any("apart" in flags or group.filters for group, flags in self.groups)
        return Prediction(x0, apart if wanted else None)

    def update(
        self, table: Tensor, out: Tensor, cond_at: Tensor, uncond_at: Tensor, uncond: Tensor | None = None
    ) -> None:
        """x, the anchor and the history become those of the next row."""
        r = self.registers
        if uncond is None and _fused(r.x):
            ops.kernels().update_rows(
                table, r.cursor, r.active, r.x, r.anchor, *r.history, r.z, out, cond_at, uncond_at, x0_out=r.x0
            )
            return
        line = table.gather(1, r.cursor[:, None, None].expand(-1, 1, table.shape[2]))[:, 0]
        columns = columns_of(line, r.x)
        cond = out[cond_at].to(r.x.dtype)
        if uncond is None:
            asks = (uncond_at >= 0).reshape(-1, *([1] * (r.x.ndim - 1)))
            other = torch.where(asks, out[uncond_at.clamp_min(0)].to(r.x.dtype), cond)
            uncond = columns[COLUMNS["k_x"]] * r.x + columns[COLUMNS["k_out"]] * other
            cond = torch.where(asks, torch.addcmul(other, cond - other, columns[COLUMNS["scale"]]), cond)
        r.x0.copy_(torch.addcmul(r.x * columns[COLUMNS["k_x"]], cond, columns[COLUMNS["k_out"]]))
        found = update(
            State(r.x, r.anchor, r.history), _EVERYTHING, line, r.x, Prediction(r.x0, uncond), r.z, DEPTH - 1
        )
        on = r.active.reshape(-1, *([1] * (r.x.ndim - 1)))
        assert found.anchor is not None
        for register, value in zip((r.x, r.anchor, *r.history), (found.x, found.anchor, *found.history), strict=True):
            register.copy_(torch.where(on, value, register))


def _fused(x: Tensor) -> bool:
    return x.dtype == torch.float32 and ops.fused(x)


def _packed_input(r: _Registers, slot: Tensor, dtype: torch.dtype) -> Tensor:
    """x of every call, scaled as the network was trained."""
    if _fused(r.x):
        packed: Tensor = ops.kernels().scaled_input(r.called, r.table, r.cursor, slot, dtype)
        return packed
    scale = r.table[:, :, COLUMNS["in_scale"]].gather(1, r.cursor[:, None]).reshape(-1, *([1] * (r.x.ndim - 1)))
    return (r.called * scale)[slot].to(dtype)


def called_through(network: Any) -> list[Any]:
    """A network as it is called, what that calls, and so on to the module that computes."""
    chain = [network]
    while not isinstance(chain[-1], nn.Module) and hasattr(chain[-1], "network"):
        chain.append(chain[-1].network)
    return chain


def _addresses(batch: Batch) -> list[_Noise] | None:
    """The seed and the plan of each running image; None where some noise is not Philox's."""
    found = []
    for entry in batch.entries:
        for image, plan in zip(entry.images, entry.running, strict=True):
            seed = 0
            if any(row.pre_draws or row.draws for row in plan.rows):
                if type(entry.noise) is not Philox:
                    return None
                seed = entry.noise.seeds[image]
            found.append((seed, plan))
    return found


# --- One batch --------------------------------------------------------------------------------------------------------


_CAPTURING = threading.Lock()  # torch captures one graph at a time in a process


@dataclass
class Capture:
    """Makes graphs on one device, whose activations share a pool."""

    device: torch.device
    pool: Any
    stream: torch.cuda.Stream
    first: torch.cuda.CUDAGraph | None = None  # of one small tensor: a pool without any graph could not be used again

    @staticmethod
    def on(device: torch.device) -> Capture:
        with torch.cuda.device(device):
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            made = Capture(device, torch.cuda.graph_pool_handle(), stream)
            made.first, _ = made(lambda: torch.zeros(1, device=device))
            return made

    def __call__(self, body: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph | None, str]:
        """What it computes as a graph; or none, and why in a word. What is wrong with it shows when it runs plainly."""
        graph = torch.cuda.CUDAGraph()
        # the outer stream comes back even where the end of the capture fails
        with _CAPTURING, torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)):
            try:
                with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                    body()
            except RuntimeError as error:  # nothing here keeps it, and with it all that was computed
                return None, "memory" if _ran_out(error) else "capture"
        return graph, ""


def _ran_out(error: BaseException | None) -> bool:
    """Whether memory ran out, in this error or in one that it came from."""
    while error is not None and not is_out_of_memory(error):
        error = error.__context__
    return error is not None


class StepGraphs:
    """The programs of a model. Registers that no batch uses wait with the graphs that were captured on them."""

    def __init__(self, most: int = _PROGRAMS) -> None:
        self.most = most
        self.lock = threading.Lock()
        self.turn = threading.Lock()  # of a step: all graphs write into one pool
        self.free: list[_Registers] = []
        self.gone: WeakSet[Any] = WeakSet()  # networks that nobody will call again
        self.captures: dict[torch.device, Capture] = {}

    def stepper(self, networks: Sequence[nn.Module], capture: bool = True) -> DeviceStepper:
        """What steps one batch; `networks` are those whose weights a graph reads."""
        return DeviceStepper(self, networks, capture)

    def capture_on(self, device: torch.device) -> Capture:
        with self.lock:
            found = self.captures[device] = self.captures.get(device) or Capture.on(device)
        return found

    def take(self, count: int, rows: int, draws: int, like: Tensor) -> _Registers:
        """Registers of a size, those used last first."""
        with self.lock:
            for registers in reversed(self.free):
                if registers.kind == (count, rows, draws, like.shape[1:], like.dtype, like.device):
                    self.free.remove(registers)
                    return registers
        with torch.inference_mode(False):  # they outlive the mode of this run
            return _Registers(count, rows, draws, torch.empty_like(like))

    def give_back(self, registers: _Registers) -> None:
        """Registers of which no batch needs anything any more; the programs used longest ago go."""
        with self.lock:
            self.free.append(registers)
            self._sweep()
            while sum(len(one.programs) for one in self.free) > self.most:
                oldest = next(one for one in self.free if one.programs)
                oldest.programs.popitem(last=False)
            self.free = [one for one in self.free if one.programs]

    def forget(self, network: Any) -> None:
        """Lets go of the programs of a network that nobody will call again, and so of its weights."""
        with self.lock:
            self.gone.add(network)
            self._sweep()

    def _sweep(self) -> None:
        """Drops the programs of networks that are gone; the lock is held."""
        for registers in self.free:
            for key, program in list(registers.programs.items()):
                if called_through(program.network)[-1] in self.gone:
                    del registers.programs[key]

    def clear(self) -> None:
        """Lets go of everything that no batch uses now."""
        with self.lock:
            self.free.clear()
            self.captures.clear()


class DeviceStepper:
    """Steps the images of one batch by programs; `why` says why the last step was plain, `plain` counts such steps."""

    def __init__(self, graphs: StepGraphs, networks: Sequence[nn.Module], capture: bool) -> None:
        self.graphs, self.networks, self.capture = graphs, networks, capture
        self.registers: _Registers | None = None
        self.run: GuidedRun | None = None  # whose images the registers hold
        self.program: tuple[Any, _Program] | None = None
        self.lines: dict[tuple[int, int], tuple[ImageGuidance, tuple[Array, Array]]] = {}  # of the images that it has
        self.state: State | None = None  # that the last step left in the registers
        self.addressed = False  # whether the program draws the noise
        self.why = ""
        self.plain: Counter[str] = Counter()  # steps that ran operation by operation, by why

    def step(self, batch: Batch) -> tuple[Tensor, Prediction, list[Mapping[str, Tensor]]] | None:
        """x as the network was called with, x0 and what led to it; the batch has its new state. None: step plainly."""
        self.why = self.refusal(batch)
        if self.why:
            self.plain[self.why] += 1
            self.close(batch)
            return None
        run: GuidedRun = batch.lanes[0].denoiser
        assert batch.state is not None
        index = [entry.index for entry in batch.entries for _ in entry.images]
        if run is not self.run:
            self.load(batch, run, batch.state, index)
        registers, count = self.registers, len(index)
        assert registers is not None
        if self.state is not None and batch.state is not self.state:  # a constraint has changed x
            registers.x[:count].copy_(batch.state.x)
        rows = [image.plan.rows[i] for image, i in zip(run.images, index, strict=True) if image.plan is not None]
        levels = [row.level for row in rows]
        program = self.program_of(run, _Pattern.of(run, levels))
        if not self.addressed:
            batch.draw_into(registers.pre[:count], True)
            batch.draw_into(registers.z[:count], False)
        shown = any(entry.observers or entry.constraints for entry in batch.entries)
        with self.graphs.turn:
            program.step(self.graphs.capture_on(registers.x.device) if self.capture else None)
            outputs = program.predictions(count) if shown else {}
        if program.why:
            self.plain[program.why] += 1
        batch.state = self.state = registers.state(count, batch.depth)
        x, x0 = registers.called[:count], registers.x0[:count]
        if not shown:
            return x, Prediction(x0), [{} for _ in batch.entries]
        x, x0 = x.clone(), x0.clone()  # observers may keep them
        found = run.settle(x, levels, outputs)
        return x, Prediction(x0), batch.lanes[0].parts_of(found)

    def refusal(self, batch: Batch) -> str:
        """Why the images cannot be stepped by a program, in a word; nothing where they can."""
        if len(batch.lanes) != 1:
            return "lanes"
        run = batch.lanes[0].denoiser
        if not isinstance(run, GuidedRun) or any(image.plan is None for image in run.images):
            return "denoiser"
        if torch.is_grad_enabled():
            return "gradients"
        if batch.state is None or batch.state.x.dtype != torch.float32:
            return "dtype"
        if any(group.guidance.extras for group in run.groups):
            return "extra terms"
        if any(group.remembers for group in run.groups):
            return "memory of a rule"
        fixed = run is self.run and self.program is not None and self.program[1].graph is not None
        if not fixed and any(ops.watched(net) or ops.watched_inside(net) for net in self.networks):
            return "hooks"  # which a graph that is replayed would not call
        return ""

    def load(self, batch: Batch, run: GuidedRun, state: State, index: Sequence[int]) -> None:
        """Takes in other images than before: their state, their plans, their noise, and what their calls read."""
        plans = [image.plan for image in run.images if image.plan is not None]
        count, rows = bucket(len(index)), _power(max(len(plan.rows) for plan in plans))
        noise = _addresses(batch) if _fused(state.x) else None
        self.addressed = noise is not None
        most = max(len(draws) for plan in plans for row in plan.rows for draws in (row.pre_draws, row.draws))
        draws = _power(most, 1) if noise is not None and most else 0
        owned, x = self.registers, state.x
        if owned is None or owned.kind != (count, rows, draws, x.shape[1:], x.dtype, x.device):
            fresh = self.graphs.take(count, rows, draws, x)
            self.close()
            self.registers = owned = fresh
        made: dict[tuple[int, int], tuple[ImageGuidance, tuple[Array, Array]]] = {}
        lines = []
        for image in run.images:
            key = (id(image.plan), id(image.bound))  # of objects that the image holds
            held = made.get(key) or self.lines.get(key)
            made[key] = held or (image, lines_of(image, run.owner.schedule, run.owner.target))
            lines.append(made[key][1])
        self.lines = made
        owned.load(state, lines, index, noise if noise is not None and draws else ())
        run.sources = run.sources or Sources.of(run)
        self.run, self.program, self.state = run, None, None

    def program_of(self, run: GuidedRun, pattern: _Pattern) -> _Program:
        """The program of a pattern of calls, with the run's inputs in it."""
        assert self.registers is not None
        assert run.sources is not None
        if self.program is not None and self.program[0] == pattern:
            return self.program[1]
        sources, calls = run.sources, bucket(len(run.images) + len(pattern.asking))
        shapes: list[Any] = [trees.form(sources.inputs)]
        trees.over(lambda name, leaf: shapes.append((name, leaf.shape[1:], leaf.dtype)), "inputs", sources.inputs)
        rules = tuple(group.images[0].rules for group in run.groups) if pattern.ruled else ()
        weights = tuple(weight.data_ptr() for one in self.networks for weight in ops.weights_of(one))
        table = None if sources.table is None else (_power(len(sources.table)), sources.table.shape[1])
        registers, network = self.registers, run.owner.network
        *wrappers, computes = called_through(network)
        called = tuple(type(one) for one in wrappers), id(computes), hash(weights), run.owner.dtype
        forms = ops.wanted(), attention.chosen()
        key = (called, forms, calls, tuple(shapes), table, rules, pattern.flags, registers.drawn)
        program = registers.programs.get(key)
        if program is None:
            with torch.inference_mode(False):
                program = registers.programs[key] = _Program(registers, run, pattern, calls, sources)
            while len(registers.programs) > self.graphs.most:
                registers.programs.popitem(last=False)
        registers.programs.move_to_end(key)
        program.load(run, pattern, sources)
        self.program = pattern, program
        return program

    def close(self, batch: Batch | None = None) -> None:
        """Gives the registers back; a batch that goes on has copies of what is in them."""
        if self.registers is None:
            return
        if batch is not None and batch.state is not None:
            state = batch.state
            anchor = None if state.anchor is None else state.anchor.clone()
            batch.state = State(state.x.clone(), anchor, tuple(p.clone() for p in state.history))
        self.graphs.give_back(self.registers)
        self.registers = self.run = self.program = self.state = None
        self.lines = {}
