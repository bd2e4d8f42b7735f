"""Images as they are given: checked once, then measured some at a time, so that memory does not grow with them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule

LEAST = 16  # pixels along a side
SLACK = 1e-3  # what resampling and half precision may leave outside of [0, 1]
AT_ONCE = 2**17  # pixels: what fits into caches, and 25 MB with all that is made of it


def checked(pixels: Tensor) -> Tensor:
    """The same images where they can be measured."""
    if not isinstance(pixels, Tensor):
        raise PellucidError(rule("images", "a tensor", type(pixels).__name__), "qualities")
    shape = tuple(pixels.shape)
    if len(shape) != 4 or shape[0] < 1 or shape[1] != 3 or min(shape[2:]) < LEAST:
        raise PellucidError(rule("images", f"(N, 3, H, W), {LEAST} pixels or more", shape), "qualities")
    if pixels.dtype == torch.uint8:
        return pixels
    if not pixels.is_floating_point():
        raise PellucidError(rule("images", "floats in [0, 1] or uint8", str(pixels.dtype)), "qualities")
    low, high = (float(end) for end in pixels.detach().aminmax())
    if not (low >= -SLACK and high <= 1 + SLACK):  # NaN fails too
        advice = "From [-1, 1] take (x + 1) / 2." if -1.01 <= low < 0 else ""
        raise PellucidError(rule("images", "in [0, 1]", (low, high), advice), "qualities")
    return pixels


def unit(pixels: Tensor) -> Tensor:
    """Float32 in [0, 1]."""
    found = pixels.float()
    return found / 255 if pixels.dtype == torch.uint8 else found.clamp(0, 1)


def each(pixels: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """(N,) float64 on the CPU: a measure of (B, 3, H, W) float32, some images at a time."""
    known = checked(pixels)
    size = max(1, AT_ONCE // (known.shape[2] * known.shape[3]))
    with torch.no_grad():
        return torch.cat([measure(unit(part)).double().cpu() for part in known.split(size)])
