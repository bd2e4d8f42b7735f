"""The wheel carries the bundles, every file of them, and the labs: pages, starters and checks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pellucid.labs.catalog import LABS

ROOT = Path(__file__).parents[2]
HELD = (
    "model_index.json",
    "README.md",
    "unet/a.safetensors",
    "tokenizer/merges.txt",
    "ip_adapter/image_encoder/b.json",
)


@pytest.mark.slow
def test_every_file_of_a_bundle_and_of_a_lab_is_in_the_wheel(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "bundles"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for name in HELD:
        path = copy / "src" / "pellucid" / "bundles" / "fake-128" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x", encoding="utf-8")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "-w", str(tmp_path), str(copy)], check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as held:
        names = set(held.namelist())
    assert {name for name in names if "/bundles/" in name} == {f"pellucid/bundles/fake-128/{name}" for name in HELD}
    for lab in LABS:
        for path in (lab.page, lab.starter, lab.check):
            assert path.relative_to(ROOT / "src").as_posix() in names
