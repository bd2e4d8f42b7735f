"""What a check of a lab is made of, and how an answer is checked: in a process of its own, within limits."""

from __future__ import annotations

import ast
import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from pellucid.core.errors import PellucidError, rule
from pellucid.labs import process
from pellucid.labs.catalog import Lab

Verdict = Literal["passed", "wrong", "error", "not written yet"]
TIMEOUT = 60.0  # seconds for all checks of an answer
MOST_BYTES = 2**20  # of an answer
WRITE_ONE = "Write one: pellucid lab 03 --starter answer.py."


class Wrong(Exception):  # noqa: N818
    """An answer is not right: what was expected, what came, and a hint, in one sentence."""


@dataclass(frozen=True)
class Check:
    """`run` is given the answer as a module and raises `Wrong` where it is not right."""

    name: str
    run: Callable[[ModuleType], None]


@dataclass(frozen=True)
class Outcome:
    """What came of one check; `printed` is what the answer said meanwhile, on stdout."""

    name: str
    verdict: Verdict
    sentence: str = ""
    printed: str = ""


_KEYS = {field.name for field in fields(Outcome)}


def check(
    lab: Lab,
    answer: Path,
    timeout: float = TIMEOUT,
    cancelled: Callable[[], bool] = process.never,
    within: Path | None = None,
) -> list[Outcome]:
    """Runs every check of the lab on an answer; the answer is somebody's code, and runs beside us.

    It runs in an empty folder of mode 0700 that is removed afterwards (`within` one of the caller's, else a temporary
    one), and within `marking.LIMITS`.
    """
    with tempfile.TemporaryDirectory(prefix="pellucid-lab-", dir=within, ignore_cleanup_errors=True) as scratch:
        return checked(lab, answer, Path(scratch), timeout, cancelled)


def checked(lab: Lab, answer: Path, scratch: Path, timeout: float, cancelled: Callable[[], bool]) -> list[Outcome]:
    """Where the process ends or takes too long, the checks that are left say so.

    What else is told than one outcome for each check, in their order, the answer wrote; then no outcome is believed.
    """
    refuse(answer)
    names: list[str] = []
    found: list[Outcome] = []
    words = [lab.code, str(answer.absolute()), str(scratch)]
    own = {"TMPDIR": str(scratch), "CUDA_VISIBLE_DEVICES": ""}  # a GPU's address space is larger than any limit
    follow = process.follow("pellucid.labs.marking", words, environment=own, timeout=timeout, cancelled=cancelled)
    try:
        with contextlib.closing(follow):
            names = next(follow, {}).get("names", [])  # told before the answer is opened
            for told in follow:
                found.append(_outcome(told, names[len(found) :]))
        why = "the answer ended its process"
    except TimeoutError:
        why = f"the answer did not end within {timeout:g} s"
    except process.ForeignOutput:
        found, why = [], "the answer wrote where the checks tell their outcomes"
    except process.ProcessEnded as error:
        if not names:
            raise
        why = f"the answer ended its process: {error}"
    left = names[len(found) :] if names else ["the answer begins"]
    return found + [Outcome(name, "error", why) for name in left]


def _outcome(told: dict[str, Any], left: list[str]) -> Outcome:
    texts = all(isinstance(one, str) for one in told.values())
    if not texts or set(told) != _KEYS or told["name"] not in left[:1] or told["verdict"] not in get_args(Verdict):
        raise process.ForeignOutput("it told what is no outcome of the next check")
    return Outcome(**told)


def refuse(answer: Path) -> None:
    """Says in one line why a file cannot be an answer."""
    if not answer.is_file():
        raise PellucidError(rule("answer", "a file that exists", str(answer), WRITE_ONE), "answer-file")
    size = answer.stat().st_size
    if size > MOST_BYTES:
        raise PellucidError(rule("answer", "at most 1 MiB", f"{size:,} bytes"), "answer-size")
    try:
        written = ast.parse(answer.read_bytes(), str(answer)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        said = f"{error.msg}, line {error.lineno}" if isinstance(error, SyntaxError) else type(error).__name__
        raise PellucidError(f"answer must be Python; got {answer.name}: {said}.", "answer-python") from None
    if all(isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in written):  # a docstring
        raise PellucidError(f"answer must have code; {answer.name} has none. {WRITE_ONE}", "answer-empty")
