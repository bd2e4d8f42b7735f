"""Ranks: who joins, what is wrapped, and that sharded sums, norms and means are those of the whole."""

from __future__ import annotations

import math
from pathlib import Path

import crew
import pytest
import torch
import torch.distributed as dist
from rank_worker import Images, config_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pellucid import PellucidError
from pellucid.models.dit_blocks import Block
from pellucid.train import ranks as ranks_module
from pellucid.train.optimizer import EMA, local
from pellucid.train.ranks import Ranks, groups, placed
from pellucid.train.trainer import Trainer


class Layer(nn.Module):
    """A block with rows that two and three ranks do not share evenly, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(5, 7), nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.outside(self.inside(x).tanh())


class Small(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2)  # no loss reaches it
        self.register_buffer("shift", torch.randn(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x + self.shift)
        return self.head(x)


def small(ranks: Ranks) -> tuple[Small, nn.Module]:
    """Every rank begins with weights of its own; wrapped, they are those of the first."""
    ranks_module.BLOCKS = (Layer,)
    network = Small(ranks.rank)
    return network, ranks.wrap(network)


def data(rank: int, micro: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * rank + micro))


def whole_gradient(world: int, micros: int) -> dict[str, Tensor]:
    """The oracle: one process, the mean over all parts."""
    network = Small(0)
    parts = [network(data(rank, micro)).square().mean() for rank in range(world) for micro in range(micros)]
    torch.stack(parts).mean().backward()
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# Alone


def test_one_rank_wraps_and_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ranks_module.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for strategy in ("ddp", "fsdp"):
        with Ranks.join(strategy, "cpu") as ranks:
            network = nn.Linear(2, 2)
            assert ranks.wrap(network) is network
            assert ranks.whole(network) is network
            assert ranks.is_first
            assert torch.equal(ranks.mean(torch.tensor([2.0])), torch.tensor([2.0]))
            ranks.barrier()
            assert not dist.is_initialized()


@pytest.mark.parametrize("limit", [0.1, 1e9, math.inf])
def test_clipping_is_that_of_torch(limit: float) -> None:
    mine, theirs = Small(0), Small(0)
    for network in (mine, theirs):
        network(data(0, 0)).square().mean().backward()
    norm = Ranks().clip(mine, limit)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), limit if math.isfinite(limit) else 1e9)
    assert torch.equal(norm, expected)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)
    assert Ranks().clip(nn.Linear(1, 1), 1.0) == 0


def test_bad_surroundings_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ({"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"}):
        with monkeypatch.context() as patch:
            for name in ranks_module.VARIABLES:
                patch.delenv(name, raising=False)
            for name, value in given.items():
                patch.setenv(name, value)
            with pytest.raises(PellucidError, match=r"^environment must be[^\n]*$"):
                Ranks.join("ddp", "cpu")
    with pytest.raises(PellucidError, match="device must be cpu, cuda or cuda:N"):
        placed("gpu", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert placed("cuda", 0) == torch.device("cuda:0")
    with pytest.raises(PellucidError, match=r"one of 1 GPUs; got 'cuda:1'\. Start fewer ranks"):
        placed("cuda", 1)


def test_blocks_of_every_network_are_sharded_each_on_its_own() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block.__new__(Block) for _ in range(2))
            for block in self.blocks:
                nn.Module.__init__(block)
            self.blocks[0].weight = nn.Parameter(torch.zeros(2))

    assert [name for name, _ in groups(Holder())] == ["blocks.0", ""]  # the second has no weights


# On several


def gradients_agree(strategy: str, micros: int) -> int:
    with Ranks.join(strategy, "cpu", timeout=60) as ranks:
        network, wrapped = small(ranks)
        for micro in range(micros):
            with ranks.syncing(wrapped, micro == micros - 1):
                (wrapped(data(ranks.rank, micro)).square().mean() / micros).backward()
        expected = whole_gradient(ranks.world, micros)
        for name, parameter in network.named_parameters():
            if name in expected:
                assert torch.allclose(full(parameter.grad), expected[name], rtol=1e-5, atol=1e-7), name
            else:
                assert parameter.grad is None or not full(parameter.grad).any(), name
        wanted = torch.stack([g.norm() for g in expected.values()]).norm()
        norm = ranks.clip(network, 0.1)
        assert torch.allclose(norm, wanted, rtol=1e-6)
        clipped = torch.stack([full(p.grad).norm() for p in network.parameters() if p.grad is not None]).norm()
        assert torch.allclose(clipped, torch.tensor(0.1), rtol=1e-4)
        everywhere = torch.stack(crew.from_all(norm))
        assert torch.equal(everywhere, everywhere[:1].expand(ranks.world))  # to the bit
        assert torch.equal(ranks.mean(torch.tensor([1.0 + ranks.rank])), torch.tensor([(ranks.world + 1) / 2]))
    return 0


@pytest.mark.parametrize(
    ("strategy", "world", "micros"), [("ddp", 2, 1), ("ddp", 3, 2), ("fsdp", 2, 1), ("fsdp", 3, 2)]
)
def test_gradients_and_norms_of_ranks_are_those_of_one_process(
    strategy: str, world: int, micros: int, tmp_path: Path
) -> None:
    """To 1e-5: the same sums in another order, of float32 numbers."""
    says = tmp_path / "says"
    assert crew.run(world, gradients_agree, strategy, micros, says=says) == [0] * world, crew.said(says)


def means_agree() -> int:
    with Ranks.join("fsdp", "cpu", timeout=60) as ranks:
        network, _ = small(ranks)
        alone = Small(0)
        shared, own = EMA(network, (8.0, 40.0)), EMA(alone, (8.0, 40.0))
        for step in range(5):
            for (_, dealt), (_, plain) in zip(network.named_parameters(), alone.named_parameters(), strict=True):
                with torch.no_grad():
                    plain.add_(torch.randn(plain.shape, generator=torch.Generator().manual_seed(step)))
                    shards = list(plain.detach().chunk(ranks.world))
                    if ranks.rank < len(shards):
                        local(dealt).copy_(shards[ranks.rank])
            shared.update(4)
            own.update(4)
        for length in (8.0, 40.0):
            for name, mean in own.weights(length).items():
                assert torch.equal(full(shared.weights(length)[name]), mean), name
        before = {name: full(p.detach()).clone() for name, p in network.named_parameters()}
        with shared.inside(8.0):
            whole = ranks.whole(network)
        if ranks.is_first:
            assert type(whole) is Small
            held = dict(own.weights(8.0))
            assert all(torch.equal(tensor, held[name]) for name, tensor in whole.state_dict().items())
            assert torch.equal(whole.shift, alone.shift)  # a buffer that no state has
            assert whole(data(0, 0)).shape == (4, 3)
        assert all(torch.equal(full(p.detach()), before[name]) for name, p in network.named_parameters())
        again = EMA(network, (8.0, 40.0))
        again.restore(shared.state())
        assert all(
            torch.equal(local(a), local(b))
            for a, b in zip(again.state().values(), shared.state().values(), strict=True)
        )
    return 0


def test_running_means_of_shards_are_the_shards_of_the_means(tmp_path: Path) -> None:
    says = tmp_path / "says"
    assert crew.run(2, means_agree, says=says) == [0, 0], crew.said(says)


def lose_one(kind: str) -> int:
    """The second rank goes away without a word."""
    try:
        with Ranks.join("ddp", "cpu", timeout=2) as ranks:
            ranks.barrier()
            if ranks.rank == 1:
                if kind == "silent":
                    import time

                    time.sleep(4)
                return 7
            ranks.mean(torch.zeros(1))
    except PellucidError as error:
        print(f"{error.code}: {error}")
        return 2
    return 0


@pytest.mark.parametrize("kind", ["gone", "silent"])
def test_a_rank_that_hears_nothing_says_so_in_one_line(kind: str, tmp_path: Path) -> None:
    says = tmp_path / "says"
    assert crew.run(2, lose_one, kind, says=says) == [2, 7], crew.said(says)
    lines = Path(f"{says}.0").read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("ranks-lost: rank 0 of 2 must hear from the others")
    assert lines[0].endswith("it continues from its last checkpoint.")


class Marked(Images):
    """As a source that met unreadable images: one of its rank's own, and one that every rank met."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.unreadable = {f"{rank}.png": "torn", "both.png": "torn"}


def count_skipped(folder: Path) -> int:
    with Ranks.join("ddp", "cpu", timeout=60) as ranks:
        done = Trainer(config_of({"steps": 1}), folder, ranks, source=Marked(ranks.rank), quiet=True).run()
        assert done.skipped == ranks.world + 1
    return 0


@pytest.mark.parametrize("world", [1, 2])
def test_skipped_images_of_all_ranks_are_counted_each_once(world: int, tmp_path: Path) -> None:
    says = tmp_path / "says"
    assert crew.run(world, count_skipped, tmp_path / "run", says=says) == [0] * world, crew.said(says)
