"""AutoencoderKL: images to latents and back, with diffusers' names of weights and keys of config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.models import ops
from pellucid.models.blocks import Downsample, PixelAttention, ResnetBlock, Upsample

_EPS = 1e-6  # of every norm: no config says it


@dataclass(frozen=True)
class VAEConfig:
    """What an AutoencoderKL is made of. The scaling keys are for who diffuses the latents: see `to_diffusion`."""

    in_channels: int = 3
    out_channels: int = 3
    down_block_types: tuple[str, ...] = ("DownEncoderBlock2D",)
    up_block_types: tuple[str, ...] = ("UpDecoderBlock2D",)
    block_out_channels: tuple[int, ...] = (64,)
    layers_per_block: int = 1
    latent_channels: int = 4
    norm_num_groups: int = 32
    scaling_factor: float = 0.18215
    shift_factor: float | None = None
    latents_mean: tuple[float, ...] | None = None
    latents_std: tuple[float, ...] | None = None
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True
    # no effect here: kept so that what was read can be written, and for who chooses dtype and size
    sample_size: int | tuple[int, int] = 32
    force_upcast: bool = True

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"act_fn": ("silu", "swish")}

    def __post_init__(self) -> None:
        levels = len(self.block_out_channels)
        for key, known in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
            for name in getattr(self, key):
                if name != known:
                    raise PellucidError(rule(f"{key} of AutoencoderKL", known, name), "config-unsupported")
            if len(getattr(self, key)) != levels:
                must = f"as many as block_out_channels ({levels})"
                raise PellucidError(rule(f"{key} of AutoencoderKL", must, getattr(self, key)), "config-length")
        if not levels or any(c < 1 or c % self.norm_num_groups for c in self.block_out_channels):
            must = f"positive multiples of norm_num_groups ({self.norm_num_groups})"
            raise PellucidError(
                rule("block_out_channels of AutoencoderKL", must, self.block_out_channels), "config-groups"
            )
        for key in ("latents_mean", "latents_std"):
            if (values := getattr(self, key)) is not None and len(values) != self.latent_channels:
                must = f"one value a latent channel ({self.latent_channels})"
                raise PellucidError(rule(f"{key} of AutoencoderKL", must, values), "config-length")

    @property
    def factor(self) -> int:
        """Pixels a latent, along one side."""
        return 2 ** (len(self.block_out_channels) - 1)


class _Scaling(NamedTuple):
    """Diffused latents are (raw − shift) · scale: these two, shaped to broadcast over (B, C, H, W)."""

    shift: Tensor | float
    scale: Tensor | float


def _scaling(config: Any, like: Tensor) -> _Scaling:
    """How a VAE's config (this one's or the tiny one's) wants its latents scaled for diffusion."""
    mean, std = (
        None if values is None else torch.tensor(values, dtype=like.dtype, device=like.device)[:, None, None]
        for values in (getattr(config, "latents_mean", None), getattr(config, "latents_std", None))
    )
    if mean is None or std is None:
        return _Scaling(config.shift_factor or 0.0, config.scaling_factor)
    return _Scaling(mean, config.scaling_factor / std)


def to_diffusion(config: Any, latents: Tensor) -> Tensor:
    shift, scale = _scaling(config, latents)
    return (latents - shift) * scale


def from_diffusion(config: Any, latents: Tensor) -> Tensor:
    shift, scale = _scaling(config, latents)
    return latents / scale + shift


class Posterior(NamedTuple):
    """The Gaussian that an image is encoded to; without a `logvar` it is a point."""

    mean: Tensor  # (B, C, H, W)
    logvar: Tensor | None  # (B, C, H, W)

    def sample(self, noise: Tensor) -> Tensor:
        return self.mean if self.logvar is None else self.mean + torch.exp(0.5 * self.logvar) * noise


def check(name: str, x: Tensor, channels: int, multiple: int = 1) -> None:
    """Refuse what is not (B, channels, H, W) with sides that are multiples."""
    if x.ndim != 4 or x.shape[1] != channels or 0 in x.shape:
        raise PellucidError(rule(f"shape of {name}", f"(batch, {channels}, height, width)", tuple(x.shape)), "shape")
    if x.shape[2] % multiple or x.shape[3] % multiple:
        advice = f"Crop or resize it to multiples of {multiple}."
        raise PellucidError(
            rule(f"height and width of {name}", f"multiples of {multiple}", tuple(x.shape[2:]), advice), "size"
        )


class DownBlock(nn.Module):
    """Residual blocks, then half the size."""

    def __init__(self, channels: tuple[int, int], layers: int, groups: int, *, halves: bool) -> None:
        super().__init__()
        before, here = channels
        self.resnets = nn.ModuleList(
            ResnetBlock(before if j == 0 else here, here, groups=groups, eps=_EPS) for j in range(layers)
        )
        self.downsamplers = nn.ModuleList([Downsample(here, padding=0)] if halves else [])

    def forward(self, x: Tensor) -> Tensor:
        for resnet in self.resnets:
            x = resnet(x)  # (B, C, H, W)
        for downsample in self.downsamplers:
            x = downsample(x)  # (B, C, H/2, W/2)
        return x


class MidBlock(nn.Module):
    """Residual block, attention over all pixels with one head, residual block."""

    def __init__(self, channels: int, groups: int, *, attends: bool) -> None:
        super().__init__()
        attentions = [PixelAttention(channels, channels, groups=groups, eps=_EPS)] if attends else []
        self.attentions = nn.ModuleList(attentions)
        self.resnets = nn.ModuleList(ResnetBlock(channels, channels, groups=groups, eps=_EPS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.resnets[0](x)  # (B, C, H, W)
        for attention in self.attentions:
            x = attention(x)
        return self.resnets[1](x)


def _layout(x: Tensor) -> torch.memory_format:
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _fold(kernel: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The three taps of a kernel on an image whose pixels come twice: two taps, for even and for odd pixels."""
    before, here, after = kernel.unbind(dim)
    return torch.stack((before, here + after), dim), torch.stack((before + here, after), dim)


class FoldedUpsample(Upsample):
    """Upsample without the large image between: a pixel's 3×3 neighbours are 2×2 different ones, 4/9 of the work."""

    def forward(self, x: Tensor, size: torch.Size | None = None) -> Tensor:
        if x.device.type != "cpu" or size is not None:  # a GPU takes as long for four small convolutions
            return super().forward(x, size)
        return self.folded(x)

    def folded(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        around = F.pad(x, (1, 1, 1, 1))  # (B, C, H + 2, W + 2)
        out = torch.empty(
            (batch, channels, height * 2, width * 2), dtype=x.dtype, device=x.device, memory_format=_layout(x)
        )
        for i, rows in enumerate(_fold(self.conv.weight, 2)):
            for j, kernel in enumerate(_fold(rows, 3)):
                seen = around[:, :, i : i + height + 1, j : j + width + 1]
                out[:, :, i::2, j::2] = F.conv2d(seen, kernel, self.conv.bias)  # (B, C, H, W)
        return out


class UpBlock(nn.Module):
    """Residual blocks, then twice the size."""

    def __init__(self, channels: tuple[int, int], layers: int, groups: int, *, doubles: bool) -> None:
        super().__init__()
        before, here = channels
        self.resnets = nn.ModuleList(
            ResnetBlock(before if j == 0 else here, here, groups=groups, eps=_EPS) for j in range(layers)
        )
        self.upsamplers = nn.ModuleList([FoldedUpsample(here)] if doubles else [])

    def forward(self, x: Tensor) -> Tensor:
        for resnet in self.resnets:
            x = resnet(x)  # (B, C, H, W)
        for upsample in self.upsamplers:
            x = upsample(x)  # (B, C, 2H, 2W)
        return x


class Encoder(nn.Module):
    """(B, 3, H, W) → (B, 2·latent_channels, H/f, W/f): mean and log-variance, before quant_conv."""

    def __init__(self, c: VAEConfig) -> None:
        super().__init__()
        widths, groups = c.block_out_channels, c.norm_num_groups
        steps = list(zip((widths[0], *widths[:-1]), widths, strict=True))
        self.conv_in = nn.Conv2d(c.in_channels, widths[0], 3, padding=1)
        self.down_blocks = nn.ModuleList(
            DownBlock(step, c.layers_per_block, groups, halves=level + 1 < len(steps))
            for level, step in enumerate(steps)
        )
        self.mid_block = MidBlock(widths[-1], groups, attends=c.mid_block_add_attention)
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], _EPS)
        self.conv_out = nn.Conv2d(widths[-1], 2 * c.latent_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = ops.conv(ops.arrange(x), self.conv_in)  # (B, C₀, H, W)
        for block in self.down_blocks:
            x = block(x)  # (B, C, H/2, W/2), the last at its size
        x = self.mid_block(x)  # (B, C, H/f, W/f)
        return self.conv_out(ops.norm_silu(x, self.conv_norm_out))  # (B, 2·latent_channels, H/f, W/f)


class Decoder(nn.Module):
    """(B, latent_channels, h, w) → (B, 3, h·f, w·f), after post_quant_conv."""

    def __init__(self, c: VAEConfig) -> None:
        super().__init__()
        widths, groups = c.block_out_channels[::-1], c.norm_num_groups
        steps = list(zip((widths[0], *widths[:-1]), widths, strict=True))
        self.conv_in = nn.Conv2d(c.latent_channels, widths[0], 3, padding=1)
        self.up_blocks = nn.ModuleList(
            UpBlock(step, c.layers_per_block + 1, groups, doubles=level + 1 < len(steps))
            for level, step in enumerate(steps)
        )
        self.mid_block = MidBlock(widths[0], groups, attends=c.mid_block_add_attention)
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], _EPS)
        self.conv_out = nn.Conv2d(widths[-1], c.out_channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = ops.conv(ops.arrange(z), self.conv_in)  # (B, C, h, w)
        x = self.mid_block(x)
        for block in self.up_blocks:
            x = block(x)  # (B, C, 2h, 2w), the last at its size
        return self.conv_out(ops.norm_silu(x, self.conv_norm_out))  # (B, 3, h·f, w·f)


class AutoencoderKL(nn.Module):
    """The VAE of Stable Diffusion. Latents are raw: `to_diffusion` and `from_diffusion` scale them."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.latent_channels
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quant_conv = nn.Conv2d(2 * channels, 2 * channels, 1) if config.use_quant_conv else None
        self.post_quant_conv = nn.Conv2d(channels, channels, 1) if config.use_post_quant_conv else None

    def encode(self, images: Tensor) -> Posterior:
        """Images (B, 3, H, W) in −1 … 1 to the Gaussian of their latents (B, C, H/f, W/f)."""
        check("images", images, self.config.in_channels, self.config.factor)
        return self.posterior(self.encoder(images))

    def posterior(self, moments: Tensor) -> Posterior:
        """The encoder's output as a Gaussian; the clamp is the one that these VAEs were trained with."""
        moments = moments if self.quant_conv is None else self.quant_conv(moments)  # (B, 2C, h, w)
        mean, logvar = moments.chunk(2, dim=1)
        return Posterior(mean, logvar.clamp(-30.0, 20.0))

    def decode(self, latents: Tensor) -> Tensor:
        """Raw latents (B, C, h, w) to images (B, 3, h·f, w·f) of about −1 … 1, not clamped."""
        check("latents", latents, self.config.latent_channels)
        return self.decoder(latents if self.post_quant_conv is None else self.post_quant_conv(latents))

    def forward(self, images: Tensor) -> Tensor:
        return self.decode(self.encode(images).mean)


_OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_OLD_ATTENTION = re.compile(r"(.*\battentions\.\d+)\.(query|key|value|proj_attn)\.(weight|bias)")


def modern_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under today's names: early files of VAEs and pixel UNets named attention otherwise, some as 1×1 convs."""
    renamed = {}
    for name, weight in state.items():
        if old := _OLD_ATTENTION.fullmatch(name):
            place, part, kind = old.groups()
            name, weight = f"{place}.{_OLD_NAMES[part]}.{kind}", weight.flatten(1) if weight.ndim == 4 else weight
        renamed[name] = weight
    return renamed
