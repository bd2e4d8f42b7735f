"""What a plan's last call makes of images: the end of a grid, without the way to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pellucid.core.schedule import make
from pellucid.train.sampling import Sampling, SamplingConfig


@pytest.mark.parametrize("grid", ["linspace", "trailing"])
def test_the_network_sees_images_at_the_level_and_time_of_the_last_call(grid: str) -> None:
    sampling = Sampling(make("cosine"), "x0", SamplingConfig("ddim", grid, 50))
    row = sampling.plan().rows[-1]
    x0, seen = torch.full((8, 3, 64, 64), 0.5), []

    def network(x: Tensor, time: Tensor) -> Tensor:
        seen.append((x, time))
        return x * 2

    made = list(sampling.last_calls(network, x0, 0, batch=4))
    assert [len(batch) for batch in made] == [4, 4]
    for (x, time), batch in zip(seen, made, strict=True):
        assert time.tolist() == [row.time] * 4
        assert float(x.mean()) == pytest.approx(0.5 * row.level.alpha, abs=1e-3)
        assert float(x.std()) == pytest.approx(row.level.sigma, rel=0.02)
        assert torch.equal(batch, x * 2)
    assert not torch.equal(made[0], made[1])  # noise of their own


def test_batches_are_whole_and_the_same_again() -> None:
    sampling = Sampling(make("linear"), "eps", SamplingConfig("ddim", "leading", 5))
    x0 = torch.rand(10, 3, 8, 8)
    twice = [torch.cat(list(sampling.last_calls(lambda x, time: x, x0, 7, batch=4))) for _ in range(2)]
    assert len(twice[0]) == 8
    assert torch.equal(*twice)
