"""Every command and snippet of the README runs as it stands, in its order, from a clone."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pellucid.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", README, re.S | re.M)
SERVES = "pellucid studio"


def commands() -> list[str]:
    """The lines of the shell blocks, those with a backslash joined."""
    text = "\n".join(code for kind, code in BLOCKS if kind == "sh").replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a clone has; what the commands write stays in it."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("src", "configs", "docs", "assets"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_an_install_and_activate_line_comes_first() -> None:
    assert commands()[0].startswith("make venv && source .venv/bin/activate")
    assert [line.split()[:2] for line in commands()[1:3]] == [["make", "demo"], ["make", "test"]]


@pytest.mark.slow
def test_the_commands_run_in_their_order(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone)
    ran = []
    for line in commands():
        code = int(re.search(r"# exits (\d)", line)[1]) if "# exits" in line else 0  # type: ignore[index]
        words = shlex.split(line, comments=True)
        if words[0] == "make" or words[:2] == SERVES.split():
            continue
        if words[0] == "pellucid":
            done = CliRunner().invoke(app, words[1:], prog_name="pellucid")
            assert done.exit_code == code, f"{line}\n{done.output}\n{done.exception!r}"
        else:
            subprocess.run(["bash", "-c", line], check=True)
        ran.append(words[:2])
    wanted = {"sample", "trace", "plan", "study", "doctor", "tune", "models", "inspect", "memory", "lab", "train"}
    assert {words[1] for words in ran if words[0] == "pellucid"} == wanted


def test_the_studio_opens_as_it_is_written(clone: Path) -> None:
    assert SERVES in [line.partition("#")[0].strip() for line in commands()]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    place = {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1", "BROWSER": "true"}  # the program that does nothing
    command = SERVES.split()
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 7860)) == 0:  # somebody's studio is open
            command += ["--port", "0"]
    log = clone / "studio.log"
    with log.open("w") as out, subprocess.Popen(command, cwd=clone, env=place, stdout=out, stderr=out) as studio:
        until = time.monotonic() + 60
        while "http://" not in log.read_text() and time.monotonic() < until and studio.poll() is None:
            time.sleep(0.1)
        studio.send_signal(signal.SIGINT)
    said = log.read_text()
    assert "http://127.0.0.1" in said, said


@pytest.mark.parametrize("number", range(sum(kind == "python" for kind, _ in BLOCKS)))
def test_a_snippet_runs(clone: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone)
    code = [code for kind, code in BLOCKS if kind == "python"][number]
    exec(compile(code, f"README.md:{number}", "exec"), {"__name__": "snippet"})
