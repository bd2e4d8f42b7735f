"""WebDataset shards: tar archives whose neighbouring files of one name are an example, read at any index."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import parse_object
from pellucid.train.image_folder import CAPTIONS, MAX_LABEL
from pellucid.train.image_source import MAX_BYTES, Crop, Example, Framing, ImageSource, log, steadily

# --- Members of a tar -----------------------------------------------------------------------------------------------

BLOCK = 512
MAX_NAME = 64 * 1024  # bytes of a long name or of pax records
FILES = (b"0", b"\0", b"7")
EMPTY = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices and folders: no bytes, whatever their size says
SPARSE = b"S"  # GNU's own, with a map before the bytes


@dataclass(frozen=True)
class Member:
    """One file of an archive."""

    name: str
    offset: int  # of its bytes
    size: int


class TarDamagedError(PellucidError):
    """The archive cannot be read on from here."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "data-damaged")


def members(path: Path) -> Iterator[Member]:
    """The files of an archive in their order; ends with TarDamagedError where it is cut off or broken."""
    with path.open("rb", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        place, long_name, pax = 0, "", {}
        while (head := block(file, place, end)) is not None:
            kind, size = head[156:157], number(head[124:136])
            if kind == b"x":
                pax = pax_records(note(file, place, size, end))
            elif kind == b"L":
                long_name = text(note(file, place, size, end))
            elif kind == SPARSE:
                raise TarDamagedError(f"{shown(head)} is stored sparse, which is not read here")
            elif kind in FILES:
                size = int(pax.get("size", size))
                if place + BLOCK + size > end:
                    raise TarDamagedError(f"{shown(head)} is cut off")
                yield Member(pax.get("path") or long_name or shown(head), place + BLOCK, size)
            if kind not in (b"x", b"L", b"g", b"K"):  # those speak of the file that follows
                long_name, pax = "", {}
            place += BLOCK + (0 if kind in EMPTY else -(-size // BLOCK) * BLOCK)


def block(file: BinaryIO, place: int, end: int) -> bytes | None:
    """The header at a place, or None at the end: a block of zeros, or the end of the file."""
    if place == end:
        return None
    if place > end:
        raise TarDamagedError("it is cut off")
    file.seek(place)
    head = file.read(BLOCK)
    if head == bytes(BLOCK):
        return None
    if len(head) < BLOCK:
        raise TarDamagedError("it is cut off")
    plain = head[:148] + b" " * 8 + head[156:]  # the sum does not count itself
    claimed = number(head[148:156])
    if claimed != sum(plain) and claimed != signed_sum(plain):
        raise TarDamagedError("it is no tar archive" if place == 0 else f"its header at byte {place} is broken")
    return head


def signed_sum(raw: bytes) -> int:
    """Of bytes from −128 to 127, as some old writers have it."""
    return sum(raw) - 256 * sum(byte > 127 for byte in raw)


def note(file: BinaryIO, place: int, size: int, end: int) -> bytes:
    """What is said of the file that follows, of bounded size."""
    if size > MAX_NAME or place + BLOCK + size > end:
        raise TarDamagedError(f"the long name at byte {place} is broken")
    file.seek(place + BLOCK)
    return file.read(size)


def number(digits: bytes) -> int:
    """Octal digits, or a binary number after a byte with its highest bit set; below 2⁶³."""
    if digits[0] & 0x80:
        found = int.from_bytes(bytes([digits[0] & 0x7F]) + digits[1:], "big")
    else:
        try:
            found = int(digits.strip(b" \0") or b"0", 8)
        except ValueError:
            raise TarDamagedError(f"{digits!r} is no number") from None
    if not 0 <= found < 2**63:
        raise TarDamagedError(f"{digits!r} is no size")
    return found


def shown(head: bytes) -> str:
    """The name in a ustar header."""
    name, prefix = text(head[:100]), text(head[345:500]) if head[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


def pax_records(records: bytes) -> dict[str, str]:
    """Records of the form `length key=value\\n`, where length counts all of it; only path and size are of use here."""
    found = {}
    while records:
        digits = records.partition(b" ")[0]
        length = int(digits) if digits.isdigit() and len(digits) < 9 else 0
        if not len(digits) < length <= len(records) or records[length - 1 : length] != b"\n":
            raise TarDamagedError("its pax records are broken")
        key, _, value = records[len(digits) + 1 : length - 1].partition(b"=")
        if key == b"path":
            found["path"] = value.decode("utf-8", "replace")
        if key == b"size":
            found["size"] = str(pax_size(value))
        records = records[length:]
    return found


def pax_size(value: bytes) -> int:
    if not value.isdigit() or len(value) > 18:
        raise TarDamagedError("its pax records are broken")
    return int(value)


# --- Shards ---------------------------------------------------------------------------------------------------------

IMAGES = ("jpg", "jpeg", "png", "webp")
MAX_TEXT = 2**20  # bytes of a caption, a class or a JSON file
MAX_SHARDS = 100_000
BRACES = re.compile(r"\{([^{}]*)\}")
KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)  # up to the first dot of the file's own name
ENDINGS = {"picture": IMAGES, "text": ("txt", "caption", "text"), "cls": ("cls",), "json": ("json",)}  # hints follow
IMAGE, TEXT, CLS, JSON, HINTS = range(5)  # the columns
NOWHERE = -1


@dataclass(frozen=True)
class Columns:
    """Where captions and labels are said: a column, and the key of it if it is JSON."""

    caption: int | None = None
    label: int | None = None
    caption_key: str = ""


class WebShards(ImageSource):
    """Examples of shards in the order of shards and files. Given are a pattern (`train-{000000..000012}.tar`), a folder
    of .tar files, one file, or a list of them.

    A shard is read through once for where its files lie. Then any example is read alone, and nothing is unpacked.
    """

    def __init__(
        self,
        shards: str | Path | Sequence[str | Path],
        size: int,
        *,
        crop: Crop = "centre",
        flip: bool = False,
        hints: Sequence[str] = (),
        workers: int | None = None,
    ) -> None:
        super().__init__(Framing(size, crop, flip), hints, workers)
        self.shards = expanded(shards)
        self.damaged: dict[str, str] = {}  # shard → why it was not read to its end
        self.incomplete = 0  # examples without an image, or without a hint that is asked for
        self.stamps = tuple((path.stat().st_size, path.stat().st_mtime_ns) for path in self.shards)
        self.keys: list[str] = []
        table = [row for number, path in enumerate(self.shards) for row in self.indexed(number, path)]
        if not table:
            must = f"shards that hold some ({', '.join(IMAGES)}" + "".join(f", {name}.png" for name in hints) + ")"
            raise PellucidError(rule("images", must, str(shards)), "data-empty")
        if self.incomplete:
            log.warning("%d examples without an image or a hint are left out", self.incomplete)
        self.table = np.array(table, np.int64)  # (N, 1 + 2 · columns): shard, then offsets and sizes
        self.told = self.first_told()

    def __len__(self) -> int:
        return len(self.table)

    def name(self, index: int) -> str:
        return f"{self.shards[int(self.table[index, 0])].name}/{self.keys[index]}"

    def indexed(self, shard: int, path: Path) -> Iterator[list[int]]:
        """The rows of one shard, as far as it can be read."""
        endings = [*ENDINGS.values(), *([f"{hint}.{end}" for end in IMAGES] for hint in self.hints)]
        for key, files in grouped(self.readable(path), path.name):
            chosen = [next((files[end] for end in ends if end in files), None) for ends in endings]
            if chosen[IMAGE] is None or None in chosen[HINTS:]:
                self.incomplete += 1
                continue
            self.keys.append(key)
            yield [shard, *itertools.chain(*((m.offset, m.size) if m else (NOWHERE, 0) for m in chosen))]

    def readable(self, path: Path) -> Iterator[Member]:
        """The files of a shard; a damaged one is named, and ends where the damage is."""
        try:
            yield from members(path)
        except (TarDamagedError, OSError) as error:
            self.damaged[path.name] = str(error)
            log.warning("%s is used up to where it is damaged: %s", path.name, error)

    def first_told(self) -> Columns:
        """What is said of images, and where, by the first example whose JSON, if it has one, can be read."""
        for index in range(len(self)):
            try:
                said = self.said(index) if self.has(index, JSON) else {}
            except PellucidError:
                continue
            key = next((key for key in CAPTIONS if isinstance(said.get(key), str)), "")
            return Columns(
                TEXT if self.has(index, TEXT) else JSON if key else None,
                CLS if self.has(index, CLS) else JSON if "label" in said else None,
                key,
            )
        return Columns()

    def has(self, index: int, column: int) -> bool:
        return int(self.table[index, 1 + 2 * column]) != NOWHERE

    def bytes_of(self, index: int, column: int, limit: int = MAX_TEXT) -> bytes:
        """One file of an example, read alone."""
        shard, offset, size = (int(n) for n in self.table[index, [0, 1 + 2 * column, 2 + 2 * column]])
        if offset == NOWHERE:
            raise PellucidError("it lacks a caption or a class that others have", "data-incomplete")
        if size > limit:
            raise PellucidError(f"it has a file of {size} bytes, more than {limit}", "image-file")

        def read() -> bytes:
            with self.shards[shard].open("rb") as file:
                file.seek(offset)
                return file.read(size)

        return steadily(read)

    def said(self, index: int) -> dict[str, Any]:
        """The JSON of an example."""
        return parse_object(self.bytes_of(index, JSON), "its JSON", "data-metadata", foreign=True)

    def example(self, index: int) -> Example:
        told = self.told
        said = self.said(index) if JSON in (told.caption, told.label) else {}
        hints = {name: self.bytes_of(index, HINTS + i, MAX_BYTES) for i, name in enumerate(self.hints)}
        return Example(
            self.bytes_of(index, IMAGE, MAX_BYTES),
            None if told.caption is None else self.caption(index, said),
            None if told.label is None else self.label(index, said),
            hints,
        )

    def caption(self, index: int, said: dict[str, Any]) -> str:
        found: Any = said.get(self.told.caption_key)
        if self.told.caption == TEXT:
            found = self.bytes_of(index, TEXT).decode("utf-8", "strict").strip()
        if not isinstance(found, str):
            raise PellucidError(f"its JSON has no {self.told.caption_key}", "data-metadata")
        return found

    def label(self, index: int, said: dict[str, Any]) -> int:
        found: Any = said.get("label")
        if self.told.label == CLS:
            found = self.bytes_of(index, CLS).strip()
            found = int(found) if found.isdigit() and len(found) < 12 else None
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= MAX_LABEL:
            raise PellucidError("its class is no whole number from 0", "data-metadata")
        return found

    def inventory(self) -> dict[str, Any]:
        return {"names": [path.name for path in self.shards], "sizes": [size for size, _ in self.stamps]}

    def fingerprint(self) -> str:
        """Of the shards' names, sizes and times of change, and of the framing."""
        names = [path.name for path in self.shards]
        held = [asdict(self.framing), self.hints, names, self.stamps, len(self)]
        return hashlib.sha256(json.dumps(held).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class WebShardsConfig:
    """`kind = "web_shards"` of a config; `shards` is a pattern or a folder."""

    shards: str
    size: int
    crop: Crop = "centre"
    flip: bool = False
    hints: tuple[str, ...] = ()
    workers: int | None = None

    def open(self) -> WebShards:
        return WebShards(**vars(self))


def grouped(files: Iterator[Member], shard: str) -> Iterator[tuple[str, dict[str, Member]]]:
    """Neighbours of one key, by what follows the first dot in lower case, as WebDataset groups them."""
    split = ((KEY.fullmatch(member.name), member) for member in files)
    keyed = ((found[1], found[2].lower(), member) for found, member in split if found)
    for key, group in itertools.groupby(keyed, key=lambda one: one[0]):
        held: dict[str, Member] = {}
        for _, end, member in group:
            if end in held:
                raise PellucidError(f"{shard} must hold a file once; got {member.name} twice.", "data-damaged")
            held[end] = member
        yield key, held


def expanded(shards: str | Path | Sequence[str | Path]) -> tuple[Path, ...]:
    """The archives that are meant, all of which exist."""
    if isinstance(shards, str | Path) and Path(shards).is_dir():
        try:
            found = sorted(path for path in Path(shards).iterdir() if path.suffix == ".tar")
        except OSError as error:
            must = "one that can be read"
            raise PellucidError(rule("folder of shards", must, error.strerror), "data-unreadable") from None
    else:
        given = [shards] if isinstance(shards, str | Path) else list(shards)
        names = (name for one in given for name in braces(str(one)))
        found = [Path(name) for name in itertools.islice(names, MAX_SHARDS + 1)]
    if not found:
        raise PellucidError(rule("shards", "at least one .tar file", str(shards)), "data-empty")
    if len(found) > MAX_SHARDS:
        raise PellucidError(rule("shards", f"at most {MAX_SHARDS}", str(shards)[:200]), "data-shards")
    for path in found:
        if not path.is_file():
            raise PellucidError(rule("shard", "a file that exists", str(path)), "data-missing")
        if path.suffix != ".tar":
            advice = "Unpack compressed ones with gunzip: only plain ones can be read at any place."
            raise PellucidError(rule("shard", "a .tar file", path.name, advice), "data-shards")
    if len(set(found)) != len(found):
        raise PellucidError(rule("shards", "different", str(shards)), "data-shards")
    return tuple(found)


def braces(pattern: str) -> Iterator[str]:
    """The names that a pattern means: {000..012} counts, with the zeros of its first number, and {a,b} lists."""
    found = BRACES.search(pattern)
    if found is None:
        yield pattern
        return
    ends = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", found[1])
    if ends is not None:
        first, last = int(ends[1]), int(ends[2])
        if not 0 <= last - first < MAX_SHARDS:
            raise PellucidError(rule("shards", f"a rising range of at most {MAX_SHARDS}", found[0]), "data-shards")
        choices = [f"{number:0{len(ends[1])}d}" for number in range(first, last + 1)]
    else:
        choices = found[1].split(",")
    for choice in choices:
        yield from braces(pattern[: found.start()] + choice + pattern[found.end() :])
