"""Lab 05: the two ways through the autoencoder, decibels, and where noise is put.

The VAE of scenes-128 has factor 1. The checks use the same one written with larger latents and a shift, as those of
other models, so that a factor that is forgotten shows.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

import pellucid
from pellucid import scenes
from pellucid.labs.answers import Check, Mistake
from pellucid.labs.checks.tensors import off
from pellucid.models.vae import AutoencoderKL, to_diffusion

FACTOR, SHIFT = 0.18215, 0.6
CLOSE = 1e-3


@cache
def vaes() -> tuple[AutoencoderKL, AutoencoderKL]:
    """The model's VAE, and the same with raw latents times 1 / FACTOR plus SHIFT."""
    vae = pellucid.load("scenes-128", device="cpu").components.vae
    assert isinstance(vae, AutoencoderKL)
    other = copy.deepcopy(vae)
    other.config = replace(vae.config, scaling_factor=FACTOR, shift_factor=SHIFT)
    last, first, channels = other.quant_conv, other.post_quant_conv, vae.config.latent_channels
    assert last is not None
    assert first is not None
    assert last.bias is not None
    assert first.bias is not None
    with torch.no_grad():
        last.weight[:channels] /= FACTOR
        last.bias[:channels] = last.bias[:channels] / FACTOR + SHIFT
        first.weight *= FACTOR
        first.bias -= SHIFT * first.weight.sum((1, 2, 3))
    return vae, other


@cache
def images() -> Tensor:
    """Four true scenes."""
    return scenes.render(scenes.sample(torch.arange(4), seed=7), 128)


def check_in(answer: ModuleType) -> None:
    """Both VAEs give the same scaled latents."""
    vae, other = vaes()
    with torch.no_grad():
        wanted = vae.encode(images()).mean
        raw = other.encode(images()).mean
        for one in (vae, other):
            got = answer.to_latents(one, images())
            far = off(got, wanted, "latents")
            if far < CLOSE:
                continue
            mistakes = {
                "the scale and the shift are both left out": raw,
                "the shift is left out": raw * FACTOR,
                "the scale is left out": raw - SHIFT,
                "the scale comes before the shift": raw * FACTOR - SHIFT,
                "the latents are divided by the factor": (raw - SHIFT) / FACTOR,
            }
            found = [name for name, wrong in mistakes.items() if off(got, wrong, "latents") < CLOSE]
            hint = f"this is what you get when {found[0]}" if found else "take the mean of the posterior, no sample"
            raise Mistake(f"latents must be (mean − shift)·scale to {CLOSE:g}; off by {far:.3f}; {hint}.")


def check_out(answer: ModuleType) -> None:
    """The way back, and within the range of pixels."""
    vae, other = vaes()
    with torch.no_grad():
        z = to_diffusion(vae.config, vae.encode(images()[:1]).mean)
        for latents in (z, 3 * z):
            wanted = vae.decode(latents).clamp(-1, 1)
            for one in (vae, other):
                got = answer.to_images(one, latents)
                far = off(got, wanted, "images")
                if far < 5 * CLOSE:
                    continue
                hint = "take out what encoding put in: latents / scale + shift"
                if off(got, one.decode(latents).clamp(-1, 1), "images") < 5 * CLOSE:
                    hint = "this is what you get when the scale and the shift are forgotten before decoding"
                elif float(got.abs().max()) > 1:
                    hint = "the decoder's output goes beyond [−1, 1]: clamp it"
                raise Mistake(f"images must be the decoder's to {5 * CLOSE:g}; off by {far:.3f}; {hint}.")


def check_decibels(answer: ModuleType) -> None:
    """One number per image, for a peak of 2."""
    a = images()
    scale = torch.tensor([0.5, 0.1, 0.02, 0.004])
    got = answer.decibels(a + scale[:, None, None, None], a)
    wanted = 20 * torch.log10(2 / scale)
    far = off(got, wanted, "decibels")
    if far > 0.01:
        hint = "10·log10(4 / mean square), the mean over (3, H, W) of each image"
        if off(got, 20 * torch.log10(1 / scale), "decibels") < 0.01:
            hint = "pixels go from −1 to 1, so the peak is 2 and its square 4"
        raise Mistake(f"decibels must be {[round(v, 1) for v in wanted.tolist()]}; off by {far:.2f}; {hint}.")


def check_noised(answer: ModuleType) -> None:
    """On the latents."""
    vae, other = vaes()
    alpha, sigma = 0.8, 0.6
    noise = torch.randn(4, 4, 16, 16, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        wanted = alpha * vae.encode(images()).mean + sigma * noise
        for one in (vae, other):
            got = answer.noised(one, images(), alpha, sigma, noise)
            if (far := off(got, wanted, "x")) > CLOSE:
                raise Mistake(
                    f"x must be alpha·z + sigma·noise to {CLOSE:g}; off by {far:.3f}; z is scaled, and the noise comes "
                    "after the encoder, not on the pixels."
                )


CHECKS: list[Check] = [
    Check("images to latents", check_in),
    Check("latents to images", check_out),
    Check("decibels", check_decibels),
    Check("noise on latents", check_noised),
]
