"""The UNet of Stable Diffusion 1, 2 and XL and of DDPM: down, across, up, with every skip and every condition."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.models import ops
from pellucid.models.attention import Attention, ImageTokens, count_text, text_layers
from pellucid.models.blocks import (
    BlockInputs,
    Downsample,
    PixelAttention,
    ResnetBlock,
    SpatialTransformer,
    TransformerBlock,
    Upsample,
)
from pellucid.models.config import per_block
from pellucid.models.embeddings import TimeMLP, sinusoid
from pellucid.models.hoist import HoistedInputs, hoist
from pellucid.models.inputs import Inputs
from pellucid.models.unet_config import DOWN, MID, UP, UNetConfig

Residuals = tuple[tuple[Tensor, ...], Tensor]  # what a ControlNet adds: one tensor a skip, and one in the middle


class BlockFactory:
    """Makes residual blocks and attentions as a config wants them."""

    def __init__(self, config: UNetConfig) -> None:
        self.config = config

    def resnet(self, in_channels: int, out_channels: int, output_scale: float = 1.0) -> ResnetBlock:
        c = self.config
        return ResnetBlock(
            in_channels,
            out_channels,
            time_width=c.time_width,
            groups=c.norm_num_groups,
            eps=c.norm_eps,
            scale_shift=c.resnet_time_scale_shift == "scale_shift",
            dropout=c.dropout,
            output_scale=output_scale,
        )

    def attentions(self, kind: str, channels: int, level: int, layers: Sequence[int]) -> nn.ModuleList:
        """Attention after each residual block of a level (−1: the middle); `layers` counts the blocks of each."""
        c = self.config
        if kind == "self":
            width = c.each("attention_head_dim")[level] or channels
            made = [PixelAttention(channels, width, groups=c.norm_num_groups, eps=c.norm_eps) for _ in layers]
            return nn.ModuleList(made)
        return nn.ModuleList(
            SpatialTransformer(
                channels,
                c.heads[level],
                c.each("cross_attention_dim")[level],
                layers=count,
                groups=c.norm_num_groups,
                linear=c.use_linear_projection,
                cross_only=level >= 0 and c.each("only_cross_attention")[level],
            )
            for count in layers
        )


class DownBlock(nn.Module):
    """Residual blocks, attention after each where wanted, then half the size."""

    def __init__(self, parts: BlockFactory, level: int) -> None:
        super().__init__()
        c = parts.config
        before, here = c.block_out_channels[max(level - 1, 0)], c.block_out_channels[level]
        count, kind = c.each("layers_per_block")[level], DOWN[c.down_block_types[level]]
        self.resnets = nn.ModuleList(parts.resnet(before if j == 0 else here, here) for j in range(count))
        if kind is not None:
            layers = per_block(c.each("transformer_layers_per_block")[level], count)
            self.attentions = parts.attentions(kind, here, level, layers)
        if level + 1 < len(c.down_block_types):
            self.downsamplers = nn.ModuleList([Downsample(here, c.downsample_padding)])
        self.attends, self.halves = kind is not None, level + 1 < len(c.down_block_types)

    def forward(self, x: Tensor, inputs: BlockInputs) -> tuple[Tensor, list[Tensor]]:
        skips = []
        for j, resnet in enumerate(self.resnets):
            x = resnet(x, inputs.time, inputs.hoisted)  # (B, C, H, W)
            x = self.attentions[j](x, inputs) if self.attends else x
            skips.append(x)
        if self.halves:
            x = self.downsamplers[0](x)  # (B, C, H/2, W/2)
            skips.append(x)
        return x, skips


class MidBlock(nn.Module):
    """Residual block, attention, residual block."""

    def __init__(self, parts: BlockFactory) -> None:
        super().__init__()
        c = parts.config
        channels, scale, kind = c.block_out_channels[-1], c.mid_block_scale_factor, MID[c.mid_block_type]
        pixel = kind == "self" and c.class_name == "UNet2DModel" and c.add_attention
        self.resnets = nn.ModuleList(parts.resnet(channels, channels, scale) for _ in range(1 if self.bare(c) else 2))
        if kind == "cross":
            layers = c.each("transformer_layers_per_block")[-1]
            layers = layers if isinstance(layers, tuple) else (layers,)
            self.attentions = parts.attentions("cross", channels, -1, layers[:1])
        elif pixel:
            groups = c.norm_num_groups if c.resnet_time_scale_shift == "default" else None
            width = c.each("attention_head_dim")[-1] or channels
            groups = c.attn_norm_num_groups if c.attn_norm_num_groups is not None else groups
            self.attentions = nn.ModuleList(
                [PixelAttention(channels, width, groups=groups, eps=c.norm_eps, output_scale=scale)]
            )
        self.attends = kind == "cross" or pixel

    @staticmethod
    def bare(config: UNetConfig) -> bool:
        """A conditional UNet with a plain middle has a single residual block there."""
        return config.mid_block_type == "UNetMidBlock2D" and config.class_name != "UNet2DModel"

    def forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        x = self.resnets[0](x, inputs.time, inputs.hoisted)
        x = self.attentions[0](x, inputs) if self.attends else x
        return self.resnets[1](x, inputs.time, inputs.hoisted) if len(self.resnets) > 1 else x


class UpBlock(nn.Module):
    """Residual blocks, each on x beside a skip, attention after each where wanted, then twice the size."""

    def __init__(self, parts: BlockFactory, index: int) -> None:
        super().__init__()
        c = parts.config
        channels = c.block_out_channels[::-1]
        level = len(channels) - 1 - index  # counted from the top, as the down blocks are
        below, here = channels[max(index - 1, 0)], channels[index]
        above = channels[min(index + 1, len(channels) - 1)]
        count, kind = c.each("layers_per_block")[level] + 1, UP[c.up_block_types[index]]
        self.resnets = nn.ModuleList(
            parts.resnet((below if j == 0 else here) + (above if j == count - 1 else here), here) for j in range(count)
        )
        if kind is not None:
            asked = c.reverse_transformer_layers_per_block
            layers = c.each("transformer_layers_per_block")[level] if asked is None else asked[index]
            self.attentions = parts.attentions(kind, here, level, per_block(layers, count))
        if index + 1 < len(channels):
            self.upsamplers = nn.ModuleList([Upsample(here)])
        self.attends, self.doubles = kind is not None, index + 1 < len(channels)

    def forward(self, x: Tensor, skips: list[Tensor], inputs: BlockInputs) -> Tensor:
        for j, resnet in enumerate(self.resnets):
            x = torch.cat([x, skips.pop()], dim=1)  # (B, C + C_skip, H, W)
            x = resnet(x, inputs.time, inputs.hoisted)  # (B, C, H, W)
            x = self.attentions[j](x, inputs) if self.attends else x
        if self.doubles:
            x = self.upsamplers[0](x, skips[-1].shape[-2:])  # an odd size comes back as it was
        return x


class Descent(nn.Module):
    """A UNet's first half: the conditions, the way down and the middle. ControlNets are this and little more."""

    CONDITIONS: ClassVar[tuple[str, ...]] = ("labels", "pooled", "sizes", "guidance_embedding")

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = c = config
        first, width = c.block_out_channels[0], c.time_width
        self.conv_in = nn.Conv2d(c.in_channels, first, c.conv_in_kernel, padding=c.conv_in_kernel // 2)
        self.time_embedding = TimeMLP(first, width, cond_width=c.time_cond_proj_dim)
        if c.encoder_hid_dim is not None:
            self.encoder_hid_proj = nn.Linear(c.encoder_hid_dim, c.each("cross_attention_dim")[0])
        self.class_embedding = _class_embedding(c)
        if c.addition_embed_type == "text_time":
            if c.addition_time_embed_dim is None or c.projection_class_embeddings_input_dim is None:
                raise PellucidError(
                    "addition_time_embed_dim and projection_class_embeddings_input_dim must be set for text_time.",
                    "config-missing",
                )
            self.add_embedding = TimeMLP(c.projection_class_embeddings_input_dim, width)
        parts = BlockFactory(c)
        self.down_blocks = nn.ModuleList(DownBlock(parts, level) for level in range(len(c.down_block_types)))
        self.mid_block = None if c.mid_block_type is None else MidBlock(parts)

    def sinusoid(self, values: Tensor, width: int) -> Tensor:
        made = sinusoid(values, width, flip=self.config.flip_sin_to_cos, shift=self.config.freq_shift)
        return made.to(self.conv_in.weight.dtype)

    def embed(
        self,
        time: Tensor | None,
        labels: Tensor | None = None,
        pooled: Tensor | None = None,
        sizes: Tensor | None = None,
        guidance: Tensor | None = None,
    ) -> Tensor:
        """All that the residual blocks are told, as one vector an image: (B, E)."""
        c = self.config
        if time is None:
            raise PellucidError(rule("time", "given, or hoisted in its place", None), "network-input")
        embedding = self.time_embedding(self.sinusoid(time, c.block_out_channels[0]), guidance)  # (B, E)
        if self.class_embedding is not None:
            if labels is None:
                raise PellucidError("labels must be given to this class-conditional UNet; got nothing.", "labels")
            if c.class_embed_type == "timestep":
                labels = self.sinusoid(labels, c.block_out_channels[0])
            embedding = embedding + self.class_embedding(labels).to(embedding.dtype)
        if c.addition_embed_type == "text_time":
            if pooled is None or sizes is None or c.addition_time_embed_dim is None:
                raise PellucidError("pooled and sizes must be given to this UNet (SDXL); got nothing.", "pooled")
            numbers = self.sinusoid(sizes.flatten(), c.addition_time_embed_dim)  # (B·6, W)
            added = torch.cat([pooled.to(embedding.dtype), numbers.reshape(len(sizes), -1)], dim=-1)  # (B, P + 6·W)
            embedding = embedding + self.add_embedding(added)
        return ops.silu(embedding)

    # --- what is told beforehand ------------------------------------------------------------------------------------

    def count_parts(self) -> None:
        """Gives every residual block its columns in a row of `time_rows`, and every cross-attention its place."""
        for block, (first, end) in zip(
            self.timed_blocks(), pairwise(accumulate(self.row_widths, initial=0)), strict=True
        ):
            block.columns = slice(first, end)
        count_text(self.text_attentions())

    def blocks(self) -> list[Any]:
        """Down, in the middle, and up."""
        middle = () if self.mid_block is None else (self.mid_block,)
        return [*self.down_blocks, *middle, *getattr(self, "up_blocks", ())]

    def timed_blocks(self) -> list[ResnetBlock]:
        return [resnet for block in self.blocks() for resnet in block.resnets]

    def text_attentions(self) -> list[Attention]:
        spaces = [space for block in self.blocks() if block.attends for space in block.attentions]
        inner = [block for space in spaces for block in getattr(space, "transformer_blocks", ())]
        return [attention for block in inner for attention in block.text_attentions()]

    def hoisted_layers(self) -> tuple[list[nn.Linear], list[nn.Linear]]:
        """What reads the text, and what reads the time."""
        return text_layers(self.text_attentions()), [block.time_emb_proj for block in self.timed_blocks()]

    @property
    def row_widths(self) -> tuple[int, ...]:
        return tuple(block.time_emb_proj.out_features for block in self.timed_blocks())

    def time_rows(self, time: Tensor, *, guidance_embedding: Tensor | None = None, **conditions: Any) -> Tensor:
        embedding = self.embed(time, guidance=guidance_embedding, **conditions)
        return ops.beside(embedding, *self.hoisted_layers()[1])

    def text_tokens(self, context: Tensor) -> Tensor | None:
        layers, _ = self.hoisted_layers()
        return ops.beside(self.project_context(context), *layers) if layers else None

    def project_context(self, context: Tensor) -> Tensor:
        return context if self.config.encoder_hid_dim is None else self.encoder_hid_proj(context)

    def hoist(self, times: Tensor, inputs: Inputs) -> HoistedInputs | None:
        """What depends on the text alone or on the times (U,) alone, once for a run: see `hoist`."""
        return hoist(self, times, inputs)

    # --- a call -----------------------------------------------------------------------------------------------------

    def descend(self, x: Tensor, inputs: BlockInputs) -> tuple[Tensor, list[Tensor]]:
        """The way down after `conv_in`: x at the bottom, and every skip from the first."""
        skips = [x]
        for block in self.down_blocks:
            x, more = block(x, inputs)
            skips += more
        return x, skips


def _class_embedding(c: UNetConfig) -> nn.Module | None:
    width, extra = c.time_width, c.projection_class_embeddings_input_dim
    if c.class_embed_type is None:
        return None if c.num_class_embeds is None else nn.Embedding(c.num_class_embeds, width)
    if c.class_embed_type == "identity":
        return nn.Identity()
    if c.class_embed_type == "timestep":
        return TimeMLP(c.block_out_channels[0], width)
    if extra is None:
        raise PellucidError(
            f"projection_class_embeddings_input_dim must be set for {c.class_embed_type}.", "config-missing"
        )
    return TimeMLP(extra, width) if c.class_embed_type == "projection" else nn.Linear(extra, width)


class UNet(Descent):
    """network(x, time, context, …) → what it was trained to predict, of the shape of x (out_channels)."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__(config)
        c = config
        parts = BlockFactory(c)
        self.up_blocks = nn.ModuleList(UpBlock(parts, index) for index in range(len(c.up_block_types)))
        self.conv_norm_out = nn.GroupNorm(c.norm_num_groups, c.block_out_channels[0], c.norm_eps)
        self.conv_out = nn.Conv2d(
            c.block_out_channels[0], c.out_channels, c.conv_out_kernel, padding=c.conv_out_kernel // 2
        )
        for index, (block, _, _) in enumerate(self.cross_attentions()):
            block.index = index
        self.count_parts()
        for name, module in self.named_modules():
            if isinstance(module, PixelAttention | SpatialTransformer):
                module.place = name

    def cross_attentions(self) -> list[tuple[TransformerBlock, str, int]]:
        """The blocks with cross-attention, in the order in which IP-Adapters number them: down, up, middle.

        With each: the name of its place, and how often the size was halved there.
        """
        last = len(self.down_blocks) - 1
        blocks = [(f"down_blocks.{i}", block, i) for i, block in enumerate(self.down_blocks)]
        blocks += [(f"up_blocks.{i}", block, last - i) for i, block in enumerate(self.up_blocks)]
        blocks += [] if self.mid_block is None else [("mid_block", self.mid_block, last)]
        found = []
        for place, block, halvings in blocks:
            for name, module in block.named_modules(prefix=place):
                if isinstance(module, TransformerBlock):
                    found.append((module, name, halvings))
        return found

    def forward(
        self,
        x: Tensor,  # (B, C, H, W)
        time: Tensor | None = None,  # (B,)
        context: Tensor | None = None,  # (B, L, D)
        *,
        labels: Tensor | None = None,  # (B,), or what the class embedding takes
        pooled: Tensor | None = None,  # (B, P)
        sizes: Tensor | None = None,  # (B, 6)
        guidance_embedding: Tensor | None = None,  # (B, G), for networks distilled with guidance
        residuals: Residuals | None = None,
        image: tuple[tuple[ImageTokens, ...], ...] = (),
        context_mask: Tensor | None = None,  # (B, L), True is seen
        perturbed: tuple[str, ...] = (),
        skipped: tuple[str, ...] = (),
        text: Tensor | None = None,  # (B, L, S): in place of context, from `hoist`
        hoisted: Tensor | None = None,  # (B, S): in place of time, labels, pooled, sizes and guidance_embedding
    ) -> Tensor:
        if self.config.center_input_sample:
            x = 2 * x - 1
        context = None if context is None else self.project_context(context)
        embedding = (
            None if hoisted is not None else self.embed(time, labels, pooled, sizes, guidance_embedding)
        )  # (B, E)
        mask = None if context_mask is None else context_mask[:, None, None, :].bool()
        inputs = BlockInputs(embedding, context, mask, image, perturbed, skipped, text, hoisted)

        x, skips = self.descend(ops.conv(ops.arrange(x), self.conv_in), inputs)
        if residuals is not None:
            skips = [skip + extra for skip, extra in zip(skips, residuals[0], strict=True)]
        if self.mid_block is not None:
            x = self.mid_block(x, inputs)
        if residuals is not None:
            x = x + residuals[1]
        for block in self.up_blocks:
            x = block(x, skips, inputs)
        return self.conv_out(ops.norm_silu(x, self.conv_norm_out))  # (B, C_out, H, W)
