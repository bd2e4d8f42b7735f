"""Real runs in real processes: ranks equal one process, and a run that was killed equals one that was not."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crew
import pytest
import torch
from rank_worker import CONFIG, elastic, main
from torch import Tensor

from pellucid.train.checkpoint import Checkpoints, read_manifest

STEPS = CONFIG["steps"]
FSDP = {"engine": {"strategy": "fsdp"}}
DDP: dict[str, Any] = {}


def train(folder: Path, world: int, changes: dict[str, Any], *die: str) -> list[int | None]:
    return crew.run(world, main, str(folder), json.dumps(changes), *die, says=folder.with_suffix(".says"))


def said(folder: Path) -> str:
    return crew.said(folder.with_suffix(".says"))


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines]


def state_of(folder: Path, step: int = STEPS) -> dict[str, Tensor]:
    """All that the last checkpoint has: weights, moments, running means."""
    kept = Checkpoints(folder / "checkpoints")
    saved = read_manifest(kept.path(step)).tensors
    state = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in saved.items()}
    kept.load(step, state)
    return state


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_same_run(folder: Path, other: Path) -> None:
    """Every number to the bit: of the state, of the model that came out, of the log."""
    one, two = state_of(folder), state_of(other)
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    assert files(folder / "model") == files(other / "model")
    assert losses(folder) == losses(other)


def assert_close_run(folder: Path, other: Path) -> None:
    """The same sums in another order. float32 rounds each at 6e-8, and after ten steps 1.4e-7 was seen, in losses and
    in weights of about 0.1; a rank that saw other data, or weighed it otherwise, is 1e-2 off.
    """
    assert losses(folder) == pytest.approx(losses(other), rel=1e-6)
    one, two = state_of(folder), state_of(other)
    assert one.keys() == two.keys()
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=0, atol=1e-6), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, dict[str, Any]], Path]:
    """Runs that nobody killed, each made once."""
    root, made = tmp_path_factory.mktemp("whole"), {}

    def run(world: int, changes: dict[str, Any]) -> Path:
        name = f"{world}-{changes.get('engine', {}).get('strategy', 'ddp')}"
        if name not in made:
            made[name] = root / name
            assert train(made[name], world, changes) == [0] * world, said(made[name])
        return made[name]

    return run


# Ranks are one process


def test_steps_move_the_weights_and_the_same_run_again_is_the_same(whole: Any, tmp_path: Path) -> None:
    before, after = state_of(whole(1, DDP), STEPS - 2), state_of(whole(1, DDP))
    still = [name for name in after if name.startswith("network/") and torch.equal(before[name], after[name])]
    assert still == ["network/mid_block.attentions.0.to_k.bias"]  # which softmax does not see
    assert train(tmp_path / "run", 1, DDP) == [0]
    assert_same_run(tmp_path / "run", whole(1, DDP))


@pytest.mark.parametrize("changes", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_two_ranks_are_one_process_with_the_same_batch(whole: Any, changes: dict[str, Any]) -> None:
    assert_close_run(whole(2, changes), whole(1, DDP))


@pytest.mark.parametrize(
    ("world", "strategy", "accumulate"),
    [
        (1, "ddp", 4),
        pytest.param(2, "ddp", 2, marks=pytest.mark.slow),
        pytest.param(2, "fsdp", 2, marks=pytest.mark.slow),
        pytest.param(4, "ddp", 1, marks=pytest.mark.slow),
        pytest.param(4, "fsdp", 1, marks=pytest.mark.slow),
    ],
)
def test_neither_ranks_nor_accumulation_change_a_run(
    whole: Any, tmp_path: Path, world: int, strategy: str, accumulate: int
) -> None:
    changes = {"engine": {"strategy": strategy, "accumulate": accumulate}}
    assert train(tmp_path / "run", world, changes) == [0] * world, said(tmp_path / "run")
    assert_close_run(tmp_path / "run", whole(1, DDP))


# Killed


@pytest.mark.parametrize(
    ("where", "count"),
    [("step", 1), ("step", 6), ("write", 1), ("write", 3), ("settle", 4), ("settle", 6), ("rename", 2), ("rename", 4)],
)
def test_one_process_killed_at_a_point_comes_to_the_same_end(
    whole: Any, tmp_path: Path, where: str, count: int
) -> None:
    """In a step; with half a file written; before the manifest's and the folder's are on the disk; at the name."""
    folder = tmp_path / "run"
    assert train(folder, 1, DDP, "--die", where, str(count), "0") == [-9]
    assert train(folder, 1, DDP) == [0], said(folder)
    assert_same_run(folder, whole(1, DDP))


def steps_done(folder: Path) -> int:
    log = folder / "log.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def kill_at_random(folder: Path, world: int, changes: dict[str, Any], seed: int, kills: int) -> None:
    """Kills one rank, or all, `kills` times: each a little after a step of chance, or at the start; then lets the run
    end."""
    draw, hit = random.Random(seed), 0
    for _ in range(kills):
        crowd = crew.start(world, main, str(folder), json.dumps(changes), says=folder.with_suffix(".says"))
        target = draw.choice([0, *range(1, STEPS - 1)])
        while steps_done(folder) < target and all(process.is_alive() for process in crowd):
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.1))
        for process in crowd if draw.random() < 0.5 else [draw.choice(crowd)]:
            process.kill()
        hit += any(process.exitcode == -9 for process in crowd if process.join(3) is None)
        for process in crowd:  # as torchrun does with those that wait for one that never came
            process.kill()
        crew.wait(crowd)
    assert hit >= kills // 2
    assert train(folder, world, changes) == [0] * world, said(folder)


def test_one_process_killed_at_random_comes_to_the_same_end(whole: Any, tmp_path: Path) -> None:
    kill_at_random(tmp_path / "run", 1, DDP, seed=1, kills=6)
    assert_same_run(tmp_path / "run", whole(1, DDP))


@pytest.mark.parametrize(
    ("changes", "where", "count", "rank"),
    [
        (DDP, "step", 5, 1),
        (DDP, "write", 2, 0),
        (DDP, "rename", 3, 0),
        pytest.param(FSDP, "write", 2, 1, marks=pytest.mark.slow),
        pytest.param(FSDP, "step", 5, 0, marks=pytest.mark.slow),
        pytest.param(FSDP, "settle", 5, 0, marks=pytest.mark.slow),
    ],
)
def test_of_two_ranks_one_killed_both_come_to_the_same_end(
    whole: Any, tmp_path: Path, changes: dict[str, Any], where: str, count: int, rank: int
) -> None:
    folder = tmp_path / "run"
    codes = train(folder, 2, changes, "--die", where, str(count), str(rank))
    assert codes[rank] == -9
    assert codes[1 - rank] == 2  # bad luck, said in a line
    assert "error[ranks-lost]" in said(folder)
    assert train(folder, 2, changes) == [0, 0], said(folder)
    assert_same_run(folder, whole(2, changes))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("changes", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_two_ranks_killed_at_random_come_to_the_same_end(
    whole: Any, tmp_path: Path, changes: dict[str, Any], seed: int
) -> None:
    kill_at_random(tmp_path / "run", 2, changes, seed=seed, kills=6)
    assert_same_run(tmp_path / "run", whole(2, changes))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_one_process_killed_often_at_random_comes_to_the_same_end(whole: Any, tmp_path: Path, seed: int) -> None:
    kill_at_random(tmp_path / "run", 1, DDP, seed=10 + seed, kills=10)
    assert_same_run(tmp_path / "run", whole(1, DDP))


def test_elastic_starts_all_again_when_one_is_killed(whole: Any, tmp_path: Path) -> None:
    """One rank is killed on the way, and the end is that of the run that was not."""
    folder, says = tmp_path / "run", tmp_path / "run.says"
    assert crew.run(1, elastic, str(folder), json.dumps(DDP), "--die", "step", "5", "1", says=says) == [0]
    assert "Signal 9" in crew.said(says) or "-9" in crew.said(says)
    assert_same_run(folder, whole(2, DDP))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_torchrun_starts_all_again_when_one_is_killed(whole: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    """The same by its command, which imports torch anew for each rank and each attempt."""
    folder, worker = tmp_path / "run", Path(__file__).with_name("rank_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--nproc-per-node=2"]
    command += ["--max-restarts=2", str(worker), str(folder), json.dumps(changes), "--die", "step", "5", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "Signal 9" in done.stderr or "-9" in done.stderr
    assert_same_run(folder, whole(2, changes))


# Damaged, taken up by others, refused


def test_a_damaged_checkpoint_costs_its_steps_and_nothing_else(whole: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(folder, 1, {"until": 6}) == [0], said(folder)
    path = folder / "checkpoints" / "step-00000006" / "rank-00000.safetensors"
    harmed = bytearray(path.read_bytes())
    harmed[-1] ^= 1
    path.write_bytes(harmed)
    assert train(folder, 1, DDP) == [0], said(folder)
    lines = [line for line in said(folder).splitlines() if "damaged" in line]
    assert len(lines) == 1
    assert "step-00000006" in lines[0]
    assert_same_run(folder, whole(1, DDP))


def test_all_checkpoints_damaged_is_one_line_of_every_rank_and_nothing_is_touched(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(folder, 1, {"until": 4}) == [0], said(folder)
    for path in folder.glob("checkpoints/*/rank-00000.safetensors"):
        path.unlink()
    before = files(folder)
    for world in (1, 2):
        assert train(folder, world, DDP) == [2] * world
        for rank in range(world):
            (line,) = Path(f"{folder.with_suffix('.says')}.{rank}").read_text().splitlines()
            assert line.startswith("error[checkpoint-damaged]: at least one checkpoint must be intact")
            assert "step-00000004" in line
            assert "step-00000002" in line
    assert files(folder) == before


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_another_number_of_ranks_takes_a_run_up(whole: Any, tmp_path: Path, strategy: str) -> None:
    folder, changes = tmp_path / "run", {"engine": {"strategy": strategy}}
    for world, until in ((1, 4), (2, 6), (4, 8), (1, STEPS)):
        assert train(folder, world, {**changes, "until": until}) == [0] * world, said(folder)
    assert_close_run(folder, whole(1, DDP))


def test_another_config_is_refused_in_one_line_and_nothing_is_touched(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(folder, 1, {"until": 2}) == [0], said(folder)
    before = files(folder)
    for world in (1, 2):
        assert train(folder, world, {"seed": 4}) == [2] * world
        for rank in range(world):
            (line,) = Path(f"{folder.with_suffix('.says')}.{rank}").read_text().splitlines()
            assert line.startswith("error[resume-config]: ")
            assert "got another seed." in line
    assert files(folder) == before


def test_a_batch_that_does_not_divide_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(folder, 2, {"batch": 10, "engine": {"accumulate": 2}}) == [2, 2]
    for rank in (0, 1):
        (line,) = Path(f"{folder.with_suffix('.says')}.{rank}").read_text().splitlines()
        assert line == "error[batch-parts]: batch must be a multiple of ranks × accumulate (2 × 2); got 10."
    assert not folder.exists()
