"""Errors that say which name broke which rule, what was given, and what to do instead."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable

# how torch says on a CPU that memory ran out, and that a size is beyond any
_NO_MEMORY = (
    "DefaultCPUAllocator",
    "not enough memory",
    "out of memory",
    "std::bad_alloc",
    "size calculation overflowed",
)
_RUST = re.compile(r"\(os error (\d+)\)")  # how safetensors and tokenizers say what the system refused
_MOST_SHOWN = 120  # characters of a value in a message
_MOST_WORDS = 1000  # of a message: a file's own words may stand in it


def cut(text: str, most: int) -> str:
    """A text without its middle where it is long."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[len(text) - most // 2 + 1 :]}"


class PellucidError(ValueError):
    """Bad input. `code` is stable: programs may match on it, people read the sentence."""

    def __init__(self, message: str, code: str = "input") -> None:
        super().__init__(cut(message, _MOST_WORDS))
        self.code = code


class PlanError(PellucidError):
    """A plan that cannot be made, or that breaks the marginal law."""

    def __init__(self, message: str, code: str = "plan") -> None:
        super().__init__(message, code)


class PellucidWarning(UserWarning):
    """Something that runs, and is probably not what was meant."""


class Cancelled(Exception):  # noqa: N818
    """Raised between two rows when the caller asked the run to stop."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on any device: torch says so on a CPU with a RuntimeError like any other."""
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    return said or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's, of a GPU


def system_error(error: BaseException, path: str | os.PathLike[str] | None = None) -> OSError | None:
    """What the system refused (a full disk, say) behind an error, with the file that it is about; None of others.

    The error of a write names no file by itself: the caller gives its `path`."""
    if isinstance(error, OSError) and error.errno is None and type(error) is not OSError:
        return None  # an answer of a server, say, which is an OSError too
    if isinstance(error, OSError):
        number, words = error.errno or errno.EIO, error.strerror or str(error)
    elif not isinstance(error, PellucidError) and (found := _RUST.search(str(error))):
        number = int(found[1])
        words = os.strerror(number)
    else:
        return None
    name = path if path is not None else getattr(error, "filename", None)
    return OSError(number, words, None if name is None else os.fspath(name))


def shown(value: object, most: int = _MOST_SHOWN) -> str:
    """A value as a message shows it: on one line, and cut where it is long, in the middle if it is text."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return repr(cut(value, most))
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists without end
        text = f"a value of type {type(value).__name__} that is too long to show"
    text = " ".join(text.splitlines())
    return text if len(text) <= most else text[: most - 1] + "…"


def rule(name: str, must: str, got: object, advice: str = "") -> str:
    """The house sentence: `eta must be 0 for heun; got 0.5. Use euler_a for a stochastic sampler.`"""
    return f"{name} must be {must}; got {shown(got)}." + (f" {advice}" if advice else "")


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """A hint that lists the known names closest to an unknown one."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name.lower(), names, n=count, cutoff=0.3) or names[:count]
    return "Nearest: " + ", ".join(close) + "."
