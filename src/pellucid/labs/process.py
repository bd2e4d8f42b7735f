"""Code that runs beside us: a process that tells its results as lines of JSON, and can be stopped at any time."""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import IO, Any

from pellucid.core.errors import Cancelled

POLL = 0.1  # seconds between two looks at whether somebody cancelled
_DRAIN = 1.0  # seconds for the last lines of a process that ended
MOST_LINE = 64 * 2**20  # bytes of one result
LAST_WORDS = 4096  # bytes that are read of what a dying process said


class Died(Exception):  # noqa: N818
    """The process ended before it was done; the last line that it said, or how it ended."""


class Garbled(Died):
    """It told what is no result."""


def never() -> bool:
    return False


def follow(
    module: str,
    words: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    cancelled: Callable[[], bool] = never,
    timeout: float | None = None,
) -> Generator[dict[str, Any], None, None]:
    """Runs `python -m module words` and yields what it tells, as it tells it.

    Cancelling, the timeout, an error and a caller that stops listening all end the process. The timeout is for the
    whole of it, and raises TimeoutError.
    """
    told: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    until = None if timeout is None else time.monotonic() + timeout

    def look() -> None:
        if cancelled():
            raise Cancelled
        if until is not None and time.monotonic() > until:
            raise TimeoutError

    command = [sys.executable, "-X", "utf8", "-m", module, *words]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # Ctrl-C is ours to hear
        )
        assert process.stdout is not None
        reader = threading.Thread(target=pump, args=(process.stdout, told), daemon=True)
        reader.start()
        try:
            while line := waited(told, process, look):
                yield _result(line)
            while process.poll() is None:
                look()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL)
            if process.returncode != 0:
                raise Died(last_words(errors) or f"it ended with exit code {process.returncode}")
        finally:
            end(process)
            reader.join(_DRAIN)  # longer it stays only for a process that lives on


def end(process: subprocess.Popen[bytes]) -> None:
    """At once, with all that it started in its own session; what began one of its own lives on."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def pump(stream: IO[bytes], told: queue.SimpleQueue[bytes]) -> None:
    """Every line of the process, then an empty one."""
    with stream:
        while (line := stream.readline(MOST_LINE)).endswith(b"\n"):
            told.put(line)
    told.put(b"")


def waited(told: queue.SimpleQueue[bytes], process: subprocess.Popen[bytes], look: Callable[[], None]) -> bytes:
    """The next line, as soon as it is there; an empty one after the last, even if another process holds the pipe."""
    ended = False
    while True:
        look()
        with contextlib.suppress(queue.Empty):
            return told.get(timeout=_DRAIN if ended else POLL)
        if ended:
            return b""
        ended = process.poll() is not None


def _result(line: bytes) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise Garbled("it told what is no result")
    return told


def last_words(errors: IO[bytes]) -> str:
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - LAST_WORDS))
    lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def channel() -> Callable[[dict[str, Any]], None]:
    """In the process: takes stdout away from everybody else, and returns what tells a result through it."""
    mine = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)

    def tell(result: dict[str, Any]) -> None:
        line = json.dumps(result).encode() + b"\n"
        while line:
            line = line[os.write(mine, line) :]

    return tell


class Kept(io.TextIOBase):
    """What is printed: the first `most` characters of it, and how many more there were."""

    def __init__(self, most: int) -> None:
        self.most, self.parts, self.size = most, [""], 0

    def write(self, words: str) -> int:
        if self.size < self.most:
            self.parts.append(words[: self.most - self.size])
        self.size += len(words)
        return len(words)

    def text(self) -> str:
        more = self.size - self.most
        return "".join(self.parts) + (f"\n… {more:,} more characters" if more > 0 else "")


def clipped(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
