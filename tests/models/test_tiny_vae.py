"""TinyAutoencoder equals diffusers' AutoencoderTiny."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import diffusers
import pytest
import torch
from oracles import randomise, relative

from pellucid.core.errors import PellucidError
from pellucid.models import config as configs
from pellucid.models.tiny_vae import TinyAutoencoder, TinyVAEConfig
from pellucid.models.vae import to_diffusion

PARITY = 1e-5  # float32, relative to the largest value
SMALL = {"encoder_block_out_channels": (16,) * 4, "decoder_block_out_channels": (16,) * 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "taesd": {},
    "small": SMALL,
    "taef1": {**SMALL, "latent_channels": 16},
    "silu": {**SMALL, "act_fn": "silu"},
    "gelu": {**SMALL, "act_fn": "gelu"},
    "mish": {**SMALL, "act_fn": "mish"},
    "two levels": {
        "encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (24, 24),
        "num_encoder_blocks": (2, 1), "num_decoder_blocks": (1, 0), "latent_magnitude": 2, "latent_shift": 0.4,
    },
}  # fmt: skip


def pair(keys: dict[str, Any]) -> tuple[diffusers.AutoencoderTiny, TinyAutoencoder]:
    peer = randomise(diffusers.AutoencoderTiny(**keys))
    ours = TinyAutoencoder(configs.read(TinyVAEConfig, dict(peer.config)))
    ours.load_state_dict(peer.state_dict(), strict=True)
    return peer, ours


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_names_and_numbers_equal_diffusers(name: str) -> None:
    peer, ours = pair(CONFIGS[name])
    assert list(ours.state_dict()) == list(peer.state_dict())
    c = ours.config
    latents = 4 * torch.randn(2, c.latent_channels, 5, 7)  # beyond ±3 too, where they are squashed
    images = torch.randn(2, c.in_channels, 5 * c.factor, 7 * c.factor)
    assert relative(ours.decode(latents), peer.decode(latents).sample) <= PARITY
    assert relative(ours.encode(images).mean, peer.encode(images).latents) <= PARITY
    assert ours.encode(images).logvar is None


@torch.no_grad()
def test_there_and_back_through_bytes_equals_diffusers() -> None:
    peer, ours = pair(CONFIGS["two levels"])
    images = torch.randn(1, 3, 8, 12)
    latents = 3 * torch.randn(1, 4, 4, 6)
    assert torch.equal(ours.to_unit(latents), peer.scale_latents(latents))
    assert torch.equal(ours.from_unit(latents), peer.unscale_latents(latents))
    assert relative(ours(images), peer(images).sample) <= PARITY


def test_its_latents_are_the_diffused_ones() -> None:
    latents = torch.randn(1, 4, 2, 2)
    assert torch.equal(to_diffusion(TinyVAEConfig(), latents), latents)


def test_every_config_key_of_diffusers_is_read_and_kept() -> None:
    peer = dict(diffusers.AutoencoderTiny(**CONFIGS["two levels"]).config)
    read = configs.read(TinyVAEConfig, peer)
    for field in fields(read):
        want = peer[field.name]
        assert getattr(read, field.name) == (tuple(want) if isinstance(want, list) else want)


def test_gradients_equal_diffusers() -> None:
    peer, ours = pair(CONFIGS["two levels"])
    latents = torch.randn(1, 4, 3, 3)
    peer.decode(latents).sample.square().mean().backward()
    ours.decode(latents).square().mean().backward()
    for name, weight in peer.decoder.named_parameters():
        assert relative(ours.decoder.get_parameter(name).grad, weight.grad) <= PARITY


def test_both_calls_compile_to_one_graph_without_recompiling(count_graphs: Callable[..., int]) -> None:
    _, vae = pair(CONFIGS["small"])
    assert count_graphs(vae.decode, [((z,), {}) for z in torch.randn(3, 1, 4, 4, 4)]) == 1
    assert count_graphs(vae.encode, [((x,), {}) for x in torch.randn(3, 1, 3, 16, 16)]) == 1


@pytest.mark.parametrize(("keys", "code", "words"), [
    ({"num_encoder_blocks": (1, 3)}, "config-length", "as many as num_encoder_blocks (2)"),
    ({"decoder_block_out_channels": (64, 64, 64, 32)}, "config-unsupported", "must be equal at every level"),
    ({"act_fn": "rulu"}, "config-unsupported", "Nearest: relu"),
    ({"upsample_fn": "bilinear"}, "config-unsupported", "must be 'nearest'; got 'bilinear'."),
])  # fmt: skip
def test_configs_that_are_not_supported_are_refused_by_name(keys: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(PellucidError) as error:
        configs.read(TinyVAEConfig, keys)
    assert words in str(error.value)
    assert error.value.code == code


def test_bad_input_is_refused_in_one_line() -> None:
    vae = TinyAutoencoder(TinyVAEConfig(**SMALL))
    with pytest.raises(
        PellucidError, match=r"shape of latents must be \(batch, 4, height, width\); got \(1, 3, 8, 8\)"
    ):
        vae.decode(torch.zeros(1, 3, 8, 8))
    with pytest.raises(PellucidError, match="height and width of images must be multiples of 8"):
        vae.encode(torch.zeros(1, 3, 8, 12))
