"""Counts the bytes of living tensors, operation by operation: the peak, the module at work, and what each module held.

torch shows every operation to a dispatch mode, and a weak reference sees a storage die. The count needs no formula and
holds for any network: on a real run, and on one whose tensors have no data (see `ghost`).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Scratch = Callable[[Any, tuple[Any, ...], Any], int]  # (operation, arguments, result) → bytes that its kernel borrows
_HOLDERS = 5  # modules named in a peak


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a stage, in bytes. `owner` is the module at work, `held` what each module had made.

    `graphs` is what captured graphs keep from run to run, beyond the activations of the stage itself.
    """

    weights: int = 0
    activations: int = 0
    workspace: int = 0
    owner: str = ""
    held: tuple[tuple[str, int], ...] = ()
    graphs: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.workspace + self.graphs


@dataclass(frozen=True)
class _LiveStorage:
    """One storage that is alive."""

    size: int
    owner: str
    weight: bool
    watch: Any  # the weak reference, which must outlive the storage


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Follows this thread's tensors on devices of the given kinds, from `with tracker:` on."""

    def __init__(self, devices: Iterable[str], *, grain: int = 1, scratch: Scratch | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.devices, self.grain, self.scratch = frozenset(devices), grain, scratch
        self.thread = threading.get_ident()
        self.living: dict[int, _LiveStorage] = {}
        self.weights = self.others = 0
        self.places: list[str] = []
        self.bringing = False
        self.peak = Peak()
        self.stages: dict[str, Peak] = {}

    # --- what torch shows -----------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self.call(func, args, kwargs or {})
        for result in tree_leaves(out):
            if isinstance(result, Tensor):
                self.add(result, func)
        self.look(0 if self.scratch is None else self.scratch(func, args, out))
        return out

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def add(self, tensor: Tensor, func: Any = None) -> None:
        """Counts a storage that is new: views and results written in place are not."""
        if tensor.device.type not in self.devices or (func is not None and _aliases(func)):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.living or storage.nbytes() == 0:
            return
        size = -(-storage.nbytes() // self.grain) * self.grain
        watch = weakref.ref(storage, partial(self.free, key))
        self.living[key] = _LiveStorage(size, self.places[-1] if self.places else "", self.bringing, watch)
        self.count(size, self.bringing)

    def free(self, key: int, _: Any = None) -> None:
        gone = self.living.pop(key, None)
        if gone is not None:
            self.count(-gone.size, gone.weight)

    def count(self, size: int, weight: bool) -> None:
        if weight:
            self.weights += size
        else:
            self.others += size

    def look(self, workspace: int = 0) -> None:
        """Keeps this moment if it is the fullest so far."""
        if self.weights + self.others + workspace > self.peak.total:
            made = Counter[str]()
            for one in self.living.values():
                made[one.owner] += 0 if one.weight else one.size
            held = tuple((name, size) for name, size in made.most_common(_HOLDERS) if size)
            owner = self.places[-1] if self.places else ""
            self.peak = Peak(self.weights, self.others, workspace, owner, held)

    # --- what the pipeline shows ----------------------------------------------------------------------------------

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stretch with a peak of its own, which begins with what lives already."""
        self.peak = Peak()
        self.look()
        try:
            yield
        finally:
            before = self.stages.get(name, Peak())
            self.stages[name] = max(before, self.peak, key=lambda peak: peak.total)

    @contextmanager
    def weighing(self) -> Iterator[None]:
        """What is made inside are weights that come to the device."""
        before, self.bringing = self.bringing, True
        try:
            yield
        finally:
            self.bringing = before

    def hold(self, networks: Iterable[nn.Module], beside: Iterable[Tensor] = ()) -> None:
        """Counts the weights that these networks have on the device, and more tensors as weights."""
        own = (tensor for network in networks for tensor in (*network.parameters(), *network.buffers()))
        with self.weighing():
            for tensor in (*own, *beside):
                self.add(tensor)

    @contextmanager
    def following(self, networks: dict[str, nn.Module]) -> Iterator[None]:
        """Inside, operations are known by the modules that they happen in."""
        with ExitStack() as hooks:
            for name, network in networks.items():
                for path, module in network.named_modules(prefix=name):
                    hooks.enter_context(module.register_forward_pre_hook(partial(self.enter, path)))
                    hooks.enter_context(module.register_forward_hook(partial(self.leave, path), always_call=True))
            yield

    def enter(self, path: str, *_: Any) -> None:
        if threading.get_ident() == self.thread:
            self.places.append(path)

    def leave(self, path: str, *_: Any) -> None:
        if threading.get_ident() == self.thread and self.places:
            self.places.pop()


def _aliases(func: Any) -> bool:
    """Whether an operation returns a view of its input, or the input itself."""
    return any(result.alias_info is not None for result in func._schema.returns)


METER: ContextVar[Tracker | None] = ContextVar("pellucid_meter", default=None)


@contextmanager
def metered(tracker: Tracker) -> Iterator[Tracker]:
    """Inside, the stages of this thread's runs report their peaks to the tracker."""
    token = METER.set(tracker)
    try:
        with torch.no_grad(), tracker:
            yield tracker
    finally:
        METER.reset(token)


# --- What a GPU's kernels borrow ------------------------------------------------------------------------------------

GRAIN = 512  # bytes: the caching allocator rounds every tensor up to a multiple
_MIB = 2**20
_BLAS_HOPPER, _BLAS_OLDER = 32 * _MIB, 8 * _MIB + 128 * 1024  # torch's default workspace of cuBLAS, by generation
_HOPPER = 9


def borrowed_bytes(channels_last: bool) -> Scratch:
    """The bytes that one operation borrows on a GPU."""

    def borrowed(func: Any, args: tuple[Any, ...], out: Any) -> int:
        if func is not torch.ops.aten.convolution.default or channels_last:
            return 0
        # cuDNN's tensor-core kernels want the channels innermost: it copies input, weights and result into that order.
        return sum(rounded_bytes(tensor) for tensor in (args[0], args[1], out))

    return borrowed


def rounded_bytes(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // GRAIN) * GRAIN


def standing_bytes(device: torch.device | str) -> int:
    """What is allocated once, with the first matrix product, and stays."""
    where = torch.device(device)
    if where.type != "cuda":
        return 0
    if not torch.cuda.is_available():
        return _BLAS_HOPPER
    return _BLAS_HOPPER if torch.cuda.get_device_capability(where)[0] >= _HOPPER else _BLAS_OLDER
