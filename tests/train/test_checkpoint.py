"""Checkpoints: exact, whole or absent, damage seen, and any number of ranks reads what any other wrote."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crew
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pellucid import PellucidError
from pellucid.train import checkpoint
from pellucid.train.checkpoint import Checkpoints
from pellucid.train.ranks import Ranks


def made(seed: int = 0) -> dict[str, Tensor]:
    """Of every kind that a run keeps: matrices, images' layout, half precision, numbers, nothing, views, rows that
    two and three ranks do not share evenly, and fewer rows than ranks."""
    draw = torch.Generator().manual_seed(seed)
    base = torch.randn(6, 4, generator=draw)
    return {
        "network/weight": torch.randn(5, 3, generator=draw),
        "network/kernel": torch.randn(4, 3, 3, 3, generator=draw).to(memory_format=torch.channels_last),
        "network/half": torch.randn(7, generator=draw).bfloat16(),
        "network/one": torch.randn(1, 4, generator=draw),
        "network/none": torch.zeros(0, 3),
        "network/view": base[::2, 1:],
        "optimizer/weight/step": torch.tensor(float(seed)),
        "ema/seen": torch.tensor(2**53 + 1 + seed),
        "flags": torch.tensor([True, False]),
    }


def blank() -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, 1) for name, tensor in made().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def two(tmp_path: Path) -> Checkpoints:
    """Steps 3 and 7, of different states."""
    kept = Checkpoints(tmp_path / "checkpoints")
    for step in (3, 7):
        kept.save(step, made(step), {"step": step})
    return kept


# Alone


def test_what_is_loaded_is_what_was_saved_to_the_bit(two: Checkpoints) -> None:
    state = blank()
    layout = {name: tensor.stride() for name, tensor in state.items()}
    assert two.latest() == 7
    assert two.load(7, state) == {"step": 7}
    assert same(state, made(7))
    assert layout == {name: tensor.stride() for name, tensor in state.items()}  # in place
    assert two.load(3, state) == {"step": 3}
    assert same(state, made(3))


def test_a_checkpoint_of_one_rank_is_a_plain_safetensors_file_and_json(two: Checkpoints) -> None:
    found = files_of(two.path(7))
    assert [path.name for path in found] == ["manifest.json", "rank-00000.safetensors"]
    assert same(load_file(found[1]), made(7))
    assert json.loads(found[0].read_text())["meta"] == {"step": 7}


def test_the_newest_are_kept_and_the_older_go_only_when_the_new_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, seen, rename = Checkpoints(tmp_path, keep=2), {}, os.rename

    def watched(source: Path, target: Path) -> None:
        if source.name.endswith(".part"):
            seen[target.name] = kept.steps()
        rename(source, target)

    monkeypatch.setattr(os, "rename", watched)
    for step in (1, 2, 3, 4):
        kept.save(step, made(step), {})
    assert seen["step-00000004"] == [3, 2]
    assert kept.steps() == [4, 3]
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-00000004"]


def test_steps_sort_as_numbers(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=3)
    for step in (99_999_999, 100_000_000, 2):
        kept.save(step, {"a": torch.zeros(1)}, {})
    assert kept.steps() == [100_000_000, 99_999_999, 2]
    assert kept.latest() == 100_000_000


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)  # the last byte of a manifest is but the end of its line


def flip(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garble(path: Path) -> None:
    path.write_bytes(b"\xff" + path.read_bytes()[1:])


@pytest.mark.parametrize("harm", [shorten, flip, empty, garble, Path.unlink])
@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
def test_a_damaged_one_is_named_and_the_one_before_it_taken(
    two: Checkpoints, harm: Callable[[Path], None], name: str
) -> None:
    harm(two.path(7) / name)
    fresh = Checkpoints(two.folder)
    assert fresh.latest() == 3
    assert len(fresh.damaged) == 1
    assert fresh.damaged[0].startswith("step-00000007: ")
    assert name in fresh.damaged[0]
    with pytest.raises(PellucidError) as error:
        fresh.load(7, blank())
    assert error.value.code == "checkpoint-damaged"
    harm(two.path(3) / name)
    assert fresh.latest() is None
    assert len(fresh.damaged) == 2


def test_no_flipped_bit_goes_unseen(two: Checkpoints) -> None:
    """Wherever it is: in the tensors, in the header, in the meta, in the checksums themselves."""
    draw, fresh = random.Random(5), Checkpoints(two.folder)
    for path in files_of(two.path(7)):
        whole = path.read_bytes()
        for place in draw.sample(range(len(whole)), 60):
            harmed = bytearray(whole)
            harmed[place] ^= 1 << draw.randrange(8)
            path.write_bytes(harmed)
            if path.name == "manifest.json" and json.loads(whole) == tolerant(harmed):
                continue  # a blank that became another blank
            assert fresh.latest() == 3, (path.name, place)
        path.write_bytes(whole)
    assert fresh.latest() == 7


def tolerant(data: bytes | bytearray) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def test_a_damaged_one_is_replaced_when_the_run_comes_to_its_step_again(two: Checkpoints) -> None:
    flip(two.path(7) / "rank-00000.safetensors")
    fresh = Checkpoints(two.folder)
    assert fresh.latest() == 3
    fresh.save(5, made(5), {})
    assert fresh.steps() == [5, 3]  # the damaged one is not among those that are kept
    fresh.save(7, made(7), {})
    assert fresh.latest() == 7
    assert fresh.damaged == []


def test_another_state_is_refused_in_one_line_and_nothing_is_overwritten(two: Checkpoints) -> None:
    changes: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
        (lambda s: s.pop("flags"), "1 extra (flags"),
        (lambda s: s.update(other=torch.zeros(1)), "1 missing (other"),
        (lambda s: s.update({"network/weight": torch.ones(5, 4)}), "network/weight"),
        (lambda s: s.update({"network/weight": torch.ones(5, 3).double()}), "network/weight"),
    ]
    for change, words in changes:
        state = blank()
        change(state)
        before = {name: tensor.clone() for name, tensor in state.items()}
        with pytest.raises(PellucidError, match=r"^[^\n]*$") as error:
            two.load(7, state)
        assert error.value.code == "checkpoint-state"
        assert words in str(error.value)
        assert same(state, before)


def test_what_cannot_be_written_is_one_line_and_leaves_the_older(
    two: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(PellucidError, match="No space left on device") as error:
            two.save(9, made(9), {})
    assert error.value.code == "checkpoint-write"
    with pytest.raises(PellucidError, match="JSON serializable") as error:
        two.save(9, made(9), {"path": Path("x")})
    assert error.value.code == "checkpoint-failed"
    assert sorted(os.listdir(two.folder)) == ["step-00000003", "step-00000007"]
    (two.folder / "file").write_text("")
    with pytest.raises(PellucidError, match=r"^checkpoint must be written[^\n]*$"):
        Checkpoints(two.folder / "file").save(1, made(), {})


def test_bad_numbers_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(PellucidError, match="keep must be at least 1"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(PellucidError, match="step must be"):
        Checkpoints(tmp_path).save(-1, made(), {})
    assert Checkpoints(tmp_path / "nowhere").latest() is None


# Killed


def killed_while_saving(folder: Path, count: int) -> int:
    """Dies at the count-th call that changes the disk. Returns 0 when the save has fewer."""
    left = [count]

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for owner, name in ((os, "mkdir"), (checkpoint, "save_file"), (os, "fsync"), (os, "rename"), (os, "unlink")):
        setattr(owner, name, watched(getattr(owner, name)))
    Checkpoints(folder, keep=1).save(7, made(7), {})
    return 0


def test_killed_at_any_call_that_changes_the_disk_the_old_or_the_new_one_is_whole(tmp_path: Path) -> None:
    ended, count, found = -9, 0, []
    while ended == -9:
        folder = tmp_path / str(count)
        Checkpoints(folder).save(3, made(3), {})
        count += 1
        (ended,) = crew.run(1, killed_while_saving, folder, count)
        kept, state = Checkpoints(folder, keep=1), blank()
        step = kept.latest()
        assert kept.damaged == []
        assert step is not None
        kept.load(step, state)
        assert same(state, made(step))
        found.append(step)
        kept.save(9, made(9), {})
        assert os.listdir(folder) == ["step-00000009"]  # and nothing is left over
    assert ended == 0
    assert found == sorted(found)
    assert {3, 7} == set(found)
    assert len(found) > 8  # folder, tensors, four waits, two names, and what is removed


# On several ranks


def dealt(state: dict[str, Tensor], world: int) -> dict[str, Tensor]:
    """Floats of two dimensions or more in shards, the rest on all ranks."""
    if world == 1:
        return state
    mesh = init_device_mesh("cpu", (world,))
    wide = {k: t for k, t in state.items() if t.ndim > 1 and t.numel()}
    return {**state, **{k: distribute_tensor(t.contiguous(), mesh, [Shard(0)]) for k, t in wide.items()}}


def save_on_ranks(folder: Path) -> int:
    with Ranks.join("fsdp", "cpu", timeout=60) as ranks:
        kept = Checkpoints(folder)
        for step in (3, 7):
            kept.save(step, dealt(made(step), ranks.world), {"world": ranks.world})
        assert kept.latest() == 7
    return 0


def load_on_ranks(folder: Path, expected: int) -> int:
    with Ranks.join("fsdp", "cpu", timeout=60) as ranks:
        kept, state = Checkpoints(folder), dealt(blank(), ranks.world)
        step = kept.latest()
        assert step == expected
        kept.load(step, state)
        assert isinstance(state["network/weight"], DTensor) == (ranks.world > 1)
        whole = {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in state.items()}
        assert same(whole, made(step))
    return 0


@pytest.mark.parametrize("writers", [1, 2, 3])
def test_any_number_of_ranks_reads_what_any_other_wrote(tmp_path: Path, writers: int) -> None:
    says = tmp_path / "says"
    assert crew.run(writers, save_on_ranks, tmp_path / "c", says=says) == [0] * writers, crew.said(says)
    names = [path.name for path in files_of(tmp_path / "c" / "step-00000007")]
    assert names == ["manifest.json", *(f"rank-{r:05d}.safetensors" for r in range(writers))]
    for readers in (1, 2, 3):
        assert crew.run(readers, load_on_ranks, tmp_path / "c", 7, says=says) == [0] * readers, crew.said(says)
    (tmp_path / "c" / "step-00000007" / names[-1]).unlink()
    assert crew.run(2, load_on_ranks, tmp_path / "c", 3, says=says) == [0, 0], crew.said(says)


def fail_on_one(folder: Path) -> int:
    """The second rank may write no more than a few bytes: the system refuses, as it does when a disk is full."""
    with Ranks.join("fsdp", "cpu", timeout=60) as ranks:
        kept, state = Checkpoints(folder), dealt(made(), ranks.world)
        kept.save(1, state, {})
        if ranks.rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        try:
            kept.save(2, state, {})
        except PellucidError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            print(f"{error.code}: {error}", file=sys.stderr)
            assert kept.latest() == 1
            assert dist.is_initialized()
            return 0
    return 1


def test_when_one_rank_fails_all_fail_with_the_same_line(tmp_path: Path) -> None:
    says = tmp_path / "says"
    assert crew.run(2, fail_on_one, tmp_path / "c", says=says) == [0, 0], crew.said(says)
    lines = {Path(f"{says}.{rank}").read_text() for rank in (0, 1)}
    assert len(lines) == 1
    assert next(iter(lines)).startswith("checkpoint-write: checkpoint must be written; c/.step-00000002.part was not")
    assert next(iter(lines)).count("\n") == 1
    assert os.listdir(tmp_path / "c") == ["step-00000001"]
