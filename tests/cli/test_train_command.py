"""`pellucid train`: a run from a file, bad input in one line, and the page that explains it."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pellucid.cli import app, train
from pellucid.train import config as configs
from pellucid.train.cifar10 import IN_FILE, RECORD
from pellucid.train.config import TrainConfig, chosen, read, to_plain
from pellucid.train.kinds import DATA, TASKS

PAGE = (Path(__file__).parents[2] / "docs" / "train.md").read_text("utf-8")
RUN = """
steps = 4
batch = 2
[task]
kind = "denoiser"
sampling = { steps = 2 }
objective = { schedule = { name = "linear" } }
[task.network]
_class_name = "UNet2DModel"
sample_size = 32
block_out_channels = [8]
layers_per_block = 1
down_block_types = ["DownBlock2D"]
up_block_types = ["UpBlock2D"]
norm_num_groups = 4
attention_head_dim = 8
[data]
kind = "cifar10"
folder = "data"
split = "test"
[log]
every = 2
checkpoint_every = 2
"""

if not any(made.name == "train" for made in app.registered_commands):
    app.command("train")(train.command)


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10's test file with made-up pixels."""
    records = np.random.default_rng(0).integers(0, 256, (IN_FILE, RECORD), dtype=np.uint8)
    records[:, 0] %= 10
    path = tmp_path_factory.mktemp("cifar") / "test_batch.bin"
    records.tofile(path)
    return path


@pytest.fixture
def here(ask: Callable[..., Any], tmp_path: Path, pixels: Path) -> Path:
    """The folder that commands run in, with data and a config."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / pixels.name).symlink_to(pixels)
    (tmp_path / "run.toml").write_text(RUN, "utf-8")
    return tmp_path


def changed(here: Path, old: str, new: str, name: str = "other.toml") -> str:
    assert old in RUN
    (here / name).write_text(RUN.replace(old, new, 1), "utf-8")
    return name


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]


# --- runs --------------------------------------------------------------------------------------------------------


def test_a_run_stops_goes_on_and_ends(here: Path, ask: Callable[..., Any]) -> None:
    answer = ask("train", "run.toml", "--device", "cpu", "--until", "2")
    assert answer.code == 0
    assert re.fullmatch(r"2 steps of 4 in \d+ s → out/run\n", answer.out)
    assert re.search(r"step 2/4 · loss \d\.\d{4} · [\d,]+ images/s · 0:00:\d\d left", answer.err)
    assert not (here / "out" / "run" / "model").exists()
    answer = ask("train", "run.toml", "--device", "cpu")
    assert re.fullmatch(r"4 steps in \d+ s → out/run\n", answer.out)
    assert re.search(r"step 4/4 · .* · done", answer.err)
    assert steps_of(here / "out" / "run") == [2, 4]
    assert (here / "out" / "run" / "model" / "model_index.json").is_file()
    assert len(list((here / "out" / "run" / "tensorboard").iterdir())) >= 1


def test_json_is_all_of_stdout(here: Path, ask: Callable[..., Any]) -> None:
    answer = ask("train", "run.toml", "--device", "cpu", "--out", "here/there", "--json", "--until", "2")
    assert answer.json["folder"] == "here/there"
    assert answer.json["steps"] == 2
    assert answer.json["seconds"] > 0
    assert answer.json["skipped"] == 0


def test_images_that_cannot_be_read_are_counted(here: Path, ask: Callable[..., Any]) -> None:
    (here / "pictures").mkdir()
    for number in range(3):
        pixels = np.full((40, 40, 3), 60 * number, np.uint8)
        Image.fromarray(pixels).save(here / "pictures" / f"{number}.png")
    (here / "pictures" / "torn.png").write_bytes(b"torn")
    data = 'kind = "image_folder"\nfolder = "pictures"\nsize = 32'
    name = changed(here, 'kind = "cifar10"\nfolder = "data"\nsplit = "test"', data)
    answer = ask("train", name, "--device", "cpu", "--json", "--until", "2")
    assert answer.json["skipped"] == 1
    answer = ask("train", name, "--device", "cpu")
    assert answer.out.endswith("; 1 images could not be read and were skipped\n")


def test_explain_lists_the_frozen_networks_of_an_adapter(here: Path, ask: Callable[..., Any]) -> None:
    base = Path(__file__).parents[2] / "src" / "pellucid" / "bundles" / "scenes-128"
    (here / "lora.toml").write_text(
        f'steps = 1\nbatch = 2\ntask = {{ kind = "lora", base = "{base}" }}\ndata = {{ kind = "scenes" }}\n', "utf-8"
    )
    answer = ask("train", "lora.toml", "--explain", "--ranks", "2", "--json")
    held = {row["what"]: row for row in answer.json["held"]}
    assert {"frozen UNet", "frozen AutoencoderKL", "frozen CLIPTextEncoder"} < set(held)
    assert all(row["per_rank"] == row["whole"] for row in held.values())
    assert answer.json["bytes_per_rank"] == sum(row["whole"] for row in held.values())


def test_help_has_an_example(tell: Callable[..., Any]) -> None:
    answer = tell("train", "--help")
    assert "pellucid train configs/cifar10" in answer.words
    assert "torchrun" in answer.words


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "code", "words"),
    [
        ("batch = 2", "bacth = 2", "config-key", "config.bacth must be a known key. Nearest: batch"),
        ("batch = 2", "", "config-missing", "config must have batch"),
        ("batch = 2", 'batch = "2"', "config-type", "config.batch must be a whole number; got '2'."),
        (
            "batch = 2",
            "batch = 3\nengine = { accumulate = 2 }",
            "batch-parts",
            "a multiple of ranks × accumulate (1 × 2)",
        ),
        ("steps = 4", "steps = = 4", "config-file", "config must be valid TOML"),
        ('"data"', '"nowhere"', "data-missing", "CIFAR-10 folder must be one that holds test_batch.bin"),
        ('split = "test"', 'split = "train"', "data-missing", "data_batch_1.bin"),
        ('kind = "denoiser"', 'kind = "denoise"', "config-value", "task.kind must be one of denoiser"),
        ('"linear"', '"liner"', "unknown-schedule", "Nearest: linear"),
        ("sample_size = 32", "sample_size = 16", "data-shape", "images of the data must be of shape (3, 16, 16)"),
        ("checkpoint_every = 2", "checkpoint_every = 3", "config-value", "a multiple of log.every (2)"),
    ],
)
def test_a_bad_config_is_one_line(
    here: Path, refuse: Callable[..., str], old: str, new: str, code: str, words: str
) -> None:
    line = refuse("train", changed(here, old, new), "--device", "cpu")
    assert line.startswith(f"error[{code}]: ")
    assert words in line
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("train", "none.toml"), "config-file"),
        (("train", "data"), "config-file"),
        (("train", "run.toml", "--ranks", "2"), "usage"),
        (("train", "run.toml", "--until", "0"), "usage"),
        (("train", "run.toml", "--device", "tpu9"), "device"),
        (("train", "run.toml", "--device", "cpu", "--out", "data"), "out-taken"),
        (("train", "run.toml", "--device", "cpu", "--out", "run.toml"), "file"),
        (("train",), "usage"),
    ],
    ids=str,
)
def test_bad_usage_is_one_line(here: Path, refuse: Callable[..., str], args: tuple[str, ...], code: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    assert refuse(*args).startswith(f"error[{code}]: ")
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == before


def test_a_resume_with_another_config_overwrites_nothing(
    here: Path, ask: Callable[..., Any], refuse: Callable[..., str]
) -> None:
    assert ask("train", "run.toml", "--device", "cpu", "--out", "out", "--until", "2").code == 0
    before = {path: path.read_bytes() for path in (here / "out").rglob("*") if path.is_file()}
    line = refuse("train", changed(here, "batch = 2", "batch = 4"), "--device", "cpu", "--out", "out")
    assert line.startswith("error[resume-config]: config must be the one that began out")
    assert {path: path.read_bytes() for path in (here / "out").rglob("*") if path.is_file()} == before


# --- the page ----------------------------------------------------------------------------------------------------


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.S | re.M)


def example() -> dict[str, Any]:
    (text,) = blocks("toml")
    return tomllib.loads(text)


def test_the_pages_example_is_whole() -> None:
    """Every key of a run is in it, no other, and it reads."""
    raw = example()
    config = read(TrainConfig, raw, "config")
    for table, value in to_plain(config).items():
        if table not in ("task", "data") and isinstance(value, dict):
            assert set(raw[table]) == set(value), table
    assert set(raw) == set(to_plain(config))
    task, data = chosen(config.task, TASKS, "task"), chosen(config.data, DATA, "data")
    assert set(raw["task"]["objective"]) == set(to_plain(task.objective))
    assert set(raw["data"]) - {"kind"} == set(to_plain(data))


def test_the_page_names_every_key_and_its_default() -> None:
    """A default that changes in the code changes on the page."""
    rows = dict(re.findall(r"^\| `((?:optimizer|engine|log)\.[a-z_]+)` \| ([^|]+?) \|", PAGE, re.M))
    words = {"False": "false", "True": "true"}
    told = 0
    for table, kind in (("optimizer", "OptimizerConfig"), ("engine", "EngineConfig"), ("log", "LogConfig")):
        for name, value in to_plain(getattr(configs, kind)()).items():
            assert re.search(rf"`(?:{table}\.)?{name}`", PAGE), name
            row = rows.get(f"{table}.{name}")
            if row is not None and "," not in row and " and " not in row:
                told += 1
                said = words.get(str(value), value)
                assert row == said or float(row) == value, name
    assert told >= 12


def test_the_pages_commands_run(here: Path, ask: Callable[..., Any]) -> None:
    """The example itself, with fewer weights, images and steps."""
    raw = example()
    raw |= {"steps": 4, "batch": 2}
    raw["task"]["network"] |= tomllib.loads(RUN)["task"]["network"]
    raw["task"]["sampling"]["steps"] = 2
    raw["data"] |= {"folder": "data", "split": "test"}
    raw["log"] |= {"every": 2, "checkpoint_every": 2, "pictures_every": 2, "pictures": 4}
    (here / "cifar10.toml").write_text(toml(raw), "utf-8")
    lines = [line for block in blocks("sh") for line in block.splitlines() if line]
    for line in lines:
        program, *args = shlex.split(line)
        assert program == "pellucid"
        assert ask(*args).code == 0, line
    assert len(lines) >= 4
    assert steps_of(here / "runs" / "cifar10") == [2, 4]
    assert (here / "image.png").is_file()


def toml(table: dict[str, Any]) -> str:
    """Tables as inline TOML: JSON says the rest the same way."""

    def said(value: Any) -> str:
        if isinstance(value, dict):
            return "{ " + ", ".join(f"{key} = {said(item)}" for key, item in value.items()) + " }"
        return json.dumps(value)

    return "".join(f"{key} = {said(value)}\n" for key, value in table.items())
