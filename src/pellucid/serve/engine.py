"""The engine: jobs pass encode → denoise → decode, each stage with a queue and a thread of its own.

Denoising keeps lanes: step batches of images that share calls of a network. Images join and leave between two steps,
whatever their samplers, steps, guidance and seeds; each turn steps the lane with the most urgent image.
"""

from __future__ import annotations

import io
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from PIL import Image

from pellucid.core.batch import Batch, Entry, StepSeen
from pellucid.core.errors import Cancelled, PellucidError, is_out_of_memory, rule
from pellucid.models import inputs as trees
from pellucid.models.guided import GuidedDenoiser
from pellucid.pipeline import memory
from pellucid.pipeline.decode import decode_together
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.prepare import Prepared
from pellucid.pipeline.recipe import write_png
from pellucid.pipeline.request import Request
from pellucid.pipeline.result import Result
from pellucid.pipeline.stages import faster_threads
from pellucid.serve.jobs import Job, request_of

STAGES = ("encode", "denoise", "decode")
_PATIENCE = (2.0, 8.0, 60.0)  # seconds: at least, per second of work, at most; a job without a deadline is late after
_PREVIEWS = 4  # that wait to be decoded; more are dropped, and denoising does not wait for them
_STEP = 0.05  # seconds that a call is taken to last where urgencies are compared
_CALLS = 30  # of a job whose plan is not made yet
_DECODED = 4  # images by one call of an autoencoder, whose memory grows with them
_TRIES = 2  # of a job that ran out of memory, the second in a smaller batch

_R = TypeVar("_R")
Emit = Callable[..., None]  # (what, job's id, facts)


class Device:
    """Where stages compute. On a CPU it is one thread, which they use by turns in the order in which they ask.

    Several threads that compute have a team of OpenMP's threads each; with more of these than cores, OpenMP lets them
    sleep between two operations, and a small network takes twice as long.
    """

    def __init__(self, cpu: bool) -> None:
        self.pool = ThreadPoolExecutor(1, "compute") if cpu else None
        if self.pool is not None:
            count = torch.get_num_threads()
            self.pool.submit(torch.set_num_threads, count).result()

    def __call__(self, work: Callable[[], _R]) -> _R:
        """What `work` returns or raises, without gradients."""

        def run() -> _R:
            with torch.inference_mode(False), torch.no_grad():
                return work()

        return run() if self.pool is None else self.pool.submit(run).result()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()


@dataclass(eq=False)
class Task:
    """A job in the engine: how far it is, and when each stage began."""

    job: Job
    pipe: Pipeline
    times: dict[str, float] = field(default_factory=dict)  # seconds that each stage took, and that it waited
    since: float = field(default_factory=time.monotonic)
    cancelled: str = ""  # why, in a word
    tries: int = 0
    trace: list[dict[str, float]] = field(default_factory=list)
    limit: int = 1 << 16  # images that may be stepped with it, by the memory that they take
    prepared: Prepared | None = None
    entry: Entry | None = None

    @property
    def work(self) -> int:
        """Calls of the network that are left."""
        if self.prepared is None:
            return _CALLS
        return len(self.prepared.plan.rows) - (self.entry.index if self.entry else 0)

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.times[name] = self.times.get(name, 0.0) + now - self.since
        self.since = now

    def over(self, now: float) -> str:
        """Why it should end now, in a word; nothing while it should not."""
        late = self.job.deadline is not None and now > self.job.deadline
        return self.cancelled or ("deadline" if late else "")


@dataclass(eq=False)
class Lane:
    """A step batch of images whose calls go together: `limit` of them, and a quarter more that are short."""

    key: Any
    batch: Batch
    limit: int
    tasks: dict[int, Task] = field(default_factory=dict)  # by the identity of their entries
    seconds: dict[int, float] = field(default_factory=dict)  # of a step, by the number of images

    def takes(self, task: Task) -> bool:
        """Whether a task may join now; places beyond the limit are for those with at most half of the most work."""
        longest = max((other.work for other in self.tasks.values()), default=0)
        room = self.limit if 2 * task.work > longest else with_short_ones(self.limit)
        return len(self.batch) < room


def with_short_ones(limit: int) -> int:
    """The places of a lane, those that are kept for short jobs included."""
    return limit + limit // 4


class Engine:
    """Runs jobs of one or more models on one device; `emit` is told of every stage, preview, result and failure."""

    def __init__(
        self, pipes: Mapping[str, Pipeline], emit: Emit, *, capacity: int = 8, memory: int | None = None
    ) -> None:
        self.pipes, self.emit, self.capacity, self.memory = dict(pipes), emit, capacity, memory
        self.fits: dict[Any, int] = {}  # images of a model and a size that fit into the memory
        self.tasks: dict[str, Task] = {}
        self.to_encode: list[Task] = []
        self.ready: list[Task] = []
        self.to_decode: deque[Task] = deque()
        self.previews: deque[tuple[Task, int, torch.Tensor]] = deque()
        self.lanes: dict[Any, Lane] = {}
        self.limits: dict[Any, int] = {}  # of lanes that ran out of memory
        self.changed = threading.Condition()
        self.closing = False
        self.busy: dict[str, float] = {}  # since when each stage is at what it does now
        self.steps = self.images = 0  # taken, and images that they moved
        self.step_seconds: dict[Any, float] = {}  # of a model and a size, as it was lately, whatever the batch
        cpu = all(pipe.device.type == "cpu" for pipe in self.pipes.values())
        self.device = Device(cpu)
        self.cpu = cpu
        self.threads = [threading.Thread(target=self._loop, args=(stage,), name=stage, daemon=True) for stage in STAGES]
        for thread in self.threads:
            thread.start()

    # --- from outside -----------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        pipe = self.pipes.get(job.model)
        if pipe is None:
            self.emit("failed", job.id, code="model_not_found", message=f"model {job.model} is not loaded.", status=404)
            return
        with self.changed:
            self.tasks[job.id] = task = Task(job, pipe)
            self.to_encode.append(task)
            self.changed.notify_all()

    def cancel(self, id: str, why: str = "cancelled") -> None:
        """Ends a job wherever it is; once it has ended this does nothing."""
        with self.changed:
            if id in self.tasks:
                self.tasks[id].cancelled = why
                self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        for thread in self.threads:
            thread.join(10)
        self.device.close()

    def state(self) -> dict[str, Any]:
        """Queues, lanes and what each stage is at."""
        now = time.monotonic()
        with self.changed:
            waiting = {"encode": self.to_encode, "denoise": self.ready, "decode": self.to_decode}
            return {
                "queues": {name: len(held) for name, held in waiting.items()},
                "ages": {name: max((now - t.since for t in held), default=0.0) for name, held in waiting.items()},
                "lanes": [
                    {
                        "images": len(lane.batch),
                        "limit": lane.limit,
                        "shape": list(key[1]),
                        "step_ms": {count: round(1000 * s, 2) for count, s in lane.seconds.items()},
                    }
                    for key, lane in self.lanes.items()
                ],
                "busy": {stage: now - began for stage, began in self.busy.items()},
                "steps": self.steps,
                "step_images": self.images,
            }

    # --- threads ----------------------------------------------------------------------------------------------------

    def _loop(self, stage: str) -> None:
        with ExitStack() as stack:
            if self.cpu:
                torch.set_num_threads(1)  # of this thread: what is large is computed by the device's
            self._work_off(stage, stack)

    def _work_off(self, stage: str, stack: ExitStack) -> None:
        entered = False
        work = {"encode": self._encode, "denoise": self._denoise, "decode": self._decode}[stage]
        while True:
            with self.changed:
                self._drop_ended()
                idle = False
                while not self.closing and not (found := self._next(stage)):
                    idle = True
                    if entered:
                        self.device(stack.close)
                        entered = False
                    self.changed.wait(0.5)  # deadlines pass without a word
                    self._drop_ended()
                if self.closing:
                    return
                self.busy[stage] = time.monotonic()
            try:
                if idle and stage == "denoise":  # from here on, until there is nothing to do
                    first = next(iter(self.pipes.values()))
                    choice = faster_threads(first.components.network, first.device)
                    self.device(partial(stack.enter_context, choice))
                    entered = True
                work(found)
            except Exception as error:  # of the engine itself: nobody would see why it stands still
                self.emit("fault", "", message=f"{stage}: {type(error).__name__}: {error}")
            finally:
                with self.changed:
                    self.busy.pop(stage, None)
                    self.changed.notify_all()

    def _next(self, stage: str) -> Any:
        """What a stage does next; None where there is nothing. The lock is held."""
        if stage == "encode":
            # what is encoded holds memory until it ends: no more than fills the lanes twice
            if not self.to_encode or len(self.ready) >= 2 * self.capacity:
                return None
            task = min(self.to_encode, key=self._urgency)
            self.to_encode.remove(task)
            return task
        if stage == "decode":
            return self._next_decode() or (self.previews.popleft() if self.previews else None)
        self._fill_lanes()
        return min(self.lanes.values(), key=lambda lane: min(map(self._urgency, lane.tasks.values())), default=None)

    def _next_decode(self) -> list[Task]:
        """Tasks that one call of an autoencoder decodes: of one model and one size, those that wait longest."""
        if not self.to_decode:
            return []
        first = self.to_decode[0]
        assert first.entry is not None
        most = _DECODED if first.entry.result.is_cuda else 1  # a CPU decodes two images in twice the time of one
        alike = [
            task
            for task in self.to_decode
            if task.pipe is first.pipe
            and task.entry is not None
            and task.entry.result.shape == first.entry.result.shape
        ][: min(most, first.limit)]
        for task in alike:
            self.to_decode.remove(task)
        return alike

    def _urgency(self, task: Task) -> float:
        """When a job should be done: its deadline, or a time that grows with its work, so that short ones pass."""
        if task.job.deadline is not None:
            return task.job.deadline
        least, each, most = _PATIENCE
        return task.job.arrived + min(max(least, each * task.work * _STEP), most)

    def _drop_ended(self) -> None:
        """Takes out what waits and was cancelled or is late; what runs is seen between two steps. The lock is held."""
        now = time.monotonic()
        for held in (self.to_encode, self.ready, self.to_decode):
            for task in [task for task in held if task.over(now)]:
                held.remove(task)  # type: ignore[attr-defined]
                self._end(task, Cancelled(task.over(now)))

    # --- encode -----------------------------------------------------------------------------------------------------

    def _encode(self, task: Task) -> None:
        self.emit("stage", task.job.id, stage="encode")
        try:
            self.device(partial(self._prepare, task))
        except Exception as error:
            self._fail(task, error)
            return
        task.lap("encode")
        with self.changed:
            self.ready.append(task)
            self.changed.notify_all()

    def _prepare(self, task: Task) -> None:
        task.lap("wait")
        request = request_of(task.job)
        task.limit = self.most_images(task, request)
        watch = [partial_previews(self, task)] if task.job.previews else []
        watch += [progress(self, task)] if task.job.progress else []
        watch += [StepNumbers(task)] if task.job.trace else []
        task.prepared = task.pipe.prepare(request, observers=watch)

    def most_images(self, task: Task, request: Request) -> int:
        """How many images of this size fit into the memory at once, by prediction; an error where none does."""
        if self.memory is None:
            return self.capacity
        size = task.pipe.size_of(request)
        key = (task.job.model, size, request.image is not None, len(request.controls))
        if key not in self.fits:
            count, need = self.capacity, 0
            while count:
                asked = memory.request_for(task.pipe, size=size, batch=with_short_ones(count))
                need = memory.predict(task.pipe, asked).peak.total
                if need <= self.memory:
                    break
                count //= 2
            if not count:
                must = f"one that fits into {self.memory / 2**30:.2f} GiB"
                got = f"{size[0]}x{size[1]}, which needs {need / 2**30:.2f}"
                raise PellucidError(rule("size", must, got, "Ask for a smaller image."), "memory")
            self.fits[key] = count
        return self.fits[key]

    # --- denoise ----------------------------------------------------------------------------------------------------

    def _fill_lanes(self) -> None:
        """Lets the most urgent of what is ready join."""
        for task in sorted(self.ready, key=self._urgency):
            assert task.prepared is not None
            key = lane_key(task.prepared)
            lane = self.lanes.get(key)
            if lane is None:
                limit = min(self.limits.get(key, self.capacity), task.limit)
                stepper = task.pipe.stepper(task.prepared.networks)
                lane = Lane(key, Batch(stepper=stepper), limit)
            if not lane.takes(task):
                continue
            self.ready.remove(task)
            self._join(lane, task)
            if lane.tasks:
                self.lanes[key] = lane

    def _join(self, lane: Lane, task: Task) -> None:
        prepared = task.prepared
        assert prepared is not None
        try:
            task.entry = Entry(
                [prepared.plan] * prepared.settings.count,
                prepared.denoiser,  # type: ignore[arg-type]
                prepared.start,
                prepared.noise,
                prepared.observers,
                prepared.constraints,
                lambda: bool(task.over(time.monotonic())),
            )
            with torch.inference_mode(False), torch.no_grad():
                lane.batch.join(task.entry)
        except Exception as error:
            self._fail(task, error)
            return
        lane.tasks[id(task.entry)] = task
        task.lap("wait")
        self.emit("stage", task.job.id, stage="denoise")

    def _denoise(self, lane: Lane) -> None:
        count, began = len(lane.batch), time.monotonic()
        left = self.device(partial(step, lane.batch))
        took = time.monotonic() - began
        before = lane.seconds.get(count, took)
        lane.seconds[count] = 0.8 * before + 0.2 * took
        some = next(iter(lane.tasks.values()))
        if some.prepared is not None:
            self.step_seconds[some.job.model, some.prepared.settings.size] = lane.seconds[count]
        self.steps, self.images = self.steps + 1, self.images + count
        self.emit("step", "", images=count, limit=lane.limit, seconds=took)
        ended = [lane.tasks.pop(id(entry)) for entry in left]
        if not lane.tasks:
            with self.changed:
                self.lanes = {key: one for key, one in self.lanes.items() if one is not lane}
            if lane.batch.stepper is not None:
                lane.batch.stepper.close()
        if any(task.entry is not None and is_out_of_memory(task.entry.error) for task in ended):
            self._shrink(lane, count)
        for task in ended:
            assert task.entry is not None
            task.lap("denoise")
            if task.entry.error is not None:
                self._fail(task, task.entry.error)
                continue
            with self.changed:
                self.to_decode.append(task)
                self.changed.notify_all()

    def _shrink(self, lane: Lane, count: int) -> None:
        """Runs a lane that had no memory with half as many images from now on."""
        self.limits[lane.key] = lane.limit = max(1, count // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # --- decode -----------------------------------------------------------------------------------------------------

    def _decode(self, item: Any) -> None:
        if isinstance(item, tuple):
            self._preview(*item)
            return
        tasks: list[Task] = item
        for task in tasks:
            self.emit("stage", task.job.id, stage="decode")
        try:
            results = self.device(partial(decoded, tasks))
        except Exception as error:
            results = [error] * len(tasks)  # type: ignore[list-item]
        for task, result in zip(tasks, results, strict=True):
            if isinstance(result, Exception):
                self._fail(task, result)
                continue
            images = [encoded(image, recipe) for image, recipe in zip(result.images, result.recipes, strict=True)]
            self._answer(task, result, images)

    def _answer(self, task: Task, result: Result, images: list[bytes]) -> None:
        task.lap("decode")
        if why := task.over(time.monotonic()):
            self._end(task, Cancelled(why))
            return
        facts = {
            "images": images,
            "seeds": [recipe.seed for recipe in result.recipes],
            "recipes": [recipe.to_json() for recipe in result.recipes],
            "notes": list(result.notes),
            "calls": result.plan.nfe,
            "times": {name: round(seconds, 4) for name, seconds in task.times.items()},
        }
        if task.job.trace:
            facts["trace"] = task.trace
        self._forget(task)
        self.emit("done", task.job.id, **facts)

    def _preview(self, task: Task, index: int, x0: torch.Tensor) -> None:
        assert task.prepared is not None
        if task.job.id not in self.tasks or task.cancelled:
            return
        try:
            (found,) = self.device(partial(decode_together, [task.prepared.latents(x0)]))
        except Exception:  # the image itself is what counts
            return
        if not isinstance(found, PellucidError):
            self.emit("preview", task.job.id, index=index, image=encoded(found.images[0], None))

    # --- ends -------------------------------------------------------------------------------------------------------

    def _forget(self, task: Task) -> None:
        with self.changed:
            self.tasks.pop(task.job.id, None)
            task.prepared = task.entry = None

    def _fail(self, task: Task, error: BaseException) -> None:
        """Answers a job that failed; one that ran out of memory is tried again, alone where it has to be."""
        if is_out_of_memory(error) and task.tries + 1 < _TRIES and not task.over(time.monotonic()):
            task.tries, task.entry, task.prepared = task.tries + 1, None, None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            with self.changed:
                self.emit("stage", task.job.id, stage="retry")
                self.to_encode.append(task)
                self.changed.notify_all()
            return
        self._end(task, error)

    def _end(self, task: Task, error: BaseException) -> None:
        why = task.over(time.monotonic())
        self._forget(task)
        times = {name: round(seconds, 4) for name, seconds in task.times.items()}
        self.emit("failed", task.job.id, times=times, **reason_of(error, why))


def reason_of(error: BaseException, why: str = "") -> dict[str, Any]:
    """The code, message and HTTP status of a failure, and whether another try may succeed."""
    if why == "deadline" or isinstance(error, Cancelled):
        late = why == "deadline"
        message = "the deadline passed before the image was done." if late else "the request was cancelled."
        return {"code": why or "cancelled", "message": message, "status": 504 if late else 499, "retry": False}
    if is_out_of_memory(error):
        message = "memory ran out, also in a smaller batch. Ask for a smaller image, or again later."
        return {"code": "out_of_memory", "message": message, "status": 503, "retry": True}
    if isinstance(error, PellucidError):
        broken = error.code in ("nan", "overflow", "not-finite")
        return {"code": error.code, "message": str(error), "status": 500 if broken else 400, "retry": False}
    message = f"{type(error).__name__} while the image was made."
    return {"code": "internal_error", "message": message, "status": 500, "retry": False}


def lane_key(prepared: Prepared) -> tuple[Any, ...]:
    """What images share that can be stepped together: weights, latent shape, form of inputs, kinds of rules."""
    start, denoiser = prepared.start, prepared.denoiser
    networks = tuple(map(id, prepared.networks))
    if not isinstance(denoiser, GuidedDenoiser):  # ControlNets that begin late or end early: each run calls otherwise
        return networks, tuple(start.shape[1:]), id(prepared)
    shapes: list[Any] = [trees.form(denoiser.cond)]
    trees.over(lambda name, leaf: shapes.append((name, leaf.shape[1:], leaf.dtype)), "inputs", denoiser.cond)
    rules = tuple(sorted(type(act).__name__ for own in denoiser.guidances for act in own.acts))
    return networks, tuple(start.shape[1:]), start.dtype, tuple(shapes), rules


def step(batch: Batch) -> list[Entry]:
    """One step of a batch, and who leaves it; an error that is nobody's own is everybody's."""
    try:
        left = batch.step()
        if batch.state is not None and batch.state.x.is_cuda:
            torch.cuda.synchronize(batch.state.x.device)
    except Exception as error:
        left = batch.entries
        for entry in left:
            entry.error = entry.error or error
    return left


def decoded(tasks: list[Task]) -> list[Result | PellucidError]:
    runs = []
    for task in tasks:
        task.lap("wait")
        assert task.prepared is not None
        assert task.entry is not None
        runs.append(task.prepared.latents(task.entry.result))
    return decode_together(runs)


def encoded(image: Image.Image, recipe: Any) -> bytes:
    """A PNG's bytes, with the recipe in it."""
    whole = io.BytesIO()
    write_png(image, whole, recipe)
    return whole.getvalue()


def partial_previews(engine: Engine, task: Task) -> Callable[[StepSeen], None]:
    """Hands x0 of evenly spaced steps to the decoder, unless it has enough to do."""
    left = {}

    def watch(seen: StepSeen) -> None:
        if not left:
            assert task.prepared is not None
            rows, count = len(task.prepared.plan.rows), task.job.previews
            left.update({round((k + 1) * rows / (count + 1)): k for k in range(count)}, none=-1)
        index = left.get(seen.index + 1)
        if index is not None:
            with engine.changed:
                if len(engine.previews) < _PREVIEWS:
                    engine.previews.append((task, index, seen.x0[:1].clone()))
                    engine.changed.notify_all()

    return watch


def progress(engine: Engine, task: Task) -> Callable[[StepSeen], None]:
    def watch(seen: StepSeen) -> None:
        assert task.prepared is not None
        engine.emit("progress", task.job.id, step=seen.index + 1, steps=len(task.prepared.plan.rows))

    return watch


@dataclass
class StepNumbers:
    """Writes the numbers of each step into a task: level, told time, root mean squares of x and x0, seconds so far."""

    task: Task

    def __post_init__(self) -> None:
        self.task.trace.clear()
        self.began = time.monotonic()

    def __call__(self, seen: StepSeen) -> None:
        x, x0 = (float(tensor.float().square().mean().sqrt()) for tensor in (seen.x, seen.x0))
        level = seen.row.level
        numbers = {"alpha": level.alpha, "sigma": level.sigma, "time": seen.row.time, "rms_x": x, "rms_x0": x0}
        self.task.trace.append({"step": seen.index, **numbers, "seconds": round(time.monotonic() - self.began, 4)})
