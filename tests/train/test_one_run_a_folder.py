"""A run has its folder to itself, cleans up after one that was killed, and says how to go on after Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import crew
import pytest
from rank_worker import main
from typer.testing import CliRunner, Result

from pellucid.cli import app
from pellucid.interop.atomic_files import LOCK
from pellucid.interop.lock import locked

RUN = """
steps = 100000
batch = 2
[task]
kind = "denoiser"
sampling = { steps = 2 }
objective = { schedule = { name = "linear" } }
[task.network]
_class_name = "UNet2DModel"
sample_size = 16
block_out_channels = [8]
layers_per_block = 1
down_block_types = ["DownBlock2D"]
up_block_types = ["UpBlock2D"]
norm_num_groups = 4
attention_head_dim = 8
[data]
kind = "scenes"
size = 16
[log]
every = 2
checkpoint_every = 2
tensorboard = false
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a run.toml").write_text(RUN, "utf-8")
    return tmp_path


TRAIN = ("train", "a run.toml", "--device", "cpu")


def ask(*words: str) -> Result:
    """The command in this process."""
    return CliRunner().invoke(app, [*TRAIN, *words], prog_name="pellucid")


@contextmanager
def running(here: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own that has a checkpoint already."""
    asked = [sys.executable, "-m", "pellucid.cli", *TRAIN, *words]
    process = subprocess.Popen(asked, cwd=here, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 90
        while not list((here / "out").glob("*/checkpoints/step-*")):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(".*"))


def test_the_second_run_is_refused_by_name_and_the_folder_of_a_killed_one_taken_over(here: Path) -> None:
    folder = here / "out" / "a run"
    with running(here) as first:
        second = ask("--until", "2")
        assert (second.exit_code, second.stdout) == (2, "")
        assert re.fullmatch(
            r"error\[folder-busy\]: --out must be a folder that no other process works in; out/a run is being trained "
            rf"by process {first.pid} on \S+ since \S+ \S+\. Wait for it, or choose another --out\.\n",
            second.stderr,
        )
        first.kill()
        first.wait()
    assert (folder / LOCK).is_file()
    step = max(int(path.name[5:]) for path in folder.glob("checkpoints/step-*"))
    third = ask("--until", str(step + 2), "--json")
    assert third.exit_code == 0, third.stderr
    assert json.loads(third.stdout)["steps"] == step + 2
    assert left(folder) == []


def test_what_a_killed_run_left_is_taken_away_at_the_next_start_and_nothing_else(here: Path) -> None:
    folder = here / "out" / "a run"
    assert ask("--until", "2").exit_code == 0
    ours = [".config.0123abcd.part.json", ".log.0123abcd.part.jsonl", "pictures/.step-00000002.0123abcd.part.png"]
    theirs = [".mine.part", ".model", "notes.part", "pictures/.hidden.png", ".model.of.mine"]
    (folder / "pictures").mkdir()
    for name in (*ours, *theirs):
        (folder / name).write_text("half")
    for name in ("checkpoints/.step-00000004.part", "checkpoints/.step-00000001.old", ".model.k3_x9abc"):
        (folder / name).mkdir()
        (folder / name / "half").write_text("half")
    assert ask("--until", "2").exit_code == 0  # there is no step to make
    assert left(folder) == sorted(name for name in theirs if name != "notes.part")
    assert (folder / "notes.part").is_file()


def test_ctrl_c_says_in_one_line_how_to_go_on(here: Path) -> None:
    with running(here, "--out", "out/b 1") as run:
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
        assert run.returncode == 130
    line = said.splitlines()[-1]
    found = re.fullmatch(r"cancelled: out/b 1 keeps (\d+) of 100000 steps\. Continue with: (.*)", line)
    assert found
    words = shlex.split(found[2])
    assert words == ["pellucid", "train", "a run.toml", "--out", "out/b 1", "--device", "cpu"]
    assert "Traceback" not in said
    assert left(here / "out" / "b 1") == []
    step = int(found[1]) + 2
    assert f"{step} steps of 100000" in ask(*words[3:], "--until", str(step)).stdout


def test_two_ranks_are_refused_together(tmp_path: Path) -> None:
    folder, says = tmp_path / "run", tmp_path / "says"
    with locked(folder, "trained"):
        assert crew.run(2, main, str(folder), "{}", says=says) == [2, 2]
        assert [path.name for path in folder.iterdir()] == [LOCK]
    for rank in (0, 1):
        (line,) = Path(f"{says}.{rank}").read_text().splitlines()
        assert line.startswith("error[folder-busy]: ")
        assert f"by process {os.getpid()} on " in line
