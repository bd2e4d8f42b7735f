"""Keeps one engine process running: starts it, watches it, replaces it, and runs again what was lost with it.

An image is a function of its request and its seed, so a crash costs time and not the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from pellucid.serve.errors import ApiError
from pellucid.serve.jobs import Job
from pellucid.serve.settings import ServeSettings

_RUNS = 2  # of a job whose engine died under it
_SILENT = 10.0  # seconds without a sign of life, after which an engine counts as hung
_BROKEN = "the engine cannot start:"
_LEAST = 2.0  # seconds that may pass between two signs of life on a busy machine
_BACKOFF = (0.0, 0.5, 1.0, 2.0, 5.0, 15.0, 30.0)  # seconds before the next start, by starts that failed in a row
_PREVIEWS = 4  # that a client has not fetched; older ones are dropped


@dataclass(eq=False)
class Work:
    """A job that was accepted: what became of it, and who waits for it."""

    job: Job
    result: asyncio.Future[dict[str, Any]]
    state: str = "queued"
    runs: int = 0
    sent: bool = False
    step: int = 0
    steps: int = 0
    previews: asyncio.Queue[tuple[int, bytes] | None] = field(default_factory=lambda: asyncio.Queue(_PREVIEWS))

    @property
    def started(self) -> bool:
        return self.state not in ("queued", "done", "failed")

    def show(self, item: tuple[int, bytes] | None) -> None:
        """Hands a preview to a stream; one that is slow loses the oldest."""
        if self.previews.full():
            self.previews.get_nowait()
        self.previews.put_nowait(item)


class Works:
    """Jobs that were accepted and have not ended; `told` hears of their ends, for metrics and logs."""

    def __init__(self, told: Callable[..., None]) -> None:
        self.told = told
        self.works: dict[str, Work] = {}

    def fail(self, work: Work, **facts: Any) -> None:
        work.state = "failed"
        self.works.pop(work.job.id, None)
        if not work.result.done():
            work.result.set_exception(error_of(facts))
            work.result.exception()  # nobody may be waiting any more
        work.show(None)
        self.told("failed", code=facts["code"], work=work)

    def hear_of(self, work: Work, what: str, facts: dict[str, Any]) -> None:
        if what == "stage":
            work.state = facts["stage"]
        elif what == "progress":
            work.step, work.steps = facts["step"], facts["steps"]
        elif what == "preview":
            work.show((facts["index"], facts["image"]))
        elif what == "done":
            work.state = "done"
            self.works.pop(work.job.id, None)
            if not work.result.done():
                work.result.set_result(facts)
            work.show(None)
            self.told("done", work=work, **facts)
        elif what == "failed":
            self.fail(work, **facts)


class Supervisor(Works):
    """The engine as the API sees it. All methods but the reader thread's run on the event loop."""

    def __init__(self, settings: ServeSettings, told: Callable[..., None]) -> None:
        super().__init__(told)
        self.settings = settings
        self.prices: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.models: dict[str, dict[str, Any]] = {}
        self.warm: dict[str, str] = {}
        self.engine: dict[str, Any] = {}  # its last state
        self.process: subprocess.Popen[bytes] | None = None
        self.link: Connection | None = None
        self.ready = False
        self.why = "the engine is starting."
        self.restarts = self.failed_starts = 0
        self.last_beat = self.started_at = time.monotonic()
        self.stopping = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self.watcher: asyncio.Task[None] | None = None

    # --- the process ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._spawn()
        self.watcher = asyncio.create_task(self._watch())

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "pellucid.serve.worker", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self.link = Connection(ours.detach())
        self.ready, self.last_beat, self.started_at = False, time.monotonic(), time.monotonic()
        self.link.send(replace(self.settings, keys={}))
        threading.Thread(target=self._read, args=(self.link, self.process), daemon=True).start()

    def _read(self, link: Connection, process: subprocess.Popen[bytes]) -> None:
        """In a thread of its own: passes what the engine says to the event loop, until its end."""
        assert self.loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the server is gone
            try:
                while True:
                    what, id, facts = link.recv()
                    self.loop.call_soon_threadsafe(self._hear, process, what, id, facts)
            except (EOFError, OSError):
                pass
            except Exception as error:  # half a message of a process that was killed
                self.told("fault", message=repr(error))
            process.wait()
            self.loop.call_soon_threadsafe(self._died, process)

    async def _watch(self) -> None:
        """Ends an engine that does not live any more, or whose step takes too long."""
        while True:
            await asyncio.sleep(0.2)
            now, process = time.monotonic(), self.process
            if process is None or self.stopping:
                continue
            late = now - self.started_at > self.settings.start_timeout
            busy = self.engine.get("busy", {}).get("denoise", 0.0) if self.ready else 0.0
            silent = self.ready and now - self.last_beat > min(_SILENT, max(self.settings.step_timeout, _LEAST))
            if (not self.ready and late) or silent or busy > self.settings.step_timeout:
                reason = "silent" if silent else "step" if self.ready else "start"
                self.told("hung", reason=reason)
                self.engine = {}
                self.kill()

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)

    def _died(self, process: subprocess.Popen[bytes]) -> None:
        """Counts what was running, keeps what was waiting, and starts the next engine."""
        if process is not self.process or self.stopping:
            return
        failed = not self.ready
        if not (failed and self.why.startswith(_BROKEN)):  # what it said of itself stays
            self.why = "the engine is starting again."
        self.ready, self.engine = False, {}
        self.failed_starts = self.failed_starts + 1 if failed else 0
        self.restarts += 1
        self.told("restart", code=process.returncode)
        for future in self.prices.values():
            if not future.done():
                future.set_exception(unavailable(self.why))
        for work in list(self.works.values()):
            if work.started:
                work.runs += 1
            work.sent = False
            if work.runs >= _RUNS:
                self.fail(work, code="engine_crashed", status=503, retry=True, message="the engine died twice.")
            elif work.state != "queued":
                work.state = "queued"
        delay = _BACKOFF[min(self.failed_starts, len(_BACKOFF) - 1)]
        assert self.loop is not None
        self.loop.call_later(delay, lambda: None if self.stopping else self._spawn())

    async def stop(self, grace: float) -> None:
        """Waits for what was accepted, then ends the engine."""
        until = time.monotonic() + grace
        while self.works and time.monotonic() < until:
            await asyncio.sleep(0.05)
        self.stopping = True
        if self.watcher is not None:
            self.watcher.cancel()
        for work in list(self.works.values()):
            self.fail(work, code="shutdown", status=503, retry=True, message="the server is shutting down.")
        self._send("stop", "", None)
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.process.wait, 10)
            self.kill()

    # --- jobs -------------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> Work:
        assert self.loop is not None
        work = self.works[job.id] = Work(job, self.loop.create_future())
        self._pass_on(work)
        return work

    def _pass_on(self, work: Work) -> None:
        if self.ready and not work.sent:
            work.sent = True
            self._send("submit", work.job.id, work.job)

    def cancel(self, id: str) -> None:
        """Ends a job from any stage; once it has ended this does nothing."""
        work = self.works.get(id)
        if work is None:
            return
        if work.sent:
            self._send("cancel", id, None)
        self.fail(work, code="cancelled", status=499, retry=False, message="the request was cancelled.")

    async def price(self, job: Job, timeout: float = 10.0) -> dict[str, Any]:
        """The plan of a job, its calls and what they will take."""
        if not self.ready:
            raise unavailable(self.why)
        assert self.loop is not None
        future = self.prices[job.id] = self.loop.create_future()
        self._send("price", job.id, job)
        try:
            found = await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise unavailable("the engine did not answer in time.") from None
        finally:
            del self.prices[job.id]
        if "error" in found:
            raise error_of(found["error"])
        return found

    # --- versions ---------------------------------------------------------------------------------------------------

    def examine(self, id: str, version: Any, key: str) -> None:
        """Lets the engine load a version beside the old one; `told` hears what it found."""
        self._send("trial", id, (version, key))

    def promote(self, name: str, key: str, path: str) -> None:
        """Puts a version in the place of the old one, in this engine and in those that replace it."""
        self.settings = replace(self.settings, models={**self.settings.models, name: path})
        self.warm.pop(name, None)  # the next start says what its image is
        self._send("promote", "", (name, key))

    def unload(self, key: str) -> None:
        self._send("unload", "", key)

    def _send(self, what: str, id: str, given: Any) -> None:
        if self.link is not None:
            with contextlib.suppress(OSError):  # it has just died: `_died` sends everything again
                self.link.send((what, id, given))

    # --- what the engine says ---------------------------------------------------------------------------------------

    def _hear(self, process: subprocess.Popen[bytes], what: str, id: str, facts: dict[str, Any]) -> None:
        if process is not self.process:
            return
        self.last_beat = time.monotonic()
        if what == "ready":
            self._on_ready(facts)
        elif what == "beat":
            self.engine = facts["state"]
        elif what == "priced":
            if id in self.prices and not self.prices[id].done():
                self.prices[id].set_result(facts)
        elif what == "broken":
            self.why = f"{_BROKEN} {facts['message']}"
            self.told("broken", **facts)
        elif id in self.works:
            self.hear_of(self.works[id], what, facts)
        elif not id:  # and no work that has ended here already
            self.told(what, **facts)

    def _on_ready(self, facts: dict[str, Any]) -> None:
        changed = [name for name, seen in facts["warm"].items() if self.warm.get(name, seen) != seen]
        self.models, self.failed_starts = facts["models"], 0
        if changed:
            self.why = f"the image of a fixed seed has changed since the first start: {', '.join(changed)}."
            self.told("broken", message=self.why)
            return
        self.warm |= facts["warm"]
        self.ready, self.why = True, ""
        self.told("ready", **facts)
        for work in list(self.works.values()):
            self._pass_on(work)


def unavailable(why: str) -> ApiError:
    return ApiError(503, "engine_unavailable", why, retry_after=2)


def error_of(facts: dict[str, Any]) -> ApiError:
    """A failure of a job as an answer."""
    retry = bool(facts.get("retry"))
    return ApiError(
        facts["status"],
        facts["code"],
        facts["message"],
        retry=retry,
        retry_after=1 if retry else None,
        param=facts.get("param"),
    )
