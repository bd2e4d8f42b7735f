"""Stages of a run: encode text, encode the image, denoise, decode. Each is timed, measured, and owns what it holds."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from pellucid.core.errors import PellucidError, is_out_of_memory, rule
from pellucid.models import attention, ops
from pellucid.models.attention import Attention
from pellucid.models.blocks import Downsample, FeedForward, ResnetBlock, TransformerBlock, Upsample
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.tracker import METER

# --- Threads --------------------------------------------------------------------------------------------------------

THREAD_SETTINGS = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}  # a user who sets one of them has decided
SMALL_NETWORK = 100_000_000  # parameters up to which one thread is fast enough to be worth it
_SLOWDOWN = 4.0  # times one thread's time that several may take; 200 was measured on a busy machine, 0.8 on a quiet one
_choosing = threading.RLock()
_counts: list[int] = []  # of threads before, for each run that is on one thread now
_ONE_THREAD_NOTE = (
    "ran on 1 of {count} threads, because other processes keep the CPU busy; "
    "sums are cut by threads, so the last bits may differ. Import pellucid before torch, and all threads are used"
)


@contextmanager
def faster_threads(network: nn.Module, device: torch.device) -> Iterator[list[str]]:
    """Runs its block with the threads that are faster now; yields a note where that is one of several."""
    with _choosing:
        count = _counts[0] if _counts else torch.get_num_threads()
    if (
        device.type != "cpu"
        or count == 1
        or THREAD_SETTINGS & os.environ.keys()
        or not _small(network)
        or not _wait(count)
    ):
        yield []
        return
    with _choosing:
        _counts.append(count)
        torch.set_num_threads(1)
    try:
        yield [_ONE_THREAD_NOTE.format(count=count)]
    finally:
        with _choosing:
            _counts.remove(count)
            torch.set_num_threads(1 if _counts else count)


def _small(network: nn.Module) -> bool:
    return sum(p.numel() for p in network.parameters()) <= SMALL_NETWORK


def _wait(count: int) -> bool:
    """Whether several threads take far longer for a small convolution than one does."""
    image, kernel = torch.zeros(2, 64, 16, 16), torch.zeros(64, 64, 3, 3)

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        conv2d(image, kernel, padding=1)  # the threads start, the kernel is chosen
        began = time.perf_counter()
        for _ in range(3):
            conv2d(image, kernel, padding=1)
        return time.perf_counter() - began

    with _choosing:
        try:
            return seconds(count) > _SLOWDOWN * seconds(1)
        finally:
            torch.set_num_threads(count)


# --- Offload --------------------------------------------------------------------------------------------------------

# What comes and goes as one: the blocks of UNets and transformers, and the layers that stand outside of any.
_BLOCKS = (ResnetBlock, TransformerBlock, Attention, FeedForward, Downsample, Upsample, nn.Linear, nn.Conv2d)
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
class _Copy:
    """A tensor on the device, for all slots that hold the same waiting one."""

    tensor: Tensor
    users: int = 0


class Guests:
    """The tensors on a device, with the number of their users. One object per device: see `_guests_of`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.slots: dict[tuple[int, str], Guest] = {}
        self.copies: dict[int, _Copy] = {}
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
            copy = self.copies.get(id(tensor)) or _Copy(self.moved(tensor))
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


_GUESTS: dict[torch.device, Guests] = {}
_LOCK = threading.Lock()


def _guests_of(device: torch.device) -> Guests:
    with _LOCK:
        return _GUESTS.setdefault(device, Guests(device))


def blocks_of(network: nn.Module) -> Iterator[nn.Module]:
    """The outermost blocks of a network."""
    for child in network.children():
        if isinstance(child, _BLOCKS):
            yield child
        else:
            yield from blocks_of(child)


def slots_of(network: nn.Module, without: Iterable[nn.Module] = ()) -> list[Slot]:
    """Every tensor of a network, but those of some of its parts."""
    left = {id(inner) for part in without for inner in part.modules()}
    found: dict[tuple[int, str], Slot] = {}
    for module in network.modules():
        if id(module) not in left:
            for registry in (module._parameters, module._buffers):
                slots = [Slot(registry, name) for name, tensor in registry.items() if tensor is not None]
                found |= {slot.key: slot for slot in slots}
    return list(found.values())


def detach_hooks(network: nn.Module) -> None:
    """Removes the hooks of `attach`; the network must not be in use."""
    for module in network.modules():
        for name in HOOKS:
            hooks = getattr(module, name)
            mine = [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), Guests)]
            for key in mine:
                del hooks[key]


# --- Stages ---------------------------------------------------------------------------------------------------------

STAGES = ("text", "encode", "denoise", "decode")
_NO_KERNEL = "No available kernel"  # how torch says that a backend cannot do an attention


@dataclass(frozen=True)
class Stage:
    """One stage of a run: what it took. `peak` is the device's peak in bytes while it ran; None where unmeasured.

    `began` is when, on the clock of `time.perf_counter`.
    """

    name: str
    seconds: float
    peak: int | None = None
    began: float = 0.0


@dataclass
class Stages:
    """Runs stages on a device under a policy, and keeps what each took.

    `explain(stage)` says which module owns the peak of a stage and what would lower it, when memory runs out.
    `idle()` are bytes that captured graphs have reserved, which torch does not count as allocated.
    """

    policy: Policy
    device: torch.device
    explain: Callable[[str], str] | None = None
    idle: Callable[[], int] | None = None
    taken: list[Stage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy.check(self.device)

    def copy(self) -> Stages:
        """Another run that continues from the stages taken so far."""
        return replace(self, taken=list(self.taken))

    @contextmanager
    def run(self, name: str, *networks: nn.Module | None) -> Iterator[None]:
        """Inside, the networks are on the device; with offload they leave it afterwards."""
        used = [network for network in networks if network is not None]
        began, idle = self.begin(), self.idle_bytes()
        try:
            with ExitStack() as inside:
                if (meter := METER.get()) is not None:
                    inside.enter_context(meter.stage(name))
                inside.enter_context(self.present(name, used))
                inside.enter_context(attention.backend(self.policy.attention))
                inside.enter_context(ops.using(fused=self.policy.does("fused", self.device)))
                yield
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise PellucidError(self.trouble(name), "out-of-memory") from error
            if _NO_KERNEL in str(error):
                advice = "Use auto, which takes another where this one cannot."
                must = "a kernel that this device, dtype and head width allow"
                raise PellucidError(rule("attention", must, self.policy.attention, advice), "attention") from error
            raise
        self.end(name, began, idle)

    def begin(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        return time.perf_counter()

    def idle_bytes(self) -> int:
        return 0 if self.idle is None or self.device.type != "cuda" else self.idle()

    def end(self, name: str, began: float, idle: int = 0) -> None:
        """`idle` were the bytes that graphs had reserved when the stage began."""
        peak = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            # the activations of a graph that the stage captured were allocated in it; later they are idle
            now = torch.cuda.memory_allocated(self.device) + self.idle_bytes()
            peak = max(torch.cuda.max_memory_allocated(self.device) + idle, now)
        elif (meter := METER.get()) is not None:
            peak = meter.stages[name].total
        self.taken.append(Stage(name, time.perf_counter() - began, peak, began))

    @contextmanager
    def present(self, name: str, networks: list[nn.Module]) -> Iterator[None]:
        """The networks on the device: all of each, or of the denoising ones what stands outside of their blocks."""
        if self.policy.offload == "none":
            yield
            return
        guests = _guests_of(self.device)
        by_block = self.policy.offload == "block" and name == "denoise"
        slots = [slot for one in networks for slot in (guests.attach(one) if by_block else slots_of(one))]
        with guests.staying(slots):
            yield

    def trouble(self, name: str) -> str:
        rehearsed = METER.get() is not None  # or the explanation, which rehearses, would explain itself
        why = "" if self.explain is None or rehearsed else self.explain(name)
        return f"memory must suffice for stage {name}; the device ran out of it. {why}".strip()
