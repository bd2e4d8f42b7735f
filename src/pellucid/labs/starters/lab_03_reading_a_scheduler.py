"""Lab 03: reading a scheduler. Fill in the four functions, then run `pellucid lab 03 --check FILE`.

`alpha_bar` is a tensor of shape (times,), with the least noise first. σ is the one of Euler's space, where
x = x0 + σ·eps. The network predicts eps here. Tensors are (batch, 4, 16, 16).
"""

from collections.abc import Callable, Sequence

from torch import Tensor


def trailing(num_train: int, steps: int) -> list[int]:
    """The times of a run, largest first: `steps` even strides back from the last time, `num_train` − 1."""
    raise NotImplementedError


def sigmas(alpha_bar: Tensor, times: Sequence[int]) -> list[float]:
    """σ at each of these times, and one more: the σ that the run ends at."""
    raise NotImplementedError


def scaled(x: Tensor, sigma: float) -> Tensor:
    """x as a network sees it that was trained on √ᾱ·x0 + √(1−ᾱ)·eps."""
    raise NotImplementedError


def euler(x: Tensor, network: Callable[[Tensor, int], Tensor], times: Sequence[int], sigmas: Sequence[float]) -> Tensor:
    """A whole run with Euler's step. `network(input, time)` gives eps; x comes at the first σ and ends at the last."""
    raise NotImplementedError
