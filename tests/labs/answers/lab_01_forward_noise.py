"""A right answer to lab 01."""

from torch import Tensor


def alpha_bar(betas: Tensor) -> Tensor:
    return (1 - betas).cumprod(0)


def stepped(x: Tensor, beta: float, z: Tensor) -> Tensor:
    return (1 - beta) ** 0.5 * x + beta**0.5 * z


def noised(x0: Tensor, eps: Tensor, alpha_bar: Tensor, times: Tensor) -> Tensor:
    bar = alpha_bar[times].view(-1, 1, 1, 1)
    return bar.sqrt() * x0 + (1 - bar).sqrt() * eps


def snr(alpha_bar: Tensor) -> Tensor:
    return alpha_bar / (1 - alpha_bar)
