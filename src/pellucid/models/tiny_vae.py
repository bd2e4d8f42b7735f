"""The tiny autoencoder (TAESD and its kin): convolutions alone, for previews and small machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.models.vae import Posterior, check

_ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU, "swish": nn.SiLU, "mish": nn.Mish, "gelu": nn.GELU}


@dataclass(frozen=True)
class TinyVAEConfig:
    """What an AutoencoderTiny is made of; every level is as wide as the first."""

    in_channels: int = 3
    out_channels: int = 3
    encoder_block_out_channels: tuple[int, ...] = (64, 64, 64, 64)
    decoder_block_out_channels: tuple[int, ...] = (64, 64, 64, 64)
    act_fn: str = "relu"
    latent_channels: int = 4
    upsampling_scaling_factor: int = 2
    num_encoder_blocks: tuple[int, ...] = (1, 3, 3, 3)
    num_decoder_blocks: tuple[int, ...] = (3, 3, 3, 1)
    latent_magnitude: float = 3
    latent_shift: float = 0.5
    scaling_factor: float = 1.0
    shift_factor: float = 0.0
    # no effect here: kept so that what was read can be written
    block_out_channels: tuple[int, ...] | None = None
    force_upcast: bool = False

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"upsample_fn": ("nearest",)}

    def __post_init__(self) -> None:
        for side in ("encoder", "decoder"):
            widths, counts = getattr(self, f"{side}_block_out_channels"), getattr(self, f"num_{side}_blocks")
            if len(widths) != len(counts) or not counts:
                must = f"as many as num_{side}_blocks ({len(counts)}), and at least one"
                raise PellucidError(
                    rule(f"{side}_block_out_channels of AutoencoderTiny", must, widths), "config-length"
                )
            if len(set(widths)) > 1:
                raise PellucidError(
                    rule(f"{side}_block_out_channels of AutoencoderTiny", "equal at every level", widths),
                    "config-unsupported",
                )
        if self.act_fn not in _ACTIVATIONS:
            must, advice = f"one of {', '.join(_ACTIVATIONS)}", nearest(self.act_fn, _ACTIVATIONS)
            raise PellucidError(rule("act_fn of AutoencoderTiny", must, self.act_fn, advice), "config-unsupported")

    @property
    def factor(self) -> int:
        """Pixels a latent, along one side."""
        return 2 ** (len(self.num_encoder_blocks) - 1)

    def activation(self) -> nn.Module:
        kind = _ACTIVATIONS[self.act_fn]
        return kind() if kind is nn.GELU else kind(inplace=True)


def to_unsigned(images: Tensor) -> Tensor:
    return (images + 1) / 2  # −1 … 1 to the 0 … 1 that it was trained on


def to_signed(images: Tensor) -> Tensor:
    return images * 2 - 1


def squash(latents: Tensor) -> Tensor:
    return torch.tanh(latents / 3) * 3  # it saw no latents beyond ±3


class Block(nn.Module):
    """Three convolutions, added to x, through a ReLU whatever the activation between them."""

    def __init__(self, width: int, config: TinyVAEConfig) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            config.activation(),
            nn.Conv2d(width, width, 3, padding=1),
            config.activation(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).add_(x).relu_()  # (B, C, H, W)


class TinyEncoder(nn.Module):
    """(B, 3, H, W) in −1 … 1 → (B, latent_channels, H/f, W/f)."""

    def __init__(self, c: TinyVAEConfig) -> None:
        super().__init__()
        width = c.encoder_block_out_channels[0]
        layers: list[nn.Module] = []
        for level, count in enumerate(c.num_encoder_blocks):
            if level == 0:
                layers.append(nn.Conv2d(c.in_channels, width, 3, padding=1))
            else:
                layers.append(nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False))
            layers += [Block(width, c) for _ in range(count)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, c.latent_channels, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(to_unsigned(x))


class TinyDecoder(nn.Module):
    """(B, latent_channels, h, w) → (B, 3, h·f, w·f) of about −1 … 1."""

    def __init__(self, c: TinyVAEConfig) -> None:
        super().__init__()
        width, last = c.decoder_block_out_channels[0], len(c.num_decoder_blocks) - 1
        layers: list[nn.Module] = [nn.Conv2d(c.latent_channels, width, 3, padding=1), c.activation()]
        for level, count in enumerate(c.num_decoder_blocks):
            layers += [Block(width, c) for _ in range(count)]
            if level < last:
                layers.append(nn.Upsample(scale_factor=c.upsampling_scaling_factor))
                layers.append(nn.Conv2d(width, width, 3, padding=1, bias=False))
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, c.out_channels, 3, padding=1))

    def forward(self, z: Tensor) -> Tensor:
        return to_signed(self.layers(squash(z)))


class TinyAutoencoder(nn.Module):
    """The two calls of AutoencoderKL at a fraction of its cost; its latents are the diffused ones, unscaled."""

    def __init__(self, config: TinyVAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = TinyEncoder(config)
        self.decoder = TinyDecoder(config)

    def encode(self, images: Tensor) -> Posterior:
        """Images (B, 3, H, W) in −1 … 1 to latents (B, C, H/f, W/f), with no variance."""
        check("images", images, self.config.in_channels, self.config.factor)
        return Posterior(self.encoder(images), None)

    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, C, h, w) to images (B, 3, h·f, w·f)."""
        check("latents", latents, self.config.latent_channels)
        return self.decoder(latents)

    def to_unit(self, latents: Tensor) -> Tensor:
        """Latents squeezed into 0 … 1, so that they can be kept as the bytes of an image."""
        return (latents / (2 * self.config.latent_magnitude) + self.config.latent_shift).clamp(0, 1)

    def from_unit(self, latents: Tensor) -> Tensor:
        return (latents - self.config.latent_shift) * (2 * self.config.latent_magnitude)

    def forward(self, images: Tensor) -> Tensor:
        """There and back, the latents rounded to bytes on the way, as if kept in an image."""
        latents = self.to_unit(self.encode(images).mean)
        return self.decode(self.from_unit((latents * 255).round() / 255))
