"""AutoencoderKL equals diffusers' in names and numbers, compiles in one graph, and refuses bad input in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import diffusers
import pytest
import torch
from live_memory import live_peak
from oracles import randomise, relative

from pellucid.core.errors import PellucidError
from pellucid.models import config as configs
from pellucid.models.blocks import Upsample
from pellucid.models.vae import (
    AutoencoderKL,
    FoldedUpsample,
    Posterior,
    VAEConfig,
    from_diffusion,
    modern_names,
    to_diffusion,
)

PARITY = 1e-5  # float32, relative to the largest value: the project's bar; the same operations in the same order


def shaped(*widths: int, **keys: Any) -> dict[str, Any]:
    levels = len(widths)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * levels, "up_block_types": ("UpDecoderBlock2D",) * levels}
    return {"block_out_channels": widths, "norm_num_groups": 8, **blocks, **keys}


FULL = shaped(128, 256, 512, 512, layers_per_block=2, norm_num_groups=32, sample_size=512)
CONFIGS = {
    "sd": shaped(16, 32, 64, 64, layers_per_block=2),
    "sdxl": shaped(16, 32, 32, 32, layers_per_block=2, scaling_factor=0.13025, sample_size=1024),
    "sd3": shaped(
        16, 32, 64, 64, latent_channels=16, scaling_factor=1.5305, shift_factor=0.0609, force_upcast=False,
        use_quant_conv=False, use_post_quant_conv=False,
    ),
    "means": shaped(16, 32, latents_mean=(0.1, -0.2, 0.3, 0.0), latents_std=(1.0, 2.0, 0.5, 3.0)),
    "no attention": shaped(16, 24, mid_block_add_attention=False, norm_num_groups=4),
    "one level": shaped(16, in_channels=1, out_channels=2, latent_channels=3),
}  # fmt: skip


def pair(keys: dict[str, Any]) -> tuple[diffusers.AutoencoderKL, AutoencoderKL]:
    """The peer and ours with the same weights."""
    peer = randomise(diffusers.AutoencoderKL(**keys))
    ours = AutoencoderKL(configs.read(VAEConfig, dict(peer.config)))
    ours.load_state_dict(peer.state_dict(), strict=True)
    return peer, ours


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_of_weights_are_diffusers(name: str) -> None:
    peer, ours = pair(CONFIGS[name])
    want = {key: value.shape for key, value in peer.state_dict().items()}
    assert {key: value.shape for key, value in ours.state_dict().items()} == want


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", [(1, 8, 8), (2, 5, 11)])
@torch.no_grad()
def test_encode_and_decode_equal_diffusers(name: str, size: tuple[int, int, int]) -> None:
    peer, ours = pair(CONFIGS[name])
    batch, height, width = size
    c = ours.config
    latents = torch.randn(batch, c.latent_channels, height, width)
    images = torch.randn(batch, c.in_channels, height * c.factor, width * c.factor)
    assert relative(ours.decode(latents), peer.decode(latents).sample) <= PARITY
    posterior, want = ours.encode(images), peer.encode(images).latent_dist
    assert posterior.logvar is not None
    assert relative(posterior.mean, want.mean) <= PARITY
    assert relative(posterior.logvar, want.logvar) <= PARITY
    assert relative(ours(images), peer(images).sample) <= PARITY


@pytest.mark.slow
@torch.no_grad()
def test_full_size_equals_diffusers() -> None:
    peer, ours = pair(FULL)
    latents, images = torch.randn(1, 4, 16, 16), torch.randn(1, 3, 128, 128)
    assert relative(ours.decode(latents), peer.decode(latents).sample) <= PARITY
    assert relative(ours.encode(images).mean, peer.encode(images).latent_dist.mean) <= PARITY


def test_every_config_key_of_diffusers_is_read_and_kept() -> None:
    raw = {**CONFIGS["sd3"], "in_channels": 5, "sample_size": 99}
    peer = dict(diffusers.AutoencoderKL(**raw).config)
    read = configs.read(VAEConfig, peer)
    for field in fields(read):
        want = peer[field.name]
        assert getattr(read, field.name) == (tuple(want) if isinstance(want, list) else want)


def test_defaults_are_diffusers() -> None:
    peer = dict(diffusers.AutoencoderKL().config)
    assert configs.read(VAEConfig, peer) == VAEConfig()


def test_full_config_makes_the_weights_of_stable_diffusion() -> None:
    with torch.device("meta"):
        assert sum(w.numel() for w in AutoencoderKL(VAEConfig(**FULL)).parameters()) == 83_653_863  # as published


@torch.no_grad()
def test_posterior_samples_as_diffusers_with_its_clamp() -> None:
    peer, ours = pair(CONFIGS["means"])
    for vae in (peer, ours):
        vae.encoder.conv_out.weight.mul_(300)  # log-variances far beyond both ends of the clamp
    images = torch.randn(1, 3, 16, 16)
    posterior, want = ours.encode(images), peer.encode(images).latent_dist
    assert posterior.logvar is not None
    assert posterior.logvar.min() == -30
    assert posterior.logvar.max() == 20
    sample = want.sample(torch.Generator().manual_seed(3))
    noise = torch.randn(want.mean.shape, generator=torch.Generator().manual_seed(3))
    assert relative(posterior.sample(noise), sample) <= PARITY


def test_a_point_has_no_spread() -> None:
    mean = torch.randn(1, 4, 2, 2)
    assert torch.equal(Posterior(mean, None).sample(torch.randn(1, 4, 2, 2)), mean)


@pytest.mark.parametrize(("name", "formula"), [
    ("sdxl", lambda z: z * 0.13025),
    ("sd3", lambda z: (z - 0.0609) * 1.5305),
    ("means", lambda z: (z - torch.tensor([0.1, -0.2, 0.3, 0.0]).view(4, 1, 1)) * 0.18215
        / torch.tensor([1.0, 2.0, 0.5, 3.0]).view(4, 1, 1)),
])  # fmt: skip
def test_scaling_is_the_one_of_diffusers_pipelines_and_has_an_inverse(name: str, formula: Any) -> None:
    config = VAEConfig(**CONFIGS[name])
    latents = torch.randn(2, config.latent_channels, 3, 3)
    assert relative(to_diffusion(config, latents), formula(latents)) <= 1e-6  # two roundings
    assert relative(from_diffusion(config, to_diffusion(config, latents)), latents) <= 1e-6


OLD = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


@pytest.mark.parametrize("as_convs", [False, True])
def test_old_names_of_attention_load(as_convs: bool) -> None:
    _, vae = pair(CONFIGS["sd"])
    old = {}
    for name, weight in vae.state_dict().items():
        for new, before in OLD.items():
            if ".attentions." in name and f".{new}." in name:
                name = name.replace(f".{new}.", f".{before}.")
                weight = weight[:, :, None, None] if as_convs and weight.ndim == 2 else weight
        old[name] = weight
    assert set(old) != set(vae.state_dict())
    renamed = modern_names(old)
    assert set(renamed) == set(vae.state_dict())
    assert all(torch.equal(renamed[name], weight) for name, weight in vae.state_dict().items())
    assert modern_names(renamed) == renamed


def test_old_names_elsewhere_stay() -> None:
    state = {"text_model.key.weight": torch.ones(2, 2), "blocks.0.attentions.0.proj_in.weight": torch.ones(2, 2, 1, 1)}
    assert modern_names(state) == state


@pytest.mark.parametrize("shape", [(1, 1), (4, 3), (5, 8)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_folded_upsample_is_upsample_and_so_are_its_gradients(shape: Any, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    folded = FoldedUpsample(6)
    plain = Upsample(6)
    plain.load_state_dict(folded.state_dict())
    x = torch.randn(2, 6, *shape).to(memory_format=memory_format).requires_grad_()
    results = []
    for layer in (folded, plain):
        x.grad = None
        out = layer(x)
        out.square().sum().backward()
        results.append((out.detach(), x.grad, layer.conv.weight.grad, layer.conv.bias.grad))
    for ours, want in zip(*results, strict=True):
        assert relative(ours, want) <= PARITY
    if shape != (1, 1):  # where both layouts are one
        assert results[0][0].stride() == results[1][0].stride()


def test_gradients_equal_diffusers() -> None:
    peer, ours = pair(CONFIGS["means"])
    images = torch.randn(1, 3, 16, 16)
    peer(images).sample.square().mean().backward()
    ours(images).square().mean().backward()
    grads = dict(peer.named_parameters())
    for name, weight in ours.named_parameters():
        if grads[name].grad is not None and grads[name].grad.abs().max() > 1e-6:  # a bias before a norm has none
            assert relative(weight.grad, grads[name].grad) <= 1e-4, name  # sums over all pixels in another order


@torch.no_grad()
def test_peak_memory_is_no_higher_than_diffusers() -> None:
    with torch.device("meta"):
        peer, ours = diffusers.AutoencoderKL(**FULL), AutoencoderKL(VAEConfig(**FULL))
        latents, images = torch.empty(1, 4, 32, 32), torch.empty(1, 3, 256, 256)
    assert live_peak(lambda: ours.decode(latents)) <= live_peak(lambda: peer.decode(latents))
    assert live_peak(lambda: ours.encode(images)) <= live_peak(lambda: peer.encode(images))


@pytest.mark.parametrize("name", ["sd", "sd3", "no attention"])
def test_both_calls_compile_to_one_graph_without_recompiling(name: str, count_graphs: Callable[..., int]) -> None:
    _, vae = pair(CONFIGS[name])
    c = vae.config
    latents, images = torch.randn(3, 1, c.latent_channels, 4, 4), torch.randn(3, 1, 3, 4 * c.factor, 4 * c.factor)
    assert count_graphs(vae.decode, [((z,), {}) for z in latents]) == 1
    assert count_graphs(vae.encode, [((x,), {}) for x in images]) == 1


@pytest.mark.parametrize(("call", "shape", "code", "words"), [
    ("decode", (4, 8, 8), "shape", "shape of latents must be (batch, 4, height, width); got (4, 8, 8)."),
    ("decode", (1, 3, 8, 8), "shape", "shape of latents must be (batch, 4, height, width); got (1, 3, 8, 8)."),
    ("decode", (1, 4, 0, 8), "shape", "shape of latents must be (batch, 4, height, width); got (1, 4, 0, 8)."),
    ("encode", (1, 1, 16, 16), "shape", "shape of images must be (batch, 3, height, width); got (1, 1, 16, 16)."),
    ("encode", (1, 3, 16, 20), "size", "height and width of images must be multiples of 8; got (16, 20). "
        "Crop or resize it to multiples of 8."),
])  # fmt: skip
def test_bad_input_is_refused_in_one_line(call: str, shape: tuple[int, ...], code: str, words: str) -> None:
    vae = AutoencoderKL(VAEConfig(**CONFIGS["sd"]))
    with pytest.raises(PellucidError) as error:
        getattr(vae, call)(torch.zeros(shape))
    assert (str(error.value), error.value.code) == (words, code)


@pytest.mark.parametrize(("keys", "code", "words"), [
    ({"down_block_types": ("AttnDownEncoderBlock2D",)}, "config-unsupported", "DownEncoderBlock2D; got 'AttnDown"),
    ({"up_block_types": ("AttnUpDecoderBlock2D",)}, "config-unsupported", "UpDecoderBlock2D; got 'AttnUp"),
    ({"up_block_types": ()}, "config-length", "as many as block_out_channels (1)"),
    ({"block_out_channels": (48,)}, "config-groups", "multiples of norm_num_groups (32); got (48,)"),
    ({"latents_mean": (0.0,)}, "config-length", "one value a latent channel (4)"),
    ({"act_fn": "gelu"}, "config-unsupported", "act_fn of VAEConfig must be 'silu' or 'swish'; got 'gelu'."),
    ({"norm_type": "spatial"}, "config-key", "norm_type"),
])  # fmt: skip
def test_configs_that_are_not_supported_are_refused_by_name(keys: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(PellucidError) as error:
        configs.read(VAEConfig, keys)
    assert words in str(error.value)
    assert error.value.code == code
