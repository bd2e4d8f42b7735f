"""The three-call API (`set_timesteps`, `scale_model_input`, `step`) as a thin view of a plan.

It fits diffusers' own pipelines unchanged. The state that the API forces on it (which row is next, the history)
lives in the running context, thread or task, and `set_timesteps` resets it: one scheduler serves many calls.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from pellucid.core import schedule as schedules
from pellucid.core import target as targets
from pellucid.core.compile import default_grid
from pellucid.core.denoiser import input_scale, read_output
from pellucid.core.dialect import named as dialect_named
from pellucid.core.errors import PellucidError, rule
from pellucid.core.filters import Filter
from pellucid.core.grid import Grid
from pellucid.core.grid import named as grid_named
from pellucid.core.loop import mix
from pellucid.core.plan import DEPTH, Plan, Row, Weights
from pellucid.core.samplers import resolve
from pellucid.core.schedule import Level
from pellucid.interop import diffusers_config, diffusers_export
from pellucid.interop.diffusers_config import FILE_NAME, Reading
from pellucid.interop.diffusers_plan import BLIND_START, compile_reading
from pellucid.interop.whole import put

TAKES_ETA = ("ddim", "tcd")  # the classes whose `step` takes eta in diffusers


class Config(dict[str, Any]):
    """A config that reads as a dict and as attributes, as diffusers' pipelines expect."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class StepOutput:
    """What `step` returns. `pred_original_sample` is computed when it is asked for."""

    prev_sample: Tensor
    _parts: tuple[Any, ...] = field(repr=False, default=())

    @property
    def pred_original_sample(self) -> Tensor:
        k_x, k_out, sample, out, x0_filter = self._parts
        x0 = sample * k_x + out * k_out
        return x0 if x0_filter is None else x0_filter(x0)

    def __getitem__(self, key: int | str) -> Tensor:
        if key in (0, "prev_sample"):
            return self.prev_sample
        if key in (1, "pred_original_sample"):
            return self.pred_original_sample
        raise IndexError(key) if isinstance(key, int) else KeyError(key)


@dataclass(frozen=True)
class FusedRow:
    """A row with the network's raw output in the place of x0: register 2 is `out`, or p0 where it is remembered."""

    to_p0: tuple[float, float]
    x: Weights
    anchor: Weights | None
    push: bool
    noisy: bool
    scale: float


@dataclass
class Run:
    """One run in one context."""

    plan: Plan
    rows: list[FusedRow]
    timesteps: Tensor
    setting: dict[str, Any]
    index: int | None = None
    begin: int | None = None
    first_row: int = 0
    anchor: Tensor | None = None
    history: list[Tensor] = field(default_factory=list)
    noises: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class Scheduler:
    """A sampler behind diffusers' scheduler API."""

    def __init__(
        self,
        sampler: str = "dpmpp_2m",
        *,
        schedule: str | schedules.Schedule = "scaled_linear",
        target: str | None = None,
        grid: str | Grid | None = None,
        dialect: str = "exact",
        x0_filter: Filter | None = None,
        **options: Any,
    ) -> None:
        entry, grid_of_name = resolve(sampler)
        curve, dialect = schedules.make(schedule), dialect_named(dialect)
        lay = grid_named(grid or grid_of_name or default_grid(entry, curve, dialect))
        if grid_of_name is not None and lay.name != grid_of_name:
            raise PellucidError(rule("grid", f"{grid_of_name}, as the sampler's name says", lay.name), "grid-twice")
        kind = curve.carries[0] if target is None else targets.named(target)
        self._setup(Reading("", entry.name, curve, kind, lay, options, x0_filter), dialect)
        refuse_what_the_three_calls_cannot_carry(self._plan_for(4 if lay.name != "explicit" else None), self.reading)

    def _setup(self, reading: Reading, dialect: str) -> None:
        self.reading, self.dialect = reading, dialect
        self.entry = resolve(reading.sampler)[0]
        self.order = self.entry.calls
        self.notes = reading.notes
        self._draws_always = dialect == "diffusers" and reading.sampler == "sa_solver"
        self._runs: WeakKeyDictionary[Any, Run] = WeakKeyDictionary()
        self._config: Config | None = None

    @classmethod
    def from_config(
        cls, config: Any, *, strict: bool = True, dialect: str = "diffusers", **overrides: Any
    ) -> Scheduler:
        """Reads a diffusers scheduler config: a dict, a file, a folder, a live `.config` or a live scheduler."""
        data = {**diffusers_config.load(config), **overrides}
        made = cls.__new__(cls)
        made._setup(diffusers_config.read(data, strict), dialect)
        return made

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], subfolder: str | None = None, **overrides: Any
    ) -> Scheduler:
        """`from_config` of a folder."""
        return cls.from_config(Path(folder) / subfolder if subfolder else Path(folder), **overrides)

    # --- what pipelines read

    @property
    def config(self) -> Config:
        if self._config is None:
            self._config = Config(self.export() if self.reading.values else diffusers_export.describe(self.reading))
        return self._config

    @property
    def _internal_dict(self) -> Config:
        return self.config

    @_internal_dict.setter
    def _internal_dict(self, value: Mapping[str, Any]) -> None:
        # diffusers' pipelines rewrite old configs (steps_offset, clip_sample) through this name
        if not self.reading.values:
            raise PellucidError(rule("config", "left as it is where the sampler was named", dict(value)), "config")
        changed = {k: v for k, v in dict(value).items() if not k.startswith("_")}
        data = {"_class_name": self.config["_class_name"], **changed}
        self._setup(diffusers_config.read(data), self.dialect)

    @property
    def timesteps(self) -> Tensor:
        return self._state().timesteps

    @property
    def sigmas(self) -> Tensor:
        """sigma at each call (sigma / alpha, or the flow sigma), and the final one."""
        plan = self._state().plan
        ratios = [r.level.ratio for r in plan.rows] + [plan.end.ratio]
        return torch.tensor(self.reading.schedule.sigma_of(ratios), dtype=torch.float32)

    @property
    def init_noise_sigma(self) -> float:
        run = self._runs.get(this_context())
        return (run.plan if run else self._plan_for(None if self.reading.grid.name == "explicit" else 20)).initial_scale

    @property
    def num_inference_steps(self) -> int:
        return int(self._state().plan.grid["steps"])

    @property
    def step_index(self) -> int | None:
        run = self._runs.get(this_context())
        return None if run is None else run.index

    @property
    def begin_index(self) -> int | None:
        run = self._runs.get(this_context())
        return None if run is None else run.begin

    @property
    def plan(self) -> Plan:
        """The table that this context is running."""
        return self._state().plan

    def __len__(self) -> int:
        return self.reading.schedule.num_train or 1000

    def __deepcopy__(self, memo: dict[int, Any]) -> Scheduler:
        made = type(self).__new__(type(self))
        made._setup(self.reading, self.dialect)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.reading, self.dialect)

    def __repr__(self) -> str:
        r = self.reading
        return f"Scheduler({r.sampler!r}, schedule={r.schedule.name!r}, target={r.target!r}, dialect={self.dialect!r})"

    # --- the three calls

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        timesteps: Sequence[float] | None = None,
        sigmas: Sequence[float] | None = None,
        mu: float | None = None,
        original_inference_steps: int | None = None,
        strength: float = 1.0,
    ) -> None:
        """Compiles the plan of this run; also resets the state of this context.

        `original_inference_steps` and `strength` are what LCM's pipelines pass: the times of the distillation, and
        the part of them that image-to-image uses.
        """
        if original_inference_steps is not None or strength != 1.0:
            timesteps = self._distilled(num_inference_steps, timesteps, original_inference_steps, strength)
            num_inference_steps = None
        setting: dict[str, Any] = {
            "steps": num_inference_steps,
            "timesteps": timesteps,
            "sigmas": sigmas,
            "mu": mu,
        }
        self._runs[this_context()] = self._begin(setting, torch.device(device or "cpu"))

    def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:
        """x as the network was trained to see it."""
        run = self._state()
        if run.index is None:
            run = self._enter(run, timestep)
        here = run.index - run.first_row  # type: ignore[operator]
        if here >= len(run.rows):
            raise over(len(run.rows))
        scale = run.rows[here].scale
        return sample if scale == 1.0 else sample * scale

    def step(
        self,
        model_output: Tensor,
        timestep: Any,
        sample: Tensor,
        eta: float | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        variance_noise: Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        """One row of the plan."""
        run = self._state()
        if eta is not None:
            run = self._with_eta(run, float(eta), timestep)
        if run.index is None:
            run = self._enter(run, timestep)
        here = run.index - run.first_row  # type: ignore[operator]
        if here >= len(run.rows):
            raise over(len(run.rows))
        fused = run.rows[here]
        if model_output.shape != sample.shape and model_output.shape[1] == 2 * sample.shape[1]:
            model_output = model_output[:, : sample.shape[1]]  # a learned variance: split off
        wide = sample if sample.dtype in (torch.float32, torch.float64) else sample.to(torch.float32)
        out = model_output if model_output.dtype == wide.dtype else model_output.to(wide.dtype)
        previous = self._move(run, fused, run.plan.rows[here], wide, out, generator, variance_noise)
        clean = None if self.reading.sampler != "lcm" else self._clean(run.plan, here, wide, out)
        run.index += 1  # type: ignore[operator]
        if here == len(run.rows) - 1:  # the run is over: let go of its tensors
            run.anchor, run.history, run.noises = None, [], {}
        if previous.dtype != model_output.dtype:
            previous = previous.to(model_output.dtype)
        if not return_dict:
            return (previous, clean) if clean is not None else (previous,)
        k_x, k_out = read_output(
            self.reading.schedule, targets.named(self.reading.target), "x0", run.plan.rows[here].level
        )
        return StepOutput(previous, (k_x, k_out, wide, out, self.reading.x0_filter))

    # --- noise for training and image-to-image

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """x at the levels of the given times: alpha·x0 + sigma·noise."""
        pairs = [self._level_for(t) for t in torch.as_tensor(timesteps).reshape(-1).tolist()]
        shape = (-1, *([1] * (original_samples.ndim - 1)))
        alpha, sigma = (
            torch.tensor(v, dtype=original_samples.dtype, device=original_samples.device).reshape(shape)
            for v in ([p.alpha for p in pairs], [p.sigma for p in pairs])
        )
        return alpha * original_samples + sigma * noise.to(original_samples.dtype)

    def scale_noise(self, sample: Tensor, timestep: Tensor, noise: Tensor) -> Tensor:
        """`add_noise` by the name and order that flow pipelines use."""
        return self.add_noise(sample, noise, timestep)

    def get_velocity(self, sample: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """The v target: alpha·noise − sigma·x0 with alpha² + sigma² = 1."""
        levels = [self.reading.schedule.level(t).to("vp") for t in torch.as_tensor(timesteps).reshape(-1).tolist()]
        shape = (-1, *([1] * (sample.ndim - 1)))
        alpha, sigma = (
            torch.tensor(v, dtype=sample.dtype, device=sample.device).reshape(shape)
            for v in ([lv.alpha for lv in levels], [lv.sigma for lv in levels])
        )
        return alpha * noise - sigma * sample

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Starts the run at a later row (image-to-image); the history is empty there, and the table knows it."""
        run = self._state()
        if not 0 <= begin_index < len(run.timesteps):
            raise PellucidError(rule("begin_index", f"from 0 to {len(run.timesteps) - 1}", begin_index), "begin-index")
        self._runs[this_context()] = self._at(run, begin_index)
        self._state().begin = begin_index

    # --- files

    def export(self) -> dict[str, Any]:
        """The config of the nearest diffusers class."""
        return diffusers_export.write(self.reading)

    def save_pretrained(self, save_directory: str | os.PathLike[str], **_: Any) -> None:
        """Writes scheduler_config.json, whole or not at all."""
        text = json.dumps(self.export(), indent=2, sort_keys=True) + "\n"
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        put(folder / FILE_NAME, text)

    # --- inside

    def _state(self) -> Run:
        run = self._runs.get(this_context())
        if run is None:
            raise PellucidError("set_timesteps must be called first in this thread or task; got no run.", "no-run")
        return run

    def _plan_for(
        self,
        steps: int | None,
        timesteps: Sequence[float] | None = None,
        sigmas: Sequence[float] | None = None,
        mu: float | None = None,
        skip: int = 0,
        eta: float | None = None,
    ) -> Plan:
        return compile_reading(
            self.reading,
            steps,
            dialect=self.dialect,
            timesteps=timesteps,
            sigmas=sigmas,
            mu=mu,
            skip=skip,
            eta=eta,
        )

    def _distilled(
        self, steps: int | None, timesteps: Sequence[float] | None, original: int | None, strength: float
    ) -> Sequence[float]:
        """Times out of the part of the distillation's times that `strength` leaves (Luo et al. 2023, alg. 3)."""
        if self.entry.family != "distilled":
            name = "original_inference_steps" if original is not None else "strength"
            raise PellucidError(rule(name, f"left out for {self.reading.sampler}", original or strength), "distilled")
        count = self.reading.grid.original if original is None else original
        total = self.reading.schedule.num_train or 1000
        if timesteps is not None:
            keep = min(int(len(timesteps) * strength), len(timesteps))
            return timesteps[len(timesteps) - keep :]
        if self.reading.sampler == "tcd" and original is not None:
            count = total  # TCD then takes any training time
        known = [float(i * (total // count) - 1) for i in range(int(count * strength), 0, -1)]
        if steps is None or not 1 <= steps <= len(known):
            raise PellucidError(rule("steps", f"from 1 to {len(known)}, the times that are left", steps), "steps")
        return [known[int(i)] for i in np.floor(np.linspace(0, len(known), steps, endpoint=False))]

    def _begin(self, setting: dict[str, Any], device: torch.device, skip: int = 0, eta: float | None = None) -> Run:
        plan = self._plan_for(**setting, skip=skip, eta=eta)
        refuse_what_the_three_calls_cannot_carry(plan, self.reading)
        told = [r.time for r in plan.rows]
        whole = (
            all(t == int(t) for t in told) and self.entry.peer in ("solver", "training") and self.dialect == "diffusers"
        )
        times = torch.tensor(told, dtype=torch.int64 if whole else torch.float32, device=device)
        rows = [fuse(plan, r, self.reading) for r in plan.rows]
        return Run(plan, rows, times, {**setting, "eta": eta})

    def _enter(self, run: Run, timestep: Any) -> Run:
        """The first call of a run: at the begin index, at the first row, or where its timestep is."""
        if run.begin is not None or timestep is None:
            run.index = run.first_row
            return run
        told = float(timestep)
        if told == float(run.timesteps[run.first_row]):
            run.index = run.first_row
            return run
        found = [i for i, t in enumerate(run.timesteps.tolist()) if t == told]
        if not found:
            raise PellucidError(rule("timestep", "one of scheduler.timesteps", told), "timestep")
        later = self._at(run, found[1] if len(found) > 1 else found[0])
        later.index = later.first_row
        self._runs[this_context()] = later
        return later

    def _at(self, run: Run, row: int) -> Run:
        """The same run from a later row: compiled again, since a later start has no history."""
        if row == run.first_row:
            return run
        extra = BLIND_START.get(self.reading.sampler)
        leg = max(row - extra, 0) if extra is not None else row // self.order
        if extra is None and row % self.order:
            raise PellucidError(
                rule("begin_index", f"a multiple of {self.order} for {self.reading.sampler}", row),
                "begin-index",
            )
        setting = {k: v for k, v in run.setting.items() if k != "eta"}
        twice = self.reading.sampler == "plms" and row == 1  # PLMS tells its second time twice: the first call waits
        later = self._begin(setting, run.timesteps.device, skip=leg + int(twice), eta=run.setting["eta"])
        if twice:
            first = later.plan.rows[0]
            wait = Row(first.level, first.time, ((0, 1.0),), held=True)
            plan = replace(later.plan, rows=(wait, *later.plan.rows))
            later = replace(later, plan=plan, rows=[fuse(plan, wait, self.reading), *later.rows])
        told = [r.time for r in later.plan.rows]
        if not np.array_equal(np.float32(told), np.float32(run.timesteps[row:].tolist())):
            raise PellucidError(
                rule("begin_index", f"0 for {self.reading.sampler}: its calls depend on where it begins", row),
                "begin-index",
            )
        return replace(later, timesteps=run.timesteps, first_row=row)

    def _with_eta(self, run: Run, eta: float, timestep: Any) -> Run:
        if self.reading.sampler not in TAKES_ETA:
            if eta != 0.0:
                raise PellucidError(
                    rule(
                        "eta",
                        f"0 or left out for {self.reading.sampler}",
                        eta,
                        "Give it when the scheduler is made.",
                    ),
                    "eta",
                )
            return run
        current = run.plan.options.get("eta", self.entry.options()["eta"])
        if current == eta:
            return run
        if run.index not in (None, run.first_row):
            raise PellucidError(rule("eta", f"the same for a whole run ({current})", eta), "eta")
        setting = {k: v for k, v in run.setting.items() if k != "eta"}
        first, begin, index = run.first_row, run.begin, run.index
        again = self._begin(setting, run.timesteps.device, eta=eta)
        again = replace(self._at(again, first), begin=begin, index=index)
        self._runs[this_context()] = again
        return again

    def _move(
        self,
        run: Run,
        fused: FusedRow,
        row: Row,
        x: Tensor,
        out: Tensor,
        generator: Any,
        variance_noise: Tensor | None,
    ) -> Tensor:
        """The registers after one call."""
        uncond: Tensor | None = None
        if self.reading.x0_filter is not None:
            k_x, k_out = read_output(self.reading.schedule, targets.named(self.reading.target), "x0", row.level)
            uncond = x * k_x + out * k_out
            if run.plan.guided and run.plan.basis == "eps":  # inversion: eps as it is, x0 filtered beside it
                uncond, p0 = self.reading.x0_filter(uncond), combine(fused.to_p0, x, out)
            else:
                p0 = combine(targets.from_x0(run.plan.basis, row.level), x, self.reading.x0_filter(uncond))
        else:
            p0 = combine(fused.to_p0, x, out)
        z = self._noise(run, row, out, generator, variance_noise) if fused.noisy else None
        if z is None and self._draws_always and run.plan.stochastic:
            noise_like(out, generator, variance_noise)  # so that the caller's generator moves as with diffusers
        registers = [x, run.anchor, p0, *run.history, *([None] * (DEPTH - 1 - len(run.history))), uncond, z]
        moved = mix(fused.x, registers)
        if fused.anchor is not None:
            run.anchor = mix(fused.anchor, registers)
        if fused.push:
            run.history = [p0, *run.history][: run.plan.depth]
        return moved

    def _noise(self, run: Run, row: Row, out: Tensor, generator: Any, given: Tensor | None) -> Tensor:
        """The noise of a row. Rows whose spans overlap share their intervals (DPM++ SDE), as in `run`.

        diffusers' singlestep solver draws afresh for each row; so does its dialect.
        """
        apart = self.dialect == "diffusers" and self.reading.sampler == "dpm_singlestep"
        if given is not None or apart:
            return noise_like(out, generator, given)
        known = run.noises
        addresses = [(d.interval, d.visit) for d in row.draws]
        run.noises = {a: known[a] if a in known else noise_like(out, generator, None) for a in addresses}
        parts = [run.noises[a] * d.weight for a, d in zip(addresses, row.draws, strict=True)]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _clean(self, plan: Plan, here: int, x: Tensor, out: Tensor) -> Tensor:
        """LCM's answer before it is noised again, which LCM's pipelines decode."""
        row = plan.rows[here]
        k_x, k_out = targets.to_x0(targets.named(self.reading.target), row.level)
        x0 = x * k_x + out * k_out
        kept = dict(row.x)
        last = here == len(plan.rows) - 1
        scale = 1.0 if last else plan.rows[here + 1].level.alpha
        found = self.reading.x0_filter(x0) if self.reading.x0_filter is not None else x0
        return (found * kept[2] + x * kept.get(0, 0.0)) / scale

    def _level_for(self, time: float) -> Level:
        """The level of a told time. In a run that a pipeline began, that of the next call: repeated times differ."""
        run = self._runs.get(this_context())
        if run is not None and self.entry.peer != "training":
            following = 0 if run.index is None else run.index - run.first_row
            if run.begin is not None and following < len(run.plan.rows):
                return run.plan.rows[following].level
            for r, told in zip(run.plan.rows, run.timesteps[run.first_row :].tolist(), strict=False):
                if told == time:
                    return r.level
        line = self.entry.frame == "line" and self.reading.schedule.frame == "vp"
        frame = run.plan.frame if run is not None else "ve" if line else self.reading.schedule.frame
        return self.reading.schedule.level(time).to(frame)


def combine(pair: tuple[float, float], x: Tensor, out: Tensor) -> Tensor:
    """k_x·x + k_out·out, without the passes over x that zeros and ones save."""
    k_x, k_out = pair
    if k_x == 0.0:
        return out if k_out == 1.0 else out * k_out
    return (x * k_x).add_(out, alpha=k_out)


def this_context() -> Any:
    """The running task, or the thread: who calls. A run is forgotten with it."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        task = None
    return task or threading.current_thread()


def fuse(plan: Plan, row: Row, reading: Reading) -> FusedRow:
    """Where p0 need not be remembered, its weight goes to x and to the raw output directly: fewer passes over x."""
    to_p0 = read_output(reading.schedule, targets.named(reading.target), plan.basis, row.level)
    x, anchor = row.x, row.anchor
    push = plan.depth > 0 and not row.held
    plain = plan.depth == 0 and anchor is None and reading.x0_filter is None
    if plain:
        weights = dict(x)
        on_p0 = weights.pop(2, 0.0)
        weights[0] = weights.get(0, 0.0) + on_p0 * to_p0[0]
        weights[2] = on_p0 * to_p0[1]
        x = tuple(sorted((r, w) for r, w in weights.items() if abs(w) > 1e-15))
        to_p0 = (0.0, 1.0)
    return FusedRow(to_p0, x, anchor, push, bool(row.draws), input_scale(reading.schedule, row.level))


def over(rows: int) -> PellucidError:
    return PellucidError(
        f"step must be called {rows} times a run; this is one more. Call set_timesteps.", "too-many-steps"
    )


def refuse_what_the_three_calls_cannot_carry(plan: Plan, reading: Reading) -> None:
    if any(row.pre_noise for row in plan.rows):
        raise PellucidError(
            f"sampler must not churn behind the three calls; got {plan.name}, whose noise would come after the model "
            "was asked. Use pellucid.run.",
            "churn",
        )
    if plan.guided and reading.x0_filter is None:
        raise PellucidError(
            f"sampler must not need the unconditional prediction behind the three calls; got {plan.name}. "
            "Use pellucid.run with a denoiser that returns a Prediction.",
            "guided",
        )


def noise_like(out: Tensor, generator: Any, given: Tensor | None) -> Tensor:
    """Noise as diffusers draws it: from the caller's generator(s), or torch's own."""
    if given is not None:
        return given.to(out.dtype)
    if isinstance(generator, (list, tuple)):
        parts = [torch.randn((1, *out.shape[1:]), generator=g, dtype=out.dtype, device=g.device) for g in generator]
        return torch.cat(parts).to(out.device)
    device = out.device if generator is None else generator.device
    return torch.randn(out.shape, generator=generator, dtype=out.dtype, device=device).to(out.device)


def _rebuild(cls: type[Scheduler], reading: Reading, dialect: str) -> Scheduler:
    made = cls.__new__(cls)
    made._setup(reading, dialect)
    return made
