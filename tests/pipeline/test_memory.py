"""Memory: the count of living tensors against counting by hand and against the allocator; predictions against runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import memory_gpu as bench
from pellucid.core.errors import PellucidError
from pellucid.pipeline import compare, memory, tracker
from pellucid.pipeline.compare import measure
from pellucid.pipeline.memory import predict, request_for, size_text
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.prepare import settle
from pellucid.pipeline.request import Lora
from pellucid.pipeline.tracker import METER, Tracker

CPU = torch.device("cpu")
TINY = bench.TINY[0]
SIZE = (64, 48)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return bench.pipeline_of(TINY, CPU, torch.float32)


@pytest.fixture(scope="module")
def lora(pipe: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of rank 2 on every query of the UNet."""
    torch.manual_seed(0)
    tensors = {}
    for name, module in pipe.components.network.named_modules():
        if name.endswith("to_q"):
            tensors[f"unet.{name}.lora.down.weight"] = torch.randn(2, module.in_features)
            tensors[f"unet.{name}.lora.up.weight"] = torch.randn(module.out_features, 2)
    path = tmp_path_factory.mktemp("lora") / "queries.safetensors"
    save_file(tensors, path)
    return path


# --- the count -----------------------------------------------------------------------------------------------------


class Steps(nn.Module):
    """1 KB in; then 4 KB, 4 KB, and 1 KB out. The second lives while the third is made."""

    def __init__(self) -> None:
        super().__init__()
        self.grow = nn.Linear(256, 1024, bias=False)  # 1 MB
        self.shrink = nn.Linear(1024, 256, bias=False)  # 1 MB

    def forward(self, x: Tensor) -> Tensor:
        h = self.grow(x)
        h = torch.tanh(h)
        return self.shrink(h)


def test_the_count_by_hand() -> None:
    network, x = Steps(), torch.ones(1, 256)
    tracker = Tracker(["cpu"])
    tracker.hold([network])
    with torch.no_grad(), tracker, tracker.following({"net": network}), tracker.stage("run"):
        out = network(x)
    peak = tracker.stages["run"]
    assert peak.weights == 2 * 2**20
    assert peak.activations == 2 * 4096  # both of the wide ones; the last is made after the first has gone
    assert (peak.workspace, peak.owner) == (0, "net")
    assert peak.held == (("net.grow", 4096), ("net", 4096))
    assert tracker.others == out.untyped_storage().nbytes() == 1024


def test_views_and_results_in_place_take_nothing() -> None:
    tracker = Tracker(["cpu"])
    with tracker, tracker.stage("run"):
        x = torch.zeros(1000)
        y = x.view(10, 100).T[3:].add_(1).relu_()  # 97 × 10 of the same numbers
        assert tracker.others == 4000
        z = y.reshape(-1)  # not contiguous: a copy
        del x, y
        assert tracker.others == 3880
        del z
        assert tracker.others == 0
    assert tracker.stages["run"].activations == 4000 + 3880


def test_a_grain_rounds_every_tensor_up() -> None:
    tracker = Tracker(["cpu"], grain=512)
    with tracker:
        kept = [torch.zeros(1), torch.zeros(129)]
    assert tracker.others == 512 + 1024
    assert len(kept) == 2


def test_a_stage_begins_with_what_lives() -> None:
    tracker = Tracker(["cpu"])
    with tracker:
        with tracker.stage("first"):
            kept = torch.zeros(250)
            torch.zeros(2500)
        with tracker.stage("second"):
            torch.zeros(25)
    assert tracker.stages["first"].activations == 11000
    assert tracker.stages["second"].activations == 1100
    assert len(kept) == 250


def test_shared_weights_count_once() -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    tracker = Tracker(["cpu"])
    tracker.hold([first, second])
    assert tracker.weights == 8 * 8 * 4


def allocated(pipe: Pipeline, request: Any, path: Path) -> int:
    """The most that torch's CPU allocator had given out at once, by its own record in a profile."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        pipe.run(request)
    profile.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    total = most = 0
    for event in sorted(events, key=lambda e: e["args"]["Ev Idx"]):
        total += event["args"]["Bytes"]
        most = max(most, total)
    return most


def test_the_prediction_is_what_the_allocator_gave(pipe: Pipeline, tmp_path: Path) -> None:
    """An oracle that shares nothing with the tracker. Kernels' own buffers are in it too: a few KB here."""
    request = request_for(pipe, size=SIZE)
    pipe.run(request)
    peak = predict(pipe, request).peak
    assert peak.activations == pytest.approx(allocated(pipe, request, tmp_path / "trace.json"), rel=0.01)


# --- prediction and measurement ------------------------------------------------------------------------------------

POLICIES = (
    Policy(), Policy(attention="math"), Policy(vae_tile=16), Policy(vae_slicing=True), Policy(channels_last=True),
    Policy(attention="flash", vae_tile=16),
)  # fmt: skip


def agree(pipe: Pipeline, request: Any) -> memory.Forecast:
    """Predicted and measured peaks of every stage within 1 %; they differ by scraps such as a kernel's statistics."""
    forecast, found = predict(pipe, request), measure(pipe, request)
    assert list(forecast.stages) == list(found.peaks)
    for name, peak in forecast.stages.items():
        assert peak.total == pytest.approx(found.peaks[name], rel=0.01), name
    assert forecast.stage == found.stage
    return forecast


@pytest.mark.parametrize("policy", POLICIES, ids=Policy.text)
def test_policies(pipe: Pipeline, policy: Policy) -> None:
    request = request_for(pipe, size=SIZE, batch=2)
    with compare.arrange(pipe, compare.Strategy("", policy, request)) as (ready, asked, _):
        agree(ready, asked)


def test_half_precision(pipe: Pipeline) -> None:
    """The prediction for another dtype is that of the model in it."""
    request = request_for(pipe, size=SIZE)
    half = replace(pipe, components=compare.in_dtype(pipe.components, torch.bfloat16))
    direct = agree(half, request)
    asked = predict(pipe, request, dtype=torch.bfloat16)
    assert asked.stages == direct.stages
    assert asked.peak.weights == predict(pipe, request).peak.weights / 2


def test_adapters(pipe: Pipeline, lora: Path) -> None:
    bare = predict(pipe, request_for(pipe, size=SIZE)).peak
    control = agree(pipe, request_for(pipe, size=SIZE, controlnets=[bench.controlnet_of(TINY, pipe)])).peak
    assert control.weights > bare.weights
    assert control.activations > bare.activations
    dressed = agree(pipe, request_for(pipe, size=SIZE, loras=[Lora(lora)])).peak
    weights = [m.weight for n, m in pipe.components.network.named_modules() if n.endswith("to_q")]
    assert dressed.weights - bare.weights == sum(w.numel() * 4 for w in weights)


@pytest.mark.parametrize("masked", [False, True])
def test_images(pipe: Pipeline, masked: bool) -> None:
    image, mask = Image.new("RGB", SIZE, "red"), Image.new("L", SIZE, 255)
    given = {"image": image, "strength": 0.7, **({"mask": mask} if masked else {})}
    forecast = agree(pipe, replace(request_for(pipe, size=SIZE, steps=4), **given))
    assert forecast.stages["encode"].owner.startswith("vae.encoder.")


def test_owners_are_where_the_work_is(pipe: Pipeline) -> None:
    stages = predict(pipe, request_for(pipe, size=SIZE)).stages
    assert stages["text"].owner.startswith("text_encoder.")
    assert stages["denoise"].owner.startswith("unet.")
    assert stages["decode"].owner.startswith("vae.decoder.")
    assert all(size > 0 and size <= peak.activations for peak in stages.values() for _, size in peak.held)


def test_guidance_off_halves_the_denoising(pipe: Pipeline) -> None:
    """cond and uncond are one batch: without guidance it is half as large, beside weights, latents and hoisted text."""
    request = request_for(pipe, size=SIZE)
    both, one = (predict(pipe, replace(request, guidance=scale)).stages["denoise"] for scale in (5.0, 1.0))
    assert one.activations == pytest.approx(both.activations / 2, rel=0.07)
    batch = predict(pipe, request_for(pipe, size=SIZE, batch=2)).stages["denoise"]
    assert batch.activations == pytest.approx(2 * both.activations, rel=0.02)


def test_a_prediction_changes_nothing_and_needs_no_memory(pipe: Pipeline) -> None:
    """An image of 4096² would take many GB here; its rehearsal takes none, and the model is as it was."""
    before = {name: t.data_ptr() for name, t in pipe.components.network.named_parameters()}
    forecast = predict(pipe, request_for(pipe, size=(4096, 4096), batch=4), device="cuda", steps=1)
    assert forecast.peak.total > 20 * 2**30
    assert {name: t.data_ptr() for name, t in pipe.components.network.named_parameters()} == before
    assert not any(m._forward_pre_hooks for m in pipe.components.network.modules())
    assert METER.get() is None


# --- a GPU, from here ----------------------------------------------------------------------------------------------


def test_offload_keeps_only_what_a_stage_uses(pipe: Pipeline) -> None:
    request = request_for(pipe, size=SIZE)
    found = {
        how: predict(pipe, request, policy=Policy(offload=how), device="cuda").stages for how in ("component", "block")
    }
    everything = predict(pipe, request, device="cuda").stages
    network, vae = pipe.components.network, pipe.components.vae
    assert vae is not None
    for how in found:
        assert found[how]["encode"].weights == 0
        assert found[how]["decode"].weights == held(vae)
        assert found[how]["text"].weights == held(*pipe.components.text_encoders)
    assert found["component"]["denoise"].weights == held(network)
    assert found["block"]["denoise"].weights < 0.4 * held(network)
    assert everything["denoise"].weights == held(network, vae, *pipe.components.text_encoders)
    assert found["block"]["denoise"].activations <= everything["denoise"].activations * 1.01


def held(*networks: nn.Module) -> int:
    """Bytes of weights as CUDA's allocator rounds them."""
    return sum(tracker.rounded_bytes(weight) for network in networks for weight in network.parameters())


def test_graphs_keep_registers_inputs_and_the_activations_of_a_call(pipe: Pipeline) -> None:
    request = request_for(pipe, size=SIZE, batch=2)
    with_graphs = predict(pipe, request, device="cuda").stages
    without = predict(pipe, request, device="cuda", policy=Policy(without=("graphs",))).stages
    kept = with_graphs["denoise"].graphs
    latents = 2 * 4 * SIZE[0] // 2 * SIZE[1] // 2 * 4
    assert 9 * latents < kept < 9 * latents + 2**20  # nine registers; the rest are tables, inputs, text keys and values
    assert with_graphs["decode"].graphs == with_graphs["text"].graphs > kept + 0.9 * without["denoise"].activations
    for name in without:
        assert without[name].graphs == 0
        assert with_graphs[name].activations == pytest.approx(without[name].activations, rel=0.02)
    larger = predict(pipe, request_for(pipe, size=SIZE, batch=9), device="cuda").stages["denoise"]
    as_bucket = predict(pipe, request_for(pipe, size=SIZE, batch=10), device="cuda").stages["denoise"]
    assert larger.graphs == pytest.approx(as_bucket.graphs, rel=1e-3)  # 9 images run in a graph of 10


def test_what_programs_hold_is_predicted(pipe: Pipeline) -> None:
    """Programs on the CPU are what a graph captures: their registers and inputs are there to be counted."""

    @dataclass(repr=False)
    class Programs(Pipeline):
        def stepper(self, networks: Any) -> Any:
            return self.graphs.stepper(networks, capture=False)

    device = Programs(pipe.components)
    assert device.graph_memory().total == 0
    request = request_for(pipe, size=SIZE, batch=2)
    assert device.run(request).plain == {}
    found = device.graph_memory()
    assert (found.graphs, found.pool) == (0, 0)  # nothing is captured on a CPU
    assert predict(pipe, request, device="cuda").stages["denoise"].graphs == pytest.approx(found.registers, rel=0.02)
    device.graphs.clear()
    assert device.graph_memory().total == 0


def test_why_steps_are_plain_is_in_the_result(pipe: Pipeline) -> None:
    request = request_for(pipe, size=SIZE, steps=3)
    assert pipe.run(request).plain == {"device": 3}

    @dataclass(repr=False)
    class Programs(Pipeline):
        def stepper(self, networks: Any) -> Any:
            return self.graphs.stepper(networks, capture=False)

    assert Programs(pipe.components).run(replace(request, guidance="5 + apg")).plain == {"memory of a rule": 3}
    for policy, why in (
        (Policy(), ""), (Policy(without=("graphs",)), "policy"), (Policy(compile=True), "compile"),
        (Policy(offload="block"), "offload"),
    ):  # fmt: skip
        assert Pipeline(pipe.components, policy, torch.device("cuda")).why_plain() == why


def test_attention_maps_are_held_by_math_alone(pipe: Pipeline) -> None:
    """At 64 × 48 pixels there are 768 tokens: a map of 2 × 2 heads × 768² floats is 9.4 MB; softmax makes another."""
    request = request_for(pipe, size=SIZE)
    fused, plain = (
        predict(pipe, request, policy=Policy(attention=name), device="cuda").stages["denoise"].activations
        for name in ("auto", "math")
    )
    assert plain - fused > 2 * 2 * 2 * 768**2 * 4 * 0.8


def test_convolutions_borrow_copies_unless_channels_are_innermost() -> None:
    x, weight, out = torch.empty(1, 8, 16, 16), torch.empty(4, 8, 3, 3), torch.empty(1, 4, 16, 16)
    conv = torch.ops.aten.convolution.default
    assert tracker.borrowed_bytes(False)(conv, (x, weight), out) == 8192 + 1536 + 4096
    assert tracker.borrowed_bytes(True)(conv, (x, weight), out) == 0
    assert tracker.borrowed_bytes(False)(torch.ops.aten.add.Tensor, (x, x), x) == 0


# --- out of memory -------------------------------------------------------------------------------------------------


class Full:
    """Stands in for a method: out of memory at the first call, as it was afterwards."""

    def __init__(self, real: Any) -> None:
        self.real, self.calls = real, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return self.real(*args, **kwargs)


def test_out_of_memory_names_owner_and_cures(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(pipe.components.vae)
    full = Full(kind.decode)
    monkeypatch.setattr(kind, "decode", lambda *args: full(*args))
    request = request_for(pipe, size=(192, 144), batch=2, steps=1)
    with pytest.raises(PellucidError) as error:
        pipe.run(request)
    text = str(error.value)
    assert error.value.code == "out-of-memory"
    assert "\n" not in text
    peak = predict(pipe, request, steps=1).stages["decode"]
    assert (
        f"stage decode; the device ran out of it. {peak.owner} owns its peak: {size_text(peak.total)} predicted" in text
    )
    sliced = predict(pipe, request, policy=Policy(vae_slicing=True), steps=1).stages["decode"].total
    assert f"vae_slicing=True brings it to {size_text(sliced)}" in text
    assert "vae_tile=64 brings it to" in text
    assert "dtype='bfloat16' brings it to" in text
    assert "offload" not in text  # it would do nothing on a CPU


def test_out_of_memory_of_the_rehearsal_is_no_endless_tale(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def always(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(pipe.components.vae), "decode", always)
    with pytest.raises(PellucidError, match=r"Use a smaller size, vae_tile=64\.") as error:
        pipe.run(request_for(pipe, size=SIZE))
    assert error.value.code == "out-of-memory"


@pytest.mark.parametrize("stage", ["text", "encode", "denoise", "decode"])
def test_every_stage_has_an_explanation(pipe: Pipeline, stage: str) -> None:
    text = memory.explain(pipe, request_for(pipe, size=SIZE), stage)
    assert "owns its peak" in text
    assert "bfloat16" in text


# --- refused before it runs ----------------------------------------------------------------------------------------


def test_what_cannot_fit_is_refused_before_it_runs(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = replace(pipe)
    request = request_for(pipe, size=(2048, 2048), steps=1)
    forecast = predict(pipe, request, steps=1)
    need = forecast.peak
    monkeypatch.setattr(memory, "available", lambda device: 2**28)
    forward = type(pipe.components.network).forward
    real: list[Any] = []

    def called(network: Any, x: Tensor, *rest: Any, **more: Any) -> Any:
        real.extend([] if x.is_meta else [x])
        return forward(network, x, *rest, **more)

    monkeypatch.setattr(type(pipe.components.network), "forward", called)
    with pytest.raises(PellucidError) as error:
        pipe.run(request)
    text = str(error.value)
    assert error.value.code == "out-of-memory"
    assert not real
    assert "\n" not in text
    more = size_text(need.total - need.weights)
    assert text.startswith(f"memory must suffice for stage {forecast.stage}; {more} more are predicted to be needed")
    assert f"{size_text(2**28)} are free" in text
    assert "bfloat16' brings it to" in text


def test_a_small_request_is_not_rehearsed(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that fits by a rough count, nor one as large as one that was found to fit."""
    rehearsed: list[Any] = []

    def count(*args: Any, **more: Any) -> Any:
        rehearsed.append(args)
        return predict(*args, **more)

    def check(side: int, fitted: int = 0) -> int:
        return memory.check_fits(settle(pipe, request_for(pipe, size=(side, side))), fitted)

    monkeypatch.setattr(memory, "predict", count)
    monkeypatch.setattr(memory, "available", lambda device: pytest.fail("a small request asks nothing"))
    check(256)
    monkeypatch.setattr(memory, "available", lambda device: 2**40)
    check(1024)
    assert not rehearsed
    monkeypatch.setattr(memory, "available", lambda device: 2**32)
    fitted = check(1024)
    assert check(1024, fitted) == fitted == 1024**2
    assert len(rehearsed) == 1


def test_a_rehearsal_takes_no_memory_for_pixels(pipe: Pipeline) -> None:
    """Images of 8192 × 8192 would be 0.8 GB of floats."""
    tracemalloc.start()
    try:
        predict(pipe, request_for(pipe, size=(8192, 8192), steps=1), steps=1)
        assert tracemalloc.get_traced_memory()[1] < 500 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux says there how much is free")
def test_free_memory_is_the_least_of_what_limits_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = memory.available(CPU)
    assert whole is not None
    assert 2**28 < whole < 2**50
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    for folder, limit in ((group, "max"), (group.parent, str(3 * 2**28))):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{2**29}\n")
        (folder / "memory.stat").write_text(f"anon 7\ninactive_file {2**20}\nactive_file {2**20}\n")
    monkeypatch.setattr(memory, "GROUPS", tmp_path)
    assert list(memory.limits("0::/a/b\n")) == [2**28 + 2 * 2**20]  # a parent's limit counts, its cache does not
    assert memory.available(torch.device("meta")) is None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits are those of Linux")
def test_with_little_memory_a_command_ends_in_one_line() -> None:
    """In a process of its own with a limit on its memory: refused by the prediction, or, in the middle, in one line."""
    program = """
import contextlib, io, os, resource, sys
from pellucid.cli import app

def ask(*words):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = app(["sample", "scenes-128", "a red star", "--steps", "1", "--device", "cpu", "--seed", "1", *words],
                   standalone_mode=False)
    print(code, said.getvalue().strip().replace(os.linesep, " // "))

ask("--out", sys.argv[1] + "/small.png")

def leave(room):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, -1))

leave(2**28)
ask("--size", "2048x2048", "--out", sys.argv[1] + "/a.png")
leave(2**26)
ask("--size", "512x496", "--out", sys.argv[1] + "/b.png")  # too few pixels to be rehearsed
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", program, folder], capture_output=True, text=True, check=True, env=environment
        )
        lines = [line for line in done.stdout.splitlines() if line[:2] in ("2 ", "0 ", "No")]
        assert sorted(os.listdir(folder)) == ["small.png"]
    before, middle = lines[-2:]
    assert before.startswith("2 error[out-of-memory]: memory must suffice for stage decode; 2.5 GiB more are predicted")
    assert middle.startswith("2 error[out-of-memory]: memory must suffice for stage ")
    assert "the device ran out of it" in middle
    assert "//" not in before + middle


# --- strategies ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows(pipe: Pipeline, lora: Path) -> dict[str, compare.StrategyCost]:
    """Every strategy run once, on a pipeline that must be as it was afterwards."""
    size = {"size": (48, 32), "batch": 2, "steps": 1}
    bare = request_for(pipe, **size)
    dressed = request_for(pipe, **size, loras=[Lora(lora)], controlnets=[bench.controlnet_of(TINY, pipe)])
    found, left_out = compare.strategies(pipe, bare, dressed)
    assert any("offload" in words for words in left_out)
    before, ticks = pipe.run(bare), []
    strides = {name: t.stride() for name, t in pipe.components.network.named_parameters()}
    made = {row.strategy.name: row for row in compare.compare(pipe, found, lambda: ticks.append(1), repeats=1)}
    assert len(ticks) == len(made)
    assert torch.equal(pipe.run(bare).latents, before.latents)
    assert {name: t.stride() for name, t in pipe.components.network.named_parameters()} == strides
    return made


def test_strategies_show_the_saving(rows: dict[str, compare.StrategyCost]) -> None:
    assert not any(row.trouble for row in rows.values())
    for row in rows.values():
        assert max(row.predicted.values()) == pytest.approx(max(row.measured.values()), rel=0.01)
    base = rows["as it is"].measured
    assert rows["vae_slicing=True"].measured["decode"] < base["decode"]
    assert rows["vae_tile=16"].measured["decode"] < base["decode"]
    assert rows["attention=math"].measured["denoise"] > base["denoise"]
    assert rows["ControlNet"].measured["denoise"] > base["denoise"]
    assert rows["LoRA, view"].measured["denoise"] == rows["LoRA, merged"].measured["denoise"] > base["denoise"]
    assert max(rows["dtype=bfloat16"].measured.values()) < 0.6 * max(base.values())


def test_strategies_show_the_cost(rows: dict[str, compare.StrategyCost]) -> None:
    assert all(row.seconds is not None and row.seconds > 0 and row.times for row in rows.values())
    base = rows["as it is"]
    assert (base.largest, base.mean, base.times) == (0, 0, 1)
    policies = ("attention=flash", "attention=math", "vae_slicing=True", "vae_tile=16", "channels_last=True")
    assert all(rows[name].mean is not None and rows[name].mean <= 1 for name in policies)  # at most 1/255
    assert rows["LoRA, merged"].strategy.against == "LoRA, view"
    assert rows["LoRA, merged"].largest == 0  # the same weights bit by bit


def test_a_strategy_that_fails_says_why(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_for(pipe, size=(32, 32), steps=1)
    bad = compare.Strategy("bad", Policy(offload="block"), request)
    rows = compare.compare(pipe, [compare.Strategy(compare.BASE, Policy(), request), bad], lambda: None, 1)
    assert rows[1].trouble.startswith("policy: offload must be none on the CPU")
    with pytest.raises(PellucidError):
        compare.compare(pipe, [bad], lambda: None, 1)


# --- the benchmark -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_benchmark_runs_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--tiny", "--device", "cpu", "--dtype", "float32", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "memory.json").read_text())
    assert {row["stage"] for row in found["rows"]} == {"text", "encode", "denoise", "decode"}
    assert all(row["predicted"] == pytest.approx(row["measured"], rel=0.01) for row in found["rows"])
    assert "peak of a run, predicted / measured: farthest 1.0" in capsys.readouterr().out
    assert "| tiny | 2 | vae_slicing=True | decode |" in (tmp_path / "memory.md").read_text()


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 B"), (1023, "1023 B"), (2**20, "1 MiB"), (int(9.13 * 2**30), "9.13 GiB")]
)
def test_bytes_in_words(size: int, words: str) -> None:
    assert size_text(size) == words
