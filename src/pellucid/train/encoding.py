"""The image side of training: a frozen VAE, and what it makes of images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.interop import source
from pellucid.models.vae import AutoencoderKL, Posterior, from_diffusion, to_diffusion
from pellucid.train.draws import Draws

DECODED_AT_ONCE = 16  # images: a decoder's activations are large


def read_vae(where: str) -> AutoencoderKL:
    """A frozen VAE in float32, from its folder, file or hub id."""
    vae = source.load_component(where, dtype=torch.float32)
    if not isinstance(vae, AutoencoderKL):
        raise PellucidError(rule("vae", "an AutoencoderKL", type(vae).__name__), "component-kind")
    return vae.eval().requires_grad_(False)


def posterior_of(vae: nn.Module, images: Tensor, *, bf16: bool) -> Posterior:
    """The Gaussians, in float32, that a VAE makes of images (B, 3, H, W) in [−1, 1]."""
    weight = next(vae.parameters())
    with torch.autocast(weight.device.type, torch.bfloat16, enabled=bf16):
        mean, logvar = vae.encode(images.to(weight))  # type: ignore[operator]
    return Posterior(mean.float(), None if logvar is None else logvar.float())


def drawn_latents(vae: AutoencoderKL, images: Tensor, draws: Draws) -> Tensor:
    """Latents (B, C, h, w) of images as the diffusion sees them; a GPU encodes in bfloat16."""
    posterior = posterior_of(vae, images, bf16=next(vae.parameters()).is_cuda)
    noise = draws.normal("posterior", posterior.mean.shape[1:], images.device)
    return to_diffusion(vae.config, posterior.sample(noise))


@torch.no_grad()
def decoded(vae: AutoencoderKL, x0: Tensor) -> Tensor:
    """Images (B, 3, H, W) in about [−1, 1] of latents as the diffusion sees them, a few at a time."""
    return torch.cat([vae.decode(part) for part in from_diffusion(vae.config, x0).split(DECODED_AT_ONCE)])
