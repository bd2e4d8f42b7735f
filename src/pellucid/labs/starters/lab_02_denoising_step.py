"""Lab 02: one denoising step. Fill in the three functions, then run `pellucid lab 02 --check FILE`.

A level has `level.alpha` and `level.sigma`, with alpha² + sigma² = 1 and x = alpha·x0 + sigma·eps. The network of
scenes-128 predicts v = alpha·eps − sigma·x0. Tensors are (batch, 4, 16, 16).
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from pellucid import Level


def predicted(x: Tensor, v: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """x0 and eps from the state x and the network's v at a level."""
    raise NotImplementedError


def step(x: Tensor, v: Tensor, here: Level, there: Level) -> Tensor:
    """DDIM's update: the next x, at the level `there`."""
    raise NotImplementedError


def sample(
    x: Tensor, network: Callable[[Tensor, float], Tensor], times: Sequence[float], levels: Sequence[Level]
) -> Tensor:
    """The whole run. `network(x, time)` gives v; there is one level more than times: the last one is the end."""
    raise NotImplementedError
