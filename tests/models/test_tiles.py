"""Tiled is untiled: the same numbers to rounding at every size, in less memory, at a cost that is stated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live_memory import live_peak
from oracles import randomise, relative
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pellucid.core.errors import PellucidError
from pellucid.models.tiles import Moments, decode_sliced, decode_tiled, encode_sliced, encode_tiled, held, local
from pellucid.models.tiny_vae import TinyAutoencoder, TinyVAEConfig
from pellucid.models.vae import AutoencoderKL, VAEConfig

EXACT = 1e-5  # float32: sums of up to 10⁶ values in another order; a wrong row or statistic is 10³ times that


def shaped(*widths: int, **keys: Any) -> VAEConfig:
    levels = len(widths)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * levels, "up_block_types": ("UpDecoderBlock2D",) * levels}
    return VAEConfig(**{"block_out_channels": widths, "norm_num_groups": 4, "layers_per_block": 2, **blocks, **keys})


CONFIGS = {
    "sd": shaped(8, 16, 16, 16),
    "every level wider": shaped(4, 8, 16, layers_per_block=1),
    "no level wider": shaped(8, 8, mid_block_add_attention=False),
    "sd3": shaped(8, 12, 16, 16, latent_channels=16, use_quant_conv=False, use_post_quant_conv=False),
    "one level": shaped(8),
}
FULL = shaped(128, 256, 512, 512, norm_num_groups=32, mid_block_add_attention=False)  # attention runs whole anyway
SIZES = [(24, 40), (33, 17), (9, 8), (5, 70)]  # ragged: several bands, and less than one


def network(name: str) -> AutoencoderKL:
    return randomise(AutoencoderKL(CONFIGS[name]))


def uneven(*shape: int) -> Tensor:
    """Noise whose mean and strength change across the image, as sky and grass do: local statistics mislead."""
    height, width = torch.linspace(0, 1, shape[2])[:, None], torch.linspace(0, 1, shape[3])
    torch.manual_seed(0)
    return torch.randn(shape) * (0.2 + height) + 2 * width


@pytest.mark.parametrize("keep", [0, 1, 2])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_tiled_is_untiled(name: str, size: tuple[int, int], keep: int) -> None:
    vae = network(name)
    c = vae.config
    latents = uneven(1, c.latent_channels, *size)
    assert relative(decode_tiled(vae, latents, 8, keep=keep), vae.decode(latents)) <= EXACT
    images = uneven(1, 3, size[0] * c.factor, size[1] * c.factor)
    tiled, want = encode_tiled(vae, images, 8, keep=keep), vae.encode(images)
    assert tiled.logvar is not None
    assert relative(tiled.mean, want.mean) <= EXACT
    assert relative(tiled.logvar, want.logvar) <= EXACT


@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_a_tiny_autoencoder_tiled_is_untiled(size: tuple[int, int]) -> None:
    vae = randomise(
        TinyAutoencoder(TinyVAEConfig(encoder_block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4))
    )
    latents, images = uneven(2, 4, *size), uneven(2, 3, size[0] * 8, size[1] * 8)
    assert relative(decode_tiled(vae, latents, 8), vae.decode(latents)) <= EXACT
    assert relative(encode_tiled(vae, images, 8).mean, vae.encode(images).mean) <= EXACT


@torch.no_grad()
def test_images_of_a_batch_do_not_mix() -> None:
    vae = network("sd")
    latents = uneven(3, 4, 16, 20) * torch.tensor([1.0, 5.0, 0.1]).view(3, 1, 1, 1)
    assert relative(decode_tiled(vae, latents), vae.decode(latents)) <= EXACT
    assert relative(decode_sliced(vae, latents), vae.decode(latents)) <= EXACT
    images = uneven(2, 3, 128, 128) * torch.tensor([1.0, 5.0]).view(2, 1, 1, 1)
    assert relative(encode_tiled(vae, images).mean, vae.encode(images).mean) <= EXACT
    for mine, whole in zip(encode_sliced(vae, images), vae.encode(images), strict=True):
        assert relative(mine, whole) <= EXACT


@torch.no_grad()
def test_in_double_precision_only_double_rounding_is_left() -> None:
    vae, latents = network("every level wider").double(), uneven(1, 4, 17, 12).double()
    assert relative(decode_tiled(vae, latents, 8), vae.decode(latents)) <= 1e-13


@torch.no_grad()
def test_in_half_precision_tiled_is_no_farther_from_the_truth_than_untiled() -> None:
    vae, latents = network("sd"), uneven(1, 4, 24, 24)
    truth = vae.decode(latents)
    vae, latents = vae.bfloat16(), latents.bfloat16()
    tiled, untiled = decode_tiled(vae, latents, 8).float(), vae.decode(latents).float()
    assert (tiled - truth).abs().mean() <= 1.1 * (untiled - truth).abs().mean()  # 1.1: rounding is luck


@torch.no_grad()
def test_tiles_each_on_its_own_would_not_do() -> None:
    """What is avoided: a tile with its neighbourhood, decoded alone, is off by far more than 1/255 in its middle."""
    vae, latents = network("sd"), uneven(1, 4, 64, 64)
    whole = vae.decode(latents)
    apart = vae.decode(latents[:, :, :32])[:, :, :64]  # 24 latents away from the cut, beyond any convolution
    assert (apart - whole[:, :, :64]).abs().mean() / whole.std() > 10 / 255
    assert (decode_tiled(vae, latents, 8) - whole).abs().mean() / whole.std() < 0.001 / 255


@torch.no_grad()
def test_the_input_and_the_weights_stay() -> None:
    vae = network("one level")  # whose first block could overwrite the image it is given
    latents, images = uneven(1, 4, 20, 9), uneven(1, 3, 20, 9)
    before = [x.clone() for x in (latents, images, *vae.parameters())]
    decode_tiled(vae, latents, 8)
    encode_tiled(vae, images, 8)
    assert all(torch.equal(a, b) for a, b in zip(before, (latents, images, *vae.parameters()), strict=True))


def test_memory_falls_and_work_rises_as_stated() -> None:
    """The docstring's figures, for the decoder of Stable Diffusion at 1024², counted on the meta device."""
    with torch.device("meta"):
        vae, latents = AutoencoderKL(FULL), torch.empty(1, 4, 128, 128)
    image = 128 * 1024 * 1024 * 4  # bytes of the finest level

    def work(call: Any) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops()

    untiled = lambda: vae.decode(latents)  # noqa: E731
    assert live_peak(untiled) / image == pytest.approx(5.5, abs=0.1)
    for keep, images, times in ((2, 2.5, 1.3), (1, 1.5, 1.6), (0, 0.75, 3.5)):
        tiled = lambda keep=keep: decode_tiled(vae, latents, 64, keep=keep)  # noqa: E731
        band = 128 * 512 * 512 * 4
        assert live_peak(tiled) <= images * image + 4 * band
        assert work(tiled) / work(untiled) == pytest.approx(times, rel=0.1)


def test_memory_of_a_tiny_autoencoder_falls() -> None:
    with torch.device("meta"):
        vae, latents = TinyAutoencoder(TinyVAEConfig()), torch.empty(1, 4, 128, 128)
    assert live_peak(lambda: decode_tiled(vae, latents)) < 0.4 * live_peak(lambda: vae.decode(latents))


def test_slices_take_the_memory_of_one_image() -> None:
    with torch.device("meta"):
        vae, latents = AutoencoderKL(CONFIGS["sd"]), torch.empty(4, 4, 32, 32)
    one, images = live_peak(lambda: vae.decode(latents[:1])), 2 * 4 * 3 * 256 * 256 * 4
    assert live_peak(lambda: decode_sliced(vae, latents)) <= one + images


@pytest.mark.parametrize("rows", [(0, 5), (3, 9), (7, 12)])
@torch.no_grad()
def test_a_local_layer_gives_any_rows_of_the_whole(rows: tuple[int, int]) -> None:
    x, first, end = torch.randn(1, 2, 24, 6), *rows
    conv, half = torch.nn.Conv2d(2, 3, 3, padding=1), torch.nn.Conv2d(2, 3, 3, stride=2, padding=1)
    for layer, scale in ((conv, {}), (half, {"down": 2}), (torch.nn.Upsample(scale_factor=2), {"up": 2})):
        image = local(layer, held(x), layer(x).shape[1], **scale)
        assert (image.height, image.width) == layer(x).shape[2:]
        assert relative(image.rows(first, end), layer(x)[:, :, first:end]) <= EXACT


def test_moments_of_bands_are_those_of_the_image() -> None:
    x = torch.randn(1, 6, 11, 5) + 1000  # where a difference of squares would lose everything
    moments = Moments(3)
    for band in (x[:, :, :2], x[:, :, 2:9], x[:, :, 9:]):
        moments.add(band)
    mean, variance = moments.total()
    grouped = x.double().reshape(3, -1)
    assert relative(mean.double(), grouped.mean(1)) <= 1e-6
    assert relative(variance.double(), grouped.var(1, correction=0)) <= 1e-4  # 1000 has a rounding of 6e-5


@pytest.mark.parametrize(("options", "code", "words"), [
    ({"tile": 7}, "tile", "tile must be a whole number of latents, at least 8; got 7."),
    ({"tile": 64.0}, "tile", "tile must be a whole number of latents, at least 8; got 64.0."),
    ({"keep": 3}, "keep", "keep must be 0, 1 or 2 images; got 3."),
])  # fmt: skip
def test_bad_options_are_refused_in_one_line(options: dict[str, Any], code: str, words: str) -> None:
    vae = network("one level")
    for call, x in ((decode_tiled, torch.zeros(1, 4, 8, 8)), (encode_tiled, torch.zeros(1, 3, 8, 8))):
        with pytest.raises(PellucidError) as error:
            call(vae, x, **options)
        assert (str(error.value), error.value.code) == (words, code)


def test_bad_input_is_refused_in_one_line() -> None:
    vae, tiny = network("sd"), TinyAutoencoder(TinyVAEConfig())
    for call in (decode_tiled, decode_sliced):
        with pytest.raises(
            PellucidError, match=r"shape of latents must be \(batch, 4, height, width\); got \(4, 8, 8\)"
        ):
            call(vae, torch.zeros(4, 8, 8))
    with pytest.raises(PellucidError, match="height and width of images must be multiples of 8"):
        encode_tiled(vae, torch.zeros(1, 3, 8, 12))
    with pytest.raises(PellucidError, match="keep must be left out for a tiny autoencoder"):
        decode_tiled(tiny, torch.zeros(1, 4, 8, 8), keep=1)
