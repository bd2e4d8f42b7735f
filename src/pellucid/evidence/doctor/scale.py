"""The scale of the data that a network was trained on, by where it denoises best.

An image with noise of ρ times its own scale is one x for every scale c: c·(x0 + ρ·eps), at sigma / alpha c·ρ. The
network denoises it best, relative to c, at the scale that it was trained on. At that scale the config's must lie: a VAE
with the scaling factor of another model encodes images that are too large or too small for the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from pellucid.core.denoiser import input_scale, read_output
from pellucid.core.schedule import in_frame
from pellucid.evidence.doctor.beliefs import at_scale, explained, lowest
from pellucid.evidence.doctor.checks import Unable, check
from pellucid.evidence.doctor.finding import Finding, Severity
from pellucid.evidence.doctor.hypotheses import asked, log_square
from pellucid.evidence.doctor.probe import Probe, probe_of
from pellucid.evidence.doctor.subject import Subject
from pellucid.evidence.metrics.bootstrap import Interval, draws, percentiles

SCALES = tuple(float(c) for c in np.geomspace(1 / 8, 8, 13))  # steps of √2
NOISES = (0.5, 1.0, 2.0)  # ρ
IMAGES = 16
OFF = 1.25  # the scale is wrong beyond this factor, with all of its interval
COST = 1.01  # and where it costs at least this factor of the square error
FAR = 1.5  # an error
RESAMPLES = 400


@dataclass(frozen=True)
class Believed:
    """The factor by which data must be multiplied to have the scale of training, its interval over images, and by
    what factor the square error is larger at scale 1 than there."""

    factor: float
    interval: Interval
    excess: float

    @property
    def off(self) -> bool:
        """Whether it is not 1 for sure, and matters."""
        return (self.interval.low > OFF or self.interval.high < 1 / OFF) and self.excess > COST


def believed_scale(probe: Probe, most: int = IMAGES) -> Believed:
    """The scale at which a network denoises best."""
    logs = profile(probe, range(min(most, len(probe))))  # (S, N)
    at = np.log(np.array(SCALES))
    best, least = lowest(at, logs.mean(1).numpy())
    counts = draws(logs.shape[1], RESAMPLES).double() / logs.shape[1]
    drawn = torch.tensor([math.exp(lowest(at, row)[0]) for row in (counts @ logs.T).numpy()])
    one = float(logs.mean(1)[SCALES.index(min(SCALES, key=lambda c: abs(math.log(c))))])
    return Believed(math.exp(best), percentiles(drawn, 0.99), math.exp(one - least))


def profile(probe: Probe, images: range) -> torch.Tensor:
    """(S, N): the mean over noises of the logarithm of the square error, relative to the scale."""
    clean = probe.clean[: len(images)]
    found = torch.zeros(len(SCALES), len(images), dtype=torch.float64)
    for k, noise in enumerate(NOISES):
        eps = probe.noise(2000 + k, images)
        for i, scale in enumerate(SCALES):
            level = in_frame(scale * noise, "vp")
            x = (clean + noise * eps) * scale * level.alpha
            time = float(probe.schedule.time_at(level.ratio))
            out = probe.ask(x * input_scale(probe.schedule, level), time, images)
            k_x, k_out = read_output(probe.schedule, probe.target, "x0", level)
            found[i] += log_square((x * k_x + out * k_out) / scale - clean) / len(NOISES)
    return found


@check("scale of training", needs=("network", "data"))
def scale(subject: Subject) -> Iterable[Finding]:
    """Do images reach the network at the scale that it was trained on?"""
    probe = probe_of(subject, IMAGES)
    if len(probe) < 2:
        raise Unable(f"{len(probe)} image is too few: give two or more")
    trained = asked(subject)[1].as_trained(probe)
    seen = believed_scale(trained)
    if not seen.off:
        return []
    if not explained(at_scale(trained, seen.factor)):  # betas of its own look like another scale at some levels alone
        raise Unable("its schedule does not tell the network its times at any scale: see the check schedule")
    vae = None if subject.pipeline is None else subject.pipeline.components.vae
    evidence: list[tuple[str, float | str]] = [
        ("images", len(probe)),
        ("standard deviation of the data as the network sees them", float(probe.clean.std())),
        ("factor at which the network denoises best", seen.factor),
        ("99 % interval", f"{seen.interval.low:.3g} to {seen.interval.high:.3g}"),
        ("square error, times that at the best factor", seen.excess),
    ]
    words = f"network was trained on data {seen.factor:.3g} times as large as what it is given"
    grave: Severity = "error" if max(seen.factor, 1 / seen.factor) > FAR else "warning"
    if vae is None:
        cause = f"The {words}: pixels of another range."
        fix = "Normalise the images as in training: Pellucid gives them in [-1, 1]."
        return [Finding("data-scale", grave, f"the {words}", tuple(evidence), cause, fix)]
    factor = float(vae.config.scaling_factor)
    evidence.append(("scaling_factor", factor))
    cause = f"The {words}: scaling_factor {factor:g} of the VAE is not the one of training."
    fix = f'Set "scaling_factor": {factor * seen.factor:.3g} in vae/config.json (measured), or the one of its training.'
    return [Finding("latent-scale", grave, f"the {words}", tuple(evidence), cause, fix)]
