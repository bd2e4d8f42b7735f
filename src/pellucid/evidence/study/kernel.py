"""The folder of a study: its config, and one JSON line for each finished cell, so that a study that was killed goes on.

A line whose digest does not match is a cell that is made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import read_json, whole
from pellucid.interop.atomic_files import is_left, put, read_lines, sealed, writing
from pellucid.interop.lock import locked

T = TypeVar("T")
CONFIG, RECORDS = "config.json", "records.jsonl"
KEY_TYPES = (str, int, float, type(None))  # what a cell's keys may be
MAX_SHARDS = 256  # shares of a study
ELSEWHERE = "Choose another --out."
MARKS = ("study", "version")  # the words of a config that say what it is of
KINDS = {
    "samplers": "a sampler study",
    "interaction": "an interaction study",
    "guidance": "a guidance study",
    "oracle": "an oracle study",
    "schedules": "a schedule study",
}


class Records:
    """The cells of a study that are done. A cell is named by the values of its `keys`, which can be hashed. Processes
    that share a study have a file each."""

    def __init__(self, folder: Path, keys: tuple[str, ...], file: str = RECORDS) -> None:
        self.path, self.keys = folder / file, keys
        self.rows = [row for row in read_lines(self.path) if all(isinstance(row.get(k, []), KEY_TYPES) for k in keys)]
        self.known = {self.name(row) for row in self.rows}

    @staticmethod
    def shared(folder: Path, keys: tuple[str, ...], shard: tuple[int, int] = (0, 1)) -> Records:
        """Those of one share of a study (index, count): it knows what all shares have done, and writes its own file."""
        index, count = shard
        own = Records(folder, keys, RECORDS if count == 1 else f"records-{index}of{count}.jsonl")
        others = (path for path in sorted(folder.glob("records*.jsonl")) if path != own.path)
        rows = own.rows + [row for path in others for row in Records(folder, keys, path.name).rows]
        own.rows, own.known = [], set()
        for row in rows:
            if not own.has(row):  # of a cell that is there twice the first counts
                own.take(row)
        return own

    def take(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))
        self.known.add(self.name(row))

    def name(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[key] for key in self.keys)

    def has(self, cell: Mapping[str, Any]) -> bool:
        return self.name(cell) in self.known

    def add(self, row: Mapping[str, Any]) -> None:
        if self.has(row):
            raise PellucidError(rule("cell", "new", {k: row[k] for k in self.keys}), "study-cell")
        self.take(row)
        with writing(self.path), self.path.open("a+b") as file:
            torn = file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
            file.write((("\n" if torn else "") + sealed(row)).encode())
            file.flush()
            os.fsync(file.fileno())


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json holds; nothing where it is no table."""
    try:
        return read_json(folder / CONFIG, foreign=True)
    except PellucidError:
        return {}


def check_kind(folder: Path, held: Mapping[str, Any], kind: str, version: int) -> None:
    """Refuses the config of another kind of study, or of another version."""
    if held.get("study") != kind:
        got = f"{folder}: {KINDS.get(str(held.get('study')), 'something else')}"
        raise PellucidError(rule("--out", f"of {KINDS[kind]}", got, ELSEWHERE), "study-folder")
    if held.get("version") != version:
        must = f"of version {version}"
        raise PellucidError(rule(f"study in {folder}", must, held.get("version"), ELSEWHERE), "study-version")


def with_marks(held: dict[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """Some studies of version 1 were written without the marks: a config with the same other keys is one of those."""
    return {"study": mine["study"], "version": 1, **held} if {*held, *MARKS} == set(mine) else held


def is_mine(folder: Path, text: str) -> bool:
    """Whether a folder is of the study with this config; the folder of another is refused."""
    path = folder / CONFIG
    if path.exists():
        held, mine = read_config(folder), json.loads(text)
        if "study" in mine:
            held = with_marks(held, mine)
            check_kind(folder, held, mine["study"], mine["version"])
        if held != mine:
            must = f"the one that began {folder}"
            raise PellucidError(rule("config", must, "another", ELSEWHERE), "resume-config")
        return True
    if folder.exists() and not (folder.is_dir() and all(map(is_left, folder.iterdir()))):
        raise PellucidError(rule("--out", "empty, new, or a study of this config", str(folder)), "out-taken")
    return False


def claim(folder: Path, text: str) -> None:
    """Makes a folder this study's own."""
    if not is_mine(folder, text):
        folder.mkdir(parents=True, exist_ok=True)
        put(folder / CONFIG, text)


def one_process(run: Callable[..., T]) -> Callable[..., T]:
    """For the `run` of a study: in one process at a time for each share, and refused in another."""

    @wraps(run)
    def within(study: Any, *args: Any, **options: Any) -> T:
        with locked(study.folder, "written", getattr(study, "shard", (0, 1))):
            return run(study, *args, **options)

    return within


def shard_of(text: str) -> tuple[int, int]:
    """`0/4` is the first of four."""
    first, _, last = text.partition("/")
    index, count = whole(first, MAX_SHARDS), whole(last, MAX_SHARDS)
    if index is None or count is None or index >= count:
        raise PellucidError(rule("--shard", f"as 0/4, the first of four, of at most {MAX_SHARDS}", text), "shard")
    return index, count
