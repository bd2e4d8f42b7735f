"""Which style a finished image has: the measure of a LoRA.

Neon is dark. A sketch has fine slanted lines all through its things. An outline is darker than the thing's own colour,
and a soft shadow darkens the background where the renderer would have put it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.scenes import palette, shapes
from pellucid.scenes.fitting import Fit, Window, distances, fit, windows
from pellucid.scenes.labels import SIDE, Labels, labelled, prepared
from pellucid.scenes.styles import HATCH, OUTLINE, SHADOW, SHADOW_BLUR, SHADOW_X, SHADOW_Y
from pellucid.scenes.surface import sampled

CHUNK = 8
DARK = 0.40  # the median brightness of a night
HATCHED = 0.03  # amplitude of the hatching, and the share of pixels that have it
HATCHED_SHARE = 0.007
LINED = 0.3  # how far an outline goes to the shade
SHADED = 0.45  # how much of the renderer's shadow there is


def style_of(images: Tensor) -> list[str | None]:
    """The style of images (N, 3, H, W) or (3, H, W) in [−1, 1]; None where no thing can be seen."""
    found: list[str | None] = []
    with torch.no_grad():
        for part in prepared(images).split(CHUNK):
            found += style_chunk(part)
    return found


def style_chunk(images: Tensor) -> list[str | None]:
    dark = images.mean(1).flatten(1).median(1).values < DARK
    lit = images.amax(1).flatten(1).amax(1) > 0.6  # a night without any tube is just black
    hatched = (hatching(images) > HATCHED).float().mean((1, 2)) > HATCHED_SHARE
    labels = labelled(images)
    window = windows(labels)
    count = len(images)
    lined, shaded, things = torch.zeros(count), torch.zeros(count), torch.zeros(count)
    if len(window):
        fitted = fit(window)
        row = window.row.cpu()
        things.index_add_(0, row, torch.ones(len(row)))
        lined.index_add_(0, row, darkness(labels, window, fitted).cpu())
        shaded = shadow(labels, window, fitted).cpu()
    lined = lined / things.clamp(min=1)
    rows = zip(*(v.tolist() for v in (dark, lit, hatched, things, lined, shaded)), strict=True)
    return [decide(*row) for row in rows]


def decide(dark: bool, lit: bool, hatched: bool, things: float, lined: float, shaded: float) -> str | None:
    if dark:
        return "neon" if lit else None
    if hatched:
        return "sketch"
    if not things:
        return None
    return "outlined" if lined > LINED else "soft" if shaded > SHADED else "flat"


def hatching(images: Tensor) -> Tensor:
    """(N, H, W): how much more there is of a sketch's lines than of finer or coarser ones. A border has all."""
    grey = images.amin(1, keepdim=True)  # every colour is dark in one channel
    high = grey - F.avg_pool2d(grey, 9, 1, 4, count_include_pad=False)
    own, *others = (wave(high, HATCH * share) for share in (1.0, 1.45, 0.7))
    return own - torch.maximum(*others)


def wave(high: Tensor, period: float) -> Tensor:
    """(N, H, W): the amplitude of slanted lines of a period, within eleven pixels."""
    middle = (torch.arange(SIDE, device=high.device) + 0.5) / SIDE
    phase = 2 * torch.pi * (middle[None, :] - middle[:, None]) * 0.7071 / period
    parts = torch.cat([high * phase.cos(), high * phase.sin()], 1)
    return F.avg_pool2d(parts, 11, 1, 5, count_include_pad=False).square().sum(1).sqrt()


def darkness(labels: Labels, window: Window, fitted: Fit) -> Tensor:
    """(M,): how far the band of an outline has gone from the colour to its shade."""
    which = torch.arange(len(window), device=window.x.device)
    distance = distances(window, which, fitted.shape, torch.stack([fitted.x, fitted.y, fitted.radius], 1))
    band = ((distance < -0.25 * OUTLINE) & (distance > -0.75 * OUTLINE) & (window.mask > 0.3)).float()
    colour = palette.objects(window.x.device)[window.colour]
    way = palette.shade(colour) - colour
    share = torch.einsum("mchw,mc->mhw", sampled(labels, window) - colour[:, :, None, None], way)
    share = (share / way.square().sum(1)[:, None, None]).clamp(-0.5, 1.5)
    return (share * band).sum((1, 2)) / band.sum((1, 2)).clamp(min=1)


def shadow(labels: Labels, window: Window, fitted: Fit) -> Tensor:
    """(N,): the slope of the background's darkening on what the renderer's shadows would darken."""
    middle = (torch.arange(SIDE, device=window.x.device) + 0.5) / SIDE
    x, y, radius = (v[:, None, None] for v in (fitted.x, fitted.y, fitted.radius))
    wide = (len(window), SIDE, SIDE)
    qx = ((middle - SHADOW_X)[None, None, :] - x).expand(wide) / radius
    qy = ((middle - SHADOW_Y)[None, :, None] - y).expand(wide) / radius
    away = shapes.distance(fitted.shape, qx, qy) * radius
    cast = SHADOW * (0.5 - 0.5 * away / SHADOW_BLUR).clamp(0, 1) ** 2
    made = torch.zeros(len(labels.background), SIDE, SIDE, device=cast.device).index_add_(0, window.row, cast)
    colour = palette.backgrounds(cast.device)[labels.background]
    tone = 1 - (labels.image / colour[:, :, None, None]).mean(1)
    # Near things only, and against the level there: the kinds of background change tones slowly.
    near = F.max_pool2d((labels.label > 0)[:, None].float(), 19, 1, 9)[:, 0]
    free = 1 - F.max_pool2d((labels.label != 0)[:, None].float(), 3, 1, 1)[:, 0]
    weight = near * free
    total = weight.sum((1, 2), keepdim=True).clamp(min=1)
    made, tone = (v - (v * weight).sum((1, 2), keepdim=True) / total for v in (made, tone))
    return (made * tone * weight).sum((1, 2)) / (made.square() * weight).sum((1, 2)).clamp(min=1e-4)
