"""What the tests of networks share: the measure of agreement, and weights that hide nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def relative(mine: Tensor, theirs: Tensor) -> float:
    """max|a − b| / max|b|."""
    assert mine.shape == theirs.shape
    return float((mine - theirs).abs().max() / theirs.abs().max())


def randomise(network: nn.Module, seed: int = 0) -> nn.Module:
    """Weights of ordinary size everywhere: fresh ones are often zero or one, and would hide a wrong place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in network.named_parameters():
            noise = torch.randn(weights.shape, generator=generator)
            fan = max(weights[0].numel(), 1) if weights.ndim > 1 else 1
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            weights.copy_(centre + noise * (0.2 if weights.ndim == 1 else fan**-0.5))
    return network.eval()
