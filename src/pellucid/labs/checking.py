"""What a check of a lab is made of, and how an answer is checked: in a process of its own, within a minute."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from pellucid.core.errors import PellucidError, rule
from pellucid.labs import process
from pellucid.labs.catalog import Lab

Verdict = Literal["passed", "wrong", "error", "not written yet"]
TIMEOUT = 60.0  # seconds for all checks of an answer
MOST_BYTES = 2**20  # of an answer


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


def check(
    lab: Lab, answer: Path, timeout: float = TIMEOUT, cancelled: Callable[[], bool] = process.never
) -> list[Outcome]:
    """Runs every check of the lab on an answer; the answer is somebody's code, and runs beside us."""
    return list(checked(lab, answer, timeout, cancelled))


def checked(
    lab: Lab, answer: Path, timeout: float = TIMEOUT, cancelled: Callable[[], bool] = process.never
) -> Iterator[Outcome]:
    """The outcomes as they come. Where the process ends or takes too long, the checks that are left say so."""
    refuse(answer)
    names: list[str] = []
    done = 0
    words = [lab.code, str(answer.absolute())]
    try:
        for told in process.follow("pellucid.labs.marking", words, timeout=timeout, cancelled=cancelled):
            if "names" in told:
                names = told["names"]
                continue
            done += 1
            yield Outcome(**told)
        why = "the answer ended its process"
    except TimeoutError:
        why = f"the answer did not end within {timeout:g} s"
    except process.Died as error:
        if not names:
            raise
        why = f"the answer ended its process: {error}"
    for name in names[done:] if names else ["the answer begins"]:
        yield Outcome(name, "error", why)


def refuse(answer: Path) -> None:
    """Says in one line why a file cannot be an answer."""
    if not answer.is_file():
        advice = "Write one: pellucid lab 03 --starter answer.py."
        raise PellucidError(rule("answer", "a file that exists", str(answer), advice), "answer-file")
    size = answer.stat().st_size
    if size > MOST_BYTES:
        raise PellucidError(rule("answer", "at most 1 MiB", f"{size:,} bytes"), "answer-size")
    try:
        ast.parse(answer.read_bytes(), str(answer))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        said = f"{error.msg}, line {error.lineno}" if isinstance(error, SyntaxError) else type(error).__name__
        raise PellucidError(f"answer must be Python; got {answer.name}: {said}.", "answer-python") from None
