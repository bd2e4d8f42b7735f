"""Read a finished image: which objects stand where, how they look and on what; or say that it cannot be read.

Analysis by synthesis: pixels are labelled by the world's tones (labels.py), every shape is laid over each mask
(fitting.py), and the texture that explains a thing's tones best is taken (surface.py). Weak evidence is None.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.scenes import shapes, surface
from pellucid.scenes.fitting import Fit, Window, fit, windows
from pellucid.scenes.ground import Ground, ground
from pellucid.scenes.labels import SIDE, Labels, labelled, prepared
from pellucid.scenes.relations import WIDE, holding
from pellucid.scenes.scene import MOST, SIZE_CUTS, Scenes, place_of
from pellucid.scenes.words import (
    BACKGROUND_NAMES,
    COLOUR_NAMES,
    KIND_NAMES,
    RELATION_NAMES,
    SHAPE_NAMES,
    SIZE_NAMES,
    TEXTURE_NAMES,
)

CHUNK = 8  # images at a time on a CPU: what fits into its caches
FITS = 0.78  # the least overlap of a readable shape
AHEAD = 0.006  # and its lead over the next shape
STRANGE = 0.10  # an RGB distance that no tone of the world explains
MOST_STRANGE = 0.12  # the share of such pixels in a readable image
SIZE_DOUBT = 0.015  # around a cut between sizes, as a share of it
LOOSE = 0.06  # the share of specks in a readable image


@dataclass(frozen=True)
class Seen:
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

    objects: tuple[Seen, ...]
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
    chunk = CHUNK if images.device.type == "cpu" else 256
    found: list[Reading] = []
    with torch.no_grad():
        for part in images.split(chunk):
            found += read_chunk(labelled(part))
    return found


def read_chunk(labels: Labels) -> list[Reading]:
    window = windows(labels)
    fitted = fit(window) if len(window) else empty(labels)
    things = [(window.row == row).nonzero()[:, 0].tolist() for row in range(len(labels.background))]
    seen = objects(labels, window, fitted)
    back = ground(labels, window, fitted)
    strange = strangeness(labels)
    return [
        assemble(ordered(labels, window, fitted, rows), seen, fitted, back, row, strange[row])
        for row, rows in enumerate(things)
    ]


def empty(labels: Labels) -> Fit:
    none = torch.zeros(0, device=labels.image.device)
    return Fit(none.long(), none, none, none, none, none, none, none)


def strangeness(labels: Labels) -> list[tuple[float, float]]:
    """For each image the share of pixels that no tone explains, and of those that belong to nothing."""
    strange = (labels.residual > STRANGE).float().mean((1, 2)).tolist()
    loose = (labels.label < 0).float().mean((1, 2)).tolist()
    return list(zip(strange, loose, strict=True))


def objects(labels: Labels, window: Window, fitted: Fit) -> list[Seen]:
    """Every thing of the chunk in words."""
    if not len(window):
        return []
    colour = surface.colours(labels, window, fitted).tolist()
    texture = surface.textures(labels, window, fitted).tolist()
    clear = ((fitted.overlap >= FITS) & (fitted.overlap - fitted.second >= AHEAD)).tolist()
    columns = [fitted.shape, fitted.x, fitted.y, fitted.radius, fitted.overlap]
    found = []
    for i, (shape, x, y, radius, overlap) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        found.append(
            Seen(
                shape=SHAPE_NAMES[shape] if clear[i] else None,
                colour=COLOUR_NAMES[colour[i]] if colour[i] >= 0 else None,
                texture=TEXTURE_NAMES[texture[i]] if texture[i] >= 0 and clear[i] else None,
                size=size_of(radius) if clear[i] else None,
                place=place_of(x, y),
                x=x,
                y=y,
                radius=radius,
                fit=overlap,
            )
        )
    return found


def size_of(radius: float) -> str | None:
    if any(abs(radius / cut - 1) < SIZE_DOUBT for cut in SIZE_CUTS):
        return None
    return SIZE_NAMES[sum(radius > cut for cut in SIZE_CUTS)]


def ordered(labels: Labels, window: Window, fitted: Fit, rows: list[int]) -> list[int]:
    """Things of one image from the back to the front: where two silhouettes cross, labels say whose pixels are."""
    if len(rows) < 2:
        return rows
    inside = silhouettes(window, fitted, rows)
    label = labels.label[int(window.row[rows[0]])]
    wins = [0] * len(rows)
    for i in range(len(rows)):
        for j in range(i):
            cross = inside[i] & inside[j]
            own, other = ((label[cross] == int(window.thing[rows[k]]) + 1).sum().item() for k in (i, j))
            wins[i if own >= other else j] += own != other
    return [row for _, row in sorted(zip(wins, rows, strict=True))]


def silhouettes(window: Window, fitted: Fit, rows: list[int]) -> Tensor:
    """(K, 128, 128) bool"""
    middle = (torch.arange(SIDE, device=window.x.device) + 0.5) / SIDE
    x, y, radius = (v[rows][:, None, None] for v in (fitted.x, fitted.y, fitted.radius))
    wide = (len(rows), SIDE, SIDE)
    qx, qy = ((middle[None, None, :] - x) / radius).expand(wide), ((middle[None, :, None] - y) / radius).expand(wide)
    return shapes.distance(fitted.shape[rows], qx, qy) < 0


def assemble(
    rows: list[int], seen: list[Seen], fitted: Fit, back: Ground, row: int, strange: tuple[float, float]
) -> Reading:
    trouble = None
    if not rows:
        trouble = "no object"
    elif len(rows) > MOST:
        trouble = f"{len(rows)} things"
    elif strange[0] > MOST_STRANGE or strange[1] > LOOSE:
        trouble = "tones that the world does not have"
    name, kind = int(back.colour[row]), int(back.kind[row])
    return Reading(
        objects=tuple(seen[i] for i in rows),
        relations=() if trouble else related(rows, fitted),
        background=BACKGROUND_NAMES[name] if name >= 0 else None,
        kind=KIND_NAMES[kind] if kind >= 0 else None,
        trouble=trouble,
    )


def related(rows: list[int], fitted: Fit) -> tuple[tuple[int, str, int], ...]:
    """All relations that hold with wide margins between the things of one image, which are listed back to front."""
    if len(rows) < 2:
        return ()
    padded = rows + [rows[0]] * (MOST - len(rows))
    none = torch.zeros(1, dtype=torch.int64, device=fitted.x.device)

    def of(values: Tensor) -> Tensor:
        return values[padded][None]

    zero = torch.zeros_like(of(fitted.shape))
    scene = Scenes(
        none,
        none + len(rows),
        of(fitted.shape),
        zero,
        zero,
        of(fitted.radius),
        of(fitted.x),
        of(fitted.y),
        none,
        none,
        none,
    )
    holds = holding(scene, WIDE)[0].nonzero().tolist()
    return tuple((i, RELATION_NAMES[k], j) for i, j, k in holds)
