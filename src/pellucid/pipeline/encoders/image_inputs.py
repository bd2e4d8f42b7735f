"""Images that go into a run: to start from, to paint in, to follow (ControlNet), to resemble (IP-Adapter)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.components import Components
from pellucid.models import tiles
from pellucid.models.controlnet import ControlledUNet, ControlNet, Hint
from pellucid.models.ip_adapter import IPAdapter
from pellucid.models.unet import UNet
from pellucid.models.vae import to_diffusion
from pellucid.pipeline import images
from pellucid.pipeline.model import RunSettings
from pellucid.pipeline.request import ImagePrompt
from pellucid.pipeline.result import Result

# --- Pixels for CLIP's vision encoder -------------------------------------------------------------------------------

MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)


def clip_pixels(images: Sequence[Any], size: int = 224) -> Tensor:
    """(N, 3, size, size), normalised as CLIP was trained (Radford et al. 2021)."""
    return torch.stack([_clip_image(image, size) for image in images])


def _clip_image(image: Any, size: int) -> Tensor:
    rgb = images.as_image(image, "image prompt") or images.to_images(images.to_tensor(image))[0]
    deep = rgb.mode.startswith("I")  # 16 bits, which PIL's own conversion would clip at 255
    rgb = images.flatten(rgb) if deep else rgb.convert("RGB")
    short = min(rgb.size)
    width, height = (int(side * size / short) for side in rgb.size)
    rgb = rgb.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    rgb = rgb.crop((left, top, left + size, top + size))
    pixels = torch.from_numpy(np.asarray(rgb).astype(np.float32) / 255).permute(2, 0, 1)  # (3, S, S)
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]


# --- Image inputs of a run ------------------------------------------------------------------------------------------


def encoding_networks(run: RunSettings) -> list[nn.Module]:
    """The networks that the images of a request go through before it is denoised."""
    model, request = run.model, run.request
    found: list[nn.Module] = []
    if run.components.vae is not None and request.image is not None:
        found.append(run.components.vae)
    for prompt in request.image_prompts:
        encoder = model.image_encoder_of(prompt)
        found += [model.ip_adapter_of(prompt)] if encoder is None else [model.ip_adapter_of(prompt), encoder]
    return found + [model.controlnet_of(control).controlnet_cond_embedding for control in request.controls]


def _spread(batch: Tensor, count: int) -> Tensor:
    """One image for all images of the batch, or one for each in turn."""
    if count % len(batch):
        raise PellucidError(rule("images", f"1, or a divisor of the {count} images to make", len(batch)), "image-count")
    return batch.repeat_interleave(count // len(batch), dim=0)


def one_for_all(run: RunSettings) -> bool:
    """Whether the whole batch starts from one image, under one mask where there is one."""
    image, mask = run.request.image, run.request.mask
    if isinstance(image, Result):
        return False
    one = len(images.listed(image, "image")) == 1
    return one and (mask is None or len(images.listed(mask, "mask")) == 1)


# --- to start from -----------------------------------------------------------------------------------------------


def first_noise(run: RunSettings) -> Tensor:
    """Unit noise, (B, C, H, W): given, or drawn by seed."""
    like, given = torch.empty(0, device=run.model.device), run.request.latents
    if given is None:
        return run.noise.first(run.shape, like, range(run.count))
    if tuple(given.shape) != (run.count, *run.shape):
        raise PellucidError(rule("latents", f"of shape {(run.count, *run.shape)}", tuple(given.shape)), "latents")
    images.check_finite("latents", given)
    return given.to(like)


def clean_latents(run: RunSettings) -> Tensor | None:
    """The image as latents (B, C, H, W), scaled for diffusion; None without one."""
    image = run.request.image
    if image is None or (starts_from_noise(run) and is_inpainting(run.components)):
        return None
    if isinstance(image, Result):
        return _given_latents(run, _unfinished(run, image))
    if run.model.is_latent(image):
        return _given_latents(run, image)
    return _encode(run, images.to_tensor(image, run.size).to(run.model.device))


def _unfinished(run: RunSettings, earlier: Result) -> Tensor:
    """The end of an earlier run: still noisy, in this plan's frame, or the latents of what it finished."""
    end = earlier.plan.end
    if run.request.denoising_start is not None:
        return earlier.latents * (run.plan.start.alpha / end.alpha)
    if earlier.recipe.denoising_end is not None:
        raise PellucidError("denoising_start must be given to take up an unfinished run; got none.", "denoising")
    return earlier.latents / end.alpha if earlier.plan.dialect == "exact" else earlier.latents


def _given_latents(run: RunSettings, latents: Tensor) -> Tensor:
    """Latents that were given, one per image, of the size of the run."""
    if tuple(latents.shape[1:]) != run.shape:
        raise PellucidError(rule("latents of image", f"of shape {run.shape}", tuple(latents.shape[1:])), "latents")
    images.check_finite("latents of image", latents)
    return _spread(latents.to(run.model.device, torch.float32), run.count)


def starts_from_noise(run: RunSettings) -> bool:
    """Whether an inpainting starts from noise alone."""
    request = run.request
    return request.mask is not None and request.strength in (None, 1.0) and request.denoising_start is None


def _encode(run: RunSettings, pixels: Tensor) -> Tensor:
    """Pixels (1 or more, 3, H, W) in [−1, 1] → latents (B, C, H, W), sampled with the noise of each image.

    diffusers' inpainting encodes an image once for the whole batch, with the noise of the first.
    """
    vae, policy = run.components.vae, run.model.policy
    once = run.request.mask is not None and run.plan.dialect == "diffusers"
    spread_out = partial(_spread, count=run.count)
    if vae is None:
        return spread_out(pixels)
    pixels = pixels if once else spread_out(pixels)
    weight = next(vae.parameters())
    if policy.vae_tile is not None:
        posterior = tiles.encode_tiled(vae, pixels.to(weight), policy.vae_tile)
    elif policy.vae_slicing:
        posterior = tiles.encode_sliced(vae, pixels.to(weight))
    else:
        posterior = vae.encode(pixels.to(weight))
    noise = run.noise.beside(posterior.mean.shape[1:], torch.empty(0, device=pixels.device), range(len(pixels)))
    return spread_out(to_diffusion(vae.config, posterior.sample(noise.to(posterior.mean))).float())


# --- to paint in -------------------------------------------------------------------------------------------------


class Inpainting:
    """A network that sees the mask and the masked image beside x: 9 channels in Stable Diffusion's."""

    def __init__(self, network: Any) -> None:
        self.network = network

    @property
    def hoist(self) -> Any:
        """That of the network, which takes all inputs except the mask and the image."""
        return getattr(self.network, "hoist", None)

    def forward(self, x: Tensor, time: Tensor | None = None, *, beside: Tensor, **inputs: Any) -> Tensor:
        return self.network(torch.cat([x, beside], dim=1), time, **inputs)

    __call__ = forward


def is_inpainting(components: Components) -> bool:
    """Whether the network has channels for a mask and a masked image."""
    vae, network = components.vae, components.network
    return vae is not None and network.config.in_channels == 2 * vae.config.latent_channels + 1


def _pixel_mask(run: RunSettings) -> Tensor:
    image, mask = run.request.image, run.request.mask
    if run.model.is_latent(image):
        found = images.to_mask(mask, run.size)
    else:
        found = images.inpaint_pair(image, mask, run.size)[1]
    return _spread(found, run.count).to(run.model.device)  # (B, 1, H, W), 1 is painted


def latent_mask(run: RunSettings) -> Tensor:
    return images.mask_to_latents(_pixel_mask(run), run.model.factor)


def beside_latents(run: RunSettings) -> Tensor:
    """(B, 1 + C, H, W): the mask, and the latents of the image without what is to be painted."""
    image = run.request.image
    if image is None or run.request.mask is None:
        raise PellucidError(f"image and mask must be given: {run.components.name} is an inpainting model.", "inpaint")
    if run.model.is_latent(image):
        raise PellucidError("image must be an image for an inpainting model; got latents.", "inpaint")
    mask = _pixel_mask(run)
    pixels, shown = images.to_tensor(image, run.size).to(mask), mask < 0.5
    hidden = _encode(run, pixels * shown[:1] if one_for_all(run) else _spread(pixels, run.count) * shown)
    return torch.cat([images.mask_to_latents(mask, run.model.factor).to(hidden), hidden], dim=1)


# --- to follow ---------------------------------------------------------------------------------------------------


def controllable(network: nn.Module) -> UNet:
    """The network, where ControlNets can control it."""
    if not isinstance(network, UNet):
        raise PellucidError(rule("controls", "left out: only UNets take them", type(network).__name__), "control-base")
    return network


def hints_of(run: RunSettings, network: ControlledUNet) -> tuple[tuple[Hint, ...], tuple[Hint, ...]]:
    """Each ControlNet's image, embedded once: with the prompt, and without it, where those that guess do not act."""
    hints = []
    for controlnet, control in zip(network.controlnets, run.request.controls, strict=True):
        assert isinstance(controlnet, ControlNet)
        pixels = (images.to_tensor(control.image, run.size) + 1) / 2
        with_batch = _spread(pixels, run.count).to(run.model.device)
        hints.append(controlnet.hint(with_batch, [control.scale] * run.count, control.guess))
        side, wanted = hints[-1].embedded.shape[-1], run.shape[-1]
        if side != wanted:
            must = f"one for latents of 1/{run.model.factor} of an image"
            raise PellucidError(rule("ControlNet", must, f"one for 1/{run.size[0] // max(side, 1)}"), "control-base")
    guesses = [control.guess for control in run.request.controls]
    silent = (Hint(h.embedded, h.scale * (not guess)) for h, guess in zip(hints, guesses, strict=True))
    return tuple(hints), tuple(silent)


# --- to resemble -------------------------------------------------------------------------------------------------


def image_tokens(run: RunSettings, network: nn.Module) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Tokens of every IP-Adapter for every cross-attention: of its images, and of an empty image."""
    if not isinstance(network, UNet):
        raise PellucidError(rule("image_prompts", "left out: only UNets take them", type(network).__name__), "ip-base")
    made: tuple[list[Any], list[Any]] = [], []
    for prompt in run.request.image_prompts:
        adapter = run.model.ip_adapter_of(prompt)
        states = _image_states(run, adapter, prompt)
        masks = None if prompt.masks is None else images.to_mask(prompt.masks)[:, 0]  # (N, H, W)
        if masks is not None and len(masks) != states[0].shape[1]:
            raise PellucidError(rule("masks", f"{states[0].shape[1]}, one per image", len(masks)), "ip-masks")
        for side, one in zip(made, states, strict=True):
            side.append(adapter.tokens(network, one, scale=prompt.scale, masks=masks, size=run.shape[1:]))
    with_images, empty = (tuple(sum(layer, ()) for layer in zip(*side, strict=True)) for side in made)
    return with_images, empty


def _image_states(run: RunSettings, adapter: IPAdapter, prompt: ImagePrompt) -> tuple[Tensor, Tensor]:
    """What the image encoder says of the images, and of none: (B, N, W) pooled or (B, N, P, W) patches each."""
    encoder = run.model.image_encoder_of(prompt)
    if encoder is None:
        raise PellucidError(
            f"image_encoder must be given for image prompts: neither {run.components.name} nor the IP-Adapter has one. "
            "Load with image_encoder=FOLDER.",
            "ip-encoder",
        )
    weight = next(encoder.parameters())
    pixels = clip_pixels(images.listed(prompt.images, "image prompt"), encoder.config.image_size).to(weight)
    if adapter.wants == "pooled":
        shown = encoder(pixels).pooled  # (N, W)
        empty = torch.zeros_like(shown)
    else:
        shown = encoder(pixels).hidden[-2]  # (N, P, W)
        empty = encoder(torch.zeros_like(pixels)).hidden[-2]
    return shown[None].expand(run.count, *shown.shape), empty[None].expand(run.count, *empty.shape)
