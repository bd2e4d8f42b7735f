"""Families of published checkpoints: what is known of one from its configs, to hold against its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from pellucid.core.errors import PellucidError, rule
from pellucid.models.dit import DiT, PixArt
from pellucid.models.unet import UNet
from pellucid.models.unet_config import UNetConfig
from pellucid.models.vae import AutoencoderKL

INPAINT_CHANNELS = 9  # noisy latents 4, mask 1, masked latents 4


@dataclass(frozen=True)
class Family:
    """A family, what its networks predict, and what its VAE multiplies latents by."""

    name: str
    target: str
    scaling: float


SD1 = Family("Stable Diffusion 1", "eps", 0.18215)
SD2_BASE = Family("Stable Diffusion 2 at 512 pixels", "eps", 0.18215)
_SD2_V = Family("Stable Diffusion 2 at 768 pixels", "v", 0.18215)
SDXL = Family("SDXL", "eps", 0.13025)
REFINER = Family("the SDXL refiner", "eps", 0.13025)
DIT = Family("DiT", "eps", 0.18215)


def family_of(network: nn.Module) -> Family | None:
    """The family of a network, where its config is that of a published one."""
    if isinstance(network, DiT):
        return DIT
    if not isinstance(network, UNet):
        return None
    c: UNetConfig = network.config
    widths = set(c.each("cross_attention_dim"))
    if c.addition_embed_type == "text_time":
        return SDXL if widths == {2048} else REFINER if widths == {1280} else None
    if widths == {768}:
        return SD1
    if widths == {1024} and c.in_channels == INPAINT_CHANNELS:
        return SD2_BASE
    by_size: dict[object, Family] = {96: _SD2_V, 64: SD2_BASE}
    return by_size.get(c.sample_size) if widths == {1024} else None


def contradictions(network: nn.Module, vae: Any, scheduler: dict[str, Any], target: str) -> list[str]:
    """Where what the files say differs from what is known of the family, in words. What they say is what is used."""
    family = family_of(network)
    found = []
    if family is not None and target != family.target:
        found.append(
            f"the target is {target}, but {family.name} predicts {family.target}: {target} is used. "
            f"If the images come out as noise, load with target={family.target!r}."
        )
    if family is not None and isinstance(vae, AutoencoderKL) and vae.config.scaling_factor != family.scaling:
        found.append(
            f"the VAE's scaling_factor is {vae.config.scaling_factor}, but {family.name} has {family.scaling}: "
            f"{vae.config.scaling_factor} is used."
        )
    if scheduler.get("rescale_betas_zero_snr") and target == "eps":
        found.append("the schedule ends at zero SNR, where eps says nothing about the image; such networks predict v.")
    return found


def check_fit(network: nn.Module, vae: Any, text_encoders: tuple[Any, ...]) -> None:
    """The parts belong together: the text is as wide as the network reads, the latents have its channels."""
    if isinstance(network, UNet) and text_encoders and network.config.cross_attention_dim is not None:
        width = sum(encoder.config.hidden_size for encoder in text_encoders)
        wide = {network.config.encoder_hid_dim or each for each in network.config.each("cross_attention_dim")}
        if wide != {width}:
            must = f"as wide as the network reads ({', '.join(str(each) for each in sorted(wide, key=str))})"
            raise PellucidError(
                rule("the text encoders", must, width, "They belong to another base."), "components-fit"
            )
    if isinstance(network, UNet | DiT | PixArt) and vae is not None:
        latent, channels = vae.config.latent_channels, network.config.in_channels
        if channels not in (latent, 2 * latent, 2 * latent + 1):  # plain, with an image, with a mask and an image
            must = f"{latent}, the VAE's latent channels, or {2 * latent + 1} for inpainting"
            raise PellucidError(rule("in_channels of the network", must, channels), "components-fit")
