"""Set-ups that are broken in one way, each with the finding that must name it; and set-ups that are well.

    @sabotage("eps-zero-snr", "eps", "zero")
    def zero_snr(folder: Path) -> Subject: ...

`code` is that of the finding above a note that must be there; the words must stand in its cause. What is worth knowing
and breaks nothing is `@noted` in the same way: its finding must be a note, with nothing above one beside it. Add yours
in a module of your own and name it in MODULES of test_doctor_sabotages.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pellucid.evidence.doctor.checks import Severity
from pellucid.evidence.doctor.subject import Subject

Make = Callable[[Path], Subject]


@dataclass(frozen=True)
class Sabotage:
    """What is broken, and how the doctor must name it: with one of these severities, and these words in the cause."""

    code: str
    severities: tuple[Severity, ...]
    words: tuple[str, ...]
    make: Make


SABOTAGES: dict[str, Sabotage] = {}
HEALTHY: dict[str, Make] = {}
SILENT: dict[str, Make] = {}


def sabotage(code: str, *words: str) -> Callable[[Make], Make]:
    """Registers a broken set-up under the name of its function; it is made in an empty folder."""
    return registered(code, ("warning", "error"), words)


def noted(code: str, *words: str) -> Callable[[Make], Make]:
    """Registers a set-up in which a note must be found, and nothing above one."""
    return registered(code, ("note",), words)


def registered(code: str, severities: tuple[Severity, ...], words: tuple[str, ...]) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        assert make.__name__ not in SABOTAGES
        SABOTAGES[make.__name__] = Sabotage(code, severities, words, make)
        return make

    return register


def healthy(make: Make) -> Make:
    """Registers a set-up in which nothing above a note may be found."""
    assert make.__name__ not in HEALTHY
    HEALTHY[make.__name__] = make
    return make


def silent(make: Make) -> Make:
    """Registers a set-up in which nothing may be found, not even a note."""
    assert make.__name__ not in SILENT
    SILENT[make.__name__] = make
    return make
