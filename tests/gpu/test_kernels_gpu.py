"""The compiled kernels against plain torch in float64, with the sizes of real networks.

Run with: pytest -m gpu tests/gpu
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from kernel_cases import CHECKS, Draw

from pellucid.models import kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not kernels.available(), reason="needs triton"),
]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("name", CHECKS)
def test_equals_plain_torch(name: str, seed: int) -> None:
    CHECKS[name](Draw(seed, "cuda", large=True))


def test_a_large_image_is_beyond_32_bits() -> None:
    """3·2³⁰ numbers in one tensor: its last image is that image alone."""
    x = torch.randn(3, 256, 2048, 2048, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
    weight, bias = torch.randn(2, 256, device="cuda", dtype=torch.float16)
    y = kernels.group_norm(x, weight, bias, 32, 1e-5, silu=True)
    alone = kernels.group_norm(x[2:], weight, bias, 32, 1e-5, silu=True)
    assert (y[2:] - alone).abs().max() < 0.02
    assert torch.equal(kernels.add_bias(x, y, bias)[2:], kernels.add_bias(x[2:], y[2:], bias))


def test_a_replayed_graph_is_bit_equal() -> None:
    x = torch.randn(2, 320, 64, 64, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    weight, bias = torch.randn(2, 320, device="cuda", dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        y = kernels.group_norm(x, weight, bias, 32, 1e-5, silu=True)
        return kernels.add_layer_norm(y.permute(0, 2, 3, 1).reshape(2, 4096, 320), None, weight, bias, 1e-5)[1]

    plain = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    graph.replay()
    assert torch.equal(plain, replayed)
