"""The parts that transformers over latent patches share: patches, the modulated block, the checks of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.models import ops
from pellucid.models.attention import Attention
from pellucid.models.blocks import GELU, FeedForward
from pellucid.models.config import check_fields
from pellucid.models.embeddings import sine_positions
from pellucid.models.ops import Update

_MOST_SIZES = 16  # whose positions are kept


@dataclass(frozen=True, kw_only=True)
class PatchConfig:
    """What DiT and PixArt have in common; the field names are diffusers' config keys."""

    num_attention_heads: int = 16
    attention_head_dim: int = 72
    in_channels: int = 4
    out_channels: int | None = None  # None: as many as come in; twice as many: the variance is learned
    num_layers: int = 28
    attention_bias: bool = True
    sample_size: int = 32  # latent pixels per side of the images it was trained on
    patch_size: int = 2
    norm_eps: float = 1e-5

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "activation_fn": ("gelu-approximate",),
        "attention_type": ("default",),
        "double_self_attention": (False,),
        "dropout": (0.0,),
        "norm_elementwise_affine": (False,),
        "norm_num_groups": (32, None),  # of group norms, which only the networks without patches have
        "num_vector_embeds": (None,),
        "only_cross_attention": (False,),
        "upcast_attention": (False,),
        "use_linear_projection": (False,),
    }

    def __post_init__(self) -> None:
        check_fields(self)
        if self.width % 4:
            text = rule("num_attention_heads · attention_head_dim", "a multiple of 4", self.width)
            raise PellucidError(text, "config-value")

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def channels_out(self) -> int:
        return self.out_channels or self.in_channels

    @property
    def position_scale(self) -> float:
        """By how much positions are divided: a network for larger images may count in finer steps."""
        return 1


class Patches(nn.Module):
    """Squares of latent pixels become tokens that know where they lie."""

    def __init__(self, config: PatchConfig) -> None:
        super().__init__()
        self.base = config.sample_size // config.patch_size
        self.scale = config.position_scale
        self.proj = nn.Conv2d(config.in_channels, config.width, config.patch_size, stride=config.patch_size)
        self.places: dict[tuple[Any, ...], Tensor] = {}  # by size; a captured graph reads them, so none goes

    def forward(self, x: Tensor) -> Tensor:
        x = ops.conv(ops.arrange(x), self.proj)  # (B, D, rows, cols)
        return ops.tokens(x) + self.place(x)  # (B, rows · cols, D)

    def place(self, x: Tensor) -> Tensor:
        """Where each patch of x lies, (rows · cols, D); computed once for each of the first sizes."""
        _, width, rows, cols = x.shape
        key = (rows, cols, x.device, x.dtype)
        if key in self.places:
            return self.places[key]
        made = sine_positions(width, rows, cols, base=self.base, scale=self.scale, device=x.device).to(x.dtype)
        if ops.fused(x) and len(self.places) < _MOST_SIZES and not ops.capturing():
            self.places[key] = made
        return made


def unpatch(x: Tensor, rows: int, cols: int, patch: int) -> Tensor:
    """Tokens (B, rows · cols, patch · patch · C) back to an image (B, C, rows · patch, cols · patch)."""
    x = torch.unflatten(torch.unflatten(x, -1, (patch, patch, -1)), 1, (rows, cols))  # (B, rows, cols, patch, patch, C)
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


class Block(nn.Module):
    """Self-attention, attention on a text where there is one, and an MLP, each added to what came in.

    The last is left to who comes next, since its norm and the sum are one operation: it comes back beside x.
    """

    def __init__(self, config: PatchConfig, *, eps: tuple[float, float], context: int | None = None) -> None:
        super().__init__()
        self.eps = eps  # of the norm before the self-attention, and before the MLP
        shape = (config.width, config.num_attention_heads, config.attention_head_dim)
        self.attn1 = Attention(*shape, bias=config.attention_bias)
        self.attn2 = Attention(*shape, context=context, bias=config.attention_bias) if context else None
        inner = 4 * config.width
        self.ff = FeedForward(GELU(config.width, inner, approximate="tanh"), nn.Linear(inner, config.width))

    def forward(
        self,
        x: Tensor,  # (B, L, D)
        update: Update | None,
        modulation: Tensor,  # (B, 6 · D)
        context: Tensor | None = None,  # (B, S, C)
        mask: Tensor | None = None,  # (B, 1, 1, S)
        identity: bool = False,
        text: Tensor | None = None,  # (B, S, K)
    ) -> tuple[Tensor, Update]:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation.chunk(6, dim=1)  # (B, D) each
        x, h = ops.residual_modulate(x, update, shift, scale, self.eps[0], self.attn1.readers)
        update = ops.update_of(self.attn1, h, identity=identity, gate=gate)
        if self.attn2 is not None:
            x = ops.residual(x, update)
            update = ops.update_of(self.attn2, x, context, mask, text=text)
        x, h = ops.residual_modulate(x, update, mlp_shift, mlp_scale, self.eps[1], self.ff.readers)
        return x, ops.update_of(self.ff, h, gate=mlp_gate)


def check_latents(x: Tensor, config: PatchConfig) -> None:
    patch = config.patch_size
    if x.ndim != 4 or x.shape[1] != config.in_channels or x.shape[2] % patch or x.shape[3] % patch:
        must = f"(batch, {config.in_channels}, height, width) with height and width multiples of {patch}"
        raise PellucidError(rule("the shape of x", must, tuple(x.shape)), "network-input")


def check_time(time: Tensor | None, batch: int) -> Tensor:
    if time is None:
        raise PellucidError(rule("time", "given, or hoisted in its place", None), "network-input")
    check_batch("time", time, batch)
    return time


def check_batch(name: str, values: Tensor, batch: int) -> None:
    """One value an image; a lone value is every image's."""
    if values.ndim > 1 or values.numel() not in (1, batch):
        raise PellucidError(rule(f"the shape of {name}", f"({batch},)", tuple(values.shape)), "network-input")


def check_indices(name: str, indices: tuple[int, ...], num_layers: int) -> None:
    if any(not 0 <= i < num_layers for i in indices):
        raise PellucidError(rule(name, f"block indices from 0 to {num_layers - 1}", indices), "network-input")
