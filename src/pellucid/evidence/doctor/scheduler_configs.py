"""Checks of a scheduler's config alone: its keys, its values, and whether schedule and target fit together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from pellucid.core.dialect_diffusers import SPACINGS
from pellucid.core.errors import PellucidError, nearest
from pellucid.core.schedule import DiscreteVP
from pellucid.evidence.doctor.checks import Finding, check
from pellucid.evidence.doctor.subject import Subject
from pellucid.interop import diffusers_config
from pellucid.interop.diffusers_classes import CLASSES, KNOWN
from pellucid.interop.diffusers_config import SchedulerSettings

# Keys that change the image, and the values with which they change nothing.
_ASKING: dict[str, tuple[Any, ...]] = {
    "use_karras_sigmas": (False, None),
    "use_exponential_sigmas": (False, None),
    "use_beta_sigmas": (False, None),
    "use_lu_lambdas": (False, None),
    "use_flow_sigmas": (False, None),
    "rescale_betas_zero_snr": (False, None),
    "thresholding": (False, None),
    "trained_betas": (None,),
    "prediction_type": ("epsilon", "flow_prediction", None),
    "shift": (1, 1.0, None),
    "flow_shift": (1, 1.0, None),
}
_VALUES: dict[str, tuple[str, ...]] = {"timestep_spacing": SPACINGS, "final_sigmas_type": ("zero", "sigma_min")}
# Schedulers of diffusers that Pellucid does not read; a test compares the names with diffusers' own.
ELSEWHERE = (
    "AmusedScheduler", "BlockRefinementScheduler", "CMStochasticIterativeScheduler", "CogVideoXDDIMScheduler",
    "CogVideoXDPMScheduler", "ConsistencyDecoderScheduler", "DDPMWuerstchenScheduler",
    "DPMSolverMultistepInverseScheduler", "DiscreteDDIMScheduler", "EntropyBoundScheduler",
    "FlowMapEulerDiscreteScheduler", "FlowMatchLCMScheduler", "HeliosDMDScheduler", "HeliosScheduler",
    "KarrasVeScheduler", "LTXEulerAncestralRFScheduler", "MiniMaxH3Scheduler", "PiflowScheduler",
    "RFD4ProteinaScheduler", "RePaintScheduler", "SCMScheduler", "ScoreSdeVeScheduler", "ScoreSdeVpScheduler",
    "UnCLIPScheduler", "VQDiffusionScheduler",
)  # fmt: skip
_FLOW_KEYS = ("shift", "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")
_TOO_MUCH_SIGNAL = 0.2  # alpha of the noisiest level: the first noise of a run has none of it
_FAINT_SIGNAL = 1e-3  # alpha under which an error of eps is amplified by more than a thousand


@check("scheduler keys")
def keys(subject: Subject, scheduler: Mapping[str, Any]) -> Iterator[Finding]:
    """Keys that nobody knows, and keys of other classes."""
    name = str(scheduler.get("_class_name"))
    if name not in CLASSES:
        return
    known = CLASSES[name][1]
    others = {key: value for key, value in scheduler.items() if not key.startswith("_") and key not in known}
    for key, value in others.items():
        if key not in KNOWN:
            yield _unknown_key(name, key, value)
    inert = {key: value for key, value in others.items() if key in KNOWN}
    asking = {key: value for key, value in inert.items() if key in _ASKING and value not in _ASKING[key]}
    for key, value in asking.items():
        if not (key in _FLOW_KEYS and not flows(scheduler)):  # which the check of flow and eps reports
            yield _unheard(name, key, value)
    quiet = [key for key in inert if key not in asking]
    if quiet:
        yield Finding(
            "inert-keys",
            "note",
            f"{len(quiet)} keys of other schedulers have no effect in {name}",
            tuple((key, _short_repr(inert[key])) for key in quiet),
            f"{name} does not read them; diffusers writes them when a scheduler is made from another one's config.",
            "Remove them, or leave them.",
        )


def _unknown_key(name: str, key: str, value: Any) -> Finding:
    return Finding(
        "unknown-key",
        "warning",
        f"{key} is not a key of any diffusers scheduler",
        ((key, _short_repr(value)),),
        f"{name} ignores {key}, so what it asks for does not happen; perhaps it is misspelt.",
        f"Remove {key}, or correct its spelling. {nearest(key, CLASSES[name][1])}",
    )


def _unheard(name: str, key: str, value: Any) -> Finding:
    able = [other for other, (_, keys) in CLASSES.items() if key in keys and "Parallel" not in other]
    return Finding(
        "unheard-key",
        "warning",
        f"{key}={_short_repr(value)} has no effect in {name}",
        ((key, _short_repr(value)), ("_class_name", name)),
        f"{name} does not read {key}, so the setting has no effect.",
        f'Use a class that reads it, such as "_class_name": "{able[0]}", or remove {key}.',
    )


def _short_repr(value: Any) -> str:
    text = str(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def flows(config: Mapping[str, Any]) -> bool:
    """Whether a config asks for a flow's straight path."""
    return str(config.get("_class_name")).startswith("FlowMatch") or bool(config.get("use_flow_sigmas"))


@check("scheduler values")
def values_check(subject: Subject, scheduler: Mapping[str, Any]) -> Iterator[Finding]:
    """A class that is not known, and values that no class takes."""
    for key, allowed in _VALUES.items():
        value = scheduler.get(key)
        if value is not None and value not in allowed:
            yield _bad_value(f"{key} must be one of {', '.join(allowed)}", key, value, f'"{key}": "{allowed[0]}"')
            return
    try:
        with np.errstate(all="ignore"):  # absurd betas overflow on their way to a refusal
            diffusers_config.read(dict(scheduler))
    except PellucidError as error:
        if error.code == "config-class":
            yield _bad_class(scheduler, error)
        elif subject.reading is None:
            yield _bad_value(str(error), "error", error.code, "Correct the value that the cause names.")
        elif refused := diffusers_config.unsupported(subject.reading.class_name, subject.reading.values):
            yield _not_here(subject.reading, refused)


def _bad_class(config: Mapping[str, Any], error: PellucidError) -> Finding:
    name = str(config.get("_class_name"))
    if name in ELSEWHERE or (name.startswith("Flax") and name.removeprefix("Flax") in CLASSES):
        return Finding(
            "not-supported",
            "note",
            f"Pellucid does not read {name}",
            (("_class_name", name),),
            f"{name} is a class of diffusers that has no sampler here, so nothing of its config is checked.",
            "Open the model with diffusers and give the pipeline to pellucid.wrap.",
        )
    return Finding(
        "scheduler-class",
        "error",
        "the scheduler's class is not one that is known",
        (("_class_name", _short_repr(config.get("_class_name"))),),
        str(error),
        f"Name a class of diffusers. {nearest(name, CLASSES)}",
    )


def _bad_value(cause: str, key: str, value: Any, fix: str) -> Finding:
    return Finding("config-value", "error", "a value of the scheduler's config makes no schedule or grid",
                   ((key, _short_repr(value)),), cause, fix)  # fmt: skip


def _not_here(reading: SchedulerSettings, refused: list[str]) -> Finding:
    return Finding(
        "not-supported",
        "note",
        f"Pellucid does not sample as {reading.class_name} with these values does",
        (("_class_name", reading.class_name),),
        " ".join(refused),
        f"Name a sampler: pellucid sample MODEL PROMPT --sampler {reading.sampler}",
    )


# --- schedule and target ---------------------------------------------------------------------------------------


@check("zero terminal SNR")
def zero_snr(subject: Subject, reading: SchedulerSettings) -> Iterator[Finding]:
    """eps at a level without signal."""
    if reading.target not in ("eps", "score") or not isinstance(reading.schedule, DiscreteVP):
        return
    alpha = float(reading.schedule.alpha_bar[-1]) ** 0.5
    if reading.schedule.zero_terminal:
        rescaled = bool(reading.values.get("rescale_betas_zero_snr"))
        why = "rescale_betas_zero_snr is set" if rescaled else "the last beta is 1"
        yield Finding(
            "eps-zero-snr",
            "error",
            "the schedule ends at zero SNR, but the config says that the network predicts eps",
            (("alpha at the last time", alpha), ("beta at the last time", float(reading.schedule.betas[-1]))),
            f"{why}, so the noisiest level is pure noise: alpha is 0 there, and x0 = (x − sigma·eps) / alpha is not "
            "determined by eps. Such networks are trained for v (or x0).",
            '"prediction_type": "v_prediction" if the network was trained so; '
            + ('else "rescale_betas_zero_snr": false' if rescaled else "else give the betas that it was trained with"),
        )
    elif 0 < alpha < _FAINT_SIGNAL and (subject.plan is None or subject.plan.start.to("vp").alpha < _FAINT_SIGNAL):
        yield Finding(
            "eps-faint-signal",
            "note",
            "the first step amplifies an error of eps",
            (("alpha at the last time", alpha), ("error of x0 for one of eps", math.sqrt(1 - alpha**2) / alpha)),
            "At the noisiest level there is almost no signal, and x0 = (x − sigma·eps) / alpha divides by it.",
            "Train for v, or start lower: a grid such as leading omits the last times.",
        )


@check("end of the schedule")
def schedule_end(subject: Subject, reading: SchedulerSettings) -> Iterator[Finding]:
    """A noisiest level that still holds much of the image: a run starts from noise alone."""
    if not isinstance(reading.schedule, DiscreteVP):
        return
    alpha = float(reading.schedule.alpha_bar[-1]) ** 0.5
    if alpha > _TOO_MUCH_SIGNAL:
        yield Finding(
            "schedule-ends-early",
            "warning",
            "the noisiest level of the schedule is not noise",
            (("alpha at the last time", alpha), ("num_train_timesteps", reading.schedule.num_train),
             ("beta at the last time", float(reading.schedule.betas[-1]))),
            f"At the last time x still holds {alpha:.0%} of the image, but a run starts from noise that holds none: "
            "num_train_timesteps, beta_start and beta_end do not belong together.",
            'Set those of training: "num_train_timesteps": 1000 for the published schedules.',
        )  # fmt: skip


@check("flow and eps")
def flow_and_eps(subject: Subject, scheduler: Mapping[str, Any]) -> Iterable[Finding]:
    """A flow's config in a sampler of betas, and the reverse."""
    kind = scheduler.get("prediction_type")
    if flows(scheduler):
        by_default = scheduler.get("use_flow_sigmas") and kind is None  # a flow's path and, by default, eps
        return [_eps_in_flow(scheduler)] if kind in ("epsilon", "v_prediction", "sample") or by_default else []
    if str(scheduler.get("_class_name")) not in CLASSES:
        return []
    shifts = [(key, _short_repr(scheduler[key])) for key in _FLOW_KEYS if scheduler.get(key) is not None]
    if kind == "flow_prediction" or shifts:  # only flow schedulers have these keys: the config came from one
        said = [] if kind is None else [("prediction_type", str(kind))]
        return [flow_in_eps(str(scheduler["_class_name"]), (*said, *shifts))]
    return []


def _eps_in_flow(config: Mapping[str, Any]) -> Finding:
    name = str(config["_class_name"])
    kind = str(config.get("prediction_type", "epsilon"))
    how = "use_flow_sigmas lays" if config.get("use_flow_sigmas") else f"{name} lays"
    return Finding(
        "eps-in-flow-sampler",
        "error",
        f"a flow sampler is used for a network whose config says it predicts {kind}",
        (("_class_name", name), ("prediction_type", kind), ("use_flow_sigmas", str(config.get("use_flow_sigmas")))),
        f"{how} the straight path x = (1 − t)·x0 + t·eps, on which a network of {kind} on a schedule of betas was "
        "never trained: levels and times mean something else to it.",
        '"prediction_type": "flow_prediction" with "use_flow_sigmas": true for a flow network; '
        'else a class of betas, such as "_class_name": "EulerDiscreteScheduler"',
    )


def flow_in_eps(name: str, evidence: tuple[tuple[str, str], ...]) -> Finding:
    fix = '"use_flow_sigmas": true' if "use_flow_sigmas" in CLASSES[name][1] else (
        '"_class_name": "FlowMatchEulerDiscreteScheduler"'
    )  # fmt: skip
    return Finding(
        "flow-in-eps-sampler",
        "error",
        "a flow network's config names a sampler for schedules of betas",
        (("_class_name", name), *evidence),
        f"{name} follows a schedule of betas with alpha² + sigma² = 1, where a flow network expects "
        "x = (1 − t)·x0 + t·eps and t from 0 to 1: levels, times and the meaning of its output all differ.",
        fix,
    )
