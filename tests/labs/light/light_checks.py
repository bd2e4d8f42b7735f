"""Four checks on numbers, for tests of the process itself: they need no torch, whose import takes two seconds."""

from __future__ import annotations

from types import ModuleType

from pellucid.labs.answers import Check, Mistake


def wants(name: str, right: float) -> Check:
    def run(answer: ModuleType) -> None:
        if (got := getattr(answer, name)(0.25)) != right:
            raise Mistake(f"{name} must be {right}; got {got}.")

    return Check(name, run)


CHECKS = [wants("alpha_bar", 0.75), wants("stepped", 0.125), wants("noised", 1.25), wants("snr", 0.0625)]
