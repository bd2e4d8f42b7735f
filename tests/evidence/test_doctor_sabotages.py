"""Every sabotage is found and named; every healthy set-up is left alone."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from sabotages import HEALTHY, SABOTAGES

from pellucid.evidence.doctor.checks import examine

MODULES: tuple[str, ...] = (
    "sabotages_config",
    "sabotages_folder",
    "sabotages_family",
    "sabotages_model",
)  # those that register set-ups
for module in MODULES:
    importlib.import_module(module)


@pytest.mark.parametrize("name", sorted(SABOTAGES))
def test_a_sabotage_is_found(name: str, tmp_path: Path) -> None:
    sabotage = SABOTAGES[name]
    report = examine(sabotage.make(tmp_path))
    grave = {finding.code: finding for finding in report.findings if finding.severity != "note"}
    assert sabotage.code in grave, report.text()
    found = grave[sabotage.code]
    assert all(word in found.cause for word in sabotage.words), found.cause
    assert found.evidence
    assert found.fix
    assert report.status == 1


@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_a_healthy_set_up_is_left_alone(name: str, tmp_path: Path) -> None:
    report = examine(HEALTHY[name](tmp_path))
    assert report.status == 0, report.text()
    assert report.checked
