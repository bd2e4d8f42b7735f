"""The log of a run: lines that outlive a kill, sheets of images, and words on stderr."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pellucid.train.config import LogConfig
from pellucid.train.journal import FILE, Journal, cut, sheet

PLAIN = LogConfig(every=1, checkpoint_every=1, tensorboard=False)


def journal(
    folder: Path, first: int = 0, *, quiet: bool = True, steps: int = 100, config: LogConfig = PLAIN
) -> Journal:
    return Journal(folder, config, first=first, steps=steps, batch=8, quiet=quiet)


def lines(folder: Path) -> list[dict[str, Any]]:
    def never(word: str) -> None:
        pytest.fail(f"{word} is not JSON")

    return [json.loads(line, parse_constant=never) for line in (folder / FILE).read_text("utf-8").splitlines()]


def write(folder: Path, first: int, last: int, loss: float = 1.0) -> None:
    made = journal(folder, first)
    for step in range(first + 1, last + 1):
        made.window(step, {"loss": loss, "levels": []})
    made.close()


# --- lines -------------------------------------------------------------------------------------------------------


def test_a_line_says_where_the_run_is(tmp_path: Path) -> None:
    made = journal(tmp_path)
    made.window(5, {"loss": 0.25, "levels": [{"lam": 0.5, "mean": 1.0}]})
    made.close()
    (line,) = lines(tmp_path)
    assert line.pop("images_per_s") > 0
    assert line == {"step": 5, "images": 40, "loss": 0.25, "levels": [{"lam": 0.5, "mean": 1.0}]}


def test_a_line_is_there_before_the_next_step(tmp_path: Path) -> None:
    """A kill takes nothing of what was logged: every line is flushed."""
    made = journal(tmp_path)
    made.window(1, {"loss": 1.0})
    assert [line["step"] for line in lines(tmp_path)] == [1]
    made.close()


def test_a_number_that_json_does_not_know_is_null(tmp_path: Path) -> None:
    made = journal(tmp_path, config=LogConfig())
    made.window(50, {"loss": math.nan, "grad_norm": math.inf, "levels": [{"lam": -1.0, "mean": math.nan}]})
    made.close()
    (line,) = lines(tmp_path)
    assert (line["loss"], line["grad_norm"], line["levels"][0]["mean"]) == (None, None, None)


def test_what_a_killed_run_wrote_too_much_is_cut_and_comes_again(tmp_path: Path) -> None:
    write(tmp_path, 0, 7, loss=1.0)
    write(tmp_path, 4, 9, loss=2.0)  # its checkpoint was of step 4
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [
        *((step, 1.0) for step in range(1, 5)),
        *((step, 2.0) for step in range(5, 10)),
    ]


def test_a_finished_log_stays_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, 0, 3)
    before = (tmp_path / FILE).read_bytes()
    write(tmp_path, 3, 3)
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize(
    "torn",
    [
        b'{"step": 3, "lo',
        b'{"step": 3',
        b"\x00" * 64,
        b"\xff\xfe{",
        b"[3]",
        b"3",
        b'{"loss": 1}',
        b'{"step": "3"}',
        b"\n",
    ],
    ids=repr,
)
def test_a_torn_line_is_left_out(tmp_path: Path, torn: bytes) -> None:
    write(tmp_path, 0, 2)
    with (tmp_path / FILE).open("ab") as file:
        file.write(torn)
    write(tmp_path, 2, 4)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]


@given(length=st.integers(0, 400), step=st.integers(0, 12))
def test_cut_off_anywhere_the_rest_is_whole_lines(tmp_path_factory: Any, length: int, step: int) -> None:
    """Killed at any byte, gone on from any checkpoint: what is left is the beginning of what was."""
    folder = tmp_path_factory.mktemp("cut")
    whole = "".join(json.dumps({"step": n, "loss": 1 / n}) + "\n" for n in range(1, 13)).encode()
    (folder / FILE).write_bytes(whole[:length])
    cut(folder / FILE, step)
    left = (folder / FILE).read_bytes()
    assert whole.startswith(left) or whole.startswith(left.rstrip(b"\n"))
    assert [line["step"] for line in lines(folder)] == list(range(1, len(lines(folder)) + 1))
    assert len(lines(folder)) == min(step, whole[:length].count(b"}"))
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_nothing_to_cut(tmp_path: Path) -> None:
    cut(tmp_path / FILE, 3)
    assert not (tmp_path / FILE).exists()


# --- sheets ------------------------------------------------------------------------------------------------------


@given(count=st.integers(1, 17), height=st.integers(1, 5), width=st.integers(1, 6))
def test_every_image_is_in_its_place(count: int, height: int, width: int) -> None:
    """Row by row, a white line between, as square as may be."""
    images = torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(count)) * 0.9
    made = sheet(images)
    columns = (made.shape[1] + 1) // (width + 1)
    rows = (made.shape[0] + 1) // (height + 1)
    assert made.shape == (rows * (height + 1) - 1, columns * (width + 1) - 1, 3)
    assert (rows - 1) * columns < count <= rows * columns
    assert columns - 1 < math.sqrt(count) <= columns
    left = made.copy()
    for i in range(count):
        top, start = i // columns * (height + 1), i % columns * (width + 1)
        place = np.s_[top : top + height, start : start + width]
        wanted = (images[i].permute(1, 2, 0).double().numpy() * 255).round()
        assert np.abs(made[place] - wanted).max() <= 1  # .5 in float32 may round to either side
        left[place] = 255
    assert (left == 255).all()


def test_a_sheet_is_a_file_that_is_whole(tmp_path: Path) -> None:
    made = journal(tmp_path)
    path = made.images(30, torch.tensor([0.0, 1.0, 2.0, -1.0]).reshape(4, 1, 1, 1).expand(4, 3, 2, 2))
    made.images(30, torch.zeros(4, 3, 2, 2).index_fill(0, torch.tensor([1, 2]), 1.0))  # a resumed run draws it again
    made.close()
    assert path == tmp_path / "pictures" / "step-00000030.png"
    assert [found.name for found in path.parent.iterdir()] == [path.name]
    with Image.open(path) as found:
        pixels = np.asarray(found)
    assert pixels.shape == (5, 5, 3)
    assert [pixels[y, x, 0] for y, x in ((0, 0), (0, 3), (3, 0), (3, 3))] == [0, 255, 255, 0]  # clamped


# --- words -------------------------------------------------------------------------------------------------------


def test_without_a_terminal_there_are_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = journal(tmp_path, quiet=False, steps=3)
    for step in (1, 2, 3):
        made.window(step, {"loss": 0.5})
    made.say("[bold]a word[/]")
    made.close()
    out, err = capsys.readouterr()
    assert out == ""
    said = err.splitlines()
    assert len(said) == 3  # the first, the last, and the word: never a line a step
    assert said[0].startswith("step 1/3 · loss 0.5000 · ")
    assert said[0].endswith(" left")
    assert said[1].startswith("step 3/3 · loss 0.5000 · ")
    assert said[1].endswith(" · done")
    assert said[2] == "[bold]a word[/]"


def test_the_time_left_is_that_of_the_steps_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = journal(tmp_path, quiet=False, steps=7201)
    made.since -= 1.0  # the first step took a second
    made.window(1, {"loss": 0.5})
    made.close()
    assert "images/s · 2:00:" in capsys.readouterr().err


def test_quiet_is_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, 3)
    assert capsys.readouterr() == ("", "")
