"""WebDataset shards: tar archives whose neighbouring files of one name are an example, read at any index."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import parse_object
from pellucid.train.image_folder import CAPTIONS, MAX_LABEL
from pellucid.train.image_source import MAX_BYTES, Crop, Example, Framing, ImageSource, log, steadily

# --- Members of a tar -----------------------------------------------------------------------------------------------

_MAX_HEADER = 8192  # bytes of a long name or of pax records; tarfile's time to parse them grows with their square


@dataclass(frozen=True)
class TarMember:
    """One file of an archive."""

    name: str
    offset: int  # of its bytes
    size: int


class TarDamagedError(PellucidError):
    """The archive cannot be read on from here."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "data-damaged")


class _HeaderFile(io.FileIO):
    """An archive of which only headers are read, so that a false size cannot allocate memory."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _MAX_HEADER:
            raise TarDamagedError(f"the long name before byte {self.tell()} is broken")
        return super().read(size) or b""


class _Header(tarfile.TarInfo):
    """A header without owner, times and mode, on which tarfile spends most of its time; what is unusual, it reads."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        kind, size, check = buf[156:157], buf[124:135], buf[148:154]
        plain = kind in (b"0", b"x") and size.isdigit() and check.isdigit() and buf[345] == 0
        if not plain or sum(buf) - sum(buf[148:156]) + 8 * 32 != int(check, 8):
            return super().frombuf(buf, encoding, errors)
        found = cls(buf[:100].split(b"\0", 1)[0].decode(encoding, errors))
        found.type, found.size = bytes(kind), int(size, 8)
        return found


def members(path: Path) -> Iterator[TarMember]:
    """The files of an archive in their order; ends with TarDamagedError where it is cut off or broken.

    Nothing is unpacked. Links, devices and folders are passed over.
    """
    with _HeaderFile(path) as file:
        end = os.fstat(file.fileno()).st_size
        if not end:
            return
        try:
            archive = tarfile.TarFile(fileobj=file, tarinfo=_Header, encoding="utf-8", errors="replace")
            while (found := archive.next()) is not None:
                archive.members.clear()  # it would keep all of them
                if found.issparse():
                    raise TarDamagedError(f"{found.name} is stored sparse, which is not read here")
                if found.size < 0 or (found.isreg() and found.offset_data + found.size > end):
                    raise TarDamagedError(f"{found.name} is cut off")
                if found.isreg():
                    yield TarMember(found.name, found.offset_data, found.size)
            file.seek(archive.offset)
            if any(file.read(tarfile.BLOCKSIZE)):
                raise TarDamagedError(f"its header at byte {archive.offset} is broken")
        except (OSError, MemoryError, PellucidError):
            raise
        except Exception as error:  # damaged headers make tarfile fail in any way
            raise TarDamagedError(f"it is no tar archive, or broken: {error}") from None


# --- Shards ---------------------------------------------------------------------------------------------------------

_IMAGES = ("jpg", "jpeg", "png", "webp")
_MAX_TEXT = 2**20  # bytes of a caption, a class or a JSON file
_MAX_SHARDS = 100_000
_BRACES = re.compile(r"\{([^{}]*)\}")
_KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)  # up to the first dot of the file's own name
_ENDINGS = {"picture": _IMAGES, "text": ("txt", "caption", "text"), "cls": ("cls",), "json": ("json",)}  # hints follow
_IMAGE, _TEXT, _CLS, _JSON, _HINTS = range(5)  # the columns
_NOWHERE = -1


@dataclass(frozen=True)
class Columns:
    """Where captions and labels are: a column, and its key if it is JSON."""

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
        self.shards = _expanded(shards)
        self.damaged: dict[str, str] = {}  # shard → why it was not read to its end
        self.incomplete = 0  # examples without an image, or without a hint that is asked for
        self.stamps = tuple((path.stat().st_size, path.stat().st_mtime_ns) for path in self.shards)
        self.keys: list[str] = []
        table = [row for number, path in enumerate(self.shards) for row in self.indexed(number, path)]
        if not table:
            must = f"shards that hold some ({', '.join(_IMAGES)}" + "".join(f", {name}.png" for name in hints) + ")"
            raise PellucidError(rule("images", must, str(shards)), "data-empty")
        if self.incomplete:
            log.warning("%d examples without an image or a hint are left out", self.incomplete)
        self.table = np.array(table, np.int64)  # (N, 1 + 2 · columns): shard, then offsets and sizes
        self.columns = self.first_columns()

    def __len__(self) -> int:
        return len(self.table)

    def name(self, index: int) -> str:
        return f"{self.shards[int(self.table[index, 0])].name}/{self.keys[index]}"

    def indexed(self, shard: int, path: Path) -> Iterator[list[int]]:
        """The rows of one shard, as far as it can be read."""
        endings = [*_ENDINGS.values(), *([f"{hint}.{end}" for end in _IMAGES] for hint in self.hints)]
        for key, files in _grouped(self.readable(path), path.name):
            chosen = [next((files[end] for end in ends if end in files), None) for ends in endings]
            if chosen[_IMAGE] is None or None in chosen[_HINTS:]:
                self.incomplete += 1
                continue
            self.keys.append(key)
            yield [shard, *itertools.chain(*((m.offset, m.size) if m else (_NOWHERE, 0) for m in chosen))]

    def readable(self, path: Path) -> Iterator[TarMember]:
        """The files of a shard; a damaged one is named, and ends where the damage is."""
        try:
            yield from members(path)
        except (TarDamagedError, OSError) as error:
            self.damaged[path.name] = str(error)
            log.warning("%s is used up to where it is damaged: %s", path.name, error)

    def first_columns(self) -> Columns:
        """Where captions and labels are, judged by the first example whose JSON, if any, can be read."""
        for index in range(len(self)):
            try:
                said = self.said(index) if self.has(index, _JSON) else {}
            except PellucidError:
                continue
            key = next((key for key in CAPTIONS if isinstance(said.get(key), str)), "")
            return Columns(
                _TEXT if self.has(index, _TEXT) else _JSON if key else None,
                _CLS if self.has(index, _CLS) else _JSON if "label" in said else None,
                key,
            )
        return Columns()

    def has(self, index: int, column: int) -> bool:
        return int(self.table[index, 1 + 2 * column]) != _NOWHERE

    def bytes_of(self, index: int, column: int, limit: int = _MAX_TEXT) -> bytes:
        """One file of an example, read alone."""
        shard, offset, size = (int(n) for n in self.table[index, [0, 1 + 2 * column, 2 + 2 * column]])
        if offset == _NOWHERE:
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
        return parse_object(self.bytes_of(index, _JSON), "its JSON", "data-metadata", foreign=True)

    def example(self, index: int) -> Example:
        columns = self.columns
        said = self.said(index) if _JSON in (columns.caption, columns.label) else {}
        hints = {name: self.bytes_of(index, _HINTS + i, MAX_BYTES) for i, name in enumerate(self.hints)}
        return Example(
            self.bytes_of(index, _IMAGE, MAX_BYTES),
            None if columns.caption is None else self.caption(index, said),
            None if columns.label is None else self.label(index, said),
            hints,
        )

    def caption(self, index: int, said: dict[str, Any]) -> str:
        found: Any = said.get(self.columns.caption_key)
        if self.columns.caption == _TEXT:
            found = self.bytes_of(index, _TEXT).decode("utf-8", "strict").strip()
        if not isinstance(found, str):
            raise PellucidError(f"its JSON has no {self.columns.caption_key}", "data-metadata")
        return found

    def label(self, index: int, said: dict[str, Any]) -> int:
        found: Any = said.get("label")
        if self.columns.label == _CLS:
            found = self.bytes_of(index, _CLS).strip()
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


def _grouped(files: Iterator[TarMember], shard: str) -> Iterator[tuple[str, dict[str, TarMember]]]:
    """Neighbours of one key, by what follows the first dot in lower case, as WebDataset groups them."""
    split = ((_KEY.fullmatch(member.name), member) for member in files)
    keyed = ((found[1], found[2].lower(), member) for found, member in split if found)
    for key, group in itertools.groupby(keyed, key=lambda one: one[0]):
        held: dict[str, TarMember] = {}
        for _, end, member in group:
            if end in held:
                raise PellucidError(f"{shard} must hold a file once; got {member.name} twice.", "data-damaged")
            held[end] = member
        yield key, held


def _expanded(shards: str | Path | Sequence[str | Path]) -> tuple[Path, ...]:
    """The archives that are meant, all of which exist."""
    if isinstance(shards, str | Path) and Path(shards).is_dir():
        try:
            named: list[str | Path] = sorted(path for path in Path(shards).iterdir() if path.suffix == ".tar")
        except OSError as error:
            must = "one that can be read"
            raise PellucidError(rule("folder of shards", must, error.strerror), "data-unreadable") from None
    else:
        given = [shards] if isinstance(shards, str | Path) else list(shards)
        names = (name for one in given for name in braces(str(one)))
        named = list(itertools.islice(names, _MAX_SHARDS + 1))
    if not named:
        raise PellucidError(rule("shards", "at least one .tar file", str(shards)), "data-empty")
    if len(named) > _MAX_SHARDS:
        raise PellucidError(rule("shards", f"at most {_MAX_SHARDS}", str(shards)[:200]), "data-shards")
    found = [Path(path) for path in named]
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
    found = _BRACES.search(pattern)
    if found is None:
        yield pattern
        return
    ends = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", found[1])
    if ends is not None:
        first, last = int(ends[1]), int(ends[2])
        if not 0 <= last - first < _MAX_SHARDS:
            raise PellucidError(rule("shards", f"a rising range of at most {_MAX_SHARDS}", found[0]), "data-shards")
        choices = [f"{number:0{len(ends[1])}d}" for number in range(first, last + 1)]
    else:
        choices = found[1].split(",")
    for choice in choices:
        yield from braces(pattern[: found.start()] + choice + pattern[found.end() :])
