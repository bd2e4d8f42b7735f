"""What is worth its price: the Pareto front of cells, its knee, and how sure that knee is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pellucid.core.errors import PellucidError, rule

Array = NDArray[np.float64]
LEVEL = 0.95
# What was seen beyond a cell: gains below the average, none, still some up to the dearest cell, or that there is none.
Beyond = Literal["less", "nothing", "more", "unknown"]


def front(costs: Sequence[float] | Array, losses: Sequence[float] | Array) -> list[int]:
    """The cells that no other one beats in both, by cost; of equals the first. What is not finite is on no front."""
    price, loss = np.asarray(costs, float), np.asarray(losses, float)
    if price.shape != loss.shape or price.ndim != 1:
        raise PellucidError(rule("costs, losses", "one each a cell", (price.shape, loss.shape)), "front")
    known = [i for i in range(len(price)) if np.isfinite(price[i]) and np.isfinite(loss[i])]
    kept: list[int] = []
    for i in sorted(known, key=lambda i: (price[i], loss[i], i)):
        if not kept or loss[i] < loss[kept[-1]]:
            kept.append(i)
    return kept


def knee(costs: Sequence[float] | Array, losses: Sequence[float] | Array) -> int | None:
    """The cell of the front that lies farthest below the straight line between its ends (Satopää et al. 2011).

    Costs count by their logarithm: from 5 calls to 10 is as far as from 50 to 100. Where no cell lies below that line
    the best is taken, which is a knee only if dearer cells gain nothing (`beyond`). None where no cell is known.
    """
    kept = front(costs, losses)
    if len(kept) < 3:
        return kept[-1] if kept else None
    price, loss = np.log(np.asarray(costs, float)[kept]), np.asarray(losses, float)[kept]
    along = (price - price[0]) / (price[-1] - price[0])
    down = (loss - loss[-1]) / (loss[0] - loss[-1])
    below = 1 - along - down
    return kept[int(np.argmax(below[:-1]))] if below.max() > 0 else kept[-1]


@dataclass(frozen=True)
class Knee:
    """The cell, its cost with the interval that resampling gives, and how often each cell was taken there. It is no
    knee, though the best, where nothing dearer was asked."""

    cell: int
    cost: float
    low: float
    high: float
    shares: dict[int, float]
    beyond: Beyond

    @property
    def found(self) -> bool:
        return self.beyond in ("less", "nothing")


def beyond(costs: Sequence[float] | Array, losses: Sequence[float] | Array, cell: int) -> Beyond:
    """What the cells that are dearer than a cell of the front say about more."""
    kept, price = front(costs, losses), np.asarray(costs, float)
    if cell != kept[-1]:
        return "less"
    known = price[np.isfinite(price) & np.isfinite(np.asarray(losses, float))]
    if price[cell] < known.max():
        return "nothing"
    return "more" if len(kept) > 1 else "unknown"


def knee_of(costs: Sequence[float] | Array, losses: Sequence[float] | Array, drawn: Array) -> Knee | None:
    """The knee of estimates (C,), and its interval over resampled losses (C, R), or costs too: (2, C, R)."""
    found = knee(costs, losses)
    if found is None:
        return None
    price = np.asarray(costs, float)
    both = drawn.ndim == 3
    picks = []
    for r in range(drawn.shape[-1]):
        at, loss = (drawn[0, :, r], drawn[1, :, r]) if both else (price, drawn[:, r])
        pick = knee(at, loss)
        if pick is not None:
            picks.append(pick)
    tail = (1 - LEVEL) / 2
    ends = np.quantile(price[picks], [tail, 1 - tail], method="inverted_cdf") if picks else [price[found]] * 2
    shares = {i: picks.count(i) / len(picks) for i in sorted(set(picks), key=lambda i: -picks.count(i))}
    return Knee(found, float(price[found]), float(ends[0]), float(ends[1]), shares, beyond(costs, losses, found))
