"""Images that go into a run: to start from, to paint in, to follow (ControlNet), to resemble (IP-Adapter)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.interop import folder, source, weights
from pellucid.interop.components import Components
from pellucid.models import ip_adapter
from pellucid.models.clip import CLIPVisionEncoder
from pellucid.models.controlnet import Controlled, ControlNet, Hint
from pellucid.models.ip_adapter import IPAdapter
from pellucid.models.unet import UNet
from pellucid.pipeline import images
from pellucid.pipeline.adapters import Control, ImagePrompt

if TYPE_CHECKING:
    from pellucid.pipeline.pipeline import Pipeline
    from pellucid.pipeline.prepare import Run


# --- Pixels for CLIP's vision encoder -------------------------------------------------------------------------------

MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)


def clip_pixels(images: Sequence[Any], size: int = 224) -> Tensor:
    """(N, 3, size, size), normalised as CLIP was trained (Radford et al. 2021)."""
    return torch.stack([clip_image(image, size) for image in images])


def clip_image(image: Any, size: int) -> Tensor:
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

Inputs = dict[str, Any]
ADAPTER_FILE, ADAPTER_EYES = "ip_adapter.safetensors", "image_encoder"  # in an IP-Adapter's folder
ENCODER_NOTE, SHARED_ENCODER = "image_encoder.json", "../image_text"  # in the place of image_encoder/, in a bundle
MAX_KEPT = 16  # adapters that a pipeline holds in memory


def encoding_networks(run: Run) -> list[nn.Module]:
    """The networks that the images of a request go through before it is denoised."""
    request, found = run.request, []
    if run.parts.vae is not None and request.image is not None:
        found.append(run.parts.vae)
    for prompt in request.image_prompts:
        eyes = image_encoder_of(run.pipe, prompt)
        found += [adapter_of(run.pipe, prompt)] if eyes is None else [adapter_of(run.pipe, prompt), eyes]
    return found + [controlnet_of(run.pipe, control).controlnet_cond_embedding for control in request.controls]


# --- to start from -----------------------------------------------------------------------------------------------


def is_latent(image: Any, channels: int | None) -> bool:
    """A tensor (B, C, H, W) with the channels of the latents is taken as latents."""
    return channels is not None and isinstance(image, Tensor) and image.ndim == 4 and image.shape[1] == channels


def size_of(image: Any, channels: int, factor: int) -> tuple[int, int] | None:
    """(width, height) in pixels of the image, or of the first of several."""
    if is_latent(image, channels) and factor > 1:
        return image.shape[-1] * factor, image.shape[-2] * factor
    return images.size_of(images.listed(image, "image")[0])


def spread(batch: Tensor, count: int) -> Tensor:
    """One image for all images of the batch, or one for each in turn."""
    if count % len(batch):
        raise PellucidError(rule("images", f"1, or a divisor of the {count} images to make", len(batch)), "image-count")
    return batch.repeat_interleave(count // len(batch), dim=0)


def one_for_all(run: Run) -> bool:
    """Whether the whole batch starts from one image, under one mask where there is one."""
    image, mask = run.request.image, run.request.mask
    if not isinstance(image, Tensor) and hasattr(image, "latents"):  # the result of an earlier run
        return False
    one = len(images.listed(image, "image")) == 1
    return one and (mask is None or len(images.listed(mask, "mask")) == 1)


# --- to paint in -------------------------------------------------------------------------------------------------


class Inpainting:
    """A network that sees the mask and the masked image beside x: 9 channels in Stable Diffusion's."""

    def __init__(self, network: Any) -> None:
        self.network = network

    def forward(self, x: Tensor, time: Tensor, *, beside: Tensor, **inputs: Any) -> Tensor:
        return self.network(torch.cat([x, beside], dim=1), time, **inputs)

    __call__ = forward


def is_inpainting(parts: Components) -> bool:
    """Whether the network has channels for a mask and a masked image."""
    vae, network = parts.vae, parts.network
    return vae is not None and network.config.in_channels == 2 * vae.config.latent_channels + 1


def pixel_mask(run: Run) -> Tensor:
    image, mask = run.request.image, run.request.mask
    if is_latent(image, run.channels_if_latent()):
        found = images.to_mask(mask, run.size)
    else:
        found = images.inpaint_pair(image, mask, run.size)[1]
    return spread(found, run.count).to(run.pipe.device)  # (B, 1, H, W), 1 is painted


def latent_mask(run: Run) -> Tensor:
    return images.mask_to_latents(pixel_mask(run), run.pipe.factor)


def beside_latents(run: Run) -> Tensor:
    """(B, 1 + C, H, W): the mask, and the latents of the image without what is to be painted."""
    if run.request.image is None or run.request.mask is None:
        raise PellucidError(f"image and mask must be given: {run.parts.name} is an inpainting model.", "inpaint")
    if is_latent(run.request.image, run.channels_if_latent()):
        raise PellucidError("image must be an image for an inpainting model; got latents.", "inpaint")
    mask = pixel_mask(run)
    pixels, shown = images.to_tensor(run.request.image, run.size).to(mask), mask < 0.5
    hidden = run.encode(pixels * shown[:1] if one_for_all(run) else spread(pixels, run.count) * shown)
    return torch.cat([images.mask_to_latents(mask, run.pipe.factor).to(hidden), hidden], dim=1)


# --- to follow ---------------------------------------------------------------------------------------------------


def controlnet_of(pipe: Pipeline, control: Control) -> ControlNet:
    """The ControlNet of a control: given, or read once from its folder or file."""
    if isinstance(control.network, ControlNet):
        return control.network
    return read_once(pipe, "controlnet", control.network, lambda path: read_controlnet(pipe, path))


def read_controlnet(pipe: Pipeline, path: str) -> ControlNet:
    dtype = next(pipe.components.network.parameters()).dtype
    found = source.load_component(path, dtype=dtype, device=pipe.device if pipe.policy.offload == "none" else None)
    if not isinstance(found, ControlNet):
        raise PellucidError(rule("ControlNet", "a folder or file of one", type(found).__name__), "control-kind")
    return found


def check_controlled(network: Any) -> None:
    if not isinstance(network, UNet):
        raise PellucidError(rule("controls", "left out: only UNets take them", type(network).__name__), "control-base")


def add_hints(run: Run, network: Controlled, cond: Inputs, uncond: Inputs | None) -> None:
    """Each ControlNet's image, embedded once; the same with and without the prompt, unless it guesses."""
    hints = []
    for controlnet, control in zip(network.controlnets, run.request.controls, strict=True):
        assert isinstance(controlnet, ControlNet)
        pixels = (images.to_tensor(control.image, run.size) + 1) / 2
        with_batch = spread(pixels, run.count).to(run.pipe.device)
        hints.append(controlnet.hint(with_batch, [control.scale] * run.count, control.guess))
        side, wanted = hints[-1].embedded.shape[-1], run.shape[-1]
        if side != wanted:
            must = f"one for latents of 1/{run.pipe.factor} of an image"
            raise PellucidError(rule("ControlNet", must, f"one for 1/{run.size[0] // max(side, 1)}"), "control-base")
    cond["control"] = tuple(hints)
    if uncond is not None:
        uncond["control"] = tuple(
            Hint(hint.embedded, hint.scale * (not control.guess))
            for hint, control in zip(hints, run.request.controls, strict=True)
        )


# --- to resemble -------------------------------------------------------------------------------------------------


def add_image_prompts(run: Run, network: nn.Module, cond: Inputs, uncond: Inputs | None) -> None:
    """Image tokens of every IP-Adapter for every cross-attention; without the prompt, those of an empty image."""
    if not isinstance(network, UNet):
        raise PellucidError(rule("image_prompts", "left out: only UNets take them", type(network).__name__), "ip-base")
    made: list[list[Any]] = [[], []]
    for prompt in run.request.image_prompts:
        adapter = adapter_of(run.pipe, prompt)
        states = image_states(run, adapter, prompt)
        masks = None if prompt.masks is None else images.to_mask(prompt.masks)[:, 0]  # (N, H, W)
        if masks is not None and len(masks) != states[0].shape[1]:
            raise PellucidError(rule("masks", f"{states[0].shape[1]}, one per image", len(masks)), "ip-masks")
        for side, one in zip(made, states, strict=True):
            size = (run.shape[1], run.shape[2])
            side.append(adapter.tokens(network, one, scale=prompt.scale, masks=masks, size=size))
    for inputs, side in zip((cond, uncond), made, strict=True):
        if inputs is not None:
            inputs["image"] = tuple(sum(layer, ()) for layer in zip(*side, strict=True))


def adapter_of(pipe: Pipeline, prompt: ImagePrompt) -> IPAdapter:
    if isinstance(prompt.adapter, IPAdapter):
        return prompt.adapter
    weight = next(pipe.components.network.parameters())

    def read(path: str) -> IPAdapter:
        return ip_adapter.from_state(weights.read(adapter_file(path))).to(weight).eval()

    return read_once(pipe, "ip_adapter", prompt.adapter, read)


def adapter_file(path: str | os.PathLike[str]) -> Path:
    """The file of an IP-Adapter: itself, or the one in its folder."""
    place = source.bundled(path)
    return place / ADAPTER_FILE if place.is_dir() else place


def adapter_encoder(path: str | os.PathLike[str]) -> Path | None:
    """The image encoder that an IP-Adapter was trained with: in its folder, or the CLIP of the bundle around it."""
    place = source.bundled(path)
    if (place / ADAPTER_EYES).is_dir():
        return place / ADAPTER_EYES
    around = folder.outer(place, ENCODER_NOTE, SHARED_ENCODER)
    return None if around is None else around / Path(SHARED_ENCODER).name


def image_encoder_of(pipe: Pipeline, prompt: ImagePrompt) -> CLIPVisionEncoder | None:
    """The image encoder that was loaded with the model, or else the one that the IP-Adapter brings."""
    if pipe.components.image_encoder is not None or isinstance(prompt.adapter, IPAdapter):
        return pipe.components.image_encoder
    place, weight = adapter_encoder(prompt.adapter), next(pipe.components.network.parameters())

    def read(path: str) -> CLIPVisionEncoder:
        return source.load_image_encoder(path, dtype=weight.dtype, device=weight.device).eval()

    return None if place is None else read_once(pipe, "image_encoder", place, read)


def image_states(run: Run, adapter: IPAdapter, prompt: ImagePrompt) -> tuple[Tensor, Tensor]:
    """What the image encoder says of the images, and of none: (B, N, W) pooled or (B, N, P, W) patches each."""
    encoder = image_encoder_of(run.pipe, prompt)
    if encoder is None:
        raise PellucidError(
            f"image_encoder must be given for image prompts: neither {run.parts.name} nor the IP-Adapter has one. "
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
    return tuple(s[None].expand(run.count, *s.shape) for s in (shown, empty))  # type: ignore[return-value]


def read_once(pipe: Pipeline, kind: str, path: str | os.PathLike[str], read: Any) -> Any:
    """What a file or folder holds, read once a pipeline and again when it changes; the oldest of many is let go."""
    place = os.fspath(path)
    stamp = os.stat(place).st_mtime_ns if os.path.exists(place) else 0  # a hub id has no file of that name
    key = (kind, place, stamp)
    with pipe._lock:
        if key not in pipe._files:
            made = read(place)
            while len(pipe._files) >= MAX_KEPT:
                pipe._files.pop(next(iter(pipe._files)))
            pipe._files[key] = made
        return pipe._files[key]
