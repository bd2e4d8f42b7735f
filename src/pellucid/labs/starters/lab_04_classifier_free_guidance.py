"""Lab 04: classifier-free guidance. Fill in the four functions, then run `pellucid lab 04 --check FILE`.

Predictions are (batch, 4, 16, 16), texts (batch, 64, 128). `network(x, time, text)` predicts v for a batch, with
times of shape (batch,).
"""

from collections.abc import Callable, Sequence

from torch import Tensor


def guided(cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
    """The guided prediction: scale 0 is uncond, 1 is cond."""
    raise NotImplementedError


def both(
    network: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, time: Tensor, prompt: Tensor, other: Tensor
) -> tuple[Tensor, Tensor]:
    """cond and uncond of a batch x, from one call of the network. `other` is the empty or the negative text."""
    raise NotImplementedError


def rescaled(cond: Tensor, uncond: Tensor, scale: float, phi: float) -> Tensor:
    """Guided v, times the share phi of what brings the spread of each image back to that of its cond.

    phi 0 is plain guidance, phi 1 has the spread of cond. The spread is the standard deviation over (4, 16, 16).
    """
    raise NotImplementedError


def latents_called(scales: Sequence[float]) -> int:
    """How many latents go through the network in a run of one image with these scales, one per step."""
    raise NotImplementedError
