"""Recomputed activations of adapters: the frozen base beside them forgets its own too, and no gradient changes."""

from __future__ import annotations

import adapt_cases as cases
import pytest
import torch
from torch import Tensor, nn

from pellucid import PellucidError
from pellucid.models.blocks import ResnetBlock
from pellucid.train.adapters import AdapterTask
from pellucid.train.trainer import recompute


def kept_and_gradients(task: AdapterTask) -> tuple[int, list[Tensor]]:
    """Bytes that the forward pass keeps for the backward pass, parameters left out, and what that pass gives."""
    asked = task.prepare(cases.examples(), cases.draws())
    weights = {p.data_ptr() for one in (task.network, task.base.network) for p in one.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = task.loss(task.network, asked).loss
    loss.backward()
    return sum(held.values()), [p.grad for p in task.network.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", cases.NAMES)
def test_the_base_forgets_its_activations_and_the_gradients_are_the_same(kind: str) -> None:
    plain, again = cases.task(kind), cases.task(kind)
    for task in (plain, again):
        cases.randomised(task.network, 0.1)  # where all starts at zero most gradients are
    count = recompute(again.network)
    blocks = {"controlnet": 2}.get(kind, 1)  # a ControlNet has blocks of its own
    assert count > blocks * 8
    (kept, wanted), (less, found) = (kept_and_gradients(task) for task in (plain, again))
    assert wanted
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert less < kept / 2


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_dice_are_thrown_again_alike_where_there_are_any(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout the state of the dice is left alone: a captured step could not read it."""
    read: list[int] = []
    original = torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: read.append(1) or original())
    x, found = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1)), []
    for again in (False, True):
        torch.manual_seed(0)
        network = nn.Sequential(ResnetBlock(4, 4, groups=2, dropout=share))
        if again:
            recompute(network)
        network(x).square().sum().backward()
        found.append([p.grad for p in network.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert bool(read) == (share > 0)


def test_a_network_without_blocks_is_refused() -> None:
    with pytest.raises(PellucidError, match="recompute must be for a network of residual or transformer blocks"):
        recompute(nn.Linear(2, 2))
