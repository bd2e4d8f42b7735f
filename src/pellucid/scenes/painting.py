"""How things look: the colours of the world, five textures and five styles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pellucid.scenes import shapes
from pellucid.scenes.scene import Scenes
from pellucid.scenes.words import BACKGROUND_NAMES, COLOUR_NAMES, STYLE_NAMES, TEXTURE_NAMES

# --- Colours --------------------------------------------------------------------------------------------------------

OBJECTS = {
    "red": (0.85, 0.16, 0.19),
    "orange": (0.96, 0.50, 0.10),
    "yellow": (0.97, 0.75, 0.06),
    "green": (0.20, 0.60, 0.27),
    "teal": (0.08, 0.68, 0.70),
    "blue": (0.15, 0.34, 0.80),
    "purple": (0.49, 0.22, 0.69),
    "pink": (0.96, 0.40, 0.67),
    "brown": (0.47, 0.28, 0.15),
    "black": (0.16, 0.17, 0.21),
}
BACKGROUNDS = {
    "white": (0.97, 0.97, 0.96),
    "grey": (0.79, 0.80, 0.82),
    "cream": (0.97, 0.92, 0.79),
    "pale blue": (0.76, 0.88, 0.98),
    "pale green": (0.79, 0.93, 0.79),
    "pale pink": (0.99, 0.84, 0.86),
    "pale purple": (0.86, 0.81, 0.96),
}
# The light tone of each colour's textures: of its own hue, and of no background's even in a shadow.
_TINTS = {
    "red": (0.97, 0.62, 0.60),
    "orange": (1.00, 0.78, 0.48),
    "yellow": (1.00, 0.96, 0.70),
    "green": (0.60, 0.84, 0.55),
    "teal": (0.55, 0.90, 0.88),
    "blue": (0.54, 0.71, 0.98),
    "purple": (0.78, 0.60, 0.93),
    "pink": (1.00, 0.71, 0.86),
    "brown": (0.80, 0.61, 0.40),
    "black": (0.49, 0.56, 0.70),
}
_CPU = torch.device("cpu")
_PAPER = (0.96, 0.95, 0.92)  # of a sketch
_SHADE = 0.55  # how far an outline goes to black


@lru_cache(maxsize=16)
def objects(device: torch.device = _CPU) -> Tensor:
    """(10, 3): the colour of each name."""
    return torch.tensor([OBJECTS[name] for name in COLOUR_NAMES], device=device)


@lru_cache(maxsize=16)
def backgrounds(device: torch.device = _CPU) -> Tensor:
    """(7, 3)"""
    return torch.tensor([BACKGROUNDS[name] for name in BACKGROUND_NAMES], device=device)


@lru_cache(maxsize=16)
def tints(device: torch.device = _CPU) -> Tensor:
    """(10, 3): the light tone of each name."""
    return torch.tensor([_TINTS[name] for name in COLOUR_NAMES], device=device)


def shade_of(colour: Tensor) -> Tensor:
    """The dark tone of an outline."""
    return colour * (1 - _SHADE)


# --- Textures -------------------------------------------------------------------------------------------------------

# The period grows with the thing, less than in proportion: small things keep a visible pattern, large ones a fine one.
_PERIOD, _PERIOD_PER_RADIUS = 0.054, 0.22
RIM = 0.0145  # a texture stops before the outline, which stays in the colour
_DOT = 0.31  # a dot's radius, in periods
_SLANT = 0.5 * math.sqrt(2)


def period(radius: Tensor) -> Tensor:
    """The distance from one stripe to the next, as a share of the image's side."""
    return _PERIOD + _PERIOD_PER_RADIUS * radius


def _wave(along: Tensor) -> Tensor:
    """Distance to the nearest change of a square wave of period 1; positive where it is high: in [−1/4, 1/4]."""
    return 0.25 - (along - torch.floor(along + 0.5)).abs()


def striped(x: Tensor, y: Tensor, pixel: Tensor) -> Tensor:
    """Slanted stripes, a light one through the middle."""
    return _cover(_wave((x + y) * _SLANT), pixel)


def checkered(x: Tensor, y: Tensor, pixel: Tensor) -> Tensor:
    """Squares of half a period, a corner in the middle."""
    across, down = (2 * _cover(_wave(v + 0.25), pixel) - 1 for v in (x, y))
    return 0.5 + 0.5 * across * down


def dotted(x: Tensor, y: Tensor, pixel: Tensor) -> Tensor:
    """Light dots; every second row is shifted by half a period."""
    row = torch.floor(y / 0.9 + 0.5)
    shifted = x + 0.5 * (row - 2 * torch.floor(row / 2))
    return _cover(_DOT - torch.hypot(shifted - torch.floor(shifted + 0.5), y - 0.9 * row), pixel)


def _cover(distance: Tensor, pixel: Tensor) -> Tensor:
    """The share of a pixel on the positive side."""
    return (0.5 + distance / pixel).clamp(0, 1)


def lightness(texture: Tensor, x: Tensor, y: Tensor, radius: Tensor, pixel: float) -> Tensor:
    """(M, …): of textures (M,) at points (M, …) from each thing's middle; shares of the side, as is a pixel."""
    out = torch.zeros_like(x)
    steps = period(radius)
    for index, name in enumerate(TEXTURE_NAMES):
        rows = (texture == index).nonzero()[:, 0]
        if name == "solid" or not len(rows):
            continue
        tall = (len(rows), *[1] * (x.ndim - 1))
        scale = (radius if name == "gradient" else steps)[rows].reshape(tall)
        if name == "gradient":  # the colour at the top, its tint at the foot
            out[rows] = (0.5 + 0.5 * y[rows] / scale).clamp(0, 1)
        else:
            pattern = {"striped": striped, "checkered": checkered, "dotted": dotted}[name]
            out[rows] = pattern(x[rows] / scale, y[rows] / scale, pixel / scale)
    return out


# --- Styles ---------------------------------------------------------------------------------------------------------

OUTLINE = 0.018  # the width of an outline
_SHADOW, _SHADOW_BLUR = 0.27, 0.026
SHADOW_SHIFT = (0.016, 0.030)  # right and down
_NIGHT = 0.13  # what neon leaves of a background's light
_TUBE, _GLOW = 0.020, 0.030  # width of a neon tube, reach of its light
HATCH, _STROKE = 0.034, 0.4  # period of a sketch's lines, and the share of it that is inked


@dataclass(frozen=True)
class Layer:
    """M things over the images painted so far."""

    below: Tensor  # (M, 3, H, W) in [0, 1]
    colour: Tensor  # (M, 3)
    tint: Tensor  # (M, 3)
    distance: Tensor  # (M, H, W), shares of the side
    light: Tensor  # (M, H, W): where the texture is light
    pixel: float

    @property
    def cover(self) -> Tensor:
        return self.band(self.distance)

    def band(self, distance: Tensor) -> Tensor:
        """The share of a pixel where a distance is negative."""
        return (0.5 - distance / self.pixel).clamp(0, 1)

    def over(self, paint: Tensor, cover: Tensor, below: Tensor | None = None) -> Tensor:
        below = self.below if below is None else below
        return torch.lerp(below, paint, cover[:, None])

    @property
    def tones(self) -> tuple[Tensor, Tensor]:
        """The colour and its tint, (M, 3, 1, 1)."""
        return self.colour[:, :, None, None], self.tint[:, :, None, None]

    @property
    def filled(self) -> Tensor:
        """(M, 3, H, W): colour and texture everywhere."""
        colour, light = self.tones
        return torch.lerp(colour, light, self.light[:, None])

    def part(self, rows: Tensor) -> Layer:
        own = (self.below, self.colour, self.tint, self.distance, self.light)
        return Layer(*(values[rows] for values in own), self.pixel)


def canvas(background: Tensor, style: Tensor) -> Tensor:
    """The background as a style has it: dark for neon, paper for a sketch."""
    out = background.clone()
    for name in ("neon", "sketch"):
        rows = (style == STYLE_NAMES.index(name)).nonzero()[:, 0]
        if len(rows):
            paper = background.new_tensor(_PAPER)[:, None, None]
            out[rows] = background[rows] * _NIGHT if name == "neon" else 0.25 * background[rows] + 0.75 * paper
    return out


def paint(layer: Layer, scenes: Scenes, row: Tensor, slot: int) -> Tensor:
    """(M, 3, H, W): the images with one more thing each, grouped by style."""
    style = scenes.style[row]
    present = style.unique().tolist()
    if len(present) == 1:
        return BRUSHES[STYLE_NAMES[present[0]]](layer, scenes[row], slot)
    out = torch.empty_like(layer.below)
    for index in present:
        rows = (style == index).nonzero()[:, 0]
        out[rows] = BRUSHES[STYLE_NAMES[index]](layer.part(rows), scenes[row[rows]], slot)
    return out


def _flat(layer: Layer, scenes: Scenes, slot: int) -> Tensor:
    return layer.over(layer.filled, layer.cover)


def _outlined(layer: Layer, scenes: Scenes, slot: int) -> Tensor:
    """A line in the colour's own dark shade, within the silhouette."""
    line = 1 - layer.band(layer.distance + OUTLINE)
    shade = shade_of(layer.colour)[:, :, None, None]
    return layer.over(torch.lerp(layer.filled, shade, line[:, None]), layer.cover)


def _soft(layer: Layer, scenes: Scenes, slot: int) -> Tensor:
    """A shadow down to the right, with a soft border."""
    own = (values[:, slot] for values in (scenes.shape, scenes.x, scenes.y, scenes.radius))
    return shadowed(layer, shapes.on_pixels(*own, layer.distance.shape[-1], SHADOW_SHIFT))


def shadow(away: Tensor) -> Tensor:
    """How much darker a shadow makes each pixel, by its distance from the moved outline."""
    return _SHADOW * (0.5 - 0.5 * away / _SHADOW_BLUR).clamp(0, 1) ** 2


def shadowed(layer: Layer, away: Tensor) -> Tensor:
    """The things over their shadows; `away` (M, H, W) is the distance from the moved outline."""
    return layer.over(layer.filled, layer.cover, layer.below * (1 - shadow(away)[:, None]))


def _neon(layer: Layer, scenes: Scenes, slot: int) -> Tensor:
    """A lit tube along the outline, its glow, and a dim fill."""
    colour, _ = layer.tones
    lit = colour + 0.3 * (1 - colour)
    dim = torch.lerp(0.32 * colour, 0.62 * lit, layer.light[:, None])
    below = layer.over(dim, layer.cover)
    off = (layer.distance + _TUBE / 2).abs()  # from the middle of the tube
    glow = 0.55 * torch.exp(-((off / _GLOW) ** 2))
    below = below + (1 - below) * lit * glow[:, None]
    core = colour + (0.72 * (1 - off / (_TUBE / 2)).clamp(0, 1))[:, None] * (1 - colour)
    return layer.over(core, layer.band(off - _TUBE / 2), below)


def _sketch(layer: Layer, scenes: Scenes, slot: int) -> Tensor:
    """Hatching on paper and a pencil line; the light parts of a texture are hatched thinner."""
    size = layer.distance.shape[-1]
    middle = (torch.arange(size, device=layer.distance.device) + 0.5) / size
    along = (middle[None, :] - middle[:, None]) * 0.7071 / HATCH
    off = (along - torch.floor(along + 0.5)).abs() * HATCH  # from the nearest stroke
    width = HATCH * _STROKE * (1 - 0.55 * layer.light) / 2
    stroke = (0.5 + (width - off) / layer.pixel).clamp(0, 1)
    line = 1 - layer.band(layer.distance + 0.012)
    colour, _ = layer.tones
    paper = torch.lerp(layer.below.new_tensor(_PAPER)[:, None, None].expand_as(colour), colour, 0.12)
    inked = torch.lerp(paper, colour, torch.maximum(stroke, line)[:, None])
    return layer.over(inked, layer.cover)


BRUSHES: dict[str, Callable[[Layer, Scenes, int], Tensor]] = {
    "flat": _flat,
    "outlined": _outlined,
    "soft": _soft,
    "neon": _neon,
    "sketch": _sketch,
}
