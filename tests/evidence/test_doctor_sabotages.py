"""Every sabotage is found and named; every healthy set-up is left alone; and there is a sabotage for every finding."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sabotages import HEALTHY, SABOTAGES, SILENT

import pellucid.evidence.doctor
from pellucid.evidence.doctor.checks import SEVERITIES, examine

MODULES: tuple[str, ...] = (
    "sabotages_config",
    "sabotages_folder",
    "sabotages_family",
    "sabotages_model",
    "sabotages_notes",
)  # those that register set-ups
for module in MODULES:
    importlib.import_module(module)

DOCS = Path(__file__).parents[2] / "docs" / "doctor.md"
SOURCE = Path(pellucid.evidence.doctor.__file__).parent
ROW = re.compile(r"^\| (`[^|]+) \| ([^|]+) \| .+ \|$", re.MULTILINE)  # of a table of findings: codes, severity, words


@cache
def documented() -> dict[str, set[str]]:
    """The severities that each code of the docs' tables may have; a row with as many as codes has one for each."""
    found: dict[str, set[str]] = {}
    for cell, severity in ROW.findall(DOCS.read_text(encoding="utf-8")):
        codes = re.findall(r"`([^`]+)`", cell)
        said = [set(re.findall("|".join(SEVERITIES), words)) for words in severity.split(",")]
        each = said if len(said) == len(codes) else [set().union(*said)] * len(codes)
        assert not found.keys() & set(codes), codes
        found |= dict(zip(codes, each, strict=True))
    return found


@cache
def raised() -> set[str]:
    """The codes of every Finding that the doctor's source makes."""
    return {code for file in sorted(SOURCE.glob("*.py")) for code in made_in(ast.parse(file.read_text("utf-8")))}


def made_in(tree: ast.Module) -> Iterator[str]:
    for work in ast.walk(tree):
        if not isinstance(work, ast.FunctionDef):
            continue
        names = {ast.unparse(a.targets[0]): a.value for a in ast.walk(work) if isinstance(a, ast.Assign)}
        for call in ast.walk(work):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Finding":
                yield from codes_in(call.args[0], names)


def codes_in(code: ast.expr, names: dict[str, ast.expr]) -> list[str]:
    """A code as it is written, one of two, or one under a name."""
    if isinstance(code, ast.Name):
        return codes_in(names[code.id], {})
    if isinstance(code, ast.IfExp):
        return codes_in(code.body, names) + codes_in(code.orelse, names)
    assert isinstance(code, ast.Constant), f"{ast.unparse(code)} hides its code"
    return [str(code.value)]


def test_every_finding_is_documented_and_has_a_reproduction() -> None:
    """Three lists of codes, each written by hand, that must be one."""
    reproduced = {one.code for one in SABOTAGES.values()}
    assert sorted(raised() - reproduced) == [], "have no sabotage"
    assert sorted(raised() - documented().keys()) == [], "are not in docs/doctor.md"
    assert sorted(documented().keys() - raised()) == [], "are in docs/doctor.md, and nothing raises them"
    assert sorted(reproduced - raised()) == [], "have a sabotage, and nothing raises them"
    assert all(documented().values())


@pytest.mark.parametrize("name", sorted(SABOTAGES))
def test_a_sabotage_is_found(name: str, tmp_path: Path) -> None:
    sabotage = SABOTAGES[name]
    report = examine(sabotage.make(tmp_path))
    found = [one for one in report.findings if one.code == sabotage.code and one.severity in sabotage.severities]
    assert found, report.text()
    assert any(all(word in one.cause for word in sabotage.words) for one in found), report.text()
    for one in found:
        assert one.severity in documented()[one.code]
        assert one.evidence
        assert one.fix
    assert report.status == int("note" not in sabotage.severities), report.text()


@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_a_healthy_set_up_is_left_alone(name: str, tmp_path: Path) -> None:
    report = examine(HEALTHY[name](tmp_path))
    assert report.status == 0, report.text()
    assert report.checked


@pytest.mark.parametrize("name", sorted(SILENT))
def test_of_some_set_ups_there_is_nothing_to_say(name: str, tmp_path: Path) -> None:
    report = examine(SILENT[name](tmp_path))
    assert report.findings == (), report.text()
    assert report.checked
