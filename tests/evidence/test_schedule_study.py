"""The schedule study end to end: on a tiny network, cut off and gone on, and what it refuses before it begins."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from stand_ins import Small
from torch import nn

import pellucid
from pellucid.core.errors import PellucidError
from pellucid.evidence.metrics import fid
from pellucid.evidence.metrics.fid import fid_interval
from pellucid.evidence.metrics.inception import Inception
from pellucid.evidence.study import schedules as module
from pellucid.evidence.study import schedules_report
from pellucid.evidence.study.kernel import claim, is_mine
from pellucid.evidence.study.schedules import ScheduleResults, ScheduleStudy, ScheduleStudyConfig, TrainingJudge
from pellucid.interop.atomic_files import read_lines
from pellucid.train.cifar10 import CIFAR10, FILES, IN_FILE, RECORD
from pellucid.train.config import read
from pellucid.train.initial import fresh

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10's training files in their official form; every image is one colour with a little noise."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for name in FILES["train"]:
        records = random.integers(0, 40, (IN_FILE, RECORD), dtype=np.uint8)
        records[:, 0] %= 10
        records[:, 1:] += random.integers(0, 200, (IN_FILE, 1), dtype=np.uint8)
        records.tofile(folder / name)
    return folder


def raw(name: str = "smoke") -> dict[str, Any]:
    return tomllib.loads((CONFIGS / f"cifar10_schedules_{name}.toml").read_text("utf-8"))


def smoke(data: Path, **changes: Any) -> ScheduleStudyConfig:
    """The smoke config at these data, with other fields where they are given."""
    given = raw() | changes
    given["train"] = given["train"] | {"data": {"kind": "cifar10", "folder": str(data)}}
    return read(ScheduleStudyConfig, given, "config")


def two_schedules(data: Path) -> ScheduleStudyConfig:
    """Every kind of cell: two points, two EMA lengths, two grids, more images at the end."""
    given = raw()
    given["train"] |= {"ema": [64.0, 16.0], "batch": 8}
    given["train"]["task"]["network"] |= {"block_out_channels": [8, 8], "norm_num_groups": 4, "attention_head_dim": 8}
    given["train"]["task"]["sampling"]["steps"] = 3
    lists = {"schedules": ["linear", "cosine"], "grids": ["trailing"]}
    return smoke(data, train=given["train"], final_samples=8, neighbours=6, **lists)


@pytest.fixture(scope="module")
def pixels(data: Path) -> CIFAR10:
    return CIFAR10.read(data)


def stand_in(patch: pytest.MonkeyPatch, pixels: CIFAR10) -> None:
    """Eight features instead of 2,048, and the data read once: seconds instead of a minute."""
    patch.setattr(module, "load_inception", lambda path, device: Small().to(device))
    patch.setattr(CIFAR10, "read", staticmethod(lambda folder, split: pixels))


@pytest.fixture
def quick(data: Path, pixels: CIFAR10, monkeypatch: pytest.MonkeyPatch) -> ScheduleStudyConfig:
    stand_in(monkeypatch, pixels)
    return two_schedules(data)


@pytest.fixture(scope="module")
def whole(data: Path, pixels: CIFAR10, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study that nobody disturbed. Read it, or take a copy."""
    folder = tmp_path_factory.mktemp("whole") / "study"
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch, pixels)
        run(two_schedules(data), folder)
    return folder


def records_in(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "records.jsonl")


def run(config: ScheduleStudyConfig, folder: Path) -> list[dict[str, Any]]:
    study = ScheduleStudy(config, folder, device="cpu", say=lambda _: None)
    study.run()
    return study.records.rows


class Cut(Exception):  # noqa: N818
    """The moment at which a study is killed."""


def test_every_cell_is_scored_once(whole: Path) -> None:
    rows = records_in(whole)
    last = [(64.0, "leading"), (16.0, "leading"), (64.0, "trailing")]
    wanted = [(s, step, *v) for s in ("linear", "cosine") for step, vs in ((4, last[:1]), (8, last)) for v in vs]
    assert [(row["schedule"], row["step"], row["ema"], row["grid"]) for row in rows] == wanted
    for row in rows:
        main = (row["step"], row["ema"], row["grid"]) == (8, 64.0, "leading")
        assert row["samples"] == (8 if main else 6)
        assert row["images"] == 8 * row["step"]
        assert ("fid_low" in row, "fid_few" in row) == (main, main)
        assert ("kid_last_call" in row) == (row["step"] == 8)
        assert all(np.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["kid_low"] <= row["kid_high"]
    names = {f"{s}-0-{step:08d}.png" for s in ("linear", "cosine") for step in (4, 8)}
    assert {path.name for path in (whole / "pictures").iterdir()} == names
    assert (whole / "runs" / "cosine-0" / "model" / "model_index.json").is_file()


def test_schedules_share_the_start_and_the_data_and_differ_in_the_noise(quick: ScheduleStudyConfig) -> None:
    configs = [quick.run_config(name, 0) for name in quick.schedules]
    starts = [fresh(config.task["network"], config.seed).state_dict() for config in configs]
    assert all(torch.equal(starts[0][key], starts[1][key]) for key in starts[0])
    plain = [config.task["objective"].pop("schedule") for config in configs]
    assert plain == [{"name": "linear"}, {"name": "cosine"}]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("calls", [2, 5])
def test_a_study_that_was_cut_off_goes_on(
    quick: ScheduleStudyConfig, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Cut between two scores: among those of the last point of the first run, and between points of the second.

    What is scored again is scored the same, what is done is not done again, and nobody sees where it was cut.
    """
    folder, wanted, score = tmp_path / "study", records_in(whole), ScheduleStudy.score
    made: list[Any] = []

    def cut(self: ScheduleStudy, *args: Any) -> Mapping[str, Any]:
        if len(made) == calls:
            raise Cut
        made.append(args)
        return score(self, *args)

    monkeypatch.setattr(ScheduleStudy, "score", cut)
    with pytest.raises(Cut):
        run(quick, folder)
    assert records_in(folder) == wanted[:calls]
    with (folder / "records.jsonl").open("a") as file:
        file.write('{"schedule": "lin')  # the line at which it was killed
    monkeypatch.setattr(ScheduleStudy, "score", lambda self, *args: made.append(args) or score(self, *args))
    assert run(quick, folder) == wanted
    assert run(quick, folder) == wanted
    assert len(made) == len(wanted)
    for name in ("linear-0-00000004", "cosine-0-00000008"):
        sides = [(side / "pictures" / f"{name}.png").read_bytes() for side in (whole, folder)]
        assert sides[0] == sides[1]


def test_processes_that_share_a_study_make_what_one_makes(
    quick: ScheduleStudyConfig, whole: Path, tmp_path: Path
) -> None:
    """Each writes its own records, the second finds the features of the first, and the whole is read from all."""
    folder, made = tmp_path / "study", []
    for index in (1, 0):
        study = ScheduleStudy(quick, folder, (index, 2), device="cpu", say=lambda _: None)
        study.run()
        made.append(study.records.rows)
        cached = list((folder / "features").iterdir())
        assert len(cached) == 1
    assert [{row["schedule"] for row in rows} for rows in made] == [{"cosine"}, {"linear", "cosine"}]
    assert {path.name for path in folder.glob("records*")} == {"records-0of2.jsonl", "records-1of2.jsonl"}
    key = json.dumps
    assert sorted(map(key, ScheduleResults.read(folder).rows)) == sorted(map(key, records_in(whole)))
    assert len(run(quick, folder)) == len(records_in(whole))
    assert not (folder / "records.jsonl").exists()  # nothing was left to do


def test_models_of_a_study_are_kept_in_half_precision(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """recipes/make_assets.py: the best one, or one of each schedule, which predict what the runs' own do."""

    def command(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["make_assets.py", str(whole), "--out", str(tmp_path), *args])
        return int(runpy.run_path(str(CONFIGS.parent / "recipes" / "make_assets.py"))["main"]())

    assert command() == 0
    assert {path.name for path in tmp_path.iterdir()} == {"cifar10-linear", "cifar10-cosine"}
    assert command("--best", "--name", "best") == 0
    fids = {row["schedule"]: row["fid"] for row in records_in(whole) if "fid_few" in row}
    assert [path.name for path in tmp_path.glob("best-*")] == [f"best-{min(fids, key=lambda name: fids[name])}"]
    half, own = (
        pellucid.load(path, device="cpu", dtype=torch.float32).components.network
        for path in (tmp_path / "cifar10-cosine", whole / "runs" / "cosine-0" / "model")
    )
    x, time = torch.randn(1, 3, 32, 32), torch.tensor([500.0])
    assert torch.allclose(half(x, time), own(x, time), atol=0.01)
    assert (
        load_file(next((tmp_path / "cifar10-cosine").rglob("*.safetensors")))["conv_in.weight"].dtype == torch.float16
    )
    capsys.readouterr()
    assert command("--most", "0.001") == 2
    assert "must be at most 0.001 MB in float16" in capsys.readouterr().err


def test_records_that_are_lost_are_said_to_be(quick: ScheduleStudyConfig, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "study")
    path = tmp_path / "study" / "records.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(PellucidError, match=r"records of linear-0 at step 4 must be kept; .* at step 8") as error:
        run(quick, tmp_path / "study")
    assert error.value.code == "study-records"


def test_a_folder_of_another_study_is_refused_and_left_alone(data: Path, whole: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    with pytest.raises(PellucidError, match=r"config must be the one that began .* another") as error:
        run(smoke(data), whole)
    assert error.value.code == "resume-config"
    assert before == {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(PellucidError, match="--out must be empty, new"):
        run(smoke(data), tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]


def test_what_is_missing_leaves_no_folder_behind(data: Path, tmp_path: Path) -> None:
    """A path that is put right changes the config, and the folder must not be taken by the wrong one."""
    with pytest.raises(PellucidError, match="Inception weights must be a file that exists"):
        run(smoke(data, inception=str(tmp_path / "none.safetensors")), tmp_path / "study")
    with pytest.raises(PellucidError, match="CIFAR-10 folder must be"):
        run(smoke(tmp_path / "none"), tmp_path / "study")
    assert not (tmp_path / "study").exists()


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(given: dict[str, Any]) -> None:
        for name in path[:-1]:
            given = given[name]
        del given[path[-1]]

    return change


def with_value(value: Any, *path: str) -> Callable[[dict[str, Any]], None]:
    def change(given: dict[str, Any]) -> None:
        for name in path[:-1]:
            given = given.setdefault(name, {})
        given[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (with_value(1, "sample"), "config.sample must be a known key. Nearest: samples"),
        (without("points"), "config must have points"),
        (with_value([], "schedules"), "schedules must be at least one, none of them twice"),
        (with_value([1, 1], "seeds"), "seeds must be at least one, none of them twice"),
        (with_value([-1], "seeds"), "seed must be at least 0"),
        (with_value([8, 4], "points"), "points must be steps that grow"),
        (with_value([0, 4], "points"), "points must be steps that grow"),
        (with_value(3, "samples"), "samples must be at least 4"),
        (with_value(1, "resamples"), "resamples must be at least 2"),
        (with_value(["linear", "cosinus"], "schedules"), "cosinus"),
        (with_value(["sideways"], "grids"), "grid must be a known name"),
        (with_value("dance", "train", "task", "sampling", "sampler"), "dance"),
        (with_value(7, "train", "seed"), "train.seed must be left to the study"),
        (with_value(7, "train", "steps"), "train.steps must be left to the study"),
        (with_value({"name": "linear"}, "train", "task", "objective", "schedule"), "schedule must be left to the"),
        (with_value([], "train", "ema"), "train.ema must be at least one length"),
        (with_value("labels", "train", "task", "condition"), "train.task must be a denoiser without a condition"),
        (with_value("image_folder", "train", "data", "kind"), "train.data.kind must be cifar10"),
        (with_value(1, "train", "task", "sampling", "stepz"), "stepz must be a known key"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_one_line_before_anything_runs(change: Callable[[dict[str, Any]], None], line: str) -> None:
    given = raw()
    change(given)
    with pytest.raises(PellucidError) as error:
        read(ScheduleStudyConfig, given, "config")
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "most"), [("small", 1_000_000), ("smoke", 100_000)])
def test_configs_are_of_their_size(name: str, most: int) -> None:
    config = ScheduleStudyConfig.load(CONFIGS / f"cifar10_schedules_{name}.toml")
    network = fresh(config.train["task"]["network"], 0)
    assert 0.5 * most < sum(p.numel() for p in network.parameters()) <= most
    assert config.schedules == ("linear", "cosine", "sqrt_alpha_bar")


def test_the_small_config_differs_in_size_and_seeds_alone() -> None:
    """What makes a schedule better may not be another target, sampler or optimizer."""
    large = tomllib.loads((CONFIGS / "cifar10_schedules.toml").read_text("utf-8"))
    small = raw("small")
    for key in ("schedules", "inception"):
        assert small[key] == large[key]
    for key in ("objective", "sampling"):
        assert small["train"]["task"][key] == large["train"]["task"][key]
    assert small["train"]["data"] == large["train"]["data"]
    assert len(small["seeds"]) == 3


def test_a_judge_knows_the_same_numbers_as_the_metrics(tmp_path: Path) -> None:
    """Its shortcuts (one root, one pass) change nothing: FID and its interval are those of the metrics."""
    random = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (40, 3, 8, 8), generator=random, dtype=torch.uint8)
    judge = TrainingJudge.of(images, Small(), 30, 12, tmp_path)
    assert judge.statistics.count == 30
    assert len(judge.some) == 12
    found = torch.randn(20, 8, generator=random) * 0.2
    value = fid.fid(found, judge.statistics)
    assert judge.fid(found) == pytest.approx(value, rel=1e-9)
    mine, theirs = judge.fid_interval(found, value, 5), fid_interval(found, judge.statistics, resamples=5)
    assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high), rel=1e-9)


@pytest.mark.slow
def test_the_smoke_config_runs_through_a_whole_inception(data: Path, tmp_path: Path) -> None:
    """2,048 features of six images: covariances of rank five are no trouble."""
    network = Inception()
    torch.manual_seed(0)
    for weight in (p for p in network.parameters() if p.ndim == 4):
        nn.init.kaiming_normal_(weight)
    save_file(network.state_dict(), tmp_path / "inception.safetensors")
    began = time.process_time()
    rows = run(smoke(data, inception=str(tmp_path / "inception.safetensors")), tmp_path / "study")
    assert len(rows) == 6
    assert all(row["fid"] > 0 and np.isfinite(row["kid"]) for row in rows)
    assert schedules_report.write(tmp_path / "study").is_file()
    assert time.process_time() - began < 120  # seconds of work: less than a minute on two cores


def test_a_study_killed_while_it_claimed_its_folder_starts_again(tmp_path: Path) -> None:
    (tmp_path / ".config.0123abcd.part.json").write_text("{", "utf-8")
    assert not is_mine(tmp_path, "{}")
    claim(tmp_path, "{}")
    assert is_mine(tmp_path, "{}")
