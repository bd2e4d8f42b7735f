"""Running means: equal to the sum that they stand for, the same at any batch size, and to be taken up again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from pellucid import PellucidError
from pellucid.train.optimizer import EMA


def walk(steps: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, generator=generator) for _ in range(steps)]


def follow(ema: EMA, network: nn.Linear, path: list[torch.Tensor], images: int = 8) -> None:
    for weight in path:
        with torch.no_grad():
            network.weight.copy_(weight)
        ema.update(images)


def test_a_mean_is_the_weighted_sum_of_the_past() -> None:
    network, path = nn.Linear(3, 2), walk(20)
    ema = EMA(network, (16.0, 100.0))
    follow(ema, network, path)
    for length in (16.0, 100.0):
        ages = np.arange(len(path))[::-1] * 8
        shares = 0.5 ** (ages / length)
        expected = sum(w * s for w, s in zip(path, shares / shares.sum(), strict=True))
        assert torch.allclose(ema.weights(length)["weight"], expected, atol=1e-5)


def test_the_first_mean_is_the_first_weights() -> None:
    network = nn.Linear(3, 2)
    ema = EMA(network, (1e6,))
    ema.update(4)
    assert torch.equal(ema.weights(1e6)["weight"], network.weight.detach())


def test_the_length_means_the_same_at_any_batch_size() -> None:
    """Weights that stand still for 32 images, told in steps of 8 or of 32."""
    path = walk(5)
    means = []
    for images, repeats in ((8, 4), (32, 1)):
        network = nn.Linear(3, 2)
        ema = EMA(network, (50.0,))
        follow(ema, network, [w for w in path for _ in range(repeats)], images)
        means.append(ema.weights(50.0)["weight"].clone())
    assert torch.allclose(means[0], means[1], atol=1e-6)


def test_inside_the_network_and_out_again_to_the_bit() -> None:
    network = nn.Linear(3, 2).to(torch.bfloat16)
    ema = EMA(network, (10.0,))
    follow(ema, network, walk(6))
    before = network.weight.detach().clone()
    with ema.inside(10.0):
        assert torch.equal(network.weight.detach(), ema.weights(10.0)["weight"].bfloat16())
    assert torch.equal(network.weight.detach(), before)


def test_a_restored_mean_goes_on_as_if_nothing_had_happened() -> None:
    path = walk(12)
    network = nn.Linear(3, 2)
    whole, first = EMA(network, (10.0, 40.0)), EMA(network, (10.0, 40.0))
    follow(whole, network, path)
    follow(first, network, path[:7])
    second = EMA(network, (10.0, 40.0))
    second.restore({k: v.clone() for k, v in first.state().items()})
    follow(second, network, path[7:])
    for length in (10.0, 40.0):
        assert torch.equal(second.weights(length)["weight"], whole.weights(length)["weight"])


def test_bad_input_is_one_line() -> None:
    network = nn.Linear(3, 2)
    for lengths in ((), (0.0,), (float("nan"),), (5.0, 5.0)):
        with pytest.raises(PellucidError) as error:
            EMA(network, lengths)
        assert error.value.code == "ema"
    ema = EMA(network, (5.0,))
    with pytest.raises(PellucidError):
        ema.weights(6.0)
    with pytest.raises(PellucidError) as error:
        ema.restore({"seen": torch.tensor(1)})
    assert error.value.code == "ema-state"
