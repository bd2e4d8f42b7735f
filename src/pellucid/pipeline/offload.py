"""Offload: weights wait on the CPU and are on the device while they are used, by component or by block.

What waits is never changed and never copied back: a network that leaves gets its waiting tensors again. Threads that
use one network share what is on the device; it leaves with the last of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pellucid.models.attention import Attention
from pellucid.models.blocks import Downsample, FeedForward, ResnetBlock, TransformerBlock, Upsample
from pellucid.pipeline.tracker import METER

# What comes and goes as one: the blocks of UNets and transformers, and the layers that stand outside of any.
BLOCKS = (ResnetBlock, TransformerBlock, Attention, FeedForward, Downsample, Upsample, nn.Linear, nn.Conv2d)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")


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
    """Who is on a device, counted by user. One object a device: see `guests_of`."""

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
        guest = Guest(slot, None)
        if tensor.device.type != self.device.type:
            copy = self.copies.get(id(tensor)) or Copy(self.moved(tensor))
            copy.users += 1
            self.copies[id(tensor)] = copy
            slot.registry[slot.name], guest.waiting = copy.tensor, tensor
        self.slots[slot.key] = guest
        return guest

    def moved(self, tensor: Tensor) -> Tensor:
        """A copy on the device; from pinned memory the CPU need not wait, since what uses it is in the same stream."""
        if self.device.type == "cuda" and not tensor.is_pinned():
            with contextlib.suppress(RuntimeError):  # no more memory to pin: the copy is slower, no more
                tensor.data = tensor.data.pin_memory()
        copy = tensor.detach().to(self.device, non_blocking=True)
        return nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy

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

    # --- blocks ---------------------------------------------------------------------------------------------------

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

    def attach(self, network: nn.Module) -> list[Slot]:
        """From now on the blocks of a network come when they are called. Returns the slots that stand outside of them.

        Hooks stay: to remove them while another thread is inside of a block would leave the block here. A view of a
        network (LoRA) has its hooks already, and they work on the view.
        """
        blocks = list(blocks_of(network))
        with self.lock:
            for block in blocks:
                if self.open not in block._forward_pre_hooks.values():
                    block.register_forward_pre_hook(self.open)
                    block.register_forward_hook(self.close, always_call=True)
        return slots_of(network, blocks)


EVERYWHERE: dict[torch.device, Guests] = {}
LOCK = threading.Lock()


def guests_of(device: torch.device) -> Guests:
    with LOCK:
        return EVERYWHERE.setdefault(device, Guests(device))


def blocks_of(network: nn.Module) -> Iterator[nn.Module]:
    """The outermost blocks of a network."""
    for child in network.children():
        if isinstance(child, BLOCKS):
            yield child
        else:
            yield from blocks_of(child)


def slots_of(network: nn.Module, without: Iterable[nn.Module] = ()) -> list[Slot]:
    """Every tensor of a network, but those of some of its parts."""
    left = {id(inner) for part in without for inner in part.modules()}
    found = {}
    for module in network.modules():
        if id(module) not in left:
            for registry in (module._parameters, module._buffers):
                slots = [Slot(registry, name) for name, tensor in registry.items() if tensor is not None]
                found |= {slot.key: slot for slot in slots}
    return list(found.values())


def detach(network: nn.Module) -> None:
    """Takes the hooks of `attach` off again; nobody may be using the network."""
    for module in network.modules():
        for name in HOOKS:
            hooks = getattr(module, name)
            mine = [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), Guests)]
            for key in mine:
                del hooks[key]
