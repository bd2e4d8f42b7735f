"""Recording: one valid file, numbers that an independent computation finds too, memory that does not grow."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from trace_runs import SEEDS, SHAPE, denoiser, plan_of, record

import pellucid
from pellucid import Cancelled, Guidance, Job, Level, PellucidError, StepSeen, oracle, run, run_batch
from pellucid.core.samplers import REGISTRY
from pellucid.core.table import COLUMNS
from pellucid.evidence import trace
from pellucid.evidence.trace import Recorder, layout, measures, recorder
from pellucid.models.rules import CFGZero, Interval
from pellucid.pipeline.tracker import Tracker


def code_of(call: Any, *args: Any, **kwargs: Any) -> str:
    """The stable code of the error, which must be one clear line."""
    with pytest.raises(PellucidError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    return error.value.code


def watched(path: Path, plan: pellucid.Plan, model: Any, **more: Any) -> tuple[trace.Trace, list[StepSeen]]:
    steps: list[StepSeen] = []
    found = record(path, plan, model, observers=[steps.append], **more)
    return found, steps


# --- the file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [False, True])
def test_the_file_is_a_valid_safetensors_file(tmp_path: Path, tensors: bool) -> None:
    """Opened by the format's own library, which refuses holes, overlaps and missing bytes."""
    plan = plan_of(steps=5)
    path = tmp_path / "run.safetensors"
    _, seen = watched(path, plan, denoiser(), tensors=tensors)
    with safe_open(path, "pt") as file:
        words = file.metadata()
        names = set(file.keys())
    assert words["kind"] == "pellucid-trace"
    assert json.loads(words["trace"])["plan_tables"] == [json.loads(plan.to_json())]
    assert {name.split(".")[-1] for name in names} == (
        {"numbers", "digests", "clock", "memory", "check"}
        | ({"x", "x0", "eps", "delta", "start", "end"} if tensors else set())
    )
    if tensors:
        held = load_file(path)
        for step in seen:
            name = f"step.{step.index:05d}"
            assert torch.equal(held[f"{name}.x"], step.x)
            assert torch.equal(held[f"{name}.x0"], step.x0)
        assert torch.equal(held["start"], seen[0].x)
        assert torch.equal(held["end"], seen[-1].x_next)


def test_tracing_changes_nothing(tmp_path: Path) -> None:
    for sampler in ("dpmpp_2m", "euler_a", "heun"):
        plan = plan_of(sampler)
        plain = run(plan, denoiser(), shape=SHAPE, seeds=SEEDS)
        found = record(tmp_path / sampler, plan, denoiser())
        assert torch.equal(found.tensor("end"), plain)


def test_the_header_says_what_ran(tmp_path: Path) -> None:
    plan = plan_of("euler_a", steps=4)
    header = record(tmp_path / "run", plan, denoiser(), tensors=False).header
    assert (header.images, header.shape, header.dtype, header.steps, header.done) == (2, SHAPE, "float32", 4, 4)
    assert header.noise == {"kind": "philox", "seeds": list(SEEDS)}
    assert header.versions["torch"] == str(torch.__version__)
    assert header.machine["threads"] == torch.get_num_threads()
    assert header.plans[0] is header.plans[1]
    assert not header.plans[0].diff(plan)
    assert header.recipe is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (pellucid.TorchStream(SEEDS), {"kind": "torch", "seeds": list(SEEDS)}),
        (pellucid.Brownian(SEEDS, "sigma"), {"kind": "brownian", "seeds": list(SEEDS), "clock": "sigma"}),
    ],
)
def test_the_kind_of_noise_is_kept(tmp_path: Path, source: Any, words: dict[str, Any]) -> None:
    assert record(tmp_path / "run", plan_of("euler_a"), denoiser(), noise=source).header.noise == words


def test_every_other_step_and_the_last(tmp_path: Path) -> None:
    found = record(tmp_path / "run", plan_of(steps=8), denoiser(), every=3)
    assert found.has_images == [0, 3, 6, 7]
    assert len(found.steps) == 8
    assert code_of(found.tensor, "x", 1) == "trace-tensor"


def test_a_header_that_outgrows_its_room_is_moved(tmp_path: Path) -> None:
    """The data stay, to the bit, when the late words need a file of another layout."""
    plan, path = plan_of(), tmp_path / "run"
    plain = record(tmp_path / "plain", plan, denoiser())
    with Recorder(path, True) as recorder:
        run(plan, denoiser(), shape=SHAPE, seeds=SEEDS, observers=[recorder])
        assert recorder.recording is not None
        before = recorder.recording.writer.room  # type: ignore[union-attr]
        recorder.recording.update(notes=("long " * 10_000,))
        assert recorder.recording.writer.room > before  # type: ignore[union-attr]
    found = trace.read(path)
    assert found.header.notes[0].startswith("long long")
    for step in plain.steps:
        for name in ("x", "x0", "eps", "delta"):
            assert torch.equal(found.tensor(name, step.index), plain.tensor(name, step.index))
    with safe_open(path, "pt") as file:
        assert "end" in set(file.keys())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain", "run"]


# --- the numbers -----------------------------------------------------------------------------------------------


def by_hand(seen: StepSeen, k: int, level: Level) -> dict[str, float]:
    """The numbers of one image, in numpy's float64, from the formulas."""
    x, x0, cond, uncond = (
        v[k].double().numpy().ravel() for v in (seen.x, seen.x0, seen.parts["cond"], seen.parts["uncond"])
    )
    eps = (x - level.alpha * x0) / level.sigma
    return {
        "x": float(np.sqrt((x**2).sum())),
        "x0": float(np.sqrt((x0**2).sum())),
        "eps": float(np.sqrt((eps**2).sum())),
        "delta": float(np.sqrt(((x0 - cond) ** 2).sum())),
        "cosine": float((cond * uncond).sum() / np.sqrt((cond**2).sum() * (uncond**2).sum())),
        "saturation": float((np.abs(x0) >= 3.0).mean()),
    }


@pytest.mark.parametrize("sampler", ["dpmpp_2m", "heun", "euler_a"])
def test_numbers_are_those_of_the_formulas(tmp_path: Path, sampler: str) -> None:
    found, seen = watched(tmp_path / "run", plan_of(sampler), denoiser(7.0), tensors=False)
    for step, was in zip(found.steps, seen, strict=True):
        for k in range(2):
            wanted = by_hand(was, k, was.rows[0].level)
            got = {
                **{n: step.norms[n][k] for n in step.norms},
                "cosine": step.cosine[k],
                "saturation": step.saturation[k],
            }
            assert got == pytest.approx(wanted, rel=2e-5)
        assert step.level == was.row.level
        assert step.time == was.row.time


def test_eps_and_delta_are_kept_as_tensors(tmp_path: Path) -> None:
    found, seen = watched(tmp_path / "run", plan_of(), denoiser(7.0))
    for was in seen:
        level = was.row.level
        eps = (was.x.double() - level.alpha * was.x0.double()) / level.sigma
        assert torch.allclose(found.tensor("eps", was.index).double(), eps, rtol=1e-4, atol=1e-5)
        assert torch.equal(found.tensor("delta", was.index), was.x0 - was.parts["cond"])


def test_a_clip_saturates(tmp_path: Path) -> None:
    """Values at the edge count: a clipped prediction sits exactly there."""
    wide = pellucid.denoiser(lambda x, time: -4 * torch.ones_like(x), "scaled_linear", "eps", pellucid.Clip(1.0))
    found = record(tmp_path / "run", plan_of("euler"), wide, limit=1.0)
    assert all(step.saturation == pytest.approx(1.0) for step in found.steps)
    assert found.header.limit == 1.0


@pytest.mark.parametrize(("shape", "limit"), [((3, 8, 8), 1.0), ((1, 8, 8), 1.0), ((4, 8, 8), 3.0), ((16, 4, 4), 3.0)])
def test_pixels_saturate_at_1_and_latents_at_3(shape: tuple[int, ...], limit: float) -> None:
    assert measures.limit_of(shape) == limit


def test_without_guidance_there_is_no_cosine_and_no_delta(tmp_path: Path) -> None:
    bare = record(tmp_path / "bare", plan_of("euler"), oracle.smooth(math.prod(SHAPE)))
    assert bare.header.kept == ("x", "x0", "eps")
    assert all(np.isnan(step.cosine).all() and np.isnan(step.norms["delta"]).all() for step in bare.steps)
    assert all((step.digests["cond"] == 0).all() for step in bare.steps)
    off = record(tmp_path / "off", plan_of("euler"), denoiser(1.0))
    assert all((step.norms["delta"] == 0).all() and np.isnan(step.cosine).all() for step in off.steps)


def test_guidance_that_begins_later_and_steps_without_a_prediction(tmp_path: Path) -> None:
    late = record(tmp_path / "late", plan_of("euler"), denoiser(Guidance(5.0, (Interval(0.5, 1.0),))))
    assert [bool(np.isnan(step.cosine).all()) for step in late.steps] == [True] * 3 + [False] * 3
    assert [bool((step.norms["delta"] > 0).all()) for step in late.steps] == [False] * 3 + [True] * 3
    zero = record(tmp_path / "zero", plan_of("euler"), denoiser(Guidance(5.0, (CFGZero(2),))))
    assert [bool(np.isnan(step.norms["delta"]).all()) for step in zero.steps] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert torch.isnan(zero.tensor("delta", 1)).all()
    assert not torch.isnan(zero.tensor("delta", 2)).any()


# --- local error -----------------------------------------------------------------------------------------------


def true_miss(x: Tensor, landed: Tensor, level: Level, landing: Level, model: Any) -> Tensor:
    """How far one step is from the exact flow, by many small steps of Heun's method in sigma / alpha; of x's size."""
    y = x / level.alpha
    ratios = np.exp(np.linspace(math.log(level.ratio), math.log(landing.ratio), 33))

    def slope(y: Tensor, ratio: float) -> Tensor:
        return (y - model(y, Level(1.0, ratio))) / ratio

    for a, b in pairwise(ratios):
        first = slope(y, a)
        y = y + (b - a) * (first + slope(y + (b - a) * first, b)) / 2
    return (y * landing.alpha - landed).norm(dim=1) / landed.norm(dim=1)


@pytest.mark.parametrize(("steps", "least", "most"), [(10, 0.3, 1.3), (80, 0.85, 1.1)])
def test_the_local_error_is_what_a_first_order_step_misses(
    tmp_path: Path, steps: int, least: float, most: float
) -> None:
    """Against the exact flow of a mixture: the estimate comes nearer to the true error as steps get smaller."""
    model = oracle.smooth()
    plan = plan_of("euler", steps)
    seen: list[StepSeen] = []
    with Recorder(tmp_path / "run") as recorder:
        run(plan, model, shape=(4,), seeds=range(8), observers=[recorder, seen.append], dtype=torch.float64)
    found = trace.read(tmp_path / "run")
    assert np.isnan(found.steps[0].local_error).all()
    for step, was in list(zip(found.steps, seen, strict=True))[1 : -1 : max(1, steps // 10)]:
        true = true_miss(was.x, was.x_next, was.row.level, was.next_levels[0], model).numpy()
        assert least < float(np.median(step.local_error / true)) < most


def test_a_row_that_corrects_x_says_by_how_much(tmp_path: Path) -> None:
    """Heun's second row ends where it was called: the correction is the embedded estimate."""
    found, seen = watched(tmp_path / "run", plan_of("heun"), denoiser(), tensors=False)
    corrections = [s for s in seen if s.row.level.ratio == s.next_levels[0].ratio]
    assert len(corrections) == 5
    for was in corrections:
        size = (was.x_next - was.x).flatten(1).norm(dim=1) / was.x_next.flatten(1).norm(dim=1)
        assert found.steps[was.index].local_error == pytest.approx(size.numpy(), rel=1e-5)
    for step in found.steps[2:]:
        assert np.isfinite(step.local_error).all()


def test_smaller_steps_have_smaller_local_errors(tmp_path: Path) -> None:
    sizes = []
    for steps in (8, 16, 32):
        found = record(tmp_path / str(steps), plan_of("euler", steps), denoiser(), tensors=False)
        sizes.append(float(np.nanmedian([step.local_error for step in found.steps])))
    assert sizes[0] > 2.5 * sizes[1] > 6 * sizes[2]  # a local error of second order: 4 in theory


# --- digests ---------------------------------------------------------------------------------------------------


def test_digests_tell_any_bit_and_any_order() -> None:
    weight = torch.from_numpy(measures.weights(1000))
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    seen = {int(measures.digest(x, weight))}
    for place in range(0, 1000, 7):
        for bit in (0, 13, 31):
            other = x.clone()
            other.view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1 << bit
            seen.add(int(measures.digest(other, weight)))
        swapped = x.clone()
        swapped[[place, place + 1 if place < 999 else 0]] = x[[place + 1 if place < 999 else 0, place]]
        seen.add(int(measures.digest(swapped, weight)))
    assert len(seen) == 1 + 143 * 4


def test_digests_are_the_definition(tmp_path: Path) -> None:
    """Σ bits·weight modulo 2⁶⁴, in Python's own integers."""
    found, seen = watched(tmp_path / "run", plan_of(steps=2), denoiser(), tensors=False)
    weights = measures.weights(math.prod(SHAPE)).tolist()
    bits = seen[1].x0[1].ravel().view(torch.int32).tolist()
    total = sum(b * w for b, w in zip(bits, weights, strict=True)) % 2**64
    assert int(found.steps[1].digests["x0"][1]) % 2**64 == total
    assert all(w % 2 for w in weights)
    assert len(set(weights)) == len(weights)


# --- batches ---------------------------------------------------------------------------------------------------

TOY = pellucid.denoiser(lambda x, time: x * 0.4 / (1.0 + x * x), "scaled_linear", "eps")


def test_a_mixed_batch_is_traced_as_each_image_alone(tmp_path: Path) -> None:
    """Every sampler with other step counts in one batch: the same bits and numbers, and fewer images at the end."""
    jobs = [Job(plan_of(name, 3 + i % 4), seed=i) for i, name in enumerate(REGISTRY)]
    with Recorder(tmp_path / "all", True) as recorder:
        run_batch(jobs, TOY, shape=SHAPE, observers=[recorder])
    together = trace.read(tmp_path / "all")
    lengths = [job.plan.nfe for job in jobs]
    assert [len(step.images) for step in together.steps] == [sum(n > i for n in lengths) for i in range(max(lengths))]
    for image in range(0, len(jobs), 3):
        job = jobs[image]
        alone = record(tmp_path / f"{image}", job.plan, TOY, seeds=[job.seed])
        assert torch.equal(alone.tensor("end")[0], together.tensor("end")[image])
        for mine in alone.steps:
            theirs = together.steps[mine.index]
            k = theirs.of(image)
            assert theirs.levels[k] == mine.level
            assert theirs.next_levels[k] == mine.next_levels[0]
            for name in ("x", "x0", "x_next"):
                assert theirs.digests[name][k] == mine.digests[name][0], job.plan.name
            assert theirs.local_error[k] == pytest.approx(mine.local_error[0], rel=1e-4, nan_ok=True)
            assert torch.equal(together.tensor("x", mine.index)[k], alone.tensor("x", mine.index)[0])


# --- time and memory -------------------------------------------------------------------------------------------


def test_seconds_are_of_what_the_loop_was_at(tmp_path: Path) -> None:
    import time

    def slow(x: Tensor, level: Any, told: Any) -> Tensor:
        time.sleep(0.02)
        return x * 0.5

    def idle(seen: StepSeen) -> None:
        time.sleep(0.01)

    found = record(tmp_path / "run", plan_of("euler_a", 4), slow, tensors=False, observers=[idle])
    for step in found.steps:
        assert 0.02 <= step.seconds["model"] < 0.1
        assert 0.01 <= step.seconds["observe"] < 0.1 or step is found.steps[-1]  # the last ends with the file
        assert 0 < step.seconds["update"] < 0.02
        assert step.device_seconds == {}
    assert all(step.seconds.get("noise", 0) > 0 for step in found.steps[:-1])
    whole = sum(sum(step.seconds.values()) for step in found.steps)
    assert found.header.seconds == pytest.approx(whole, abs=0.02)
    assert [mark.host for step in found.steps for mark in step.marks] == sorted(
        mark.host for step in found.steps for mark in step.marks
    )


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_memory_is_that_of_the_process(tmp_path: Path) -> None:
    """Anonymous maps are pages of their own: no allocator can answer from what earlier tests left behind."""
    held: list[mmap] = []

    def greedy(x: Tensor, level: Any, told: Any) -> Tensor:
        held.append(mmap(-1, 2**26))
        held[-1].write(b"1" * 2**26)  # 64 MB that stay
        return x * 0.5

    found = record(tmp_path / "run", plan_of("euler", 5), greedy, tensors=False)
    taken = [step.memory for step in found.steps]
    assert taken[-1] - taken[0] > 0.75 * 4 * 2**26  # type: ignore[operator]
    assert [step.peak for step in found.steps] == taken


def traced(path: Path, steps: int) -> None:
    with Recorder(path, True) as recorder:
        run(plan_of("dpmpp_2m", steps), TOY, shape=(4, 32, 32), observers=[recorder])


def test_tensors_in_memory_do_not_grow_with_steps(tmp_path: Path) -> None:
    peaks = []
    for steps in (10, 60):
        with Tracker(["cpu"]) as tracker:
            traced(tmp_path / str(steps), steps)
        peaks.append(tracker.peak.total)
    assert peaks[1] - peaks[0] == 50 * len(COLUMNS) * 4  # the table's own lines, in float32
    written = (tmp_path / "60").stat().st_size - (tmp_path / "10").stat().st_size
    assert written > 50 * 3 * 4 * 32 * 32 * 4  # x, x0 and eps, in float32


def test_objects_in_memory_do_not_grow_with_steps_but_for_the_index(tmp_path: Path) -> None:
    """While a run goes on nothing is gathered. The index of the file is there from the first step, and at the end a
    header is made of it: a small part of the file."""
    held, peaks = [], []
    for steps in (10, 60):
        marks: list[int] = []

        def look(seen: StepSeen, marks: list[int] = marks, steps: int = steps) -> None:
            if seen.index in (4, steps - 2):
                gc.collect()
                marks.append(tracemalloc.get_traced_memory()[0])

        plan = plan_of("dpmpp_2m", steps)
        gc.collect()
        tracemalloc.start()
        with Recorder(tmp_path / str(steps), True) as recorder:
            run(plan, TOY, shape=(4, 32, 32), observers=[recorder, look])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        held.append(marks[1] - marks[0])
    assert held[1] < held[0] + 16_384  # a step that is kept takes 49 kB
    written = (tmp_path / "60").stat().st_size - (tmp_path / "10").stat().st_size
    assert peaks[1] - peaks[0] < 0.1 * written


# --- runs that break off ---------------------------------------------------------------------------------------


def test_a_run_that_breaks_off_leaves_a_valid_file_that_says_why(tmp_path: Path) -> None:
    path = tmp_path / "run"
    calls = iter(range(100))
    with pytest.raises(Cancelled), Recorder(path, True) as recorder:
        run(plan_of(), denoiser(), shape=SHAPE, seeds=SEEDS, observers=[recorder], cancelled=lambda: next(calls) == 4)
    found = trace.read(path)
    assert not found.whole
    assert len(found.steps) == found.header.done == 4
    assert found.header.ended == "Cancelled: stopped before row 4"
    with safe_open(path, "pt") as file:
        assert "end" not in set(file.keys())
        assert file.get_tensor("step.00003.x").shape == (2, *SHAPE)


def test_a_run_needs_no_with(tmp_path: Path) -> None:
    """The file is whole when the last row has been seen; closing it adds nothing."""
    path = tmp_path / "run"
    recorder = Recorder(path)
    run(plan_of(), denoiser(), shape=SHAPE, seeds=SEEDS, observers=[recorder])
    before = path.read_bytes()
    assert trace.read(path).whole
    recorder.close()
    assert path.read_bytes() == before


def test_one_recorder_is_for_one_run(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    go = {"shape": SHAPE, "seeds": SEEDS, "observers": [recorder]}
    run(plan_of(), denoiser(), **go)
    assert code_of(run, plan_of(), denoiser(), **go) == "trace-runs"
    recorder.close()
    assert code_of(run, plan_of(), denoiser(), **go) == "trace-runs"
    assert trace.read(tmp_path / "run").whole
    assert code_of(Recorder(tmp_path / "none").close) == "trace-runs"
    assert not (tmp_path / "none").exists()


KILLED = """
import os, sys, torch
sys.path.insert(0, {here!r})
from trace_runs import SEEDS, SHAPE, denoiser, plan_of
from pellucid import run
from pellucid.evidence.trace import Recorder

def kill(seen):
    if seen.index == 3:
        os.kill(os.getpid(), {signal})

run(plan_of(), denoiser(), shape=SHAPE, seeds=SEEDS, observers=[Recorder({path!r}, True), kill])
"""


def test_a_killed_run_leaves_every_step_that_it_made(tmp_path: Path) -> None:
    path = tmp_path / "run"
    program = KILLED.format(here=str(Path(__file__).parent), path=str(path), signal=int(signal.SIGKILL))
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(PellucidError, match="killed, or is still going on") as error:
        trace.read(path)
    assert error.value.code == "trace-truncated"
    assert "4 of 6 steps" in str(error.value)
    found = trace.read(path, partial=True)
    whole = record(tmp_path / "whole", plan_of(), denoiser())
    assert (found.whole, len(found.steps), found.header.state) == (False, 4, "recording")
    for step, other in zip(found.steps, whole.steps, strict=False):
        assert all((step.digests[name] == other.digests[name]).all() for name in step.digests)
        assert torch.equal(found.tensor("x0", step.index), whole.tensor("x0", step.index))


@pytest.mark.parametrize("tensors", [False, True])
def test_a_cut_at_any_byte_is_found_and_the_steps_before_it_are_read(tmp_path: Path, tensors: bool) -> None:
    path, cut = tmp_path / "run", tmp_path / "cut"
    whole = record(path, plan_of(steps=4), denoiser(), tensors=tensors)
    data = path.read_bytes()
    first = 8 + int.from_bytes(data[:8], "little")
    counts = []
    for length in [*range(first, len(data), 997), len(data) - 1]:
        cut.write_bytes(data[:length])
        assert code_of(trace.read, cut) == "trace-truncated"
        found = trace.read(cut, partial=True)
        counts.append(len(found.steps))
        for step, other in zip(found.steps, whole.steps, strict=False):
            assert (step.digests["x"] == other.digests["x"]).all()
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == (4 if tensors else 3)  # a trace with tensors ends with x
    for length in (0, 5, 8, 9, first // 2, first - 1):
        cut.write_bytes(data[:length])
        assert code_of(trace.read, cut, partial=True) in ("trace", "trace-truncated")


# --- bad input -------------------------------------------------------------------------------------------------


def changed(path: Path, goal: Path, change: Any) -> Path:
    """A trace with another header, of the same length."""
    data = path.read_bytes()
    room = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + room])
    change(table)
    header = json.dumps(table, separators=(",", ":")).encode()
    assert len(header) <= room
    goal.write_bytes(data[:8] + header.ljust(room) + data[8 + room :])
    return goal


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path, other = tmp_path / "run", tmp_path / "other"
    record(path, plan_of(steps=2), denoiser(), tensors=False)
    assert code_of(trace.read, tmp_path / "absent") == "file"
    assert code_of(trace.read, tmp_path) == "file"
    for held in (b"", b"nothing at all", b"\x80\x02}q\x00.", os.urandom(256)):
        other.write_bytes(held)
        assert code_of(trace.read, other) == "trace"
    save_file({"x": torch.zeros(2)}, other)
    assert code_of(trace.read, other) == "trace"

    def another_schema(table: dict[str, Any]) -> None:
        table["__metadata__"]["schema"] = "2"

    assert code_of(trace.read, changed(path, other, another_schema)) == "schema"

    def no_words(table: dict[str, Any]) -> None:
        del table["__metadata__"]["trace"]

    assert code_of(trace.read, changed(path, other, no_words)) == "trace"

    def strange(table: dict[str, Any]) -> None:
        held = json.loads(table["__metadata__"]["trace"])
        table["__metadata__"]["trace"] = json.dumps({**held, "done": 2, "plan_of": [0]})

    assert code_of(trace.read, changed(path, other, strange)) == "trace"

    def too_many(table: dict[str, Any]) -> None:
        held = json.loads(table["__metadata__"]["trace"])
        table["__metadata__"]["trace"] = json.dumps({**held, "done": 10**12}, separators=(",", ":"))

    assert code_of(trace.read, changed(path, other, too_many)) == "trace"

    def wrong_size(table: dict[str, Any]) -> None:
        table["step.00000.numbers"]["shape"] = [1, 7]

    assert code_of(trace.read, changed(path, other, wrong_size)) == "trace"

    def backwards(table: dict[str, Any]) -> None:
        table["step.00000.numbers"] = {"dtype": "F64", "shape": [-2, -7], "data_offsets": [0, 112]}

    assert code_of(trace.read, changed(path, other, backwards)) == "trace"


def test_a_file_in_the_way_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("mine")
    assert code_of(Recorder, path) == "file-exists"
    assert path.read_text() == "mine"
    with Recorder(path, overwrite=True) as recorder:
        assert path.read_text() == "mine"  # until the run begins
        run(plan_of(), denoiser(), shape=SHAPE, seeds=SEEDS, observers=[recorder])
    assert trace.read(path).whole
    assert code_of(Recorder, tmp_path / "none" / "run") == "file"
    assert code_of(Recorder, tmp_path, overwrite=True) == "file"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    assert code_of(Recorder, Path("/proc/self/run")) == "file"


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, data: Any) -> None:
        raise layout.unwritable(self.path, OSError(28, "No space left on device"))

    recorder = Recorder(tmp_path / "run")
    monkeypatch.setattr(layout.Writer, "write", full)
    assert code_of(run, plan_of(), denoiser(), shape=SHAPE, seeds=SEEDS, observers=[recorder]) == "file"


def test_a_disk_that_fills_up_leaves_the_steps_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a step is cut off again: what is left is a valid file."""
    path, write = tmp_path / "run", layout.Writer.write
    calls = iter(range(100))

    def full(self: layout.Writer, data: bytes) -> None:
        if next(calls) == 4:
            write(self, data[: len(data) // 2])
            raise layout.unwritable(self.path, OSError(28, "No space left on device"))
        write(self, data)

    monkeypatch.setattr(layout.Writer, "write", full)
    with pytest.raises(PellucidError, match="No space left"), Recorder(path, True) as recorder:
        run(plan_of(), denoiser(), shape=SHAPE, seeds=SEEDS, observers=[recorder])
    found = trace.read(path)
    assert (len(found.steps), found.whole) == (2, False)
    assert "No space left" in str(found.header.ended)
    with safe_open(path, "pt") as file:
        assert "step.00001.delta" in set(file.keys())


def test_large_tensors_are_measured_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = record(tmp_path / "small", plan_of(), denoiser(), tensors=False)
    monkeypatch.setattr(measures, "LARGE", 0)
    large = record(tmp_path / "large", plan_of(), denoiser(), tensors=False)
    for a, b in zip(small.steps, large.steps, strict=True):
        assert all((a.digests[name] == b.digests[name]).all() for name in a.digests)
        assert all(b.norms[name] == pytest.approx(a.norms[name], rel=1e-6) for name in a.norms)


@pytest.mark.parametrize("guidance", [4.0, "7 + rescale phi=0.7"])
def test_steps_that_are_measured_together_are_measured_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guidance: Any
) -> None:
    """As on a GPU: blocks of steps, in a batch whose images have other levels and ends."""
    names = ("dpmpp_2m", "heun", "euler", "unipc")
    jobs = [Job(plan_of(name, 3 + 11 * i), seed=i) for i, name in enumerate(names)]

    def traced(name: str) -> trace.Trace:
        with Recorder(tmp_path / name, True, 5) as recorder:
            run_batch(jobs, denoiser(guidance, count=len(jobs)), shape=SHAPE, observers=[recorder])
        return trace.read(tmp_path / name)

    alone = traced("alone")
    blocks, send = [], recorder.AsyncCopy.send

    def seen(self: recorder.AsyncCopy, what: Any, held: Any) -> None:
        blocks.append(len(what[0]))
        send(self, what, held)

    in_blocks(monkeypatch)
    monkeypatch.setattr(recorder.AsyncCopy, "send", seen)
    together = traced("together")
    assert max(blocks) > 8
    assert sum(blocks) == len(alone.steps) == len(together.steps)
    for a, b in zip(alone.steps, together.steps, strict=True):
        kinds = [(a.digests, b.digests), (a.norms, b.norms)]
        pairs = [(mine[name], theirs[name]) for mine, theirs in kinds for name in mine]
        pairs += [(a.cosine, b.cosine), (a.saturation, b.saturation), (a.local_error, b.local_error)]
        assert all(np.array_equal(mine, theirs, equal_nan=True) for mine, theirs in pairs)
    for index in (0, 5, 10):
        sides = ([side.tensor(name, index) for name in ("x", "x0", "eps", "delta")] for side in (alone, together))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*sides, strict=True))


def in_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(measures, "waits", lambda device: True)


def test_a_run_in_inference_mode_that_breaks_off_is_measured_as_far_as_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_blocks(monkeypatch)
    calls = iter(range(100))
    with pytest.raises(Cancelled), Recorder(tmp_path / "run") as recorder, torch.inference_mode():
        run(plan_of(), denoiser(), shape=SHAPE, seeds=SEEDS, observers=[recorder], cancelled=lambda: next(calls) == 4)
    found = trace.read(tmp_path / "run")
    assert (len(found.steps), found.header.state) == (4, "broken off")


def test_what_cannot_be_measured_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: measures.StepBlock, weight: Tensor) -> Any:
        raise RuntimeError("out of memory")

    in_blocks(monkeypatch)
    monkeypatch.setattr(measures.StepBlock, "measure", fails)
    with pytest.raises(RuntimeError, match="out of memory"), Recorder(tmp_path / "run") as recorder:
        run(plan_of(), denoiser(), shape=SHAPE, seeds=SEEDS, observers=[recorder])
    found = trace.read(tmp_path / "run")
    assert (len(found.steps), found.header.state) == (0, "broken off")
    assert "out of memory" in str(found.header.ended)


def test_predictions_at_another_x_are_taken_as_they_are_told(tmp_path: Path) -> None:
    """A denoiser that asks a guided one elsewhere, and shows its parts."""
    inner = denoiser().bind([plan_of()] * len(SEEDS))
    made = record(tmp_path / "run", plan_of(), lambda x, level, time: inner(x * 0.5, level, time))
    seen: list[StepSeen] = []
    inner = denoiser().bind([plan_of()] * len(SEEDS))
    run(
        plan_of(), lambda x, level, time: inner(x * 0.5, level, time), shape=SHAPE, seeds=SEEDS,
        observers=[lambda step: seen.append(replace(step, parts=dict(step.parts)))],
    )  # fmt: skip
    for mine, step in zip(made.steps, seen, strict=True):
        delta = (step.x0 - step.parts["cond"]).flatten(1).double().norm(dim=1)
        assert mine.norms["delta"] == pytest.approx(delta.numpy(), rel=1e-6)


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_is_a_whole_number(tmp_path: Path, every: Any) -> None:
    assert code_of(Recorder, tmp_path / "run", every=every) == "trace-every"
    assert code_of(Recorder, tmp_path / "run", limit=0.0) == "trace-limit"


# --- the way from a device -------------------------------------------------------------------------------------


class Passed:
    """An event of a device that is done when it is asked for, or when somebody waits for it."""

    waited = 0

    def __init__(self, ready: bool) -> None:
        self.ready = ready

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return self.ready

    def synchronize(self) -> None:
        Passed.waited += not self.ready


@pytest.mark.parametrize("ready", [True, False])
def test_a_slow_device_is_waited_for_some_steps_later_and_in_order(
    monkeypatch: pytest.MonkeyPatch, ready: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", lambda: Passed(ready))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(recorder, "pinned_copy", Tensor.clone)
    monkeypatch.setattr(Passed, "waited", 0)
    arrived: list[tuple[int, float]] = []
    way = recorder.AsyncCopy(torch.device("cuda"), lambda what, arrays: arrived.append((what, float(arrays[0][0]))))
    for step in range(10):
        way.send(step, [torch.full((2,), float(step))])
        assert len(arrived) == (step + 1 if ready else max(0, step + 1 - recorder.LAG))
    way.drain()
    assert arrived == [(step, float(step)) for step in range(10)]
    assert Passed.waited == (0 if ready else 10)


def test_what_is_behind_a_step_that_could_not_be_written_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would lie where another step belongs."""
    monkeypatch.setattr(torch.cuda, "Event", lambda: Passed(False))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(recorder, "pinned_copy", Tensor.clone)
    arrived: list[int] = []

    def deliver(what: int, arrays: list[Any]) -> None:
        if what == 2:
            raise OSError("full")
        arrived.append(what)

    way = recorder.AsyncCopy(torch.device("cuda"), deliver)
    for step in range(3):
        way.send(step, [torch.zeros(1)])
    with pytest.raises(OSError, match="full"):
        way.send(3, [torch.zeros(1)])
    way.drain()
    assert arrived == [0, 1]
