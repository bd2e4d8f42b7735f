"""The checks: each is a function of a subject that is registered by name with what it needs.

    @check("target", needs=("network",))
    def target(subject: Subject) -> Iterable[Finding]: ...

A check that finds out while it works that it cannot judge raises Unable, and is told among the skipped ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.evidence.doctor.finding import SEVERITIES, Finding, Report
from pellucid.evidence.doctor.subject import NEEDS, Subject

# The modules that register checks, in the order in which they run: what is cheap and comes first in a run is first.
MODULES: tuple[str, ...] = (
    "configs",
    "runs",
    "parts",
    "stored",
    "families",
    "recipes",
    "latents",
    "overflow",
    "target_detector",
    "schedule_detector",
    "scale",
    "drift",
    "adapters",
    "traces",
    "images",
)
KEY = ("target", "schedule")  # without them a model is not called healthy
Work = Callable[[Subject], Iterable[Finding]]


class Unable(Exception):  # noqa: N818
    """Raised by a check that cannot judge this subject; its words say why."""


@dataclass(frozen=True)
class Check:
    """A check: what it looks for, and what it needs for that."""

    name: str
    needs: tuple[str, ...]
    work: Work


CHECKS: dict[str, Check] = {}


def check(name: str, needs: Sequence[str] = ()) -> Callable[[Work], Work]:
    """Registers a check under a name of its own."""
    for need in needs:
        if need not in NEEDS:
            raise PellucidError(rule(f"needs of {name}", "among " + ", ".join(NEEDS), need), "check")

    def register(work: Work) -> Work:
        if name in CHECKS:
            raise PellucidError(rule("check", "a name of its own", name), "check")
        CHECKS[name] = Check(name, tuple(needs), work)
        return work

    return register


def every() -> tuple[Check, ...]:
    """All checks, in the order in which they run."""
    for module in MODULES:
        importlib.import_module(f"pellucid.evidence.doctor.{module}")
    return tuple(CHECKS.values())


def named(names: Sequence[str]) -> tuple[Check, ...]:
    """The checks of these names, or all of them where none is named."""
    known = {one.name: one for one in every()}
    for name in names:
        if name not in known:
            raise PellucidError(rule("check", "one of the doctor's", name, nearest(name, known)), "check")
    return tuple(known[name] for name in dict.fromkeys(names)) or tuple(known.values())


def examine(
    subject: Subject, checks: Sequence[Check] | None = None, seen: Callable[[], object] = lambda: None
) -> Report:
    """Runs what can be run; `seen` is called after each check."""
    findings: list[Finding] = []
    checked, skipped = [], []
    for one in every() if checks is None else checks:
        why = subject.lacks(one.needs)
        if why is None:
            try:
                findings += list(one.work(subject))  # all of a check's findings, or none
                checked.append(one.name)
            except (Unable, PellucidError) as error:  # what cannot be run on this subject is no reason to stop
                skipped.append((one.name, str(error)))
        else:
            skipped.append((one.name, why))
        seen()
    findings.sort(key=lambda finding: -SEVERITIES.index(finding.severity))
    unchecked = tuple(name for name in KEY if subject.is_model and name not in checked)
    return Report(tuple(findings), tuple(checked), tuple(skipped), subject.name, unchecked)
