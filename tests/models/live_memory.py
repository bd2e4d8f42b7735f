"""The peak of live tensor memory in a call, by watching every storage that an operation makes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and (storage := leaf.untyped_storage())._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
        return out

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def live_peak(call: Callable[[], Any]) -> int:
    """Bytes alive at once beyond what was there before; on the meta device it costs nothing to ask."""
    with torch.no_grad(), LiveMemory() as memory:
        call()
    return memory.peak
