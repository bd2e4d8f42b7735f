"""`pellucid data scenes`."""

from __future__ import annotations

import json

import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from pellucid.cli import HELP, OneLineErrors, data
from pellucid.scenes import captions, render, sample

app = typer.Typer(cls=OneLineErrors, context_settings=HELP)
app.add_typer(data.app, name="data")


@pytest.fixture
def ask(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*args):
        result = CliRunner().invoke(app, ["data", "scenes", *args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


def pixels(path):
    with Image.open(path) as image:
        return image.tobytes()


def test_the_sheet(ask, tmp_path):
    result = ask("--count", "6", "--seed", "3", "--out", "sheet.png")
    assert result.exit_code == 0
    assert result.stdout.strip() == "wrote sheet.png"
    with Image.open(tmp_path / "sheet.png") as image:
        assert image.width > 600
        assert len(image.getcolors(1 << 24)) > 100
    assert [p.name for p in tmp_path.iterdir()] == ["sheet.png"]


def test_the_folder_is_one_that_training_reads(ask, tmp_path):
    from pellucid.train.image_folder import ImageFolder

    assert ask("--count", "70", "--seed", "3", "--folder", "made", "--size", "32").exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "made" / "metadata.jsonl").read_text().splitlines()]
    scenes = sample(torch.arange(70), 3)
    assert [row["text"] for row in rows] == captions(scenes, 3)
    wanted = ((render(scenes[66:67], 32)[0] + 1) * 127.5).round().byte().permute(1, 2, 0)
    assert pixels(tmp_path / "made" / rows[66]["file_name"]) == wanted.numpy().tobytes()
    assert len(rows[0]["objects"]) == int(scenes.count[0])
    labels = set(pixels(tmp_path / "made" / rows[5]["segmentation"]))
    assert labels == set(range(int(scenes.count[5]) + 1))
    read = ImageFolder(tmp_path / "made", 32, hints=("edges",))
    assert len(read) == 70


def test_json(ask):
    rows = json.loads(ask("--count", "3", "--json", "--style", "neon", "--split", "held_out").stdout)
    assert [row["style"] for row in rows] == ["neon"] * 3


@pytest.mark.parametrize(
    ("args", "start"),
    [
        (["--count", "0"], "error[scenes-count]: --count must be from 1 to 400"),
        (["--count", "500"], "error[scenes-count]"),
        (["--size", "9999"], "error[scenes-size]: --size must be from 16 to 2048"),
        (["--split", "test"], "error[scenes-split]: split must be train or held_out or any; got 'test'."),
        (["--style", "cubist"], "error[scene-style]: style must be one that the world has; got 'cubist'."),
        (["--out", "sheet.txt"], "error[file-type]"),
        (["--folder", "."], "error[file]: --folder must be one that does not exist yet"),
        (["--folder", "a/b"], "error[file]: --folder must be in a folder that exists"),
    ],
)
def test_bad_input(ask, args, start, tmp_path):
    result = ask(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(start)
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
