"""`pellucid score` and the record that it prints, with a small stand-in for Inception."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from stand_ins import PROMPTS, Small
from typer.testing import CliRunner

from pellucid import PellucidError
from pellucid.cli import HELP, OneLineErrors
from pellucid.cli import score as room
from pellucid.evidence.metrics.fid import Statistics, fid
from pellucid.evidence.metrics.images import Pixels
from pellucid.evidence.metrics.inception import features
from pellucid.evidence.metrics.kid import kid, kid_exact
from pellucid.evidence.metrics.precision_recall import precision_recall
from pellucid.evidence.metrics.score import FeatureSet, Score, ScoreConfig, measure, score, stages

app = typer.Typer(cls=OneLineErrors, context_settings=HELP, add_completion=False)
app.callback()(lambda: None)
app.command("score", context_settings=HELP, epilog=room.EPILOG)(room.command)


def pixels(count: int, seed: int = 0, bright: int = 0) -> np.ndarray:
    low = np.random.default_rng(seed).integers(bright, 200 + bright // 2, (count, 4, 4, 3), dtype=np.uint8)
    return low.repeat(2, 1).repeat(2, 2)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two sets, and Inception's place taken."""
    np.savez(tmp_path / "a.npz", images=pixels(40))
    np.savez(tmp_path / "b.npz", images=pixels(50, seed=1, bright=60))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setattr("pellucid.evidence.metrics.score.load_inception", lambda path, device, progress: Small())
    return tmp_path


@pytest.fixture
def ask(place: Path) -> Callable[..., Any]:
    def run(*args: str) -> Any:
        result = CliRunner().invoke(app, ["score", "--device", "cpu", *args], prog_name="pellucid")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def tell(ask: Callable[..., Any]) -> Callable[..., str]:
    def run(*args: str) -> str:
        result = ask(*args)
        assert (result.exit_code, result.stderr) == (0, "")
        return result.stdout

    return run


@pytest.fixture
def refuse(ask: Callable[..., Any]) -> Callable[..., str]:
    def run(*args: str) -> str:
        result = ask(*args)
        assert (result.exit_code, result.stdout) == (2, "")
        assert len(result.stderr.splitlines()) == 1
        return result.stderr

    return run


def as_features(count: int, seed: int = 0, bright: int = 0) -> torch.Tensor:
    return features(torch.from_numpy(pixels(count, seed, bright)).permute(0, 3, 1, 2), Small())


def test_the_figures_are_those_of_the_parts(tell: Callable[..., str]) -> None:
    found = json.loads(tell("a.npz", "--against", "b.npz", "--bootstrap", "30", "--kid-subsets", "5", "--json"))
    x, y = as_features(40), as_features(50, 1, 60)
    both = precision_recall(x, y)
    assert found["fid"]["value"] == pytest.approx(fid(x, y), rel=1e-6)
    assert found["kid"]["value"] == pytest.approx(kid_exact(x, y), rel=1e-5)
    assert found["kid_subsets"] == pytest.approx(asdict(kid(x, y, 5)), rel=1e-5)
    assert (found["precision"]["value"], found["recall"]["value"]) == (both.precision, both.recall)
    for name in ("fid", "kid", "precision", "recall"):
        interval = found[name]["interval"]
        assert interval["low"] <= found[name]["value"] <= interval["high"]
        assert (interval["level"], interval["resamples"]) == (0.95, 30)
    assert (found["images"], found["count"], found["reference"], found["reference_count"]) == ("a.npz", 40, "b.npz", 50)
    assert "image_text" not in found
    assert "prefer KID" in " ".join(found["notes"])


def test_the_table_puts_kid_first_where_there_are_few(tell: Callable[..., str]) -> None:
    text = tell("a.npz", "--against", "b.npz", "--bootstrap", "60")
    names = [
        line.split()[0] for line in text.splitlines() if line.strip().startswith(("KID", "FID", "precision", "recall"))
    ]
    assert names == ["KID", "FID", "precision", "recall"]
    assert "a.npz · 40 images · against b.npz · 50 images" in text
    assert "50 resamples, reflected" in text  # FID takes no more
    assert "note: FID of 40 images is biased upwards" in text
    plain = tell("a.npz", "--against", "b.npz", "--bootstrap", "0")
    assert " to " not in next(line for line in plain.splitlines() if line.strip().startswith("FID"))


def test_saved_statistics_stand_for_a_set(tell: Callable[..., str], refuse: Callable[..., str], place: Path) -> None:
    assert "50 images" in tell("b.npz", "--save", "b.safetensors")
    found = json.loads(tell("a.npz", "--against", "b.safetensors", "--bootstrap", "20", "--json"))
    assert found["fid"]["value"] == pytest.approx(fid(as_features(40), as_features(50, 1, 60)), rel=1e-6)
    assert "kid" not in found
    assert any("b.safetensors gave statistics alone" in note for note in found["notes"])
    tell("a.npz", "--save", "a.safetensors")
    both = json.loads(tell("a.safetensors", "--against", "b.safetensors", "--json"))
    assert both["fid"] == {"value": pytest.approx(found["fid"]["value"], rel=1e-9), "interval": None}
    assert "left out" in refuse("a.safetensors", "--against", "b.safetensors", "--inception", "x")
    assert "images" in refuse("a.safetensors", "--save", "c.safetensors")
    Statistics(torch.zeros(8).double(), torch.eye(8).double(), 10, "another").save(place / "c.safetensors")
    assert "of one network" in refuse("a.npz", "--against", "c.safetensors")


def test_the_reference_is_cached(tell: Callable[..., str], place: Path) -> None:
    tell("a.npz", "--against", "b.npz", "--bootstrap", "0", "--no-cache")
    assert not (place / "cache").exists()
    first = tell("a.npz", "--against", "b.npz", "--bootstrap", "0", "--json")
    assert len(list((place / "cache").iterdir())) == 1
    assert tell("a.npz", "--against", "b.npz", "--bootstrap", "0", "--json") == first


def test_folders_with_unreadable_images(tell: Callable[..., str], place: Path) -> None:
    (place / "out").mkdir()
    for number, array in enumerate(pixels(12)):
        Image.fromarray(array).save(place / "out" / f"{number:02}.png")
    (place / "out" / "x.png").write_text("no image")
    text = tell("out", "--against", "b.npz", "--bootstrap", "0")
    assert "12 images" in text
    assert "note: x.png must be an image file" in text
    assert "1 of 13 images of out were skipped" in text


def test_prompts(tell: Callable[..., str], refuse: Callable[..., str], place: Path, clip_folder: Path) -> None:
    np.savez(place / "four.npz", images=pixels(4))
    (place / "p.txt").write_text("\n".join(PROMPTS))
    words = ("--clip", str(clip_folder), "--prompts", "p.txt")
    found = json.loads(tell("four.npz", *words, "--json"))
    assert found["count"] == len(found["cosines"]) == 4
    assert found["image_text"]["value"] == pytest.approx(100 * sum(found["cosines"]) / 4, abs=1e-4)
    assert "fid" not in found
    both = json.loads(tell("four.npz", *words, "--against", "b.npz", "--bootstrap", "2", "--json"))
    assert both["image_text"]["value"] == found["image_text"]["value"]
    assert "fid" in both
    assert "image-text" in tell("four.npz", *words)
    assert "lines of p.txt must be 40" in refuse("a.npz", *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a.npz",), "--against, --clip or --save"),
        (("a.npz", "--clip", "x"), "given together"),
        (("a.npz", "--prompts", "x"), "given together"),
        (("a.npz", "--clip", "x", "--prompts", "y", "--inception", "z"), "--inception must be given with"),
        (("a.npz", "--save", "c.safetensors", "--kid-size", "5"), "--kid-size must be given with --against"),
        (("a.npz", "--save", "c.safetensors", "--no-cache"), "--no-cache must be given with --against"),
        (("a.npz", "--save", "c.npz"), "file-type"),
        (("a.npz", "--save", "none/c.safetensors"), "--save must be in a folder that exists"),
        (("none", "--against", "b.npz"), "not-found"),
        (("a.npz", "--against", "none"), "not-found"),
        (("a.npz", "--against", "b.npz", "--neighbours", "40"), "neighbours must be from 1 to 39"),
        (("a.npz", "--against", "b.npz", "--bootstrap", "1"), "resamples must be 0, or at least 2"),
        (("a.npz", "--against", "b.npz", "--bootstrap", "-1"), "usage"),
        (("a.npz", "--against", "b.npz", "--device", "moon"), "device"),
        (("a.npz", "--clip", "a.npz", "--prompts", "none.txt"), "prompts must be"),
    ],
)
def test_bad_input_is_one_line(refuse: Callable[..., str], words: tuple[str, ...], said: str) -> None:
    assert said in refuse(*words)


def test_weights_that_are_not_there_are_one_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(place)
    result = CliRunner().invoke(app, ["score", "a.npz", "--against", "b.npz", "--inception", "none.pth"])
    assert result.exit_code == 2
    assert "Inception weights must be a file that exists" in result.stderr


# --- the record --------------------------------------------------------------------------------------------------


def test_progress_is_told_as_often_as_promised() -> None:
    sets = [
        measure(Pixels(torch.from_numpy(pixels(20, seed)).permute(0, 3, 1, 2), str(seed)), Small()) for seed in (0, 1)
    ]
    for asked in (ScoreConfig(resamples=0), ScoreConfig(resamples=6), ScoreConfig(resamples=70)):
        told: list[int] = []
        score(sets[0], sets[1], asked, lambda told=told: told.append(1))
        assert len(told) == stages(asked)


def test_from_ten_thousand_images_on_there_is_no_warning() -> None:
    made = Statistics(torch.zeros(2).double(), torch.eye(2).double(), 10_000)
    found = score(FeatureSet("a", made), FeatureSet("b", made))
    assert found.fid is not None
    assert found.fid.value == pytest.approx(0, abs=1e-12)
    assert not found.prefers_kid
    assert not any("prefer" in note for note in found.notes)
    few = Statistics(made.mean, made.covariance, 9_999)
    assert score(FeatureSet("a", few), FeatureSet("b", made)).prefers_kid


def test_the_record_is_plain_json() -> None:
    found = Score("a", 3, notes=("x",)).to_json()
    assert json.loads(json.dumps(found)) == {"version": 1, "images": "a", "count": 3, "notes": ["x"]}
    with pytest.raises(PellucidError):
        ScoreConfig(resamples=1)
