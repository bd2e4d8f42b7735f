"""Running means of a network's weights, of several lengths at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pellucid.core.errors import PellucidError, rule


class EMA:
    """For each length, the mean of a network's weights over the past, each image counting half as much a length later.

    A length is a number of images, so that it means the same at any batch size. The means start with the first update,
    and are corrected for their short past: early on they are means of what there is, not of the random start. Where
    ranks hold shares of the weights (DTensors), each keeps the means of its own.
    """

    def __init__(self, network: nn.Module, lengths: Iterable[float]) -> None:
        self.lengths = tuple(float(length) for length in lengths)
        if not self.lengths or any(not (math.isfinite(n) and n > 0) for n in self.lengths):
            raise PellucidError(rule("EMA lengths", "at least one number of images above 0", self.lengths), "ema")
        if len(set(self.lengths)) != len(self.lengths):
            raise PellucidError(rule("EMA lengths", "different", self.lengths), "ema")
        self.seen = 0  # images
        self.network, self.now = network, dict(floats(network))  # listed once: a step has no time for it
        self.means = {
            n: {k: torch.zeros_like(v, dtype=torch.float32) for k, v in self.now.items()} for n in self.lengths
        }

    @torch.no_grad()
    def update(self, images: int) -> None:
        """Takes in the weights after a step over so many images."""
        if images < 1:
            raise PellucidError(rule("images", "at least 1", images), "ema")
        self.seen += images
        weights = [local(tensor).float() for tensor in self.now.values()]
        for length, held in self.means.items():
            torch._foreach_lerp_([local(mean) for mean in held.values()], weights, self.share(length, images))

    def share(self, length: float, images: int) -> float:
        """What the newest weights count: (1 − ½^(images / length)), over the sum of all that has counted so far."""
        return -math.expm1(-images / length * math.log(2)) / -math.expm1(-self.seen / length * math.log(2))

    def weights(self, length: float) -> dict[str, Tensor]:
        if length not in self.means:
            raise PellucidError(rule("EMA length", f"one of {self.lengths}", length), "ema")
        return self.means[length]

    @contextmanager
    def inside(self, length: float) -> Iterator[nn.Module]:
        """The network with the means for its weights, until the end of the block."""
        means = self.weights(length)
        kept = {name: tensor.detach().clone() for name, tensor in self.now.items()}
        try:
            with torch.no_grad():
                for name, tensor in self.now.items():
                    local(tensor).copy_(local(means[name]))
            yield self.network
        finally:
            with torch.no_grad():
                for name, tensor in self.now.items():
                    local(tensor).copy_(local(kept[name]))

    def state(self) -> dict[str, Tensor]:
        """All of it as tensors, for a checkpoint."""
        held = {f"{length!r}/{name}": tensor for length, means in self.means.items() for name, tensor in means.items()}
        return {"seen": torch.tensor(self.seen, dtype=torch.int64), **held}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Back from a checkpoint of the same network and lengths."""
        wanted = self.state()
        if set(state) != set(wanted):
            odd = sorted(set(state) ^ set(wanted))
            raise PellucidError(rule("EMA state", "of this network and these lengths", odd[:3]), "ema-state")
        self.seen = int(state["seen"])
        for name, tensor in wanted.items():
            if name != "seen":
                local(tensor).copy_(local(state[name]))


def floats(network: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers that are numbers to average."""
    return [(name, tensor) for name, tensor in network.state_dict(keep_vars=True).items() if tensor.is_floating_point()]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
