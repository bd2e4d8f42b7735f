"""A right answer to lab 03."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor


def trailing(num_train: int, steps: int) -> list[int]:
    return [round(num_train - i * num_train / steps) - 1 for i in range(steps)]


def sigmas(alpha_bar: Tensor, times: Sequence[int]) -> list[float]:
    return [*(float(((1 - alpha_bar[time]) / alpha_bar[time]) ** 0.5) for time in times), 0.0]


def scaled(x: Tensor, sigma: float) -> Tensor:
    return x / (1 + sigma**2) ** 0.5


def euler(x: Tensor, network: Callable[[Tensor, int], Tensor], times: Sequence[int], sigmas: Sequence[float]) -> Tensor:
    for time, (sigma, after) in zip(times, pairwise(sigmas), strict=True):
        x = x + (after - sigma) * network(scaled(x, sigma), time)
    return x
