"""What `--explain` says is what runs: collectives counted on real ranks, bytes weighed where they lie."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import adapt_cases
import crew
import pytest
import torch
import torch.distributed as dist
from image_text_worker import task_of
from rank_worker import Images, config_of
from scene_cases import CPU, SCENES, built, text_table, tokenizer, write_parts
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid import PellucidError
from pellucid.train.config import chosen
from pellucid.train.explain import Explanation, beside, explain, of_run
from pellucid.train.kinds import TASKS
from pellucid.train.optimizer import local
from pellucid.train.ranks import Ranks
from pellucid.train.text_denoiser import TextDenoiserConfig
from pellucid.train.trainer import Trainer

# The operations of torch.distributed, and which argument is the whole tensor.
WATCHED = {
    "allreduce_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
}


class Seen(TorchDispatchMode):
    """Writes down every collective of this thread: (operation, bytes of its whole tensor)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            operation, place = WATCHED[func._opname]
            self.found[operation, sum(t.numel() * t.element_size() for t in tensors_of(args[place]))] += 1
        return func(*args, **(kwargs or {}))


def tensors_of(given: Any) -> list[Tensor]:
    """A tensor, or those of nested lists."""
    return [given] if isinstance(given, Tensor) else [tensor for one in given for tensor in tensors_of(one)]


def told(explanation: Explanation, *, log: bool = False) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    for row in explanation.of_log if log else explanation.collectives:
        found[row.operation, row.size] += row.times
    return found


def weighed(trainer: Trainer) -> dict[str, int]:
    """What this rank really holds."""

    def size(tensors: Any) -> int:
        return sum(local(t).numel() * t.element_size() for t in tensors)

    moments = [s[k] for s in trainer.optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    return {
        "weights": size(trainer.network.parameters()),
        "moments of AdamW": size(moments),
        "running means, 2": size(t for means in trainer.ema.means.values() for t in means.values()),
        "gradients": size(p.grad for p in trainer.network.parameters() if p.grad is not None),
    }


def count_a_run(folder: Path, changes: dict[str, Any], words: Path | None = None) -> int:
    """Two steps of the real trainer, of a denoiser or, with words, of an image-text pair: they, and a line of its log,
    are counted."""
    config = config_of({**changes, "log": {"every": 2, "checkpoint_every": 0}})
    task, plain = (task_of(words) if words else chosen(config.task, TASKS, "task").build(3, CPU) for _ in range(2))
    with Ranks.join(config.engine.strategy, "cpu", timeout=60) as ranks:
        source = SCENES.open() if words else Images()
        trainer = Trainer(config, folder, ranks, task=task, source=source, quiet=True)
        expected = of_run(plain, config, ranks.world)
        for step in (0, 1):
            with Seen() as seen:
                trainer.step(step, trainer.prepare(step))
            assert seen.found == told(expected), (step, seen.found - told(expected), told(expected) - seen.found)
        with Seen() as seen:
            trainer.report(2, None)
        assert seen.found == told(expected, log=True)
        held, said = weighed(trainer), {row.what.split(", whole")[0]: row.per_rank for row in expected.held}
        for what, size in held.items():
            most = max(crew.from_all(size))
            if what != "gradients" or config.engine.accumulate == 1:  # afterwards they are shards again
                assert most == said[what], (what, most, said[what])
    return 0


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "engine",
    [
        {"strategy": "ddp"},
        {"strategy": "ddp", "accumulate": 2},
        {"strategy": "fsdp"},
        {"strategy": "fsdp", "accumulate": 2, "dtype": "bf16"},
    ],
    ids=["ddp", "ddp-accumulate", "fsdp", "fsdp-accumulate-bf16"],
)
def test_collectives_and_bytes_of_a_step_are_those_that_ran(world: int, engine: dict[str, Any], tmp_path: Path) -> None:
    says = tmp_path / "says"
    codes = crew.run(world, count_a_run, tmp_path / "run", {"engine": engine, "batch": 12}, says=says)
    assert codes == [0] * world, crew.said(says)


@pytest.mark.parametrize(
    "engine",
    [{"accumulate": 2}, {"dtype": "bf16"}],
    ids=["accumulate", "bf16"],
)
def test_a_contrastive_loss_gathers_what_is_told(engine: dict[str, Any], tmp_path: Path) -> None:
    tokenizer().save(tmp_path / "words")
    args, says = (tmp_path / "run", {"engine": engine, "batch": 12}, tmp_path / "words"), tmp_path / "says"
    assert crew.run(2, count_a_run, *args, says=says) == [0, 0], crew.said(says)


# What stands beside the trained network


def tensors_under(held: Any, seen: set[int]) -> Iterator[Tensor]:
    """Parameters and buffers of every module that an object leads to, found by walking through its attributes."""
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, nn.Module):
        yield from (t for t in (*held._parameters.values(), *held._buffers.values()) if t is not None)
    inner: Iterable[Any] = ()
    if isinstance(held, dict):
        inner = held.values()
    elif isinstance(held, list | tuple):
        inner = held
    elif isinstance(held, nn.Module) or type(held).__module__.startswith("pellucid."):
        inner = getattr(held, "__dict__", {}).values()
    for one in inner:
        yield from tensors_under(one, seen)


def weigh(tensors: Iterable[Tensor]) -> int:
    """Bytes, each address once."""
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def rows_of(task: Any) -> dict[str, int]:
    found = of_run(task, config_of({"ema": []}), 2)
    assert all(row.how == "replicated" for row in found.held)
    names = [row.what for row in found.held]
    assert len(set(names)) == len(names)
    return {row.what: row.per_rank for row in found.held}


@pytest.mark.parametrize("kind", adapt_cases.NAMES)
def test_all_that_an_adapters_task_holds_is_weighed_once(kind: str) -> None:
    """A LoRA's tree shares the base's weights; an IP-Adapter has eyes besides."""
    task = adapt_cases.task(kind)
    rows = rows_of(task)
    held = sum(size for what, size in rows.items() if what in ("weights", "buffers") or what.startswith("frozen "))
    assert held == weigh(tensors_under(task, set()))
    assert rows["frozen UNet"] == weigh(task.base.network.parameters())
    assert {"frozen AutoencoderKL", "frozen CLIPTextEncoder"} < set(rows)
    assert ("frozen CLIPVisionEncoder" in rows) == (kind == "ip_adapter")


@pytest.mark.parametrize("trained", [True, False])
def test_a_text_denoiser_holds_its_vae_and_an_encoder_that_is_not_trained(trained: bool, tmp_path: Path) -> None:
    write_parts(tmp_path)
    task = built(TextDenoiserConfig, text_table(tmp_path))
    if not trained:
        task.save(task.network, tmp_path / "model")
        task = built(TextDenoiserConfig, text_table(tmp_path, text={"folder": str(tmp_path / "model")}))
    rows = rows_of(task)
    assert rows["frozen AutoencoderKL"] == weigh(task.vae.parameters())
    assert ("frozen CLIPTextEncoder" in rows) == (not trained)
    frozen = sum(size for what, size in rows.items() if what.startswith("frozen "))
    assert frozen + rows["weights"] + rows.get("buffers", 0) == weigh(tensors_under(task, set()))


def test_frozen_weights_that_two_share_or_the_trained_network_has_count_once() -> None:
    network, other = nn.Linear(8, 8), nn.Linear(8, 8)
    both = nn.ModuleList([network, other])
    (row,) = beside(network, (both, other, network))
    assert (row.what, row.how, row.whole, row.per_rank) == ("frozen ModuleList", "replicated", 288, 288)
    with torch.device("meta"):
        assert [row.whole for row in beside(nn.Linear(8, 8), (nn.Linear(8, 8), nn.Linear(8, 4)))] == [288, 144]


def wide() -> nn.Module:
    """54 MB of weights: more than one of DDP's buckets. The embedding is frozen, and so in none of them."""
    network = nn.Sequential(nn.Linear(100, 1500), *(nn.Linear(1500, 1500) for _ in range(6)), nn.Linear(1500, 10))
    network[1].weight.requires_grad_(False)
    return network


def count_buckets() -> int:
    with Ranks.join("ddp", "cpu", timeout=60) as ranks:
        network = wide()
        wrapped, expected = ranks.wrap(network), explain(network, ranks.world)
        assert len(expected.collectives) == 4  # three buckets, and which parameters were used
        for _ in range(3):  # at the second step DDP would deal its buckets anew
            with Seen() as seen:
                wrapped(torch.ones(1, 100)).sum().backward()
            assert seen.found == told(expected), (seen.found, told(expected))
    return 0


def test_buckets_are_those_of_ddp_at_every_step(tmp_path: Path) -> None:
    says = tmp_path / "says"
    assert crew.run(2, count_buckets, says=says) == [0, 0], crew.said(says)


def written() -> int:
    """Bytes that this process has handed to the system, sockets included."""
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


def weigh_the_wire() -> int:
    size = 12_000_000
    with Ranks.join("ddp", "cpu", timeout=60) as ranks:
        n, whole = ranks.world, torch.ones(size // 4)
        part = torch.ones(size // 4 // n)
        dist.all_reduce(torch.ones(n))  # connects
        before = written()
        dist.all_reduce(whole)
        between = written()
        dist.all_gather_into_tensor(whole, part)
        after = written()
        for sent, expected in ((between - before, 2 * (n - 1) * size / n), (after - between, (n - 1) * size / n)):
            assert expected <= sent < 1.01 * expected + 4096, (sent, expected)
    return 0


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this system does not count what a process writes")
@pytest.mark.parametrize("world", [2, 3])
def test_a_ring_sends_what_its_formula_says(world: int, tmp_path: Path) -> None:
    """gloo's rings, weighed by the kernel; one percent and a page are its headers. Its reduce-scatter is an all-reduce,
    which sends twice what NCCL's ring does, and is not weighed."""
    says = tmp_path / "says"
    assert crew.run(world, weigh_the_wire, says=says) == [0] * world, crew.said(says)


def test_one_rank_sends_nothing_and_holds_all() -> None:
    network = nn.Linear(10, 3)
    for strategy in ("ddp", "fsdp"):
        alone = explain(network, 1, strategy, ema=(5.0,))
        assert alone.collectives == alone.of_log == ()
        assert alone.parameters == alone.trained == 33
        assert alone.bytes_per_rank == 33 * 4 * (1 + 1 + 2 + 1)
        assert all(row.how == "replicated" for row in alone.held)


def test_shares_of_more_ranks_are_smaller_and_their_sum_is_the_whole() -> None:
    network = nn.Linear(64, 64)
    for ranks in (2, 4, 8):
        sharded = explain(network, ranks, "fsdp")
        weights = sharded.held[0]
        assert weights.per_rank * ranks == weights.whole == 4 * (64 * 64 + 64)
        assert sharded.sent_per_step < 4 * explain(network, ranks, "ddp").sent_per_step


def test_it_is_plain_json_and_needs_no_weights() -> None:
    with torch.device("meta"):
        network = nn.Linear(1000, 1000)
    plain = json.loads(json.dumps(explain(network, 8, "fsdp").to_json()))
    assert plain["parameters"] == 1_001_000
    assert {row["operation"] for row in plain["collectives"]} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert plain["sent_per_step"] == sum(row["times"] * row["sent"] for row in plain["collectives"])


def test_a_lone_number_cannot_be_sharded_and_that_is_one_line() -> None:
    """The scale of an image-text encoder has no rows; torch would end with a traceback."""
    network = nn.Linear(4, 4)
    network.logit_scale = nn.Parameter(torch.tensor(1.0))
    explain(network, 2, "ddp")
    with pytest.raises(
        PellucidError, match=r"^engine.strategy must be ddp for a network with a lone number \(logit_scale\)"
    ):
        explain(network, 2, "fsdp")


def test_bad_numbers_are_one_line() -> None:
    with pytest.raises(PellucidError, match=r"^ranks, accumulate, log_every must be at least 1"):
        explain(nn.Linear(1, 1), 0)
