"""Lab 12: samplers as tables. Fill in the four functions, then: pellucid lab 12 --check THIS_FILE

A level is (alpha, sigma) with alpha² + sigma² = 1. Its λ is log(alpha / sigma). Predictions are of x0.
A row is a dict of weights over "x", "p0" (this call's prediction), "p1" (that of the call before) and "z" (noise).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

Level = tuple[float, float]
Row = dict[str, float]


def ddim_row(here: Level, after: Level) -> Row:
    """DDIM without noise: the weights of x and p0 that take x from a level to the next."""
    raise NotImplementedError


def dpmpp_2m_row(before: Level, here: Level, after: Level) -> Row:
    """DPM++ 2M: the weights of x, p0 and p1; `before` is the level of the call before. sigma of `after` is above 0.

    It is DDIM's row with D in the place of p0: D = p0 + (h / (2·h_before))·(p0 − p1), where h and h_before are the
    steps in λ, from here to after and from before to here.
    """
    raise NotImplementedError


def ancestral_row(sigma: float, sigma_next: float) -> Row:
    """Euler a at alpha = 1: the weights of x, p0 and z.

    sigma_up = sqrt(sigma_next²·(sigma² − sigma_next²) / sigma²) is what noise adds; the rest is a step of Euler to
    sigma_down, where sigma_down² + sigma_up² = sigma_next².
    """
    raise NotImplementedError


def run(rows: Sequence[Row], levels: Sequence[Level], x: Tensor, denoise: Callable[[Tensor, Level], Tensor]) -> Tensor:
    """Runs a table without noise: row i calls `denoise` at levels[i], then x becomes what the row says."""
    raise NotImplementedError
