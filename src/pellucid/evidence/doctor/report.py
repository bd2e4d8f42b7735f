"""A report as people read it: the gravest first, each with its evidence, cause and fix."""

from __future__ import annotations

import math
from collections import Counter

from rich.text import Text

from pellucid.core.wording import counted
from pellucid.evidence.doctor.finding import SEVERITIES, Finding, Report
from pellucid.evidence.doctor.subject import OTHER

STYLES = {"error": "bold red", "warning": "bold yellow", "note": "cyan"}
INDENT = "  "
OTHERS = ""  # the reason of all checks that are for other subjects


def written(report: Report) -> Text:
    """The report: findings, the verdict, and what was not checked, by the reason."""
    made = Text()
    for finding in report.findings:
        made.append_text(one(finding))
        made.append("\n")
    made.append(verdict(report), style="bold")
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


def one(finding: Finding) -> Text:
    made = Text()
    made.append(finding.severity, style=STYLES[finding.severity])
    made.append(f"[{finding.code}] ", style="dim")
    made.append(finding.title + "\n", style="bold")
    facts = "; ".join(f"{name} = {value(item)}" for name, item in finding.evidence)
    for name, words in (("evidence", facts), ("cause", finding.cause), ("fix", finding.fix)):
        if words:
            made.append(f"{INDENT}{name:<9}", style="dim")
            made.append(words + "\n")
    return made


def value(item: float | str) -> str:
    """A number with four digits that matter."""
    if isinstance(item, str):
        return item
    if isinstance(item, int) or (math.isfinite(item) and item == int(item) and abs(item) < 1e6):
        return f"{int(item)}"
    return f"{item:.4g}"


def verdict(report: Report) -> str:
    """One line: the verdict, how many of what, out of how many checks."""
    counts = Counter(finding.severity for finding in report.findings)
    said = [f"{counts[s]} {s}{'s' if counts[s] > 1 else ''}" for s in reversed(SEVERITIES) if counts[s]]
    name = f"{report.subject}: " if report.subject else ""
    words = [report.verdict, ", ".join(said), counted(len(report.checked), "check")]
    return f"{name}{'; '.join(filter(None, words))}."
