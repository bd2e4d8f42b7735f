"""The schedule detector: which training schedule explains the levels at which a network denoises best.

For each level the network is told the time that a schedule has for it. Told the time of its own training, it denoises
best; the schedule whose times do so over all levels is the one that it was trained on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from pellucid.core.schedule import EDM, Flow, Schedule, Tabled
from pellucid.evidence.doctor.beliefs import UNEXPLAINED, Belief, at_scale, beliefs, explained
from pellucid.evidence.doctor.candidates import family, known, name_of, with_declared
from pellucid.evidence.doctor.checks import Unable, check
from pellucid.evidence.doctor.finding import Finding
from pellucid.evidence.doctor.hypotheses import MOST, SCALED, SURE, Answer, asked, detect, shown, unfit
from pellucid.evidence.doctor.probe import Probe
from pellucid.evidence.doctor.scale import believed_scale
from pellucid.evidence.doctor.subject import Subject
from pellucid.evidence.doctor.target_detector import for_network

COST, FAR = 1.05, 1.25  # square error by the config over that by the best schedule: from where it is told, and grave
BETAS = ("beta_start", "beta_end")
SPELLED = {"cosine": "squaredcos_cap_v2", "exponential": "exp"}


def detect_schedule(probe: Probe, most: int = MOST) -> Answer:
    """Which schedule a network was trained on, and how sure that is; read as the target that fits it best."""
    return detect(probe, most).schedule


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
    seen = beliefs(probe, answer.winner.target, found) if answer.name == declared or (wrong and worse >= COST) else []
    if sum(belief.excess >= UNEXPLAINED for belief in seen) >= 2:
        yield unknown(answer, seen, probe.schedule)
    elif wrong and worse >= COST:
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


def told_times(seen: list[Belief], curve: Schedule) -> Iterator[tuple[str, float]]:
    """Evidence: at each level the time of least error, and the one that a schedule tells."""
    for belief in seen:
        yield f"time of least error at sigma/alpha {belief.ratio:g}", belief.time
        yield f"time told at sigma/alpha {belief.ratio:g}", float(curve.time_at(belief.ratio))


def unknown(answer: Answer, seen: list[Belief], curve: Schedule) -> Finding:
    """A network that believes in times which no known schedule tells."""
    return Finding(
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


@check("schedule", needs=("network",))
def schedule(subject: Subject) -> Iterable[Finding]:
    """Was the network trained on the schedule that its config names?"""
    probe, detected = asked(subject)
    answer = detected.schedule
    agrees = answer.name == family(name_of(probe.schedule))
    sure = answer.confidence >= SURE and answer.name != SCALED
    if subject.data is None and not (answer.denoises and sure):
        raise Unable(unfit(answer, "schedule"))
    if not answer.denoises:
        raise Unable("the network does not denoise under any schedule")
    if subject.data is None and agrees:  # times of least error are looked for in data of the model's kind alone
        return []
    found = [] if answer.name == SCALED else list(differs(answer, probe))
    if found or sure or agrees:
        cure = f'schedule="{answer.name}"'
        return for_network(found, "schedule-mismatch", cure) if subject.pipeline is None else found
    trained = detected.as_trained(probe)
    size = believed_scale(trained)
    if size.off and explained(at_scale(trained, size.factor)):
        raise Unable("the scale of the data is not that of training: see the check scale of training")
    nearest = with_declared(probe.schedule, known(probe.schedule))[answer.winner.schedule]
    seen = beliefs(trained, trained.target, nearest)
    if explained(seen):
        raise Unable(f"the images do not tell the schedule apart: {answer.doubt()}; give more --data")
    return [unknown(answer, seen, probe.schedule)]
