"""The colour and the texture of a thing whose shape is known."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from pellucid.scenes import palette
from pellucid.scenes.fitting import GRID, Fit, Window, at, distances
from pellucid.scenes.labels import SIDE, Labels, away
from pellucid.scenes.styles import OUTLINE
from pellucid.scenes.textures import lightness, period
from pellucid.scenes.words import TEXTURE_NAMES

INSET = OUTLINE + 0.6 / SIDE  # a texture is judged within the rim, or the outline of that style
GOOD = 0.045  # the mean square error of a texture that needs no search
POOR = 0.13  # and of one that cannot be read
LEAD = 0.006  # how much better it must be than the next
OFF = 0.20  # the farthest that a thing's own tone may lie from its colour's
FEW = 12  # points within the rim, at least
SHIFTS = 5  # along each axis, when a pattern does not sit where it should


def sampled(labels: Labels, window: Window) -> Tensor:
    """(M, 3, G, G): the image in each thing's window."""
    return at(labels.image[window.row], window.x, window.y)


def inner(window: Window, fitted: Fit) -> Tensor:
    """(M, G, G) bool: what lies within the rim and is the thing's own."""
    which = torch.arange(len(window), device=window.x.device)
    place = torch.stack([fitted.x, fitted.y, fitted.radius], 1)
    return (distances(window, which, fitted.shape, place) < -INSET) & (window.mask > 0.5)


def colours(labels: Labels, window: Window, fitted: Fit) -> Tensor:
    """(M,) int64: the colour that a thing's pixels are nearest to, −1 where none is near."""
    within = (window.mask > 0.7).float().flatten(1)  # (M, G²)
    pixels = sampled(labels, window).flatten(2).transpose(1, 2)  # (M, G², 3)
    every = palette.objects(pixels.device)
    ends = (palette.tints(pixels.device), palette.shade(every))
    off = [away(pixels.reshape(-1, 3), every, end) for end in ends]
    nearest = torch.minimum(*off).reshape(len(window), -1, len(every))
    mean = (nearest * within[..., None]).sum(1) / within.sum(1, keepdim=True).clamp(min=1)
    near = mean.gather(1, window.colour[:, None])[:, 0]
    return torch.where(near <= OFF, window.colour, -1)


def light(labels: Labels, window: Window) -> Tensor:
    """(M, G, G): how far each pixel has gone from the colour to its tint."""
    colour = palette.objects(window.x.device)[window.colour]  # (M, 3)
    way = palette.tints(window.x.device)[window.colour] - colour
    share = torch.einsum("mchw,mc->mhw", sampled(labels, window) - colour[:, :, None, None], way)
    return (share / way.square().sum(1)[:, None, None]).clamp(-0.3, 1.3)


@lru_cache(maxsize=8)
def hypotheses(device: torch.device) -> tuple[Tensor, Tensor]:
    """Textures (T,) and shifts in periods (T, 2): each in its place first, then the patterns all about."""
    steps = (torch.arange(SHIFTS) / SHIFTS).tolist()
    rows = [(i, 0.0, 0.0) for i in range(len(TEXTURE_NAMES))]
    for name in ("striped", "checkered", "dotted"):
        i = TEXTURE_NAMES.index(name)
        downs = [0.0] if name == "striped" else steps
        rows += [(i, a, b) for a in steps for b in downs if a or b]
    table = torch.tensor(rows, device=device)
    return table[:, 0].long(), table[:, 1:]


def textures(labels: Labels, window: Window, fitted: Fit) -> Tensor:
    """(M,) int64: the texture that explains a thing's tones best, −1 where none does."""
    share, within = light(labels, window), inner(window, fitted).float()
    near = len(TEXTURE_NAMES)
    first = errors(window, fitted, share, within, slice(0, near))  # (M, 5)
    lowest, found = first.topk(2, dim=1, largest=False)
    best, second, found = lowest[:, 0], lowest[:, 1], found[:, 0]
    rows = ((best > GOOD) | (second - best < LEAD)).nonzero()[:, 0]
    if len(rows):
        some = Window(*(getattr(window, name)[rows] for name in window.__dataclass_fields__))
        part = Fit(*(getattr(fitted, name)[rows] for name in fitted.__dataclass_fields__))
        every = torch.cat([first[rows], errors(some, part, share[rows], within[rows], slice(near, None))], 1)
        kinds = hypotheses(share.device)[0]
        own = torch.stack([every[:, kinds == i].amin(1) for i in range(near)], 1)
        lowest, which = own.topk(2, dim=1, largest=False)
        best[rows], second[rows], found[rows] = lowest[:, 0], lowest[:, 1], which[:, 0]
    clear = (best < POOR) & (second - best >= LEAD) & (within.sum((1, 2)) >= FEW)
    return torch.where(clear, found, -1)


def errors(window: Window, fitted: Fit, share: Tensor, within: Tensor, part: slice) -> Tensor:
    """(M, T): the mean square error of each hypothesis within the rim."""
    kinds, shifts = (v[part] for v in hypotheses(share.device))
    count, many = len(window), len(kinds)
    which = torch.arange(count, device=share.device).repeat_interleave(many)
    step = period(fitted.radius)[which]
    shift = shifts.repeat(count, 1) * step[:, None]
    wide = (count * many, GRID, GRID)
    x = (window.x[which] - fitted.x[which, None] - shift[:, :1])[:, None, :].expand(wide)
    y = (window.y[which] - fitted.y[which, None] - shift[:, 1:])[:, :, None].expand(wide)
    made = lightness(kinds.repeat(count), x, y, fitted.radius[which], 1.5 / SIDE).reshape(count, many, GRID, GRID)
    off = (made - share[:, None]).square() * within[:, None]
    return off.sum((2, 3)) / within.sum((1, 2)).clamp(min=1)[:, None]
