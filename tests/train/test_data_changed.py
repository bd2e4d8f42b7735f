"""A run that goes on finds the data that it began with, or says that it does not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from image_files import good_folder, painted, stored
from test_latents import small_vae
from test_one_run_a_folder import RUN
from test_web_shards import examples, write_tar
from typer.testing import CliRunner, Result

from pellucid.cli import app
from pellucid.train.cifar10 import CIFAR10, CIFAR10Source
from pellucid.train.image_folder import ImageFolder
from pellucid.train.latent_cache import cache_latents
from pellucid.train.latent_source import LatentSource
from pellucid.train.scenes_source import ScenesConfig
from pellucid.train.source import Source, differences, inventory_of
from pellucid.train.web_shards import WebShards

COUNT = 5


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pictures with captions, and a run of two steps that saw them."""
    monkeypatch.chdir(tmp_path)
    folder = good_folder(tmp_path / "data", COUNT)
    describe(folder)
    images = 'kind = "image_folder"\nfolder = "data"\nsize = 16\n'
    (tmp_path / "run.toml").write_text(RUN.replace('kind = "scenes"\nsize = 16\n', images), "utf-8")
    assert ask("--until", "2").exit_code == 0
    return folder


def describe(folder: Path, text: str = "number") -> None:
    rows = [{"file_name": path.name, "text": f"{text} {path.name}"} for path in sorted(folder.glob("*.png"))]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def ask(*words: str) -> Result:
    return CliRunner().invoke(app, ["train", "run.toml", "--device", "cpu", "--out", "run", *words])


def config() -> dict[str, Any]:
    return json.loads(Path("run/config.json").read_text("utf-8"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def more(folder: Path) -> None:
    (folder / "999.png").write_bytes(stored(painted(9)))
    describe(folder)


def fewer(folder: Path) -> None:
    (folder / "000.png").unlink()
    describe(folder)


def renamed(folder: Path) -> None:
    (folder / "000.png").rename(folder / "0.png")
    (folder / "metadata.jsonl").write_text((folder / "metadata.jsonl").read_text().replace('": "000.png', '": "0.png'))


def larger(folder: Path) -> None:
    (folder / "000.png").write_bytes(stored(painted(0, (30, 30))))


def said_otherwise(folder: Path) -> None:
    describe(folder, "nummer")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (more, f"count {COUNT} → {COUNT + 1}, other names, other sizes, other texts"),
        (fewer, f"count {COUNT} → {COUNT - 1}, other names, other sizes, other texts"),
        (renamed, "other names"),
        (larger, "other sizes"),
        (said_otherwise, "other texts"),
    ],
)
def test_other_data_are_refused_and_nothing_is_touched(data: Path, change: Callable[[Path], None], words: str) -> None:
    change(data)
    before = files(Path("run"))
    answer = ask("--until", "4")
    assert (answer.exit_code, answer.stdout) == (2, "")
    assert answer.stderr == (
        f"error[data-changed]: data must be the same as when run began; got {words}. "
        "Restore it, choose another --out, or pass --data-changed to continue.\n"
    )
    assert files(Path("run")) == before


def test_with_data_changed_it_goes_on_and_its_log_says_so(data: Path) -> None:
    more(data)
    note = (
        "continues from step 2 with other data than it began with: count 5 → 6, other names, other sizes, other texts"
    )
    answer = ask("--until", "4", "--data-changed")
    assert answer.exit_code == 0, answer.stderr
    assert note in answer.stderr
    lines = [json.loads(line) for line in Path("run/log.jsonl").read_text("utf-8").splitlines()]
    assert [(line["step"], line.get("note")) for line in lines] == [(2, None), (2, note), (4, None)]
    assert config()["data"]["count"] == COUNT + 1
    assert ask("--until", "6").exit_code == 0  # these are its data now
    assert ask("--until", "8", "--data-changed").exit_code == 0  # as torchrun starts it again
    assert Path("run/log.jsonl").read_text("utf-8").count("note") == 1


def test_the_same_files_in_another_place_and_time_are_the_same(data: Path) -> None:
    """A copy on another machine has other times; only names, sizes and texts count."""
    shutil.copytree(data, "copy")
    shutil.rmtree(data)
    os.rename("copy", data)
    os.utime(data / "000.png", (1, 1))
    assert ask("--until", "4").exit_code == 0


def test_a_run_of_an_older_version_goes_on_and_has_its_inventory_from_then(data: Path) -> None:
    held = config()
    known = held.pop("data")
    Path("run/config.json").write_text(json.dumps(held))
    assert ask("--until", "4").exit_code == 0
    assert config()["data"] == known
    larger(data)
    assert "error[data-changed]" in ask("--until", "6").stderr


def test_a_run_without_a_step_may_have_other_data(data: Path) -> None:
    shutil.rmtree("run/checkpoints")
    more(data)
    assert ask("--until", "2").exit_code == 0
    assert config()["data"]["count"] == COUNT + 1


# --- what other sources say of themselves ------------------------------------------------------------------------


def changes(before: Source, after: Source) -> str:
    return differences(inventory_of(before), inventory_of(after))


def test_shards_by_name_and_size(tmp_path: Path) -> None:
    for number in (0, 1):
        write_tar(tmp_path / f"{number}.tar", examples(4 * number, 4))
    first = WebShards(tmp_path, 16)
    os.utime(tmp_path / "0.tar", (1, 1))
    assert changes(first, WebShards(tmp_path, 16)) == ""
    write_tar(tmp_path / "2.tar", examples(8, 4))
    assert changes(first, WebShards(tmp_path, 16)) == "count 8 → 12, other names, other sizes"
    (tmp_path / "2.tar").unlink()
    (tmp_path / "1.tar").rename(tmp_path / "3.tar")
    assert changes(first, WebShards(tmp_path, 16)) == "other names"


def test_a_latent_cache_by_its_header(tmp_path: Path) -> None:
    for count in (4, 5):
        images = ImageFolder(good_folder(tmp_path / f"data{count}", count), 16)
        cache_latents(images, small_vae(), tmp_path / f"cache{count}")
    cache_latents(images, small_vae(seed=1), tmp_path / "other")
    found = {name: LatentSource(tmp_path / name) for name in ("cache4", "cache5", "other")}
    assert changes(found["cache4"], LatentSource(tmp_path / "cache4")) == ""
    assert changes(found["cache4"], found["cache5"]) == "count 4 → 5, other header, other sizes"
    assert changes(found["cache5"], found["other"]) == "other header"


def test_scenes_by_their_parameters_and_what_is_left_by_its_count() -> None:
    scenes = ScenesConfig(size=32, count=10)
    assert changes(scenes.open(), ScenesConfig(size=32, count=10, compile_render=True).open()) == ""
    assert changes(scenes.open(), ScenesConfig(size=32, count=10, seed=1).open()) == "other parameters"
    assert changes(scenes.open(), ScenesConfig(size=32, count=11).open()) == "count 10 → 11, other parameters"
    pixels = [CIFAR10Source(CIFAR10(*([[0] * count] * 2))) for count in (3, 4)]  # type: ignore[list-item]
    assert changes(*pixels) == "count 3 → 4"
