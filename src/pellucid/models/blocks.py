"""The parts of UNets and VAEs: residual block, resampling, attention over pixels, transformer over pixels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.models import ops
from pellucid.models.attention import Attention, ImageTokens
from pellucid.models.kernels import QuantizedRows
from pellucid.models.ops import Update


class BlockInputs(NamedTuple):
    """What every block of a UNet is told besides x. The tuples of names are the same for a whole run."""

    time: Tensor | None = None  # (B, E), through SiLU already: every block would do it again
    context: Tensor | None = None  # (B, L, C)
    mask: Tensor | None = None  # (B, 1, 1, L), True is seen
    image: tuple[tuple[ImageTokens, ...], ...] = ()  # one tuple a cross-attention, in the order of the weights
    perturbed: tuple[str, ...] = ()  # where self-attention is the identity
    skipped: tuple[str, ...] = ()  # where attention is left out
    text: Tensor | None = None  # (B, L, S), in place of context: keys and values of all cross-attentions
    hoisted: Tensor | None = None  # (B, S), in place of time: what the blocks' projections make of it


class ResnetBlock(nn.Module):
    """norm, SiLU, conv, twice, with the time between them, added to x."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        time_width: int | None = None,
        groups: int = 32,
        eps: float = 1e-5,
        scale_shift: bool = False,
        dropout: float = 0.0,
        output_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.scale_shift, self.dropout, self.output_scale = scale_shift, dropout, output_scale
        self.norm1 = nn.GroupNorm(groups, in_channels, eps)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        if time_width is not None:
            self.time_emb_proj = nn.Linear(time_width, out_channels * (2 if scale_shift else 1))
        self.norm2 = nn.GroupNorm(groups, out_channels, eps)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        if in_channels != out_channels:
            self.conv_shortcut = nn.Conv2d(in_channels, out_channels, 1)
        self.timed, self.resized = time_width is not None, in_channels != out_channels
        self.columns = slice(0)  # of a table of hoisted rows; the network counts them

    def forward(self, x: Tensor, time: Tensor | None = None, hoisted: Tensor | None = None) -> Tensor:
        shortcut = self.conv_shortcut if self.resized else None
        return ops.conv_residual(
            x, self.middle(x, time, hoisted), self.conv2, shortcut=shortcut, output_scale=self.output_scale
        )

    def middle(self, x: Tensor, time: Tensor | None, hoisted: Tensor | None) -> Tensor:
        """All but the last convolution: (B, C', H, W). Only the operation at work holds an activation, no name here."""
        shift, film = self.condition(time, hoisted)
        h = ops.conv_norm_silu(ops.norm_silu(x, self.norm1), self.conv1, self.norm2, shift=shift, film=film)
        return F.dropout(h, self.dropout, self.training) if self.dropout else h

    def condition(
        self, time: Tensor | None, hoisted: Tensor | None
    ) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
        """What the second norm is told, (B, C') each: a shift before it, or a scale and an offset after it."""
        if not self.timed:
            return None, None
        told = self.time_emb_proj(time) if hoisted is None else hoisted[:, self.columns]
        if not self.scale_shift:
            return told, None
        scale, offset = told.chunk(2, dim=1)
        return None, (scale, offset)


class Downsample(nn.Module):
    """Half the size by a strided convolution; padding 0 pads right and below alone, as DDPM and the VAEs did."""

    def __init__(self, channels: int, padding: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=padding)
        self.lopsided = padding == 0

    def forward(self, x: Tensor) -> Tensor:
        return ops.conv(F.pad(x, (0, 1, 0, 1)) if self.lopsided else x, self.conv)


class Upsample(nn.Module):
    """Twice the size, or the size given, by the nearest pixel; then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, size: torch.Size | None = None) -> Tensor:
        return ops.conv(ops.enlarge(x, size), self.conv)


class PixelAttention(Attention):
    """Self-attention over the pixels of a feature map, added to it."""

    def __init__(
        self, channels: int, head_width: int, *, groups: int | None, eps: float, output_scale: float = 1.0
    ) -> None:
        super().__init__(channels, channels // head_width, head_width, bias=True)
        if groups is not None:
            self.group_norm = nn.GroupNorm(groups, channels, eps)
        self.normed, self.output_scale, self.place = groups is not None, output_scale, ""

    def forward(self, x: Tensor, inputs: BlockInputs | None = None) -> Tensor:  # type: ignore[override]
        if inputs is not None and within(self.place, inputs.skipped):
            return x
        h = ops.tokens(ops.group_norm(x, self.group_norm) if self.normed else x)  # (B, H·W, C)
        h = super().forward(h, identity=inputs is not None and within(self.place, inputs.perturbed))
        return ops.tokens_residual(x, h, self.output_scale)


def within(place: str, names: tuple[str, ...]) -> bool:
    """Whether a module's name is one of the names, or inside one of them; `mid`, `down` and `up` are whole sides."""
    return any(place == name or place.startswith((f"{name}.", f"{name}_block")) for name in names)


class GEGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, inner * 2)

    def forward(self, x: Tensor | QuantizedRows, reader: nn.Linear | None = None) -> Tensor | QuantizedRows:
        return ops.gated_gelu(x, self.proj, reader)  # (B, L, inner)


class GELU(nn.Module):
    def __init__(self, width: int, inner: int, *, bias: bool = True, approximate: str = "none") -> None:
        super().__init__()
        self.proj = nn.Linear(width, inner, bias=bias)
        self.approximate = approximate

    def forward(self, x: Tensor | QuantizedRows, reader: nn.Linear | None = None) -> Tensor | QuantizedRows:
        return ops.linear_gelu(x, self.proj, self.approximate, reader)


class FeedForward(nn.Module):
    """Two layers, the first with its activation; index 1 of diffusers' list is a dropout that holds no weights."""

    def __init__(self, first: GEGLU | GELU, last: nn.Linear) -> None:
        super().__init__()
        self.net = nn.ModuleList([first, nn.Identity(), last])

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        return ops.linear(self.before_last(x), self.last)

    def before_last(self, x: Tensor | QuantizedRows) -> Tensor | QuantizedRows:
        first, last = self.layers
        made: Tensor | QuantizedRows = first(x) if ops.watched(first) else first(x, last)
        return made

    @property
    def last(self) -> nn.Linear:
        return self.layers[1]

    @property
    def layers(self) -> tuple[GEGLU | GELU, nn.Linear]:
        return self.net[0], self.net[2]  # type: ignore[return-value]

    @property
    def readers(self) -> tuple[nn.Linear, ...]:
        """The layers that read x; none where a hook wants to see it as it is."""
        first, _ = self.layers
        return () if ops.watched(self) or ops.watched(first) else (first.proj,)


class TransformerBlock(nn.Module):
    """Self-attention, cross-attention, feed-forward, each on a normed x and added to it.

    The last is left to who comes next, since its norm and the sum are one operation: it comes back beside x.
    """

    def __init__(self, width: int, heads: int, context: int | None, *, cross_only: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn1 = Attention(width, heads, width // heads, context=context if cross_only else None)
        self.norm2 = nn.LayerNorm(width)
        self.attn2 = Attention(width, heads, width // heads, context=context)
        self.norm3 = nn.LayerNorm(width)
        self.ff = FeedForward(GEGLU(width, 4 * width), nn.Linear(4 * width, width))
        self.cross_only = cross_only
        self.index = 0  # which of the network's cross-attentions this one is; the UNet counts them

    def text_attentions(self) -> tuple[Attention, ...]:
        return (self.attn1, self.attn2) if self.cross_only else (self.attn2,)

    def forward(self, x: Tensor, update: Update | None, inputs: BlockInputs, identity: bool) -> tuple[Tensor, Update]:
        image = inputs.image[self.index] if inputs.image else ()
        first, text = (inputs.context, inputs.text) if self.cross_only else (None, None)
        x, y = ops.residual_norm(x, update, self.norm1, self.attn1.readers)  # (B, L, C) each
        update = ops.update_of(self.attn1, y, first, identity=identity, text=text)
        x, y = ops.residual_norm(x, update, self.norm2, self.attn2.readers)
        update = ops.update_of(self.attn2, y, inputs.context, inputs.mask, image, text=inputs.text)
        x, y = ops.residual_norm(x, update, self.norm3, self.ff.readers)
        return x, ops.update_of(self.ff, y)


class SpatialTransformer(nn.Module):
    """Transformer blocks over the pixels of a feature map, added to it."""

    def __init__(
        self,
        channels: int,
        heads: int,
        context: int | None,
        *,
        layers: int = 1,
        groups: int = 32,
        linear: bool = False,
        cross_only: bool = False,
    ) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, 1e-6)
        self.proj_in = nn.Linear(channels, channels) if linear else nn.Conv2d(channels, channels, 1)
        self.transformer_blocks = nn.ModuleList(
            TransformerBlock(channels, heads, context, cross_only=cross_only) for _ in range(layers)
        )
        self.proj_out = nn.Linear(channels, channels) if linear else nn.Conv2d(channels, channels, 1)
        self.place = ""

    def forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        if within(self.place, inputs.skipped):
            return x
        identity = within(self.place, inputs.perturbed)
        tokens, update = ops.project_in(ops.group_norm(x, self.norm), self.proj_in), None  # (B, H·W, C)
        for block in self.transformer_blocks:
            tokens, update = block(tokens, update, inputs, identity)
        return ops.project_out(x, ops.residual(tokens, update), self.proj_out)
