"""Files that are whole or absent: written beside their place, on the disk before they have their name; and files of
lines, of which the last may be torn."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PART = re.compile(r"\..*\.[0-9a-f]{8}\.part(\.[^.]*)?")


def put(path: Path, what: str | Callable[[Path], object]) -> None:
    """Writes a text, or calls `what` with a path to write to, which has the suffix of `path`. A link is followed."""
    goal = Path(os.path.realpath(path))
    part = goal.with_name(f".{goal.stem}.{os.urandom(4).hex()}.part{goal.suffix}")
    try:
        if isinstance(what, str):
            part.write_text(what, encoding="utf-8")
        else:
            what(part)
        settle(part)
        os.replace(part, goal)
    finally:
        part.unlink(missing_ok=True)
    settle(goal.parent)


def is_part(path: Path) -> bool:
    """Whether a file is what a process left that was killed while it wrote."""
    return PART.fullmatch(path.name) is not None


def settle(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name != "posix":
        return  # elsewhere a folder cannot be opened
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line, without what a killed process left half written; none of no file."""
    found = []
    for line in path.read_text("utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [row for row in found if isinstance(row, dict)]
