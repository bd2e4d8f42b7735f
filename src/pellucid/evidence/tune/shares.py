"""Shares: weights of a row without the two numbers that the marginal law fixes.

With a perfect denoiser of one point every register is a pair, (how much of the point, how much of the first noise).
That of a prediction is the same at every level: (1, 0) for x0, (0, 1) for eps, (−1, 1) for the flow. `across` is the
coordinate of a pair in which predictions are 0, `along` the one in which they are 1. A row lands where it should when
both coordinates do:

- across: x and the anchor together bring all of it; `mix` is the part that x brings;
- along: the predictions together bring what x and the anchor leave; `c1…c3` are the parts of p1…p3, in units of the
  row's first-order step, and p0 brings the rest.

So any shares keep the law. See docs/decisions/0017-tuning-keeps-the-law.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pellucid.core.errors import PellucidError, rule
from pellucid.core.plan import Row, Weights
from pellucid.core.schedule import Target

PAST = 3  # earlier predictions that a row may use
WIDTH = 1 + PAST  # mix, c1, c2, c3
ROUNDING = 1e-13
BASES = ("x0", "eps", "flow")
Pair = tuple[Any, Any]  # (alpha, sigma), numbers or tensors


def across(basis: Target, pair: Pair) -> Any:
    """What a pair has that no prediction has."""
    alpha, sigma = pair
    return {"x0": sigma, "eps": alpha, "flow": alpha + sigma}[basis]


def along(basis: Target, pair: Pair) -> Any:
    """What a pair has of the predictions."""
    alpha, sigma = pair
    return {"x0": alpha, "eps": sigma, "flow": (sigma - alpha) / 2}[basis]


def first_step(basis: Target, start: Pair, end: Pair) -> Any:
    """The weight of the one prediction in a first-order step: the unit of the shares."""
    return along(basis, end) - along(basis, start) * (across(basis, end) / across(basis, start))


def to_weights(basis: Target, shares: Sequence[Any], x: Pair, anchor: Pair | None, end: Pair, back: Pair) -> list[Any]:
    """Weights of x, anchor, p0…p3 that land on `end`; `back` is where the first-order step of the unit begins."""
    mix, *rest = shares
    f_end = across(basis, end)
    w_x = f_end / across(basis, x) * (mix if anchor is not None else 1.0)
    w_anchor = f_end / across(basis, anchor) * (1.0 - mix) if anchor is not None else 0.0
    left = along(basis, end) - w_x * along(basis, x)
    if anchor is not None:
        left = left - w_anchor * along(basis, anchor)
    unit = first_step(basis, back, end)
    past = [unit * share for share in rest]
    return [w_x, w_anchor, left - sum(past), *past]


def from_weights(basis: Target, weights: Weights, x: Pair, anchor: Pair | None, end: Pair, back: Pair) -> list[float]:
    """The shares of a row's weights; refuses a row that does not land on `end`."""
    held = dict(weights)
    f_end = across(basis, end)
    mix = held.get(0, 0.0) * across(basis, x) / f_end if f_end and anchor is not None else 1.0
    unit = first_step(basis, back, end)
    shares = [snapped(share) for share in (mix, *(held.get(2 + k, 0.0) / unit for k in range(1, WIDTH)))]
    again = to_weights(basis, shares, x, anchor, end, back)
    size = max(map(abs, held.values()), default=1.0)
    if any(abs(w - held.get(r, 0.0)) > 1e-9 * size for r, w in enumerate(again)) or max(held, default=0) > 5:
        raise PellucidError(rule("start", "a sampler whose rows all land on their level", "another"), "start")
    return shares


def snapped(share: float) -> float:
    """A share that rounding keeps from 0 or 1 is 0 or 1: a register that is not used stays so."""
    near = round(share)
    return float(near) if near in (0, 1) and abs(share - near) < ROUNDING else share


def shares_of(basis: Target, rows: Sequence[Row], ends: Sequence[Pair], lift: bool) -> list[list[list[float]]]:
    """Shares (N, 2, 4) of a start's rows: of x, and of the anchor; zeros where a row keeps its anchor.

    With `lift` the rows have no anchor of their own, and every row leaves x as it was called: what a corrector needs.
    """
    found = []
    for i, row in enumerate(rows):
        here, back = pair_of(row), anchor_before(rows, i, lift)
        own = from_weights(basis, row.x, here, back, ends[i], here)
        kept = [1.0, 0.0, 0.0, 0.0]
        if row.anchor is not None:
            kept = from_weights(basis, row.anchor, here, back, here, back or here) if back else kept
        found.append([own, kept])
    return found


def pair_of(row: Row) -> Pair:
    return row.level.alpha, row.level.sigma


def anchor_before(rows: Sequence[Row], i: int, lift: bool) -> Pair | None:
    """Where the anchor is when row i is called: at the level of the row that last wrote it."""
    j = anchor_index(rows, i, lift)
    return None if j is None else pair_of(rows[j])


def anchor_index(rows: Sequence[Row], i: int, lift: bool) -> int | None:
    if lift:
        return i - 1 if i else None
    return next((j for j in range(i - 1, -1, -1) if rows[j].anchor is not None), None)
