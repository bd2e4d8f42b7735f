"""What a room offers is what its `__init__` names; everything else in it is behind a contract of the import linter."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "pellucid"
INSIDE = ("adherence", "doctor", "drawing", "metrics", "report", "study", "trace", "tune")
ROOMS = ("core", "models", "interop", "pipeline", "scenes", "train", *(f"evidence.{name}" for name in INSIDE))


def private_modules() -> set[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    return {module for one in contracts if one["type"] == "protected" for module in one["protected_modules"]}


@pytest.mark.parametrize("room", ROOMS)
def test_a_module_is_offered_by_name_or_private(room: str) -> None:
    named = set(re.findall(r"`(\w+)`", import_module(f"pellucid.{room}").__doc__ or ""))
    private = private_modules()
    for path in sorted((SRC / room.replace(".", "/")).rglob("*.py")):
        if path.name == "__init__.py":
            continue
        module = ".".join(path.relative_to(SRC.parent).with_suffix("").parts)
        offered = path.stem in named
        where = f"{module}: name it in its room's __init__, or list it in pyproject.toml"
        assert offered != (module in private), where
