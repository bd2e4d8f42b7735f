"""Where examples come from: a source gives any batch by its indices, and a feed makes batches ahead of the steps."""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.train.draws import Draws

# --- Sources --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Examples of one step, on the device that trains."""

    images: Tensor  # (B, C, H, W) float32 in [−1, 1]; or latents as the diffusion sees them
    labels: Tensor | None = None  # (B,) int64
    captions: tuple[str, ...] | None = None
    hints: Mapping[str, Tensor] = field(default_factory=dict)  # "edges" (B, 1, H, W) in [0, 1], …
    tokens: Tensor | None = None  # (B, L) int64: a window of each caption, where the source has them already


class Source(Protocol):
    """Examples 0 to len − 1. An `endless` source makes its examples, and its indices simply count up.

    A source may have `inventory`: see `inventory_of`."""

    endless: bool

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor, draws: Draws, device: torch.device) -> Batch: ...


def inventory_of(source: Source) -> dict[str, int | str]:
    """What a resumed run has to find unchanged: the number of examples, and digests of what the source lists (names and
    sizes of files, not their contents)."""
    own = getattr(source, "inventory", dict)()
    return {"count": len(source)} | {name: mark(held) for name, held in own.items()}


def mark(held: Any) -> str:
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()[:16]


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How two inventories differ, in words; empty where they do not."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return ", ".join(f"count {then.get(n)} → {now.get(n)}" if n == "count" else f"other {n}" for n in names)


# --- Batches ahead of time ------------------------------------------------------------------------------------------

_T = TypeVar("_T")


@dataclass
class _FeedState:
    """What the two threads share. They do not share the feed itself, so that a dropped feed is cleaned up."""

    room: threading.Semaphore  # for batches that are made and not taken
    stream: torch.cuda.Stream | None
    made: queue.SimpleQueue[tuple[Any, BaseException | None, Any]] = field(default_factory=queue.SimpleQueue)
    ended: threading.Event = field(default_factory=threading.Event)


class Feed(Generic[_T]):
    """The batches of steps `start`, `start + 1`, … below `stop`, made up to `ahead` of them in advance; or anything
    derived from them: dicts, lists, tuples and dataclasses of tensors.

    `make(step)` must depend on its step alone: then this changes when a batch is made, and never its content. What it
    raises is raised at the step that it was made for. On a GPU (`device`) batches are made on a stream next to the one
    that trains, which waits for them. Use it as a context manager, so that its thread ends with the block.
    """

    def __init__(
        self, make: Callable[[int], _T], start: int, stop: int, ahead: int = 2, device: torch.device | str | None = None
    ) -> None:
        if not 0 <= start <= stop:
            raise PellucidError(rule("start", f"from 0 to stop ({stop})", start), "feed")
        if not 1 <= ahead <= 64:
            raise PellucidError(rule("ahead", "from 1 to 64 batches", ahead), "feed")
        place = None if device is None else torch.device(device)
        stream = _stream_of(place) if place is not None and place.type == "cuda" else None
        if stream is not None:  # what `make` reads may still be on its way: weights, tables
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self.step, self.stop = start, stop
        self._line = _FeedState(threading.Semaphore(ahead), stream)
        self._thread = threading.Thread(
            target=_work, args=(self._line, make, start, stop), name="pellucid-feed", daemon=True
        )
        self._finish = weakref.finalize(self, _end, self._line, self._thread)  # also at the interpreter's exit
        self._thread.start()

    def __iter__(self) -> Iterator[_T]:
        return self

    def __next__(self) -> _T:
        if self.step >= self.stop or self._line.ended.is_set():
            raise StopIteration
        batch, error, ready = self._line.made.get()
        if error is not None:
            self.close()
            raise error
        if batch is None:  # closed while it waited
            raise StopIteration
        self._line.room.release()
        if self._line.stream is not None:
            hand_over(batch, ready, torch.cuda.current_stream(self._line.stream.device))
        self.step += 1
        return batch

    def close(self) -> None:
        """Ends the thread, once it is through with the batch that it makes."""
        self._finish()

    def __enter__(self) -> Feed[_T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@lru_cache(maxsize=16)
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The same for every feed of a GPU: what one stream has freed, no other takes."""
    return torch.cuda.Stream(device)


def _work(line: _FeedState, make: Callable[[int], Any], start: int, stop: int) -> None:
    """The thread: one batch after the other, until the last, an error, or the reader has left."""
    try:
        for step in range(start, stop):
            line.room.acquire()
            if line.ended.is_set():
                return
            with nullcontext() if line.stream is None else torch.cuda.stream(line.stream):
                batch = make(step)
                ready = None if line.stream is None else line.stream.record_event()
            line.made.put((batch, None, ready))
    except BaseException as error:  # whatever it is belongs to the thread that trains
        line.made.put((None, error, None))


def _end(line: _FeedState, thread: threading.Thread) -> None:
    """Signals both threads, wakes the one that waits, and joins the worker."""
    line.ended.set()
    line.room.release()
    line.made.put((None, None, None))
    if thread is not threading.current_thread() and thread.ident is not None:
        thread.join()


def hand_over(made: Any, ready: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
    """The stream that trains waits until all is made; and memory that came from the other stream, which would use it
    again as soon as the tensor is freed, is kept until this one is through with it too."""
    stream.wait_event(ready)
    for tensor in tensors_in(made):
        if tensor.is_cuda:
            tensor.record_stream(stream)


def tensors_in(nest: Any) -> Iterator[Tensor]:
    """All tensors within mappings, lists, tuples and dataclasses, however deep."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, Mapping):
        for value in nest.values():
            yield from tensors_in(value)
    elif isinstance(nest, list | tuple):
        for value in nest:
            yield from tensors_in(value)
    elif is_dataclass(nest) and not isinstance(nest, type):
        for one in fields(nest):
            yield from tensors_in(getattr(nest, one.name))
