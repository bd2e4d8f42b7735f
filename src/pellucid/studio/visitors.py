"""Sessions of the page: each has a folder for its files, and its jobs in progress."""

from __future__ import annotations

import contextlib
import queue
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pellucid.core.errors import Cancelled
from pellucid.studio import scratch

# --- Work in threads ------------------------------------------------------------------------------------------------

Work = Callable[["Job"], Any]
_STOP = object()  # put for the follower: the work itself may take a while to notice


@dataclass
class Job:
    """Work in a thread: it reports through `tell` to its follower, and calls `cancelled` between its steps."""

    reports: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    stop: threading.Event = field(default_factory=threading.Event)
    ended: bool = False
    result: Any = None
    error: BaseException | None = None

    def tell(self, news: Any) -> None:
        self.reports.put(news)

    def cancelled(self) -> bool:
        return self.stop.is_set()

    def check(self) -> None:
        """Ends the work if it was cancelled."""
        if self.cancelled():
            raise Cancelled

    def cancel(self) -> None:
        self.stop.set()
        self.reports.put(_STOP)

    def ticks(self, total: int, what: str) -> Callable[..., None]:
        """A function that reports (words, part) at each call, and ends the work if it was cancelled."""
        done = 0

        def tick(count: int = 1) -> None:
            nonlocal done
            done += count
            self.check()
            self.tell((f"{what} {done} of {total}", done / max(total, 1)))

        return tick

    def run(self, work: Work) -> None:
        try:
            self.result = work(self)
        except BaseException as error:  # shown by the follower
            self.error = error
        self.ended = True
        self.reports.put(self)


def begin(work: Work) -> Job:
    """Starts work in a thread."""
    job = Job()
    threading.Thread(target=job.run, args=(work,), daemon=True).start()
    return job


def follow(job: Job) -> Iterator[Any]:
    """Yields the latest news until the work ends, skipping older ones; then raises the work's error, if any.

    If the job is cancelled, Cancelled is raised at once, even in the middle of a long step. A follower that goes away
    (its page was closed) cancels the work.
    """
    try:
        ended = False
        while not ended:
            news = [job.reports.get()]
            while not job.reports.empty():
                news.append(job.reports.get())
            ended = news[-1] is job
            if any(one is _STOP for one in news):
                raise Cancelled
            if latest := news[:-1] if ended else news:
                yield latest[-1]
    finally:
        job.cancel()
    if job.error is not None:
        raise job.error


# --- Sessions -------------------------------------------------------------------------------------------------------

KEPT = 8  # runs of a person whose traces stay
IDLE = 120.0  # seconds that a session lives without a page that is open
_PATIENCE = 2.0  # seconds for work to notice that all ends
_COARSE = 1.0  # seconds by which the clock of files may be late
_FOLDER = "session-"


@dataclass
class Session:
    folder: Path
    runs: dict[str, Path] = field(default_factory=dict)  # traces by what they are called, the newest last
    jobs: dict[str, Job] = field(default_factory=dict)  # by the tab that began them
    count: int = 0
    sent: set[Path] = field(default_factory=set)  # files that gradio keeps for the page, outside of the folder
    began: float = field(default_factory=time.time)
    seen: float = field(default_factory=time.monotonic)

    def new_file(self, ending: str) -> Path:
        self.count += 1
        return self.folder / f"{self.count:04d}{ending}"

    def keep(self, name: str, trace: Path) -> None:
        self.runs.pop(name, None)
        self.runs[name] = trace
        while len(self.runs) > KEPT:
            self.runs.pop(next(iter(self.runs))).unlink(missing_ok=True)

    def begin(self, tab: str, work: Work) -> Job:
        """One job per tab: the previous one is cancelled."""
        self.cancel(tab)
        self.jobs[tab] = begin(work)
        return self.jobs[tab]

    def follow(self, tab: str, work: Work) -> Iterator[Any]:
        """Begins a job; its latest news as they come, and then its result."""
        job = self.begin(tab, work)
        yield from follow(job)
        yield job.result

    def cancel(self, tab: str) -> bool:
        """Whether there was something to cancel."""
        job = self.jobs.pop(tab, None)
        if job is None or job.ended:
            return False
        job.cancel()
        return True

    @property
    def busy(self) -> bool:
        return any(not job.ended for job in list(self.jobs.values()))


@dataclass
class Sessions:
    """The sessions, by the mark that Gradio gives each browser tab."""

    held: dict[str, Session] = field(default_factory=dict)
    open: Counter[str] = field(default_factory=Counter)  # pages whose heartbeat is heard, by mark
    stay: frozenset[Path] = frozenset()  # gradio's files that belong to no session: the page itself has them
    lock: threading.RLock = field(default_factory=threading.RLock)

    def of(self, mark: str | None) -> Session:
        with self.lock:
            mark = mark or ""
            if mark not in self.held:
                place = scratch.folder() / (_FOLDER + secrets.token_hex(16))  # gradio serves what one can name
                place.mkdir(mode=0o700)
                self.held[mark] = Session(place)
            self.held[mark].seen = time.monotonic()
            return self.held[mark]

    def opened(self, mark: str) -> None:
        with self.lock:
            self.of(mark)  # from now on what comes may be its
            self.open[mark] += 1

    def closed(self, mark: str) -> None:
        """A page was closed."""
        with self.lock:
            self.open[mark] -= 1
            if self.open[mark] <= 0:
                del self.open[mark]
                self.end(mark)

    def note(self, mark: str | None, message: Any) -> None:
        """Remembers the files that a page uploaded or received, as gradio names them in its messages."""
        found = {path for path in map(Path, _paths(message)) if path.is_relative_to(scratch.folder())}
        with self.lock:
            if found and (session := self.held.get(mark or "")):  # a page that has closed is not opened again
                session.sent |= found

    def end(self, mark: str | None) -> list[Job]:
        """Cancels its work and removes its files. Returns the jobs that have not ended yet."""
        with self.lock:
            gone = self.held.pop(mark or "", None)
            if gone is None:
                return []
            under_way = [job for job in gone.jobs.values() if not job.ended]
            for tab in list(gone.jobs):
                gone.cancel(tab)
            shutil.rmtree(gone.folder, ignore_errors=True)
            self._remove_sent(gone)
            return under_way

    def end_idle(self, idle: float = IDLE) -> None:
        """Ends sessions without a heartbeat: their page is gone, or there never was one."""
        with self.lock:
            for mark, session in list(self.held.items()):
                if mark not in self.open and not session.busy and time.monotonic() - session.seen > idle:
                    self.end(mark)

    def end_all(self) -> None:
        under_way = [job for mark in list(self.held) for job in self.end(mark)]
        until = time.monotonic() + _PATIENCE
        while any(not job.ended for job in under_way) and time.monotonic() < until:
            time.sleep(0.02)

    def _remove_sent(self, gone: Session) -> None:
        """Removes what gradio keeps for a session that ended, and older files that no session uses."""
        used = self.stay.union(*(session.sent for session in self.held.values()))
        oldest = min((session.began for session in self.held.values()), default=float("inf"))
        for path in files():
            with contextlib.suppress(OSError):  # gradio may move it meanwhile
                if path not in used and (path in gone.sent or path.stat().st_mtime + _COARSE < oldest):
                    path.unlink()


def files() -> set[Path]:
    """All files that gradio keeps, in folders named by their content."""
    found = (place for place in scratch.folder().iterdir() if not place.name.startswith((_FOLDER, scratch.LOCK)))
    return {path for place in found for path in (place.rglob("*") if place.is_dir() else [place]) if path.is_file()}


def _paths(message: Any) -> list[str]:
    """Every `path` in a message."""
    if isinstance(message, dict):
        own = [message["path"]] if isinstance(message.get("path"), str) else []
        return own + _paths(list(message.values()))
    return [path for one in message for path in _paths(one)] if isinstance(message, list | tuple) else []
