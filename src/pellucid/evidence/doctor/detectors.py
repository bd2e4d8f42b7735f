"""What a network was trained for, measured: target, schedule, scale of the data, drift."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.core.batch import StepSeen
from pellucid.core.compile import compile_plan
from pellucid.core.denoiser import denoiser
from pellucid.core.errors import PellucidError
from pellucid.core.loop import loop
from pellucid.core.noise import Philox
from pellucid.core.schedule import EDM, Array, DiscreteVP, Flow, Level, Schedule, Target, in_frame
from pellucid.evidence.doctor.checks import Evidence, Finding, Severity, check
from pellucid.evidence.doctor.hypotheses import (
    SCALED,
    SURE,
    Answer,
    answer_evidence,
    candidates,
    detection_of,
    family,
    log_square,
    schedule_name,
    undecided_words,
)  # fmt: skip
from pellucid.evidence.doctor.probe import Probe, probe_of
from pellucid.evidence.doctor.subject import KnownImages, Subject, UnsupportedCheck
from pellucid.evidence.statistics import Estimate, draws, mean_interval, percentiles
from pellucid.interop.diffusers_export import TARGET_NAMES
from pellucid.models.dit import DiT
from pellucid.pipeline.encoders.conditions import takes_labels, takes_text
from pellucid.pipeline.pipeline import Pipeline

# --- times of least error --------------------------------------------------------------------------------------------

_UNEXPLAINED = 1.15  # square error at the times of a schedule over that at the best times
_TIMED_RATIOS = (0.45, 1.2, 3.5)  # sigma / alpha
_TIMES, _FINER = 13, 8  # tried at each of them, and about the best of them
_TIMED_IMAGES = 8


@dataclass(frozen=True)
class BestTime:
    """At a level, the time at which the network denoises best."""

    ratio: float
    time: float
    excess: float  # square error at the time that a schedule has there, over that at the best time


def best_times(probe: Probe, target: Target, curve: Schedule, count: int = _TIMED_IMAGES) -> list[BestTime]:
    """The times at which the network denoises best, found by trying many; `curve` matters for its frame alone."""
    images = range(min(2 if probe.few else count, len(probe)))
    clean = probe.clean[: len(images)]
    reader = replace(probe, target=target, schedule=curve)
    found = []
    for k, ratio in enumerate(_TIMED_RATIOS):
        level = in_frame(ratio, "vp")
        x = clean * level.alpha + probe.noise(1000 + k, images) * level.sigma

        def errors(times: Array, x: Tensor = x, level: Level = level) -> Array:
            read = [reader.x0(x, level, float(time), images) for time in times]
            return np.array([float(log_square(x0 - clean).mean()) for x0 in read])

        time, least = _search_lowest(errors, *curve.span)
        own = errors(np.array([float(curve.time_at(ratio))]))
        found.append(BestTime(ratio, time, math.exp(min(float(own[0]) - least, 50.0))))
    return found


def _search_lowest(curve: Callable[[Array], Array], low: float, high: float) -> tuple[float, float]:
    """Where a curve is lowest and how low: over all of it, then finer about the lowest point."""
    times = np.linspace(low, high, _TIMES)
    values = curve(times)
    i = int(values.argmin())
    finer = np.linspace(times[max(i - 1, 0)], times[min(i + 1, _TIMES - 1)], _FINER)[1:-1]
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


def _explained(seen: list[BestTime]) -> bool:
    """Whether the schedule has the best time at every level."""
    return max(one.excess for one in seen) < _UNEXPLAINED


def _at_scale(probe: Probe, factor: float) -> list[BestTime]:
    """The best times by the probe's schedule, with the data scaled by this factor."""
    return best_times(replace(probe, clean=probe.clean * factor), probe.target, probe.schedule)


# --- target ----------------------------------------------------------------------------------------------------------

WORDS = {
    "eps": "the noise (eps)",
    "x0": "the clean image (x0)",
    "v": "the velocity (v)",
    "flow": "the flow (noise less image)",
    "edm": "EDM's preconditioned output",
}
_FLOW_CLASS, _EDM_CLASS = '"_class_name": "FlowMatchEulerDiscreteScheduler"', '"_class_name": "EDMEulerScheduler"'


def _set_keys(keys: str) -> str:
    return f"Set {keys} in scheduler/scheduler_config.json"


def _target_fix(found: Target, declared: Schedule) -> str:
    """What to write into the scheduler's config."""
    if found == "flow" and not isinstance(declared, Flow):
        return f'{_set_keys(_FLOW_CLASS)}, or "prediction_type": "flow_prediction" and "use_flow_sigmas": true.'
    if found == "edm" and not isinstance(declared, EDM):
        return f"{_set_keys(_EDM_CLASS)}."
    line = _set_keys(f'"prediction_type": "{TARGET_NAMES.get(found, found)}"')
    if found != "flow" and isinstance(declared, Flow):
        return f"{line}, in a scheduler that is not a flow one; the check schedule says which."
    return f'{line}, or load with pellucid.load(model, target="{found}").'


def target_findings(answer: Answer, declared: Target, schedule: Schedule) -> Iterable[Finding]:
    """Findings of an answer, where a config says `declared` on a schedule."""
    linear = ("square error of x0 over that of the best linear denoiser", answer.over_linear)
    evidence = (*answer_evidence(answer), linear)
    if not answer.denoises:
        yield Finding(
            "denoises-nothing",
            "error",
            "the network denoises no better than a constant factor, whatever its output is taken for",
            evidence,
            "Its weights are untrained or damaged, or the data are of another kind than those it was trained on.",
            "Load the weights again from their source, and give --data of the model's own kind.",
        )
    elif answer.name != declared and answer.confidence >= SURE:
        found: Target = answer.winner.target
        yield Finding(
            "target-mismatch",
            "error",
            f"the network predicts {WORDS[found]}; its config says {TARGET_NAMES.get(declared, declared)}",
            evidence,
            f"The network was trained for {found}: read as {declared}, its output denoises with "
            f"{answer.ratio(declared):.3g} times the square error.",
            _target_fix(found, schedule),
        )


def _for_network(found: list[Finding], code: str, argument: str) -> list[Finding]:
    """The findings of a network without files: one is mended by an argument."""
    return [replace(one, fix=f"Pass {argument} with the network.") if one.code == code else one for one in found]


@check("target")
def check_target(subject: Subject, network: Any) -> Iterable[Finding]:
    """Does the network predict what its config says?"""
    probe, detection = detection_of(subject)
    answer = detection.target
    if subject.data is None and not (answer.denoises and answer.confidence >= SURE):
        raise UnsupportedCheck(undecided_words(answer, "target"))
    found = list(target_findings(answer, probe.target, probe.schedule))
    if not found and answer.confidence < SURE:
        raise UnsupportedCheck(f"the images do not tell the target apart: {answer.doubt()}; give more --data")
    return _for_network(found, "target-mismatch", f'target="{answer.name}"') if subject.pipeline is None else found


# --- scale of the training data --------------------------------------------------------------------------------------
#
# An image with noise of ρ times its own scale is one x for every scale c: c·(x0 + ρ·eps), at sigma / alpha c·ρ. The
# network denoises it best, relative to c, at the scale that it was trained on. There the config's scale must lie: a VAE
# with the scaling factor of another model encodes images that are too large or too small for the network.

_PROFILE_SCALES = tuple(float(c) for c in np.geomspace(1 / 8, 8, 13))  # steps of √2
_NOISES = (0.5, 1.0, 2.0)  # ρ
_SCALE_IMAGES = 16
_SCALE_OFF = 1.25  # the scale is wrong beyond this factor, with all of its interval
_SCALE_COST = 1.01  # and where it costs at least this factor of the square error
_SCALE_FAR = 1.5  # an error
_SCALE_RESAMPLES = 400


@dataclass(frozen=True)
class TrainingScale:
    """The factor by which data must be multiplied to have the scale of training, with its interval over images."""

    factor: float
    interval: Estimate
    excess: float  # the square error at scale 1 over that at this factor

    @property
    def off(self) -> bool:
        """Whether it is not 1 for sure, and matters."""
        return (self.interval.low > _SCALE_OFF or self.interval.high < 1 / _SCALE_OFF) and self.excess > _SCALE_COST


def training_scale(probe: Probe, most: int = _SCALE_IMAGES) -> TrainingScale:
    """The scale at which a network denoises best."""
    logs = _scale_profile(probe, range(min(most, len(probe))))  # (S, N)
    at = np.log(np.array(_PROFILE_SCALES))
    best, least = lowest(at, logs.mean(1).numpy())
    counts = draws(logs.shape[1], _SCALE_RESAMPLES).double() / logs.shape[1]
    drawn = torch.tensor([math.exp(lowest(at, row)[0]) for row in (counts @ logs.T).numpy()])
    one = float(logs.mean(1)[_PROFILE_SCALES.index(min(_PROFILE_SCALES, key=lambda c: abs(math.log(c))))])
    return TrainingScale(math.exp(best), percentiles(drawn, math.exp(best), 0.99), math.exp(one - least))


def _scale_profile(probe: Probe, images: range) -> torch.Tensor:
    """(S, N): the mean over noises of the logarithm of the square error, relative to the scale."""
    clean = probe.clean[: len(images)]
    found = torch.zeros(len(_PROFILE_SCALES), len(images), dtype=torch.float64)
    for k, noise in enumerate(_NOISES):
        eps = probe.noise(2000 + k, images)
        for i, scale in enumerate(_PROFILE_SCALES):
            level = in_frame(scale * noise, "vp")
            x = (clean + noise * eps) * scale * level.alpha
            x0 = probe.x0(x, level, float(probe.schedule.time_at(level.ratio)), images)
            found[i] += log_square(x0 / scale - clean) / len(_NOISES)
    return found


@check("scale of training")
def check_scale(subject: Subject, network: Any, data: KnownImages) -> Iterable[Finding]:
    """Do images reach the network at the scale that it was trained on?"""
    probe = probe_of(subject, _SCALE_IMAGES)
    if len(probe) < 2:
        raise UnsupportedCheck(f"{len(probe)} image is too few: give two or more")
    trained = detection_of(subject)[1].as_trained(probe)
    seen = training_scale(trained)
    if not seen.off:
        return []
    if not _explained(_at_scale(trained, seen.factor)):  # betas of its own look like another scale at some levels alone
        raise UnsupportedCheck(
            "at no scale does its schedule have the times that the network wants: see the check schedule"
        )
    vae = None if subject.pipeline is None else subject.pipeline.components.vae
    evidence: Evidence = (
        ("images", len(probe)),
        ("standard deviation of the data as the network sees them", float(probe.clean.std())),
        ("factor at which the network denoises best", seen.factor),
        ("99 % interval", f"{seen.interval.low:.3g} to {seen.interval.high:.3g}"),
        ("square error, times that at the best factor", seen.excess),
    )
    words = f"network was trained on data {seen.factor:.3g} times as large as what it is given"
    grave: Severity = "error" if max(seen.factor, 1 / seen.factor) > _SCALE_FAR else "warning"
    if vae is None:
        cause = f"The {words}: pixels of another range."
        fix = "Normalise the images as in training: Pellucid gives them in [-1, 1]."
        return [Finding("data-scale", grave, f"the {words}", evidence, cause, fix)]
    factor = float(vae.config.scaling_factor)
    evidence = (*evidence, ("scaling_factor", factor))
    cause = f"The {words}: scaling_factor {factor:g} of the VAE is not the one of training."
    fix = f'Set "scaling_factor": {factor * seen.factor:.3g} in vae/config.json (measured), or the one of its training.'
    return [Finding("latent-scale", grave, f"the {words}", evidence, cause, fix)]


# --- schedule --------------------------------------------------------------------------------------------------------

_SCHEDULE_COST, _SCHEDULE_FAR = 1.05, 1.25  # square error over that by the best schedule: worth a warning, an error
_BETAS = ("beta_start", "beta_end")
_SPELLED = {"cosine": "squaredcos_cap_v2", "exponential": "exp"}


def _schedule_fix(found: Schedule) -> str:
    """What to write into the scheduler's config."""
    if isinstance(found, Flow):
        return f"{_set_keys(_FLOW_CLASS)}."
    if isinstance(found, EDM):
        return f"{_set_keys(_EDM_CLASS)}."
    if not isinstance(found, DiscreteVP) or found.name.startswith("sqrt"):
        return f'Put the betas of `pellucid schedules {found.name} --json` as "trained_betas" into its config.'
    settings = dict(found.made_with)
    keys = {"beta_schedule": _SPELLED.get(found.name, found.name), **{k: settings[k] for k in _BETAS if k in settings}}
    line = ", ".join(f'"{key}": {value!r}'.replace("'", '"') for key, value in keys.items())
    zero = ', "rescale_betas_zero_snr": true' if found.zero_terminal else ""
    return f"{_set_keys(line + zero)}."


def schedule_findings(answer: Answer, probe: Probe) -> Iterable[Finding]:
    """Findings of an answer."""
    declared = family(schedule_name(probe.schedule))
    found = candidates(probe.schedule)[answer.winner.schedule]
    wrong = answer.name != declared and answer.confidence >= SURE
    worse = answer.ratio(declared) if declared in answer.best else math.inf
    mismatch = wrong and worse >= _SCHEDULE_COST
    seen = best_times(probe, answer.winner.target, found) if mismatch or answer.name == declared else []
    if sum(one.excess >= _UNEXPLAINED for one in seen) >= 2:
        yield _unknown_schedule(answer, seen, probe.schedule)
    elif mismatch:
        same_frame = f"with the times of {declared} it denoises with {worse:.3g} times the square error."
        other_frame = f"{declared} mixes signal and noise in another frame."
        yield Finding(
            "schedule-mismatch",
            "error" if worse >= _SCHEDULE_FAR else "warning",
            f"the network was trained on the schedule {answer.name}; its config says {declared}",
            (*answer_evidence(answer, 3), *_time_evidence(seen, probe.schedule)),
            f"The network was trained on {answer.name}; {same_frame if declared in answer.best else other_frame}",
            _schedule_fix(found),
        )


def _time_evidence(seen: list[BestTime], curve: Schedule) -> Iterator[tuple[str, float]]:
    """At each level the time of least error, and the one that a schedule has there."""
    for one in seen:
        yield f"time of least error at sigma/alpha {one.ratio:g}", one.time
        yield f"time passed at sigma/alpha {one.ratio:g}", float(curve.time_at(one.ratio))


def _unknown_schedule(answer: Answer, seen: list[BestTime], curve: Schedule) -> Finding:
    """A network whose times of least error no known schedule has."""
    excess = ((f"square error over the least at sigma/alpha {one.ratio:g}", one.excess) for one in seen)
    return Finding(
        "schedule-unknown",
        "warning",
        "no known schedule has the times at which the network denoises best",
        (("nearest", answer.name), *_time_evidence(seen, curve), *excess),
        "It was trained on betas of its own, or takes times in another unit.",
        'Give the betas of its training as "trained_betas" in scheduler/scheduler_config.json.',
    )


@check("schedule")
def check_schedule(subject: Subject, network: Any) -> Iterable[Finding]:
    """Was the network trained on the schedule that its config names?"""
    probe, detection = detection_of(subject)
    answer = detection.schedule
    agrees = answer.name == family(schedule_name(probe.schedule))
    sure = answer.confidence >= SURE and answer.name != SCALED
    if subject.data is None and not (answer.denoises and sure):
        raise UnsupportedCheck(undecided_words(answer, "schedule"))
    if not answer.denoises:
        raise UnsupportedCheck("the network does not denoise under any schedule")
    if subject.data is None and agrees:  # times of least error are looked for in data of the model's kind alone
        return []
    found = [] if answer.name == SCALED else list(schedule_findings(answer, probe))
    if found or sure or agrees:
        argument = f'schedule="{answer.name}"'
        return _for_network(found, "schedule-mismatch", argument) if subject.pipeline is None else found
    trained = detection.as_trained(probe)
    size = training_scale(trained)
    if size.off and _explained(_at_scale(trained, size.factor)):
        raise UnsupportedCheck("the scale of the data is not that of training: see the check scale of training")
    nearest = candidates(probe.schedule)[answer.winner.schedule]
    seen = best_times(trained, trained.target, nearest)
    if _explained(seen):
        raise UnsupportedCheck(f"the images do not tell the schedule apart: {answer.doubt()}; give more --data")
    return [_unknown_schedule(answer, seen, probe.schedule)]


# --- drift -----------------------------------------------------------------------------------------------------------

_DRIFT_IMAGES = 8
_DRIFT_STEPS = 20
_DRIFT_SAMPLER = "dpmpp_2m"
_DRIFTED = 1.5  # x has drifted where all of the interval of its spread at the end is beyond this times the data's


@dataclass
class SpreadObserver:
    """An observer: the standard deviation of each image's x after each row, and the level that x has then."""

    levels: list[Level] = field(default_factory=list)
    found: list[Tensor] = field(default_factory=list)  # (N,) each

    def __call__(self, seen: StepSeen) -> None:
        self.levels.append(seen.next_levels[0])
        self.found.append(_deviations(seen.x_next))


def _deviations(x: Tensor) -> Tensor:
    """(N,) float64: the standard deviation of each image, about the mean of each of its channels."""
    return x.double().var((2, 3), correction=0).mean(1).sqrt().cpu()


def _sample_pipeline(pipe: Pipeline, data: KnownImages) -> SpreadObserver:
    """A short run without guidance, and the spread of its x."""
    network, spread = pipe.components.network, SpreadObserver()
    options: dict[str, Any] = {"n": _DRIFT_IMAGES}
    if takes_text(network):
        captions = list(data.captions or ())[:_DRIFT_IMAGES]
        options = {"prompt": captions} if len(captions) == _DRIFT_IMAGES else {"prompt": "", "n": _DRIFT_IMAGES}
    if takes_labels(network):
        labels = list(data.labels or ())[:_DRIFT_IMAGES]
        options = {"label": labels} if len(labels) == _DRIFT_IMAGES else {**options, "label": 0}
    options |= {"height": data.pixels.shape[-2], "width": data.pixels.shape[-1], "observers": [spread]}
    pipe(seed=0, sampler=_DRIFT_SAMPLER, steps=_DRIFT_STEPS, guidance=1.0, decode=False, **options)
    return spread


def _sample_network(probe: Probe) -> SpreadObserver:
    """The same of a network without a pipeline."""
    spread, images = SpreadObserver(), range(_DRIFT_IMAGES)
    plan = compile_plan(_DRIFT_SAMPLER, schedule=probe.schedule, target=probe.target, steps=_DRIFT_STEPS)
    denoise = denoiser(probe.network, probe.schedule, probe.target)
    start = Philox(images).first(probe.clean.shape[1:], probe.clean, images) * plan.initial_scale
    with torch.no_grad():
        loop([plan] * _DRIFT_IMAGES, denoise, start, Philox(images), [spread], (), None)
    return spread


@check("drift")
def check_drift(subject: Subject, network: Any, data: KnownImages) -> Iterable[Finding]:
    """Does a run keep the spread that its levels say, and end with that of the data?"""
    if isinstance(network, DiT):
        raise UnsupportedCheck("a class-conditional transformer is not run without guidance")
    probe, detection = detection_of(subject)
    wrong = detection.contradicts(probe)
    if wrong is not None:
        raise UnsupportedCheck(f"the run would drift by what the check {wrong} finds")
    try:
        spread = _sample_network(probe) if subject.pipeline is None else _sample_pipeline(subject.pipeline, data)
    except PellucidError as error:
        raise UnsupportedCheck(f"a run of {_DRIFT_STEPS} steps with {_DRIFT_SAMPLER} is refused: {error}") from None
    if not torch.isfinite(spread.found[-1]).all():
        raise UnsupportedCheck("the run is not finite: see the check overflow")
    found = list(drift_findings(spread, float(_deviations(probe.clean).square().mean().sqrt())))
    if found and training_scale(detection.as_trained(probe), _SCALE_IMAGES).off:
        raise UnsupportedCheck(
            "the run ends at the scale of training, not of the data: see the check scale of training"
        )
    return found


def drift_findings(spread: SpreadObserver, data: float) -> Iterable[Finding]:
    """Findings of a run, where the data have this standard deviation."""
    ratios = [
        float(found.square().mean().sqrt()) / math.hypot(level.alpha * data, level.sigma)
        for level, found in zip(spread.levels, spread.found, strict=True)
    ]
    interval = mean_interval((spread.found[-1] / data).log(), level=0.99)
    low, high = math.exp(interval.low), math.exp(interval.high)
    if low <= _DRIFTED and high >= 1 / _DRIFTED:
        return
    limit = math.sqrt(_DRIFTED)
    start = next((i for i, ratio in enumerate(ratios) if not 1 / limit <= ratio <= limit), len(ratios) - 1)
    end, way = ratios[-1], "grows" if low > _DRIFTED else "shrinks"
    yield Finding(
        "scale-drift",
        "warning",
        f"x {way} over a run: it ends with {end:.3g} times the spread of the data",
        (
            ("standard deviation of the data", data),
            ("standard deviation of x at the end", end * data),
            ("99 % interval of their ratio", f"{low:.3g} to {high:.3g}"),
            ("first step that is off", start + 1),
            ("sigma/alpha there", spread.levels[start].ratio),
        ),
        "Without guidance a run must keep the spread of its levels; the network "
        + ("leaves noise in x, or makes its image too strong" if way == "grows" else "makes its image too weak")
        + ": it is trained too little, damaged, or read wrongly.",
        "See the checks target, schedule and scale; where they are silent, train longer or load the weights again."
        + (" For pixels in [-1, 1], x0_filter=pellucid.Clip(1.0) keeps x0 in their range." if way == "grows" else ""),
    )
