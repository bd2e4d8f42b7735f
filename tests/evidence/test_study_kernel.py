"""The kernel of studies, by the smallest one there is: how to add a study, and what it then has for nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pellucid.core.errors import PellucidError
from pellucid.evidence.study import kernel
from pellucid.evidence.study.kernel import Study, WorkShare, make_share, run_study
from pellucid.interop.atomic_files import put
from pellucid.interop.lock import locked

# --- A whole study ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RootConfig:
    """Newton's rule for square roots: how many steps does it take? Refuse here what no cell could run."""

    numbers: tuple[float, ...]
    steps: tuple[int, ...] = (2, 4)


class RootCell(NamedTuple):  # its fields are what names a record in records.jsonl
    number: float
    steps: int


class RootStudy(Study[RootConfig, RootCell]):
    kind = "roots"
    cell = RootCell

    def cells(self) -> Iterator[RootCell]:
        return (RootCell(number, steps) for number in self.config.numbers for steps in self.config.steps)

    def make(self, cell: RootCell) -> dict[str, Any]:
        root = cell.number
        for _ in range(cell.steps):
            root = (root + cell.number / root) / 2
        return {"error": abs(root - cell.number**0.5), "process": os.getpid()}

    def results(self) -> dict[int, float]:
        """The worst error at each number of steps."""
        return {steps: max(r["error"] for r in self.records.rows if r["steps"] == steps) for steps in self.config.steps}

    def report(self) -> dict[int, float]:
        found = self.results()
        put(self.folder / "table.md", "".join(f"| {steps} | {error:.1e} |\n" for steps, error in found.items()))
        return found


CONFIG = RootConfig((2.0, 3.0, 5.0))


def test_from_a_config_to_the_report(tmp_path: Path) -> None:
    found = run_study(RootStudy, CONFIG, tmp_path / "roots")
    assert found[4] < 1e-3 < found[2]
    assert (tmp_path / "roots" / "table.md").read_text().startswith("| 2 | ")
    held = json.loads((tmp_path / "roots" / "config.json").read_text())
    assert held == {"study": "roots", "version": 1, "numbers": [2.0, 3.0, 5.0], "steps": [2, 4]}


# --- What the kernel gives it -------------------------------------------------------------------------------------


class CutRootStudy(RootStudy):
    """Killed after three cells."""

    def make(self, cell: RootCell) -> dict[str, Any]:
        if len(self.records.rows) == 3:
            raise KeyboardInterrupt
        return super().make(cell)


def rows(folder: Path) -> list[dict[str, Any]]:
    kept = RootStudy(CONFIG, folder).records.rows
    return sorted(({**row, "process": 0, "digest": ""} for row in kept), key=str)


def test_a_killed_study_goes_on_where_it_was(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        CutRootStudy(CONFIG, tmp_path / "cut").run()
    with (tmp_path / "cut" / "records.jsonl").open("a") as file:
        file.write('{"number": 3.0, "ste')  # the line at which it was killed
    study = RootStudy(CONFIG, tmp_path / "cut")
    assert study.missing() == list(study.cells())[3:]
    run_study(RootStudy, CONFIG, tmp_path / "cut")
    run_study(RootStudy, CONFIG, tmp_path / "whole")
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    before = (tmp_path / "cut" / "records.jsonl").read_bytes()
    run_study(RootStudy, CONFIG, tmp_path / "cut")
    assert (tmp_path / "cut" / "records.jsonl").read_bytes() == before  # nothing is made twice


def test_a_line_that_changed_is_a_cell_that_is_made_again(tmp_path: Path) -> None:
    run_study(RootStudy, CONFIG, tmp_path)
    path, whole = tmp_path / "records.jsonl", rows(tmp_path)
    row = '"number": 3.0, "steps": 2, "error": '
    path.write_text(path.read_text().replace(row + "0", row + "1"))
    assert RootStudy(CONFIG, tmp_path).missing() == [(3.0, 2)]
    run_study(RootStudy, CONFIG, tmp_path)
    assert rows(tmp_path) == whole


def test_shards_make_the_same_study_between_them(tmp_path: Path) -> None:
    for index in (1, 0):
        RootStudy(CONFIG, tmp_path / "parts", (index, 2)).run()
    assert {path.name for path in (tmp_path / "parts").glob("rec*")} == {"records-0of2.jsonl", "records-1of2.jsonl"}
    run_study(RootStudy, CONFIG, tmp_path / "whole")
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert not RootStudy(CONFIG, tmp_path / "parts").missing()


class ByNumber(RootStudy):
    """The steps of a number belong together: one process makes all of them, in their order."""

    parts = "numbers"

    def part(self, cell: RootCell) -> float:
        return cell.number


def test_cells_of_a_part_stay_together(tmp_path: Path) -> None:
    shares = ByNumber(CONFIG, tmp_path / "out").shares(2)
    assert shares == [[(2.0, 2), (2.0, 4), (5.0, 2), (5.0, 4)], [(3.0, 2), (3.0, 4)]]
    with pytest.raises(PellucidError, match="--processes must be at most 3, as many as there are numbers; got 4"):
        run_study(ByNumber, CONFIG, tmp_path / "out", processes=4)
    assert not (tmp_path / "out").exists()


def test_processes_make_the_same_study(tmp_path: Path) -> None:
    told: list[Any] = []

    @contextmanager
    def bar(what: str, total: int) -> Iterator[Any]:
        told.append(total)
        yield told.append

    found = run_study(RootStudy, CONFIG, tmp_path / "out", processes=2, bar=bar)
    assert found == run_study(RootStudy, CONFIG, tmp_path / "whole")
    assert {path.name for path in (tmp_path / "out").glob("rec*")} == {"records-0of2.jsonl", "records-1of2.jsonl"}
    assert os.getpid() not in {row["process"] for row in RootStudy(CONFIG, tmp_path / "out").records.rows}
    assert told[0] == sum(told[1:-1]) == 6  # the last bar is of what is left, nothing
    assert told[-1] == 0


def test_what_fails_in_a_process_is_said_here(tmp_path: Path) -> None:
    shares = [WorkShare(RootStudy, RootConfig((0.0,)), str(tmp_path / "out"), 0, 1)]
    with pytest.raises(ZeroDivisionError):
        make_share(shares[0])
    with pytest.raises(ZeroDivisionError):
        kernel.over_processes(shares)


def test_one_process_at_a_time_in_a_share(tmp_path: Path) -> None:
    with locked(tmp_path, "written", (1, 2)):
        RootStudy(CONFIG, tmp_path, (0, 2)).run()
        with pytest.raises(PellucidError) as caught:
            RootStudy(CONFIG, tmp_path, (1, 2)).run()
    assert caught.value.code == "folder-busy"


def test_the_folder_of_another_study_is_refused_and_left_alone(tmp_path: Path) -> None:
    run_study(RootStudy, CONFIG, tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    class OtherVersion(RootStudy):
        version = 2

    class OtherKind(RootStudy):
        kind = "cubes"

    for study, config, code, words in (
        (RootStudy, RootConfig((2.0,)), "resume-config", "got another numbers"),
        (OtherVersion, CONFIG, "study-version", "must be of version 2; got 1"),
        (OtherKind, CONFIG, "study-folder", "--out must be of a cube study; got .*: a root study"),
    ):
        with pytest.raises(PellucidError, match=words) as caught:
            study(config, tmp_path / "out")
        assert caught.value.code == code
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mine.txt").write_text("dear")
    with pytest.raises(PellucidError, match="--out must be empty, new, or a study of this config"):
        RootStudy(CONFIG, tmp_path / "letters")
    with pytest.raises(PellucidError, match="--out must be a folder that can be written to"):
        RootStudy(CONFIG, tmp_path / "letters" / "mine.txt" / "out")
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}


def test_what_is_not_fixed_may_be_added(tmp_path: Path) -> None:
    class Growing(RootStudy):
        fixed = ("steps",)

    run_study(Growing, CONFIG, tmp_path)
    more = RootConfig((2.0, 3.0, 5.0, 7.0))
    assert Growing(more, tmp_path).missing() == [(7.0, 2), (7.0, 4)]
    run_study(Growing, more, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["numbers"] == [2.0, 3.0, 5.0, 7.0]
    with pytest.raises(PellucidError, match="got another steps"):
        Growing(RootConfig((2.0,), (8,)), tmp_path)


def test_what_cannot_begin_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run_study(RootStudy, RootConfig((0.0,)), tmp_path / "out")
    assert not (tmp_path / "out").exists()
