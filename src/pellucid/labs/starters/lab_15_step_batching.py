"""Lab 15: step batching. Fill in the four functions, then: pellucid lab 15 --check THIS_FILE"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

SHORT = 10  # calls; a request of at most so many is short, any other one is long


class Request(NamedTuple):
    """A request of one image: this one is written already."""

    arrived: int  # the step of the batch at which it came
    calls: int  # that it needs in all


def mixed_step(registers: Mapping[str, Tensor], weights: Sequence[Mapping[str, float]]) -> Tensor:
    """The next x (B, …) of a batch whose images are at rows of different plans.

    `registers` are tensors (B, …) by name: x, p0, p1, …. `weights` has for each image the weights of its own row by
    name; a register that is not named there has no part in the next x of that image.
    """
    raise NotImplementedError


def latency(wait: float, sizes: Sequence[int], seconds: Mapping[int, float]) -> float:
    """Seconds from the arrival of a request to its last call.

    It waited, and then had one call in each of the steps whose numbers of images are `sizes`; `seconds` says how long
    a step of so many images takes.
    """
    raise NotImplementedError


def best_capacity(seconds: Mapping[int, float], calls: int, limit: float) -> int:
    """How many images a batch that is always full should have: the most images per second within a limit.

    `seconds` has the seconds of a step for each size that can be chosen. The limit is on the seconds that a run of
    `calls` calls takes. 0 where even the fastest size is beyond it.
    """
    raise NotImplementedError


def next_entry(waiting: Sequence[Request], running: Sequence[Request], capacity: int) -> Request | None:
    """Which of the requests that wait joins next; None where none of them should.

    It is asked between two steps, again and again until it says None. `waiting` is in the order of arrival. `running`
    are in the batch, which has `capacity` places (two at least). What is wanted:

    - A short request finds a place within SHORT steps, even while long ones fill the rest; at most one short request
      comes in any SHORT steps then.
    - Nobody starves: whatever comes later, and however much, each request joins at some time.
    - While requests wait, at most one place stays empty.
    """
    raise NotImplementedError
