"""`pellucid sample --trace`: a recorder for each run, and where its file goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pellucid.cli import output
from pellucid.core.errors import PellucidError
from pellucid.evidence.trace.recorder import Recorder


@dataclass
class Traces:
    """The traces of a call of `pellucid sample`: one file for one run, numbered files for several."""

    path: Path
    tensors: bool = False
    overwrite: bool = False
    runs: int = 1
    written: list[Path] = field(default_factory=list)

    @staticmethod
    def of(params: dict[str, Any]) -> Traces | None:
        """As asked; refuses, before any work, what could not be written."""
        if params["trace"] is None:
            if params["trace_tensors"]:
                raise PellucidError("--trace-tensors must come with --trace FILE; got it alone.", "usage")
            return None
        return Traces(params["trace"], params["trace_tensors"], params["overwrite"])

    def expect(self, runs: int) -> None:
        """So many runs will come: none of their files may be in the way."""
        self.runs = runs
        for number in range(1, runs + 1):
            output.destination(self.name(number), "--trace", overwrite=self.overwrite)

    def name(self, number: int) -> Path:
        return self.path if self.runs == 1 else self.path.with_stem(f"{self.path.stem}-{number:03d}")

    @contextmanager
    def recorder(self) -> Iterator[Recorder]:
        """The recorder of the next run."""
        path = self.name(len(self.written) + 1)
        with Recorder(path, self.tensors, overwrite=self.overwrite) as made:
            yield made
        self.written.append(path)
