"""Files that are whole or absent: written next to their place, on the disk before they have their name; and files of
lines, of which the last may be torn."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pellucid.core import reader
from pellucid.core.errors import PellucidError, system_error

_SEALED = re.compile(r', "digest": "([0-9a-f]{16})"}$')  # the end of a line that says what stands before it
LOCK = ".lock"  # of a folder that a process works in: see `lock`
_MAX_LINES = 2**30  # bytes
_PART = re.compile(r"\..*\.[0-9a-f]{8}\.part(\.[^.]*)?")


def put(path: Path, what: str | Callable[[Path], object], *, replace: bool = True) -> None:
    """Writes a text, or calls `what` with a path to write to, which has the suffix of `path`. A link is followed.
    Without `replace`, a file that is there when the new one is whole stays, and FileExistsError is raised."""
    goal = Path(os.path.realpath(path))
    part = goal.with_name(f".{goal.stem}.{os.urandom(4).hex()}.part{goal.suffix}")
    with writing(path):
        try:
            if isinstance(what, str):
                part.write_text(what, encoding="utf-8")
            else:
                what(part)
            settle(part)
            if replace:
                os.replace(part, goal)
            else:
                _give_new_name(part, goal)
        finally:
            part.unlink(missing_ok=True)
        settle(goal.parent)


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """What the system refuses inside, a full disk above all, is an OSError that names this file."""
    try:
        yield
    except Exception as error:
        refused = system_error(error, path)
        if refused is None:
            raise
        raise refused from None


def digest_of(tensor: Any) -> str:
    """The digest of a tensor's dtype, shape and bytes: a damaged one has another."""
    import torch

    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    found.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def digests_in(tensors: Mapping[str, Any]) -> str:
    """The digests of a file's tensors, as words that go into its header."""
    return json.dumps({name: digest_of(tensor) for name, tensor in tensors.items()}, sort_keys=True)


def are_whole(tensors: Mapping[str, Any], words: str | None) -> bool:
    """Whether a file's tensors are those that were written, by the words in its header; older files have none."""
    return words is None or words == digests_in(tensors)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _give_new_name(part: Path, goal: Path) -> None:
    """Names a file that has to be new. A hard link never replaces; where there are none, a moment remains between the
    look and the move."""
    try:
        os.link(part, goal)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(goal):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(goal)) from None
        os.rename(part, goal)


def is_part(path: Path) -> bool:
    """Whether a file is what a process left that was killed while it wrote."""
    return _PART.fullmatch(path.name) is not None


def is_left(path: Path) -> bool:
    """Whether a file is no more than what a killed process left: half a file, or its lock."""
    return is_part(path) or path.name == LOCK or path.name.startswith(f"{LOCK}-")


def settle(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name != "posix":
        return  # elsewhere a folder cannot be opened
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sealed(row: Mapping[str, Any]) -> str:
    """A line of JSON that ends with its own digest."""
    line = json.dumps(row)
    return f'{line[:-1]}, "digest": "{_line_digest(line)}"}}\n'


def _line_digest(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:16]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one per line, without what a killed process left half written and without lines that
    are not as their digest says; none of no file."""
    found = []
    text = reader.read_bytes(path, path.name, _MAX_LINES).decode("utf-8", errors="replace") if path.is_file() else ""
    for line in text.splitlines():
        if end := _SEALED.search(line):
            line = line[: end.start()] + "}"
            if _line_digest(line) != end[1]:
                continue
        try:
            found.append(reader.parse_json(line, path.name, foreign=True))
        except PellucidError:
            continue
    return [row for row in found if isinstance(row, dict)]
