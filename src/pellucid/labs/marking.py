"""The process in which an answer is checked: `python -m pellucid.labs.marking 03 answer.py`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from pellucid.labs import process
from pellucid.labs.catalog import Lab, find
from pellucid.labs.checking import Check, Outcome, Verdict, Wrong
from pellucid.labs.running import last_line

MOST_PRINTED = 4000  # characters of one check
MOST_SAID = 1000  # of a sentence


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
    printed = process.Kept(MOST_PRINTED)
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
        return "error", last_line(error, path)
    return "passed", ""


def main(name: str, answer: str) -> None:
    tell = process.channel()
    sys.dont_write_bytecode = True  # nothing is left beside the answer
    checks = checks_of(find(name))
    tell({"names": [check.name for check in checks]})
    for check in checks:
        found = judged(check, Path(answer))
        tell({"name": found.name, "verdict": found.verdict, "sentence": found.sentence, "printed": found.printed})


if __name__ == "__main__":
    main(*sys.argv[1:])
