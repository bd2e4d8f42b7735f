"""Which reading of a network's output is true: hypotheses of (target, schedule), scored on known images.

Images are noised to a level; the network is passed the time that a schedule has for that level, and its output is read
as a target. The score is e / (e + l): e is the mean square error of x0, and l that of the best linear denoiser of the
same x. It is near 0 for a network that was trained so and is read so, 1/2 for a reading that is as good as one factor,
and at most 1 for nonsense, so that levels at which a small network fails decide nothing. All hypotheses see the same
images and the same noise: they are compared image by image.

Where the config's schedule does not win, a wrong scale of the data may be the cause: it shifts every level as another
schedule does. So the config's schedule is then tried at other scales c too: c·(x0 + ρ·eps) at sigma / alpha c·ρ, which
is the same x except for its size.

The confidence of an answer is the share of resamples, of images and of levels, in which it wins. It is never more
than 1 − 2⁻ᴺ for N images: so often would N coins fall alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid import scenes
from pellucid.core import schedule as schedules
from pellucid.core.denoiser import input_scale, read_output
from pellucid.core.schedule import EDM, DiscreteVP, Flow, Frame, Schedule, Target, in_frame
from pellucid.evidence.doctor.probe import Probe, pipeline_probe, probe_of
from pellucid.evidence.doctor.subject import KnownImages, Subject, UnsupportedCheck
from pellucid.evidence.statistics import draws
from pellucid.pipeline.request import Request

# --- schedules ----------------------------------------------------------------------------------------------------

RATIOS: tuple[float, ...] = tuple(float(r) for r in np.geomspace(0.25, 6.0, 7))  # sigma / alpha
ALIKE = 0.01  # of the span of times: schedules whose times differ by no more than this are one
_NUM_TRAIN = 1000
TABLED = ("linear", "scaled_linear", "cosine", "sqrt_alpha_bar", "sqrt_beta", "sigmoid", "laplace", "exponential")
_ZERO = ", zero terminal SNR"


def known_schedules(declared: Schedule) -> dict[str, Schedule]:
    """The usual schedules, of as many times as the config's."""
    count = declared.num_train or _NUM_TRAIN
    found: dict[str, Schedule] = {name: schedules.make(name, num_train=count) for name in TABLED}
    found["scaled_linear" + _ZERO] = schedules.make("scaled_linear", num_train=count, zero_snr=True)
    found["flow"] = Flow(scale=declared.scale if isinstance(declared, Flow) else float(count))
    found["edm"] = declared if isinstance(declared, EDM) else EDM()
    return found


def candidates(declared: Schedule, others: Mapping[str, Schedule] | None = None) -> dict[str, Schedule]:
    """The config's schedule under its own name, then the usual ones; of those with the same times only the first."""
    found = {schedule_name(declared): declared}
    for name, curve in (known_schedules(declared) if others is None else others).items():
        if not any(alike(curve, kept) for kept in found.values()):
            found[name if name not in found else f"{name}, as usual"] = curve
    return found


def schedule_name(declared: Schedule) -> str:
    """The name of a schedule: the usual one that it equals, or its own."""
    for name, curve in known_schedules(declared).items():
        if alike(curve, declared):
            return name
    zero = _ZERO if isinstance(declared, DiscreteVP) and declared.zero_terminal else ""
    return f"{declared.name} of the config{zero}"


def family(name: str) -> str:
    """The name of a schedule without its end: zero terminal SNR moves the other levels too little to tell."""
    return name.removesuffix(_ZERO)


def alike(one: Schedule, other: Schedule) -> bool:
    """Whether a network would be passed the same times for the same levels, and see them in the same frame."""
    if one.frame != other.frame:
        return False
    low, high = one.span
    apart = np.abs(one.time_at(np.array(RATIOS)) - other.time_at(np.array(RATIOS)))
    return bool(apart.max() <= ALIKE * (high - low))


# --- hypotheses ---------------------------------------------------------------------------------------------------

_MOST = 64  # images
_FIRST = 4  # images that all schedules are tried on; those that are out of the question then are dropped
_FEW_FIRST, _FEW_RATIOS = 2, RATIOS[1::2]  # the same, and the levels, where calls are slow
_ROUNDS = (16, 32, 64)  # images after which a clear answer ends the questions
_CLEAR = 0.999
SURE = 0.99  # the confidence from which a contradiction is reported
_LEARNT = 0.9  # of the square error of the best linear denoiser: a network that denoises has less
_RESAMPLES = 4000
_SCALES = (1 / 8, 1 / 4, 1 / 2, 2**-0.5, 2**0.5, 2.0, 4.0, 8.0)  # of the data, beside 1
_FEW_SCALES = (1 / 4, 1 / 2, 2.0, 4.0)
_FEW_SCHEDULES = ("linear", "scaled_linear", "cosine", "flow")  # of large networks
SCALED = "another scale of the data"
_WORST = 1e9  # the mean square that an output which is not finite counts as
# What a network may predict in each frame. Zero terminal SNR forbids nothing here: no level is pure noise.
_READINGS: dict[Frame, tuple[Target, ...]] = {
    "vp": ("eps", "x0", "v"),
    "flow": ("flow", "x0", "eps"),
    "ve": ("edm", "eps", "x0", "v"),
}


class Hypothesis(NamedTuple):
    """A reading of a network: what it predicts, whose times it is passed, and the scale of the data in training."""

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
        return self.over_linear < _LEARNT

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
        if self.schedule.confidence < SURE or self.schedule.name == SCALED:
            return replace(probe, target=target)
        return replace(probe, target=target, schedule=candidates(probe.schedule)[self.schedule.winner.schedule])

    def contradicts(self, probe: Probe) -> str | None:
        """What of the config is wrong for sure, in a word."""
        if self.target.confidence >= SURE and self.target.name != probe.target:
            return "target"
        if self.schedule.name == SCALED:
            return "scale of training"
        wrong = self.schedule.confidence >= SURE and self.schedule.name != family(schedule_name(probe.schedule))
        return "schedule" if wrong else None


def _measure(
    probe: Probe,
    schedules: Mapping[str, Schedule],
    images: range,
    scale: float = 1.0,
    ratios: Sequence[float] | None = None,
) -> Scores:
    """The errors of every reading under each schedule, on some of a probe's images, at a scale of the data."""
    ratios = ratios or (_FEW_RATIOS if probe.few else RATIOS)
    pairs = tuple(
        Hypothesis(target, name, scale) for name, curve in schedules.items() for target in _READINGS[curve.frame]
    )
    clean = probe.clean[images.start : images.stop]
    errors = torch.empty(len(pairs), len(ratios), len(clean), dtype=torch.float64)
    for k, ratio in enumerate(ratios):
        noisy = clean + ratio * probe.noise(k, images)
        linear = log_square(_shrunk(probe.clean, noisy, ratio) - clean)
        level = in_frame(scale * ratio, "vp")
        x = noisy * (scale * level.alpha)
        outputs: dict[tuple[float, float], Tensor] = {}
        for i, one in enumerate(pairs):
            curve = schedules[one.schedule]
            key = (input_scale(curve, level), float(curve.time_at(level.ratio)))
            if key not in outputs:
                outputs[key] = probe.ask(x * key[0], key[1], images)
            k_x, k_out = read_output(curve, one.target, "x0", level)
            errors[i, k] = log_square((x * k_x + outputs[key] * k_out) / scale - clean) - linear
        if not any(torch.isfinite(out).all() for out in outputs.values()):
            raise UnsupportedCheck("the network's output is not finite: see the check overflow")
    return Scores(pairs, errors)


def log_square(apart: Tensor) -> Tensor:
    """(N,) float64: the logarithm of the mean square of every image."""
    square = apart.double().square().flatten(1).mean(1).cpu()
    return square.nan_to_num(_WORST, _WORST, _WORST).clamp(1e-12, _WORST).log()


def _shrunk(data: Tensor, noisy: Tensor, ratio: float) -> Tensor:
    """The best that one factor and one mean a channel can do (Wiener): what a network must beat to be one."""
    mean = data.mean((0, *range(2, data.ndim)), keepdim=True)
    variance = float((data - mean).square().mean())
    return mean + (noisy - mean) * (variance / (variance + ratio**2))


def _schedules_tried(probe: Probe) -> dict[str, Schedule]:
    """The schedules that are tried: the config's and the usual ones; where calls are slow, the commonest."""
    found = candidates(probe.schedule)
    kept = (*_FEW_SCHEDULES, schedule_name(probe.schedule)) if probe.few else tuple(found)
    return {name: found[name] for name in found if name in kept}


def detect(probe: Probe, most: int = _MOST) -> Detection:
    """Tries more and more images, until both answers are clear or the images are used up."""
    if len(probe) < 2:
        raise UnsupportedCheck(f"{len(probe)} image is too few: give two or more")
    curves = _schedules_tried(probe)
    total = min(len(probe), most)
    scores = _measure(probe, curves, range(min(_FEW_FIRST if probe.few else _FIRST, total)))
    declared = schedule_name(probe.schedule)
    winners = _resampled(scores, 0).argmin(1).unique().tolist()  # what wins no resample is dropped
    left = {scores.hypotheses[i].schedule for i in winners} | {declared}
    curves = {name: curve for name, curve in curves.items() if name in left}
    scores = scores.among(lambda one: one.schedule in left)
    for goal in dict.fromkeys(min(one, total) for one in _ROUNDS):
        if goal > scores.images:
            scores = scores.join(_measure(probe, curves, range(scores.images, goal)))
        found = _answer_both(scores)
        if min(one.confidence for one in found) >= _CLEAR:
            break
    if found.target.denoises and found.schedule.name == family(declared):
        return found
    for scale in _FEW_SCALES if probe.few else _SCALES:
        scores = scores.beside(_measure(probe, {declared: probe.schedule}, range(scores.images), scale))
    return _answer_both(scores)


def _resampled(scores: Scores, seed: int) -> Tensor:
    """(R, H): the mean log-score of every hypothesis in resamples of levels and of images."""
    logs = scores.logs
    levels = draws(logs.shape[1], _RESAMPLES, seed).double() / logs.shape[1]  # (R, L)
    images = draws(scores.images, _RESAMPLES, seed + 1).double() / scores.images  # (R, N)
    return torch.einsum("rl,hln,rn->rh", levels, logs, images)


def _answer_both(scores: Scores) -> Detection:
    target = judge(scores, lambda one: one.target)
    fitting = scores.among(lambda one: one.target == target.name)
    return Detection(target, judge(fitting, lambda one: family(one.schedule) if one.scale == 1.0 else SCALED))


def judge(scores: Scores, name_of: Callable[[Hypothesis], str], seed: int = 0) -> Answer:
    """Who wins, and in how many resamples of images and levels."""
    names = [name_of(one) for one in scores.hypotheses]
    logs = scores.logs
    order = logs.mean((1, 2)).argsort().tolist()
    best: dict[str, Hypothesis] = {}
    for i in order:
        best.setdefault(names[i], scores.hypotheses[i])
    winner = names[order[0]]
    wins = sum(names[i] == winner for i in _resampled(scores, seed).argmin(1).tolist())
    share = min((wins + 1) / (_RESAMPLES + 2), 1 - 0.5**scores.images)
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


# --- built-in images ----------------------------------------------------------------------------------------------
#
# What the detectors are shown where no --data is given, drawn when needed and the same on every machine: scenes,
# overlapping discs, clouds (1/f noise) and strokes of ink. No network was trained on all of them, so a network is
# tested with the kinds that it can denoise under some reading; where it denoises none, nothing is said about it.

_SIDE = 128  # pixels that discs, clouds and strokes are drawn with, before they are resized
_BUILT_IN, _FEW_BUILT_IN = 32, 7  # images; for a large network on a CPU as many as a sure answer takes
LARGE, TOO_LARGE = 200e6, 1.5e9  # weights: an answer takes about a minute on two cores, and minutes
_SMALLER = 256  # pixels of a side that scenes are drawn with at most, and that a large network on a CPU is given
_CHOOSING = 0.7  # sigma / alpha at which the kinds are chosen


def _discs(count: int) -> Tensor:
    """Discs of one colour and a slope each, that hide one another ("dead leaves")."""
    draw = torch.Generator().manual_seed(1)
    y, x = torch.meshgrid(*2 * [torch.linspace(0, 1, _SIDE)], indexing="ij")
    images = torch.rand(count, 3, 1, 1, generator=draw).expand(-1, -1, _SIDE, _SIDE)
    for _ in range(40):
        at, size, slope, colour = torch.rand(count, 9, 1, 1, generator=draw).split((2, 1, 3, 3), 1)
        dx, dy = x - at[:, :1], y - at[:, 1:]
        shade = (colour + (slope - 0.5) * (dx + dy)).clamp(0, 1)
        images = torch.where(dx**2 + dy**2 < (0.04 + 0.36 * size**2) ** 2, shade, images)
    return images


def _clouds(count: int) -> Tensor:
    """Noise with the spectrum of photographs, in colours that are mostly alike."""
    draw = torch.Generator().manual_seed(2)
    line = torch.fft.fftfreq(_SIDE)
    far = (line[:, None] ** 2 + line**2).sqrt().clamp_min(1 / _SIDE)
    noise = torch.randn(count, 3, _SIDE, _SIDE, generator=draw)
    grey = noise + noise.sum(1, keepdim=True)
    images = torch.fft.ifft2(torch.fft.fft2(grey) / far**1.2).real
    images = images - images.mean((2, 3), keepdim=True)
    return (0.5 + 0.22 * images / images.std((1, 2, 3), keepdim=True)).clamp(0, 1)


def _strokes(count: int) -> Tensor:
    """Curves of one light ink on a dark ground, as digits and letters are."""
    draw = torch.Generator().manual_seed(3)
    y, x = torch.meshgrid(*2 * [torch.linspace(0, 1, _SIDE)], indexing="ij")
    along = torch.linspace(0, 1, 24)
    weights = torch.stack(((1 - along) ** 2, 2 * along * (1 - along), along**2), 1)  # of a quadratic Bézier curve
    bends = 0.2 + 0.6 * torch.rand(count, 3, 3, 2, generator=draw)  # (image, curve, point, x and y)
    points = torch.einsum("tp,ncpd->nctd", weights, bends).flatten(1, 2)  # (N, 72, 2)
    apart = torch.full((count, _SIDE, _SIDE), torch.inf)
    for at in points[..., None, None].unbind(1):
        apart = torch.minimum(apart, (x - at[:, 0]) ** 2 + (y - at[:, 1]) ** 2)
    width = 0.03 + 0.03 * torch.rand(count, 1, 1, generator=draw)
    return ((width - apart.sqrt()) * _SIDE + 0.5).clamp(0, 1)[:, None].expand(-1, 3, -1, -1)


_DRAWN: dict[str, Callable[[int], Tensor]] = {"discs": _discs, "clouds": _clouds, "strokes": _strokes}
KINDS = ("scenes", *_DRAWN)


def built_in_images(kind: str, count: int, size: int) -> Tensor:
    """(N, 3, size, size) in [0, 1]: built-in images of one kind."""
    if kind == "scenes":
        images = scenes.render(scenes.sample(torch.arange(count), 0, "any"), min(size, _SMALLER)) / 2 + 0.5
    else:
        images = _DRAWN[kind](count)
    return F.interpolate(images, (size, size), mode="bicubic", antialias=True).clamp(0, 1)


def _built_in_probe(subject: Subject) -> Probe:
    """A pipeline's network with the built-in images that it can denoise; fewer of them where calls are slow."""
    assert subject.pipeline is not None
    pipe = subject.pipeline
    weights = sum(weight.numel() for weight in pipe.components.network.parameters())
    slow = pipe.device.type == "cpu" and weights > LARGE
    if slow and weights > TOO_LARGE:
        raise UnsupportedCheck(f"{weights / 1e9:.1f} billion weights take minutes on a CPU; give --data, or a GPU")
    size = min(pipe.size_of(Request()))
    size = min(size, _SMALLER) if slow else size
    kinds = denoisable_kinds(
        replace(pipeline_probe(pipe, KnownImages(mixed_images(KINDS, len(KINDS), size))), few=slow)
    )
    if not kinds:
        raise UnsupportedCheck("the network denoises no built-in image; give --data of its kind")
    return replace(
        pipeline_probe(pipe, KnownImages(mixed_images(kinds, _FEW_BUILT_IN if slow else _BUILT_IN, size))), few=slow
    )


def mixed_images(kinds: Sequence[str], count: int, size: int) -> Tensor:
    """(N, 3, size, size): images of several kinds in turn."""
    each = -(-count // len(kinds))
    return torch.stack([built_in_images(kind, each, size) for kind in kinds], 1).flatten(0, 1)[:count]


def denoisable_kinds(probe: Probe) -> list[str]:
    """The kinds that the network denoises better than the best linear denoiser, under any reading."""
    errors = _measure(probe, _schedules_tried(probe), range(len(KINDS)), ratios=(_CHOOSING,)).errors  # (H, 1, kinds)
    return [kind for kind, least in zip(KINDS, errors.amin((0, 1)).exp(), strict=True) if least < _LEARNT]


# --- of a subject, once for all checks ----------------------------------------------------------------------------


def detection_of(subject: Subject) -> tuple[Probe, Detection]:
    """The probe of a subject, of its data or of built-in images, and what `detect` says of it."""
    if "detection" not in subject.memo:
        try:
            probe = probe_of(subject) if subject.data is not None else _built_in_probe(subject)
            subject.memo["detection"] = probe, detect(probe)
        except UnsupportedCheck as error:
            subject.memo["detection"] = error
    found: tuple[Probe, Detection] | UnsupportedCheck = subject.memo["detection"]
    if isinstance(found, UnsupportedCheck):
        raise found
    return found
