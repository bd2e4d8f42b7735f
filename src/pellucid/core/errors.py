"""Errors that say which name broke which rule, what was given, and what to do instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PellucidError(ValueError):
    """Bad input. `code` is stable: programs may match on it, people read the sentence."""

    def __init__(self, message: str, code: str = "input") -> None:
        super().__init__(message)
        self.code = code


class PlanError(PellucidError):
    """A plan that cannot be made, or that breaks the marginal law."""

    def __init__(self, message: str, code: str = "plan") -> None:
        super().__init__(message, code)


class Cancelled(Exception):  # noqa: N818
    """Raised between two rows when the caller asked the run to stop."""


def rule(name: str, must: str, got: object, advice: str = "") -> str:
    """The house sentence: `eta must be 0 for heun; got 0.5. Use euler_a for a stochastic sampler.`"""
    return f"{name} must be {must}; got {got!r}." + (f" {advice}" if advice else "")


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """A hint that lists the known names closest to an unknown one."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name.lower(), names, n=count, cutoff=0.3) or names[:count]
    return "Nearest: " + ", ".join(close) + "."
