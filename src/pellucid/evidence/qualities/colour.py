"""Colours: how many values lie at the ends of the range, and how colourful an image is."""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.evidence.qualities.given import each

END = 0.5 / 255  # what rounds to 0 or to 255


def saturation(pixels: Tensor) -> Tensor:
    """The share of an image's values, channel by channel, that are 0 or 255 in eight bits.

    Too much guidance pushes predictions out of range, and the image is clipped there. A true image may have such
    values too, so compare with true ones. Kept still by: the order of pixels and of channels.
    """
    return each(pixels, lambda x: at_end(x).flatten(1).double().mean(1))


def at_end(x: Tensor) -> Tensor:
    """Bool: values that are an end of the range in eight bits."""
    return (x <= END) | (x >= 1 - END)


def colourfulness(pixels: Tensor) -> Tensor:
    """Hasler and Süsstrunk's M (2003), of values from 0 to 1: spread and mean of red − green and of yellow − blue.

    0 for grey; their seven steps from "not" to "extremely" colourful lie at 15, 33, 45, 59, 82 and 109 / 255. Kept
    still by: the order of pixels, and brightness (the same added to all channels). Contrast scales it.
    """
    return each(pixels, colourfulness_of)


def colourfulness_of(x: Tensor) -> Tensor:
    red, green, blue = x.flatten(2).double().unbind(1)  # (B, H·W)
    opponents = torch.stack([red - green, (red + green) / 2 - blue], 1)
    spread = opponents.var(2, correction=0).sum(1).sqrt()
    return spread + 0.3 * opponents.mean(2).square().sum(1).sqrt()
