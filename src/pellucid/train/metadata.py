"""metadata.jsonl and metadata.csv beside images: which files, and what is said of them, checked row by row."""

from __future__ import annotations

import csv
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import check_file, parse_object, whole
from pellucid.pipeline.images import first_line
from pellucid.train.images import SUFFIXES

NAMES = ("metadata.jsonl", "metadata.csv")
CAPTIONS = ("text", "caption")
MAX_LINE = 2**20  # characters
MAX_NAME, MAX_PATH = 255, 2000  # bytes of a file's name, characters of its way
MAX_LABEL = 2**31 - 1


@dataclass(frozen=True)
class Row:
    """One example of the metadata: paths from the folder's top with slashes, and the row's own words."""

    file: str
    caption: str | None = None
    label: int | str | None = None
    hints: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()  # other images that the row names
    where: str = ""  # file and line


def read(path: Path, inside: str, hints: Sequence[str]) -> Iterator[Row]:
    """The rows of one file that lies at `inside` of the folder, "" for its top."""
    shown = posixpath.join(inside, path.name)
    lines = json_lines(path, shown) if path.suffix == ".jsonl" else csv_lines(path, shown)
    for number, values in lines:
        yield to_row(values, inside, hints, f"{shown}, line {number}")


def json_lines(path: Path, shown: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text_lines(path, shown), 1):
        if not line.strip():
            continue
        try:
            yield number, parse_object(line, f"{shown}, line {number}", foreign=True)
        except PellucidError as error:
            raise PellucidError(str(error), "data-metadata") from None


def csv_lines(path: Path, shown: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(text_lines(path, shown), strict=True)
    try:
        for values in reader:
            if None in values or None in values.values():
                must = f"a row of {len(reader.fieldnames or ())} cells"
                raise bad(f"{shown}, line {reader.line_num}", must, "another number of them")
            yield reader.line_num, values
    except csv.Error as error:
        raise bad(f"{shown}, line {reader.line_num}", "comma-separated values", first_line(error)) from None


def text_lines(path: Path, shown: str) -> Iterator[str]:
    """Lines of UTF-8 of bounded length; a byte order mark, as Excel writes it, is dropped."""
    try:
        check_file(path, shown, "data-metadata")
        with path.open(encoding="utf-8-sig", newline="") as file:
            while line := file.readline(MAX_LINE + 1):
                if len(line) > MAX_LINE:
                    raise bad(shown, f"lines of at most {MAX_LINE} characters", "a longer one")
                yield line
    except (OSError, UnicodeDecodeError) as error:
        raise bad(shown, "a file of UTF-8 that can be read", first_line(error)) from None


def to_row(values: Mapping[str, Any], inside: str, hints: Sequence[str], where: str) -> Row:
    if "file_name" not in values:
        raise bad(where, "a row with file_name", ", ".join(map(str, list(values)[:8])) or "no key")
    caption = next((values[key] for key in CAPTIONS if values.get(key) is not None), None)
    if caption is not None and not isinstance(caption, str):
        raise bad(where, "one whose text is a string", caption)
    named = {}
    for name in hints:
        held = values.get(f"{name}_file_name", values.get(name))  # `datasets` marks columns of files so
        if held is None:
            raise bad(where, f"a row with {name}, which is asked for as a hint", ", ".join(map(str, list(values)[:8])))
        named[name] = safe_path(held, inside, where)
    others = tuple(
        posixpath.normpath(posixpath.join(inside, held))
        for held in values.values()
        if isinstance(held, str) and held.lower().endswith(SUFFIXES)
    )
    return Row(safe_path(values["file_name"], inside, where), caption, to_label(values, where), named, others, where)


def to_label(values: Mapping[str, Any], where: str) -> int | str | None:
    label = values.get("label")
    if label == "":  # an empty cell
        return None
    if label is None or (isinstance(label, str) and not label.strip().isdigit()):
        return label
    number = whole(str(label).strip(), MAX_LABEL) if isinstance(label, str | int) and label is not True else None
    if number is None:
        raise bad(where, "one whose label is a name or a whole number from 0", label)
    return number


def safe_path(name: Any, inside: str, where: str) -> str:
    """A path of the metadata from the folder's top. Links inside the folder are its owner's, and are followed."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        raise bad(where, "one that names a file with slashes", name)
    path = posixpath.normpath(posixpath.join(inside, name))
    if any(len(part.encode(errors="replace")) > MAX_NAME for part in path.split("/")) or len(path) > MAX_PATH:
        raise bad(where, "one that names a file as a disk can have it", name)
    if name.startswith("/") or PureWindowsPath(name).drive or path.split("/", 1)[0] in ("..", "."):
        raise bad(where, "one that names a file inside the folder", name, "data-path")
    return path


def bad(where: str, must: str, got: object, code: str = "data-metadata") -> PellucidError:
    shown = got if not isinstance(got, str) or len(got) <= 200 else got[:200] + "…"
    return PellucidError(rule(where, must, shown), code)
