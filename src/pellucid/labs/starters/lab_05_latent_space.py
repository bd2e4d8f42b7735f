"""Lab 05: latent space. Fill in the four functions, then run `pellucid lab 05 --check FILE`.

`vae.encode(images)` gives a posterior with `.mean` and `.logvar`, raw; `vae.decode(raw)` gives images. What
diffusion works on is (raw − shift)·scale, with `vae.config.scaling_factor` and `vae.config.shift_factor`, which is None
where there is no shift. Images are (batch, 3, H, W) in [−1, 1].
"""

from torch import Tensor

from pellucid.models.vae import AutoencoderKL


def to_latents(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """The latents that diffusion works on: the mode of the posterior, scaled."""
    raise NotImplementedError


def to_images(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Images from scaled latents, within [−1, 1]."""
    raise NotImplementedError


def decibels(a: Tensor, b: Tensor) -> Tensor:
    """PSNR of each image of a batch, (batch,): 10·log10(peak² / mean square error), where the peak is 2."""
    raise NotImplementedError


def noised(vae: AutoencoderKL, images: Tensor, alpha: float, sigma: float, noise: Tensor) -> Tensor:
    """Images as x at a level, the input of a denoiser; the noise is (batch, 4, H/8, W/8)."""
    raise NotImplementedError
