"""Lab 06: a right answer."""

import torch
from torch import Tensor

from pellucid import Scheduler
from pellucid.interop.tokenizer import Tokenizer
from pellucid.models.clip import CLIPTextEncoder
from pellucid.models.unet import UNet
from pellucid.models.vae import AutoencoderKL


def tokens(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Token ids: BOS, the text, EOS, padding."""
    rows = [[tokenizer.bos, *tokenizer.ids(text), tokenizer.eos] for text in texts]
    return torch.tensor([row + [tokenizer.pad] * (tokenizer.length - len(row)) for row in rows])


def states(encoder: CLIPTextEncoder, ids: Tensor) -> Tensor:
    """The last hidden states, after the final norm."""
    return encoder(ids).last


def denoise(network: UNet, scheduler: Scheduler, noise: Tensor, context: Tensor, scale: float) -> Tensor:
    """The loop."""
    x = noise * scheduler.init_noise_sigma
    for time in scheduler.timesteps:
        both = scheduler.scale_model_input(torch.cat([x, x]), time)
        uncond, cond = network(both, torch.full((2,), float(time)), context).chunk(2)
        x = scheduler.step(uncond + scale * (cond - uncond), time, x).prev_sample
    return x


def decode(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """An image in [0, 1] from clean latents."""
    pixels = vae.decode(latents / vae.config.scaling_factor)
    return ((pixels + 1) / 2).clamp(0, 1)
