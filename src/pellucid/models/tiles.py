"""Large images in little memory: a VAE run in bands of rows, with the untiled result and therefore no seams.

Tiles that are decoded each on its own differ, because GroupNorm sees the statistics of its tile and attention the
pixels of its tile; blending only hides the steps. Here nothing differs but rounding. The middle block, with 1/64 of
the pixels, runs whole. Around it every layer is a `LazyImage` that computes rows when asked, from the few rows more
that its convolutions reach; a norm first sweeps over its image, band by band, for the statistics of the whole.
What is not held in memory is computed again by each sweep: `keep` says how much is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.models import ops
from pellucid.models.blocks import ResnetBlock
from pellucid.models.tiny_vae import Block, TinyAutoencoder, squash, to_signed, to_unsigned
from pellucid.models.vae import AutoencoderKL, DownBlock, Posterior, UpBlock, VAEConfig, check

VAE = AutoencoderKL | TinyAutoencoder
_LEAST = 8  # rows: a thinner band would mostly compute its neighbours'
_TILE = 64  # latents: the band of a 512² image


@dataclass(frozen=True)
class LazyImage:
    """A feature map (1, channels, height, width) that gives rows on demand; `held` where it lies in memory whole."""

    channels: int
    height: int
    width: int
    rows: Callable[[int, int], Tensor]  # (first, end) → (1, channels, end − first, width)
    load: int  # values that one row takes, at the widest layer between memory and here
    held: Tensor | None = None


def _like(band: Tensor, height: int) -> Tensor:
    """An empty image like a band, of another height."""
    size = (*band.shape[:2], height, band.shape[3])
    return torch.empty(size, dtype=band.dtype, device=band.device, memory_format=ops.order(band))


def held(x: Tensor) -> LazyImage:
    _, channels, height, width = x.shape
    return LazyImage(channels, height, width, lambda first, end: x[:, :, first:end], channels * width, x)


def local(
    layer: Callable[[Tensor], Tensor], x: LazyImage, channels: int, *, reach: int = 1, up: int = 1, down: int = 1
) -> LazyImage:
    """A layer that makes `up` rows of every `down`, and looks `reach` rows of the coarser grid beyond its own.

    The layer pads a band as if it were the whole image; the rows that this spoils are cut off.
    """
    width = x.width * up // down

    def rows(first: int, end: int) -> Tensor:
        above = max(first // up * down - reach * down, 0)
        below = min(-(-end // up) * down + reach * down, x.height)
        spoilt = first - above * up // down
        return layer(x.rows(above, below))[:, :, spoilt : spoilt + end - first]

    return LazyImage(channels, x.height * up // down, width, rows, max(x.load * down // up, channels * width))


class Moments:
    """Mean and variance of the groups of an image, from those of its bands."""

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.bands: list[tuple[int, Tensor, Tensor]] = []

    def add(self, band: Tensor) -> None:
        self.bands.append((band.numel() // self.groups, *ops.moments(band, self.groups)))

    def total(self) -> tuple[Tensor, Tensor]:
        """Mean and variance, (groups,) each, by the law of total variance."""
        counts, means, variances = zip(*self.bands, strict=True)
        variance, mean = torch.stack(variances), torch.stack(means)  # (bands, groups)
        share = torch.tensor(counts, dtype=mean.dtype, device=mean.device)[:, None] / sum(counts)
        centre = (share * mean).sum(0)
        return centre, (share * (variance + (mean - centre) ** 2)).sum(0)


def _watched(x: LazyImage, moments: Moments) -> LazyImage:
    """The same image, whose moments are taken by the one sweep that passes over it."""

    def rows(first: int, end: int) -> Tensor:
        moments.add(band := x.rows(first, end))
        return band

    return replace(x, rows=rows)


def _fixed(norm: nn.GroupNorm, moments: Moments) -> Callable[[Tensor], Tensor]:
    """GroupNorm, then SiLU, for the bands of one image."""
    mean, variance = moments.total()
    return lambda band: ops.known_norm_silu(band, norm, mean, variance)


@dataclass(frozen=True)
class _Bands:
    """Sweeps over images, in bands of about so many values per layer."""

    values: int

    def of(self, x: LazyImage) -> Iterator[tuple[int, int]]:
        rows = max(self.values // x.load, _LEAST)
        return ((first, min(first + rows, x.height)) for first in range(0, x.height, rows))

    def measure(self, norm: nn.GroupNorm, x: LazyImage) -> Moments:
        moments = Moments(norm.num_groups)
        for first, end in self.of(x):
            moments.add(x.rows(first, end))
        return moments

    def compute(self, x: LazyImage) -> Tensor:
        """The whole image (1, C, H, W)."""
        out: Tensor | None = None
        for first, end in self.of(x):
            band = x.rows(first, end)
            out = _like(band, x.height) if out is None else out
            out[:, :, first:end] = band
        assert out is not None
        return out

    def overwrite(self, old: Tensor, x: LazyImage) -> LazyImage:
        """Hold an image where the one lies that it is computed from: a band late, since the next one looks back."""
        late: tuple[int, int, Tensor] | None = None
        for first, end in self.of(x):
            band = x.rows(first, end)
            if late is not None:
                old[:, :, late[0] : late[1]] = late[2]
            late = first, end, band
        assert late is not None
        old[:, :, late[0] : late[1]] = late[2]
        return held(old)

    def residual(self, block: ResnetBlock, x: LazyImage, keep: int) -> LazyImage:
        """x + conv(silu(norm(conv(silu(norm(x)))))), holding nothing, the sum, or the sum and its middle."""
        if x.held is None and keep and not block.resized:
            x = held(self.compute(x))  # the sum can then take its place
        if keep == 2:
            return self.residual_held(block, x)
        channels = block.norm2.num_channels
        norm1 = _fixed(block.norm1, self.measure(block.norm1, x))
        middle = local(lambda band: ops.conv(norm1(band), block.conv1), x, channels)
        norm2 = _fixed(block.norm2, self.measure(block.norm2, middle))
        shortcut = block.conv_shortcut if block.resized else None

        def layer(band: Tensor) -> Tensor:
            h = norm2(ops.conv(norm1(band), block.conv1))
            return ops.conv_residual(band, h, block.conv2, shortcut=shortcut)

        out = local(layer, x, channels, reach=2)
        if keep == 0:
            return out
        return held(self.compute(out)) if x.held is None or block.resized else self.overwrite(x.held, out)

    def residual_held(self, block: ResnetBlock, x: LazyImage) -> LazyImage:
        """The same, with each convolution once: the first sweep measures x and holds what x adds to the sum."""
        channels, moments = block.norm2.num_channels, Moments(block.norm1.num_groups)
        if block.resized:
            shortcut = block.conv_shortcut
            watched = _watched(x, moments)
            skip = self.compute(local(lambda band: ops.pointwise(band, shortcut), watched, channels, reach=0))
        else:
            skip, moments = x.rows(0, x.height), self.measure(block.norm1, x)  # held: itself, not a copy
        norm1 = _fixed(block.norm1, moments)
        middle = held(self.compute(local(lambda band: ops.conv(norm1(band), block.conv1), x, channels)))
        norm2 = _fixed(block.norm2, self.measure(block.norm2, middle))
        h = local(lambda band: ops.conv(norm2(band), block.conv2), middle, channels)
        total = replace(h, rows=lambda first, end: h.rows(first, end).add_(skip[:, :, first:end]))
        return self.overwrite(skip, total)


def _decoded(vae: AutoencoderKL, z: Tensor, bands: _Bands, keep: int) -> LazyImage:
    """The decoder on one image's latents (1, C, h, w); each level of a quarter the pixels may hold one image more."""
    decoder, last = vae.decoder, len(vae.decoder.up_blocks) - 1
    z = z if vae.post_quant_conv is None else vae.post_quant_conv(z)
    x = held(decoder.mid_block(ops.conv(ops.arrange(z), decoder.conv_in)))
    for level, block in enumerate(cast("Iterable[UpBlock]", decoder.up_blocks)):
        for resnet in cast("Iterable[ResnetBlock]", block.resnets):
            x = bands.residual(resnet, x, min(keep + last - level, 2))
        for upsample in block.upsamplers:
            x = local(upsample, x, x.channels, up=2)
    norm = _fixed(decoder.conv_norm_out, bands.measure(decoder.conv_norm_out, x))
    return local(lambda band: decoder.conv_out(norm(band)), x, vae.config.out_channels)


def _encoded(vae: AutoencoderKL, image: Tensor, bands: _Bands, keep: int) -> Tensor:
    """The encoder on one image (1, 3, H, W): (1, 2·latent_channels, h, w), before quant_conv."""
    encoder = vae.encoder
    x = local(lambda band: ops.conv(band, encoder.conv_in), held(ops.arrange(image)), vae.config.block_out_channels[0])
    for level, block in enumerate(cast("Iterable[DownBlock]", encoder.down_blocks)):
        for resnet in cast("Iterable[ResnetBlock]", block.resnets):
            x = bands.residual(resnet, x, min(keep + level, 2))
        for downsample in block.downsamplers:
            x = held(bands.compute(local(downsample, x, x.channels, down=2)))
    x = encoder.mid_block(x.rows(0, x.height))
    return encoder.conv_out(ops.norm_silu(x, encoder.conv_norm_out))


def _convolved(layers: nn.Sequential, x: LazyImage, bands: _Bands) -> LazyImage:
    """The layers of a tiny autoencoder, which has no norms; a level is held where it is smallest."""
    for layer in layers:
        if isinstance(layer, Block):
            x = local(layer, x, x.channels, reach=3)
        elif isinstance(layer, nn.Upsample):
            assert isinstance(layer.scale_factor, float)  # one for both sides
            x = local(layer, held(bands.compute(x)), x.channels, reach=0, up=int(layer.scale_factor))
        elif isinstance(layer, nn.Conv2d):
            x = local(layer, x, layer.out_channels, down=layer.stride[0])
            x = held(bands.compute(x)) if layer.stride[0] > 1 else x
        else:
            x = local(layer, x, x.channels, reach=0)
    return x


def _bands_of(vae: VAE, tile: int | None, height: int, width: int) -> _Bands:
    """Bands of as many values as tile × tile latents have at the finest level; by default at most a quarter."""
    tile = max(min(_TILE, max(height, width) // 2), _LEAST) if tile is None else tile
    if not isinstance(tile, int) or tile < _LEAST:
        raise PellucidError(rule("tile", f"a whole number of latents, at least {_LEAST}", tile), "tile")
    config = vae.config
    widths = config.block_out_channels if isinstance(config, VAEConfig) else config.decoder_block_out_channels
    return _Bands((tile * config.factor) ** 2 * widths[0])


def _kept(vae: VAE, keep: int | None) -> int:
    if isinstance(vae, TinyAutoencoder) and keep is not None:
        raise PellucidError(rule("keep", "left out for a tiny autoencoder, which holds nothing", keep), "keep")
    if keep not in (None, 0, 1, 2):
        raise PellucidError(rule("keep", "0, 1 or 2 images", keep), "keep")
    return 1 if keep is None else keep


@torch.no_grad()
def decode_tiled(vae: VAE, latents: Tensor, tile: int | None = None, *, keep: int | None = None) -> Tensor:
    """`vae.decode(latents)`, image by image and band by band; without gradients.

    A band takes the memory of tile × tile latents: 64, or half a smaller image. Besides, the decoder of Stable
    Diffusion holds 2.5 images of the finest level with keep=2, 1.5 with 1 (the default) and 0.75 with 0, where an
    untiled decode holds 5.5; the work is about 1.3 ×, 1.6 × and 3.5 × that of the untiled decode.
    """
    check("latents", latents, vae.config.latent_channels)
    bands, keep = _bands_of(vae, tile, *latents.shape[2:]), _kept(vae, keep)
    images = []
    for z in torch.split(latents, 1):
        if isinstance(vae, TinyAutoencoder):
            x = _convolved(vae.decoder.layers, held(squash(z)), bands)
            x = local(to_signed, x, x.channels, reach=0)
        else:
            x = _decoded(vae, z, bands, keep)
        images.append(bands.compute(x))
    return torch.cat(images)


@torch.no_grad()
def encode_tiled(vae: VAE, images: Tensor, tile: int | None = None, *, keep: int | None = None) -> Posterior:
    """`vae.encode(images)`, image by image and band by band; the options are `decode_tiled`'s, the work 1 to 1.6 ×."""
    check("images", images, vae.config.in_channels, vae.config.factor)
    factor = vae.config.factor
    bands, keep = _bands_of(vae, tile, images.shape[2] // factor, images.shape[3] // factor), _kept(vae, keep)
    if isinstance(vae, TinyAutoencoder):
        lazy = (local(to_unsigned, held(image), image.shape[1], reach=0) for image in torch.split(images, 1))
        return Posterior(torch.cat([bands.compute(_convolved(vae.encoder.layers, x, bands)) for x in lazy]), None)
    return vae.posterior(torch.cat([_encoded(vae, image, bands, keep) for image in torch.split(images, 1)]))


def decode_sliced(vae: VAE, latents: Tensor) -> Tensor:
    """`vae.decode(latents)`, one image at a time: the memory of one, whatever the batch."""
    check("latents", latents, vae.config.latent_channels)
    return torch.cat([vae.decode(z) for z in torch.split(latents, 1)])


def encode_sliced(vae: VAE, images: Tensor) -> Posterior:
    """`vae.encode(images)`, one image at a time."""
    parts = [vae.encode(image) for image in torch.split(images, 1)]
    variances = [part.logvar for part in parts if part.logvar is not None]
    return Posterior(torch.cat([part.mean for part in parts]), torch.cat(variances) if variances else None)
