"""Networks of all adapters: nothing at first, less loss later, a base that stays; only what is trained is kept."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import adapt_cases as cases
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pellucid.train.adapters import AdapterTask
from pellucid.train.config import LogConfig, OptimizerConfig, TrainConfig
from pellucid.train.ranks import Ranks
from pellucid.train.sampling import SamplingConfig
from pellucid.train.trainer import Trainer

every_kind = pytest.mark.parametrize("kind", cases.NAMES)
each_network = pytest.mark.parametrize("kind", ["lora", "controlnet", "ip_adapter"])
RATES = {"lora": 2e-2, "text_lora": 2e-2, "controlnet": 3e-3, "ip_adapter": 1e-2}


def bits(task: AdapterTask) -> dict[str, Tensor]:
    """All tensors of the base, copied."""
    parts = task.base.parts
    found: dict[str, nn.Module] = {"network": parts.network, "vae": parts.vae}
    found |= {f"text{i}": one for i, one in enumerate(parts.text_encoders)}
    if hasattr(task, "eyes"):
        found["eyes"] = task.eyes
    return {f"{n}.{k}": v.clone() for n, one in found.items() for k, v in one.state_dict().items()}


def base_loss(task: AdapterTask) -> float:
    """The loss of the base alone at the same question."""
    asked = task.prepare(cases.examples(), cases.draws())
    question = task.objective.pose(asked["x0"], asked["noise"], asked["numbers"])
    text = {"context": task.base.conditions(cases.WORDS, task.masks(cases.draws(), cases.CPU)["text"])["context"]}
    return float(task.objective.grade(question, task.base.network(question.x, question.time, **text)).loss)


# --- the start and the fit ----------------------------------------------------------------------------------------


@every_kind
def test_a_new_adapter_changes_nothing_and_a_trained_one_lowers_the_loss(kind: str) -> None:
    task = cases.task(kind)
    before, alone = bits(task), base_loss(task)
    losses = cases.fit(task, 20, RATES[kind])
    assert losses[0] == alone  # exactly the base
    assert losses[-1] < 0.98 * losses[0]
    after = bits(task)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@every_kind
def test_what_is_trained_is_all_that_the_network_holds(kind: str) -> None:
    task = cases.task(kind)
    cases.randomised(task.network)
    loss = cases.loss_of(task)
    loss.loss.backward()
    held = dict(task.network.named_parameters())
    assert held.keys() == task.network.state_dict().keys()
    assert all(p.requires_grad and p.grad is not None and p.grad.abs().sum() > 0 for p in held.values())
    assert not any(t.requires_grad for one in (task.base.network, task.base.parts.vae) for t in one.parameters())
    own = {t.data_ptr() for t in held.values()}
    assert not own & {t.data_ptr() for t in task.base.network.parameters()}


@each_network
def test_a_seed_decides_the_new_weights(kind: str) -> None:
    state, same, other = (cases.task(kind, seed).network.state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(state[name], same[name]) for name in state)
    assert any(not torch.equal(state[name], other[name]) for name in state)


# --- wrapped, copied, in another precision ------------------------------------------------------------------------


@pytest.mark.slow
@every_kind
def test_it_compiles_as_one_graph(kind: str) -> None:
    task = cases.task(kind)
    cases.randomised(task.network)
    plain = cases.loss_of(task)
    torch._dynamo.reset()
    compiled = cases.loss_of(task, torch.compile(task.network, backend="eager", fullgraph=True))
    assert torch.allclose(plain.loss, compiled.loss, rtol=1e-5)
    first, second = (torch.autograd.grad(one.loss, list(task.network.parameters())) for one in (plain, compiled))
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(first, second, strict=True))


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@each_network
def test_ddp_sees_the_gradients(kind: str, alone: None) -> None:
    task = cases.task(kind)
    cases.randomised(task.network)
    plain = torch.autograd.grad(cases.loss_of(task).loss, list(task.network.parameters()))
    cases.loss_of(task, DistributedDataParallel(task.network)).loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, task.network.parameters(), strict=True))


@every_kind
def test_a_copy_has_weights_of_its_own_and_the_same_base(kind: str) -> None:
    task = cases.task(kind)
    cases.randomised(task.network)
    twin = copy.deepcopy(task.network)
    assert twin.base.held is task.network.base.held or kind.endswith("lora")
    before = cases.loss_of(task, twin).loss.item()
    assert before == cases.loss_of(task).loss.item()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert cases.loss_of(task, twin).loss.item() == pytest.approx(base_loss(task), rel=1e-6)
    assert cases.loss_of(task).loss.item() == before


@each_network
def test_a_base_in_bfloat16_trains_float32(kind: str) -> None:
    exact, half = cases.task(kind), cases.task(kind, precision="bf16")
    for task in (exact, half):
        cases.randomised(task.network)
    assert {p.dtype for p in half.base.network.parameters()} == {torch.bfloat16}
    graded = cases.loss_of(half)
    graded.loss.backward()
    assert {p.grad.dtype for p in half.network.parameters()} == {torch.float32}
    near = pytest.approx(cases.loss_of(exact).loss.item(), rel=0.02)  # 8 bits of mantissa
    assert graded.loss.item() == near
    with torch.autocast("cpu", torch.bfloat16):
        assert cases.loss_of(exact).loss.item() == near
        assert cases.loss_of(half).loss.item() == near


# --- a run --------------------------------------------------------------------------------------------------------


def run(kind: str, folder: Path, *stops: int | None) -> Trainer:
    config = TrainConfig(
        task={"kind": kind},
        data={"kind": "examples"},
        steps=4,
        batch=2,
        ema=(16.0,),
        optimizer=OptimizerConfig(rate=1e-2, warmup=2),
        log=LogConfig(every=2, checkpoint_every=2, tensorboard=False),
    )
    trainer = None
    for stop in stops:
        trainer = Trainer(config, folder, Ranks(), task=cases.task(kind), source=cases.Examples(), quiet=True)
        trainer.run(stop)
    assert trainer is not None
    return trainer


@each_network
def test_a_run_that_stops_goes_on_exactly_and_keeps_no_base(kind: str, tmp_path: Path) -> None:
    whole, again = run(kind, tmp_path / "whole", None), run(kind, tmp_path / "parts", 2, None)
    state, other = whole.state(), again.state()
    assert state.keys() == other.keys()
    assert all(torch.equal(state[name], other[name]) for name in state)
    trained = list(whole.network.parameters())
    wanted = 4 * sum(p.numel() for p in trained) + len(trained) + 1  # weights, moments, means; counts of steps, images
    assert sum(t.numel() for t in state.values()) == wanted
    assert (tmp_path / "whole" / "model").is_dir()


@each_network
def test_sample_images_are_those_of_a_seed(kind: str) -> None:
    task = cases.task(kind, sampling=SamplingConfig("ddim", "trailing", 2, 3.0))
    assert task.images(task.network, 4, 0) is None  # nothing was shown yet
    task.prepare(cases.examples(), cases.draws())
    made = task.images(task.network, 4, 0)
    assert made is not None
    assert made.shape == (4, 3, 16, 16)
    assert 0 <= float(made.min()) < float(made.max()) <= 1
    assert torch.equal(made, task.images(task.network, 4, 0))
    assert not torch.equal(made, task.images(task.network, 4, 1))
    assert torch.allclose(made[:2], task.images(task.network, 2, 0), atol=1e-5)
