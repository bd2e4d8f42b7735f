"""The records of a study: one JSON line a finished cell, written at once, so that a killed study goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pellucid.core.errors import PellucidError, rule

FILE = "records.jsonl"


class Records:
    """The cells of a study that are done. A cell is named by the values of its `keys`."""

    def __init__(self, folder: Path, keys: tuple[str, ...]) -> None:
        self.path, self.keys = folder / FILE, keys
        self.rows: list[dict[str, Any]] = []
        if self.path.exists():
            self.rows = [row for line in self.path.read_text("utf-8").splitlines() if (row := self.whole(line))]

    def whole(self, line: str) -> dict[str, Any] | None:
        """A line's record; None for the one at which a study was killed."""
        try:
            row = json.loads(line)
        except ValueError:
            return None
        return row if isinstance(row, dict) and set(self.keys) <= set(row) else None

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
