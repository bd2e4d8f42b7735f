"""The engine on a GPU gives what it gives on the CPU. Run with: pytest -m gpu tests/gpu"""

from __future__ import annotations

import pytest
import torch

import pellucid
from pellucid.core.samplers import REGISTRY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def on_gpu(x: torch.Tensor, level: object, time: object) -> torch.Tensor:
    return 0.5 * torch.tanh(x)


def test_the_same_noise_on_both_devices() -> None:
    shape = (4, 64, 64)
    cpu = pellucid.Philox([5, 2**63 + 7]).first(shape, torch.empty(0), [0, 1])
    gpu = pellucid.Philox([5, 2**63 + 7]).first(shape, torch.empty(0, device="cuda"), [0, 1])
    assert (cpu - gpu.cpu()).abs().max() < 1e-6  # the integers are equal; log and cos may round apart


@pytest.mark.parametrize("name", REGISTRY)
def test_every_sampler_runs_alike(name: str) -> None:
    plan = pellucid.compile_plan(name, steps=8)
    images = [
        pellucid.run(plan, on_gpu, shape=(4, 16, 16), seeds=[1, 2], dtype=torch.float64, device=device).cpu()
        for device in ("cpu", "cuda")
    ]
    scale = images[0].abs().max()
    assert (images[0] - images[1]).abs().max() <= 1e-6 * scale


def test_a_mixed_batch_equals_each_alone() -> None:
    plans = [
        pellucid.compile_plan(name, steps=n) for name, n in (("heun", 4), ("euler_a", 9), ("pndm", 6), ("unipc", 5))
    ]
    jobs = [pellucid.Job(plan, seed=i) for i, plan in enumerate(plans)]
    both = pellucid.run_batch(jobs, on_gpu, shape=(4, 8, 8), device="cuda")
    for i, plan in enumerate(plans):
        alone = pellucid.run(plan, on_gpu, shape=(4, 8, 8), seeds=[i], device="cuda")
        assert torch.allclose(both[i], alone[0], rtol=1e-5, atol=1e-6)


def test_the_three_calls() -> None:
    scheduler = pellucid.Scheduler("dpmpp_2m", grid="karras")
    scheduler.set_timesteps(5, device="cuda")
    x = torch.randn(1, 4, 8, 8, device="cuda") * scheduler.init_noise_sigma
    for t in scheduler.timesteps:
        x = scheduler.step(0.1 * scheduler.scale_model_input(x, t), t, x, return_dict=False)[0]
    assert x.device.type == "cuda"
    assert torch.isfinite(x).all()


def test_adaptive() -> None:
    found = pellucid.run_adaptive(on_gpu, torch.randn(2, 4, 8, 8, device="cuda") * 14.6, budget=300)
    assert found.x.device.type == "cuda"
    assert torch.isfinite(found.x).all()
