"""What ranks hold and what they send, before anything runs: `pellucid train CONFIG --explain`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.train.config import TrainConfig
from pellucid.train.kinds import Task
from pellucid.train.objective import ByLevel
from pellucid.train.optimizer import floats
from pellucid.train.ranks import Strategy, check_rows, groups

_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # DDP's own limits, bytes
_FLOAT, _INT, _DOUBLE = 4, 4, 8
Operation = Literal["all-reduce", "all-gather", "reduce-scatter"]
_RING = {
    "all-reduce": "2 (n − 1) / n of its bytes",
    "all-gather": "(n − 1) / n of its bytes",
    "reduce-scatter": "(n − 1) / n of its bytes",
}


@dataclass(frozen=True)
class MemoryItem:
    """Bytes of one kind: of all together, and on the rank that has most of them."""

    what: str
    how: Literal["replicated", "sharded"]
    whole: int
    per_rank: int


@dataclass(frozen=True)
class Collective:
    """A collective: how large its whole tensor is, and what each rank sends, and receives, for it in a ring."""

    operation: Operation
    what: str
    when: str
    times: int  # in a step, or in the window of a log where `when` says so
    size: int  # bytes of the whole tensor, padding included
    sent: int  # bytes, by each rank, each time


@dataclass(frozen=True)
class Explanation:
    """What a run would do with its ranks. `collectives` are those of one optimiser step, `of_log` those of one line."""

    ranks: int
    strategy: Strategy
    accumulate: int
    parameters: int
    trained: int
    held: tuple[MemoryItem, ...]
    collectives: tuple[Collective, ...]
    of_log: tuple[Collective, ...]

    @property
    def bytes_per_rank(self) -> int:
        """What is kept between steps; activations and what is gathered for a while come on top."""
        return sum(held.per_rank for held in self.held)

    @property
    def sent_per_step(self) -> int:
        return sum(c.times * c.sent for c in self.collectives)

    def to_json(self) -> dict[str, Any]:
        sums = {"bytes_per_rank": self.bytes_per_rank, "sent_per_step": self.sent_per_step, "ring": _RING}
        return {**asdict(self), **sums}


def explain(
    network: nn.Module,
    ranks: int,
    strategy: Strategy = "ddp",
    *,
    accumulate: int = 1,
    dtype: torch.dtype | None = None,
    ema: Sequence[float] = (),
    log_every: int = 1,
) -> Explanation:
    """Of a network that is not wrapped (it may be on the meta device). `dtype`: what `fsdp` gathers in."""
    if ranks < 1 or accumulate < 1 or log_every < 1:
        got = (ranks, accumulate, log_every)
        raise PellucidError(rule("ranks, accumulate, log_every", "at least 1", got), "explain")
    share = ranks if strategy == "fsdp" else 1
    trained = [p for p in network.parameters() if p.requires_grad]
    moves: tuple[Collective, ...] = ()
    if ranks > 1:
        moves = _of_ddp(trained, ranks) if strategy == "ddp" else _of_fsdp(network, ranks, accumulate, dtype)
    return Explanation(
        ranks=ranks,
        strategy=strategy,
        accumulate=accumulate,
        parameters=sum(p.numel() for p in network.parameters()),
        trained=sum(p.numel() for p in trained),
        held=_kept(network, trained, share, accumulate, len(ema)),
        collectives=moves,
        of_log=_of_log(ranks, log_every) if ranks > 1 else (),
    )


def of_run(task: Task, config: TrainConfig, ranks: int) -> Explanation:
    """Of a run by its config: including the frozen networks of its task, and what its loss sends."""
    engine = config.engine
    found = explain(
        task.network,
        ranks,
        engine.strategy,
        accumulate=engine.accumulate,
        dtype=torch.bfloat16 if engine.dtype == "bf16" else None,
        ema=config.ema,
        log_every=config.log.every,
    )
    held = found.held + beside(task.network, getattr(task, "frozen", ()))
    if ranks == 1:
        return replace(found, held=held)
    moves = _of_loss(getattr(task, "gathered", {}), config.batch // engine.accumulate, engine.accumulate, ranks)
    return replace(found, held=held, collectives=found.collectives + moves)


def beside(network: nn.Module, frozen: Iterable[nn.Module]) -> tuple[MemoryItem, ...]:
    """What every rank holds of frozen networks, each storage once, and not what the trained network has of it."""
    seen = {_storage(t) for t in (*network.parameters(), *network.buffers())}
    rows = []
    for one in frozen:
        new = {_storage(t): t for t in (*one.parameters(), *one.buffers()) if _storage(t) not in seen}
        seen |= set(new)
        size = sum(t.untyped_storage().nbytes() for t in new.values())
        rows.append(MemoryItem(f"frozen {type(one).__name__}", "replicated", size, size))
    return tuple(row for row in rows if row.whole)


def _storage(tensor: Tensor) -> int:
    """An identifier of the memory of a tensor, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def _kept(
    network: nn.Module, trained: list[nn.Parameter], share: int, accumulate: int, means: int
) -> tuple[MemoryItem, ...]:
    """Weights, gradients, moments and running means, divided by `share`."""
    how: Literal["replicated", "sharded"] = "sharded" if share > 1 else "replicated"
    parameters, buffers = list(network.parameters()), list(network.buffers())
    averaged = [tensor for _, tensor in floats(network)]
    apart = [tensor for tensor in averaged if not isinstance(tensor, nn.Parameter)]  # buffers are never sharded
    # Without a sync between micro-steps, gradients stay whole until the last of them.
    gradients = MemoryItem("gradients", how, _stored(trained), _stored(trained, share))
    if share > 1 and accumulate > 1:
        gradients = MemoryItem(
            "gradients, whole until the last micro-step", "replicated", _stored(trained), _stored(trained)
        )
    rows = [
        MemoryItem("weights", how, _stored(parameters), _stored(parameters, share)),
        MemoryItem("buffers", "replicated", _stored(buffers), _stored(buffers)),
        gradients,
        MemoryItem("moments of AdamW", how, 2 * _stored(trained), 2 * _stored(trained, share)),
    ]
    if means:
        weights = [tensor for tensor in averaged if isinstance(tensor, nn.Parameter)]
        whole, mine = _numbers(averaged), _numbers(weights, share) + _numbers(apart)
        rows.append(MemoryItem(f"running means, {means}", how, means * _FLOAT * whole, means * _FLOAT * mine))
    return tuple(row for row in rows if row.whole)


def _of_ddp(trained: Sequence[Tensor], ranks: int) -> tuple[Collective, ...]:
    """Gradients are averaged in buckets, the last parameters first; only in the last micro-step."""
    found = _buckets(trained)
    rows = [
        _moved("all-reduce", f"gradients, bucket {i} of {len(found)}", "backward", 1, _stored(bucket), ranks)
        for i, bucket in enumerate(reversed(found), 1)
    ]
    return (*rows, _moved("all-reduce", "which parameters were used", "backward", 1, _INT * len(trained), ranks))


def _of_fsdp(network: nn.Module, ranks: int, accumulate: int, dtype: torch.dtype | None) -> tuple[Collective, ...]:
    """A group's weights are gathered for the forward pass, and a block's again for the backward pass."""
    check_rows(network)
    rows = []
    for name, own in _owned(network):
        what = f"weights of {name or 'the rest'}"
        size = sum(_padded(p, ranks) * (dtype or p.dtype).itemsize for p in own)
        rows.append(_moved("all-gather", what, "forward", accumulate, size, ranks))
        if name:  # the rest stays gathered between the passes
            rows.append(_moved("all-gather", what, "backward", accumulate, size, ranks))
        size = _FLOAT * sum(_padded(p, ranks) for p in own if p.requires_grad)
        if size:
            rows.append(_moved("reduce-scatter", f"gradients of {name or 'the rest'}", "backward", 1, size, ranks))
    return (*rows, _moved("all-reduce", "norm of the gradient", "clip", 1, _FLOAT, ranks))


def _of_loss(gathered: Mapping[str, int], images: int, accumulate: int, ranks: int) -> tuple[Collective, ...]:
    """What a loss gathers of all images of a micro-step; its gradients are added up on the way back."""
    ways: tuple[tuple[Operation, str, str], ...] = (
        ("all-gather", "embeddings", "forward"),
        ("all-reduce", "embeddings' gradients", "backward"),
    )
    return tuple(
        _moved(operation, f"{what} of {name}", when, accumulate, _FLOAT * images * width, ranks)
        for operation, what, when in ways
        for name, width in gathered.items()
    )


def _of_log(ranks: int, every: int) -> tuple[Collective, ...]:
    sums = ByLevel().sums
    return (
        _moved("all-reduce", "losses of the window", "log", 1, _DOUBLE * every, ranks),
        _moved("all-reduce", "losses by noise level", "log", 1, sums.numel() * sums.element_size(), ranks),
    )


def _moved(operation: Operation, what: str, when: str, times: int, size: int, ranks: int) -> Collective:
    """In a ring of n ranks each sends (n − 1) / n of the bytes, and twice that where all shall have the sum."""
    rounds = 2 if operation == "all-reduce" else 1
    return Collective(operation, what, when, times, size, rounds * (ranks - 1) * size // ranks)


def _buckets(trained: Sequence[Tensor]) -> list[list[Tensor]]:
    """DDP's: parameters in their order, each dtype apart, a bucket closed when it has reached its limit."""
    done: list[list[Tensor]] = []
    filling: dict[torch.dtype, list[Tensor]] = {}
    limits: dict[torch.dtype, int] = {}
    for tensor in trained:
        held = filling.setdefault(tensor.dtype, [])
        held.append(tensor)
        if _stored(held) >= limits.get(tensor.dtype, _FIRST_BUCKET):
            done.append(filling.pop(tensor.dtype))
            limits[tensor.dtype] = _BUCKET
    return done + list(filling.values())


def _owned(network: nn.Module) -> list[tuple[str, list[nn.Parameter]]]:
    """The groups that `fsdp` makes, and the parameters of each that are in no other."""
    taken: set[int] = set()
    found = []
    for name, module in groups(network):
        own = [p for p in module.parameters() if id(p) not in taken]
        taken |= {id(p) for p in own}
        if own:
            found.append((name, own))
    return found


def _padded(tensor: Tensor, share: int) -> int:
    """Numbers of a tensor whose rows are dealt to `share` ranks in equal parts, empty rows included."""
    return -(-tensor.shape[0] // share) * share * tensor[:1].numel()


def _numbers(tensors: Iterable[Tensor], share: int = 1) -> int:
    """On the rank that has most: the first, when rows do not divide."""
    return sum(_padded(t, share) // share if share > 1 else t.numel() for t in tensors)


def _stored(tensors: Iterable[Tensor], share: int = 1) -> int:
    return sum(_numbers([t], share) * t.element_size() for t in tensors)
