"""Captured steps on a GPU: the numbers of the same kernels run plainly, whoever joins, leaves or swaps weights.

Run with: pytest -m gpu tests/gpu
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from test_captured import unet

from pellucid import Philox, compile_plan, schedules
from pellucid.core.batch import Batch, Entry
from pellucid.models import captured, graph_memory
from pellucid.models.captured import StepGraphs
from pellucid.models.guidance import Guidance
from pellucid.models.guided import GuidedDenoiser
from pellucid.models.lora import view
from pellucid.models.unet import UNet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SCALED = schedules.make("scaled_linear")
DEVICE = "cuda"
ASKED = [
    ("dpmpp_2m", 6, "7"),
    ("euler_a", 9, "guarded 9"),
    ("heun", 4, "1"),
    ("dpmpp_2m_sde", 7, "5 + interval start=0.2 stop=0.7"),
    ("edm_stochastic", 5, "3 + rescale + mimic"),
    ("unipc", 8, "7"),
]


@pytest.fixture
def network() -> UNet:
    return unet().to(DEVICE, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def entry(network: nn.Module, sampler: str, steps: int, guidance: str, seed: int = 1, **more: Any) -> Entry:
    generator = torch.Generator().manual_seed(seed)
    cond, uncond = ({"context": torch.randn(1, 6, 16, generator=generator).to(DEVICE)} for _ in range(2))
    plan, noise = compile_plan(sampler, steps=steps), Philox(seed)
    own = GuidedDenoiser(network, SCALED, "eps", cond, uncond, Guidance.parse(guidance))
    x = noise.first((4, 8, 8), torch.empty(0, device=DEVICE), [0]) * plan.initial_scale
    return Entry([plan], own, x, noise, **more)


def drain(entries: list[Entry], graphs: StepGraphs | None, network: nn.Module, capture: bool = True) -> list[Tensor]:
    """All begin in turn, one step apart."""
    stepper = None if graphs is None else graphs.stepper([network], capture)
    batch, waiting = Batch(stepper=stepper), list(entries)
    with torch.no_grad():
        while batch.entries or waiting:
            if waiting:
                batch.join(waiting.pop(0))
            batch.step()
            if stepper is not None and batch.entries:
                assert not stepper.plain
    if stepper is not None:
        stepper.close()
    for one in entries:
        assert one.error is None
    return [one.result for one in entries]


def close(found: Tensor, wanted: Tensor, most: float) -> bool:
    return float((found - wanted).norm() / wanted.norm()) < most


def test_a_captured_step_is_bit_equal_to_its_program(network: UNet) -> None:
    made = [[entry(network, *one, seed=k) for k, one in enumerate(ASKED)] for _ in range(4)]
    graphs = StepGraphs(64)
    drain(made[0], graphs, network)  # captures
    replayed = drain(made[1], graphs, network)
    programs = drain(made[2], StepGraphs(64), network, capture=False)
    plain = drain(made[3], None, network)
    assert graph_memory.held(graphs).graphs > 5
    for one, found, program, wanted in zip(ASKED, replayed, programs, plain, strict=True):
        assert torch.equal(found, program), one
        assert close(found, wanted, 1e-3), one  # TF32 in convolutions, whose algorithm depends on the batch


def test_adapters_swapped_in_and_out_never_run_with_old_weights(network: UNet) -> None:
    weight = network.conv_in.weight.detach().clone(memory_format=torch.preserve_format)
    other, graphs = view(network, {"conv_in": {"weight": weight * 1.5}}), StepGraphs()
    for one in (network, other, network, other, network):
        found = [drain([entry(one, "euler", 5, "7")], graphs, one)[0] for _ in range(2)]
        wanted = drain([entry(one, "euler", 5, "7")], None, one)[0]
        assert torch.equal(found[0], found[1])
        assert close(found[1], wanted, 1e-3)
    with torch.no_grad():
        network.conv_in.weight.mul_(0.5)  # as a merge does
    found = drain([entry(network, "euler", 5, "7")], graphs, network)
    assert close(found[0], drain([entry(network, "euler", 5, "7")], None, network)[0], 1e-3)


def test_threads_that_capture_at_once(network: UNet) -> None:
    graphs, found = StepGraphs(), dict[int, list[Tensor]]()

    def work(k: int) -> None:
        found[k] = [drain([entry(network, *ASKED[k])], graphs, network)[0] for _ in range(6)]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for k in range(4):
        wanted = drain([entry(network, *ASKED[k])], None, network)[0]
        assert all(close(one, wanted, 1e-3) for one in found[k]), ASKED[k]


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # it ends before its first kernel
def test_a_capture_that_finds_no_memory_goes_on_plainly(network: UNet, monkeypatch: pytest.MonkeyPatch) -> None:
    body = captured._Program.body

    def fails(self: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        body(self)

    monkeypatch.setattr(captured._Program, "body", fails)
    stepper = StepGraphs().stepper([network])
    made, batch = entry(network, "euler", 5, "7"), Batch(stepper=stepper)
    with torch.no_grad():
        batch.join(made)
        while batch.entries:
            batch.step()
    stepper.close()
    assert made.error is None
    assert stepper.plain["memory"] == 4
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    monkeypatch.undo()
    assert close(made.result, drain([entry(network, "euler", 5, "7")], None, network)[0], 1e-3)


def test_memory_does_not_grow_with_changing_shapes(network: UNet) -> None:
    graphs, seen = StepGraphs(8), []
    for k in range(120):
        many = [entry(network, *ASKED[(k + j) % 6], seed=j) for j in range(1 + k % 5)]
        drain(many, graphs, network)
        if k % 40 == 39:
            torch.cuda.synchronize()
            seen.append(torch.cuda.memory_reserved())
    assert seen[-1] <= 1.05 * seen[0]
