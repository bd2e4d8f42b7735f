"""Lab 04: a right answer."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def guided(cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
    """The guided prediction: scale 0 is uncond, 1 is cond."""
    return uncond + scale * (cond - uncond)


def both(
    network: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, time: Tensor, prompt: Tensor, other: Tensor
) -> tuple[Tensor, Tensor]:
    """cond and uncond of a batch x, from one call of the network."""
    cond, uncond = network(torch.cat([x, x]), torch.cat([time, time]), torch.cat([prompt, other])).chunk(2)
    return cond, uncond


def rescaled(cond: Tensor, uncond: Tensor, scale: float, phi: float) -> Tensor:
    """Guided v, times the share phi of what brings the spread of each image back to that of its cond."""
    plain = guided(cond, uncond, scale)
    ratio = cond.std((1, 2, 3), keepdim=True) / plain.std((1, 2, 3), keepdim=True)
    return plain * (1 + phi * (ratio - 1))


def latents_called(scales: Sequence[float]) -> int:
    """Two a step where there is something to mix; at scale 1 the prompt alone."""
    return sum(1 if scale == 1 else 2 for scale in scales)
