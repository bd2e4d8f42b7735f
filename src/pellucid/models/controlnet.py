"""ControlNet: a copy of a UNet's first half that reads an image and adds to every skip of the UNet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.models import ops
from pellucid.models.blocks import BlockInputs
from pellucid.models.hoist import HoistedInputs, hoist
from pellucid.models.inputs import Inputs
from pellucid.models.ops import silu
from pellucid.models.unet import Descent, Residuals, UNet
from pellucid.models.unet_config import UNetConfig


class Hint(NamedTuple):
    """What one ControlNet is given for a run: its image, embedded once, and how strong it is for each image."""

    embedded: Tensor  # (B, C, H, W), at the size of the latents
    scale: Tensor  # (B, 1, 1, 1), or (B, skips + 1, 1, 1): one for each skip and one for the middle


class HintEmbedding(nn.Module):
    """The image brought down to the size of the latents, an eighth of the side."""

    def __init__(self, channels: int, widths: Sequence[int], out_channels: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(channels, widths[0], 3, padding=1)
        steps = [
            conv
            for here, next_width in pairwise(widths)
            for conv in (
                nn.Conv2d(here, here, 3, padding=1),
                nn.Conv2d(here, next_width, 3, padding=1, stride=2),
            )
        ]
        self.blocks = nn.ModuleList(steps)
        self.conv_out = nn.Conv2d(widths[-1], out_channels, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        h = silu(self.conv_in(image))
        for conv in self.blocks:
            h = silu(conv(h))
        return self.conv_out(h)


class ControlNet(Descent):
    """What it adds to a UNet: one tensor a skip, and one in the middle. New weights are zero: it adds nothing yet."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__(config)
        c = config
        if c.mid_block_type is None:
            raise PellucidError("mid_block_type of a ControlNet must be set; got nothing.", "config-unsupported")
        self.controlnet_cond_embedding = HintEmbedding(
            c.conditioning_channels, c.conditioning_embedding_out_channels, c.block_out_channels[0]
        )
        widths = [c.block_out_channels[0]]
        for level, width in enumerate(c.block_out_channels):
            halves = level + 1 < len(c.block_out_channels)
            widths += [width] * (c.each("layers_per_block")[level] + halves)
        self.controlnet_down_blocks = nn.ModuleList(nn.Conv2d(width, width, 1) for width in widths)
        self.controlnet_mid_block = nn.Conv2d(c.block_out_channels[-1], c.block_out_channels[-1], 1)
        for conv in (self.controlnet_cond_embedding.conv_out, *self.controlnet_down_blocks, self.controlnet_mid_block):
            for weights in conv.parameters():
                nn.init.zeros_(weights)
        self.count_parts()

    def hint(self, image: Tensor, scale: Sequence[float], guess: bool = False) -> Hint:
        """Embeds an image (B, 3, 8·H, 8·W) in [0, 1], once a run: it does not change from step to step.

        `guess` is diffusers' guess_mode: a tenth of the scale at the first skip, rising to all of it in the middle.
        """
        if image.ndim != 4 or image.shape[1] != self.config.conditioning_channels:
            wanted = f"(batch, {self.config.conditioning_channels}, height, width)"
            raise PellucidError(rule("control image", wanted, tuple(image.shape)), "control-shape")
        if self.config.controlnet_conditioning_channel_order == "bgr":
            image = image.flip(1)
        weight = self.controlnet_cond_embedding.conv_in.weight
        embedded = self.controlnet_cond_embedding(image.to(weight))
        rise = torch.logspace(-1, 0, len(self.controlnet_down_blocks) + 1) if guess else torch.ones(1)
        return Hint(embedded, (torch.tensor(scale)[:, None] * rise).to(weight)[..., None, None])

    def forward(
        self,
        x: Tensor,  # (B, C, H, W)
        time: Tensor | None,  # (B,)
        context: Tensor | None,
        hint: Hint,
        *,
        labels: Tensor | None = None,
        pooled: Tensor | None = None,
        sizes: Tensor | None = None,
        context_mask: Tensor | None = None,
        text: Tensor | None = None,  # (B, L, S)
        hoisted: Tensor | None = None,  # (B, S)
    ) -> Residuals:
        context = None if context is None else self.project_context(context)
        embedding = None if hoisted is not None else self.embed(time, labels, pooled, sizes)
        mask = None if context_mask is None else context_mask[:, None, None, :].bool()
        inputs = BlockInputs(embedding, context, mask, text=text, hoisted=hoisted)
        x, skips = self.descend(self.conv_in(ops.arrange(x)) + hint.embedded, inputs)
        assert self.mid_block is not None
        x = self.mid_block(x, inputs)
        *scales, last = torch.split(hint.scale.expand(-1, len(skips) + 1, 1, 1), 1, dim=1)  # (B, 1, 1, 1) each
        outs = tuple(
            ops.pointwise(skip, conv) * scale
            for conv, skip, scale in zip(
                cast("Iterable[nn.Conv2d]", self.controlnet_down_blocks), skips, scales, strict=True
            )
        )  # (B, C_k, H_k, W_k) each
        return outs, ops.pointwise(x, self.controlnet_mid_block) * last


class ControlledUNet(nn.Module):
    """A UNet with ControlNets, as one network: it takes a `control` input beside the UNet's own.

    Its hoisted `text` has a tensor for each part, the UNet first; so has a row of `hoisted` its columns.
    """

    CONDITIONS: ClassVar[tuple[str, ...]] = UNet.CONDITIONS

    def __init__(self, unet: UNet, controlnets: Sequence[ControlNet]) -> None:
        super().__init__()
        for controlnet in controlnets:
            _check_fits(unet.config, controlnet.config)
        self.unet, self.controlnets = unet, nn.ModuleList(controlnets)
        self.config = unet.config

    def forward(
        self,
        x: Tensor,
        time: Tensor | None = None,
        context: Tensor | None = None,
        *,
        control: tuple[Hint | None, ...] = (),
        text: tuple[Tensor | None, ...] = (),
        hoisted: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """`control` holds a hint for each ControlNet, None for those that are off at this step."""
        shared = {k: v for k, v in inputs.items() if k in ("labels", "pooled", "sizes", "context_mask")}
        parts = self.parts
        texts = text or (None,) * len(parts)
        widths = [sum(part.row_widths) for part in parts]
        rows = (None,) * len(parts) if hoisted is None else hoisted.split_with_sizes(widths, dim=1)
        total: Residuals | None = None
        for controlnet, hint, *told in zip(self.parts[1:], control, texts[1:], rows[1:], strict=bool(control)):
            if hint is None:
                continue
            own = x[:, : controlnet.config.in_channels]  # an inpainting UNet's mask and image are not for it
            outs, middle = controlnet(own, time, context, hint, text=told[0], hoisted=told[1], **shared)
            if total is None:
                total = outs, middle
            else:
                total = tuple(a + b for a, b in zip(total[0], outs, strict=True)), total[1] + middle
        return self.unet(x, time, context, residuals=total, text=texts[0], hoisted=rows[0], **inputs)

    @property
    def parts(self) -> tuple[Descent, ...]:
        """The UNet and the ControlNets."""
        return (self.unet, *cast("Iterable[ControlNet]", self.controlnets))

    @property
    def row_widths(self) -> tuple[int, ...]:
        return tuple(width for part in self.parts for width in part.row_widths)

    def time_rows(self, time: Tensor, **conditions: Any) -> Tensor:
        shared = {name: value for name, value in conditions.items() if name != "guidance_embedding"}
        first, *others = self.parts
        return torch.cat([first.time_rows(time, **conditions), *(part.time_rows(time, **shared) for part in others)], 1)

    def text_tokens(self, context: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(part.text_tokens(context) for part in self.parts)

    def hoist(self, times: Tensor, inputs: Inputs) -> HoistedInputs | None:
        """What depends on the text alone or on the times (U,) alone, once for a run: see `hoist`."""
        return hoist(self, times, inputs)


def _check_fits(unet: UNetConfig, control: UNetConfig) -> None:
    """A ControlNet of another base has other widths; named here, before a step fails on a shape."""
    for name in ("block_out_channels", "cross_attention_dim", "layers_per_block"):
        mine, other = unet.each(name), control.each(name)
        if mine != other:
            raise PellucidError(
                f"{name} of the ControlNet must equal the UNet's {mine}; got {other}. It was made for another base.",
                "control-base",
            )
