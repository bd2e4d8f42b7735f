"""Checks of a recorded run: a wrong start or end, guidance without effect or too strong, numbers not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from pellucid.evidence.doctor.checks import Evidence, Finding, check
from pellucid.evidence.doctor.subject import Subject, UnsupportedCheck
from pellucid.evidence.trace import Step, Trace

_LEFT = 0.05  # sigma / alpha at the end: more noise than this is seen
_SLIGHT = 1e-3  # less than this is none
_DATA = 2.5  # standard deviations that the latents of an image may have
_START = 0.15  # how far the spread of the first x may be from its level's
_SATURATED = 0.08  # the share of x0 beyond its limit, in latents
_CLIPPED = 0.6  # the same in pixels, where pure colours lie at the limit
_OVERSHOT = 0.3  # the same at any step: scenes-128 has 0.07 at guidance 4, 0.21 at 7, and draws worse from 9 (0.34) on
_LEADS = 0.2  # the guidance delta over x0, somewhere: guidance contributes
_STRONG = 1.5  # the same where little noise is left: guidance makes the image, and not the network
_SAME = 1e-6  # 1 − cosine: cond and uncond are one


def _check_steps(trace: Trace) -> None:
    if not trace.steps:
        raise UnsupportedCheck("the trace holds no whole step")


def _not_finite(trace: Trace) -> tuple[Step, str] | None:
    """The first step with a number that is not finite, and of which tensor."""
    tensors = ((step, name) for step in trace.steps for name in ("x", "x0"))
    return next(((step, name) for step, name in tensors if not np.isfinite(step.norms[name]).all()), None)


@check("numbers of the trace")
def finite(subject: Subject, trace: Trace) -> Iterator[Finding]:
    """Are all numbers of the run finite?"""
    _check_steps(trace)
    found = _not_finite(trace)
    if found is None:
        return
    (step, name), recipe = found, trace.header.recipe
    number, dtype = step.index + 1, (recipe.dtype if recipe is not None else "") or trace.header.dtype
    what = "The network's prediction" if name == "x0" else "The network's input x"
    yield Finding(
        "run-not-finite",
        "error",
        f"the run breaks at step {number} of {trace.header.steps}",
        (("step", number), ("time passed", step.time), ("sigma/alpha", step.level.ratio), ("dtype", dtype)),
        f"{what} is not finite at step {number}, and nothing after it is.",
        "Run `pellucid doctor MODEL`: its check overflow names the module; or load with dtype float32.",
    )


# --- levels -------------------------------------------------------------------------------------------------------


@check("levels of the trace")
def levels(subject: Subject, trace: Trace) -> Iterator[Finding]:
    """Does the run start at the noise that its plan says, and end without any?"""
    _check_steps(trace)
    yield from _start(trace)
    recipe = trace.header.recipe
    for plan in {id(plan): plan for plan in trace.header.plans}.values():
        left = plan.end.ratio
        if left <= _SLIGHT or (recipe is not None and recipe.denoising_end is not None):
            continue
        yield Finding(
            "wrong-final-level",
            "warning" if left > _LEFT else "note",
            f"the run ends with noise left: sigma/alpha {left:.3g}",
            (
                ("sigma/alpha at the end", left),
                ("sigma/alpha of the last call", plan.rows[-1].level.ratio),
                ("sampler", plan.name),
                ("steps", len(plan.rows)),
            ),
            f"The plan's last row does not go to sigma 0: {left:.1%} of the signal is noise, which the image shows.",
            'End the grid at sigma 0: "final_sigmas_type": "zero" or "set_alpha_to_one": true in the scheduler config, '
            "or compile an exact plan.",
        )


def _start(trace: Trace) -> Iterator[Finding]:
    """The spread of the first x against its level: sigma, and alpha times that of the data, which is DATA at most."""
    spread = trace.steps[0].norms["x"] / math.sqrt(trace.header.numbers)
    for image, row in enumerate(trace.steps[0].rows):
        low, high = row.level.sigma, math.hypot(_DATA * row.level.alpha, row.level.sigma)
        noise = 4 * high / math.sqrt(2 * trace.header.numbers)  # by chance, for this many numbers
        if (
            np.isfinite(spread[image])
            and not low * (1 - _START) - noise <= spread[image] <= high * (1 + _START) + noise
        ):
            yield Finding(
                "wrong-start-level",
                "error",
                f"the first x has {spread[image] / high:.3g} times the spread of its level",
                (
                    ("standard deviation of x", float(spread[image])),
                    ("of its level", f"{low:.3g} to {high:.3g}"),
                    ("time passed", row.time),
                    ("image", image + 1),
                ),
                "The network is given a level that x does not have: the first noise was not scaled to its level, or "
                "scaled twice.",
                "Start with plan.initial_scale (sigma of the first level) times unit noise; give `latents` unscaled.",
            )
            return


# --- guidance -----------------------------------------------------------------------------------------------------


@check("guidance of the trace")
def guidance(subject: Subject, trace: Trace) -> Iterator[Finding]:
    """Does guidance act, and does it leave the prediction in its range?"""
    _check_steps(trace)
    if _not_finite(trace) is not None:
        raise UnsupportedCheck("the run is not finite")
    scale = scale_of(trace)
    yield from _without_effect(trace, scale)
    for too_much in (_saturated_end, _overshoot, _leading):  # the most severe of them
        if (finding := too_much(trace, scale)) is not None:
            yield finding
            return


def scale_of(trace: Trace) -> float | None:
    """The guidance scale of the run's recipe, where it is one number."""
    recipe = trace.header.recipe
    scale: Any = None if recipe is None else recipe.guidance.get("scale")
    return float(scale) if isinstance(scale, int | float) else None


def scale_evidence(scale: float | None) -> Evidence:
    """The scale, where it is known."""
    return () if scale is None else (("guidance scale", scale),)


def _without_effect(trace: Trace, scale: float | None) -> Iterator[Finding]:
    """cond and uncond that are one prediction: the prompt changes nothing."""
    both = [step for step in trace.steps if np.isfinite(step.cosine).all()]
    apart = [1 - step.cosine.min() for step in both]
    if both and (all(map(_same_bits, both)) or float(np.max(apart)) < _SAME):
        yield Finding(
            "prompt-no-effect",
            "error",
            "the predictions with and without the prompt are the same at every step",
            (
                ("steps", len(both)),
                ("largest 1 − cosine(cond, uncond)", float(np.max(apart))),
                ("smallest", float(np.min(apart))),
                ("largest guidance delta", float(np.nanmax([step.norms["delta"].max() for step in both]))),
                *scale_evidence(scale),
            ),
            "The network gets the same inputs with and without the prompt, or does not read them.",
            "Check the text encoder and the tokenizer, and that the prompt is not the negative prompt.",
        )


def _same_bits(step: Step) -> bool:
    """Whether cond and uncond of a step are the same bits."""
    a, b = step.digests["cond"], step.digests["uncond"]
    return bool((a == b).all() and (a != 0).any())


def _saturated_end(trace: Trace, scale: float | None) -> Finding | None:
    """x0 beyond its range at the end."""
    late = trace.steps[-max(1, len(trace.steps) // 4) :]
    saturated = float(np.mean([step.saturation.mean() for step in late]))
    lead = max(map(_relative_delta, trace.steps))
    if saturated <= (_SATURATED if trace.header.limit > 1 else _CLIPPED) or lead <= _LEADS:
        return None
    return Finding(
        "oversaturated",
        "warning",
        f"{saturated:.1%} of the prediction is beyond its range at the end of the run",
        (
            ("share of |x0| at or beyond the limit", saturated),
            ("limit", trace.header.limit),
            ("root mean square of x0", _rms(late[-1], trace)),
            ("guidance delta over x0, largest", lead),
            *scale_evidence(scale),
        ),
        f"Guidance{_of(scale)} pushes the prediction out of the range of images.",
        "Lower it to 7 or less, or correct it: --guidance '7 + rescale', or '7 + threshold'.",
    )


def _overshoot(trace: Trace, scale: float | None) -> Finding | None:
    """x0 of latents beyond its range on the way: what is predicted from noise is a mean, and means are small."""
    worst = max(trace.steps, key=lambda step: float(step.saturation.mean()))
    beyond = float(worst.saturation.mean())
    if trace.header.limit <= 1 or beyond <= _OVERSHOT or _relative_delta(worst) <= _LEADS:
        return None
    return Finding(
        "guidance-overshoots",
        "warning",
        f"at step {worst.index + 1} {beyond:.0%} of the prediction is beyond the range of images",
        (
            ("share of |x0| at or beyond the limit", beyond),
            ("limit", trace.header.limit),
            ("step", worst.index + 1),
            ("root mean square of x0", _rms(worst, trace)),
            ("the same at the end", _rms(trace.steps[-1], trace)),
            *scale_evidence(scale),
        ),
        "A prediction from noise is a mean of images, and smaller than they are. "
        f"Here guidance{_of(scale)} makes it larger, and later steps keep that.",
        "Lower it to 7 or less, or correct it: --guidance '7 + rescale'.",
    )


def _leading(trace: Trace, scale: float | None) -> Finding | None:
    """A guidance delta larger than the prediction, where little noise is left."""
    clear = [step for step in trace.steps if step.level.ratio < 1.0]
    worst = max(clear, key=_relative_delta, default=trace.steps[-1])
    most = _relative_delta(worst)
    if most <= _STRONG:
        return None
    facts = (("guidance delta over x0", most), ("step", worst.index + 1), ("sigma/alpha", worst.level.ratio))
    return Finding(
        "guidance-leads",
        "warning",
        f"at step {worst.index + 1} the guidance delta is {most:.3g} times the prediction",
        (*facts, *scale_evidence(scale)),
        "Guidance, and not the network, makes the image at a level where little noise is left.",
        "Lower the scale, or guide only where there is much noise: --guidance '7 + interval stop=0.7'.",
    )


def _of(scale: float | None) -> str:
    return "" if scale is None else f" of {scale:g}"


def _relative_delta(step: Step) -> float:
    """The guidance delta over x0, of the image where it is largest; 0 without guidance."""
    return float(np.nan_to_num(step.norms["delta"] / step.norms["x0"]).max())


def _rms(step: Step, trace: Trace) -> float:
    return float(step.norms["x0"].mean()) / math.sqrt(trace.header.numbers)
