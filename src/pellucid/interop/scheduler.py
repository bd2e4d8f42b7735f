"""The three-call API (`set_timesteps`, `scale_model_input`, `step`) as a thin view of a plan.

It fits diffusers' own pipelines unchanged. The state that the API forces on it (which row is next, the history)
lives in the running context, thread or task, and `set_timesteps` resets it: one scheduler serves many calls.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from inspect import Parameter, Signature
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from pellucid.core import schedule as schedules
from pellucid.core import target as targets
from pellucid.core.compile import default_grid
from pellucid.core.denoiser import input_scale, read_output
from pellucid.core.dialect import named as dialect_named
from pellucid.core.dialect_diffusers import discards_noise, finite_table, known_level
from pellucid.core.errors import PellucidError, rule
from pellucid.core.filters import Filter
from pellucid.core.grid import Grid
from pellucid.core.grid import named as grid_named
from pellucid.core.plan import DEPTH, Plan, Row, Weights
from pellucid.core.samplers import resolve
from pellucid.core.schedule import EDM, DiscreteVP, Level, in_frame
from pellucid.core.table import mix
from pellucid.interop import diffusers_config
from pellucid.interop.diffusers_classes import CLASSES, INTERCHANGEABLE, OFFERS_CHANGE, SECOND, STEP
from pellucid.interop.diffusers_config import SchedulerSettings
from pellucid.interop.diffusers_export import EXPORTS
from pellucid.interop.diffusers_plan import BLIND_START, compile_reading, distilled_times
from pellucid.interop.scheduler_api import DiffusersAPI, StepOutput

_TAKES_ETA = ("ddim", "tcd")  # the classes whose `step` takes eta in diffusers
_STATELESS = ("ddim", "ddpm", "ddim_inversion")  # their `step` depends on its arguments alone: any order will do
_MEMORYLESS = ("ddpm", "distilled", "inversion")  # families in which no two rows share noise
_EULERS = ("euler", "euler_a")  # before `set_timesteps`: the table, whatever the rule of the sigmas
_PRK_ROWS = 12  # the Runge-Kutta calls with which PNDM starts
_CHURN = {"s_churn": 0.0, "s_tmin": 0.0, "s_tmax": math.inf, "s_noise": 1.0}
_UNUSED = {"per_token_timesteps": None, "pred_original_sample": None}
_MOST_SINGLES = 5000  # rows compiled alone that are kept
_LOCK = threading.Lock()
_NAMED_STEP = ("eta", "generator", "variance_noise", "return_dict")  # the order for a sampler that no config named


@dataclass(frozen=True)
class _FusedRow:
    """A row with the network's raw output in the place of x0: register 2 is `out`, or p0 where it is remembered."""

    to_p0: tuple[float, float]
    x: Weights
    anchor: Weights | None
    push: bool
    noisy: bool
    discards: bool
    scale: float
    to_x0: tuple[float, float]


@dataclass
class _Run:
    """One run in one context."""

    plan: Plan
    rows: list[_FusedRow]
    timesteps: Tensor
    times: list[float]  # `timesteps` as numbers, so that no step waits for a device
    setting: dict[str, Any]
    initial: bool = False  # no `set_timesteps` yet: all training times, as diffusers' classes begin
    adopted: _Run | None = None  # the run of another context that this one takes up, until there is a later one
    index: int | None = None
    begin: int | None = None
    first_row: int = 0
    anchor: Tensor | None = None
    history: list[Tensor] = field(default_factory=list)
    noises: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def copy(self) -> _Run:
        """Itself again, as `replace` does it but faster: every step makes one."""
        made = object.__new__(_Run)
        made.__dict__.update(self.__dict__)
        return made


class Scheduler(DiffusersAPI):
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
        self._setup(SchedulerSettings("", entry.name, curve, kind, lay, options, x0_filter), dialect)
        _refuse_what_the_three_calls_cannot_carry(self._plan_for(4 if lay.name != "explicit" else None), self.reading)

    def _setup(self, reading: SchedulerSettings, dialect: str) -> None:
        self.reading, self.dialect = reading, dialect
        self.entry = resolve(reading.sampler)[0]
        self.order = self.entry.calls
        self.notes = reading.notes
        self._draws_apart = self.entry.family in _MEMORYLESS or (
            dialect == "diffusers" and reading.sampler == "dpm_singlestep"
        )
        self._runs: dict[int, tuple[ref[Any], _Run]] = {}  # by context; replaced, never changed
        self._latest: _Run | None = None
        self._singles: dict[Any, tuple[Plan, int, _FusedRow]] = {}
        self._config, self._tables = None, {}
        stands_for = reading.class_name or EXPORTS.get(reading.sampler, "")
        self._second = SECOND.get(stands_for)
        self._order = STEP.get(reading.class_name, ("return_dict",)) if reading.class_name else _NAMED_STEP
        if stands_for:
            self.__dict__["__module__"] = "diffusers"  # where a saved pipeline finds the class

    # --- what pipelines read

    @property
    def timesteps(self) -> Tensor:
        """The times of this run; before `set_timesteps`, those with which diffusers' class begins."""
        if self._run() is None and self._untouched:
            if self.entry.peer == "flow":
                return self._training_sigmas() * len(self)
            if self.entry.peer == "ipndm":
                angles = torch.linspace(math.pi / 2, 0.0, len(self) + 1, dtype=torch.float64)[:-1]
                return (torch.asin(torch.sin(angles) ** 2) * (2.0 / math.pi)).float()
            known = self.entry.peer in ("solver", "training") and self.reading.sampler not in ("pndm", "plms")
            if (known or self.reading.sampler in _EULERS) and not isinstance(self.reading.schedule, EDM):
                times = torch.arange(len(self), dtype=torch.int64 if self.entry.peer == "training" else torch.float32)
                return times if self.entry.family == "inversion" else times.flip(0)
        return self._state().timesteps

    @property
    def sigmas(self) -> Tensor:
        """sigma at each call (sigma / alpha, or the flow sigma), and the final one."""
        if self.entry.peer == "flow" and self._run() is None and self._untouched:
            return self._training_sigmas()
        plan = self._state().plan
        ratios = [r.level.ratio for r in plan.rows] + [plan.end.ratio]
        return torch.tensor(self.reading.schedule.sigma_of(ratios), dtype=torch.float32)

    @property
    def init_noise_sigma(self) -> Any:
        """What the first noise is multiplied by: a number, or a tensor where diffusers' class has one."""
        run = self._run()
        plan = run.plan if run else self._plan_for(None if self.reading.grid.name == "explicit" else 20)
        as_tensor = self._as_class and self.entry.peer == "k" and isinstance(self.reading.schedule, DiscreteVP)
        return torch.tensor(plan.initial_scale, dtype=torch.float64) if as_tensor else plan.initial_scale

    @property
    def num_inference_steps(self) -> int | None:
        run = self._run()
        if (run is None and self._untouched) or (run is not None and run.initial):
            return None
        return int(self._state().plan.grid["steps"])

    @property
    def step_index(self) -> int | None:
        run = self._own_run()
        return None if run is None else run.index

    @property
    def _step_index(self) -> int | None:
        return self.step_index

    @_step_index.setter
    def _step_index(self, index: int | None) -> None:  # some pipelines go back a step through this name
        self._keep(replace(self._state(), index=index))

    @property
    def begin_index(self) -> int | None:
        run = self._own_run()
        return None if run is None else run.begin

    @property
    def prk_timesteps(self) -> Any:
        """PNDM's times of the Runge-Kutta start."""
        return self._state().timesteps.cpu().numpy()[: self._prk_rows]

    @property
    def plms_timesteps(self) -> Any:
        """PNDM's times after the Runge-Kutta start."""
        return self._state().timesteps.cpu().numpy()[self._prk_rows :]

    @property
    def compatibles(self) -> list[type]:
        """The classes that `from_config` can change this one into: ours, under diffusers' names."""
        own = self.config["_class_name"]
        return [class_named(name) for name in (INTERCHANGEABLE if own in OFFERS_CHANGE else (own,))]

    @property
    def plan(self) -> Plan:
        """The table that this context is running."""
        return self._state().plan

    def _shown_class(self) -> type:
        """diffusers' class, or a subclass of its base where it has none for this sampler.

        Without that base a pipeline would save itself without a scheduler; with it, our `save_pretrained` refuses.
        """
        found = self._peer_class()
        base = getattr(sys.modules.get("diffusers"), "SchedulerMixin", None)
        return found if base is None or issubclass(found, base) else _subclass(base, found.__name__)

    __class__ = property(_shown_class)

    def __len__(self) -> int:
        return self.reading.schedule.num_train or int(self.reading.values.get("num_train_timesteps", 1000))

    def __deepcopy__(self, memo: dict[int, Any]) -> Scheduler:
        rebuild, given = self.__reduce__()
        return rebuild(*given)  # a run and its tensors are replaced, never changed: both may hold them

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._class or type(self), self.reading, self.dialect, self._own_run(), self._latest)

    def __repr__(self) -> str:
        r = self.reading
        return f"Scheduler({r.sampler!r}, schedule={r.schedule.name!r}, target={r.target!r}, dialect={self.dialect!r})"

    # --- the three calls

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        *,
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
        if num_inference_steps is not None and (timesteps is not None or sigmas is not None) and self._one_of:
            got = f"num_inference_steps={num_inference_steps} and {'sigmas' if timesteps is None else 'timesteps'}"
            raise PellucidError(rule("num_inference_steps", "left out with timesteps or sigmas given", got), "steps")
        if original_inference_steps is not None or strength != 1.0:
            original = original_inference_steps
            timesteps = distilled_times(self.reading, num_inference_steps, timesteps, original, strength)
            num_inference_steps = None
        setting: dict[str, Any] = {
            "steps": num_inference_steps,
            "timesteps": timesteps,
            "sigmas": sigmas,
            "mu": mu,
            "overrides": {},
        }
        run = self._begin(setting, torch.device(device or "cpu"))
        self._latest = run
        with _LOCK:  # runs of threads and tasks that have ended
            self._runs = {key: kept for key, kept in self._runs.items() if kept[0]() is not None}
        self._keep(run)

    def scale_model_input(self, sample: Tensor, timestep: Any = None, **_: Any) -> Tensor:
        """x as the network was trained to see it."""
        if self._scales_nothing:
            return sample
        run = self._state()
        if run.index is None:
            run = self._enter(run, timestep)
            self._keep(run)
        assert run.index is not None
        here = run.index - run.first_row
        if here >= len(run.rows):
            raise _over(len(run.rows))
        scale = run.rows[here].scale
        return sample if scale == 1.0 else sample * scale

    def step(
        self,
        model_output: Tensor,
        timestep: Any,
        sample: Tensor,
        *positional: Any,
        eta: float | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        variance_noise: Tensor | None = None,
        return_dict: bool = True,
        **more: Any,
    ) -> Any:
        """One row of the plan. DDIM and DDPM take the row of the given time, in any order; the others go on in order.

        Further arguments are those of the diffusers class, by name or in its order: `use_clipped_model_output` (DDIM),
        `s_churn`, `s_tmin`, `s_tmax`, `s_noise` (Euler), `order` (LMS).
        """
        if positional:
            if len(positional) > len(self._order):
                must = f"{', '.join(self._order)} after sample"
                raise PellucidError(rule("arguments", must, f"{len(positional)} of them"), "option")
            given = dict(zip(self._order, positional, strict=False))
            eta, generator = given.pop("eta", eta), given.pop("generator", generator)
            variance_noise = given.pop("variance_noise", variance_noise)
            return_dict = given.pop("return_dict", return_dict)
            more = {**given, **more}
        run = self._state().copy()  # what this step changes is kept when it is done
        churn = _CHURN
        if eta is not None or more or run.setting["overrides"]:
            churn = {**_CHURN, **{k: more.pop(k) for k in _CHURN if k in more}}
            run = self._overridden(run, eta, churn, more)
        run, (plan, here, fused) = self._row_for(run, timestep)
        if model_output.shape != sample.shape and model_output.shape[1] == 2 * sample.shape[1]:
            model_output = model_output[:, : sample.shape[1]]  # a learned variance: split off
        wide = sample if sample.dtype in (torch.float32, torch.float64) else sample.to(torch.float32)
        out = model_output if model_output.dtype == wide.dtype else model_output.to(wide.dtype)
        if churn["s_churn"]:
            wide, to_x0, previous = self._churned(run, here, wide, out, churn, generator)
        else:
            to_x0 = fused.to_x0
            draw = partial(self._noise, run, plan.rows[here], out, generator, variance_noise, churn["s_noise"])
            previous = self._move(run, plan, here, fused, wide, out, draw)
            if fused.discards:
                _noise_like(out, generator, variance_noise)  # so that the caller's generator moves as with diffusers
        if run.index == run.first_row + len(run.rows):  # the run is over: let go of its tensors
            run.anchor, run.history, run.noises = None, [], {}
        self._keep(run)
        if previous.dtype != model_output.dtype:
            previous = previous.to(model_output.dtype)
        made = StepOutput(previous, self._second, self._more_of(plan, here, fused, to_x0, wide, out))
        return made if return_dict else made.to_tuple()

    def step_prk(self, model_output: Tensor, timestep: Any, sample: Tensor, return_dict: bool = True) -> Any:
        """`step` of PNDM's Runge-Kutta start."""
        return self._pndm_step("prk", model_output, timestep, sample, return_dict)

    def step_plms(self, model_output: Tensor, timestep: Any, sample: Tensor, return_dict: bool = True) -> Any:
        """`step` of PNDM after its Runge-Kutta start."""
        return self._pndm_step("plms", model_output, timestep, sample, return_dict)

    def previous_timestep(self, timestep: Any) -> Tensor:
        """The time that a step from this one goes to; −1 is the end."""
        return torch.tensor(self._previous(self._state(), int(timestep)))

    def batch_step_no_noise(
        self, model_output: Tensor, timesteps: Tensor, sample: Tensor, eta: float = 0.0, **more: Any
    ) -> Tensor:
        """`step` without its noise at many times at once, one per entry: what ParaDiGMS pipelines call."""
        zero = torch.zeros_like(sample[:1])
        parts = zip(torch.split(model_output, 1), timesteps.reshape(-1).tolist(), torch.split(sample, 1), strict=True)
        more = {"eta": eta, **more} if self.reading.sampler in _TAKES_ETA else more
        return torch.cat([self.step(m, t, x, variance_noise=zero, **more).prev_sample for m, t, x in parts])

    def _get_variance(self, timestep: Any, prev_timestep: Any = None, **_: Any) -> Tensor:
        """The variance that DDPM puts back on the way to the previous time (Ho et al. 2020, eq. 7); tables only."""
        bar = self.alphas_cumprod
        at = int(timestep)
        before = int(self.previous_timestep(at) if prev_timestep is None else prev_timestep)
        now = bar[at]
        then = bar[before] if before >= 0 else torch.ones_like(now)
        beta = 1.0 - now / then
        if self.reading.options.get("variance") == "large":
            return beta
        return ((1.0 - then) / (1.0 - now) * beta).clamp_min(1e-20 if self.reading.sampler == "ddpm" else 0.0)

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
        self._keep(replace(self._at(run, begin_index), begin=begin_index))

    # --- inside

    @property
    def _as_class(self) -> bool:
        """Whether this is a class of diffusers, read from its config, and not a sampler by its name."""
        return bool(self.reading.values) and self.dialect == "diffusers"

    @property
    def _untouched(self) -> bool:
        """Whether this is a class of diffusers before any `set_timesteps`, in whatever thread."""
        return self._as_class and self._latest is None

    @property
    def _one_of(self) -> bool:
        """Whether steps and times exclude each other: everywhere except in flow, whose pipelines pass both."""
        return self._as_class and self.entry.peer != "flow"

    @property
    def _scales_nothing(self) -> bool:
        return (
            self.dialect == "diffusers"
            and self.entry.peer in ("training", "solver", "flow", "ipndm")
            and not isinstance(self.reading.schedule, EDM)
        )

    @property
    def _prk_rows(self) -> int:
        return _PRK_ROWS if self.reading.sampler == "pndm" else 0

    def _run(self) -> _Run | None:
        """The run of this context. Samplers without a history also take up the latest `set_timesteps` of another."""
        run, latest = self._own_run(), self._latest
        if run is None and latest is not None and self.entry.family in _MEMORYLESS:
            run = replace(latest, adopted=latest)
        return run

    def _own_run(self) -> _Run | None:
        context = _this_context()
        found = self._runs.get(id(context))
        if found is None or found[0]() is not context:
            return None
        run, latest = found[1], self._latest
        stale = latest is not None if run.initial else run.adopted is not None and run.adopted is not latest
        return None if stale else run

    def _keep(self, run: _Run) -> None:
        """Sets the run of this context. The mapping is replaced, not changed: Panorama keeps copies of `__dict__`."""
        context = _this_context()
        with _LOCK:
            self._runs = {**self._runs, id(context): (ref(context), run)}

    def _training_sigmas(self) -> Tensor:
        """The flow sigmas of all training times, with the shift that the config sets."""
        sigmas = torch.arange(len(self), 0, -1, dtype=torch.float32) / len(self)
        shift = getattr(self.reading.schedule, "shift", 1.0)  # a dynamic one depends on the image: 1 here
        return shift * sigmas / (1.0 + (shift - 1.0) * sigmas)

    def _state(self) -> _Run:
        run = self._run()
        if run is None and self._untouched:
            total = len(self)
            steps: dict[str, Any] = {"steps": total, "timesteps": None, "sigmas": None, "mu": None, "overrides": {}}
            if self.reading.sampler == "ddpm":
                steps |= {"steps": None, "timesteps": tuple(range(total - 1, -1, -1))}
            elif self.reading.sampler in _EULERS and isinstance(self.reading.schedule, DiscreteVP):
                table = finite_table(self.reading.schedule)[::-1].tolist()
                steps |= {"steps": None, "sigmas": (*table, 0.0)}
            # levels that no run has
            unlike = self.reading.sampler in _EULERS and isinstance(self.reading.schedule, EDM)
            if self.reading.sampler == "ddpm" or not (self._scales_nothing or unlike):
                run = replace(self._begin(steps, torch.device("cpu")), initial=True)
                self._keep(run)
        if run is None:
            raise PellucidError("set_timesteps must be called first in this thread or task; got no run.", "no-run")
        return run

    def _plan_for(self, steps: int | None, **setting: Any) -> Plan:
        return compile_reading(self.reading, steps, dialect=self.dialect, **setting)

    def _row_for(self, run: _Run, timestep: Any) -> tuple[_Run, tuple[Plan, int, _FusedRow]]:
        """The row of this call, in its plan; the run continues after it."""
        if timestep is not None and self.reading.sampler in _STATELESS:
            time = float(np.float32(float(timestep)))
            if run.index is None or run.times[run.index : run.index + 1] != [time]:
                if time not in run.times[run.first_row :]:
                    return run, self._single(run, time, self._previous(run, int(time)))
                run.index = run.times.index(time, run.first_row)
        elif run.index is None:
            run = self._enter(run, timestep)
        assert run.index is not None
        here = run.index - run.first_row
        if here >= len(run.rows):
            raise _over(len(run.rows))
        run.index += 1
        if timestep is not None and self.entry.family == "distilled" and self._as_class:
            time = float(timestep)
            if time != run.plan.rows[here].time:  # LCM and TCD start from the given time; the index says where they go
                after = run.plan.rows[here + 1].time if here + 1 < len(run.rows) else -1.0
                if time <= after:
                    must = f"above {after:g}, the next of scheduler.timesteps"
                    raise PellucidError(rule("timestep", must, time, "Call set_timesteps to begin again."), "timestep")
                return run, self._single(run, time, after)
        return run, (run.plan, here, run.rows[here])

    def _previous(self, run: _Run, time: int) -> int:
        """Where diffusers goes from a time: DDIM T // N lower, the others to the next of their times."""
        listed = self.reading.sampler not in ("ddim", "ddim_inversion") or run.setting["timesteps"] is not None
        if listed and time in run.times:
            following = run.times.index(time) + 1
            return int(run.times[following]) if following < len(run.times) else -1
        return max(time - len(self) // int(run.plan.grid["steps"]), -1)

    def _single(self, run: _Run, time: float, previous: float) -> tuple[Plan, int, _FusedRow]:
        """The row from one training time to another, compiled alone."""
        if not self._as_class or time != int(time):
            raise PellucidError(rule("timestep", "one of scheduler.timesteps", time), "timestep")
        overrides = run.setting["overrides"]
        key = (time, previous, *sorted(overrides.items()))
        found = self._singles.get(key)
        if found is None:
            if len(self._singles) >= _MOST_SINGLES:
                self._singles.clear()
            times = (time,) if previous < 0 else (time, previous)
            plan = self._plan_for(None, timesteps=times, overrides=overrides)
            here = len(plan.rows) - 1 if self.entry.family == "inversion" else 0
            found = self._singles[key] = plan, here, _fuse(plan, plan.rows[here], self.reading)
        return found

    def _pndm_step(self, kind: str, model_output: Tensor, timestep: Any, sample: Tensor, return_dict: bool) -> Any:
        run = self._state()
        done = 0 if run.index is None else run.index - run.first_row
        if self.entry.name not in ("pndm", "plms") or (kind == "prk") != (done < self._prk_rows):
            due = "step_prk" if done < self._prk_rows else "step_plms"
            raise PellucidError(rule("call", f"{due} at row {done} of {self.reading.sampler}", f"step_{kind}"), "pndm")
        return self.step(model_output, timestep, sample, return_dict=return_dict)

    def _begin(self, setting: dict[str, Any], device: torch.device, skip: int = 0) -> _Run:
        plan = self._plan_for(**setting, skip=skip)
        _refuse_what_the_three_calls_cannot_carry(plan, self.reading)
        times = [r.time for r in plan.rows]
        whole = (
            all(t == int(t) for t in times)
            and self.entry.peer in ("solver", "training")
            and self.dialect == "diffusers"
        )
        timesteps = torch.tensor(times, dtype=torch.int64 if whole else torch.float32, device=device)
        rows = [_fuse(plan, r, self.reading) for r in plan.rows]
        return _Run(plan, rows, timesteps, torch.tensor(times, dtype=torch.float32).tolist(), setting)

    def _enter(self, run: _Run, timestep: Any) -> _Run:
        """The run at its first call: at the begin index, at the first row, or where the timestep is."""
        time = None if run.begin is not None or timestep is None else float(timestep)
        if time is None or time == run.times[run.first_row]:
            return replace(run, index=run.first_row)
        found = [i for i, t in enumerate(run.times) if t == time]
        if not found and self._as_class and self.entry.peer == "solver":
            text = f"timestep {time:g} is not in scheduler.timesteps; as in diffusers, the last step is taken."
            warnings.warn(text, stacklevel=4)
            found = [len(run.times) - 1]
        if not found:
            raise PellucidError(rule("timestep", "one of scheduler.timesteps", time), "timestep")
        later = self._at(run, found[1] if len(found) > 1 else found[0])
        return replace(later, index=later.first_row)

    def _at(self, run: _Run, row: int) -> _Run:
        """The same run from a later row: compiled again, since a later start has no history."""
        if row == run.first_row:
            return run
        extra = BLIND_START.get(self.reading.sampler)
        if extra is not None and self.dialect == "diffusers":
            extra = 0  # whose legs are calls
        leg = max(row - extra, 0) if extra is not None else row // self.order
        if extra is None and row % self.order:
            raise PellucidError(
                rule("begin_index", f"a multiple of {self.order} for {self.reading.sampler}", row),
                "begin-index",
            )
        twice = extra == 1 and row == 1  # PLMS calls at its second time twice: the first call waits
        later = self._begin(run.setting, run.timesteps.device, skip=leg + int(twice))
        if twice:
            first = later.plan.rows[0]
            wait = Row(first.level, first.time, ((0, 1.0),), held=True)
            plan = replace(later.plan, rows=(wait, *later.plan.rows))
            later = replace(later, plan=plan, rows=[_fuse(plan, wait, self.reading), *later.rows])
        times = [r.time for r in later.plan.rows]
        if not np.array_equal(np.asarray(times, np.float32), np.asarray(run.times[row:], np.float32)):
            raise PellucidError(
                rule("begin_index", f"0 for {self.reading.sampler}: its calls depend on where it begins", row),
                "begin-index",
            )
        return replace(
            later, timesteps=run.timesteps, times=run.times, first_row=row, initial=run.initial, adopted=run.adopted
        )

    def _overridden(self, run: _Run, eta: float | None, churn: dict[str, float], more: dict[str, Any]) -> _Run:
        """The run with the options that a call sets; what this sampler does not take must be left at its default."""
        name = self.reading.sampler
        overrides: dict[str, Any] = {}
        if eta is not None:
            if name in _TAKES_ETA:
                overrides["eta"] = float(eta)
            elif eta != 0.0:
                advice = "Give it when the scheduler is made."
                raise PellucidError(rule("eta", f"0 or left out for {name}", eta, advice), "eta")
        if more.pop("use_clipped_model_output", False):
            if name != "ddim":
                raise PellucidError(rule("use_clipped_model_output", f"False for {name}", True), "option")
            overrides |= {"keep_eps": False} if self.reading.x0_filter is not None else {}
        if name == "lms" and "order" in more:
            overrides["order"] = more.pop("order")
        takes = ("s_noise",) if name == "dpmpp_sde" else tuple(_CHURN) if name == "euler" and self._as_class else ()
        unfit = {k: v for k, v in churn.items() if k not in takes and v != _CHURN[k]}
        unfit |= {k: v for k, v in more.items() if k not in _UNUSED or v is not None}
        for key, value in unfit.items():
            raise PellucidError(rule(key, f"left out for {name}", value), "option")
        overrides = {k: v for k, v in overrides.items() if v != self._default(k)}
        if overrides == run.setting["overrides"]:
            return run
        setting = {**run.setting, "overrides": overrides}
        again = self._at(self._begin(setting, run.timesteps.device), run.first_row)
        return replace(
            again, begin=run.begin, index=run.index, history=run.history, initial=run.initial, adopted=run.adopted
        )

    def _default(self, option: str) -> Any:
        """An option as the run has it where no call sets it."""
        if option == "keep_eps":
            return self.dialect == "diffusers"
        return self.reading.options.get(option, self.entry.options()[option])

    def _churned(
        self, run: _Run, here: int, x: Tensor, out: Tensor, churn: dict[str, float], generator: Any
    ) -> tuple[Tensor, tuple[float, float], Tensor]:
        """Euler with noise put in after the call, as diffusers does it: (x with the noise, to x0, the next x)."""
        row = run.plan.rows[here]
        after = run.plan.rows[here + 1].level if here + 1 < len(run.plan.rows) else run.plan.end
        sigma = row.level.sigma
        inside = churn["s_tmin"] <= sigma <= churn["s_tmax"]
        most = churn["s_churn"] / len(run.timesteps)
        raised = sigma * (1.0 + min(most, math.sqrt(2.0) - 1.0)) if inside else sigma
        if raised > sigma:
            x = x + _noise_like(out, generator, None) * (churn["s_noise"] * math.sqrt(raised**2 - sigma**2))
        kind = targets.named(self.reading.target)
        # a v model is read at the level of its call, the others at the raised one (scheduling_euler_discrete.py)
        level = row.level if kind == "v" and not isinstance(self.reading.schedule, EDM) else Level(1.0, raised)
        to_x0 = read_output(self.reading.schedule, kind, "x0", level)
        x0 = _combine(to_x0, x, out)
        return x, to_x0, x * (after.sigma / raised) + x0 * (1.0 - after.sigma / raised)

    def _more_of(
        self, plan: Plan, here: int, fused: _FusedRow, to_x0: tuple[float, float], x: Tensor, out: Tensor
    ) -> Callable[[str], Tensor]:
        """What else a step can say, by name: computed on demand."""

        def compute(name: str) -> Tensor:
            if name == "denoised":
                return self._clean(plan, here, x, out)
            if name == "pred_noised_sample":
                return self._noised(plan, here, fused, x, out)
            x0 = _combine(to_x0, x, out)
            return x0 if self.reading.x0_filter is None else self.reading.x0_filter(x0)

        return compute

    def _noised(self, plan: Plan, here: int, fused: _FusedRow, x: Tensor, out: Tensor) -> Tensor:
        """TCD's x before noise is put back: at the lower time that eta names."""
        weights = dict(fused.x)
        up = weights.pop(7, 0.0)
        moved = mix(tuple(weights.items()), [x, None, out])
        if here == len(plan.rows) - 1:
            return moved
        end = plan.rows[here + 1].level
        below = math.sqrt(max(end.ratio**2 - (up / end.alpha) ** 2, 0.0))
        return moved * (in_frame(below, plan.frame).alpha / end.alpha)

    def _move(
        self, run: _Run, plan: Plan, here: int, fused: _FusedRow, x: Tensor, out: Tensor, draw: Callable[[], Tensor]
    ) -> Tensor:
        """The registers after one call."""
        uncond: Tensor | None = None
        if self.reading.x0_filter is not None:
            uncond = _combine(fused.to_x0, x, out)
            if plan.guided and plan.basis == "eps":  # inversion: eps as it is, x0 filtered beside it
                uncond, p0 = self.reading.x0_filter(uncond), _combine(fused.to_p0, x, out)
            else:
                p0 = _combine(targets.from_x0(plan.basis, plan.rows[here].level), x, self.reading.x0_filter(uncond))
        else:
            p0 = _combine(fused.to_p0, x, out)
        z = draw() if fused.noisy else None
        registers = [x, run.anchor, p0, *run.history, *([None] * (DEPTH - 1 - len(run.history))), uncond, z]
        moved = mix(fused.x, registers)
        if fused.anchor is not None:
            run.anchor = mix(fused.anchor, registers)
        if fused.push:
            run.history = [p0, *run.history][: plan.depth]
        return moved

    def _noise(
        self, run: _Run, row: Row, out: Tensor, generator: Any, given: Tensor | None, scale: float = 1.0
    ) -> Tensor:
        """The noise of a row. Rows whose spans overlap share their intervals (DPM++ SDE), as in `run`.

        diffusers' singlestep solver draws afresh for each row; so does its dialect.
        """
        if given is not None or self._draws_apart:
            found = _noise_like(out, generator, given)
            return found if scale == 1.0 else found * scale
        known = run.noises
        addresses = [(d.interval, d.visit) for d in row.draws]
        run.noises = {a: known[a] if a in known else _noise_like(out, generator, None) for a in addresses}
        parts = [run.noises[a] * (d.weight * scale) for a, d in zip(addresses, row.draws, strict=True)]
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
        """The level of a time. In a run that a pipeline began, that of the next call: repeated times differ."""
        run = self._run()
        if run is not None and self.entry.peer != "training":
            following = 0 if run.index is None else run.index - run.first_row
            if run.begin is not None and following < len(run.plan.rows):
                return known_level(run.plan, following)
            for i, own in enumerate(run.times[run.first_row :]):
                if own == time:
                    return known_level(run.plan, i)
        line = self.entry.frame == "line" and self.reading.schedule.frame == "vp"
        frame = run.plan.frame if run is not None else "ve" if line else self.reading.schedule.frame
        return self.reading.schedule.level(time).to(frame)


def _combine(pair: tuple[float, float], x: Tensor, out: Tensor) -> Tensor:
    """k_x·x + k_out·out, without the passes over x that zeros and ones save."""
    k_x, k_out = pair
    if k_x == 0.0:
        return out if k_out == 1.0 else out * k_out
    return (x * k_x).add_(out, alpha=k_out)


def _this_context() -> Any:
    """The running task, or the thread: who calls. Its run is let go by the next `set_timesteps` after its end."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        task = None
    return task or threading.current_thread()


def _fuse(plan: Plan, row: Row, reading: SchedulerSettings) -> _FusedRow:
    """Where p0 need not be remembered, its weight goes to x and to the raw output directly: fewer passes over x."""
    kind = targets.named(reading.target)
    to_p0 = read_output(reading.schedule, kind, plan.basis, row.level)
    to_x0 = read_output(reading.schedule, kind, "x0", row.level)
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
    noisy, discards = bool(row.draws), discards_noise(plan, row)
    return _FusedRow(to_p0, x, anchor, push, noisy, discards, input_scale(reading.schedule, row.level), to_x0)


def _over(rows: int) -> PellucidError:
    return PellucidError(
        f"step must be called {rows} times per run; this is one more. Call set_timesteps.", "too-many-steps"
    )


def _refuse_what_the_three_calls_cannot_carry(plan: Plan, reading: SchedulerSettings) -> None:
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


def _noise_like(out: Tensor, generator: Any, given: Tensor | None) -> Tensor:
    """Noise as diffusers draws it: from the caller's generator(s), or torch's own."""
    if given is not None:
        return given.to(out.dtype)
    if isinstance(generator, (list, tuple)):
        parts = [torch.randn((1, *out.shape[1:]), generator=g, dtype=out.dtype, device=g.device) for g in generator]
        return torch.cat(parts).to(out.device)
    device = out.device if generator is None else generator.device
    return torch.randn(out.shape, generator=generator, dtype=out.dtype, device=device).to(out.device)


@cache
def _subclass(base: type, name: str) -> type:
    return type(name, (base,), {})


@cache
def class_named(name: str) -> type[Scheduler]:
    """The scheduler as diffusers' class `name`: made with that class's keywords, whatever class a config names."""

    def make(self: Scheduler, **config: Any) -> None:
        self._setup(diffusers_config.read({**config, "_class_name": name}), "diffusers")

    keys = [Parameter(key, Parameter.KEYWORD_ONLY, default=value) for key, value in CLASSES[name][1].items()]
    make.__signature__ = Signature([Parameter("self", Parameter.POSITIONAL_ONLY), *keys])  # type: ignore[attr-defined]
    return type(name, (Scheduler,), {"_class": name, "__init__": make, "__module__": __name__})


def _rebuild(
    kind: str | type[Scheduler], reading: SchedulerSettings, dialect: str, run: _Run | None, latest: _Run | None
) -> Scheduler:
    cls = class_named(kind) if isinstance(kind, str) else kind
    made = cls.__new__(cls)
    made._setup(reading, dialect)
    made._latest = latest
    if run is not None:
        made._keep(run)
    return made
