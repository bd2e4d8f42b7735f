"""Steps on the device, measured together: norms in float64, and digests.

A small network on a GPU waits for calls and not for numbers. So the tensors of some steps are laid into one block, with
one call a step, and measured with about ten calls for all of them. They lie in an order in which neighbours are what is
compared, so that one call takes all differences and one all norms. A CPU does not wait, and its steps are measured one
by one: a process that is killed has left them all. Large tensors are measured one after the other, to spare memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pellucid.evidence.trace.measures import Noted, digest

MOST = 32  # steps of a block on a GPU
LARGE = 2**19  # numbers of the steps of a block; a step that has more is not laid into one


class Block:
    """Room for steps with the same images and tensors, which follow each other; filled and measured again and again."""

    def __init__(self, like: Noted, x: Tensor, limit: float) -> None:
        self.names, self.form, self.limit = like.names, form(like), limit
        self.room = min(MOST if waits(x.device) else 1, LARGE // max(x.numel(), 1))
        self.held = x.new_empty((self.room, 2 * len(self.names) + 1, *x.shape))  # as `measured` names them
        self.places = self.held[:, : len(self.names)].unbind()
        self.steps: list[Noted] = []
        self.large: list[Tensor] = []

    def takes(self, step: Noted, x: Tensor) -> bool:
        """Whether a step can be laid behind the others."""
        return step.names == self.names and form(step) == self.form and self.held.shape[2:] == x.shape

    def add(self, step: Noted, values: list[Tensor]) -> None:
        if self.room:
            torch.stack(values, out=self.places[len(self.steps)])
        else:
            self.large = values
        self.steps.append(step)

    @property
    def full(self) -> bool:
        return len(self.steps) >= self.room

    def measure(self, weight: Tensor) -> tuple[Tensor, Sequence[Sequence[Tensor]] | Tensor]:
        """Norms and digests, (steps, measured + digested, B) int64; and what was measured, (steps, measured, B, …)."""
        with torch.inference_mode(self.held.is_inference()):  # as the run was in when the block was made
            found = self.together(weight) if self.room else self.apart(weight)
        self.steps, self.large = [], []
        return found

    def together(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        block, count, at = self.held[: len(self.steps)], len(self.names), self.names.index
        x, x0 = block[:, at("x")], block[:, at("x0")]
        alphas, factors = numbers(self.steps, x)
        for name, (k_x, k) in factors.items():
            block[:, at(name)].mul_(k).add_(x * k_x)
        torch.diff(block[:, :count], dim=1, out=block[:, count:-2])
        torch.addcmul(x, x0, alphas, value=-1.0, out=block[:, -2])
        torch.abs(x0, out=block[:, -1]).ge_(self.limit)
        flat = block.flatten(3) if block.ndim > 3 else block[..., None]
        digested = count - 1
        found = weight.new_empty((len(block), flat.shape[1] + digested, flat.shape[2]))
        torch.linalg.vector_norm(flat, dim=-1, dtype=torch.float64, out=found[:, :-digested].view(torch.float64))
        digest(flat[:, :digested], weight, out=found[:, -digested:])
        return found, block

    def apart(self, weight: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        values, at = list(self.large), self.names.index
        x, x0 = values[at("x")], values[at("x0")]
        alphas, factors = numbers(self.steps, x[None])
        for name, (k_x, k) in factors.items():
            values[at(name)] = (values[at(name)] * k[0]).add_(x * k_x[0])
        differences = [b - a for a, b in pairwise(values)]
        block = [*values, *differences, torch.addcmul(x, x0, alphas[0], value=-1.0), x0.abs().ge_(self.limit)]
        flats = [one.reshape(len(x), -1).contiguous() for one in block]
        norms = [torch.linalg.vector_norm(flat, dim=-1, dtype=torch.float64).view(torch.int64) for flat in flats]
        digests = [digest(flat, weight) for flat in flats[: len(values) - 1]]
        return torch.stack([*norms, *digests])[None], [block]


def waits(device: torch.device) -> bool:
    """Whether a device is asked in advance, so that calls cost more than work."""
    return device.type == "cuda"


def form(step: Noted) -> tuple[object, ...]:
    """What steps of a block have in common beside their tensors: what is converted, and numbers for all or for each."""
    return len(step.alphas), tuple(name for name, _ in step.readings)


def numbers(steps: Sequence[Noted], like: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Of steps: alpha, and of each prediction that becomes x0 (k_x, k); each shaped to broadcast over (steps, B, …)."""
    names = [name for name, _ in steps[0].readings]
    rows = [[step.alphas for step in steps]]
    for i in range(len(names)):
        rows += [[[pair[n] for pair in step.readings[i][1]] for step in steps] for n in (0, 1)]
    width = max(len(row) for table in rows for row in table)
    table = torch.tensor([[list(row) * (width // len(row)) for row in table] for table in rows], dtype=like.dtype)
    alphas, *rest = table.reshape(*table.shape, *([1] * (like.ndim - 2))).to(like.device)  # one small copy
    return alphas, {name: (rest[2 * i], rest[2 * i + 1]) for i, name in enumerate(names)}
