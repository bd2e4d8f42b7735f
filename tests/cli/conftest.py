"""The command line, called as a user calls it but inside this process; and images, read back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from pellucid.cli import app


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))

    @property
    def words(self) -> str:
        """What was printed, with every run of blanks as one."""
        return " ".join(self.out.split())


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Runs a command in an empty folder. What is not bad input and not well is an error of ours: it is raised."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "220")

    def run(*args: str) -> Answer:
        result = CliRunner().invoke(app, list(args), prog_name="pellucid")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def tell(ask: Callable[..., Answer]) -> Callable[..., Answer]:
    """Runs a command that must succeed and leave stderr empty."""

    def run(*args: str) -> Answer:
        answer = ask(*args)
        assert (answer.code, answer.err) == (0, "")
        return answer

    return run


@pytest.fixture
def refuse(ask: Callable[..., Answer]) -> Callable[..., str]:
    """Runs a command that must fail as bad input does: exit code 2, nothing on stdout, one line on stderr."""

    def run(*args: str) -> str:
        answer = ask(*args)
        assert (answer.code, answer.out) == (2, "")
        lines = answer.err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("error[")
        return lines[0]

    return run


HEAVY = ("torch", "numpy", "matplotlib", "gradio")


@pytest.fixture
def burden() -> Callable[..., tuple[str, str]]:
    """What a command prints in a process of its own, and which heavy packages it imported, as a list in words."""

    def run(*words: str) -> tuple[str, str]:
        program = (
            f"import sys, pellucid.cli as c\nsys.argv = {['pellucid', *words]}\n"
            "try:\n    c.main()\nexcept SystemExit:\n    pass\n"
            f"print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    return run


def look(path: Path, width: int, colours: int) -> Image.Image:
    """An image that is at least so wide and so colourful, with no half-written one left beside it."""
    with Image.open(path) as found:
        image = found.convert("RGB")
    assert image.width >= width
    assert image.height >= 300
    assert len(image.getcolors(maxcolors=image.width * image.height) or ()) >= colours
    assert not list(path.parent.glob(".*.part*"))
    return image


@pytest.fixture
def see() -> Callable[[Path, int, int], Image.Image]:
    return look
