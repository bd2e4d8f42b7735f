"""Training a ControlNet: a copy of a frozen UNet's first half that reads an image (Zhang et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.save import save_component
from pellucid.models.controlnet import ControlNet, Hint
from pellucid.models.unet import UNet
from pellucid.models.unet_config import UNetConfig
from pellucid.train.adapters import AdapterConfig, AdapterTask, FrozenPart, hint_of
from pellucid.train.draws import Draws, seeded
from pellucid.train.source import Batch

_WIDTHS = (16, 32, 96, 256)  # of the hint's embedding in Stable Diffusion's ControlNets: one more than the halvings
_RGB = 3  # what a control image is read as, here and in diffusers
_NEW = ("controlnet_cond_embedding.", "controlnet_down_blocks.", "controlnet_mid_block.")


@dataclass(frozen=True)
class ControlNetConfig(AdapterConfig):
    """`hint` names the images of the data that are followed, in [0, 1]. `hint_widths` are the channels of their
    embedding, from pixels to latents: by default as many of 16, 32, 96, 256 as the VAE needs."""

    hint: str = "edges"
    hint_widths: tuple[int, ...] = ()

    def build(self, seed: int, device: torch.device) -> ControlNetTask:
        return ControlNetTask(self, seed, device)


def _mirrored(base: UNetConfig, widths: tuple[int, ...]) -> UNetConfig:
    """The config of a ControlNet for a UNet. Its class in diffusers has no key for some that a UNet may have."""
    usual = base.block_out_channels[0] * 4
    for name, value, wanted in (
        ("conv_in_kernel", base.conv_in_kernel, 3),
        ("time_embedding_dim", base.time_width, usual),
        ("center_input_sample", base.center_input_sample, False),
    ):
        if value != wanted:
            must = f"{wanted}: a ControlNet's config cannot say another"
            raise PellucidError(rule(f"{name} of the base", must, value), "control-base")
    return replace(
        base,
        class_name="ControlNetModel",
        up_block_types=(),
        dropout=0.0,
        conditioning_channels=_RGB,
        conditioning_embedding_out_channels=widths,
    )


def widths_for(factor: int, asked: tuple[int, ...]) -> tuple[int, ...]:
    """Channels of the hint's embedding, which halves the image's side until it is that of the latents."""
    count = factor.bit_length()  # one more than the halvings
    widths = asked or _WIDTHS[:count]
    if factor != 2 ** (count - 1) or len(widths) != count or min(widths) < 1:
        must = f"{count} positive numbers, for a VAE that makes 1/{factor} of a side"
        raise PellucidError(rule("hint_widths", must, list(widths)), "control-widths")
    return widths


def from_unet(unet: UNet, widths: tuple[int, ...]) -> ControlNet:
    """A float32 ControlNet that starts as the UNet's first half, and adds nothing yet."""
    made = ControlNet(_mirrored(unet.config, widths)).float()
    theirs = unet.state_dict()
    made.load_state_dict({k: v if k.startswith(_NEW) else theirs[k].float() for k, v in made.state_dict().items()})
    return made


class UNetWithControlNet(nn.Module):
    """A UNet with a ControlNet. Its only submodule is the ControlNet; the UNet is frozen."""

    def __init__(self, unet: UNet, controlnet: ControlNet) -> None:
        super().__init__()
        self.controlnet = controlnet
        self.base = FrozenPart(unet)
        self.dtype = next(unet.parameters()).dtype

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        *,
        context: Tensor,
        hint: Tensor,
        pooled: Tensor | None = None,
        **conditions: Tensor,
    ) -> Tensor:
        """`hint` is an image (B, 3, H, W) in [0, 1]."""
        embedded = self.controlnet.controlnet_cond_embedding(hint)  # (B, C, h, w)
        seen = Hint(embedded, hint.new_ones(len(hint), 1, 1, 1))
        wide = None if pooled is None else pooled.float()
        skips, middle = self.controlnet(x, time, context.float(), seen, pooled=wide, **conditions)
        if self.dtype != torch.float32:
            skips, middle = tuple(skip.to(self.dtype) for skip in skips), middle.to(self.dtype)
            pooled = None if pooled is None else pooled.to(self.dtype)
        inputs = {**conditions, "pooled": pooled, "residuals": (skips, middle)}
        return self.base.held(x.to(self.dtype), time, context.to(self.dtype), **inputs)


class ControlNetTask(AdapterTask):
    """A ControlNet of a text-to-image UNet."""

    def __init__(self, config: ControlNetConfig, seed: int, device: torch.device) -> None:
        super().__init__(config, device)
        base = self.base
        self.config = config
        with seeded(seed):
            made = from_unet(base.unet, widths_for(base.factor, config.hint_widths))
        self.network = UNetWithControlNet(base.unet, made.to(device).requires_grad_(True).train())

    def inputs(self, batch: Batch, masks: Mapping[str, Tensor], draws: Draws | None) -> dict[str, Tensor]:
        hint = hint_of(batch, self.config.hint)
        sides = [side * (self.base.factor if self.base.takes(batch.images) else 1) for side in batch.images.shape[2:]]
        if hint.shape[1] not in (1, _RGB) or list(hint.shape[2:]) != sides:
            must = f"of 1 or 3 channels and {' × '.join(map(str, sides))} pixels, as the images"
            raise PellucidError(rule(f"hint {self.config.hint}", must, tuple(hint.shape[1:])), "data-hints")
        return {
            **self.base.conditions(self.base.windows(batch), masks["text"]),
            "hint": hint.float().expand(-1, _RGB, -1, -1),
        }

    def save(self, network: nn.Module, folder: Path) -> None:
        """A ControlNetModel's folder."""
        assert isinstance(network, UNetWithControlNet)
        save_component(network.controlnet, folder, dtype=self.saved_dtype, overwrite=True)
