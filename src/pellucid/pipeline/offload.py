"""Offload: weights wait on the CPU and are on the device while they are used, by component or by block.

What waits is never changed and never copied back: a network that leaves gets its waiting tensors again. Two threads
that use one network share what is on the device; it leaves with the last of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pellucid.models.blocks import Downsample, PixelAttention, ResnetBlock, TransformerBlock, Upsample
from pellucid.models.dit import DiT
from pellucid.models.dit_blocks import Block
from pellucid.pipeline.tracker import METER

BLOCKS = (ResnetBlock, TransformerBlock, PixelAttention, Downsample, Upsample, Block)
# What a network takes from its blocks without calling them; it stays with the rest of the network.
OUTSIDE = ("norm1.emb", "scale_shift_table")


class Slot(NamedTuple):
    """The place of a tensor in a module: a registry of parameters or buffers, and the name in it."""

    registry: dict[str, Any]
    name: str

    @property
    def key(self) -> tuple[int, str]:
        return id(self.registry), self.name


@dataclass
class Guest:
    """A slot whose tensor is on the device: what waits for it, and how many use it."""

    slot: Slot
    waiting: Tensor | None  # None: it was on the device before
    users: int = 0


@dataclass
class Copy:
    """A tensor on the device, for all slots that hold the same waiting one."""

    tensor: Tensor
    users: int = 0


class Guests:
    """Who is on a device, counted by user."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.slots: dict[tuple[int, str], Guest] = {}
        self.copies: dict[int, Copy] = {}
        self.own = threading.local()

    def bring(self, slots: Iterable[Slot]) -> None:
        """All of them, or none where the device is full."""
        meter = METER.get()
        come: list[Slot] = []
        with self.lock, nullcontext() if meter is None else meter.weighing():
            try:
                for slot in slots:
                    guest = self.slots.get(slot.key) or self.enter(slot)
                    guest.users += 1
                    come.append(slot)
            except BaseException:
                self.send_back(come)
                raise

    def enter(self, slot: Slot) -> Guest:
        tensor = slot.registry[slot.name]
        if tensor.device.type == self.device.type:
            guest = Guest(slot, None)
        else:
            copy = self.copies.get(id(tensor))
            if copy is None:
                copy = self.copies[id(tensor)] = Copy(moved(tensor, self.device))
            copy.users += 1
            slot.registry[slot.name] = copy.tensor
            guest = Guest(slot, tensor)
        self.slots[slot.key] = guest
        return guest

    def send_back(self, slots: Iterable[Slot]) -> None:
        with self.lock:
            for slot in slots:
                guest = self.slots[slot.key]
                guest.users -= 1
                if guest.users == 0:
                    del self.slots[slot.key]
                    self.leave(guest)

    def leave(self, guest: Guest) -> None:
        if guest.waiting is None:
            return
        guest.slot.registry[guest.slot.name] = guest.waiting
        copy = self.copies[id(guest.waiting)]
        copy.users -= 1
        if copy.users == 0:
            del self.copies[id(guest.waiting)]

    @contextmanager
    def staying(self, slots: list[Slot]) -> Iterator[None]:
        self.bring(slots)
        try:
            yield
        finally:
            self.send_back(slots)

    # --- hooks of blocks ------------------------------------------------------------------------------------------

    @property
    def visits(self) -> list[tuple[nn.Module, list[Slot]]]:
        """The blocks that this thread is in."""
        if not hasattr(self.own, "visits"):
            self.own.visits = []
        return self.own.visits

    def open(self, module: nn.Module, args: Any) -> None:
        slots = slots_of(module)
        self.bring(slots)
        self.visits.append((module, slots))

    def close(self, module: nn.Module, args: Any, out: Any) -> None:
        """Also after an error; a block that could not be brought has nothing to send back."""
        if self.visits and self.visits[-1][0] is module:
            self.send_back(self.visits.pop()[1])


GUESTS: dict[torch.device, Guests] = {}
GUESTS_LOCK = threading.Lock()


def guests_of(device: torch.device) -> Guests:
    with GUESTS_LOCK:
        return GUESTS.setdefault(device, Guests(device))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; from pinned memory without waiting, since what uses it waits in the same stream."""
    copy = tensor.detach().to(device, non_blocking=True)
    return nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy


def slots_of(network: nn.Module, without: Iterable[nn.Module] = ()) -> list[Slot]:
    """Every tensor of a network, except those of some of its parts, which are visited apart."""
    left = set(map(id, without))
    found: dict[tuple[int, str], Slot] = {}

    def visit(module: nn.Module, path: str) -> None:
        if id(module) in left:
            own = [name for name in OUTSIDE if isinstance(module, Block)]
            for part in own:
                add(module, part)
            return
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is not None:
                    slot = Slot(registry, name)
                    found[slot.key] = slot
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}.{name}")

    def add(module: nn.Module, part: str) -> None:
        """A tensor or a part inside of a block that the network itself uses."""
        raise NotImplementedError

    visit(network, "")
    return list(found.values())
