"""The checks of a lab, and how they run on an answer: in a process of its own, within limits."""

from __future__ import annotations

import ast
import contextlib
import errno
import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from pellucid.core.errors import PellucidError, rule
from pellucid.labs import process
from pellucid.labs.catalog import Lab, find
from pellucid.labs.process import last_line

Verdict = Literal["passed", "wrong", "error", "not written yet"]
TIMEOUT = 60.0  # seconds for all checks of an answer
MOST_BYTES = 2**20  # of an answer
WRITE_ONE = "Write one: pellucid lab 03 --starter answer.py."


class Mistake(Exception):  # noqa: N818
    """What is wrong with an answer, in one sentence: what was expected, what came, and a hint."""


@dataclass(frozen=True)
class Check:
    """`run` takes the answer as a module, and raises `Mistake` if it is not right."""

    name: str
    run: Callable[[ModuleType], None]


@dataclass(frozen=True)
class Outcome:
    """The result of one check; `printed` is what the answer wrote to stdout meanwhile."""

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
    """Runs every check of the lab on an answer, which is somebody's code, in a process of its own within `LIMITS`.

    The process starts in an empty folder of mode 0700 (`within` one of the caller's, else a temporary one) that is
    removed afterwards. Where it ends or takes too long, the checks that are left say so. Anything other than one
    outcome for each check, in their order, was sent by the answer; then no outcome is believed.
    """
    refuse(answer)
    names: list[str] = []
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="pellucid-lab-", dir=within, ignore_cleanup_errors=True) as scratch:
        words = [lab.code, str(answer.absolute()), scratch]
        own = {"TMPDIR": scratch, "CUDA_VISIBLE_DEVICES": ""}  # a GPU's address space is larger than any limit
        results = process.follow(__name__, words, environment=own, timeout=timeout, cancelled=cancelled)
        try:
            with contextlib.closing(results):
                names = next(results, {}).get("names", [])  # sent before the answer is opened
                for result in results:
                    found.append(_outcome(result, names[len(found) :]))
            why = "the answer ended its process"
        except TimeoutError:
            why = f"the answer did not end within {timeout:g} s"
        except process.ForeignOutput:
            found, why = [], "the answer wrote where the checks report their outcomes"
        except process.ProcessEnded as error:
            if not names:
                raise
            why = f"the answer ended its process: {error}"
    left = names[len(found) :] if names else ["the answer begins"]
    return found + [Outcome(name, "error", why) for name in left]


def _outcome(result: dict[str, Any], left: list[str]) -> Outcome:
    texts = all(isinstance(one, str) for one in result.values())
    known = texts and set(result) == _KEYS and result["verdict"] in get_args(Verdict)
    if not known or result["name"] not in left[:1]:
        raise process.ForeignOutput("it sent something that is not an outcome of the next check")
    return Outcome(**result)


def refuse(answer: Path) -> None:
    """Raises if a file cannot be an answer, with the reason in one line."""
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


# --- In the process ---------------------------------------------------------------------------------------------------

MOST_PRINTED = 4000  # characters of one check
MOST_SENTENCE = 1000  # characters of a sentence
_MOST_MEMORY = 4 * 2**30  # ten times what a right answer takes
_MOST_THREAD = 80 * 2**20  # of address space
_MOST_FILE = 64 * 2**20
LIMITS = {  # names of the module resource
    "RLIMIT_DATA": _MOST_MEMORY,
    "RLIMIT_AS": 4 * _MOST_MEMORY,  # while torch's libraries are opened; see _confine_shared
    "RLIMIT_FSIZE": _MOST_FILE,
    "RLIMIT_NOFILE": 256,
    "RLIMIT_CORE": 0,
}


def checks_of(lab: Lab) -> list[Check]:
    return list(importlib.import_module(f"pellucid.labs.checks.lab_{lab.code}").CHECKS)


def answer_in(path: Path) -> ModuleType:
    """The file as a module with a name of its own."""
    name = "answer"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def judged(check: Check, path: Path) -> Outcome:
    """One check on an answer that is imported again, so that checks do not depend on each other."""
    printed = process.OutputBuffer(MOST_PRINTED)
    with contextlib.redirect_stdout(printed):
        verdict, sentence = verdict_of(check, path)
    return Outcome(check.name, verdict, process.clipped(sentence, MOST_SENTENCE), printed.text())


def verdict_of(check: Check, path: Path) -> tuple[Verdict, str]:
    module: ModuleType | None = None
    try:
        module = answer_in(path)
        check.run(module)
    except Mistake as error:
        return "wrong", " ".join(str(error).split())
    except NotImplementedError as error:
        return "not written yet", last_line(error, path).removeprefix("NotImplementedError").strip(" :")
    except AttributeError as error:
        if module is not None and error.obj is module:
            return "error", f"the answer must have {error.name}, as the starter has; it has none"
        return "error", last_line(error, path)
    except BaseException as error:  # whatever somebody's code may raise, SystemExit too
        return "error", _outgrown(error) or last_line(error, path)
    return "passed", ""


def _outgrown(error: BaseException) -> str:
    """Which limit was exceeded, if any."""
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error) or _code(error) == errno.ENOMEM:
        return f"the answer must take at most {_MOST_MEMORY // 2**30} GiB of memory; it asked for more"
    if _code(error) == errno.EFBIG:
        return f"the answer must write at most {_MOST_FILE // 2**20} MiB to a file; it wrote more"
    return ""


def _code(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


def _confine(scratch: Path) -> None:
    """Limits for this process and its children; limits that the system lacks are skipped."""
    os.chdir(scratch)
    with contextlib.suppress(ImportError):
        import resource

        for name, most in LIMITS.items():
            kind = getattr(resource, name, None)
            if kind is not None:
                _limit(kind, most)


def _confine_shared() -> None:
    """Shared memory counts as address space alone, so that is limited too, once the libraries have theirs.

    A thread reserves some without using it: a stack, and malloc's arena of 64 MiB.
    """
    with contextlib.suppress(ImportError, OSError):  # there is no /proc beside Linux
        import resource

        mapped = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, mapped + _MOST_MEMORY + (os.cpu_count() or 1) * _MOST_THREAD)


def _limit(kind: int, most: int) -> None:
    import resource

    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def main(name: str, answer: str, scratch: str) -> None:
    tell = process.channel()
    _confine(Path(scratch))
    sys.dont_write_bytecode = True  # nothing is left beside the answer
    checks = checks_of(find(name))
    _confine_shared()
    tell({"names": [check.name for check in checks]})
    for check in checks:
        found = judged(check, Path(answer))
        tell({"name": found.name, "verdict": found.verdict, "sentence": found.sentence, "printed": found.printed})


if __name__ == "__main__":
    from pellucid.labs import answers  # the checks raise that module's `Mistake`; `python -m` has made another one

    answers.main(*sys.argv[1:])
