"""What the doctor says: findings with their evidence, and the report that holds them."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from pellucid.core.errors import PellucidError, rule

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # from harmless to harmful
CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
FORMAT = "pellucid-doctor-1"


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
            "format": FORMAT,
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
        from pellucid.evidence.doctor.report import written

        return written(self).plain
