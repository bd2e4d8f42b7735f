"""How a thing is painted: flat, outlined, soft, neon or sketch. All keep the silhouette."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.scenes import palette, shapes
from pellucid.scenes.scene import Scenes
from pellucid.scenes.words import STYLE_NAMES

OUTLINE = 0.018  # the width of an outline
SHADOW, SHADOW_X, SHADOW_Y, SHADOW_BLUR = 0.27, 0.016, 0.030, 0.026
NIGHT = 0.13  # what neon leaves of a background's light
TUBE, GLOW = 0.020, 0.030  # width of a neon tube, reach of its light
HATCH, STROKE = 0.034, 0.4  # period of a sketch's lines, and the share of it that is inked


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
            paper = background.new_tensor(palette.PAPER)[:, None, None]
            out[rows] = background[rows] * NIGHT if name == "neon" else 0.25 * background[rows] + 0.75 * paper
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


def flat(layer: Layer, scenes: Scenes, slot: int) -> Tensor:
    return layer.over(layer.filled, layer.cover)


def outlined(layer: Layer, scenes: Scenes, slot: int) -> Tensor:
    """A line in the colour's own dark shade, within the silhouette."""
    line = 1 - layer.band(layer.distance + OUTLINE)
    shade = palette.shade(layer.colour)[:, :, None, None]
    return layer.over(torch.lerp(layer.filled, shade, line[:, None]), layer.cover)


def soft(layer: Layer, scenes: Scenes, slot: int) -> Tensor:
    """A shadow down to the right, with a soft border."""
    size = layer.distance.shape[-1]
    middle = (torch.arange(size, device=layer.distance.device) + 0.5) / size
    radius = scenes.radius[:, slot, None, None]
    wide = layer.distance.shape
    x = ((middle - SHADOW_X)[None, None, :] - scenes.x[:, slot, None, None]).expand(wide) / radius
    y = ((middle - SHADOW_Y)[None, :, None] - scenes.y[:, slot, None, None]).expand(wide) / radius
    return shadowed(layer, shapes.distance(scenes.shape[:, slot], x, y) * radius)


def shadowed(layer: Layer, away: Tensor) -> Tensor:
    """Over a shadow that lies where the distance `away` (M, H, W) from the moved outline is small."""
    dark = SHADOW * (0.5 - 0.5 * away / SHADOW_BLUR).clamp(0, 1) ** 2
    return layer.over(layer.filled, layer.cover, layer.below * (1 - dark[:, None]))


def neon(layer: Layer, scenes: Scenes, slot: int) -> Tensor:
    """A lit tube along the outline, its glow, and a dim fill."""
    colour, _ = layer.tones
    lit = colour + 0.3 * (1 - colour)
    dim = torch.lerp(0.32 * colour, 0.62 * lit, layer.light[:, None])
    below = layer.over(dim, layer.cover)
    off = (layer.distance + TUBE / 2).abs()  # from the middle of the tube
    glow = 0.55 * torch.exp(-((off / GLOW) ** 2))
    below = below + (1 - below) * lit * glow[:, None]
    core = colour + (0.72 * (1 - off / (TUBE / 2)).clamp(0, 1))[:, None] * (1 - colour)
    return layer.over(core, layer.band(off - TUBE / 2), below)


def sketch(layer: Layer, scenes: Scenes, slot: int) -> Tensor:
    """Hatching on paper and a pencil line; the light parts of a texture are hatched thinner."""
    size = layer.distance.shape[-1]
    middle = (torch.arange(size, device=layer.distance.device) + 0.5) / size
    along = (middle[None, :] - middle[:, None]) * 0.7071 / HATCH
    off = (along - torch.floor(along + 0.5)).abs() * HATCH  # from the nearest stroke
    width = HATCH * STROKE * (1 - 0.55 * layer.light) / 2
    stroke = (0.5 + (width - off) / layer.pixel).clamp(0, 1)
    line = 1 - layer.band(layer.distance + 0.012)
    colour, _ = layer.tones
    paper = torch.lerp(layer.below.new_tensor(palette.PAPER)[:, None, None].expand_as(colour), colour, 0.12)
    inked = torch.lerp(paper, colour, torch.maximum(stroke, line)[:, None])
    return layer.over(inked, layer.cover)


BRUSHES: dict[str, Callable[[Layer, Scenes, int], Tensor]] = {
    "flat": flat,
    "outlined": outlined,
    "soft": soft,
    "neon": neon,
    "sketch": sketch,
}
