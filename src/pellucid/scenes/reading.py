"""Read a finished image: its objects, relations, background and style, or why it cannot be read.

Analysis by synthesis: pixels are labelled by the world's tones (labels.py), every shape is laid over each mask, and
the texture that explains a thing's tones best is chosen (fitting.py). With weak evidence an attribute is None.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.scenes import fitting, painting, shapes
from pellucid.scenes import words as w
from pellucid.scenes.fitting import Fit, Window, distances, fit, way_to, windows
from pellucid.scenes.labels import SIDE, Labels, grown, labelled, prepared
from pellucid.scenes.painting import HATCH, OUTLINE
from pellucid.scenes.relations import WIDE, holding
from pellucid.scenes.renderer import CELLS, CHECK, FADE
from pellucid.scenes.scene import MOST, SIZE_CUTS, Scenes, place_of

# --- Background -----------------------------------------------------------------------------------------------------

_HALF, _DOUBT = 0.5, 0.12  # a kind is there from half of its contrast on, give or take
_NEAR = 0.09  # the farthest that a background's tone may lie from its colour's
_CLEAR_OF = 13  # pixels: a window about things that their shadows stay within
_FEW = 400  # pixels of background, at least


@dataclass(frozen=True)
class _BackgroundReading:
    """Of N images; −1 is unreadable."""

    colour: Tensor  # (N,) int64
    kind: Tensor  # (N,) int64


def _ground(labels: Labels, window: Window, fitted: Fit) -> _BackgroundReading:
    """A level, a slope and a checkered pattern are fitted to the pixels that are clearly background."""
    free = ~grown(labels.label != 0, _CLEAR_OF)
    scarce = free.sum((1, 2), keepdim=True) < _FEW
    free = torch.where(scarce, ~grown(labels.label != 0, 3), free)
    colour = painting.backgrounds(free.device)[labels.background]  # (N, 3)
    tone = (labels.image / colour[:, :, None, None]).mean(1)
    level = _explained(tone, free)  # (N, 3): level, slope, check
    slope, check = -level[:, 1] / FADE, -level[:, 2] / CHECK
    kind = torch.where(check > _HALF, 2, torch.where(slope > _HALF, 1, 0))
    doubt = ((slope - _HALF).abs() < _DOUBT) | ((check - _HALF).abs() < _DOUBT) | ((slope > _HALF) & (check > _HALF))
    weight = free.float()
    mean = (labels.image * weight[:, None]).sum((2, 3)) / weight.sum((1, 2)).clamp(min=1)[:, None]
    # The mean tone of its kind: a gradient is darker on the whole, half of a checkered one is.
    usual = torch.tensor([1.0, 0.965, 1 - CHECK / 2], device=free.device)[kind][:, None]
    off = torch.cdist(mean / usual, painting.backgrounds(free.device))
    near, which = off.min(1)
    few = weight.sum((1, 2)) < _FEW / 4
    return _BackgroundReading(torch.where((near > _NEAR) | few, -1, which), torch.where(doubt | few, -1, kind))


def _explained(tone: Tensor, free: Tensor) -> Tensor:
    """(N, 3): least squares of 1, y and the checkered pattern on tones (N, H, W) where free."""
    middle = (torch.arange(SIDE, device=tone.device) + 0.5) / SIDE
    cell = (middle * CELLS).floor()
    parts = [torch.ones(SIDE, SIDE, device=tone.device), middle[:, None].expand(SIDE, SIDE) - 0.5]
    parts += [(cell[:, None] + cell) % 2 - 0.5]
    basis = torch.stack(parts).flatten(1)  # (3, H·W)
    weight = free.flatten(1).float()
    normal = torch.einsum("ap,np,bp->nab", basis, weight, basis) + 1e-3 * torch.eye(3, device=tone.device)
    right = torch.einsum("ap,np->na", basis, weight * tone.flatten(1))
    return torch.linalg.solve(normal, right[..., None])[..., 0]


# --- Objects and relations ------------------------------------------------------------------------------------------

_CHUNK = 8  # images at a time on a CPU: what fits into its caches
_FITS = 0.78  # the least overlap of a readable shape
_AHEAD = 0.006  # and its lead over the next shape
_STRANGE = 0.10  # an RGB distance that no tone of the world explains
_MOST_STRANGE = 0.12  # the share of such pixels in a readable image
_SIZE_DOUBT = 0.015  # around a cut between sizes, as a share of it
_LOOSE = 0.06  # the share of specks in a readable image


@dataclass(frozen=True)
class ObjectReading:
    """An object in an image; None is unreadable. `fit` is the overlap of mask and shape over their union."""

    shape: str | None
    colour: str | None
    texture: str | None
    size: str | None
    place: str
    x: float
    y: float
    radius: float
    fit: float


@dataclass(frozen=True)
class Reading:
    """What an image shows, objects from the back to the front. `trouble` says why it cannot be read as a whole."""

    objects: tuple[ObjectReading, ...]
    relations: tuple[tuple[int, str, int], ...]
    background: str | None
    kind: str | None
    trouble: str | None = None

    @property
    def readable(self) -> bool:
        """Whether every attribute could be read."""
        own = all(None not in (seen.shape, seen.colour, seen.texture, seen.size) for seen in self.objects)
        return self.trouble is None and own and None not in (self.background, self.kind)


def read(images: Tensor) -> list[Reading]:
    """Readings of images (N, 3, H, W), or of one (3, H, W), in [−1, 1]."""
    images = prepared(images)
    chunk = _CHUNK if images.device.type == "cpu" else 256
    found: list[Reading] = []
    with torch.no_grad():
        for part in images.split(chunk):
            found += _read_chunk(labelled(part))
    return found


def _read_chunk(labels: Labels) -> list[Reading]:
    window = windows(labels)
    fitted = fit(window) if len(window) else _empty(labels)
    things = [(window.row == row).nonzero()[:, 0].tolist() for row in range(len(labels.background))]
    seen = _objects(labels, window, fitted)
    back = _ground(labels, window, fitted)
    strange = _strangeness(labels)
    return [
        _assemble(_ordered(labels, window, fitted, rows), seen, fitted, back, row, strange[row])
        for row, rows in enumerate(things)
    ]


def _empty(labels: Labels) -> Fit:
    none = torch.zeros(0, device=labels.image.device)
    return Fit(none.long(), none, none, none, none, none, none, none)


def _strangeness(labels: Labels) -> list[tuple[float, float]]:
    """For each image the share of pixels that no tone explains, and of those that belong to nothing."""
    strange = (labels.residual > _STRANGE).float().mean((1, 2)).tolist()
    loose = (labels.label < 0).float().mean((1, 2)).tolist()
    return list(zip(strange, loose, strict=True))


def _objects(labels: Labels, window: Window, fitted: Fit) -> list[ObjectReading]:
    """Every thing of the chunk in words."""
    if not len(window):
        return []
    colour = fitting.colours(labels, window, fitted).tolist()
    texture = fitting.textures(labels, window, fitted).tolist()
    clear = ((fitted.overlap >= _FITS) & (fitted.overlap - fitted.second >= _AHEAD)).tolist()
    columns = [fitted.shape, fitted.x, fitted.y, fitted.radius, fitted.overlap]
    found = []
    for i, (shape, x, y, radius, overlap) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        name, size = (w.SHAPE_NAMES[shape], _size_of(radius)) if clear[i] else (None, None)
        tone = w.COLOUR_NAMES[colour[i]] if colour[i] >= 0 else None
        pattern = w.TEXTURE_NAMES[texture[i]] if texture[i] >= 0 and clear[i] else None
        found.append(ObjectReading(name, tone, pattern, size, place_of(x, y), x, y, radius, overlap))
    return found


def _size_of(radius: float) -> str | None:
    if any(abs(radius / cut - 1) < _SIZE_DOUBT for cut in SIZE_CUTS):
        return None
    return w.SIZE_NAMES[sum(radius > cut for cut in SIZE_CUTS)]


def _ordered(labels: Labels, window: Window, fitted: Fit, rows: list[int]) -> list[int]:
    """Things of one image from the back to the front: where two silhouettes cross, labels say whose pixels are."""
    if len(rows) < 2:
        return rows
    inside = _silhouettes(fitted, rows)
    label = labels.label[int(window.row[rows[0]])]
    wins = [0] * len(rows)
    for i in range(len(rows)):
        for j in range(i):
            cross = inside[i] & inside[j]
            own, other = ((label[cross] == int(window.thing[rows[k]]) + 1).sum().item() for k in (i, j))
            wins[i if own >= other else j] += own != other
    return [row for _, row in sorted(zip(wins, rows, strict=True))]


def _silhouettes(fitted: Fit, rows: list[int]) -> Tensor:
    """(K, 128, 128) bool"""
    return shapes.on_pixels(*(v[rows] for v in (fitted.shape, fitted.x, fitted.y, fitted.radius)), SIDE) < 0


def _assemble(
    rows: list[int],
    seen: list[ObjectReading],
    fitted: Fit,
    back: _BackgroundReading,
    row: int,
    strange: tuple[float, float],
) -> Reading:
    trouble = None
    if not rows:
        trouble = "no object"
    elif len(rows) > MOST:
        trouble = f"{len(rows)} things"
    elif strange[0] > _MOST_STRANGE or strange[1] > _LOOSE:
        trouble = "tones that the world does not have"
    name, kind = int(back.colour[row]), int(back.kind[row])
    return Reading(
        objects=tuple(seen[i] for i in rows),
        relations=() if trouble else _related(rows, fitted),
        background=w.BACKGROUND_NAMES[name] if name >= 0 else None,
        kind=w.KIND_NAMES[kind] if kind >= 0 else None,
        trouble=trouble,
    )


def _related(rows: list[int], fitted: Fit) -> tuple[tuple[int, str, int], ...]:
    """All relations that hold with wide margins between the things of one image, which are listed back to front."""
    if len(rows) < 2:
        return ()
    padded = rows + [rows[0]] * (MOST - len(rows))
    none = torch.zeros(1, dtype=torch.int64, device=fitted.x.device)

    shape, *place = (values[padded][None] for values in (fitted.shape, fitted.radius, fitted.x, fitted.y))
    zero = torch.zeros_like(shape)
    scene = Scenes(none, none + len(rows), shape, zero, zero, *place, none, none, none)
    holds = holding(scene, WIDE)[0].nonzero().tolist()
    return tuple((i, w.RELATION_NAMES[k], j) for i, j, k in holds)


# --- Style ----------------------------------------------------------------------------------------------------------

_DARK = 0.40  # the median brightness of a night
_HATCHED = 0.03  # amplitude of the hatching, and the share of pixels that have it
_HATCHED_SHARE = 0.007
_LINED = 0.3  # how far an outline goes to the shade
_SHADED = 0.45  # how much of the renderer's shadow there is


def style_of(images: Tensor) -> list[str | None]:
    """The style of images (N, 3, H, W) or (3, H, W) in [−1, 1]; None where no thing can be seen."""
    found: list[str | None] = []
    with torch.no_grad():
        for part in prepared(images).split(_CHUNK):
            found += _style_chunk(part)
    return found


def _style_chunk(images: Tensor) -> list[str | None]:
    dark = images.mean(1).flatten(1).median(1).values < _DARK
    lit = images.amax(1).flatten(1).amax(1) > 0.6  # a night without any tube is just black
    hatched = (_hatching(images) > _HATCHED).float().mean((1, 2)) > _HATCHED_SHARE
    labels = labelled(images)
    window = windows(labels)
    count = len(images)
    lined, shaded, things = torch.zeros(count), torch.zeros(count), torch.zeros(count)
    if len(window):
        fitted = fit(window)
        row = window.row.cpu()
        things.index_add_(0, row, torch.ones(len(row)))
        lined.index_add_(0, row, _darkness(labels, window, fitted).cpu())
        shaded = _shadow(labels, window, fitted).cpu()
    lined = lined / things.clamp(min=1)
    rows = zip(*(v.tolist() for v in (dark, lit, hatched, things, lined, shaded)), strict=True)
    return [_decide(*row) for row in rows]


def _decide(dark: bool, lit: bool, hatched: bool, things: float, lined: float, shaded: float) -> str | None:
    if dark:
        return "neon" if lit else None
    if hatched:
        return "sketch"
    if not things:
        return None
    return "outlined" if lined > _LINED else "soft" if shaded > _SHADED else "flat"


def _hatching(images: Tensor) -> Tensor:
    """(N, H, W): how much more there is of a sketch's lines than of finer or coarser ones. A border has all."""
    grey = images.amin(1, keepdim=True)  # every colour is dark in one channel
    high = grey - F.avg_pool2d(grey, 9, 1, 4, count_include_pad=False)
    own, *others = (_wave(high, HATCH * share) for share in (1.0, 1.45, 0.7))
    return own - torch.maximum(*others)


def _wave(high: Tensor, period: float) -> Tensor:
    """(N, H, W): the amplitude of slanted lines of a period, within eleven pixels."""
    middle = (torch.arange(SIDE, device=high.device) + 0.5) / SIDE
    phase = 2 * torch.pi * (middle[None, :] - middle[:, None]) * 0.7071 / period
    parts = torch.cat([high * phase.cos(), high * phase.sin()], 1)
    return F.avg_pool2d(parts, 11, 1, 5, count_include_pad=False).square().sum(1).sqrt()


def _darkness(labels: Labels, window: Window, fitted: Fit) -> Tensor:
    """(M,): how far the band of an outline has gone from the colour to its shade."""
    which = torch.arange(len(window), device=window.x.device)
    distance = distances(window, which, fitted.shape, torch.stack([fitted.x, fitted.y, fitted.radius], 1))
    band = ((distance < -0.25 * OUTLINE) & (distance > -0.75 * OUTLINE) & (window.mask > 0.3)).float()
    share = way_to(painting.shade_of(painting.objects(window.x.device)), labels, window).clamp(-0.5, 1.5)
    return (share * band).sum((1, 2)) / band.sum((1, 2)).clamp(min=1)


def _shadow(labels: Labels, window: Window, fitted: Fit) -> Tensor:
    """(N,): the slope of the background's darkening on what the renderer's shadows would darken."""
    away = shapes.on_pixels(fitted.shape, fitted.x, fitted.y, fitted.radius, SIDE, painting.SHADOW_SHIFT)
    cast = painting.shadow(away)
    made = torch.zeros(len(labels.background), SIDE, SIDE, device=cast.device).index_add_(0, window.row, cast)
    colour = painting.backgrounds(cast.device)[labels.background]
    tone = 1 - (labels.image / colour[:, :, None, None]).mean(1)
    # Near things only, and against the level there: the kinds of background change tones slowly.
    weight = (grown(labels.label > 0, 19) & ~grown(labels.label != 0)).float()
    total = weight.sum((1, 2), keepdim=True).clamp(min=1)
    made, tone = (v - (v * weight).sum((1, 2), keepdim=True) / total for v in (made, tone))
    return (made * tone * weight).sum((1, 2)) / (made.square() * weight).sum((1, 2)).clamp(min=1e-4)
