"""Checks, the findings they report, and the report as people read it.

A check is a function that is registered by name. Its parameters after the subject are fields of the subject that it
needs; where one is not known, the check is skipped and the report says why:

    @check("target")
    def check_target(subject: Subject, network: Any) -> Iterable[Finding]: ...

A check that finds out while it works that it cannot judge raises UnsupportedCheck, and is skipped too.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.text import Text
from torch import Tensor

from pellucid.core.denoiser import denoiser
from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.core.schedule import Schedule
from pellucid.core.wording import counted
from pellucid.evidence.doctor.probe import Probe
from pellucid.evidence.doctor.subject import (
    NEEDS,
    OTHER,
    KnownImages,
    RunSpec,
    Subject,
    SubjectSpec,
    UnsupportedCheck,
    of_pipeline,
    open_subject,
    with_data,
)  # fmt: skip
from pellucid.pipeline.pipeline import Pipeline

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # from harmless to harmful
Evidence = tuple[tuple[str, float | str], ...]  # what was measured or read, by name
_CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
REPORT_FORMAT = "pellucid-doctor-1"

# --- findings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing: `warning` costs quality, `error` breaks or misleads the result."""

    code: str  # stable: "eps-zero-snr"
    severity: Severity
    title: str  # one line
    evidence: Evidence
    cause: str
    fix: str  # a command or a config line where there is one

    def __post_init__(self) -> None:
        if not _CODE.fullmatch(self.code):
            raise PellucidError(rule("code of a finding", "words in lower case with dashes", self.code), "finding")
        if self.severity not in SEVERITIES:
            raise PellucidError(rule("severity", " or ".join(SEVERITIES), self.severity), "finding")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "evidence": dict(self.evidence)}


@dataclass(frozen=True)
class Report:
    """What was found, the most severe first; what was checked; what was not, and why."""

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


# --- the report as text -------------------------------------------------------------------------------------------

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "cyan"}
_INDENT = "  "


def report_text(report: Report) -> Text:
    """Findings, the verdict, and what was not checked, grouped by the reason."""
    text = Text()
    for finding in report.findings:
        text.append(finding.severity, style=_STYLES[finding.severity])
        text.append(f"[{finding.code}] ", style="dim")
        text.append(finding.title + "\n", style="bold")
        facts = "; ".join(f"{name} = {evidence_value(item)}" for name, item in finding.evidence)
        for name, words in (("evidence", facts), ("cause", finding.cause), ("fix", finding.fix)):
            if words:
                text.append(f"{_INDENT}{name:<9}", style="dim")
                text.append(words + "\n")
        text.append("\n")
    text.append(verdict_line(report), style="bold")
    reasons: dict[str, list[str]] = {}
    for name, why in report.skipped:
        reasons.setdefault("" if why.startswith(OTHER) else why, []).append(name)
    others = len(reasons.pop("", ()))
    for why, names in reasons.items():
        text.append(f"\n{_INDENT}not checked: {', '.join(names)} ({why})", style="dim")
    if others:
        words = "check is" if others == 1 else "checks are"
        text.append(f"\n{_INDENT}{others} more {words} for other subjects", style="dim")
    return text


def evidence_value(item: float | str) -> str:
    """A number with four significant digits."""
    if isinstance(item, str):
        return item
    if isinstance(item, int) or (math.isfinite(item) and item == int(item) and abs(item) < 1e6):
        return f"{int(item)}"
    return f"{item:.4g}"


def verdict_line(report: Report) -> str:
    """The verdict, the findings by severity, and the number of checks."""
    counts = Counter(finding.severity for finding in report.findings)
    found = ", ".join(counted(counts[severity], severity) for severity in reversed(SEVERITIES) if counts[severity])
    name = f"{report.subject}: " if report.subject else ""
    return f"{name}{'; '.join(filter(None, (report.verdict, found, counted(len(report.checked), 'check'))))}."


# --- checks -------------------------------------------------------------------------------------------------------

# The modules that register checks, in the order in which they run: what is cheap, and what explains the rest, first.
_MODULES: tuple[str, ...] = (
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
CheckFunction = Callable[..., Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """A function of a subject, and of the fields of it that it needs."""

    name: str
    function: CheckFunction

    def __post_init__(self) -> None:
        for need in self.needs:
            if need not in NEEDS:
                raise PellucidError(rule(f"needs of {self.name}", "among " + ", ".join(NEEDS), need), "check")

    @cached_property
    def needs(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.function).parameters)[1:]

    def run(self, subject: Subject) -> list[Finding]:
        """All findings; the subject has what is needed."""
        return list(self.function(subject, *(getattr(subject, need) for need in self.needs)))


CHECKS: dict[str, Check] = {}


def check(name: str) -> Callable[[CheckFunction], CheckFunction]:
    """Registers a check under a name of its own."""

    def register(function: CheckFunction) -> CheckFunction:
        entry = Check(name, function)
        if CHECKS.setdefault(name, entry) is not entry:
            raise PellucidError(rule("check", "a name of its own", name), "check")
        return function

    return register


def every() -> tuple[Check, ...]:
    """All checks, in the order in which they run."""
    for module in _MODULES:
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
    subject: Subject, checks: Sequence[Check] | None = None, tick: Callable[[], object] = lambda: None
) -> Report:
    """Runs every check that can be run; `tick` is called after each."""
    findings: list[Finding] = []
    checked, skipped = [], []
    for one in every() if checks is None else checks:
        why = subject.lacks(one.needs)
        if why is None:
            try:
                findings += one.run(subject)  # all of a check's findings, or none
                checked.append(one.name)
            except (UnsupportedCheck, PellucidError) as error:  # not to be run on this subject: no reason to stop
                why = str(error)
        if why is not None:
            skipped.append((one.name, why))
        tick()
    findings.sort(key=lambda finding: -SEVERITIES.index(finding.severity))
    unchecked = tuple(name for name in KEY_CHECKS if subject.is_model and name not in checked)
    return Report(tuple(findings), tuple(checked), tuple(skipped), subject.name, unchecked)


# --- from Python --------------------------------------------------------------------------------------------------


def doctor(
    model: str | Path | Pipeline | None = None,
    *,
    network: Callable[[Tensor, Tensor], Tensor] | None = None,
    schedule: str | Schedule | None = None,
    target: str | None = None,
    data: str | Path | Tensor | None = None,
    steps: int | None = None,
    device: str | None = None,
) -> Report:
    """What is wrong, as `pellucid doctor` says it: of a model, or of a network (x, time) → what it predicts.

    A model (a folder, a file, a name, a loaded pipeline) brings its schedule and target; `data` is a folder of images
    or "scenes" then, and may be left out. A network comes with both, `target` being eps if left out, and with `data`:
    clean images (N, C, H, W) as it was trained on, 16 or more.
    """
    if (model is None) == (network is None):
        got = "none of them" if model is None else "both"
        raise PellucidError(f"model or network must be given; got {got}.", "usage")
    run = RunSpec(steps=steps, device=device)
    if network is not None:
        subject = _of_network(network, schedule, target, data, run)
    elif schedule is not None or target is not None:
        raise PellucidError("schedule and target must come with network; a model brings its own.", "usage")
    elif isinstance(data, Tensor):
        raise PellucidError(rule("data", 'a folder or "scenes" with a model', "a tensor"), "data")
    elif isinstance(model, Pipeline):
        subject = of_pipeline(model, run)
        subject = subject if data is None else with_data(subject, str(data))
    else:
        subject = open_subject(SubjectSpec(str(model), data=None if data is None else str(data)), run)
    return examine(subject)


def _of_network(
    network: Callable[[Tensor, Tensor], Tensor],
    schedule: str | Schedule | None,
    target: str | None,
    data: str | Path | Tensor | None,
    run: RunSpec,
) -> Subject:
    """A network as a subject; it is called on the device of its data."""
    if schedule is None:
        raise PellucidError(rule("schedule", "that of the network's training", None), "schedule")
    if not isinstance(data, Tensor) or data.ndim != 4 or not data.is_floating_point():
        got = tuple(data.shape) if isinstance(data, Tensor) else data
        raise PellucidError(rule("data", "clean images (N, C, H, W) as the network was trained on", got), "data")
    if run.steps is not None:
        raise PellucidError("steps must come with a model; a network has no run of its own.", "usage")
    read = denoiser(network, schedule, target or "eps")
    clean = data.detach().to(run.device or data.device, torch.float32)
    probe = Probe(network, read.schedule, read.target, clean)
    return Subject(getattr(network, "__name__", type(network).__name__), run, probe=probe, data=KnownImages(clean))
