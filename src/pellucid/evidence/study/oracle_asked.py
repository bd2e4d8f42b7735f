"""How a sampler is asked for in a study of oracles: as in other studies, without a grid, which the study varies."""

from __future__ import annotations

from pellucid.core.errors import PellucidError, rule
from pellucid.core.samplers import REGISTRY, Sampler
from pellucid.evidence.study.cells import Setup


def asked(text: str) -> Setup:
    """`unipc`, or `unipc:order=3`."""
    found = Setup.parse(text)
    if found.file is not None or found.grid is not None:
        advice = "Give --grids beside it."
        raise PellucidError(rule("sampler", "NAME[:KEY=VALUE…], without a grid", text, advice), "grid-twice")
    return found


def entry_of(setup: Setup) -> Sampler:
    return REGISTRY[setup.sampler]
