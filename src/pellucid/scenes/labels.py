"""Which pixel belongs to what, the first half of reading, and the outlines that follow from it.

Every tone of the world lies on a segment in RGB: from a colour to its tint (textures), from a colour to its shade
(outlines and shadows), along a background's brightness. A pixel belongs to the nearest segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.scenes import painting
from pellucid.scenes.words import BACKGROUND_NAMES, COLOUR_NAMES

# --- Labels ---------------------------------------------------------------------------------------------------------

SIDE = 128  # images are read at this size
_NARROW = (0.86, 1.04)  # brightness of a background of any kind
_WIDE = (0.60, 1.06)  # and under a shadow
_SURE = 40  # pixels of a colour that make a thing of it, once its border is off
_BLENDED = 0.05  # how near to a background's own tones a pixel counts as possibly background
_STEP = 0.2  # the largest change of brightness between neighbours within a shadow
_REACH = 10  # pixels that a shadow may reach from the plain background
_LEAST = 130  # pixels that can be seen of the smallest thing
_BLOCK = 5  # pixels along the side of a block that every thing holds
_JOIN = 6  # pixels that a speck may be away from its thing
_PEEL = 1  # pixels of a border that may be mixtures
_TWINS = 3  # things of one colour that are kept apart
COLOURS, _GROUNDS = len(COLOUR_NAMES), len(BACKGROUND_NAMES)


@dataclass(frozen=True)
class Labels:
    """Of N images at 128 × 128."""

    image: Tensor  # (N, 3, H, W) in [0, 1]
    background: Tensor  # (N,) int64
    present: Tensor  # (N, 30) bool: things; thing n has colour n % 10, and is its first, second or third
    label: Tensor  # (N, H, W) int64: 0 background, 1 + thing, −1 specks that are neither
    residual: Tensor  # (N, H, W): how far each pixel is from every tone of its label


def prepared(images: Tensor) -> Tensor:
    """(N, 3, 128, 128) in [0, 1], of images (N, 3, H, W) or one (3, H, W) in [−1, 1]."""
    images = images[None] if images.ndim == 3 else images
    if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[2:]) < 16:
        raise PellucidError(rule("images", "(N, 3, H, W), 16 pixels or more", tuple(images.shape)), "scenes-picture")
    if not torch.isfinite(images).all():
        raise PellucidError(rule("images", "finite", "NaN or infinity"), "scenes-picture")
    images = ((images.float() + 1) / 2).clamp(0, 1)
    if images.shape[2:] != (SIDE, SIDE):
        images = F.interpolate(images, (SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False)
    return images.contiguous()


@lru_cache(maxsize=8)
def _segments(device: torch.device) -> tuple[Tensor, Tensor]:
    """Ends (34, 3): ten tints, ten shades, seven narrow and seven wide backgrounds."""
    colour, ground = painting.objects(device), painting.backgrounds(device)
    start = torch.cat([colour, colour, ground * _NARROW[0], ground * _WIDE[0]])
    end = torch.cat([painting.tints(device), painting.shade_of(colour), ground * _NARROW[1], ground * _WIDE[1]])
    return start, end


def away(pixels: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Distances (P, S) of pixels (P, 3) to segments (S, 3); in place, because most of reading is spent here."""
    way = end - start
    length = way.square().sum(1)
    along = (pixels @ way.T).sub_((start * way).sum(1))
    share = (along / length).clamp_(0, 1)
    square = (pixels.square().sum(1, keepdim=True) - 2 * pixels @ start.T).add_(start.square().sum(1))
    return square.sub_((2 * share).mul_(along)).add_(share.square_().mul_(length)).clamp_(min=0).sqrt_()


def _away_from(pixels: Tensor, start: Tensor, end: Tensor, which: Tensor) -> Tensor:
    """(P,): the distance of each pixel to its own segment."""
    way = (end - start)[which]
    off = pixels - start[which]
    share = ((off * way).sum(1) / way.square().sum(1)).clamp(0, 1)
    return (off - share[:, None] * way).square().sum(1).sqrt()


def _shrunk(mask: Tensor, size: int = 3) -> Tensor:
    """A mask (N, H, W) without its border."""
    return ~grown(~mask, size)


def grown(mask: Tensor, size: int = 3) -> Tensor:
    """A mask (N, H, W) with a border about it; down and across in turn, which for a square is the same."""
    down = F.max_pool2d(mask[:, None].float(), (size, 1), 1, (size // 2, 0))
    return F.max_pool2d(down, (1, size), 1, (0, size // 2))[:, 0] > 0.5


def _spread(seed: Tensor, room: Tensor, steps: int) -> Tensor:
    """The seed (N, H, W), grown step by step through 4-neighbours within the room."""
    for _ in range(steps):
        wide = F.pad(seed, (1, 1, 1, 1))
        seed = seed | (room & (wide[:, :-2, 1:-1] | wide[:, 2:, 1:-1] | wide[:, 1:-1, :-2] | wide[:, 1:-1, 2:]))
    return seed


def _smooth(images: Tensor) -> Tensor:
    """(N, H, W) bool: no border within a pixel. A shadow fades slowly; the rim of a thing does not let it pass."""
    grey = images.mean(1, keepdim=True)
    return (F.max_pool2d(grey, 3, 1, 1) + F.max_pool2d(-grey, 3, 1, 1))[:, 0] < _STEP


def labelled(images: Tensor) -> Labels:
    """Labels of images (N, 3, 128, 128) in [0, 1]."""
    count = len(images)
    shape = (count, SIDE, SIDE)
    start, end = _segments(images.device)
    pixels = images.permute(0, 2, 3, 1).reshape(-1, 3)
    apart = away(pixels, start, end)
    colour = torch.minimum(apart[:, :COLOURS], apart[:, COLOURS : 2 * COLOURS])  # (P, 10)
    narrow, wide = apart[:, 2 * COLOURS :].reshape(-1, 2, _GROUNDS).unbind(1)
    background = _voted(colour, narrow, shape)
    own = background.repeat_interleave(SIDE * SIDE)[:, None]
    narrow, wide = narrow.gather(1, own)[:, 0], wide.gather(1, own)[:, 0]
    present = found(colour, narrow, shape)
    colour = torch.where(present.repeat_interleave(SIDE * SIDE, 0), colour, torch.inf)
    off, which = colour.min(1)
    sure = (narrow <= off).reshape(shape)
    shadow = ((wide <= off) | (wide < _BLENDED)).reshape(shape) & _smooth(images)
    ground = _spread(_spread(sure, shadow, _REACH), (wide <= off).reshape(shape), 2)
    # The rim of a thing is of its colour, so at its border a light tone is a mixture with the background.
    deep = _away_from(pixels, start[:COLOURS], end[COLOURS : 2 * COLOURS], which)
    ground = _spread(ground, (torch.minimum(narrow, wide) < deep).reshape(shape), _PEEL)
    label = torch.where(ground, 0, torch.where(torch.isinf(off), 0, which + 1).reshape(shape))
    residual = torch.where(label == 0, torch.minimum(narrow, wide).reshape(shape), off.reshape(shape))
    label, present = _parted(*_tidied(label, present))
    return Labels(images, background, present, label, residual)


def _voted(colour: Tensor, narrow: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(N,): the background that most pixels are."""
    best, which = narrow.min(1)
    votes = F.one_hot(which, _GROUNDS) * (best < colour.amin(1))[:, None]
    return votes.reshape(shape[0], -1, _GROUNDS).sum(1).argmax(1)


def found(colour: Tensor, narrow: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(N, 10) bool: colours that fill more than borders: the mixed pixels of an edge may look like any colour."""
    best, which = colour.min(1)
    label = torch.where(best < narrow, which, -1).reshape(shape).float()
    high = F.max_pool2d(label[:, None], 3, 1, 1)[:, 0]
    low = -F.max_pool2d(-label[:, None], 3, 1, 1)[:, 0]
    inner = torch.where((high == low) & (label >= 0), label.long(), COLOURS)
    return F.one_hot(inner.flatten(1), COLOURS + 1).sum(1)[:, :COLOURS] >= _SURE


def _tidied(label: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Labels without specks, and the colours that are left. A speck joins the thing that it touches, or becomes −1.

    A speck is far from every solid block of its colour: mixed pixels at a border may have any colour, but fill none.
    """
    row, colour = present.nonzero(as_tuple=True)
    if not len(row):
        return label, present
    mask = label[row] == colour[:, None, None] + 1
    whole = _shrunk(mask, _BLOCK)
    for _ in range(3):
        whole = mask & grown(whole, 5)
    large = whole.sum((1, 2)) >= _LEAST
    kept = torch.zeros_like(label)
    turn = _order(row)
    for i in range(int(turn.max()) + 1):  # things of one image one after another, of all images at once
        mine = turn == i
        own = whole[mine] & large[mine][:, None, None]
        kept[row[mine]] = torch.where(own, colour[mine][:, None, None] + 1, kept[row[mine]])
    loose = (label > 0) & (kept == 0)
    for _ in range(_JOIN):
        near = F.max_pool2d(kept[:, None].float(), 3, 1, 1)[:, 0].long()
        kept = torch.where(loose & (kept == 0), near, kept)
    left = torch.zeros_like(present)
    left[row, colour] = large
    return torch.where(loose & (kept == 0), -1, kept), left


def _parted(label: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Pieces of one colour with background all between them are things of their own, the largest first. Pieces that
    another thing joins may be one that it hides in part: they stay one."""
    present = F.pad(present, (0, (_TWINS - 1) * COLOURS))
    island = _islands(grown(label != 0))  # (N, H, W)
    for row in range(len(label)):
        for colour in present[row].nonzero()[:, 0].tolist():
            mine = label[row] == colour + 1
            numbers, sizes = island[row][mine].unique(return_counts=True)
            largest = sizes.argsort(descending=True)
            large = numbers[largest][sizes[largest] >= _LEAST]
            for twin, number in enumerate(large[1:_TWINS].tolist(), 1):
                thing = colour + twin * COLOURS
                label[row][mine & (island[row] == number)] = thing + 1
                present[row, thing] = True
    return label, present


def _islands(mask: Tensor) -> Tensor:
    """(N, H, W) int64: a number for each connected part of a mask, 0 where it is not."""
    flat = mask.flatten(1)
    numbers = torch.arange(1, flat.shape[1] + 1, device=mask.device) * flat
    while True:
        near = F.max_pool2d(numbers.reshape(mask.shape)[:, None].float(), 3, 1, 1).flatten(1).long()  # exact below 2²⁴
        near = near * flat
        near = near.gather(1, (near - 1).clamp(min=0)) * flat  # and on to where that pixel has come
        if torch.equal(near, numbers):
            return numbers.reshape(mask.shape)
        numbers = near


def _order(row: Tensor) -> Tensor:
    """(M,): the position of each entry among those of its row; rows are sorted."""
    first = torch.searchsorted(row, row)
    return torch.arange(len(row), device=row.device) - first


# --- Outlines -------------------------------------------------------------------------------------------------------

_CHUNK = 8
_CUT = 0.5  # an exact outline runs through pixels that it covers by half


def outlines(images: Tensor) -> Tensor:
    """(N, 128, 128) bool: where labels change to the right or downwards. Textures have no outline."""
    found = []
    with torch.no_grad():
        for part in prepared(images).split(_CHUNK):
            label = labelled(part).label.clamp(min=0)
            edge = torch.zeros_like(label, dtype=torch.bool)
            edge[:, :, :-1] |= label[:, :, :-1] != label[:, :, 1:]
            edge[:, :-1, :] |= label[:, :-1, :] != label[:, 1:, :]
            found.append(edge)
    return torch.cat(found)


def edge_f1(images: Tensor, edges: Tensor) -> Tensor:
    """(N,): F1 of the outlines of images (N, 3, H, W) against exact edges (N, 1, 128, 128) in [0, 1].

    A pixel counts as met when the other map has one within one pixel, diagonals included.
    """
    edges = edges[None] if edges.ndim == 3 else edges
    seen = outlines(images)
    if edges.shape != (len(seen), 1, SIDE, SIDE):
        raise PellucidError(rule("edges", f"({len(seen)}, 1, {SIDE}, {SIDE})", tuple(edges.shape)), "scenes-edges")
    exact = edges[:, 0].to(seen.device) >= _CUT
    hit = (seen & grown(exact)).sum((1, 2)), (exact & grown(seen)).sum((1, 2))
    precision = hit[0] / seen.sum((1, 2)).clamp(min=1)
    recall = hit[1] / exact.sum((1, 2)).clamp(min=1)
    return 2 * precision * recall / (precision + recall).clamp(min=1e-9)
