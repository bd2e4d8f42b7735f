"""Traces on a GPU: no step waits for its numbers, the numbers are those of a CPU, and a run is the same again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pellucid
from pellucid.core import schedule as schedules
from pellucid.evidence import trace
from pellucid.evidence.trace import Recorder, measures
from pellucid.evidence.trace.replay import replay
from pellucid.models.guided import GuidedDenoiser

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SHAPE, SEEDS = (4, 16, 16), (3, 4)


def network(x: Tensor, time: Tensor, prompt: Tensor) -> Tensor:
    bend = prompt.reshape(-1, 1, 1, 1) * 0.1
    return x * 0.8 + bend * torch.tanh(x + bend)


def denoiser(device: str) -> GuidedDenoiser:
    told: list[dict[str, Any]] = [{"prompt": torch.full((2,), value, device=device)} for value in (1.0, 0.0)]
    return GuidedDenoiser(network, schedules.make("scaled_linear"), "eps", *told, pellucid.guarded(5.0))


def traced(path: Path, device: str, sampler: str = "dpmpp_2m", tensors: bool = True) -> trace.Trace:
    plan = pellucid.compile_plan(sampler, steps=12)
    with Recorder(path, tensors) as recorder:
        pellucid.run(plan, denoiser(device), shape=SHAPE, seeds=SEEDS, observers=[recorder], device=device)
    return trace.read(path)


def test_a_digest_is_the_same_on_both_devices() -> None:
    x = torch.randn(3, 1000)
    weight = torch.from_numpy(measures.weights(1000))
    assert torch.equal(measures.digest(x, weight), measures.digest(x.cuda(), weight.cuda()).cpu())


@pytest.mark.parametrize("sampler", ["dpmpp_2m", "heun", "euler_a"])
def test_numbers_are_those_of_the_cpu(tmp_path: Path, sampler: str) -> None:
    cpu, gpu = (traced(tmp_path / device, device, sampler) for device in ("cpu", "cuda"))
    for mine, theirs in zip(cpu.steps, gpu.steps, strict=True):
        for name in mine.norms:
            assert theirs.norms[name] == pytest.approx(mine.norms[name], rel=1e-3)
        assert theirs.cosine == pytest.approx(mine.cosine, abs=1e-3)
        assert theirs.local_error == pytest.approx(mine.local_error, rel=1e-2, nan_ok=True)
        assert torch.allclose(cpu.tensor("x0", mine.index), gpu.tensor("x0", mine.index), rtol=1e-3, atol=1e-3)
    assert gpu.header.machine["device"] == "cuda"


def test_the_kept_tensors_are_those_that_were_seen(tmp_path: Path) -> None:
    """They travel behind the run, and arrive whole and in order."""
    seen: list[Tensor] = []
    plan = pellucid.compile_plan("dpmpp_2m", steps=12)
    with Recorder(tmp_path / "run", True) as recorder:
        watching = [recorder, lambda step: seen.append(step.x0.cpu())]
        out = pellucid.run(plan, denoiser("cuda"), shape=SHAPE, seeds=SEEDS, observers=watching, device="cuda")
    found = trace.read(tmp_path / "run")
    assert all(torch.equal(found.tensor("x0", i), x0) for i, x0 in enumerate(seen))
    assert torch.equal(found.tensor("end"), out.cpu())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("tensors", [False, True])
def test_no_step_but_the_first_and_the_last_waits_for_the_device(tmp_path: Path, tensors: bool) -> None:
    plan = pellucid.compile_plan("dpmpp_2m", steps=12)
    recorder = Recorder(tmp_path / "run", tensors)

    def strict(step: pellucid.StepSeen) -> None:
        """From the second step to the last but one torch raises where something waits."""
        torch.cuda.set_sync_debug_mode("error" if step.index < plan.nfe - 2 else "default")

    try:
        pellucid.run(plan, denoiser("cuda"), shape=SHAPE, seeds=SEEDS, observers=[recorder, strict], device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trace.read(tmp_path / "run").whole


def test_the_device_is_timed_and_its_memory_read(tmp_path: Path) -> None:
    found = traced(tmp_path / "run", "cuda")
    for step in found.steps[1:]:
        assert step.device_seconds["model"] > 0
        assert step.memory is not None
        assert step.peak >= step.memory > 0  # type: ignore[operator]


def test_a_run_is_the_same_again(tmp_path: Path) -> None:
    found = traced(tmp_path / "run", "cuda", "euler_a")
    assert replay(found, denoiser("cuda"), device="cuda").same
    assert replay(found, device="cuda").same
