"""A lab's page, run block by block: what each printed and drew, as it comes.

`run` starts a process of its own (`python -m pellucid.labs.running PAGE`), so that labs of several people do not mix
what they print, and one that is cancelled is gone at once.
"""

from __future__ import annotations

import base64
import codeop
import contextlib
import io
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pellucid.labs import SMOKE, process, script
from pellucid.labs.script import Block

MOST_PRINTED = 100_000  # characters of a block
MOST_FIGURES = 8  # of a block
DPI = 110


@dataclass(frozen=True)
class Shown:
    """A block that has run; `figures` are PNG files. After an error there are no more blocks."""

    number: int
    count: int
    text: str
    code: str
    printed: str
    figures: tuple[bytes, ...]
    seconds: float
    error: str | None = None


def run(
    page: Path, smoke: bool = False, cancelled: Callable[[], bool] = process.never, within: Path | None = None
) -> Iterator[Shown]:
    """Every block of a page, as soon as it has run. Cancelling, or not listening any more, ends the run.

    Its temporary files are in a folder of mode 0700 (`within` one of the caller's) that is removed afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="pellucid-lab-", dir=within, ignore_cleanup_errors=True) as scratch:
        yield from _run(page, {"MPLBACKEND": "agg", SMOKE: "1" if smoke else "", "TMPDIR": scratch}, cancelled)


def _run(page: Path, environment: dict[str, str], cancelled: Callable[[], bool]) -> Iterator[Shown]:
    blocks = script.read(page)
    done, why = 0, "the lab ended its process"
    try:
        with contextlib.closing(
            process.follow(__name__, [str(page)], environment=environment, cancelled=cancelled)
        ) as results:
            for told in results:
                done += 1
                figures = tuple(map(base64.b64decode, told.pop("figures")))
                yield Shown(**told, figures=figures)
                if told["error"] is not None:
                    return
    except process.Died as error:  # the interpreter itself went down, or could not begin
        why += f": {error}"
    if done < len(blocks):
        block = blocks[done]
        yield Shown(done + 1, len(blocks), block.text, block.code, "", (), 0.0, why)


# --- in the process ----------------------------------------------------------------------------------------------


def run_here(page: Path) -> Iterator[Shown]:
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
        printed = process.Kept(MOST_PRINTED)
        with contextlib.redirect_stdout(printed):
            error = executed(compiler, block, page, main)
        figures = drawn() if error is None else ()
        took = time.perf_counter() - begun
        yield Shown(number, len(blocks), block.text, block.code, printed.text(), figures, took, error)
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
    tell = process.channel()
    for shown in run_here(Path(page)):
        tell(asdict(shown) | {"figures": [base64.b64encode(file).decode() for file in shown.figures]})


if __name__ == "__main__":
    main(sys.argv[1])
