"""A trace whose bytes are not those that were recorded: refused wherever they are read, by file, tensor and step."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trace_runs import SHAPE, denoiser, plan_of, record
from typer.testing import CliRunner

import pellucid
from pellucid import Guidance, Job, PellucidError, oracle, run_batch
from pellucid.cli import app
from pellucid.evidence import trace
from pellucid.evidence.trace import Recorder, Trace, filmstrip, measures
from pellucid.evidence.trace.diff import compare, headline
from pellucid.evidence.trace.replay import replay
from pellucid.models.rules import CFGZero


def flipped(path: Path, at: int, bit: int = 0) -> Path:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    (goal := path.with_name("flipped.st")).write_bytes(data)
    return goal


def in_tensor(path: Path, name: str) -> Path:
    """A bit of a tensor's first number, the lowest, is another."""
    return flipped(path, trace.read(path).found.places[name].start)


def error_of(call: Any, *args: Any) -> PellucidError:
    with pytest.raises(PellucidError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_flipped_bit_anywhere_in_the_file_is_found_by_diff(tmp_path: Path) -> None:
    whole = record(tmp_path / "run.st", plan_of(steps=4), denoiser())
    size = whole.path.stat().st_size
    first = min(place.start for place in whole.found.places.values())
    for k, at in enumerate([*range(0, first, first // 60), *range(first, size, (size - first) // 140), size - 1]):
        other = flipped(whole.path, at, k % 8)
        error = error_of(lambda other=other: compare(whole, trace.read(other)))
        if at >= first:
            assert (error.code, "flipped.st" in str(error)) == ("trace-damaged", True), at


def test_what_a_trace_without_tensors_says_is_checked_too(tmp_path: Path) -> None:
    found = record(tmp_path / "run.st", plan_of(steps=2), denoiser(), tensors=False)
    for at in range(min(p.start for p in found.found.places.values()), found.path.stat().st_size, 3):
        assert error_of(trace.read, flipped(found.path, at, at % 8)).code == "trace-damaged"


@pytest.mark.parametrize("name", ["x", "x0", "eps", "delta"])
def test_the_error_names_file_tensor_and_step(tmp_path: Path, name: str) -> None:
    record(tmp_path / "run.st", plan_of(steps=4), denoiser())
    found = trace.read(in_tensor(tmp_path / "run.st", f"step.00002.{name}"))
    assert torch.equal(found.tensor(name, 1), trace.read(tmp_path / "run.st").tensor(name, 1))
    said = str(error_of(found.tensor, name, 2))
    assert said.startswith(f"{name} of step 2 in flipped.st must be as it was recorded;")


def test_every_reader_of_tensors_refuses(tmp_path: Path) -> None:
    record(tmp_path / "run.st", plan_of("euler", steps=4), denoiser())
    found = trace.read(in_tensor(tmp_path / "run.st", "step.00001.x0"))
    for call in (
        lambda: replay(found),
        lambda: filmstrip.draw(found, tmp_path / "a.png"),
        lambda: compare(found, found),
    ):
        assert error_of(call).code == "trace-damaged"
    for name in ("start", "end"):
        found = trace.read(in_tensor(tmp_path / "run.st", name))
        assert str(error_of(found.tensor, name)).startswith(f"{name} in flipped.st must be")


@pytest.mark.parametrize("command", ["show", "diff", "replay", "timeline", "doctor"])
def test_commands_refuse_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "run.st", plan_of("euler", steps=4), denoiser())
    in_tensor(tmp_path / "run.st", "step.00001.numbers" if command in ("timeline", "doctor") else "step.00001.x0")
    words = {
        "show": ["trace", "show", "flipped.st", "--plot", "a.png"],
        "diff": ["trace", "diff", "run.st", "flipped.st"],
        "doctor": ["doctor", "--trace", "flipped.st"],
    }
    said = CliRunner().invoke(app, words.get(command, ["trace", command, "flipped.st"]))
    assert (said.exit_code, said.stderr.count("\n")) == (2, 1)
    assert said.stderr.startswith("error[trace-damaged]: ")
    assert "step 1 in flipped.st" in said.stderr


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("sampler", ["euler_a", "heun", "dpmpp_2m", "mixed", "float64", "zero"])
def test_a_whole_trace_is_found_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str, large: bool
) -> None:
    """Whatever made it: batches of plans of several lengths, other dtypes, tensors measured one by one."""
    if large:
        monkeypatch.setattr(measures, "LARGE", 0)
    path = tmp_path / "run.st"
    if sampler == "mixed":
        jobs = [Job(plan_of("euler", 4), 1), Job(plan_of("heun", 3), 2), Job(plan_of("dpmpp_2m", 6), 3)]
        with Recorder(path, True, 2) as recorder:
            run_batch(jobs, denoiser(count=3), shape=SHAPE, observers=[recorder])
    elif sampler == "float64":
        record(path, plan_of(), oracle.smooth(math.prod(SHAPE)), dtype=torch.float64)
    elif sampler == "zero":
        record(path, plan_of("euler"), denoiser(Guidance(5.0, (CFGZero(2),))))
    else:
        record(path, plan_of(sampler), denoiser(), every=2)
    found = trace.read(path)
    found.verify()
    assert found.has_images


# --- traces from before digests ----------------------------------------------------------------------------------


def without_digests(found: Trace, goal: Path) -> Path:
    """The file as it was written before: no digest in its header, none of its numbers."""
    data = found.path.read_bytes()
    room = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + room])
    del table["__metadata__"]["digest"]
    table = {name: held for name, held in table.items() if not name.endswith(".check")}
    goal.write_bytes(data[:8] + json.dumps(table, separators=(",", ":")).encode().ljust(room) + data[8 + room :])
    return goal


def test_an_old_trace_is_read_with_a_note(tmp_path: Path) -> None:
    found = record(tmp_path / "run.st", plan_of(steps=4), denoiser())
    old = trace.read(without_digests(found, tmp_path / "old.st"))
    assert any("older version" in note for note in old.header.notes)
    assert not found.header.notes
    assert torch.equal(old.tensor("eps", 1), found.tensor("eps", 1))
    said = compare(found, old)
    assert said.same
    assert any("older version" in note for note in said.notes)
    damaged = trace.read(in_tensor(tmp_path / "old.st", "step.00001.x0"))  # x and x0 had digests from the first
    assert error_of(damaged.tensor, "x0", 1).code == "trace-damaged"


# --- NaN ---------------------------------------------------------------------------------------------------------


def broken_from(step: int, value: float = float("nan"), image: int = 0) -> Any:
    """A denoiser of which one value is NaN from a step on."""
    calls = iter(range(1000))

    def call(x: Tensor, time: Tensor) -> Tensor:
        out = 0.5 * x
        if next(calls) >= step:
            out[image, 0, 0, 0] = value
        return out

    return pellucid.denoiser(call, "scaled_linear", "eps")


@pytest.mark.parametrize("tensors", [True, False])
def test_nan_is_never_the_same(tmp_path: Path, tensors: bool) -> None:
    a, b = (record(tmp_path / name, plan_of("euler"), broken_from(3), tensors=tensors) for name in "ab")
    found = compare(a, b)
    assert not found.same
    assert headline(found) == "both are NaN from step 3, image 0; the same before"
    assert [(one.step, one.image, one.cause) for one in found.images] == [(3, 0, "nan")]


def test_nan_of_other_bits_is_nan_all_the_same(tmp_path: Path) -> None:
    a = record(tmp_path / "a", plan_of("euler"), broken_from(2))
    b = record(tmp_path / "b", plan_of("euler"), broken_from(2, -float("nan")))
    assert (compare(a, b).first.step, compare(a, b, 0.5).first.cause) == (2, "nan")  # type: ignore[union-attr]


def test_nan_in_one_of_two_is_a_divergence(tmp_path: Path) -> None:
    a = record(tmp_path / "a", plan_of("euler"), broken_from(3))
    b = record(tmp_path / "b", plan_of("euler"), broken_from(9))
    found = compare(a, b)
    assert (found.first.step, found.first.cause) == (3, "model")  # type: ignore[union-attr]
    assert "diverge" in headline(found)


def test_a_difference_before_the_nan_comes_first(tmp_path: Path) -> None:
    a = record(tmp_path / "a", plan_of("euler"), broken_from(3))
    b = record(tmp_path / "b", plan_of("euler"), broken_from(3), seeds=(5, 6))
    assert (compare(a, b).first.step, compare(a, b).first.cause) == (0, "noise")  # type: ignore[union-attr]


def test_nan_that_comes_with_the_last_update(tmp_path: Path) -> None:
    """A constraint spoils the end: no call sees it, only the kept tensor does."""

    def spoil(seen: pellucid.StepSeen) -> Tensor:
        return seen.x_next * (float("nan") if seen.index == 5 else 1.0)

    a, b = (record(tmp_path / name, plan_of("euler"), denoiser(), constraints=[spoil]) for name in "ab")
    assert headline(compare(a, b)) == "both are NaN from step 5, image 0 (and 1 image more); the same before"


def test_the_command_says_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.st", "b.st"):
        record(tmp_path / name, plan_of("euler"), broken_from(3))
    said = CliRunner().invoke(app, ["trace", "diff", "a.st", "b.st"])
    assert said.exit_code == 1
    assert re.search(r"^both are NaN from step 3, image 0; the same before$", said.stdout, re.M)
    assert "the same in all" not in said.stdout
