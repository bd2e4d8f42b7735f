"""Lab 11: the loop. Fill in the four functions, then run `pellucid lab 11 --check FILE`.

A row of a plan has `row.time`, `row.level.alpha`, `row.level.sigma`, and `weights(row)` as below: the weights of the
next x by name. `x` is the state, `p0` the prediction (x0) of this call, `p1` that of the call before, and so on.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from pellucid import Row
from pellucid.core.plan import REGISTERS

Network = Callable[[Tensor, float], Tensor]  # (x, time) → v, of x's shape


def weights(row: Row) -> dict[str, float]:
    """`{"x": 0.92, "p0": 0.16, "p1": -0.05}`: this one is written already."""
    return {REGISTERS[register]: weight for register, weight in row.x}


def guided(both: Tensor, scale: float) -> Tensor:
    """The guided prediction (B, …) from a doubled batch (2B, …): first all uncond, then all cond."""
    raise NotImplementedError


def clean(x: Tensor, v: Tensor, row: Row) -> Tensor:
    """x0 from the state and the network's v, at the level of the row."""
    raise NotImplementedError


def mixed(parts: Mapping[str, float], registers: Mapping[str, Tensor]) -> Tensor:
    """The weighted sum of the registers that are named."""
    raise NotImplementedError


def loop(x: Tensor, rows: Sequence[Row], network: Network) -> Tensor:
    """The whole run, for any sampler whose rows use x, p0, p1, p2 and p3. Each run starts with an empty history."""
    raise NotImplementedError
