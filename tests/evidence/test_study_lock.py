"""A study, or a share of one, is worked on by one process at a time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from pellucid.cli import app
from pellucid.core.errors import PellucidError
from pellucid.evidence.adherence.study import AdherenceStudy
from pellucid.evidence.study.guidance import GuidanceStudy
from pellucid.evidence.study.interaction import InteractionStudy
from pellucid.evidence.study.oracle import OracleStudy
from pellucid.evidence.study.samplers import SamplerStudy
from pellucid.evidence.study.schedules import ScheduleStudy
from pellucid.interop.lock import locked

STUDIES = (AdherenceStudy, GuidanceStudy, InteractionStudy, OracleStudy, SamplerStudy, ScheduleStudy)


@pytest.mark.parametrize("kind", STUDIES, ids=lambda k: k.__name__)
def test_every_kind_of_study_has_its_share_of_a_folder_to_itself(tmp_path: Path, kind: Any) -> None:
    mine = SimpleNamespace(folder=tmp_path, shard=(1, 2), work=lambda *given: kind.work(mine, *given))
    with locked(tmp_path, "written", (1, 2)), pytest.raises(PellucidError) as caught:
        kind.run(mine)
    assert caught.value.code == "folder-busy"
    with locked(tmp_path, "written", (0, 2)), pytest.raises((AttributeError, TypeError)):
        kind.run(mine)  # begins: there is nothing to run


def test_the_second_study_in_a_folder_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["study", "oracle", "--samplers", "euler", "--grids", "karras", "--schedules", "linear", "--nfe", "5"]
    with locked(Path("o"), "written"):
        answer = CliRunner().invoke(app, [*asked, "--points", "64", "--out", "o"])
        assert answer.exit_code == 2
        assert answer.stderr.startswith(
            "error[folder-busy]: --out must be a folder that no other process works in; o is "
        )
