"""The target detector: what a network predicts, by what its raw output denoises as."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pellucid.core.schedule import EDM, Flow, Schedule, Target
from pellucid.evidence.doctor.checks import Unable, check
from pellucid.evidence.doctor.finding import Finding
from pellucid.evidence.doctor.hypotheses import MOST, SURE, Answer, asked, detect, shown, unfit
from pellucid.evidence.doctor.probe import Probe
from pellucid.evidence.doctor.subject import Subject
from pellucid.interop.diffusers_export import TARGET_NAMES

WORDS = {
    "eps": "the noise (eps)",
    "x0": "the clean image (x0)",
    "v": "the velocity (v)",
    "flow": "the flow (noise less image)",
    "edm": "EDM's preconditioned output",
}


def detect_target(probe: Probe, most: int = MOST) -> Answer:
    """What a network predicts, and how sure that is."""
    return detect(probe, most).target


def told_target(target: Target) -> str:
    return TARGET_NAMES.get(target, target)


def cure(found: Target, declared: Schedule) -> str:
    """What to write into the scheduler's config."""
    if found == "flow" and not isinstance(declared, Flow):
        return (
            'Set "_class_name": "FlowMatchEulerDiscreteScheduler" in scheduler/scheduler_config.json, '
            'or "prediction_type": "flow_prediction" and "use_flow_sigmas": true.'
        )
    if found == "edm" and not isinstance(declared, EDM):
        return 'Set "_class_name": "EDMEulerScheduler" in scheduler/scheduler_config.json.'
    line = f'Set "prediction_type": "{told_target(found)}" in scheduler/scheduler_config.json'
    if found != "flow" and isinstance(declared, Flow):
        return f"{line}, in a scheduler that is not a flow one; the check schedule says which."
    return f'{line}, or load with pellucid.load(model, target="{found}").'


def differs(answer: Answer, declared: Target, schedule: Schedule) -> Iterable[Finding]:
    """Findings of an answer, where a config says `declared` on a schedule."""
    linear = ("square error of x0 over that of the best linear denoiser", answer.over_linear)
    evidence = (*shown(answer), linear)
    if not answer.denoises:
        yield Finding(
            "denoises-nothing",
            "error",
            "the network denoises no better than one factor would, whatever its output is taken for",
            evidence,
            "Its weights are untrained or damaged, or the data are of another kind than those it was trained on.",
            "Load the weights again from their source, and give --data of the model's own kind.",
        )
    elif answer.name != declared and answer.confidence >= SURE:
        found: Target = answer.winner.target
        yield Finding(
            "target-mismatch",
            "error",
            f"the network predicts {WORDS[found]}; its config says {told_target(declared)}",
            evidence,
            f"The network was trained for {found}: read as {declared}, its output denoises with "
            f"{answer.ratio(declared):.3g} times the square error.",
            cure(found, schedule),
        )


def for_network(found: list[Finding], code: str, cure: str) -> list[Finding]:
    """The findings of a network without files: the cure of one is an argument."""
    return [replace(one, fix=f"Pass {cure} with the network.") if one.code == code else one for one in found]


@check("target", needs=("network",))
def target(subject: Subject) -> Iterable[Finding]:
    """Does the network predict what its config says?"""
    probe, detected = asked(subject)
    answer = detected.target
    if subject.data is None and not (answer.denoises and answer.confidence >= SURE):
        raise Unable(unfit(answer, "target"))
    found = list(differs(answer, probe.target, probe.schedule))
    if not found and answer.confidence < SURE:
        raise Unable(f"the images do not tell the target apart: {answer.doubt()}; give more --data")
    return for_network(found, "target-mismatch", f'target="{answer.name}"') if subject.pipeline is None else found
