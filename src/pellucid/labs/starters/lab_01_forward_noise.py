"""Lab 01: the forward process. Fill in the four functions, then run `pellucid lab 01 --check FILE`.

`betas` and `alpha_bar` are tensors of shape (times,), with the least noise first. Images are (batch, channels,
height, width); each image of a batch has a time of its own.
"""

import torch
from torch import Tensor


def alpha_bar(betas: Tensor) -> Tensor:
    """ᾱ of every time: the part of the signal's power that is left after all steps up to and with that time."""
    raise NotImplementedError


def stepped(x: Tensor, beta: float, z: Tensor) -> Tensor:
    """One step of the forward process: x at the next time, from x and fresh noise z."""
    raise NotImplementedError


def noised(x0: Tensor, eps: Tensor, alpha_bar: Tensor, times: Tensor) -> Tensor:
    """The jump: x at `times` (batch,), whole numbers that index `alpha_bar`. Mind how (batch,) meets an image."""
    raise NotImplementedError


def snr(alpha_bar: Tensor) -> Tensor:
    """The signal-to-noise ratio of every time: the signal's power over the noise's."""
    raise NotImplementedError


if __name__ == "__main__":
    print(alpha_bar(torch.linspace(1e-4, 0.02, 1000))[-1])
