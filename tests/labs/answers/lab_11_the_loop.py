"""A right answer to lab 11."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from pellucid import Row
from pellucid.core.plan import REGISTERS

Network = Callable[[Tensor, float], Tensor]


def weights(row: Row) -> dict[str, float]:
    return {REGISTERS[register]: weight for register, weight in row.x}


def guided(both: Tensor, scale: float) -> Tensor:
    uncond, cond = both.chunk(2)
    return uncond + scale * (cond - uncond)


def clean(x: Tensor, v: Tensor, row: Row) -> Tensor:
    return row.level.alpha * x - row.level.sigma * v


def mixed(parts: Mapping[str, float], registers: Mapping[str, Tensor]) -> Tensor:
    return sum(weight * registers[name] for name, weight in parts.items())


def loop(x: Tensor, rows: Sequence[Row], network: Network) -> Tensor:
    history: tuple[Tensor, ...] = ()
    for row in rows:
        history = (clean(x, network(x, row.time), row), *history)[:4]
        x = mixed(weights(row), {"x": x, **{f"p{i}": past for i, past in enumerate(history)}})
    return x
