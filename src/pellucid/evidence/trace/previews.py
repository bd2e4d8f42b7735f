"""Tensors as images: pixels as they are, latents decoded where there is a VAE, or through a linear map to colours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from pellucid.core.errors import PellucidError
from pellucid.evidence.trace.reading import Trace
from pellucid.interop import source
from pellucid.models.quantize import FP8, REST
from pellucid.models.vae import from_diffusion
from pellucid.pipeline import fingerprint, repeat

_T = TypeVar("_T")
_REACH = 2.5  # deviations of a principal part that span the range of colours
_RIDGE = 1e-3  # of the fit of colours to latents


class Preview(ABC):
    """(N, C, H, W) → (N, 3, h, w): x0 as an image in [0, 1], and any tensor, or a difference, as colours."""

    name: str

    def image(self, x0: Tensor) -> Tensor:
        return self.colours(x0)

    @abstractmethod
    def colours(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def change(self, x0: Tensor, delta: Tensor) -> Tensor:
        """What subtracting `delta` from x0 subtracts from its image; signed."""


@dataclass(frozen=True)
class _PixelPreview(Preview):
    """One or three channels in [−1, 1]."""

    name: str = "pixels"

    def colours(self, x: Tensor) -> Tensor:
        return (_three(x) / 2 + 0.5).clamp(0, 1)

    def change(self, x0: Tensor, delta: Tensor) -> Tensor:
        return _three(delta) / 2


def _three(x: Tensor) -> Tensor:
    return x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x


@dataclass(frozen=True)
class LinearPreview(Preview):
    """Colours as an affine map of a latent's channels."""

    map: Tensor  # (3, C)
    offset: Tensor  # (3,)
    name: str = "latents, mapped linearly"

    @staticmethod
    def principal(x0: Tensor) -> LinearPreview:
        """The three directions in which the channels of some latents vary most, as colours around grey."""
        flat = x0.double().movedim(1, 0).flatten(1)  # (C, N·H·W)
        mean = flat.mean(1, keepdim=True)
        vectors, sizes, _ = torch.linalg.svd((flat - mean) @ (flat - mean).T / flat.shape[1])
        spread = sizes[:3].clamp_min(1e-12).sqrt()
        turned = vectors[:, :3] * torch.where(vectors[:, :3].sum(0) < 0, -1.0, 1.0)  # a sign that does not flip
        table = (turned / (2 * _REACH * spread)).T
        table = torch.cat([table, table.new_zeros(3 - len(table), table.shape[1])]) if len(table) < 3 else table
        return LinearPreview(table, 0.5 - (table @ mean)[:, 0])

    @staticmethod
    def fitted(x0: Tensor, images: Tensor) -> LinearPreview:
        """The map that explains decoded images best, by least squares."""
        flat = x0.double().movedim(1, 0).flatten(1)  # (C, M)
        ones = torch.cat([flat, torch.ones_like(flat[:1])])
        seen = adaptive_avg_pool2d(images.double(), x0.shape[-2:]).movedim(1, 0).flatten(1)  # (3, M)
        square = ones @ ones.T + _RIDGE * flat.shape[1] * torch.eye(len(ones), dtype=torch.float64)
        table = torch.linalg.solve(square, ones @ seen.T).T  # (3, C + 1)
        return LinearPreview(table[:, :-1], table[:, -1])

    def colours(self, x: Tensor) -> Tensor:
        return (self.mapped(x) + self.offset[None, :, None, None]).clamp(0, 1)

    def change(self, x0: Tensor, delta: Tensor) -> Tensor:
        return self.mapped(delta)

    def mapped(self, x: Tensor) -> Tensor:
        return torch.einsum("oc,nchw->nohw", self.map, x.double())


@dataclass(frozen=True)
class _VaePreview(Preview):
    """x0 through the model's own VAE; what cannot be decoded, through the linear map that fits the VAE best."""

    vae: Any
    linear: LinearPreview
    name: str = "decoded by the model's VAE"

    @staticmethod
    def by(vae: Any, x0: Tensor) -> _VaePreview:
        return _VaePreview(vae, LinearPreview.fitted(x0, decode(vae, x0)))

    def image(self, x0: Tensor) -> Tensor:
        return decode(self.vae, x0)

    def colours(self, x: Tensor) -> Tensor:
        return self.linear.colours(x)

    def change(self, x0: Tensor, delta: Tensor) -> Tensor:
        return self.image(x0) - self.image(x0 - delta)


@torch.no_grad()
def decode(vae: Any, x0: Tensor) -> Tensor:
    """Latents as diffusion has them → images in [0, 1], one at a time."""
    weight = next(vae.parameters())
    images = [vae.decode(from_diffusion(vae.config, one[None]).to(weight)) for one in x0]
    return (torch.cat(images).float().cpu() / 2 + 0.5).clamp(0, 1)


def preview_for(x0: Tensor, vae: Any = None) -> Preview | None:
    """How to look at x0 (N, C, H, W); None where it is no image."""
    if x0.ndim != 4:
        return None
    if vae is not None and vae.config.latent_channels == x0.shape[1]:
        return _VaePreview.by(vae, x0)
    return _PixelPreview() if x0.shape[1] in (1, 3) else LinearPreview.principal(x0)


def vae_of(trace: Trace, model: str | None) -> tuple[Any, str]:
    """The VAE that decodes the latents of a trace, of `model` or of the model that made it; and a note on it."""
    recipe = trace.header.recipe
    if len(trace.header.shape) != 3 or trace.header.shape[0] in (1, 3) or (recipe is None and model is None):
        return None, ""
    try:
        name = model or repeat.model_of(repeat.RecipeSource(trace.path, recipe))  # type: ignore[arg-type]
    except PellucidError:
        return None, f"latents are mapped to colours: {recipe.model} is not here to decode them (--model)"  # type: ignore
    root, dtype = source.locate(name), recipe.dtype or None if recipe is not None else None
    dtype = REST if dtype == FP8 else dtype
    if (root / "vae").is_dir():  # the rest of the model is not needed
        vae = source.load_component(root / "vae", dtype=dtype)
    else:
        vae = source.read_components(name, dtype=dtype).vae
    if vae is None:
        return None, f"latents are mapped to colours: {name} has no VAE"
    known = (recipe.model_hash or "").partition(":")[2].split("-") if recipe is not None else []
    other = len(known) == len(fingerprint.PARTS) and fingerprint.short_hash(fingerprint.of_network(vae)) != known[1]
    return vae.float().eval(), "decoded with another VAE than the run had" if other else ""


def signed(changes: Tensor, most: float) -> Tensor:
    """Differences around grey, so that ±most are the ends."""
    return (changes / (2 * (most or 1.0)) + 0.5).clamp(0, 1)


def spaced(places: Sequence[_T], count: int) -> list[_T]:
    """At most `count` of some places, evenly spaced, with the first and the last."""
    if len(places) <= count:
        return list(places)
    return [places[round(k * (len(places) - 1) / (count - 1))] for k in range(count)]
