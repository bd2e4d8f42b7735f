"""Built-in probe images: what the detectors of target and schedule ask with where no --data is given.

They are drawn when they are needed, the same on every machine: scenes, overlapping discs, clouds (1/f noise) and
strokes of ink. No network was trained on all of them, so a network is asked with the kinds that it can denoise, under
whatever reading; where it denoises none, nothing is said about it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid import scenes
from pellucid.evidence.doctor.checks import Unable
from pellucid.evidence.doctor.hypotheses import LEARNT, measure, schedules_tried
from pellucid.evidence.doctor.probe import Probe, pipeline_probe
from pellucid.evidence.doctor.subject import KnownImages, Subject
from pellucid.pipeline.request import Request

SIDE = 128  # pixels that discs, clouds and strokes are drawn with, before they are resized
COUNT, FEW = 32, 7  # images; for a large network on a CPU as many as a sure answer takes
LARGE, TOO_LARGE = 200e6, 1.5e9  # weights: an answer takes about a minute on two cores, and minutes
SMALLER = 256  # pixels of a side that scenes are drawn with at most, and that a large network on a CPU is given
CHOOSING = 0.7  # sigma / alpha at which the kinds are chosen


def _discs(count: int) -> Tensor:
    """Discs of one colour and a slope each, that hide one another ("dead leaves")."""
    draw = torch.Generator().manual_seed(1)
    y, x = torch.meshgrid(*2 * [torch.linspace(0, 1, SIDE)], indexing="ij")
    made = torch.rand(count, 3, 1, 1, generator=draw).expand(-1, -1, SIDE, SIDE)
    for _ in range(40):
        at, size, slope, colour = torch.rand(count, 9, 1, 1, generator=draw).split((2, 1, 3, 3), 1)
        dx, dy = x - at[:, :1], y - at[:, 1:]
        shade = (colour + (slope - 0.5) * (dx + dy)).clamp(0, 1)
        made = torch.where(dx**2 + dy**2 < (0.04 + 0.36 * size**2) ** 2, shade, made)
    return made


def _clouds(count: int) -> Tensor:
    """Noise with the spectrum of photographs, in colours that are mostly alike."""
    draw = torch.Generator().manual_seed(2)
    line = torch.fft.fftfreq(SIDE)
    far = (line[:, None] ** 2 + line**2).sqrt().clamp_min(1 / SIDE)
    noise = torch.randn(count, 3, SIDE, SIDE, generator=draw)
    grey = noise + noise.sum(1, keepdim=True)
    made = torch.fft.ifft2(torch.fft.fft2(grey) / far**1.2).real
    made = made - made.mean((2, 3), keepdim=True)
    return (0.5 + 0.22 * made / made.std((1, 2, 3), keepdim=True)).clamp(0, 1)


def _strokes(count: int) -> Tensor:
    """Curves of one light ink on a dark ground, as digits and letters are."""
    draw = torch.Generator().manual_seed(3)
    y, x = torch.meshgrid(*2 * [torch.linspace(0, 1, SIDE)], indexing="ij")
    along = torch.linspace(0, 1, 24)
    weights = torch.stack(((1 - along) ** 2, 2 * along * (1 - along), along**2), 1)  # of a quadratic Bézier curve
    bends = 0.2 + 0.6 * torch.rand(count, 3, 3, 2, generator=draw)  # (image, curve, point, x and y)
    points = torch.einsum("tp,ncpd->nctd", weights, bends).flatten(1, 2)  # (N, 72, 2)
    apart = torch.full((count, SIDE, SIDE), torch.inf)
    for at in points[..., None, None].unbind(1):
        apart = torch.minimum(apart, (x - at[:, 0]) ** 2 + (y - at[:, 1]) ** 2)
    width = 0.03 + 0.03 * torch.rand(count, 1, 1, generator=draw)
    return ((width - apart.sqrt()) * SIDE + 0.5).clamp(0, 1)[:, None].expand(-1, 3, -1, -1)


_DRAWN: dict[str, Callable[[int], Tensor]] = {"discs": _discs, "clouds": _clouds, "strokes": _strokes}
KINDS = ("scenes", *_DRAWN)


def images(kind: str, count: int, size: int) -> Tensor:
    """(N, 3, size, size) in [0, 1]: built-in images of one kind."""
    if kind == "scenes":
        made = scenes.render(scenes.sample(torch.arange(count), 0, "any"), min(size, SMALLER)) / 2 + 0.5
    else:
        made = _DRAWN[kind](count)
    return F.interpolate(made, (size, size), mode="bicubic", antialias=True).clamp(0, 1)


def built_in_probe(subject: Subject) -> Probe:
    """A pipeline's network with the built-in images that it can denoise; fewer of them where calls are slow."""
    assert subject.pipeline is not None
    pipe = subject.pipeline
    weights = sum(weight.numel() for weight in pipe.components.network.parameters())
    slow = pipe.device.type == "cpu" and weights > LARGE
    if slow and weights > TOO_LARGE:
        raise Unable(f"{weights / 1e9:.1f} billion weights take minutes on a CPU; give --data, or a GPU")
    size = min(pipe.size_of(Request()))
    size = min(size, SMALLER) if slow else size
    kinds = denoised(replace(pipeline_probe(pipe, KnownImages(mixed(KINDS, len(KINDS), size))), few=slow))
    if not kinds:
        raise Unable("the network denoises no built-in image; give --data of its kind")
    return replace(pipeline_probe(pipe, KnownImages(mixed(kinds, FEW if slow else COUNT, size))), few=slow)


def mixed(kinds: Sequence[str], count: int, size: int) -> Tensor:
    """(N, 3, size, size): images of several kinds by turns."""
    each = -(-count // len(kinds))
    return torch.stack([images(kind, each, size) for kind in kinds], 1).flatten(0, 1)[:count]


def denoised(probe: Probe) -> list[str]:
    """The kinds that the network denoises better than the best linear denoiser, under any reading."""
    errors = measure(probe, schedules_tried(probe), range(len(KINDS)), ratios=(CHOOSING,)).errors  # (H, 1, kinds)
    return [kind for kind, least in zip(KINDS, errors.amin((0, 1)).exp(), strict=True) if least < LEARNT]
