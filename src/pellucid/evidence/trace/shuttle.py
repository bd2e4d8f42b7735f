"""The way of tensors from the device to the file: at once from a CPU; from a GPU copied behind the kernels that made
them, and handed on some steps later, so that no step waits for its own numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Deliver = Callable[[Any, list[Any]], None]  # (what was sent along, the tensors as arrays on the host)
LAG = 1  # blocks of steps that may be under way; more would only hold memory, and be lost by a kill


class Shuttle:
    """Hands tensors on in the order in which they were sent."""

    def __init__(self, device: torch.device, deliver: Deliver) -> None:
        self.device, self.deliver = device, deliver
        self.under_way: deque[tuple[Any, list[Tensor], Any]] = deque()

    def send(self, what: Any, tensors: Sequence[Tensor]) -> None:
        if self.device.type != "cuda":
            self.deliver(what, [tensor.detach().cpu().contiguous().numpy() for tensor in tensors])
            return
        held = [pinned(tensor) for tensor in tensors]
        passed = torch.cuda.Event()
        passed.record(torch.cuda.current_stream(self.device))
        self.under_way.append((what, held, passed))
        while self.under_way and (len(self.under_way) > LAG or self.under_way[0][2].query()):
            self.hand_on()

    def hand_on(self) -> None:
        what, held, passed = self.under_way.popleft()
        passed.synchronize()
        try:
            self.deliver(what, [tensor.numpy() for tensor in held])
        except BaseException:
            self.under_way.clear()  # what comes after a step that is not in the file would not be where it belongs
            raise

    def drain(self) -> None:
        while self.under_way:
            self.hand_on()


def pinned(tensor: Tensor) -> Tensor:
    """A copy on the host that is filled when the device comes to it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)
