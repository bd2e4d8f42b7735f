"""Engines on several machines: replicas of a Ray Serve deployment, with the same API and admission in front.

Ray starts replicas, replaces those that die, and updates them one after another; a job that was in a replica that died
is run again from its seed. `pellucid serve --ray` keeps the API in its own process. `serve run pellucid.serve.ray:app`
runs it as a deployment too, with the settings of the file that PELLUCID_SERVE names.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from pellucid.serve.errors import ApiError
from pellucid.serve.jobs import Job
from pellucid.serve.settings import ServeSettings, read_settings
from pellucid.serve.supervisor import Work, Works, error_of, unavailable

NAME = "pellucid-engines"
_RUNS = 3  # of a job whose replica died under it; a replica that is going may be asked once more
_POLL = 0.25  # seconds


class EngineReplica:
    """One engine in a replica. A job is a stream of what the engine says of it."""

    def __init__(self, settings: ServeSettings) -> None:
        from pellucid.serve.worker import introduction, make_engine

        self.settings = settings
        self.loop = asyncio.get_event_loop()
        self.queues: dict[str, asyncio.Queue[tuple[str, dict[str, Any]]]] = {}
        self.engine = make_engine(settings, self.emit)
        self.known = {**introduction(self.engine), "pid": os.getpid()}

    def emit(self, what: str, id: str = "", **facts: Any) -> None:
        """From the engine's threads to the stream of the job."""
        self.loop.call_soon_threadsafe(self._pass_on, what, id, facts)

    def _pass_on(self, what: str, id: str, facts: dict[str, Any]) -> None:
        if id in self.queues:
            self.queues[id].put_nowait((what, facts))

    async def run(self, job: Job, age: float, left: float | None) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Runs a job that is `age` seconds old and has so many left: clocks of machines differ."""
        now = time.monotonic()
        job = replace(job, arrived=now - age, deadline=None if left is None else now + left)
        queue = self.queues[job.id] = asyncio.Queue()
        self.engine.submit(job)
        try:
            while True:
                what, facts = await queue.get()
                yield what, facts
                if what in ("done", "failed"):
                    return
        finally:
            self.queues.pop(job.id, None)
            self.engine.cancel(job.id)

    async def about(self) -> dict[str, Any]:
        return self.known

    async def state(self) -> dict[str, Any]:
        return {**self.engine.state(), "pid": os.getpid()}

    async def price(self, job: Job) -> dict[str, Any]:
        from pellucid.serve.worker import price

        return await asyncio.to_thread(price, self.engine, job)

    async def check_health(self) -> None:
        """Ray replaces a replica whose step takes too long."""
        busy = self.engine.state()["busy"].get("denoise", 0.0)
        if busy > self.settings.step_timeout:
            raise RuntimeError(f"a step has taken {busy:.0f} s")


def deployment(settings: ServeSettings) -> Any:
    """The engines as a deployment: `replicas` of them, each with one GPU where the settings name one."""
    gpus = 1 if (settings.device or "").startswith("cuda") else 0
    made = serve.deployment(EngineReplica).options(
        num_replicas=settings.replicas,
        max_ongoing_requests=max(2 * settings.capacity, 8),
        ray_actor_options={"num_cpus": 0.1, "num_gpus": gpus},
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=60.0,
    )
    return made.bind(replace(settings, keys={}))


class RayEngines(Works):
    """Ray's replicas as the API sees an engine. All methods run on the event loop."""

    def __init__(self, settings: ServeSettings, told: Callable[..., None]) -> None:
        super().__init__(told)
        self.settings = settings
        self.models: dict[str, dict[str, Any]] = {}
        self.warm: dict[str, str] = {}
        self.states: dict[int, tuple[float, dict[str, Any]]] = {}  # of each replica, by its process
        self.ready, self.why, self.restarts = False, "the replicas are starting.", 0
        self.started_at = time.monotonic()
        self.handle: Any = None
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.watcher = asyncio.create_task(self._watch())

    def _deploy(self) -> Any:
        """In a thread: joins the cluster, or starts a local one, and brings the replicas to these settings."""
        if not ray.is_initialized():
            ray.init(address=self.settings.ray_address, include_dashboard=False, log_to_driver=False, num_cpus=None)
        return serve.run(deployment(self.settings), name=NAME, route_prefix=None)

    async def _watch(self) -> None:
        """Deploys, then asks the replicas how they are."""
        try:
            self.handle = await asyncio.to_thread(self._deploy)
            known = await self.handle.about.remote()
        except Exception as error:
            self.why = f"the replicas cannot start: {error}"
            self.told("broken", message=self.why)
            return
        for one in (signal.SIGINT, signal.SIGTERM):  # Ray has put handlers of its own below Python's
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(one, signal.getsignal(one))
        self.models, self.warm = known["models"], known["warm"]
        self.ready, self.why = True, ""
        self.told("ready", **known)
        while True:
            with contextlib.suppress(RayError, asyncio.TimeoutError):
                state = await asyncio.wait_for(self.handle.state.remote(), 5)
                self.states[state["pid"]] = time.monotonic(), state
            await asyncio.sleep(_POLL)

    @property
    def engine(self) -> dict[str, Any]:
        """All replicas that answered lately as one."""
        now = time.monotonic()
        states = [state for when, state in self.states.values() if now - when < 5]
        if not states:
            return {}
        names = states[0]["queues"]
        return {
            "queues": {name: sum(state["queues"][name] for state in states) for name in names},
            "ages": {name: max(state["ages"][name] for state in states) for name in names},
            "lanes": [lane for state in states for lane in state["lanes"]],
            "busy": {},
            "replicas": len(states),
        }

    # --- jobs -------------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> Work:
        work = self.works[job.id] = Work(job, asyncio.get_running_loop().create_future())
        self.tasks[job.id] = asyncio.ensure_future(self._drive(work))
        self.tasks[job.id].add_done_callback(lambda _: self.tasks.pop(job.id, None))
        return work

    async def _drive(self, work: Work) -> None:
        """Runs a job on some replica; on another one where its replica dies."""
        job = work.job
        while work.runs < _RUNS:
            while not self.ready:
                await asyncio.sleep(_POLL)
            now = time.monotonic()
            left = None if job.deadline is None else job.deadline - now
            stream = self.handle.options(stream=True).run.remote(job, now - job.arrived, left)
            try:
                async for what, facts in stream:
                    if job.id in self.works:
                        self.hear_of(work, what, facts)
                if job.id not in self.works:
                    return
            except asyncio.CancelledError:
                stream.cancel()
                raise
            except Exception as error:  # Ray's, of a replica that died or is leaving
                self.told("fault", message=f"{type(error).__name__}: {error}"[:300])
            work.runs, work.state = work.runs + 1, "queued"
            self.restarts += 1
            await asyncio.sleep(_POLL)
        self.fail(work, code="engine_crashed", status=503, retry=True, message="its replicas died.")

    def cancel(self, id: str) -> None:
        work = self.works.get(id)
        if work is not None:
            if id in self.tasks:
                self.tasks[id].cancel()
            self.fail(work, code="cancelled", status=499, retry=False, message="the request was cancelled.")

    async def price(self, job: Job, timeout: float = 10.0) -> dict[str, Any]:
        if not self.ready:
            raise unavailable(self.why)
        try:
            found: dict[str, Any] = await asyncio.wait_for(self.handle.price.remote(job), timeout)
        except (RayError, TimeoutError):
            raise unavailable("no replica answered in time.") from None
        if "error" in found:
            raise error_of(found["error"])
        return found

    def examine(self, *_: Any) -> None:
        message = "with Ray, a new version comes in by a new deployment, which Ray rolls out replica by replica."
        raise ApiError(400, "rollout_by_ray", message)

    async def stop(self, grace: float) -> None:
        """Waits for what was accepted; the replicas of a local cluster end with this process."""
        until = time.monotonic() + grace
        while self.works and time.monotonic() < until:
            await asyncio.sleep(0.05)
        for work in list(self.works.values()):
            self.fail(work, code="shutdown", status=503, retry=True, message="the server is shutting down.")
        for task in list(self.tasks.values()):
            task.cancel()
        if self.watcher is not None:
            self.watcher.cancel()
        if self.settings.ray_address is None:
            await asyncio.to_thread(ray.shutdown)


# --- all of it inside Ray ---------------------------------------------------------------------------------------------


def build_api() -> Any:
    """The API as an ASGI app, made where its deployment runs."""
    from pellucid.serve.api import make_app

    return make_app(replace(_settings(), open=True), RayEngines)  # Ray's proxy stands in front


def _settings() -> ServeSettings:
    address = os.environ.get("RAY_ADDRESS", "auto")
    return read_settings(os.environ.get("PELLUCID_SERVE") or None, {"ray_address": address})


def application() -> Any:
    """One replica of the API, so that its count of what is accepted stays exact; it deploys the engines."""
    made = serve.deployment(serve.ingress(build_api)()).options(
        name="pellucid-api", num_replicas=1, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0.1}
    )
    return made.bind()


def __getattr__(name: str) -> Any:
    """`app`, for `serve run pellucid.serve.ray:app`; made when it is asked for."""
    if name == "app":
        return application()
    raise AttributeError(name)
