"""The process in which an answer is checked: `python -m pellucid.labs.marking 03 answer.py FOLDER`."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from pellucid.labs import process
from pellucid.labs.answers import Check, Outcome, Verdict, Wrong
from pellucid.labs.catalog import Lab, find
from pellucid.labs.process import last_line

MOST_PRINTED = 4000  # characters of one check
MOST_SAID = 1000  # of a sentence
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
    """The file as a module, found by nobody else's name."""
    name = "answer"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def judged(check: Check, path: Path) -> Outcome:
    """One check on an answer that is opened anew, so that checks do not depend on each other."""
    printed = process.Printed(MOST_PRINTED)
    with contextlib.redirect_stdout(printed):
        verdict, sentence = verdict_of(check, path)
    return Outcome(check.name, verdict, process.clipped(sentence, MOST_SAID), printed.text())


def verdict_of(check: Check, path: Path) -> tuple[Verdict, str]:
    module: ModuleType | None = None
    try:
        module = answer_in(path)
        check.run(module)
    except Wrong as error:
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
    """Which limit it was, where it was one."""
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error) or _code(error) == errno.ENOMEM:
        return f"the answer must take at most {_MOST_MEMORY // 2**30} GiB of memory; it asked for more"
    if _code(error) == errno.EFBIG:
        return f"the answer must write at most {_MOST_FILE // 2**20} MiB to a file; it wrote more"
    return ""


def _code(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


def _confine(scratch: Path) -> None:
    """Limits for this process and all that it starts; a system without one of them goes without."""
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
    main(*sys.argv[1:])
