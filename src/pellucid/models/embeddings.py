"""Embeddings: how a network is told the time, a size, a class label, and where a patch lies."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, nearest, rule

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "mish": nn.Mish,
    "gelu": nn.GELU,
    "relu": nn.ReLU,
}


def _activation(name: str) -> nn.Module:
    if name not in ACTIVATIONS:
        raise PellucidError(
            rule("activation", f"one of {', '.join(ACTIVATIONS)}", name, nearest(name, ACTIVATIONS)), "activation"
        )
    return ACTIVATIONS[name]()


def sinusoid(
    time: Tensor, width: int, *, flip: bool = True, shift: float = 0, scale: float = 1, max_period: float = 10000
) -> Tensor:
    """Sines and cosines of `time` (…) → (…, width) in float32; `flip` puts the cosines first (DDPM, appendix B)."""
    half = width // 2
    step = torch.arange(half, dtype=torch.float32, device=time.device)
    frequency = torch.exp(-math.log(max_period) * step / (half - shift))  # (half,): 1 … 1/max_period
    angle = time[..., None].float() * frequency
    if scale != 1:
        angle = scale * angle
    waves = [angle.cos(), angle.sin()] if flip else [angle.sin(), angle.cos()]
    embedding = torch.cat(waves, dim=-1)
    return F.pad(embedding, (0, 1)) if width % 2 else embedding


class TimeMLP(nn.Module):
    """Two layers over a sinusoid; with `cond_width`, a condition such as the guidance scale is added to it first."""

    def __init__(
        self,
        in_width: int,
        width: int,
        *,
        act: str = "silu",
        out_width: int | None = None,
        cond_width: int | None = None,
    ) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_width, width)
        self.cond_proj = nn.Linear(cond_width, in_width, bias=False) if cond_width else None
        self.act = _activation(act)
        self.linear_2 = nn.Linear(width, out_width or width)

    def forward(self, x: Tensor, cond: Tensor | None = None) -> Tensor:  # (…, in_width) → (…, out_width)
        if cond is not None:
            if self.cond_proj is None:
                raise PellucidError(
                    rule("a condition on the time embedding", "left out: this network has no cond_proj", "one"),
                    "network-input",
                )
            x = x + self.cond_proj(cond)
        return self.linear_2(self.act(self.linear_1(x)))


class LabelEmbedding(nn.Module):
    """A row a class, and one more for "no class" at index `num_classes`."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, width)

    def forward(self, labels: Tensor) -> Tensor:  # (B,) → (B, width)
        return self.embedding_table(labels)


def sine_positions(width: int, rows: int, cols: int, *, base: int, scale: float, device: torch.device) -> Tensor:
    """(rows · cols, width) in float32: a patch's column in the first half of the channels, its row in the second.

    Any grid is stretched over the `base` steps that the network was trained with, then divided by `scale`.
    """
    wide = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
    quarter = width // 4
    frequency = 10000.0 ** (-torch.arange(quarter, dtype=wide, device=device) / quarter)
    place = torch.cat([torch.arange(n, dtype=torch.float32, device=device) / (n / base) / scale for n in (rows, cols)])
    angle = torch.outer(place, frequency)  # (rows + cols, width / 4)
    waves = torch.cat([angle.sin(), angle.cos()], dim=1).float()  # (rows + cols, width / 2)
    y, x = waves[:rows, None].expand(-1, cols, -1), waves[None, rows:].expand(rows, -1, -1)
    return torch.cat([x, y], dim=-1).flatten(0, 1)
