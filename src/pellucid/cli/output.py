"""What leaves the command line: tables and JSON on stdout, progress on stderr, files that are whole or absent."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.atomic_files import put

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_IMAGES = (".png", ".svg", ".pdf")  # what matplotlib writes
_PIPE_WIDTH = 160  # columns of a table that no terminal will show
_EVERY = 30.0  # seconds between two lines about long work in a log


def console() -> Console:
    """stdout: as wide as the terminal, or wide enough for a table in a file."""
    from rich.console import Console

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else _PIPE_WIDTH, highlight=False, emoji=False)


def table(*columns: str, right: Sequence[str] = (), rows: Iterable[Sequence[Any]] = (), sums: bool = False) -> Table:
    """A table in the house's look; the columns named in `right` hold numbers, and `sums` sets the last row apart."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        drawn.add_column(column, justify="right" if column in right else "left", overflow="fold")
    listed = list(rows)
    for number, row in enumerate(listed, 1):
        drawn.add_row(*row, end_section=sums and number == len(listed) - 1)
    return drawn


def plain(value: Any) -> Any:
    """The same value as valid JSON: infinities and NaN as strings, arrays and tuples as lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else value


def print_json(value: Any, indent: int | None = 1) -> None:
    print(json.dumps(plain(value), indent=indent, allow_nan=False))


def say(text: object, **look: Any) -> None:
    """A line on stdout as it is: without markup, and not broken."""
    console().print(text, soft_wrap=True, markup=False, **look)


@dataclass
class Destination:
    """A file that a command is going to write, and the option that names it."""

    path: Path
    option: str
    overwrite: bool = False

    def __str__(self) -> str:
        return str(self.path)

    def write(self, what: str | Callable[[Path], object]) -> None:
        """Writes the file, whole or not at all. One that came since it was looked for is kept too."""
        try:
            put(self.path, what, replace=self.overwrite)
        except FileExistsError:
            raise exists_error(self.option, self.path) from None
        except OSError as error:
            advice = f"{error.strerror or error}."
            raise PellucidError(rule(self.option, "a file that can be written", str(self), advice), "file") from None
        self.overwrite = True  # it is ours now, and may be written again


def destination(path: Path, option: str, suffixes: tuple[str, ...] = (), *, overwrite: bool = False) -> Destination:
    """Refuses a file that could not be written, before the work and not after it. This is the rule of every command:
    what exists is replaced with --overwrite alone."""
    if suffixes and path.suffix.lower() not in suffixes:
        raise PellucidError(rule(option, "a file that ends in " + ", ".join(suffixes), str(path)), "file-type")
    if path.exists() and not path.is_file():
        raise PellucidError(rule(option, "a plain file", str(path)), "file")
    if os.path.lexists(path) and not overwrite:
        raise exists_error(option, path)
    writable(path.parent, option, path)
    return Destination(path, option, overwrite)


def plot_destination(
    path: Path | None, suffixes: tuple[str, ...] = _IMAGES, *, overwrite: bool = False
) -> Destination | None:
    """The same for `--plot`, which may be left out, and needs matplotlib."""
    check_overwrite(overwrite, "--plot", path is not None)
    if path is None:
        return None
    from pellucid.evidence.report.charts import require

    require()
    return destination(path, "--plot", suffixes, overwrite=overwrite)


def check_overwrite(overwrite: bool, with_what: str, written: bool) -> None:
    """Refuses --overwrite where nothing is written."""
    if overwrite and not written:
        raise PellucidError(f"--overwrite must come with {with_what}; got it alone.", "usage")


def exists_error(option: str, path: Path) -> PellucidError:
    advice = "Name another, or give --overwrite."
    return PellucidError(rule(option, "a file that does not exist yet", str(path), advice), "file-exists")


def writable(folder: Path, option: str, path: Path | None = None) -> None:
    """Refuses a folder that no file can be made in."""
    got = str(path or folder)
    if not folder.is_dir():
        raise PellucidError(rule(option, "in a folder that exists", got), "file")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        advice = f"{error.strerror or error}."
        raise PellucidError(rule(option, "in a folder that can be written to", got, advice), "file") from None


def wrote(path: Path | Destination, as_json: bool = False) -> None:
    """Says which file was written; beside JSON on stderr."""
    print(f"wrote {path}", file=sys.stderr if as_json else sys.stdout)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar on a terminal's stderr that disappears when it is done, or a line now and then in a log; call what it
    yields after each part, or with the number of parts that are done."""
    if not sys.stderr.isatty():
        yield _log_lines(what, total)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count=1: bar.advance(task, count)


def _log_lines(what: str, total: int) -> Callable[..., None]:
    """Says on stderr how far long work is, every EVERY seconds."""
    began = said = time.monotonic()
    done = 0

    def more(count: int = 1) -> None:
        nonlocal done, said
        done, now = done + count, time.monotonic()
        if now - said >= _EVERY:
            said = now
            print(f"{what}: {done:,} of {total:,} after {now - began:.0f} s", file=sys.stderr, flush=True)

    return more
