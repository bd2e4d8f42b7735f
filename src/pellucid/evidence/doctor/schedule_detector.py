"""The schedule detector: which training schedule explains the levels at which a network denoises best.

For each level the network is told the time that a schedule has for it. Told the time of its own training, it denoises
best; the schedule whose times do so over all levels is the one that it was trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pellucid.core.denoiser import input_scale, read_output
from pellucid.core.schedule import EDM, Array, Flow, Schedule, Tabled, Target, in_frame
from pellucid.evidence.doctor.candidates import family, known, name_of, with_declared
from pellucid.evidence.doctor.checks import Unable, check
from pellucid.evidence.doctor.finding import Finding
from pellucid.evidence.doctor.hypotheses import MOST, SCALED, SURE, Answer, detect, detected, log_square, shown
from pellucid.evidence.doctor.probe import Probe, probe_of
from pellucid.evidence.doctor.subject import Subject

COST, FAR = 1.05, 1.25  # square error by the config over that by the best schedule: from where it is told, and grave
UNEXPLAINED = 1.15  # the same of the best schedule over the best times of all
BELIEVED_AT = (0.45, 1.2, 3.5)  # sigma / alpha
TIMES, FINER = 13, 8  # told at each of them, and about the best of them
FEW = 8  # pictures
BETAS = ("beta_start", "beta_end")
SPELLED = {"cosine": "squaredcos_cap_v2", "exponential": "exp"}


@dataclass(frozen=True)
class Belief:
    """At a level, the time at which the network denoises best, and by what factor its square error is larger at the
    time that a schedule tells."""

    ratio: float
    time: float
    told: float
    excess: float


def detect_schedule(probe: Probe, most: int = MOST) -> Answer:
    """Which schedule a network was trained on, and how sure that is; read as the target that fits it best."""
    return detect(probe, most).schedule


def beliefs(probe: Probe, target: Target, curve: Schedule, count: int = FEW) -> list[Belief]:
    """The times that a network believes in, found by telling it many; free of any schedule but for the frame."""
    pictures = range(min(count, len(probe)))
    clean = probe.clean[: len(pictures)]
    found = []
    for k, ratio in enumerate(BELIEVED_AT):
        level = in_frame(ratio, "vp")
        x = clean * level.alpha + probe.noise(1000 + k, pictures) * level.sigma
        k_x, k_out = read_output(curve, target, "x0", level)
        scale = input_scale(curve, level)

        def told(times: Array, x: Tensor = x, k_x: float = k_x, k_out: float = k_out, scale: float = scale) -> Array:
            asked = [probe.ask(x * scale, float(time), pictures) for time in times]
            return np.array([float(log_square(x * k_x + out * k_out - clean).mean()) for out in asked])

        own = float(curve.time_at(ratio))
        time, least = searched(told, *curve.span)
        found.append(Belief(ratio, time, own, math.exp(min(float(told(np.array([own]))[0]) - least, 50.0))))
    return found


def searched(curve: Callable[[Array], Array], low: float, high: float) -> tuple[float, float]:
    """Where a curve is lowest and how low: over all of it, then finer about the lowest point."""
    times = np.linspace(low, high, TIMES)
    values = curve(times)
    i = int(values.argmin())
    finer = np.linspace(times[max(i - 1, 0)], times[min(i + 1, TIMES - 1)], FINER)[1:-1]
    times, values = np.append(times, finer), np.append(values, curve(finer))
    order = np.argsort(times)
    return lowest(times[order], values[order])


def lowest(times: Array, values: Array) -> tuple[float, float]:
    """Where a curve of points is lowest and how low, by the parabola through the lowest point and its neighbours."""
    i = int(values.argmin())
    if i in (0, len(times) - 1):
        return float(times[i]), float(values[i])
    (a, b, c), (p, q, r) = times[i - 1 : i + 2], values[i - 1 : i + 2]
    left, right = (b - a) * (q - r), (b - c) * (q - p)
    if left == right:
        return float(b), float(q)
    at = b - 0.5 * ((b - a) * left - (b - c) * right) / (left - right)
    return float(np.clip(at, a, c)), float(q)


def cure(found: Schedule) -> str:
    """What to write into the scheduler's config."""
    if isinstance(found, Flow):
        return 'Set "_class_name": "FlowMatchEulerDiscreteScheduler" in scheduler/scheduler_config.json.'
    if isinstance(found, EDM):
        return 'Set "_class_name": "EDMEulerScheduler" in scheduler/scheduler_config.json.'
    if not isinstance(found, Tabled) or found.name.startswith("sqrt"):
        return f'Put the betas of `pellucid schedules {found.name} --json` as "trained_betas" into its config.'
    made = dict(found.made_with)
    keys = {"beta_schedule": SPELLED.get(found.name, found.name), **{k: made[k] for k in BETAS if k in made}}
    line = ", ".join(f'"{key}": {value!r}'.replace("'", '"') for key, value in keys.items())
    zero = ', "rescale_betas_zero_snr": true' if found.zero_terminal else ""
    return f"Set {line}{zero} in scheduler/scheduler_config.json."


def differs(answer: Answer, probe: Probe) -> Iterable[Finding]:
    """Findings of an answer."""
    declared = family(name_of(probe.schedule))
    found = with_declared(probe.schedule, known(probe.schedule))[answer.winner.schedule]
    wrong = answer.name != declared and answer.confidence >= SURE
    worse = answer.ratio(declared) if declared in answer.best else math.inf
    if wrong and worse >= COST:
        seen = beliefs(probe, answer.winner.target, found)
        yield Finding(
            "schedule-mismatch",
            "error" if worse >= FAR else "warning",
            f"the network was trained on the schedule {answer.name}; its config says {declared}",
            (*shown(answer, 3), *told_times(seen, probe.schedule)),
            f"The network was trained on {answer.name}; "
            + (
                f"told the times of {declared}, it denoises with {worse:.3g} times the square error."
                if declared in answer.best
                else f"{declared} mixes signal and noise in another frame."
            ),
            cure(found),
        )
    elif answer.name == declared:
        yield from unexplained(beliefs(probe, answer.winner.target, found), answer, found)


def told_times(seen: list[Belief], curve: Schedule) -> Iterator[tuple[str, float]]:
    """Evidence: at each level the time of least error, and the one that a schedule tells."""
    for belief in seen:
        yield f"time of least error at sigma/alpha {belief.ratio:g}", belief.time
        yield f"time told at sigma/alpha {belief.ratio:g}", float(curve.time_at(belief.ratio))


def unexplained(seen: list[Belief], answer: Answer, curve: Schedule) -> Iterable[Finding]:
    """A network that believes in times which no known schedule tells."""
    off = [belief for belief in seen if belief.excess >= UNEXPLAINED]
    if len(off) >= 2:
        yield Finding(
            "schedule-unknown",
            "warning",
            "no known schedule tells the network the times at which it denoises best",
            (
                ("nearest", answer.name),
                *told_times(seen, curve),
                *((f"square error over the least at sigma/alpha {b.ratio:g}", b.excess) for b in seen),
            ),
            "It was trained on betas of its own, or is told times in another unit.",
            'Give the betas of its training as "trained_betas" in scheduler/scheduler_config.json.',
        )


@check("schedule", needs=("pipeline", "data"))
def schedule(subject: Subject) -> Iterable[Finding]:
    """Was the network trained on the schedule that its config names?"""
    probe = probe_of(subject)
    answer = detected(subject).schedule
    if not answer.denoises:
        raise Unable("the network does not denoise under any schedule")
    if answer.name == SCALED:
        raise Unable("the scale of the data is not that of training: see the check scale of training")
    found = list(differs(answer, probe))
    if not found and answer.name != family(name_of(probe.schedule)) and answer.confidence < SURE:
        raise Unable(f"the pictures do not tell the schedule apart: {answer.doubt()}; give more --data")
    return found
