"""A lab's page run block by block, in a process that reports its results as lines of JSON and can be stopped."""

from __future__ import annotations

import base64
import codeop
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
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from pellucid.core.errors import Cancelled
from pellucid.labs import SMOKE, script
from pellucid.labs.script import Block

# --- Processes ------------------------------------------------------------------------------------------------------

POLL = 0.1  # seconds between two checks for cancellation
_DRAIN = 1.0  # seconds for the last lines of a process that ended
MOST_LINE = 64 * 2**20  # bytes of one result
LAST_WORDS = 4096  # bytes that are read from the end of stderr


class ProcessEnded(Exception):  # noqa: N818
    """The process ended before it was done; the last line of its stderr, or how it ended."""


class ForeignOutput(ProcessEnded):
    """It sent something that is not a result."""


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
    """Runs `python -m module words` and yields its results as they come.

    Cancelling, the timeout, an error and a caller that stops listening all end the process. The timeout is for the
    whole of it, and raises TimeoutError.
    """
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
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
        reader = threading.Thread(target=pump, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            while line := next_line(lines, process, look):
                yield _result(line)
            while process.poll() is None:
                look()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL)
            if process.returncode != 0:
                raise ProcessEnded(last_words(errors) or f"it ended with exit code {process.returncode}")
        finally:
            end(process)
            reader.join(_DRAIN)  # longer it stays only for a process that lives on


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process with everything in its session; a child that began a session of its own lives on."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def pump(stream: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Every line of the process, then an empty one."""
    with stream:
        while (line := stream.readline(MOST_LINE)).endswith(b"\n"):
            lines.put(line)
    lines.put(b"")


def next_line(lines: queue.SimpleQueue[bytes], process: subprocess.Popen[bytes], look: Callable[[], None]) -> bytes:
    """The next line, as soon as it is there; an empty one after the last, even if another process holds the pipe."""
    ended = False
    while True:
        look()
        with contextlib.suppress(queue.Empty):
            return lines.get(timeout=_DRAIN if ended else POLL)
        if ended:
            return b""
        ended = process.poll() is not None


def _result(line: bytes) -> dict[str, Any]:
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict):
        raise ForeignOutput("it sent something that is not a result")
    return result


def last_words(errors: IO[bytes]) -> str:
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - LAST_WORDS))
    lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def channel() -> Callable[[dict[str, Any]], None]:
    """In the process: reserves stdout for results, and returns the function that writes one."""
    mine = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)

    def tell(result: dict[str, Any]) -> None:
        line = json.dumps(result).encode() + b"\n"
        while line:
            line = line[os.write(mine, line) :]

    return tell


class OutputBuffer(io.TextIOBase):
    """Captured output: its first `most` characters, and how many more there were."""

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


# --- Pages ----------------------------------------------------------------------------------------------------------

MOST_PRINTED = 100_000  # characters of a block
MOST_FIGURES = 8  # of a block
DPI = 110


@dataclass(frozen=True)
class BlockResult:
    """A block that has run; `figures` are PNG files. After an error there are no more blocks."""

    number: int
    count: int
    text: str
    code: str
    printed: str
    figures: tuple[bytes, ...]
    seconds: float
    error: str | None = None


def run_page(
    page: Path, smoke: bool = False, cancelled: Callable[[], bool] = never, within: Path | None = None
) -> Iterator[BlockResult]:
    """Every block of a page, as soon as it has run. Cancelling, or closing this generator, ends the run.

    Its temporary files are in a folder of mode 0700 (`within` one of the caller's) that is removed afterwards.
    """
    blocks = script.read(page)
    done, why = 0, "the lab ended its process"
    with tempfile.TemporaryDirectory(prefix="pellucid-lab-", dir=within, ignore_cleanup_errors=True) as scratch:
        own = {"MPLBACKEND": "agg", SMOKE: "1" if smoke else "", "TMPDIR": scratch}
        try:
            with contextlib.closing(follow(__name__, [str(page)], environment=own, cancelled=cancelled)) as results:
                for result in results:
                    done += 1
                    figures = tuple(map(base64.b64decode, result.pop("figures")))
                    yield BlockResult(**result, figures=figures)
                    if result["error"] is not None:
                        return
        except ProcessEnded as error:  # the interpreter itself went down, or could not begin
            why += f": {error}"
    if done < len(blocks):
        block = blocks[done]
        yield BlockResult(done + 1, len(blocks), block.text, block.code, "", (), 0.0, why)


# --- in the process ----------------------------------------------------------------------------------------------


def run_here(page: Path) -> Iterator[BlockResult]:
    """The blocks in this process, in one namespace, as a script of that name would run."""
    import matplotlib

    matplotlib.use("agg")
    blocks = script.read(page)
    main = ModuleType("__main__")
    main.__file__ = str(page)
    sys.modules["__main__"] = main
    compiler = codeop.Compile()  # remembers `from __future__` from block to block
    for number, block in enumerate(blocks, 1):
        begun = time.perf_counter()
        printed = OutputBuffer(MOST_PRINTED)
        with contextlib.redirect_stdout(printed):
            error = executed(compiler, block, page, main)
        figures = drawn() if error is None else ()
        took = time.perf_counter() - begun
        yield BlockResult(number, len(blocks), block.text, block.code, printed.text(), figures, took, error)
        if error is not None:
            return


def executed(compiler: codeop.Compile, block: Block, page: Path, main: ModuleType) -> str | None:
    """What went wrong, if anything: the last line of the traceback and where in the page."""
    source = "\n" * (block.line - 1) + block.code + "\n"  # so that lines have the numbers of the file
    try:
        exec(compiler(source, str(page), "exec"), main.__dict__)
    except BaseException as error:  # SystemExit too: a lab does not end its reader
        return last_line(error, page)
    return None


def last_line(error: BaseException, path: Path) -> str:
    """`AssertionError: 3 is not 4 (lab_03.py, line 17)`: the deepest line of this file."""
    said = traceback.format_exception_only(error)[-1].strip()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return said + (f" ({path.name}, line {lines[-1]})" if lines else "")


def drawn() -> tuple[bytes, ...]:
    """All open figures as PNG files; they are closed."""
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return ()
    files = []
    for number in pyplot.get_fignums()[:MOST_FIGURES]:
        held = io.BytesIO()
        pyplot.figure(number).savefig(held, format="png", dpi=DPI, bbox_inches="tight")
        files.append(held.getvalue())
    pyplot.close("all")
    return tuple(files)


def main(page: str) -> None:
    tell = channel()
    for shown in run_here(Path(page)):
        tell(asdict(shown) | {"figures": [base64.b64encode(file).decode() for file in shown.figures]})


if __name__ == "__main__":
    main(sys.argv[1])
