"""The colour and the kind of an image's background."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.scenes import palette
from pellucid.scenes.fitting import Fit, Window
from pellucid.scenes.labels import SIDE, Labels, grown
from pellucid.scenes.render import CELLS, CHECK, FADE

HALF, DOUBT = 0.5, 0.12  # a kind is there from half of its contrast on, give or take
NEAR = 0.09  # the farthest that a background's tone may lie from its colour's
CLEAR_OF = 13  # pixels: a window about things that their shadows stay within
FEW = 400  # pixels of background, at least


@dataclass(frozen=True)
class Ground:
    """Of N images; −1 is unreadable."""

    colour: Tensor  # (N,) int64
    kind: Tensor  # (N,) int64


def ground(labels: Labels, window: Window, fitted: Fit) -> Ground:
    """A level, a slope and a checkered pattern are fitted to the pixels that are clearly background."""
    free = ~grown(labels.label != 0, CLEAR_OF)
    scarce = free.sum((1, 2), keepdim=True) < FEW
    free = torch.where(scarce, ~grown(labels.label != 0, 3), free)
    colour = palette.backgrounds(free.device)[labels.background]  # (N, 3)
    tone = (labels.image / colour[:, :, None, None]).mean(1)
    level = explained(tone, free)  # (N, 3): level, slope, check
    slope, check = -level[:, 1] / FADE, -level[:, 2] / CHECK
    kind = torch.where(check > HALF, 2, torch.where(slope > HALF, 1, 0))
    doubt = ((slope - HALF).abs() < DOUBT) | ((check - HALF).abs() < DOUBT) | ((slope > HALF) & (check > HALF))
    weight = free.float()
    mean = (labels.image * weight[:, None]).sum((2, 3)) / weight.sum((1, 2)).clamp(min=1)[:, None]
    # The mean tone of its kind: a gradient is darker on the whole, half of a checkered one is.
    usual = torch.tensor([1.0, 0.965, 1 - CHECK / 2], device=free.device)[kind][:, None]
    off = torch.cdist(mean / usual, palette.backgrounds(free.device))
    near, which = off.min(1)
    few = weight.sum((1, 2)) < FEW / 4
    return Ground(torch.where((near > NEAR) | few, -1, which), torch.where(doubt | few, -1, kind))


def explained(tone: Tensor, free: Tensor) -> Tensor:
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
