"""Work beside the page: it runs in a thread of its own, tells what it has, and stops when nobody waits for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pellucid.core.errors import Cancelled

Work = Callable[["Job"], Any]
STOP = object()  # told to whoever follows: the work itself may take a while to notice


@dataclass
class Job:
    """`tell` hands something to whoever follows; `cancelled` is asked by the work between its steps."""

    told: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    stop: threading.Event = field(default_factory=threading.Event)
    ended: bool = False
    result: Any = None
    error: BaseException | None = None

    def tell(self, news: Any) -> None:
        self.told.put(news)

    def cancelled(self) -> bool:
        return self.stop.is_set()

    def cancel(self) -> None:
        self.stop.set()
        self.told.put(STOP)

    def ticks(self, total: int, what: str) -> Callable[..., None]:
        """A function that tells (words, part) at each call, and ends the work where it was cancelled."""
        done = 0

        def tick(count: int = 1) -> None:
            nonlocal done
            done += count
            if self.cancelled():
                raise Cancelled
            self.tell((f"{what} {done} of {total}", done / max(total, 1)))

        return tick

    def run(self, work: Work) -> None:
        try:
            self.result = work(self)
        except BaseException as error:  # shown by whoever follows
            self.error = error
        self.ended = True
        self.told.put(self)


def begin(work: Work) -> Job:
    """Starts work in a thread."""
    job = Job()
    threading.Thread(target=job.run, args=(work,), daemon=True).start()
    return job


def follow(job: Job) -> Iterator[Any]:
    """The latest news, again and again, until the work ends; then its error is raised. Older news are passed over.

    Where somebody cancels, Cancelled is raised at once, even amid a long step. A follower that goes away (its page was
    closed) takes the work with it.
    """
    try:
        ended = False
        while not ended:
            news = [job.told.get()]
            while not job.told.empty():
                news.append(job.told.get())
            ended = news[-1] is job
            if any(one is STOP for one in news):
                raise Cancelled
            if told := news[:-1] if ended else news:
                yield told[-1]
    finally:
        job.cancel()
    if job.error is not None:
        raise job.error
