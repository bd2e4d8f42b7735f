"""Lab 14: tuning a plan. Fill in the four functions, then: pellucid lab 14 --check THIS_FILE"""

from __future__ import annotations

from torch import Tensor


def divided(seed: int, tune: int, watch: int, judge: int) -> tuple[range, range, range]:
    """Three ranges of seeds that count up from `seed`, of these lengths, without a common one."""
    raise NotImplementedError


def distances(student: Tensor, teacher: Tensor) -> Tensor:
    """The error of each pair (N,): the root mean square of student − teacher, both (N, …)."""
    raise NotImplementedError


def objective(errors: Tensor) -> Tensor:
    """What is descended: the mean over pairs of the square root of their errors, a tensor with a gradient.

    A root has an infinite slope at 0: put 1e-12 under it, so that a pair without error has a gradient that is finite.
    """
    raise NotImplementedError


def is_better(tuned: Tensor, start: Tensor) -> bool:
    """Whether the tuned plan is better on the same held-out pairs, beyond chance.

    `tuned` and `start` (N,) are the errors of the same pairs. Better: the mean of the differences pair by pair is at
    least 1.96 standard errors of that mean below 0. The standard error is the deviation of the differences over √N.
    """
    raise NotImplementedError
