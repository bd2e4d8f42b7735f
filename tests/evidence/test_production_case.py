"""The worked example runs from end to end: here of scenes-128 itself, which is healthy, so that nothing is found."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from PIL import Image

from pellucid.interop.source import BUNDLES

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_arm_is_made_once_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("production_case", ROOT / "recipes" / "production_case.py")
    assert spec is not None
    assert spec.loader is not None
    case = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = case
    spec.loader.exec_module(case)
    model, out = str(BUNDLES / "scenes-128"), tmp_path / "out"
    words = ["--linear", model, "--cosine", model, "--prompts", "8", "--batch", "8", "--device", "cpu"]
    words += ["--work", str(tmp_path / "work"), "--out", str(out)]
    assert case.main(words) == 0
    table = (out / "table.md").read_text()
    assert all(f"| {arm.name} |" in table for arm in case.ARMS)
    with Image.open(out / "before_after.png") as sheet:
        assert sheet.width > 1000
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("figures.json")}
    assert len(kept) == len(case.ARMS)
    assert case.main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert "calls-in-noise" not in (out / "doctor.txt").read_text()  # what was deployed has a grid of times
