"""`pellucid studio`: what it says when it cannot open; that it opens is tested in tests/studio."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest


def studio(*words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    program = f"import sys; {before}\nimport pellucid.cli as c; sys.argv = ['pellucid', 'studio', *{words!r}]; c.main()"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


def test_without_gradio_it_says_what_to_install() -> None:
    done = studio(before="sys.modules['gradio'] = None")
    assert done.returncode == 2
    assert "pip install 'pellucid[studio]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("port", ["-1", "65536", "home"])
def test_a_port_that_cannot_be_is_one_line(port: str) -> None:
    done = studio("--port", port)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "port" in done.stderr


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        done = studio("--port", str(held.getsockname()[1]), "--no-open")
    assert done.returncode == 2
    assert "port must be a free one" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_what_is_no_model_is_refused_before_the_server_starts(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "thing"
    if kind == "folder":
        (place / "hidden").mkdir(parents=True)
    done = studio(str(place), "--no-open", "--port", "0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error[not-found]: model must be a folder or file of a model, ")
    assert done.stderr.count("\n") == 1
    assert "hidden" not in done.stderr
