"""Checks, the findings they report, and the report as people read it."""

from __future__ import annotations

import importlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from rich.text import Text

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.core.wording import counted
from pellucid.evidence.doctor.subject import NEEDS, OTHER, Subject

# --- Findings -------------------------------------------------------------------------------------------------------

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # from harmless to harmful
CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
REPORT_FORMAT = "pellucid-doctor-1"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing: `warning` costs quality, `error` breaks or misleads the result."""

    code: str  # stable: "eps-zero-snr"
    severity: Severity
    title: str  # one line
    evidence: tuple[tuple[str, float | str], ...]  # what was measured or read, by name
    cause: str
    fix: str  # a command or a config line where there is one

    def __post_init__(self) -> None:
        if not CODE.fullmatch(self.code):
            raise PellucidError(rule("code of a finding", "words in lower case with dashes", self.code), "finding")
        if self.severity not in SEVERITIES:
            raise PellucidError(rule("severity", " or ".join(SEVERITIES), self.severity), "finding")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "evidence": dict(self.evidence)}


@dataclass(frozen=True)
class Report:
    """What was found, the gravest first; what was looked at; and what was not, and why."""

    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...] = ()  # check, why not
    subject: str = ""
    unchecked: tuple[str, ...] = ()  # key checks of a model that were not made
    strict: bool = False  # a key check that was not made counts as a fault

    @property
    def faulty(self) -> bool:
        """Whether anything above a note was found."""
        return any(finding.severity != "note" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """In a few words; "healthy" only where every key check was made."""
        if self.faulty:
            return "not healthy"
        return f"no fault found; NOT checked: {', '.join(self.unchecked)}" if self.unchecked else "healthy"

    @property
    def status(self) -> int:
        """The exit status: 1 for any finding above a note, and where strict for a key check that was not made."""
        return int(self.faulty or (self.strict and bool(self.unchecked)))

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": REPORT_FORMAT,
            "subject": self.subject,
            "status": self.status,
            "verdict": self.verdict,
            "unchecked": list(self.unchecked),
            "findings": [finding.to_dict() for finding in self.findings],
            "checked": list(self.checked),
            "skipped": [{"check": name, "why": why} for name, why in self.skipped],
        }

    def text(self) -> str:
        """The report for people, without colours."""

        return report_text(self).plain


# --- The report as text ---------------------------------------------------------------------------------------------

STYLES = {"error": "bold red", "warning": "bold yellow", "note": "cyan"}
INDENT = "  "
OTHERS = ""  # the reason of all checks that are for other subjects


def report_text(report: Report) -> Text:
    """The report: findings, the verdict, and what was not checked, by the reason."""
    made = Text()
    for finding in report.findings:
        made.append_text(finding_text(finding))
        made.append("\n")
    made.append(verdict_line(report), style="bold")
    reasons: dict[str, list[str]] = {}
    for name, why in report.skipped:
        reasons.setdefault(OTHERS if why.startswith(OTHER) else why, []).append(name)
    others = len(reasons.pop(OTHERS, ()))
    for why, names in reasons.items():
        made.append(f"\n{INDENT}not checked: {', '.join(names)} ({why})", style="dim")
    if others:
        words = "check is" if others == 1 else "checks are"
        made.append(f"\n{INDENT}{others} more {words} for other subjects", style="dim")
    return made


def finding_text(finding: Finding) -> Text:
    made = Text()
    made.append(finding.severity, style=STYLES[finding.severity])
    made.append(f"[{finding.code}] ", style="dim")
    made.append(finding.title + "\n", style="bold")
    facts = "; ".join(f"{name} = {evidence_value(item)}" for name, item in finding.evidence)
    for name, words in (("evidence", facts), ("cause", finding.cause), ("fix", finding.fix)):
        if words:
            made.append(f"{INDENT}{name:<9}", style="dim")
            made.append(words + "\n")
    return made


def evidence_value(item: float | str) -> str:
    """A number with four digits that matter."""
    if isinstance(item, str):
        return item
    if isinstance(item, int) or (math.isfinite(item) and item == int(item) and abs(item) < 1e6):
        return f"{int(item)}"
    return f"{item:.4g}"


def verdict_line(report: Report) -> str:
    """One line: the verdict, how many of what, out of how many checks."""
    counts = Counter(finding.severity for finding in report.findings)
    said = [f"{counts[s]} {s}{'s' if counts[s] > 1 else ''}" for s in reversed(SEVERITIES) if counts[s]]
    name = f"{report.subject}: " if report.subject else ""
    words = [report.verdict, ", ".join(said), counted(len(report.checked), "check")]
    return f"{name}{'; '.join(filter(None, words))}."


# --- Checks ---------------------------------------------------------------------------------------------------------

# The modules that register checks, in the order in which they run: what is cheap and comes first in a run is first.
MODULES: tuple[str, ...] = (
    "scheduler_configs",
    "runs",
    "components",
    "weight_files",
    "families",
    "ranges",
    "detectors",
    "adapters",
    "traces",
    "images",
)
KEY_CHECKS = ("target", "schedule")  # without them a model is not called healthy
CheckFunction = Callable[[Subject], Iterable[Finding]]


class Unable(Exception):  # noqa: N818
    """Raised by a check that cannot judge this subject; its words say why."""


@dataclass(frozen=True)
class Check:
    """A check: what it looks for, and what it needs for that."""

    name: str
    needs: tuple[str, ...]
    work: CheckFunction


CHECKS: dict[str, Check] = {}


def check(name: str, needs: Sequence[str] = ()) -> Callable[[CheckFunction], CheckFunction]:
    """Registers a check under a name of its own."""
    for need in needs:
        if need not in NEEDS:
            raise PellucidError(rule(f"needs of {name}", "among " + ", ".join(NEEDS), need), "check")

    def register(work: CheckFunction) -> CheckFunction:
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
    unchecked = tuple(name for name in KEY_CHECKS if subject.is_model and name not in checked)
    return Report(tuple(findings), tuple(checked), tuple(skipped), subject.name, unchecked)
