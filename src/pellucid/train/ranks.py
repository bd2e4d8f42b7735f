"""The processes of a run: this one's rank, how the network is distributed, and what the ranks exchange."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import whole
from pellucid.interop.weights import some
from pellucid.models.blocks import ResnetBlock, TransformerBlock
from pellucid.models.clip import Layer
from pellucid.models.dit_blocks import Block
from pellucid.models.ip_adapter import ResamplerBlock
from pellucid.models.tiny_vae import Block as TinyBlock
from pellucid.train.optimizer import local

Strategy = Literal["ddp", "fsdp"]
Module = TypeVar("Module", bound=nn.Module)
BLOCKS = (ResnetBlock, TransformerBlock, Block, Layer, ResamplerBlock, TinyBlock)  # sharded each on its own
_TIMEOUT = 900.0  # seconds: the first rank alone draws images and checks checkpoints while the others wait
_MAX_RANKS = 100_000
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_SKETCH = "_pellucid_sketch"
# Groups are held until the process ends. DDP holds its group too, and where that hold is the last, the group is torn
# down with Python's lock taken, and waits forever for a thread that needs the lock to drop its last tensor.
_GROUPS: list[Any] = []


@dataclass(frozen=True)
class Ranks:
    """This process among all of a run. With one rank nothing is wrapped and nothing is sent.

    `ddp`: every rank has all weights, and gradients are averaged. `fsdp`: every rank keeps its share of weights,
    gradients and moments, and gathers a block's weights when it is computed.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    strategy: Strategy = "ddp"

    @staticmethod
    def join(strategy: Strategy, device: str | None = None, timeout: float = _TIMEOUT) -> Ranks:
        """As torchrun's environment says; without it, one rank. The device is a GPU where there is one."""
        given = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        rank, world, local = _ranks_in(given) if given else (0, 1, 0)
        place = placed(device, local)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        if world > 1 and not dist.is_initialized():
            try:
                _connect(place, rank, world, timedelta(seconds=timeout))
            except (dist.DistError, RuntimeError, ValueError) as error:
                line = f"rank {rank} of {world} must reach the others; it did not: {_first_line(error)}."
                raise PellucidError(line, "ranks-join") from None
        return Ranks(rank, world, local, place, strategy)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        return self.strategy == "fsdp" and self.world > 1

    # --- the network

    def wrap(self, network: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        """The network to be called in training; gradients are only shared for what goes through its forward.

        All ranks start from the first one's weights. `fsdp` changes the network in place: make the optimizer and the
        running means after it. With a `dtype`, its blocks are gathered in it; gradients are always added in float32.
        """
        if self.world == 1:
            return network
        if self.strategy == "fsdp":
            return self.shard(network, dtype)
        # find_unused_parameters keeps the first buckets. Otherwise DDP assigns them again after the first step, and
        # then three ranks or more would add in another order after a restart than without it.
        wrapped = DistributedDataParallel(
            network,
            device_ids=[self.local_rank] if self.device.type == "cuda" else None,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
        )
        wrapped.broadcast_buffers = False  # buffers are constants here
        return wrapped

    def shard(self, network: Module, dtype: torch.dtype | None) -> Module:
        check_rows(network)
        sketch = copy.deepcopy(network).to("meta")
        for tensor in (*network.parameters(), *network.buffers()):
            dist.broadcast(tensor.detach(), 0)
        mesh = init_device_mesh(self.device.type, (self.world,))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for _, module in groups(network):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        object.__setattr__(network, _SKETCH, sketch)  # not as a submodule: it has no part in the network
        return network

    @contextmanager
    def syncing(self, wrapped: nn.Module, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-step: gradients are only shared at the last one."""
        if isinstance(wrapped, DistributedDataParallel) and not last:
            with wrapped.no_sync():
                yield
            return
        if self.sharded:
            wrapped.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield

    @torch.no_grad()
    def clip(self, network: nn.Module, limit: float) -> Tensor:
        """Scales the gradient to a norm of at most `limit`; returns its norm before, of all ranks."""
        held = [local(p.grad) for p in network.parameters() if p.grad is not None]
        if not held:
            return torch.zeros((), device=self.device)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(held)))
        if self.sharded:
            squares = norm.square()
            dist.all_reduce(squares)
            norm = squares.sqrt()
        if math.isfinite(limit):
            torch._foreach_mul_(held, (limit / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def whole(self, network: Module) -> Module:
        """The network with all its weights, for sampling and saving; all ranks call it together.

        The network itself; with `fsdp` a copy on the CPU, which has weights on the first rank only.
        """
        sketch: Module | None = getattr(network, _SKETCH, None)
        if sketch is None:
            return network
        made = copy.deepcopy(sketch)
        for kind in ("named_parameters", "named_buffers"):
            for name, tensor in getattr(network, kind)(remove_duplicate=False):
                full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
                if self.is_first:
                    _put(made, name, full.cpu())
        return made

    # --- communication

    def mean(self, values: Tensor) -> Tensor:
        """Of all ranks, element by element."""
        if self.world == 1:
            return values
        held = values.detach().clone()
        dist.all_reduce(held)
        return held / self.world

    def union(self, names: Iterable[str]) -> set[str]:
        """The names of all ranks, each once."""
        held: list[list[str]] = [list(names)] * self.world
        if self.world > 1:
            dist.all_gather_object(held, held[0])
        return set().union(*held)

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(device_ids=[self.local_rank] if self.device.type == "cuda" else None)

    def leave(self) -> None:
        """Without waiting for the others: this also runs when something has failed."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if self.world > 1 and isinstance(error, RuntimeError) and _is_loss(error):
                line = f"rank {self.rank} of {self.world} must hear from the others; it does not: {_first_line(error)}."
                advice = "Start the run again: it continues from its last checkpoint."
                raise PellucidError(f"{line} {advice}", "ranks-lost") from None
        finally:
            self.leave()


def _ranks_in(given: Mapping[str, str]) -> tuple[int, int, int]:
    """The rank, how many there are, and the rank on this machine."""
    found = [whole(given.get(name, ""), _MAX_RANKS) for name in VARIABLES]
    if None in found:
        raise PellucidError(rule("environment", f"{', '.join(VARIABLES)} of torchrun, or none", given), "ranks-env")
    rank, world, local = (number or 0 for number in found)
    for name, number in (("RANK", rank), ("LOCAL_RANK", local)):
        if number >= world:
            must = f"below WORLD_SIZE, {world}"
            raise PellucidError(rule(name, must, number, "Ranks are counted from 0."), "ranks-env")
    return rank, world, local


def _connect(device: torch.device, rank: int, world: int, timeout: timedelta) -> None:
    """Makes the group of all ranks. On one machine each restart by torchrun uses a name of its own: torchrun's store
    outlives the workers, and gloo would otherwise connect to the addresses of those that were killed."""
    store, _, _ = next(iter(rendezvous("env://", rank, world, timeout=timeout)))
    store.set_timeout(timeout)
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend, place = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=place)
    _GROUPS.append(dist.group.WORLD)


def placed(device: str | None, local: int) -> torch.device:
    """A device for one rank of a machine: each has its own GPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        raise PellucidError(rule("device", "cpu, cuda or cuda:N", device), "device") from None
    if found.type != "cuda":
        return found
    index = local if found.index is None else found.index
    if index >= torch.cuda.device_count():
        advice = "Start fewer ranks, or pass --device cpu."
        raise PellucidError(
            rule("device", f"one of {torch.cuda.device_count()} GPUs", f"cuda:{index}", advice), "device"
        )
    return torch.device("cuda", index)


def check_rows(network: nn.Module) -> None:
    """Refuses what has no rows to be dealt to ranks."""
    lone = [name for name, weight in network.named_parameters() if not weight.ndim]
    if lone:
        must = f"ddp for a network with a lone number ({some(lone)})"
        raise PellucidError(rule("engine.strategy", must, "fsdp"), "strategy")


def groups(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """What `fsdp` gathers at a time: each block, and last the network with the rest."""
    blocks = [(name, m) for name, m in network.named_modules() if isinstance(m, BLOCKS) and m is not network]
    return [(name, m) for name, m in blocks if next(m.parameters(), None) is not None] + [("", network)]


def _put(network: nn.Module, name: str, tensor: Tensor) -> None:
    """Gives a network a tensor in the place of a parameter or buffer of the same name."""
    owner_name, _, leaf = name.rpartition(".")
    owner = network.get_submodule(owner_name)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=owner._parameters[leaf].requires_grad)
    else:
        owner._buffers[leaf] = tensor


def _is_loss(error: RuntimeError) -> bool:
    """Whether an error comes from the wires between ranks. gloo's are plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL", "c10d"))


def _first_line(error: BaseException) -> str:
    """In the error's words, without the place in torch's source that gloo puts first."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S*:\d+\]:? ", "", line).rstrip(".")
