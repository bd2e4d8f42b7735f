"""A folder of images in the layout of Hugging Face's `imagefolder`: classes as folders, or rows of metadata."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import check_file, open_file, parse_object, whole
from pellucid.pipeline.images import first_line
from pellucid.train.image_source import MAX_BYTES, SUFFIXES, Crop, Example, Framing, ImageSource, log, steadily

# --- Rows of metadata -----------------------------------------------------------------------------------------------

_NAMES = ("metadata.jsonl", "metadata.csv")
CAPTIONS = ("text", "caption")
_MAX_LINE = 2**20  # characters
_MAX_NAME, _MAX_PATH = 255, 2000  # bytes of a file's name, characters of its way
MAX_LABEL = 2**31 - 1


@dataclass(frozen=True)
class MetadataRow:
    """One example of the metadata: paths from the folder's top with slashes, and the row's own words."""

    file: str
    caption: str | None = None
    label: int | str | None = None
    hints: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()  # other images that the row names
    where: str = ""  # file and line


def read_rows(path: Path, inside: str, hints: Sequence[str]) -> Iterator[MetadataRow]:
    """The rows of one file that lies at `inside` of the folder, "" for its top."""
    shown = posixpath.join(inside, path.name)
    lines = _json_lines(path, shown) if path.suffix == ".jsonl" else _csv_lines(path, shown)
    for number, values in lines:
        yield _to_row(values, inside, hints, f"{shown}, line {number}")


def _json_lines(path: Path, shown: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(_text_lines(path, shown), 1):
        if not line.strip():
            continue
        try:
            yield number, parse_object(line, f"{shown}, line {number}", foreign=True)
        except PellucidError as error:
            raise PellucidError(str(error), "data-metadata") from None


def _csv_lines(path: Path, shown: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(_text_lines(path, shown), strict=True)
    try:
        for values in reader:
            if None in values or None in values.values():
                must = f"a row of {len(reader.fieldnames or ())} cells"
                raise _bad(f"{shown}, line {reader.line_num}", must, "another number of them")
            yield reader.line_num, values
    except csv.Error as error:
        raise _bad(f"{shown}, line {reader.line_num}", "comma-separated values", first_line(error)) from None


def _text_lines(path: Path, shown: str) -> Iterator[str]:
    """Lines of UTF-8 of bounded length; a byte order mark, as Excel writes it, is dropped."""
    try:
        check_file(path, shown, "data-metadata")
        with path.open(encoding="utf-8-sig", newline="") as file:
            while line := file.readline(_MAX_LINE + 1):
                if len(line) > _MAX_LINE:
                    raise _bad(shown, f"lines of at most {_MAX_LINE} characters", "a longer one")
                yield line
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(shown, "a file of UTF-8 that can be read", first_line(error)) from None


def _to_row(values: Mapping[str, Any], inside: str, hints: Sequence[str], where: str) -> MetadataRow:
    if "file_name" not in values:
        raise _bad(where, "a row with file_name", ", ".join(map(str, list(values)[:8])) or "no key")
    caption = next((values[key] for key in CAPTIONS if values.get(key) is not None), None)
    if caption is not None and not isinstance(caption, str):
        raise _bad(where, "one whose text is a string", caption)
    named = {}
    for name in hints:
        held = values.get(f"{name}_file_name", values.get(name))  # `datasets` marks columns of files so
        if held is None:
            raise _bad(where, f"a row with {name}, which is asked for as a hint", ", ".join(map(str, list(values)[:8])))
        named[name] = _safe_path(held, inside, where)
    others = tuple(
        posixpath.normpath(posixpath.join(inside, held))
        for held in values.values()
        if isinstance(held, str) and held.lower().endswith(SUFFIXES)
    )
    return MetadataRow(
        _safe_path(values["file_name"], inside, where), caption, _to_label(values, where), named, others, where
    )


def _to_label(values: Mapping[str, Any], where: str) -> int | str | None:
    label = values.get("label")
    if label == "":  # an empty cell
        return None
    if label is None or (isinstance(label, str) and not label.strip().isdigit()):
        return label
    number = whole(str(label).strip(), MAX_LABEL) if isinstance(label, str | int) and label is not True else None
    if number is None:
        raise _bad(where, "one whose label is a name or a whole number from 0", label)
    return number


def _safe_path(name: Any, inside: str, where: str) -> str:
    """A path of the metadata from the folder's top. Links inside the folder are its owner's, and are followed."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        raise _bad(where, "one that names a file with slashes", name)
    path = posixpath.normpath(posixpath.join(inside, name))
    if any(len(part.encode(errors="replace")) > _MAX_NAME for part in path.split("/")) or len(path) > _MAX_PATH:
        raise _bad(where, "one that names a file as a disk can have it", name)
    if name.startswith("/") or PureWindowsPath(name).drive or path.split("/", 1)[0] in ("..", "."):
        raise _bad(where, "one that names a file inside the folder", name, "data-path")
    return path


def _bad(where: str, must: str, got: object, code: str = "data-metadata") -> PellucidError:
    shown = got if not isinstance(got, str) or len(got) <= 200 else got[:200] + "…"
    return PellucidError(rule(where, must, shown), code)


# --- The folder -----------------------------------------------------------------------------------------------------


class ImageFolder(ImageSource):
    """The images of a folder and of those in it, in the order of their paths.

    With `metadata.jsonl` (or .csv) the rows say which images there are, in the order of the rows' paths: `file_name`,
    `text` or `caption`, `label`, and for each name in `hints` a key with a file. Without it, folders of images at
    one depth are classes.
    """

    def __init__(
        self,
        folder: str | Path,
        size: int,
        *,
        crop: Crop = "centre",
        flip: bool = False,
        hints: Sequence[str] = (),
        workers: int | None = None,
    ) -> None:
        super().__init__(Framing(size, crop, flip), hints, workers)
        self.folder = Path(folder)
        images, tables = _listing(self.folder)
        rows = _rows_of(self.folder, images, tables, self.hints) if tables else _classes_of(images)
        if not rows:
            ends = ", ".join(SUFFIXES)
            raise PellucidError(rule("folder of images", f"one that holds some ({ends})", str(folder)), "data-empty")
        if hints and not tables:
            must = f"one with metadata.jsonl, which names the {', '.join(hints)} of each"
            raise PellucidError(rule("folder of images", must, str(folder)), "data-hints")
        self.rows, self.classes = _numbered(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        return self.rows[index].file

    def example(self, index: int) -> Example:
        row = self.rows[index]
        hints = {name: self.bytes_of(file) for name, file in row.hints.items()}
        assert not isinstance(row.label, str)
        return Example(self.bytes_of(row.file), row.caption, row.label, hints)

    def bytes_of(self, file: str) -> bytes:
        return steadily(lambda: _bounded_bytes(self.folder / file))

    def inventory(self) -> dict[str, Any]:
        files = [file for row in self.rows for file in (row.file, *row.hints.values())]
        sizes = list(self.pool().map(lambda file: _size_of(self.folder / file), files))
        return {"names": files, "sizes": sizes, "texts": [(row.caption, row.label) for row in self.rows]}

    def fingerprint(self) -> str:
        """Of paths, sizes, times of change and rows, and of the framing."""
        found = hashlib.sha256(json.dumps([asdict(self.framing), self.hints]).encode())
        for row in self.rows:
            for file in (row.file, *row.hints.values()):
                try:
                    state = (self.folder / file).stat()
                    found.update(f"{state.st_size} {state.st_mtime_ns} ".encode())
                except OSError:
                    found.update(b"gone ")
            found.update(json.dumps([row.file, row.caption, row.label, dict(row.hints)]).encode())
        return found.hexdigest()[:32]


@dataclass(frozen=True)
class ImageFolderConfig:
    """`kind = "image_folder"` of a config."""

    folder: str
    size: int
    crop: Crop = "centre"
    flip: bool = False
    hints: tuple[str, ...] = ()
    workers: int | None = None

    def open(self) -> ImageFolder:
        return ImageFolder(**vars(self))


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _bounded_bytes(path: Path) -> bytes:
    with open_file(path, path.name, "image-file") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise PellucidError(f"it has {size} bytes, more than {MAX_BYTES}", "image-file")
        return file.read(size)  # not more: Python makes room for all that is asked for


def _listing(folder: Path) -> tuple[list[str], list[str]]:
    """The paths of all images and of all metadata files, sorted, from the folder's top with slashes."""
    if not folder.is_dir():
        raise PellucidError(rule("folder of images", "a folder that exists", str(folder)), "data-missing")
    images, tables = [], []
    failed: list[OSError] = []
    for place, folders, files in os.walk(folder, onerror=failed.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(place).relative_to(folder).as_posix()
        for name in files:
            path = posixpath.normpath(posixpath.join(inside, name))
            if name in _NAMES:
                tables.append(path)
            elif name.lower().endswith(SUFFIXES) and not name.startswith("."):  # macOS leaves ._name.jpg
                images.append(path)
    if failed:
        shown = f"{failed[0].filename}: {failed[0].strerror}"
        raise PellucidError(rule("folder of images", "one that can be read", shown), "data-unreadable")
    return sorted(images), sorted(tables)


def _rows_of(folder: Path, images: Sequence[str], tables: Sequence[str], hints: Sequence[str]) -> list[MetadataRow]:
    """The rows of all metadata files, sorted by image; all of them say the same kinds of things."""
    there, rows = set(images), []
    first: dict[str, str] = {}  # image → its row
    for table in tables:
        for row in read_rows(folder / table, posixpath.dirname(table), hints):
            for file in (row.file, *row.hints.values()):
                if file not in there and not (folder / file).is_file():
                    raise _bad(row.where, "one whose files are there", file, "data-missing")
            if row.file in first:
                raise _bad(row.where, f"about another image than {first[row.file]}", row.file)
            first[row.file] = row.where
            rows.append(row)
    _check_alike(rows)
    named = {file for row in rows for file in (row.file, *row.others, *row.hints.values())}
    if left := [file for file in images if file not in named]:
        log.warning("%d images without a row in %s are left out, such as %s", len(left), tables[0], left[0])
    return sorted(rows, key=lambda row: row.file)


def _check_alike(rows: Sequence[MetadataRow]) -> None:
    """Every row has a caption, or none has; the same of labels, which are all names or all numbers."""
    for row in rows:
        for what, kind, first in (
            ("text", type(row.caption), type(rows[0].caption)),
            ("label", type(row.label), type(rows[0].label)),
        ):
            if kind is not first:
                words = {type(None): f"no {what}", str: f"a {what} in words", int: f"a {what} as a number"}
                raise _bad(row.where, f"one with {words[first]}, as {rows[0].where}", words[kind])


def _classes_of(images: Sequence[str]) -> list[MetadataRow]:
    """Without metadata an image's folder is its class, if all lie equally deep and in several, as in `datasets`."""
    depths = {file.count("/") for file in images}
    parents = {posixpath.basename(posixpath.dirname(file)) for file in images}
    classed = len(depths) == 1 and len(parents) > 1
    return [
        MetadataRow(file, label=posixpath.basename(posixpath.dirname(file)) if classed else None) for file in images
    ]


def _numbered(rows: Sequence[MetadataRow]) -> tuple[tuple[MetadataRow, ...], tuple[str, ...]]:
    """The rows with labels as numbers, and the names of classes in their order."""
    names = sorted({row.label for row in rows if isinstance(row.label, str)})
    number = {name: i for i, name in enumerate(names)}
    kept = (
        MetadataRow(row.file, row.caption, number[row.label] if isinstance(row.label, str) else row.label, row.hints)
        for row in rows
    )
    return tuple(kept), tuple(names)
