"""The folder of a study: its config, and one JSON line a finished cell, so that a killed study goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.whole import is_part, put, read_lines

CONFIG, FILE = "config.json", "records.jsonl"


class Records:
    """The cells of a study that are done. A cell is named by the values of its `keys`."""

    def __init__(self, folder: Path, keys: tuple[str, ...]) -> None:
        self.path, self.keys = folder / FILE, keys
        self.rows = [row for row in read_lines(self.path) if set(keys) <= set(row)]

    def has(self, cell: Mapping[str, Any]) -> bool:
        return any(all(row[key] == cell[key] for key in self.keys) for row in self.rows)

    def add(self, row: Mapping[str, Any]) -> None:
        if self.has(row):
            raise PellucidError(rule("cell", "new", {k: row[k] for k in self.keys}), "study-cell")
        self.rows.append(dict(row))
        with self.path.open("a", encoding="utf-8") as file:
            torn = file.tell() > 0 and not self.path.read_bytes().endswith(b"\n")
            file.write(("\n" if torn else "") + json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def is_mine(folder: Path, text: str) -> bool:
    """Whether a folder is of the study with this config; the folder of another is refused."""
    path = folder / CONFIG
    if path.exists():
        if path.read_text("utf-8") != text:
            must = f"the one that began {folder}"
            raise PellucidError(rule("config", must, "another", "Choose another --out."), "resume-config")
        return True
    if folder.exists() and not (folder.is_dir() and all(map(is_part, folder.iterdir()))):
        raise PellucidError(rule("--out", "empty, new, or a study of this config", str(folder)), "out-taken")
    return False


def claim(folder: Path, text: str) -> None:
    """Makes a folder this study's own."""
    if not is_mine(folder, text):
        folder.mkdir(parents=True, exist_ok=True)
        put(folder / CONFIG, text)
