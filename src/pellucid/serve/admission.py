"""What is accepted: an exact number of images at once, and nothing that could not be done in time."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field

from pellucid.serve.errors import ApiError

_PAUSE = 1.0  # seconds without an image, beyond what one takes, that count as idle


@dataclass
class Admission:
    """Counts the images that are accepted and not answered yet; one event loop calls it, so the count is exact."""

    limit: int
    taken: int = 0
    finished: list[float] = field(default_factory=list)  # when the last images of a busy time were done
    minute: deque[float] = field(default_factory=lambda: deque(maxlen=4096))  # when the last of all were
    seconds: float | None = None  # that one image took from its first stage to its end, lately

    def take(self, count: int) -> None:
        """Accepts images, all or none."""
        if self.taken + count > self.limit:
            free = self.limit - self.taken
            raise ApiError(
                429,
                "rate_limit_exceeded",
                f"the server has room for {max(free, 0)} of {self.limit} images now; the request asks for {count}.",
                retry_after=self.wait(count - free),
                reason="capacity",
            )
        self.taken += count

    def give_back(self, count: int = 1) -> None:
        self.taken -= count

    def done(self, seconds: float) -> None:
        self.seconds = seconds if self.seconds is None else 0.8 * self.seconds + 0.2 * seconds
        now = time.monotonic()
        if self.finished and now - self.finished[-1] > _PAUSE + 2 * seconds:
            self.finished = []  # the time between was idle, not slow
        self.finished = [*self.finished[-63:], now]
        self.minute.append(now)

    @property
    def rate(self) -> float | None:
        """Images per second while there was something to do."""
        if len(self.finished) < 2:
            return None
        return (len(self.finished) - 1) / max(self.finished[-1] - self.finished[0], 1e-3)

    @property
    def recent_rate(self) -> float:
        """Images per second over the last minute, idle or not."""
        now = time.monotonic()
        return sum(now - when < 60 for when in self.minute) / 60

    def wait(self, images: int) -> int:
        """Whole seconds until so many images will be done."""
        rate = self.rate
        each = 1 / rate if rate else self.seconds or 1.0
        return min(max(1, math.ceil(each * max(images, 1))), 600)

    def check_deadline(self, left: float, work: float | None) -> None:
        """Refuses what cannot be done in `left` seconds: what is before it, and its own work as measured."""
        rate = self.rate
        ahead = self.taken / rate if rate else 0.0
        own = work or 0.0
        need = max(ahead, own) if self.taken > 1 else own
        if need > left:
            raise ApiError(
                429,
                "deadline_unreachable",
                f"the image would be done in {need:.2f} s; the deadline is in {left:.2f} s.",
                retry_after=max(1, math.ceil(need - left)),
                param="deadline_ms",
                reason="deadline",
            )
