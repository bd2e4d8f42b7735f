"""AdamW: torch's own numbers, the rates as drawn in papers, decay where it belongs, and state by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pellucid import PellucidError
from pellucid.train import optimizer as adamw
from pellucid.train.config import OptimizerConfig


def toy() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def gradients(network: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def written_out(weights: torch.Tensor, grads: list[torch.Tensor], rates: list[float], c: OptimizerConfig) -> Any:
    """Loshchilov and Hutter 2019, algorithm 2, in float64."""
    w, m, v = weights.double(), torch.zeros_like(weights).double(), torch.zeros_like(weights).double()
    for t, (grad, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        g = grad.double()
        decayed = w * (1 - rate * c.weight_decay) if w.ndim > 1 else w
        m, v = c.betas[0] * m + (1 - c.betas[0]) * g, c.betas[1] * v + (1 - c.betas[1]) * g * g
        m_hat, v_hat = m / (1 - c.betas[0] ** t), v / (1 - c.betas[1] ** t)
        w = decayed - rate * m_hat / (v_hat.sqrt() + c.eps)
    return w


# --- the update --------------------------------------------------------------------------------------------------


def test_the_update_is_the_papers() -> None:
    c = OptimizerConfig(rate=0.01, warmup=3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    network = toy()
    before = [p.detach().clone() for p in network.parameters()]
    made, seen, rates = adamw.build(network, c), [[] for _ in before], []  # type: ignore[var-annotated]
    for step in range(6):
        gradients(network, step)
        for held, parameter in zip(seen, network.parameters(), strict=True):
            held.append(parameter.grad.clone())
        rates.append(adamw.rate_at(c, step, 6))
        adamw.set_rate(made, rates[-1])
        made.step()
    for weights, grads, now in zip(before, seen, network.parameters(), strict=True):
        assert torch.allclose(now.double(), written_out(weights, grads, rates, c), atol=1e-6, rtol=0)


def test_moments_made_early_change_nothing() -> None:
    """Against a plain torch.optim.AdamW, whose state appears at the first step: the same bits."""
    c = OptimizerConfig(rate=0.02)
    ours, theirs = toy(), toy()
    one = adamw.build(ours, c)
    other = torch.optim.AdamW(theirs.parameters(), lr=c.rate, betas=(0.9, 0.999), eps=c.eps, weight_decay=0.0)
    for step in range(5):
        for network, optimizer in ((ours, one), (theirs, other)):
            gradients(network, step)
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_vectors_are_not_decayed() -> None:
    network = toy()
    made = adamw.build(network, OptimizerConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in made.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in network.named_parameters()} == {
        "0.weight": 0.3, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.3, "2.bias": 0.0,
    }  # fmt: skip


def test_only_what_is_trained_is_held() -> None:
    network = toy()
    network[0].requires_grad_(False)
    made = adamw.build(network, OptimizerConfig())
    assert sum(len(group["params"]) for group in made.param_groups) == 4
    assert not any(name.startswith("0.") for name in adamw.state(network, made))
    with pytest.raises(PellucidError) as error:
        adamw.build(network.requires_grad_(False), OptimizerConfig())
    assert error.value.code == "nothing-to-train"


# --- the rate ----------------------------------------------------------------------------------------------------


def test_the_rate_rises_and_stays() -> None:
    c = OptimizerConfig(rate=2.0, warmup=4)
    assert [adamw.rate_at(c, step, 100) for step in range(7)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0]


def test_the_rate_falls_along_a_cosine() -> None:
    c = OptimizerConfig(rate=1.0, warmup=10, decay="cosine")
    rates = [adamw.rate_at(c, step, 110) for step in range(112)]
    assert rates[9] == rates[10] == 1.0  # the top is met once from each side
    assert rates[60] == pytest.approx(0.5)
    assert rates[35] == pytest.approx((2 + math.sqrt(2)) / 4)
    assert rates[110] == rates[111] == pytest.approx(0.0, abs=1e-15)  # and stays there


@given(
    rate=st.floats(1e-6, 1),
    warmup=st.integers(0, 30),
    steps=st.integers(1, 60),
    decay=st.sampled_from(["constant", "cosine"]),
)
def test_the_rate_is_never_zero_within_a_run_nor_above_its_top(
    rate: float, warmup: int, steps: int, decay: Any
) -> None:
    c = OptimizerConfig(rate=rate, warmup=warmup, decay=decay)
    rates = [adamw.rate_at(c, step, steps) for step in range(steps)]
    assert all(0 < r <= rate for r in rates)
    top = min(warmup, steps)
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[: warmup + 1] == [adamw.rate_at(c, step, 10 * steps) for step in range(min(warmup + 1, steps))]


def test_a_tensor_rate_is_set_in_place() -> None:
    """A captured graph reads the rate where it lies."""
    made = torch.optim.AdamW(toy().parameters(), lr=torch.tensor(0.5), capturable=False, foreach=False)
    held = made.param_groups[0]["lr"]
    adamw.set_rate(made, 0.25)
    assert made.param_groups[0]["lr"] is held
    assert float(held) == 0.25


# --- its state ---------------------------------------------------------------------------------------------------


def test_state_has_the_same_names_at_every_step_and_is_live() -> None:
    network = toy()
    made = adamw.build(network, OptimizerConfig())
    before = adamw.state(network, made)
    assert set(before) == {
        f"{name}/{key}" for name, _ in network.named_parameters() for key in ("step", "exp_avg", "exp_avg_sq")
    }
    gradients(network, 0)
    made.step()
    after = adamw.state(network, made)
    assert list(after) == list(before)
    for name, tensor in after.items():
        assert tensor.data_ptr() == before[name].data_ptr()  # filled in place: a checkpoint is loaded into them
        assert float(tensor.abs().sum()) > 0


def test_a_state_that_is_loaded_goes_on_as_it_was() -> None:
    c = OptimizerConfig(rate=0.05, weight_decay=0.01)
    straight, first, second = toy(), toy(), toy()
    one = adamw.build(straight, c)
    for step in range(6):
        gradients(straight, step)
        one.step()
    two = adamw.build(first, c)
    for step in range(3):
        gradients(first, step)
        two.step()
    three = adamw.build(second, c)
    second.load_state_dict(first.state_dict())
    for name, tensor in adamw.state(second, three).items():
        tensor.copy_(adamw.state(first, two)[name])
    for step in range(3, 6):
        gradients(second, step)
        three.step()
    for a, b in zip(straight.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
