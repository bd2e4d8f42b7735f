"""Scale drift: a run whose x leaves the spread that its level says, so that the image ends too strong or too weak."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pellucid.core.compile import compile_plan
from pellucid.core.denoiser import denoiser
from pellucid.core.errors import PellucidError
from pellucid.core.loop import StepSeen, loop
from pellucid.core.noise import Philox
from pellucid.core.schedule import Level
from pellucid.evidence.doctor.checks import Unable, check
from pellucid.evidence.doctor.finding import Finding
from pellucid.evidence.doctor.hypotheses import asked
from pellucid.evidence.doctor.probe import Probe
from pellucid.evidence.doctor.scale import IMAGES, believed_scale
from pellucid.evidence.doctor.subject import Data, Subject
from pellucid.evidence.metrics.bootstrap import mean_interval
from pellucid.models.dit import DiT
from pellucid.pipeline.conditions import takes_labels, takes_text
from pellucid.pipeline.pipeline import Pipeline

COUNT = 8  # images of the run
STEPS = 20
SAMPLER = "dpmpp_2m"
OFF = 1.5  # the spread at the end over that of the data: beyond this, with all of its interval, it has drifted


@dataclass
class Spread:
    """An observer: the standard deviation of x of every image after each row, and the level that x has then."""

    levels: list[Level] = field(default_factory=list)
    found: list[Tensor] = field(default_factory=list)  # (N,) each

    def __call__(self, seen: StepSeen) -> None:
        self.levels.append(seen.next_levels[0])
        self.found.append(deviations(seen.x_next))


def deviations(x: Tensor) -> Tensor:
    """(N,) float64: the standard deviation of each image, about the mean of each of its channels."""
    return x.double().var((2, 3), correction=0).mean(1).sqrt().cpu()


def sampled(pipe: Pipeline, data: Data) -> Spread:
    """A short run without guidance, and the spread of its x."""
    network, watch = pipe.components.network, Spread()
    asked: dict[str, Any] = {"n": COUNT}
    if takes_text(network):
        said = list(data.captions or ())[:COUNT]
        asked = {"prompt": said} if len(said) == COUNT else {"prompt": "", "n": COUNT}
    if takes_labels(network):
        known = list(data.labels or ())[:COUNT]
        asked = {"label": known} if len(known) == COUNT else {**asked, "label": 0}
    high, wide = data.pixels.shape[-2:]
    pipe(
        seed=0, sampler=SAMPLER, steps=STEPS, guidance=1.0, width=wide, height=high, decode=False,
        observers=[watch], **asked,
    )  # fmt: skip
    return watch


def sampled_alone(probe: Probe) -> Spread:
    """The same of a network without a pipeline."""
    watch = Spread()
    plan = compile_plan(SAMPLER, schedule=probe.schedule, target=probe.target, steps=STEPS)
    denoise = denoiser(probe.network, probe.schedule, probe.target)
    start = Philox(range(COUNT)).first(probe.clean.shape[1:], probe.clean, range(COUNT)) * plan.initial_scale
    with torch.no_grad():
        loop([plan] * COUNT, denoise, start, Philox(range(COUNT)), [watch], (), None)
    return watch


@check("drift", needs=("network", "data"))
def drift(subject: Subject) -> Iterable[Finding]:
    """Does a run keep the spread that its levels say, and end with that of the data?"""
    assert subject.data is not None
    if isinstance(subject.network, DiT):
        raise Unable("a class-conditional transformer is not run without guidance")
    probe, found_before = asked(subject)
    wrong = found_before.contradicts(probe)
    if wrong is not None:
        raise Unable(f"the run would drift by what the check {wrong} finds")
    known = deviations(probe.clean)
    try:
        pipe = subject.pipeline
        watch = sampled_alone(probe) if pipe is None else sampled(pipe, subject.data)
    except PellucidError as error:
        raise Unable(f"a run of {STEPS} steps with {SAMPLER} is refused: {error}") from None
    last = watch.found[-1]
    if not torch.isfinite(last).all():
        raise Unable("the run is not finite: see the check overflow")
    found = list(judged(watch, float(known.square().mean().sqrt())))
    if found and believed_scale(found_before.as_trained(probe), IMAGES).off:
        raise Unable("the run ends at the scale of training, which is not that of the data: see the check scale of it")
    return found


def judged(watch: Spread, data: float) -> Iterable[Finding]:
    ratios = [
        float(found.square().mean().sqrt()) / math.hypot(level.alpha * data, level.sigma)
        for level, found in zip(watch.levels, watch.found, strict=True)
    ]
    interval = mean_interval((watch.found[-1] / data).log(), level=0.99)
    low, high = math.exp(interval.low), math.exp(interval.high)
    if low <= OFF and high >= 1 / OFF:
        return
    limit = math.sqrt(OFF)
    start = next((i for i, ratio in enumerate(ratios) if not 1 / limit <= ratio <= limit), len(ratios) - 1)
    end, way = ratios[-1], "grows" if low > OFF else "shrinks"
    yield Finding(
        "scale-drift",
        "warning",
        f"x {way} over a run: it ends with {end:.3g} times the spread of the data",
        (
            ("standard deviation of the data", data),
            ("standard deviation of x at the end", end * data),
            ("99 % interval of their ratio", f"{low:.3g} to {high:.3g}"),
            ("first step that is off", start + 1),
            ("sigma/alpha there", watch.levels[start].ratio),
        ),
        "Without guidance a run must keep the spread of its levels; the network "
        + ("leaves noise in x, or makes its image too strong" if way == "grows" else "makes its image too weak")
        + ": it is trained too little, damaged, or read wrongly.",
        "See the checks target, schedule and scale; where they are silent, train longer or load the weights again."
        + (" For pixels in [-1, 1], x0_filter=pellucid.Clip(1.0) keeps x0 in their range." if way == "grows" else ""),
    )
