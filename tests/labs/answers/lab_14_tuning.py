"""A right answer to lab 14."""

from __future__ import annotations

import math

from torch import Tensor


def divided(seed: int, tune: int, watch: int, judge: int) -> tuple[range, range, range]:
    first, second = seed + tune, seed + tune + watch
    return range(seed, first), range(first, second), range(second, second + judge)


def distances(student: Tensor, teacher: Tensor) -> Tensor:
    return (student - teacher).flatten(1).square().mean(1).sqrt()


def objective(errors: Tensor) -> Tensor:
    return (errors + 1e-12).sqrt().mean()


def is_better(tuned: Tensor, start: Tensor) -> bool:
    apart = tuned - start
    return bool(apart.mean() < -1.96 * apart.std() / math.sqrt(len(apart)))
