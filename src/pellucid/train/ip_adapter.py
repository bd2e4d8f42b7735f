"""Training an IP-Adapter: keys and values for image tokens, next to those of a frozen UNet (Ye et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.interop import save, source
from pellucid.models.attention import ImageTokens
from pellucid.models.clip import CLIPVisionEncoder
from pellucid.models.ip_adapter import IPAdapter, Pair, PlainProjection
from pellucid.models.unet import UNet
from pellucid.pipeline.encoders.image_inputs import DEVIATION, MEAN
from pellucid.pipeline.shelf import ADAPTER_EYES as EYES
from pellucid.pipeline.shelf import ADAPTER_FILE as FILE
from pellucid.train.adapters import DTYPES, AdapterConfig, AdapterTask, FrozenPart, FrozenPipeline, hint_of
from pellucid.train.config import counts
from pellucid.train.draws import Draws, seeded
from pellucid.train.source import Batch

_ITSELF = "itself"


@dataclass(frozen=True)
class IPAdapterConfig(AdapterConfig):
    """`image_encoder` is a folder of a CLIP vision encoder with its projection, or of a whole CLIP; without one it is
    the base's own. `reference` names the images of the data that prompt, in [−1, 1]; `itself` is the image that is
    to be made.

    `crop` is the least part of a reference's side that is used, at a random place; `mirror` mirrors half of them.
    `dropout` (in the objective), `image_dropout` and `both_dropout` are the shares of images that are trained without
    their text, without their reference, and without either. Values start at zero, where the base is unchanged, or as
    the text's own (`copy`).
    """

    image_encoder: str | None = None
    reference: str = "reference"
    tokens: int = 4
    crop: float = 1.0
    mirror: bool = False
    image_dropout: float = 0.05
    both_dropout: float = 0.05
    values: Literal["zero", "copy"] = "zero"

    def __post_init__(self) -> None:
        counts(self, "tokens", low=1)
        if not 0 < self.crop <= 1:
            raise PellucidError(rule("crop", "above 0, and at most 1", self.crop), "config-value")
        drops = (self.objective.dropout, self.image_dropout, self.both_dropout)
        if min(drops) < 0 or sum(drops) > 1:
            names = "dropout, image_dropout, both_dropout"
            raise PellucidError(rule(names, "0 or more, and 1 or less together", drops), "config-value")

    def build(self, seed: int, device: torch.device) -> IPAdapterTask:
        return IPAdapterTask(self, seed, device)


def _eyes_of(base: FrozenPipeline, config: IPAdapterConfig) -> CLIPVisionEncoder:
    own = base.parts.image_encoder
    if config.image_encoder is None and own is None:
        must = f"given: {base.parts.name} has none"
        raise PellucidError(rule("image_encoder", must, None), "ip-encoder")
    eyes = own
    if config.image_encoder is not None:
        eyes = source.load_image_encoder(config.image_encoder, dtype=DTYPES[config.precision], device=base.device)
    assert eyes is not None
    if eyes.visual_projection is None:
        raise PellucidError(rule("image_encoder", "one with a projection", "one without"), "ip-encoder")
    return eyes.eval().requires_grad_(False)


def _new_adapter(unet: UNet, image_width: int, tokens: int, values: Literal["zero", "copy"]) -> IPAdapter:
    """A plain adapter for a UNet: keys as the text's own, values zero or as the text's own."""
    layers = [block.attn2 for block, _, _ in unet.cross_attentions()]
    widths = {layer.to_k.in_features for layer in layers}
    if len(widths) != 1:
        raise PellucidError(
            rule("cross-attentions of the base", "one or more, of one width", sorted(widths)), "ip-base"
        )
    width = widths.pop()
    pairs = []
    for layer in layers:
        pair = Pair(width, layer.to_k.out_features)
        with torch.no_grad():
            pair.to_k_ip.weight.copy_(layer.to_k.weight)
            pair.to_v_ip.weight.copy_(layer.to_v.weight * float(values == "copy"))
        pairs.append(pair)
    return IPAdapter("plain", PlainProjection(image_width, width, tokens), pairs)


class UNetWithIPAdapter(nn.Module):
    """A UNet with an IP-Adapter. Its only submodule is the adapter; the UNet is frozen."""

    def __init__(self, unet: UNet, adapter: IPAdapter) -> None:
        super().__init__()
        self.adapter = adapter
        self.base = FrozenPart(unet)
        self.heads = tuple(block.attn2.heads for block, _, _ in unet.cross_attentions())
        self.dtype = next(unet.parameters()).dtype

    def forward(self, x: Tensor, time: Tensor, *, image: Tensor, **conditions: Tensor) -> Tensor:
        """`image` (B, W) is the embedding of each reference; zeros where there is none."""
        tokens = self.adapter.image_proj(image.float())[:, None]  # (B, 1, T, D)
        seen = tuple(
            self.adapter.at(pair, tokens, heads, 1.0, None, (0, 0))
            for pair, heads in zip(self.adapter.pairs, self.heads, strict=True)
        )
        if self.dtype != torch.float32:
            seen = tuple(tuple(_in_dtype(one, self.dtype) for one in layer) for layer in seen)
        conditions = {k: v.to(self.dtype) if k in ("context", "pooled") else v for k, v in conditions.items()}
        return self.base.held(x.to(self.dtype), time, image=seen, **conditions)


def _in_dtype(tokens: ImageTokens, dtype: torch.dtype) -> ImageTokens:
    return ImageTokens(tokens.k.to(dtype), tokens.v.to(dtype), tokens.scale.to(dtype), None)


def eye_pixels(images: Tensor, size: int) -> Tensor:
    """Images (B, 3, H, W) in [−1, 1] as `clip_pixels` makes them, where they are: (B, 3, size, size)."""
    pixels = images.float().add(1).mul(127.5).round().clamp(0, 255)
    short = min(pixels.shape[2:])
    height, width = (int(side * size / short) for side in pixels.shape[2:])
    for sides in ((pixels.shape[2], width), (height, width)) if short != size else ():  # one at a time, as PIL does
        pixels = F.interpolate(pixels, sides, mode="bicubic", antialias=True).round().clamp(0, 255)
    top, left = (height - size) // 2, (width - size) // 2
    pixels = pixels[:, :, top : top + size, left : left + size] / 255
    mean, deviation = (torch.tensor(v, device=pixels.device)[:, None, None] for v in (MEAN, DEVIATION))
    return (pixels - mean) / deviation


def varied(images: Tensor, draws: Draws, crop: float, mirror: bool) -> Tensor:
    """Images cropped and mirrored at random: a square of at least `crop` of each side."""
    side, across, down, turn = draws.uniform("reference", (4,), images.device).T
    side = crop + (1 - crop) * side
    turned = torch.where(turn < 0.5, -1.0, 1.0) if mirror else torch.ones_like(turn)
    zero = torch.zeros_like(side)
    rows = [side * turned, zero, (1 - side) * (2 * across - 1), zero, side, (1 - side) * (2 * down - 1)]
    grid = F.affine_grid(torch.stack(rows, 1).reshape(-1, 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


class IPAdapterTask(AdapterTask):
    """An IP-Adapter with a plain projection, of a text-to-image UNet."""

    def __init__(self, config: IPAdapterConfig, seed: int, device: torch.device) -> None:
        super().__init__(config, device)
        base = self.base
        self.config, self.eyes = config, _eyes_of(base, config)
        with seeded(seed):
            made = _new_adapter(base.unet, self.eyes.config.projection_dim, config.tokens, config.values)
        self.network = UNetWithIPAdapter(base.unet, made.to(device))

    @property
    def frozen(self) -> tuple[nn.Module, ...]:
        return (*super().frozen, self.eyes)

    def masks(self, draws: Draws, device: torch.device) -> dict[str, Tensor]:
        chance = draws.uniform("dropout", (), device)
        text = self.objective.dropout
        image = text + self.config.image_dropout
        both = (chance >= image) & (chance < image + self.config.both_dropout)
        return {"text": (chance < text) | both, "image": ((chance >= text) & (chance < image)) | both}

    def inputs(self, batch: Batch, masks: Mapping[str, Tensor], draws: Draws | None) -> dict[str, Tensor]:
        pooled = self.see(self.reference(batch), draws)
        image = torch.where(masks["image"][:, None], torch.zeros_like(pooled), pooled)
        return {**self.base.conditions(self.base.windows(batch), masks["text"]), "image": image}

    def reference(self, batch: Batch) -> Tensor:
        """(B, 3, H, W) in [−1, 1]."""
        itself = self.config.reference == _ITSELF
        found = batch.images if itself else hint_of(batch, self.config.reference)
        if found.ndim != 4 or found.shape[1] != 3:
            must = "images of 3 channels" + (", not latents" if itself else "")
            raise PellucidError(rule(f"reference {self.config.reference}", must, tuple(found.shape[1:])), "data-hints")
        return found

    @torch.no_grad()
    def see(self, reference: Tensor, draws: Draws | None) -> Tensor:
        """The embeddings of references: (B, W)."""
        if draws is not None and (self.config.crop < 1 or self.config.mirror):
            reference = varied(reference, draws, self.config.crop, self.config.mirror)
        pixels = eye_pixels(reference, self.eyes.config.image_size)
        return self.eyes(pixels.to(next(self.eyes.parameters()))).pooled

    def save(self, network: nn.Module, folder: Path) -> None:
        """A folder with the adapter's file, and its image encoder where the base does not have it."""
        assert isinstance(network, UNetWithIPAdapter)
        dtype = self.saved_dtype
        with save.replaced(folder, FILE, overwrite=True) as place:
            tensors = {name: save.own(tensor, dtype) for name, tensor in _file_of(network.adapter).items()}
            save_file(tensors, place / FILE, {"format": "pt"})
            if self.config.image_encoder is not None:
                save.save_component(self.eyes, place / EYES, dtype=dtype)


def _file_of(adapter: IPAdapter) -> dict[str, Tensor]:
    """The tensors of a plain adapter under the names of the original files, whose numbers count all attentions."""
    image = adapter.image_proj.state_dict()
    found = {f"image_proj.{k.replace('image_embeds', 'proj')}": v for k, v in image.items()}
    for index, pair in enumerate(adapter.pairs):
        found |= {f"ip_adapter.{2 * index + 1}.{k}": v for k, v in pair.state_dict().items()}
    return found
