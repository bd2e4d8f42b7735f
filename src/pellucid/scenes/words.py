"""The words of the world, and which combinations of shape, colour and texture training never sees.

The first word of each tuple is the name that data carries; the others are synonyms that captions use too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule

# --- Words ----------------------------------------------------------------------------------------------------------

_Synonyms = dict[str, tuple[str, ...]]

SHAPES: _Synonyms = {
    "circle": ("circle", "disc"),
    "square": ("square", "box"),
    "triangle": ("triangle",),
    "star": ("star",),
    "heart": ("heart",),
    "pentagon": ("pentagon",),
    "cross": ("cross", "plus"),
    "ring": ("ring", "hoop"),
    "crescent": ("crescent", "moon"),
    "diamond": ("diamond", "rhombus"),
}
COLOURS: _Synonyms = {
    "red": ("red",),
    "orange": ("orange",),
    "yellow": ("yellow",),
    "green": ("green",),
    "teal": ("teal", "turquoise"),
    "blue": ("blue",),
    "purple": ("purple", "violet"),
    "pink": ("pink",),
    "brown": ("brown",),
    "black": ("black",),
}
TEXTURES: _Synonyms = {
    "solid": ("solid", "plain"),
    "striped": ("striped", "stripy"),
    "dotted": ("dotted", "spotted"),
    "checkered": ("checkered", "checked"),
    "gradient": ("gradient", "fading"),
}
# The same said after the shape: "a red star with stripes". Solid has no such form.
WITH_TEXTURE: _Synonyms = {
    "striped": ("with stripes",),
    "dotted": ("with dots", "with spots"),
    "checkered": ("with checks",),
    "gradient": ("with a gradient",),
}
SIZES: _Synonyms = {
    "small": ("small", "little", "tiny"),
    "medium": ("medium", "medium-sized"),
    "large": ("large", "big", "huge"),
}
PLACES: _Synonyms = {
    "top left": ("in the top left", "in the upper left corner"),
    "top": ("at the top",),
    "top right": ("in the top right", "in the upper right corner"),
    "left": ("on the left", "at the left"),
    "centre": ("in the centre", "in the middle"),
    "right": ("on the right", "at the right"),
    "bottom left": ("in the bottom left", "in the lower left corner"),
    "bottom": ("at the bottom",),
    "bottom right": ("in the bottom right", "in the lower right corner"),
}
RELATIONS: _Synonyms = {
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
    "above": ("above", "over"),
    "below": ("below", "under", "beneath"),
    "next to": ("next to", "beside"),
    "inside": ("inside", "within"),
    "around": ("around", "containing"),
    "in front of": ("in front of",),
    "behind": ("behind",),
}
BACKGROUNDS: _Synonyms = {
    "white": ("white",),
    "grey": ("grey", "gray"),
    "cream": ("cream",),
    "pale blue": ("pale blue", "light blue"),
    "pale green": ("pale green", "light green"),
    "pale pink": ("pale pink", "light pink"),
    "pale purple": ("pale purple", "light purple"),
}
KINDS: _Synonyms = {"plain": ("plain",), "gradient": ("gradient",), "checkered": ("checkered", "checked")}
STYLES: _Synonyms = {
    "flat": ("in flat style",),
    "outlined": ("in outlined style", "with outlines"),
    "soft": ("in soft style", "with soft shadows"),
    "neon": ("in neon style", "as a neon sign"),
    "sketch": ("in sketch style", "as a pencil sketch"),
}
# What base training draws from, repeated by weight. Neon and sketch are kept out of it: a LoRA learns them.
TRAIN_STYLES = ("flat", "flat", "flat", "outlined", "soft")
LORA_STYLES = ("neon", "sketch")
PREFIXES = ("a picture of", "an image of", "a drawing of")

SHAPE_NAMES, COLOUR_NAMES, TEXTURE_NAMES = tuple(SHAPES), tuple(COLOURS), tuple(TEXTURES)
SIZE_NAMES, PLACE_NAMES, RELATION_NAMES = tuple(SIZES), tuple(PLACES), tuple(RELATIONS)
BACKGROUND_NAMES, KIND_NAMES, STYLE_NAMES = tuple(BACKGROUNDS), tuple(KINDS), tuple(STYLES)


def vocabulary() -> tuple[str, ...]:
    """Every word that a caption can hold, sorted."""
    tables = (SHAPES, COLOURS, TEXTURES, WITH_TEXTURE, SIZES, PLACES, RELATIONS, BACKGROUNDS, KINDS, STYLES)
    phrases = [phrase for table in tables for forms in table.values() for phrase in forms]
    glue = ["a", "an", "the", "and", "on", "which is", "background", "that is", *PREFIXES]
    return tuple(sorted({word for phrase in (*phrases, *glue) for word in phrase.split()}))


# --- Held-out combinations ------------------------------------------------------------------------------------------

Split = Literal["train", "held_out", "any"]
_SPLITS = ("train", "held_out", "any")


def held_out_combination(shape: Tensor, colour: Tensor, texture: Tensor) -> Tensor:
    """Bool, of indices of names."""
    return (shape + 3 * colour + 3 * texture) % 10 == 7


@lru_cache(maxsize=8)
def combinations(split: Split) -> Tensor:
    """(10, M, 2): for each colour, the (shape, texture) pairs of a split: 45 in training, 5 held out."""
    if split not in _SPLITS:
        raise PellucidError(rule("split", " or ".join(_SPLITS), split), "scenes-split")
    shape, texture = torch.meshgrid(torch.arange(len(SHAPE_NAMES)), torch.arange(len(TEXTURE_NAMES)), indexing="ij")
    pairs = torch.stack([shape, texture], -1).flatten(0, 1)  # (50, 2)
    rows = []
    for colour in range(len(COLOUR_NAMES)):
        out = held_out_combination(pairs[:, 0], torch.tensor(colour), pairs[:, 1])
        rows.append(pairs if split == "any" else pairs[out] if split == "held_out" else pairs[~out])
    return torch.stack(rows)
