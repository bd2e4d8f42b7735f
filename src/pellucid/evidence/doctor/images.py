"""Checks of finished images: blur, noise, clipped colours, colours on the wrong object, tile seams.

Where images of the model's kind are given (--data), they are the yardstick; without them only what no image should have
is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError
from pellucid.evidence import qualities
from pellucid.evidence.doctor.checks import Evidence, Finding, check
from pellucid.evidence.doctor.subject import Subject, UnsupportedCheck
from pellucid.evidence.doctor.traces import scale_evidence
from pellucid.evidence.metrics.images import Folder, ImageSet
from pellucid.evidence.qualities import unit
from pellucid.evidence.statistics import Share
from pellucid.pipeline.recipe import Recipe, read_png
from pellucid.scenes.grading import grade
from pellucid.scenes.grammar import Query, parse

_MOST, _MOST_PIXELS = 256, 2**26  # that are examined: 64 images of 1024 × 1024
_LEAST_SIDE = 16
_SOFT, _SOFT_TO_DATA = 0.12, 0.4  # sharpness: an edge blurred by one pixel has 0.15
_NOISY, _NOISY_TO_DATA, _NOISY_MORE = 0.03, 2.0, 0.008  # sigma of values from 0 to 1
_ENDS, _ENDS_MORE = 0.25, 0.1  # the share of values that are 0 or 255
_SEAM = 2.0
_PERIODS = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # pixels between tiles, by the sizes in use
_BLED = 0.1  # the share of images, from which it is more than a slip
_ASKED = 4  # images whose truth is known: their intervals say whether so few are enough
_FOLLOWED = 0.5  # the share that shows all that was asked for, below which something is broken


def _chunks_of(subject: Subject) -> list[Tensor]:
    """(B, 3, H, W) uint8 each, one size in each, at most MOST images and MOST_PIXELS."""
    assert subject.images is not None
    kept: list[Tensor] = []
    unread: list[str] = []
    count, pixels = _MOST, _MOST_PIXELS
    for chunk in subject.images.chunks(lambda _, why: unread.append(why)):
        area = chunk.shape[2] * chunk.shape[3]
        kept.append(chunk[: max(1, min(count, pixels // area))])
        count, pixels = count - len(kept[-1]), pixels - len(kept[-1]) * area
        if count <= 0 or pixels <= 0:
            break
    large = [chunk for chunk in kept if min(chunk.shape[2:]) >= _LEAST_SIDE and len(chunk)]
    if not large:
        raise UnsupportedCheck(
            f"no image of {_LEAST_SIDE} pixels or more could be read" + (f": {unread[0]}" if unread else "")
        )
    return large


def _measure(
    subject: Subject, quality: Callable[[Tensor], Tensor], middle: Callable[[Tensor], Tensor]
) -> tuple[float, float | None, int]:
    """The median or mean of a quality: of the images, of the data if there are some; and the number of images."""
    own = torch.cat([quality(chunk) for chunk in _chunks_of(subject)])
    data = None if subject.data is None else float(middle(quality(subject.data.pixels.clamp(0, 1))))
    return float(middle(own)), data, len(own)


def _facts(name: str, own: float, data: float | None, count: int) -> Evidence:
    return ("images", count), (name, own), *(() if data is None else ((f"{name} of the data", data),))


@check("sharpness")
def sharpness(subject: Subject, images: ImageSet) -> Iterator[Finding]:
    """Are edges as narrow as they should be?"""
    own, data, count = _measure(subject, qualities.sharpness, torch.median)
    if not own >= (_SOFT if data is None else max(_SOFT, _SOFT_TO_DATA * data)):
        yield Finding(
            "low-sharpness",
            "warning",
            "the images are soft: their edges are wide",
            _facts("sharpness (median)", own, data, count),
            "The fine detail is missing: too few steps at low noise, a grid that ends too early, or a VAE that blurs.",
            "Use more steps, or a grid whose last calls are near the data: `pellucid plan` shows how much small "
            "detail is kept. Then `pellucid doctor MODEL --data FOLDER`.",
        )


@check("noise")
def noise(subject: Subject, images: ImageSet) -> Iterator[Finding]:
    """Is there noise where nothing is drawn?"""
    own, data, count = _measure(subject, qualities.residual_noise, torch.median)
    if not own <= (_NOISY if data is None else max(_NOISY_TO_DATA * data, data + _NOISY_MORE)):
        yield Finding(
            "residual-noise",
            "warning",
            "the images are noisy where they should be flat",
            _facts("standard deviation of noise (median)", own, data, count),
            f"Noise of {own * 255:.1f} of 255 steps is left: the run stopped before sigma 0, or adds noise at its end.",
            'End at sigma 0 ("final_sigmas_type": "zero"), and take a deterministic sampler or more steps.',
        )


@check("saturation")
def saturation(subject: Subject, images: ImageSet) -> Iterator[Finding]:
    """Are colours clipped?"""
    own, data, count = _measure(subject, qualities.saturation, torch.mean)
    if not own <= (_ENDS if data is None else data + _ENDS_MORE):
        scale = _guidance_of(subject)
        colour = _facts("colourfulness (mean)", *_measure(subject, qualities.colourfulness, torch.mean))[1:]
        yield Finding(
            "oversaturated-images",
            "warning",
            f"{own:.1%} of the values of the images are clipped",
            (*_facts("share of values at 0 or 255", own, data, count), *colour, *scale_evidence(scale)),
            "Predictions were pushed out of the range of images, as too high a guidance scale does"
            + ("." if scale is None else f": it was {scale:g}."),
            "Lower guidance to 7 or less, or correct it: --guidance '7 + rescale'.",
        )


@check("seams")
def seams(subject: Subject, images: ImageSet) -> Iterator[Finding]:
    """Are there jumps where tiles meet?"""
    chunks = _chunks_of(subject)
    found: dict[int, float] = {}
    for period in _PERIODS:
        values = [qualities.seams(chunk, period) for chunk in chunks if 2 * period <= max(chunk.shape[2:])]
        if values:
            found[period] = float(torch.cat(values).median())
    if not found:
        raise UnsupportedCheck(f"the images are smaller than two tiles of {_PERIODS[0]} pixels")
    period = max(found, key=found.__getitem__)
    if not found[period] < _SEAM:
        yield Finding(
            "tile-seams",
            "warning",
            f"there are jumps at every {period} pixels: tiles that do not meet",
            (("period in pixels", period), ("jump there over the largest beside it (median)", found[period])),
            "The images were decoded in tiles that do not overlap.",
            "Decode whole, or with Pellucid's tiles, which give the untiled image (vae_tile in the policy).",
        )


# --- images of a known prompt -------------------------------------------------------------------------------------


@check("bleeding")
def bleeding(subject: Subject, images: ImageSet) -> Iterator[Finding]:
    """Has an object the colour that another was to have?"""
    known = [(pixels, query) for pixels, query in _queries(subject) if len(query.objects) > 1]
    if len(known) < _ASKED:
        raise UnsupportedCheck(f"the truth is known of {len(known)} images of several objects; {_ASKED} are needed")
    share, scale = _share_bled(known), _guidance_of(subject)
    if share.interval[0] > _BLED:
        yield Finding(
            "colour-bleeding",
            "warning",
            f"in {share.value:.0%} of the images an object has the colour of another",
            (*_share_evidence(share), *scale_evidence(scale)),
            "The prompt's colours are bound to the wrong objects"
            + ("." if scale is None else f", at guidance {scale:g}."),
            "Lower guidance, or take more steps; `pellucid study guidance` shows where bleeding begins.",
        )


def _share_evidence(share: Share) -> Evidence:
    low, high = share.interval
    return ("images", share.count), ("share", share.value), ("95 % interval", f"{low:.3g} to {high:.3g}")


def _share_bled(known: Sequence[tuple[Tensor, Query]]) -> Share:
    marks = [float(qualities.bled(pixels[None], [query])) for pixels, query in known]
    return Share.of(None if mark != mark else bool(mark) for mark in marks)


@check("as asked")
def as_asked(subject: Subject, images: ImageSet) -> Iterator[Finding]:
    """Do the images show what the prompt says? Where colours bled, that check reports it."""
    known = _queries(subject)
    if len(known) < _ASKED:
        raise UnsupportedCheck(f"the truth is known of {len(known)} images; {_ASKED} are needed")
    grades = [grade(2 * unit(pixels) - 1, query)[0] for pixels, query in known]
    share = Share.of(one.right for one in grades)
    if share.interval[1] >= _FOLLOWED or _share_bled(known).interval[0] > _BLED:
        return
    wrong = Counter(what for one in grades for what in {mark.what for mark in one.marks if mark.verdict != "right"})
    (most, often), *_ = wrong.most_common(1) or [("something that cannot be read", 0)]
    unread = sum(any(mark.verdict == "unreadable" for mark in one.marks) for one in grades)
    yield Finding(
        "not-as-asked",
        "warning",
        f"{share.value:.0%} of the images show everything that their prompt asks for",
        (
            *_share_evidence(share),
            ("most often wrong", f"{most}, in {often}"),
            ("with something that cannot be read", unread),
            *scale_evidence(_guidance_of(subject)),
        ),
        "Images alone do not show why: the model, its schedule or its guidance may be at fault.",
        "Examine the model (pellucid doctor MODEL --data scenes) and a run of it (--trace FILE).",
    )


def _prompted(subject: Subject) -> Iterator[tuple[Tensor, Query | None, Recipe]]:
    """Images whose files hold their recipe, with the scene that its prompt describes if it does."""
    if not isinstance(subject.images, Folder):
        return
    for file in subject.images.files[:_MOST]:
        try:
            recipe = read_png(subject.images.root / file)
        except PellucidError:
            continue
        pixels = subject.images.read(file)
        if not isinstance(recipe, Recipe) or isinstance(pixels, str):
            continue
        try:
            yield pixels, parse(recipe.prompt), recipe
        except PellucidError:
            yield pixels, None, recipe


def _queries(subject: Subject) -> list[tuple[Tensor, Query]]:
    return [(pixels, query) for pixels, query, _ in _prompted(subject) if query is not None]


def _guidance_of(subject: Subject) -> float | None:
    """The largest guidance scale in the images' recipes."""
    scales = [recipe.guidance.get("scale") for _, _, recipe in _prompted(subject)]
    return max((float(scale) for scale in scales if isinstance(scale, int | float)), default=None)
