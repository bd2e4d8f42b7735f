"""Tile seams: jumps that stand where tiles meet, and nowhere else."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.qualities.given import checked, each

FLOOR = 1 / 255  # a jump that eight bits cannot show
LEAST_PERIOD = 4
ALONG = 1 / 3  # a jump of a border is exceeded along two thirds of it: objects in a row are not so long


def seams(pixels: Tensor, period: int) -> Tensor:
    """How much larger the jumps at every `period`-th pixel are than any within half a period of them; 1 is no seam.

    The jump between two columns is what two thirds of the rows exceed, so that the edges of objects do not count and a
    border along the whole image does. A pattern of 2, 4, … to a period has jumps beside the border that are as
    large: only one of just that period looks like a seam. Rows likewise; the larger of both counts. Jumps that eight
    bits cannot show count for nothing. Tiles that were blended leave no jump, and are not found. Of 2,000 true renders
    of scenes none has 1.5, at periods of 24, 32, 40 and 64.

    Kept still by: brightness, and the order of channels.
    """
    if isinstance(period, bool) or not isinstance(period, int) or period < LEAST_PERIOD:
        raise PellucidError(rule("period", f"a whole number of pixels from {LEAST_PERIOD}", period), "qualities")
    high, wide = checked(pixels).shape[2:]
    if period >= max(high, wide):
        raise PellucidError(rule("period", f"below {max(high, wide)}, so that tiles meet", period), "qualities")
    return each(pixels, partial(seams_of, period=period))


def seams_of(x: Tensor, period: int) -> Tensor:
    sides = [side for side in (x, x.transpose(2, 3)) if side.shape[3] > period]
    return torch.stack([standing_out(side, period) for side in sides]).amax(0)


def standing_out(x: Tensor, period: int) -> Tensor:
    """(B,): of the columns of images."""
    apart = x.diff(dim=3).square().mean(1).sqrt()  # (B, H, W − 1): before columns 1, 2, …
    jumps = apart.kthvalue(max(1, int(ALONG * x.shape[2])), dim=1).values
    at, beside = [], []
    for border in range(period, x.shape[3], period):
        own = border - 1
        first = max(0, own - period // 2)
        near = torch.cat([jumps[:, first:own], jumps[:, own + 1 : own + 1 + period // 2]], 1)
        at.append(jumps[:, own])
        beside.append(near.amax(1))
    return (torch.stack(at, 1).mean(1) + FLOOR) / (torch.stack(beside, 1).mean(1) + FLOOR)
