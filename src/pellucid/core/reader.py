"""The one reader of what comes from outside: plain files of bounded size, JSON and TOML, values of a known type.

Whatever a file holds, reading it ends in values of the types that were asked for, or in a PellucidError of one line
that names the file and the key. `typed` and `table` are driven by annotations, so a dataclass is its own schema.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import stat
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING
from functools import cache
from typing import Any, BinaryIO, Literal, NoReturn, TypeVar

from pellucid.core.errors import PellucidError, cut, nearest, rule

_T = TypeVar("_T")
Source = str | os.PathLike[str]
_MAX_BYTES = 64 * 2**20
_MAX_DEPTH = 64  # of nested lists and objects
_MAX_DIGITS = 100  # of a whole number: all of these are finite as floats
_MAX_ITEMS = 1_000_000  # of a list under a key of known type
_LONG = re.compile(rf"[0-9]{{{_MAX_DIGITS + 1}}}")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

# --- files -----------------------------------------------------------------------------------------------------


def check_file(path: Source, what: str, code: str = "file") -> os.stat_result:
    """Refuses what is no plain file, before anything opens it: a pipe would wait, a device may do anything."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise PellucidError(rule(what, "a file that exists", os.fspath(path)), code) from None
    except (OSError, ValueError) as error:  # no permission, a name that no file can have
        raise _unreadable(path, what, error, code) from None
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise PellucidError(rule(what, "a plain file", f"{os.fspath(path)}, {kind}"), code)
    return found


def open_file(path: Source, what: str, code: str = "file") -> BinaryIO:
    """A plain file, opened to be read. Opening never waits, also where a pipe took the file's place meanwhile."""
    check_file(path, what, code)
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise _unreadable(path, what, error, code) from None
    file = os.fdopen(handle, "rb")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise PellucidError(rule(what, "a plain file", os.fspath(path)), code)
    return file


def read_bytes(path: Source, what: str, most: int = _MAX_BYTES, code: str = "file") -> bytes:
    """A whole file of at most so many bytes."""
    with open_file(path, what, code) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            name = os.path.basename(os.fspath(path))
            large = "file-size" if code == "file" else code
            raise PellucidError(rule(what, f"at most {most} bytes", f"{size} in {name}"), large)
        try:
            return file.read(size)
        except OSError as error:
            raise _unreadable(path, what, error, code) from None


def read_text(path: Source, what: str, most: int = _MAX_BYTES, code: str = "file") -> str:
    """A whole file of UTF-8; a byte order mark is dropped."""
    try:
        return read_bytes(path, what, most, code).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise PellucidError(rule(what, "text in UTF-8", os.fspath(path)), code) from None


def read_lines(path: Source, what: str, most: int = _MAX_BYTES, code: str = "file", empty: str = "") -> tuple[str, ...]:
    """The lines of a text file that are not blank, stripped; a file without any is refused as `empty`."""
    found = tuple(line.strip() for line in read_text(path, what, most, code).splitlines() if line.strip())
    if not found:
        raise PellucidError(rule(what, "at least one line", os.fspath(path)), empty or code)
    return found


def _unreadable(path: Source, what: str, error: Exception, code: str) -> PellucidError:
    why = f"{getattr(error, 'strerror', None) or 'No file can have this name'}."
    return PellucidError(rule(what, "a file that can be read", os.fspath(path), why), code)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Puts a file's name before what is wrong inside of it, where the message does not say it."""
    try:
        yield
    except PellucidError as error:
        if name and name[:60] not in str(error):
            error.args = (f"{cut(name, 80)}: {error}",)
        raise


# --- JSON and TOML ---------------------------------------------------------------------------------------------


def parse_json(text: str | bytes, what: str, code: str = "json", *, foreign: bool = False) -> Any:
    """A JSON value. Files of others (`foreign`) may hold what Python's writer gives them beyond JSON: NaN, Infinity;
    and a key twice, of which the last counts."""

    def number(digits: str) -> int:
        if len(digits) > _MAX_DIGITS:
            raise PellucidError(rule(f"a number in {what}", f"of at most {_MAX_DIGITS} digits", len(digits)), code)
        return int(digits)

    def constant(name: str) -> NoReturn:
        raise PellucidError(rule(f"a number in {what}", "finite", name), "not-finite")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in pairs:
            if key in made:
                raise PellucidError(rule(f"a key in {what}", "there once", key), code)
            made[key] = value
        return made

    hooks: dict[str, Any] = {} if foreign else {"parse_constant": constant, "object_pairs_hook": once}
    try:
        plain = text if isinstance(text, str) else text.decode("utf-8-sig")
        if _LONG.search(plain):  # a hook for every number would slow a vocabulary down
            hooks["parse_int"] = number
        found = json.loads(plain, **hooks)
    except PellucidError:
        raise
    except RecursionError:
        raise _too_deep(what, code) from None
    except (ValueError, TypeError, AttributeError) as error:  # not JSON, not UTF-8, no text
        raise PellucidError(f"{what} must be JSON; {_first_line(error)}", code) from None
    _check_depth(found, what, code)
    return found


def _check_depth(value: Any, what: str, code: str) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MAX_DEPTH):
        if not level:
            return
        inner = (one for held in level for one in (held.values() if isinstance(held, dict) else held))
        level = [one for one in inner if isinstance(one, dict | list)]
    raise _too_deep(what, code)


def _too_deep(what: str, code: str) -> PellucidError:
    return PellucidError(rule(what, f"nested at most {_MAX_DEPTH} deep", "more"), code)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return f"{lines[0][:120].rstrip('.')}."


def parse_object(text: str | bytes, what: str, code: str = "json", *, foreign: bool = False) -> dict[str, Any]:
    """A JSON object."""
    found = parse_json(text, what, code, foreign=foreign)
    if not isinstance(found, dict):
        raise PellucidError(rule(what, "a JSON object", found), code)
    return found


def read_json(
    path: Source, most: int = _MAX_BYTES, code: str = "json-file", *, foreign: bool = False
) -> dict[str, Any]:
    """The JSON object of a file."""
    name = os.path.basename(os.fspath(path))
    return parse_object(read_text(path, name, most, code), name, code, foreign=foreign)


def read_toml(path: Source, what: str, most: int, code: str = "toml-file") -> dict[str, Any]:
    """The tables of a TOML file."""
    name = os.path.basename(os.fspath(path))
    text = read_text(path, what, most, code)
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, a number without end, tables without end
        raise PellucidError(rule(what, "valid TOML", f"{name}: {_first_line(error)}"), code) from None
    _check_depth(found, name, code)
    return found


# --- values of known types -------------------------------------------------------------------------------------

Bound = tuple[float, float]


def table(cls: type[_T], raw: Any, where: str, bounds: Mapping[str, Bound] | None = None, code: str = "config") -> _T:
    """A dataclass from an object. An unknown or missing key, a wrong type, a value out of bounds: one line each."""
    if not isinstance(raw, Mapping):
        raise PellucidError(rule(where, "a table", raw), f"{code}-type")
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in raw:
        if key not in known:
            short = str(key)[:80]
            raise PellucidError(f"{where}.{short} must be a known key. {nearest(short, known)}", f"{code}-key")
    missing = [k for k, f in known.items() if k not in raw and f.default is MISSING and f.default_factory is MISSING]
    if missing:
        held = ", ".join(raw) or "none"
        raise PellucidError(f"{where} must have {', '.join(missing)}; got {held[:120]}.", f"{code}-missing")
    hints = hints_of(typing.cast(type, cls))
    limits = bounds or {}
    return cls(**{k: typed(hints[k], v, f"{where}.{k}", limits.get(k), code) for k, v in raw.items()})


@cache
def hints_of(cls: Any) -> dict[str, Any]:
    """The annotations of a dataclass as types."""
    return typing.get_type_hints(cls)


def typed(hint: Any, value: Any, where: str, bound: Bound | None = None, code: str = "config") -> Any:
    """A value as its annotation wants it: lists become tuples, whole numbers floats; nothing else is converted.

    `bound` limits every number in it. A string is no number and no boolean, and a boolean is no number.
    """
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _free(value, where, code)
    if dataclasses.is_dataclass(hint):
        return table(typing.cast(type, hint), value, where, code=code)
    if origin is Literal:
        if not any(type(value) is type(one) and value == one for one in inside):
            raise PellucidError(rule(where, "one of " + ", ".join(map(str, inside)), value), f"{code}-value")
        return value
    if origin in (typing.Union, types.UnionType):
        return _either(hint, inside, value, where, bound, code)
    if origin is tuple:
        return _listed(inside, value, where, bound, code)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise PellucidError(rule(where, _words(hint), value), f"{code}-type")
        return {str(k): typed(inside[1], v, f"{where}.{str(k)[:80]}", bound, code) for k, v in value.items()}
    return _plain(hint, value, where, bound, code)


def _plain(kind: Any, value: Any, where: str, bound: Bound | None, code: str) -> Any:
    """A text, a boolean, or a finite number in its bounds."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1e308 else math.inf
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise PellucidError(rule(where, _words(kind), value), f"{code}-type")
    if kind is float and not math.isfinite(value):
        raise PellucidError(rule(where, "finite", value), f"{code}-value")
    if bound is not None and kind in (int, float) and not bound[0] <= value <= bound[1]:
        low, high = (str(end) if isinstance(end, int) else f"{end:g}" for end in bound)
        raise PellucidError(rule(where, f"{_words(kind)} from {low} to {high}", value), f"{code}-value")
    return value


def _either(hint: Any, kinds: tuple[Any, ...], value: Any, where: str, bound: Bound | None, code: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if len(kinds) == 1:
        return typed(kinds[0], value, where, bound, code)
    for kind in kinds:
        try:
            return typed(kind, value, where, bound, code)
        except PellucidError as error:
            if error.code == f"{code}-value" and typing.get_origin(kind) is None:
                raise  # of the right type, and out of bounds
    raise PellucidError(rule(where, _words(hint), value), f"{code}-type")


def _listed(kinds: tuple[Any, ...], value: Any, where: str, bound: Bound | None, code: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise PellucidError(rule(where, _words_of_list(kinds[0]), value), f"{code}-type")
    if kinds[-1] is not Ellipsis and len(value) != len(kinds):
        raise PellucidError(rule(where, f"a list of {len(kinds)}", value), f"{code}-value")
    if len(value) > _MAX_ITEMS:
        raise PellucidError(rule(where, f"a list of at most {_MAX_ITEMS}", len(value)), f"{code}-value")
    each = [kinds[0]] * len(value) if kinds[-1] is Ellipsis else kinds
    return tuple(
        typed(kind, item, f"{where}[{i}]", bound, code) for i, (kind, item) in enumerate(zip(each, value, strict=True))
    )


def _words(hint: Any) -> str:
    """A type in words."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(kind) for kind in inside)
    if origin is tuple:
        return _words_of_list(inside[0])
    if origin is not None and issubclass(origin, Mapping):
        return "a table"
    if dataclasses.is_dataclass(hint):
        return "a table"
    known = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    return known.get(hint, "a value")


def _words_of_list(kind: Any) -> str:
    many = {int: "whole numbers", float: "numbers", str: "texts"}
    return f"a list of {many[kind]}" if kind in many else "a list"


def whole(text: str, most: int = 10**12) -> int | None:
    """The whole number that a text is, from 0 to `most`, in plain digits; None where it is none."""
    found = int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None
    return None if found is None or found > most else found


def _free(value: Any, where: str, code: str = "config") -> Any:
    """What belongs to somebody else: anything that JSON knows, with finite numbers."""
    if isinstance(value, Mapping):
        return {str(key): _free(item, f"{where}.{str(key)[:80]}", code) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_free(item, f"{where}[{i}]", code) for i, item in enumerate(value)]
    if not isinstance(value, str | int | float | None) or (isinstance(value, float) and not math.isfinite(value)):
        raise PellucidError(rule(where, "a finite number, a text, a list or a table", value), f"{code}-value")
    return value
