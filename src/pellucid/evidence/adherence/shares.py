"""Shares of images, with the interval that their count allows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

Z = 1.959963984540054  # of the normal distribution, for 95 %


@dataclass(frozen=True)
class Share:
    """`right` of `count` images. Its 95 % interval is Wilson's (1927), which holds near 0 and 1 too."""

    right: int
    count: int

    @property
    def value(self) -> float:
        return self.right / self.count if self.count else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        if not self.count:
            return 0.0, 1.0
        n, p = self.count, self.value
        middle = p + Z * Z / (2 * n)
        half = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        low, high = ((middle + sign * half) / (1 + Z * Z / n) for sign in (-1, 1))
        return low if self.right else 0.0, high if self.right < n else 1.0  # exactly, where rounding would leave a rest

    @staticmethod
    def of(marks: Iterable[bool | None]) -> Share:
        """Of what was asked: None is not."""
        asked = [mark for mark in marks if mark is not None]
        return Share(sum(asked), len(asked))

    @property
    def words(self) -> str:
        """'96.2 % (94.9 to 97.2)'"""
        if not self.count:
            return "–"
        return percent(self.value, *self.interval)

    def plain(self) -> dict[str, float | int | None]:
        low, high = self.interval
        value = self.value if self.count else None
        return {"right": self.right, "count": self.count, "share": value, "low": low, "high": high}


def percent(value: float, low: float, high: float) -> str:
    return f"{100 * value:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
