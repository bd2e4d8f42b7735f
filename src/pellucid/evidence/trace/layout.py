"""The file of a trace: one safetensors file whose header is written before its data.

A plan says how many steps a run will have and which images take part in each, so every tensor's place is known after
the first step. The header goes to the front at once, with room for what is known only later (blanks, which safetensors
allows); then each step is appended as it comes. At the end the header is written again in its place. A file that was
cut, or whose writer was killed, therefore says itself what is missing, and all steps before that can be read.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import open_file, parse_json, typed
from pellucid.interop.atomic_files import put

KIND, SCHEMA = "pellucid-trace", 1
_MAX_HEADER = 100_000_000  # bytes, safetensors' own limit
CHECK = "check"  # the entry with the digests of a step's other entries; x and x0 have theirs in `digests`
_WIDTHS = {"F64": 8, "F32": 4, "I64": 8}
DIGEST, NO_DIGEST = "digest", "0" * 16  # of the header, in its own words: taken with zeros in its place
_CHUNK = 2**22  # bytes that are copied at once where the header has outgrown its room


class Entry(NamedTuple):
    """One tensor of a file: its name, its kind and its shape. Its place follows from those before it."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return _WIDTHS[self.kind] * prod(self.shape)


@dataclass(frozen=True)
class EntryPlace:
    """Where an entry lies, in bytes from the beginning of the file."""

    entry: Entry
    start: int

    @property
    def end(self) -> int:
        return self.start + self.entry.size


def lay_out(entries: Iterable[Entry]) -> tuple[bytes, int]:
    """The entries of a header for these tensors, and the bytes of all of them."""
    text, at = bytearray(), 0
    for one in entries:
        sides, end = ",".join(map(str, one.shape)), at + one.size
        text += f',"{one.name}":{{"dtype":"{one.kind}","shape":[{sides}],"data_offsets":[{at},{end}]}}'.encode()
        at = end
    return bytes(text), at


def encode(words: dict[str, str], places: bytes) -> bytes:
    """A safetensors header as JSON, with its own digest; `places` are already text, because they grow with the run."""
    metadata = json.dumps({DIGEST: NO_DIGEST, **words}, ensure_ascii=False, separators=(",", ":")).encode()
    header = b'{"__metadata__":' + metadata + places + b"}"
    return header.replace(NO_DIGEST.encode(), header_digest(header), 1)


def header_digest(header: bytes) -> bytes:
    return digest(header).hex().encode()


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """Eight bytes by which damaged data are recognised."""
    return hashlib.sha256(data).digest()[:8]


def _padded(header: bytes, room: int) -> bytes:
    """The header with its length before it and blanks behind it."""
    return room.to_bytes(8, "little") + header + b" " * (room - len(header))


class Writer:
    """Appends to a file that begins with its header. Nothing waits in memory: a killed process loses no step."""

    def __init__(self, path: Path, header: bytes, spare: int, *, overwrite: bool = False) -> None:
        self.path = path
        self.room = -(-(len(header) + spare) // 8) * 8
        try:
            self.file = path.open("wb" if overwrite else "xb", buffering=0)
        except OSError as error:
            raise unwritable(path, error) from None
        try:
            self.write(_padded(header, self.room))
        except PellucidError:  # nothing can be read of it
            self.file.close()
            path.unlink(missing_ok=True)
            raise

    def __del__(self) -> None:  # a run that broke off, recorded without `with`: the header says so
        if hasattr(self, "file"):
            self.file.close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        left = memoryview(data).cast("B")
        try:
            while left:
                left = left[self.file.write(left) :]
        except OSError as error:  # a full disk
            raise unwritable(self.path, error) from None

    def finish(self, header: bytes, size: int) -> None:
        """Writes the header again, for `size` bytes of data; a write that broke off may have left more.

        It goes into its room or, where it is too long for that, to the front of a copy of the file.
        """
        try:
            self.file.truncate(8 + self.room + size)
        except OSError as error:
            raise unwritable(self.path, error) from None
        if len(header) <= self.room:
            self.file.seek(0)
            self.write(_padded(header, self.room))
        else:
            self.file.close()
            old, self.room = 8 + self.room, -(-2 * len(header) // 8) * 8
            put(self.path, lambda part: self.copy(part, _padded(header, self.room), old))
            self.file = self.path.open("r+b", buffering=0)
        self.file.seek(0, os.SEEK_END)

    def copy(self, part: Path, header: bytes, data_at: int) -> None:
        with self.path.open("rb") as old, part.open("wb") as new:
            new.write(header)
            old.seek(data_at)
            while chunk := old.read(_CHUNK):
                new.write(chunk)

    def close(self) -> None:
        self.file.close()


def unwritable(path: Path, error: OSError) -> PellucidError:
    if isinstance(error, FileExistsError):
        return _taken(path)
    return PellucidError(rule("trace", "a file that can be written", str(path), f"{error.strerror}."), "file")


def _taken(path: Path) -> PellucidError:
    advice = "Name another, or overwrite it."
    return PellucidError(rule("trace", "a file that does not exist yet", str(path), advice), "file-exists")


def check_goal(path: Path, overwrite: bool) -> None:
    """Refuses a file that could not be written, before the run and not after it."""
    if os.path.lexists(path) and not overwrite:
        raise _taken(path)
    if path.exists() and not path.is_file():
        raise PellucidError(rule("trace", "a plain file", str(path)), "file")
    if not path.parent.is_dir():
        raise PellucidError(rule("trace", "in a folder that exists", str(path)), "file")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError:
        raise PellucidError(rule("trace", "in a folder that can be written to", str(path)), "file") from None


# --- reading ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileIndex:
    """The header of a file, and how long the file is; `sound` is None of a file without digests."""

    words: dict[str, str]
    places: dict[str, EntryPlace]
    size: int
    sound: bool | None = None  # whether the header is as its digest says

    @property
    def whole_size(self) -> int:
        return max((place.end for place in self.places.values()), default=0)

    def holds(self, name: str) -> bool:
        """Whether a tensor is there, to its last byte."""
        return name in self.places and self.places[name].end <= self.size


def read_index(path: Path) -> FileIndex:
    """Reads the header of a trace; another kind of file, or another schema, is refused by name."""
    try:
        with open_file(path, "trace") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(9)
            room = int.from_bytes(first[:8], "little")
            if len(first) < 9 or first[8:] != b"{" or not 2 <= room <= _MAX_HEADER:
                raise _not_a_trace(path, "no safetensors file")
            text = first[8:] + file.read(room - 1)
    except OSError as error:
        raise PellucidError(rule("trace", "a file that can be read", str(path), f"{error.strerror}."), "file") from None
    if len(text) < room:
        advice = "It was cut within its header: nothing in it can be read. Record it again."
        raise PellucidError(rule("trace", "a whole file", f"{path.name}, {size} bytes", advice), "trace-truncated")
    try:
        table = parse_json(text, "header")
    except PellucidError as error:
        raise _not_a_trace(path, f"a header that is no JSON ({str(error)[:120]})") from None
    return replace(_index_of(path, table, 8 + room, size), sound=_is_sound(text, table))


def _is_sound(text: bytes, table: dict[str, Any]) -> bool | None:
    """Whether a header is as its digest says; None where neither it nor any step has one, as in older files."""
    recorded = table["__metadata__"].get(DIGEST)
    if recorded is None and not any(name.endswith(f".{CHECK}") for name in table):
        return None
    plain = text.rstrip(b" ").replace(str(recorded).encode(), NO_DIGEST.encode(), 1)
    return str(recorded).encode() == header_digest(plain)


def _index_of(path: Path, table: Any, base: int, size: int) -> FileIndex:
    words = table.get("__metadata__") if isinstance(table, dict) else None
    if not isinstance(words, dict) or words.get("kind") != KIND:
        raise _not_a_trace(path, "a safetensors file of something else")
    if words.get("schema") != str(SCHEMA):
        advice = f"Made by pellucid {str(words.get('pellucid', '?'))[:40]}; read it with that version."
        raise PellucidError(rule("schema of the trace", str(SCHEMA), words.get("schema"), advice), "schema")
    try:
        places = {name: _placed(name, held, base) for name, held in table.items() if name != "__metadata__"}
        return FileIndex({str(k): str(v) for k, v in words.items()}, places, size)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _not_a_trace(path, f"a header with a wrong entry ({error})") from None


def _placed(name: str, raw: dict[str, Any], base: int) -> EntryPlace:
    shape = typed(tuple[int, ...], raw["shape"], f"shape of {name[:80]}", (0, 2**50))
    start, end = typed(tuple[int, int], raw["data_offsets"], f"data_offsets of {name[:80]}", (0, 2**60))
    found = EntryPlace(Entry(name, str(raw["dtype"]), shape), base + start)
    if found.end != base + end or start < 0 or any(side < 0 for side in shape):
        raise ValueError(f"{name} is not of its size")
    return found


def _not_a_trace(path: Path, why: str) -> PellucidError:
    advice = "Record one: pellucid sample … --trace FILE."
    return PellucidError(rule("trace", "a file that Pellucid's recorder wrote", f"{path.name}: {why}", advice), "trace")


def read_bytes(path: Path, place: EntryPlace) -> bytearray:
    """The data of one tensor."""
    held = bytearray(place.entry.size)
    try:
        with open_file(path, "trace") as file:
            file.seek(place.start)
            got = file.readinto(held)
    except OSError as error:
        raise PellucidError(rule("trace", "a file that can be read", str(path), f"{error.strerror}."), "file") from None
    if got < len(held):
        raise PellucidError(rule(place.entry.name, "whole", f"{got} of {len(held)} bytes"), "trace-truncated")
    return held


def damaged(path: Path, what: str) -> PellucidError:
    advice = "The file is damaged: record it again."
    return PellucidError(
        f"{what} in {path.name} must be as it was recorded; got other bits than its digest says. {advice}",
        "trace-damaged",
    )


def step_name(index: int, name: str) -> str:
    return f"step.{index:05d}.{name}"


def active(lengths: Sequence[int], index: int) -> tuple[int, ...]:
    """The images that still run in a step, by the lengths of their plans."""
    return tuple(k for k, length in enumerate(lengths) if length > index)
