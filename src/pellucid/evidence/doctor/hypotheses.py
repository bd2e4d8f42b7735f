"""The schedules that a network may have been trained on: the usual ones, and the one that its config names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.core import schedule as schedules
from pellucid.core.denoiser import input_scale, read_output
from pellucid.core.schedule import EDM, Flow, Frame, Schedule, Tabled, Target, in_frame
from pellucid.evidence.doctor.checks import Unable
from pellucid.evidence.doctor.probe import Probe, probe_of
from pellucid.evidence.doctor.subject import Subject
from pellucid.evidence.statistics import draws

# --- Schedules ------------------------------------------------------------------------------------------------------

RATIOS: tuple[float, ...] = tuple(float(r) for r in np.geomspace(0.25, 6.0, 7))  # sigma / alpha
ALIKE = 0.01  # of the span of times: schedules that tell no more than this apart are one
NUM_TRAIN = 1000
TABLED = ("linear", "scaled_linear", "cosine", "sqrt_alpha_bar", "sqrt_beta", "sigmoid", "laplace", "exponential")
ZERO = ", zero terminal SNR"


def known_schedules(declared: Schedule) -> dict[str, Schedule]:
    """The usual schedules, of as many times as the config's."""
    count = declared.num_train or NUM_TRAIN
    found: dict[str, Schedule] = {name: schedules.make(name, num_train=count) for name in TABLED}
    found["scaled_linear" + ZERO] = schedules.make("scaled_linear", num_train=count, zero_snr=True)
    found["flow"] = Flow(scale=declared.scale if isinstance(declared, Flow) else float(count))
    found["edm"] = declared if isinstance(declared, EDM) else EDM()
    return found


def with_declared(declared: Schedule, others: Mapping[str, Schedule]) -> dict[str, Schedule]:
    """The config's schedule first, under its own name; of those that tell the same times only the first is kept."""
    found = {schedule_name(declared): declared}
    for name, curve in others.items():
        if not any(alike(curve, kept) for kept in found.values()):
            found[name if name not in found else f"{name}, as usual"] = curve
    return found


def schedule_name(declared: Schedule) -> str:
    """The name of a schedule: the usual one that it equals, or its own."""
    for name, curve in known_schedules(declared).items():
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


# --- Hypotheses -----------------------------------------------------------------------------------------------------

MOST = 64  # images
FIRST = 4  # images that all schedules are tried on; those that are out of the question then are dropped
FEW_FIRST, FEW_RATIOS = 2, RATIOS[1::2]  # the same, and the levels, where calls are slow
ROUNDS = (16, 32, 64)  # images after which a clear answer ends the questions
CLEAR = 0.999
SURE = 0.99  # the confidence from which a contradiction is told
LEARNT = 0.9  # of the square error of the best linear denoiser: what a network must undercut to be one
RESAMPLES = 4000
SCALES = (1 / 8, 1 / 4, 1 / 2, 2**-0.5, 2**0.5, 2.0, 4.0, 8.0)  # of the data, beside 1
FEW_SCALES = (1 / 4, 1 / 2, 2.0, 4.0)
FEW_SCHEDULES = ("linear", "scaled_linear", "cosine", "flow")  # of large networks
SCALED = "another scale of the data"
WORST = 1e9  # the mean square that an output which is not finite counts as
# What a network may predict in each frame. Zero terminal SNR forbids nothing here: no level is pure noise.
READINGS: dict[Frame, tuple[Target, ...]] = {
    "vp": ("eps", "x0", "v"),
    "flow": ("flow", "x0", "eps"),
    "ve": ("edm", "eps", "x0", "v"),
}


class Hypothesis(NamedTuple):
    """A reading of a network: what it predicts, by which schedule it is told the time, and how many times as large as
    they are the data were in training."""

    target: Target
    schedule: str
    scale: float = 1.0


@dataclass(frozen=True)
class Scores:
    """By hypothesis, level and image, ln(e / l): of the error of x0 over that of the best linear denoiser."""

    hypotheses: tuple[Hypothesis, ...]
    errors: Tensor = field(repr=False)  # (H, L, N)

    @property
    def images(self) -> int:
        return self.errors.shape[2]

    @property
    def logs(self) -> Tensor:
        """(H, L, N): the logarithm of the score, ln(e / (e + l))."""
        return -F.softplus(-self.errors)

    def among(self, keep: Callable[[Hypothesis], bool]) -> Scores:
        rows = [i for i, one in enumerate(self.hypotheses) if keep(one)]
        return Scores(tuple(self.hypotheses[i] for i in rows), self.errors[rows])

    def of(self, one: Hypothesis) -> Tensor:
        """(L, N): the errors of a hypothesis."""
        return self.errors[self.hypotheses.index(one)]

    def join(self, more: Scores) -> Scores:
        """With the images of a further round."""
        return Scores(self.hypotheses, torch.cat([self.errors, more.errors], 2))

    def beside(self, more: Scores) -> Scores:
        """With further hypotheses on the same images."""
        return Scores(self.hypotheses + more.hypotheses, torch.cat([self.errors, more.errors]))


@dataclass(frozen=True)
class Answer:
    """The name that won (a target or a schedule), how sure that is, and the best hypothesis of every name."""

    name: str
    confidence: float
    best: Mapping[str, Hypothesis]
    scores: Scores = field(repr=False)

    @property
    def winner(self) -> Hypothesis:
        return self.best[self.name]

    @property
    def ranked(self) -> list[str]:
        """All names, the likeliest first."""
        return sorted(self.best, key=self.score)

    def score(self, name: str) -> float:
        """The score of a name, geometric over levels and images."""
        return math.exp(float(-F.softplus(-self.scores.of(self.best[name])).mean()))

    @property
    def over_linear(self) -> float:
        """The error of x0 over that of the best linear denoiser, at the level where that is least."""
        return math.exp(float(self.scores.of(self.winner).mean(1).min()))

    @property
    def denoises(self) -> bool:
        """Whether the network, read so, does better than the best linear denoiser, at some level at least."""
        return self.over_linear < LEARNT

    def ratio(self, name: str) -> float:
        """How many times as large the square error of x0 is under another name."""
        apart = self.scores.of(self.best[name]) - self.scores.of(self.winner)
        return math.exp(min(float(apart.mean()), 50.0))

    def doubt(self) -> str:
        """In words, between what the images do not decide."""
        second = f" against {self.ranked[1]}" if len(self.best) > 1 else ""
        return f"{self.name}{second} with confidence {self.confidence:.3f} from {self.scores.images} images"


class Detection(NamedTuple):
    """What a network predicts, and on which schedule it was trained to predict that; or on another scale of data."""

    target: Answer
    schedule: Answer

    def as_trained(self, probe: Probe) -> Probe:
        """The probe with the target and the schedule that were found, where that is sure."""
        target = self.target.winner.target if self.target.confidence >= SURE else probe.target
        sure = self.schedule.confidence >= SURE and self.schedule.name != SCALED
        curves = with_declared(probe.schedule, known_schedules(probe.schedule))
        return replace(probe, target=target, schedule=curves[self.schedule.winner.schedule] if sure else probe.schedule)

    def contradicts(self, probe: Probe) -> str | None:
        """What of the config is wrong for sure, in a word."""
        if self.target.confidence >= SURE and self.target.name != probe.target:
            return "target"
        if self.schedule.name == SCALED:
            return "scale of training"
        wrong = self.schedule.confidence >= SURE and self.schedule.name != family(schedule_name(probe.schedule))
        return "schedule" if wrong else None


def measure(
    probe: Probe,
    schedules: Mapping[str, Schedule],
    images: range,
    scale: float = 1.0,
    ratios: Sequence[float] | None = None,
) -> Scores:
    """The errors of every reading under each schedule, on some of a probe's images, at a scale of the data."""
    ratios = ratios or (FEW_RATIOS if probe.few else RATIOS)
    pairs = tuple(
        Hypothesis(target, name, scale) for name, curve in schedules.items() for target in READINGS[curve.frame]
    )
    clean = probe.clean[images.start : images.stop]
    errors = torch.empty(len(pairs), len(ratios), len(clean), dtype=torch.float64)
    for k, ratio in enumerate(ratios):
        noisy = clean + ratio * probe.noise(k, images)
        linear = log_square(shrunk(probe.clean, noisy, ratio) - clean)
        level = in_frame(scale * ratio, "vp")
        x = noisy * (scale * level.alpha)
        asked: dict[tuple[float, float], Tensor] = {}
        for i, one in enumerate(pairs):
            curve = schedules[one.schedule]
            key = (input_scale(curve, level), float(curve.time_at(level.ratio)))
            if key not in asked:
                asked[key] = probe.ask(x * key[0], key[1], images)
            k_x, k_out = read_output(curve, one.target, "x0", level)
            errors[i, k] = log_square((x * k_x + asked[key] * k_out) / scale - clean) - linear
        if not any(torch.isfinite(out).all() for out in asked.values()):
            raise Unable("the network's output is not finite: see the check overflow")
    return Scores(pairs, errors)


def log_square(apart: Tensor) -> Tensor:
    """(N,) float64: the logarithm of the mean square of every image."""
    square = apart.double().square().flatten(1).mean(1).cpu()
    return square.nan_to_num(WORST, WORST, WORST).clamp(1e-12, WORST).log()


def shrunk(data: Tensor, noisy: Tensor, ratio: float) -> Tensor:
    """The best that one factor and one mean a channel can do (Wiener): what a network must beat to be one."""
    mean = data.mean((0, *range(2, data.ndim)), keepdim=True)
    variance = float((data - mean).square().mean())
    return mean + (noisy - mean) * (variance / (variance + ratio**2))


def schedules_tried(probe: Probe) -> dict[str, Schedule]:
    """The schedules that are asked about: the config's and the usual ones; where calls are slow, the commonest."""
    found = with_declared(probe.schedule, known_schedules(probe.schedule))
    kept = (*FEW_SCHEDULES, schedule_name(probe.schedule)) if probe.few else tuple(found)
    return {name: found[name] for name in found if name in kept}


def detect(probe: Probe, most: int = MOST) -> Detection:
    """Asks with more and more images, until both answers are clear or the images are used up."""
    if len(probe) < 2:
        raise Unable(f"{len(probe)} image is too few: give two or more")
    curves = schedules_tried(probe)
    total = min(len(probe), most)
    scores = measure(probe, curves, range(min(FEW_FIRST if probe.few else FIRST, total)))
    declared = schedule_name(probe.schedule)
    left = contending(scores) | {declared}
    curves = {name: curve for name, curve in curves.items() if name in left}
    scores = scores.among(lambda one: one.schedule in left)
    for goal in dict.fromkeys(min(one, total) for one in ROUNDS):
        if goal > scores.images:
            scores = scores.join(measure(probe, curves, range(scores.images, goal)))
        found = answer_both(scores)
        if min(one.confidence for one in found) >= CLEAR:
            break
    if found.target.denoises and found.schedule.name == family(declared):
        return found
    for scale in FEW_SCALES if probe.few else SCALES:
        scores = scores.beside(measure(probe, {declared: probe.schedule}, range(scores.images), scale))
    return answer_both(scores)


def contending(scores: Scores) -> set[str]:
    """The schedules that win a resample, of images and of levels, at least."""
    return {scores.hypotheses[i].schedule for i in set(resampled(scores, 0).argmin(1).tolist())}


def resampled(scores: Scores, seed: int) -> Tensor:
    """(R, H): the mean log-score of every hypothesis in resamples of levels and of images."""
    logs = scores.logs
    levels = draws(logs.shape[1], RESAMPLES, seed).double() / logs.shape[1]  # (R, L)
    images = draws(scores.images, RESAMPLES, seed + 1).double() / scores.images  # (R, N)
    return torch.einsum("rl,hln,rn->rh", levels, logs, images)


def answer_both(scores: Scores) -> Detection:
    target = judge(scores, lambda one: one.target)
    fitting = scores.among(lambda one: one.target == target.name)
    return Detection(target, judge(fitting, lambda one: family(one.schedule) if one.scale == 1.0 else SCALED))


def judge(scores: Scores, called: Callable[[Hypothesis], str], seed: int = 0) -> Answer:
    """Who wins, and in how many resamples of images and levels."""
    names = [called(one) for one in scores.hypotheses]
    logs = scores.logs
    order = logs.mean((1, 2)).argsort().tolist()
    best: dict[str, Hypothesis] = {}
    for i in order:
        best.setdefault(names[i], scores.hypotheses[i])
    winner = names[order[0]]
    wins = sum(names[i] == winner for i in resampled(scores, seed).argmin(1).tolist())
    share = min((wins + 1) / (RESAMPLES + 2), 1 - 0.5**scores.images)
    return Answer(winner, share, best, scores)


def answer_evidence(answer: Answer, count: int = 5) -> list[tuple[str, float | str]]:
    """Evidence: how sure, of how many images, and the scores of the likeliest names."""
    listed = [(f"score as {name}", answer.score(name)) for name in answer.ranked[:count]]
    return [("images", answer.scores.images), ("confidence", answer.confidence), *listed]


def undecided_words(answer: Answer, what: str) -> str:
    """Why built-in images do not decide."""
    if not answer.denoises:
        return "the network denoises no built-in image; give --data of its kind"
    return f"the built-in images do not tell the {what} apart: {answer.doubt()}; give --data of its kind"


# --- of a subject, once for all checks that ask -------------------------------------------------------------------


def detection_of(subject: Subject) -> tuple[Probe, Detection]:
    """The probe of a subject, of its data or of built-in images, and what `detect` says of it."""
    from pellucid.evidence.doctor.built_in import built_in_probe  # which asks with `measure`

    if "asked" not in subject.memo:
        try:
            probe = probe_of(subject) if subject.data is not None else built_in_probe(subject)
            subject.memo["asked"] = probe, detect(probe)
        except Unable as error:
            subject.memo["asked"] = error
    found: tuple[Probe, Detection] | Unable = subject.memo["asked"]
    if isinstance(found, Unable):
        raise found
    return found
