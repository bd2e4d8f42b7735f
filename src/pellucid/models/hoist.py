"""What a network makes of its prompt alone, or of the time alone, computed once for a whole run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from pellucid.models import inputs as trees
from pellucid.models.inputs import Inputs
from pellucid.models.ops import watched_inside, weights_of

MOST_BYTES = 256 * 2**20  # of a table


@dataclass(frozen=True, eq=False)
class HoistedInputs:
    """The inputs of a run with `text` in place of `context`, and all that its times make, row by row.

    Call source n at time u is called with `hoisted=table[index[n, u]]` in place of the time and of the conditions
    that are told with it. Without a table, which may grow too large, these stay in `inputs`.
    """

    inputs: dict[str, Any]  # the batch first: one row a call source, as before
    table: Tensor | None  # (T, S), in the network's dtype
    index: Tensor | None  # (N, U): rows of the table; one row for all sources where no input says how many there are


class Hoistable(Protocol):
    """A network that can be told its text and its times beforehand."""

    CONDITIONS: ClassVar[tuple[str, ...]]  # the inputs that are told together with the time

    @property
    def row_widths(self) -> tuple[int, ...]:
        """How many numbers the network makes of one time, part by part."""
        ...

    @property
    def time_rows(self) -> Callable[..., Tensor]:
        """What the network makes of times (T,) and as many conditions: (T, S), the parts beside each other."""
        ...

    def text_tokens(self, context: Tensor) -> Any:
        """Keys and values of all cross-attentions beside each other, (B, L, S), for the `text` input."""
        ...


def hoist(network: Hoistable, times: Tensor, inputs: Inputs) -> HoistedInputs | None:
    """`network` for the times (U,) of a run and its inputs, which have one row a call source.

    None where the parts of the network are to be seen or brought at every call: hooks watch them, as they do where
    blocks are offloaded, or weights lie on another device. No table is made of more than `MOST_BYTES`; the text
    takes 2 · tokens · width numbers for each source and cross-attention.
    """
    assert isinstance(network, nn.Module)
    if watched_inside(network):
        return None
    weights = weights_of(network)
    if any(weight.device != times.device for weight in weights):
        return None
    left = dict(inputs)
    context = left.pop("context", None)
    if context is not None:
        left["text"] = network.text_tokens(context)
    conditions = {name: left[name] for name in network.CONDITIONS if left.get(name) is not None}
    chosen, group = (part.to(times.device) for part in _distinct(conditions, trees.rows(inputs)))
    if len(chosen) * len(times) * sum(network.row_widths) * weights[0].element_size() > MOST_BYTES:
        return HoistedInputs(left, None, None)
    told = {name: leaf[chosen].repeat_interleave(len(times), dim=0) for name, leaf in conditions.items()}
    table = network.time_rows(times.repeat(len(chosen)), **told)  # (T, S)
    index = group[:, None] * len(times) + torch.arange(len(times), device=times.device)  # (N, U)
    return HoistedInputs({k: v for k, v in left.items() if k not in network.CONDITIONS}, table, index)


def _distinct(conditions: Mapping[str, Tensor], sources: int) -> tuple[Tensor, Tensor]:
    """One source for each group that is told the same, and the group of each source (N,)."""
    if not conditions:
        return torch.zeros(1, dtype=torch.long), torch.zeros(sources, dtype=torch.long)
    rows = torch.cat([leaf.detach().cpu().double().reshape(sources, -1) for leaf in conditions.values()], dim=1)
    _, group = torch.unique(rows, dim=0, return_inverse=True)
    firsts = torch.full((int(group.max()) + 1,), sources).scatter_reduce(0, group, torch.arange(sources), "amin")
    return firsts, group
