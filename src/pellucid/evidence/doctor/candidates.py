"""The schedules that a network may have been trained on: the usual ones, and the one that its config names."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pellucid.core import schedule as schedules
from pellucid.core.schedule import EDM, Flow, Schedule, Tabled

RATIOS: tuple[float, ...] = tuple(float(r) for r in np.geomspace(0.25, 6.0, 7))  # sigma / alpha
ALIKE = 0.01  # of the span of times: schedules that tell no more than this apart are one
NUM_TRAIN = 1000
TABLED = ("linear", "scaled_linear", "cosine", "sqrt_alpha_bar", "sqrt_beta", "sigmoid", "laplace", "exponential")
ZERO = ", zero terminal SNR"


def known(declared: Schedule) -> dict[str, Schedule]:
    """The usual schedules, of as many times as the config's."""
    count = declared.num_train or NUM_TRAIN
    found: dict[str, Schedule] = {name: schedules.make(name, num_train=count) for name in TABLED}
    found["scaled_linear" + ZERO] = schedules.make("scaled_linear", num_train=count, zero_snr=True)
    found["flow"] = Flow(scale=declared.scale if isinstance(declared, Flow) else float(count))
    found["edm"] = declared if isinstance(declared, EDM) else EDM()
    return found


def with_declared(declared: Schedule, others: Mapping[str, Schedule]) -> dict[str, Schedule]:
    """The config's schedule first, under its own name; of those that tell the same times only the first is kept."""
    found = {name_of(declared): declared}
    for name, curve in others.items():
        if not any(alike(curve, kept) for kept in found.values()):
            found[name if name not in found else f"{name}, as usual"] = curve
    return found


def name_of(declared: Schedule) -> str:
    """The name of a schedule: the usual one that it equals, or its own."""
    for name, curve in known(declared).items():
        if alike(curve, declared):
            return name
    zero = ZERO if isinstance(declared, Tabled) and declared.zero_terminal else ""
    return f"{declared.name} of the config{zero}"


def family(name: str) -> str:
    """The name of a schedule without its end: zero terminal SNR moves the other levels too little to be told apart."""
    return name.removesuffix(ZERO)


def alike(one: Schedule, other: Schedule) -> bool:
    """Whether a network would be told the same times for the same levels, and see them in the same frame."""
    if one.frame != other.frame:
        return False
    low, high = one.span
    apart = np.abs(one.time_at(np.array(RATIOS)) - other.time_at(np.array(RATIOS)))
    return bool(apart.max() <= ALIKE * (high - low))
