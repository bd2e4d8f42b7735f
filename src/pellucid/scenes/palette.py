"""The colours of the world, in RGB from 0 to 1. Things are deep, backgrounds pale, so that neither hides the other."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from pellucid.scenes.words import BACKGROUND_NAMES, COLOUR_NAMES

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
TINTS = {
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
CPU = torch.device("cpu")
PAPER = (0.96, 0.95, 0.92)  # of a sketch
SHADE = 0.55  # how far an outline goes to black


@lru_cache(maxsize=16)
def objects(device: torch.device = CPU) -> Tensor:
    """(10, 3): the colour of each name."""
    return torch.tensor([OBJECTS[name] for name in COLOUR_NAMES], device=device)


@lru_cache(maxsize=16)
def backgrounds(device: torch.device = CPU) -> Tensor:
    """(7, 3)"""
    return torch.tensor([BACKGROUNDS[name] for name in BACKGROUND_NAMES], device=device)


@lru_cache(maxsize=16)
def tints(device: torch.device = CPU) -> Tensor:
    """(10, 3): the light tone of each name."""
    return torch.tensor([TINTS[name] for name in COLOUR_NAMES], device=device)


def shade(colour: Tensor) -> Tensor:
    """The dark tone of an outline."""
    return colour * (1 - SHADE)
