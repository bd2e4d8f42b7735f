"""One thread instead of several, where several would wait for each other on a busy CPU.

torch's threads spin while they wait. `import pellucid` limits that, unless torch was imported first and had read its
settings. Then a thread may spin for one that another process keeps from running: 5 steps of scenes-128 that take 0.6 s
with one thread took 8 to 26 s with two. Whether that is so now is measured, in a millisecond where it is not.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.functional import conv2d

SETTINGS = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}  # who sets one of them has decided
SMALL = 100_000_000  # parameters up to which one thread is fast enough to be worth it
WORSE = 4.0  # times one thread's time that several may take; 200 was measured on a busy machine, 0.8 on a quiet one
_choosing = threading.RLock()
_counts: list[int] = []  # of threads before, for each run that is on one thread now
NOTE = (
    "ran on 1 of {count} threads, because other processes keep the CPU busy; "
    "sums are cut by threads, so the last bits may differ. Import pellucid before torch, and all threads are used"
)


@contextmanager
def suited(network: nn.Module, device: torch.device) -> Iterator[list[str]]:
    """Runs its block with the threads that are faster now; yields a note where that is one of several."""
    with _choosing:
        count = _counts[0] if _counts else torch.get_num_threads()
    if device.type != "cpu" or count == 1 or SETTINGS & os.environ.keys() or not _small(network) or not _wait(count):
        yield []
        return
    with _choosing:
        _counts.append(count)
        torch.set_num_threads(1)
    try:
        yield [NOTE.format(count=count)]
    finally:
        with _choosing:
            _counts.remove(count)
            torch.set_num_threads(1 if _counts else count)


def _small(network: nn.Module) -> bool:
    return sum(p.numel() for p in network.parameters()) <= SMALL


def _wait(count: int) -> bool:
    """Whether several threads take far longer for a small convolution than one does."""
    image, kernel = torch.zeros(2, 64, 16, 16), torch.zeros(64, 64, 3, 3)

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        conv2d(image, kernel, padding=1)  # the threads start, the kernel is chosen
        began = time.perf_counter()
        for _ in range(3):
            conv2d(image, kernel, padding=1)
        return time.perf_counter() - began

    with _choosing:
        try:
            return seconds(count) > WORSE * seconds(1)
        finally:
            torch.set_num_threads(count)
