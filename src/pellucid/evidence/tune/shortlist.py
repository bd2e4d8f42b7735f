"""Where to begin when nobody says: the few samplers that tune well, each on the grid that suits this model."""

from __future__ import annotations

from collections.abc import Callable

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.tune.errors import Truth, errors
from pellucid.evidence.tune.start import Start
from pellucid.evidence.tune.subject import Subject
from pellucid.evidence.tune.sweep import GRIDS
from pellucid.evidence.tune.table import Table

# Of every basis one or two. UniPC's rows have a corrector, which the others get from the tuning.
SAMPLERS = ("unipc-3", "dpmpp_2m", "dpmpp_3m", "deis-3", "ipndm-3", "lms-3")
SURE = "unipc"  # is among them wherever it can be
SIFTED = 16  # pairs
COUNT = 4


def shortlist(
    subject: Subject, truth: Truth, steps: int, at_once: int, done: Callable[[], object] = lambda: None
) -> list[Start]:
    """The best grid of each sampler by the mean of √error on a few pairs, the best samplers first."""
    few, best = truth.first(SIFTED), []
    for name in SAMPLERS:
        found = []
        for grid in GRIDS:
            start = Start.parse(f"{name}:{grid}")
            root = trial(start, subject, few, steps, at_once)
            if root is not None:
                found.append((root, start.text))
            done()
        best += [min(found)] if found else []
    if not best:
        raise PellucidError(rule("--model", "one that some start can run", subject.name, "Give --start."), "start")
    ranked = [Start.parse(text) for _, text in sorted(best)]
    sure = [start for start in ranked if start.sampler == SURE]
    kept = ranked[:COUNT]
    return kept if not sure or sure[0] in kept else [*kept[:-1], sure[0]]


def trial(start: Start, subject: Subject, truth: Truth, steps: int, at_once: int) -> float | None:
    """The mean of √error of a start; None where it makes no table here, or ends nowhere."""
    try:
        table = Table.of(start, subject.schedule, subject.target, steps)
    except PellucidError:
        return None
    found = errors(table.plan, subject, truth, at_once)
    return float(found.sqrt().mean()) if bool(found.isfinite().all()) else None
