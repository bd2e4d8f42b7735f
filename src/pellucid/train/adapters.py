"""What LoRA, ControlNet and IP-Adapter training share: a frozen pipeline, its latents, its text, its own objective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from pellucid.core import target as targets
from pellucid.core.errors import PellucidError, rule
from pellucid.interop import source
from pellucid.interop.components import Components
from pellucid.models.dit import PixArt
from pellucid.models.unet import UNet
from pellucid.models.vae import from_diffusion
from pellucid.pipeline.encoders.conditions import takes_labels, takes_text, wants_sizes
from pellucid.pipeline.encoders.text import TextPart, size_ids
from pellucid.pipeline.encoders.text import text_parts_of as text_parts
from pellucid.pipeline.model import networks_of
from pellucid.train.autoencoder import DECODED_AT_ONCE, drawn_latents
from pellucid.train.config import ObjectiveConfig
from pellucid.train.draws import Draws
from pellucid.train.objective import BatchLoss, Objective, Times, Weighting
from pellucid.train.sampling import Sampling, SamplingConfig
from pellucid.train.source import Batch
from pellucid.train.text import CaptionIds, captions_of, check_vocabulary, tokens
from pellucid.train.text_denoiser import default_sampling

_T = TypeVar("_T")
Precision = Literal["float32", "bf16"]  # no float16: its gradients would need a scaled loss
FileDtype = Literal["float32", "bf16", "float16"]
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}
_MAX_SHOWN = 64  # examples that are kept for sample images


@dataclass(frozen=True)
class AdapterObjectiveConfig:
    """The objective of an adapter: with the base's own schedule and target, unless they are overridden."""

    schedule: Mapping[str, Any] | None = None
    target: str | None = None
    times: Times = field(default_factory=Times)
    weighting: Weighting = field(default_factory=Weighting)
    noise_offset: float = 0.0
    dropout: float = 0.1  # the share of images that are trained without their text

    def build(self, parts: Components) -> Objective:
        target = parts.target if self.target is None else self.target
        rest = (self.times, self.weighting, self.noise_offset, self.dropout)
        if self.schedule is not None:
            return ObjectiveConfig(self.schedule, target, *rest).build()
        return Objective(parts.schedule, targets.named(target), *rest)


@dataclass(frozen=True)
class AdapterConfig:
    """What the tasks of all adapters have in common."""

    base: str
    precision: Precision = "float32"  # of the base; what is trained is float32
    saved_dtype: FileDtype = "float32"
    objective: AdapterObjectiveConfig = field(default_factory=AdapterObjectiveConfig)
    sampling: SamplingConfig = field(default_factory=default_sampling)


class FrozenPart(Generic[_T]):
    """What a trained network uses without owning it: not a submodule, so not trained, saved or copied with it."""

    def __init__(self, held: _T) -> None:
        self.held = held

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenPart[_T]:
        return self


class FrozenPipeline:
    """A text-to-image pipeline that is not trained: images to latents and back, captions to the network's conditions.

    `precision` is that of all its networks. Latents are encoded when they are needed; a batch that is latents already,
    from a cache, is taken as it is.
    """

    def __init__(self, where: str, precision: Precision, device: torch.device) -> None:
        self.dtype, self.device = DTYPES[precision], device
        self.parts = source.read_components(where, dtype=self.dtype, device=device)
        _check_base(self.parts)
        for network in networks_of(self.parts):
            network.eval().requires_grad_(False)
            if device.type == "cuda":
                network.to(memory_format=torch.channels_last)
        self.text = text_parts(self.parts.text_encoders, self.parts.tokenizers)
        for part in self.text:
            check_vocabulary(part.tokenizer, part.encoder.config.vocab_size)
        self.ids = CaptionIds(self.text[0].tokenizer)

    @property
    def network(self) -> nn.Module:
        return self.parts.network

    @property
    def unet(self) -> UNet:
        """The network, where only a UNet can be adapted."""
        if not isinstance(self.network, UNet):
            got = type(self.network).__name__
            raise PellucidError(rule("base of this adapter", "a model with a UNet", got), "adapt-base")
        return self.network

    @property
    def factor(self) -> int:
        """Pixels per latent, along one side."""
        return 1 if self.parts.vae is None else self.parts.vae.config.factor

    # --- images

    @torch.no_grad()
    def latents(self, images: Tensor, draws: Draws) -> Tensor:
        """(B, C, h, w) float32 as the diffusion sees them, from pixels (B, 3, H, W) in [−1, 1] or from latents."""
        vae = self.parts.vae
        if self.takes(images):
            return images.float()
        if vae is None:
            must = f"{self.network.config.in_channels}, as {self.parts.name} takes"
            raise PellucidError(rule("channels of the data", must, images.shape[1]), "data-shape")
        return drawn_latents(vae, images, draws)

    def takes(self, images: Tensor) -> bool:
        """Whether images are what the network diffuses: pixels, where it has no VAE, else latents."""
        vae, channels = self.parts.vae, self.network.config.in_channels
        return images.shape[1] == channels and (vae is None or channels != vae.config.in_channels)

    @torch.no_grad()
    def images(self, latents: Tensor) -> Tensor:
        """(B, 3, H, W) in [0, 1]."""
        vae = self.parts.vae
        if vae is not None:
            latents = vae.decode(from_diffusion(vae.config, latents).to(next(vae.parameters()))).float()
        return latents.add(1).div(2).clamp(0, 1)

    # --- text

    def tokens(self, captions: Sequence[str]) -> Tensor:
        """(B, encoders, L): one window of each encoder; what a caption has beyond it is cut off."""
        windows = torch.stack([tokens(part.tokenizer, captions) for part in self.text], dim=1)
        return windows.to(self.device, non_blocking=True)

    def windows(self, batch: Batch) -> Tensor:
        """(B, encoders, L): those of a batch's captions, or its own where it has them for the only encoder."""
        if batch.tokens is None or len(self.text) > 1:
            return self.tokens(captions_of(batch))
        return self.ids.of(batch)[:, None].to(self.device)

    @cached_property
    def no_tokens(self) -> Tensor:
        """(1, encoders, L): the empty caption."""
        return self.tokens([""])

    @property
    def zeroed(self) -> bool:
        """Whether a missing caption is zeros rather than an empty text, as SDXL was trained."""
        return bool(self.parts.extra.get("force_zeros_for_empty_prompt"))

    @torch.no_grad()
    def conditions(self, text: Sequence[str] | Tensor, without: Tensor) -> dict[str, Tensor]:
        """The text's inputs of the network, of captions or their windows; those of images `without` their text,
        (B,) bool, are the empty ones."""
        return encode(self.text, self.asked_tokens(text, without), self.kept(without))

    def asked_tokens(self, text: Sequence[str] | Tensor, without: Tensor) -> Tensor:
        windows = text if isinstance(text, Tensor) else self.tokens(text)
        return torch.where(without[:, None, None], self.no_tokens, windows)

    def kept(self, without: Tensor) -> Tensor | None:
        """(B, 1), 0 where the text's states are zeroed; None where none ever are."""
        return (~without)[:, None].to(self.dtype) if self.zeroed else None

    def sizes(self, count: int, height: int, width: int) -> dict[str, Tensor]:
        """The image's size in pixels as SDXL and PixArt take it; nothing for others."""
        if wants_sizes(self.network):
            return {"sizes": size_ids((height, width)).to(self.device).expand(count, -1)}
        if isinstance(self.network, PixArt) and self.network.config.takes_sizes:
            row = torch.tensor([[float(height), float(width), height / width]], device=self.device)
            return {"sizes": row.expand(count, -1)}
        return {}


def _check_base(parts: Components) -> None:
    """A base takes text, and besides it an image's size at most."""
    network = parts.network
    if not takes_text(network) or not parts.text_encoders:
        must = "a text-to-image model, with cross-attention and a text encoder"
        raise PellucidError(rule("base", must, f"{parts.name} ({parts.pipeline_class})"), "adapt-base")
    extra = parts.extra.get("requires_aesthetics_score") or takes_labels(network)
    if extra or getattr(network.config, "time_cond_proj_dim", None) is not None:
        got = f"{parts.name}, which also takes a class, a score or its guidance"
        raise PellucidError(rule("base", "a model that takes text alone", got), "adapt-base")
    if parts.vae is not None and network.config.in_channels != parts.vae.config.latent_channels:
        must = f"{parts.vae.config.latent_channels}, the latents alone: inpainting models are not adapted"
        raise PellucidError(rule(f"in_channels of {parts.name}", must, network.config.in_channels), "adapt-base")


def encode(text: Sequence[TextPart], tokens: Tensor, kept: Tensor | None = None) -> dict[str, Tensor]:
    """Tokens (B, encoders, L) as a context (B, L, D) and, for SDXL, a pooled vector; times `kept`, (B, 1)."""
    states = [part.states(tokens[:, i], None) for i, part in enumerate(text)]
    context = torch.cat([one for one, _ in states], dim=-1)  # (B, L, ΣD)
    conditions = {"context": context if kept is None else context * kept[..., None]}
    if text[-1].penultimate:
        pooled = states[-1][1]  # (B, P)
        conditions["pooled"] = pooled if kept is None else pooled * kept
    return conditions


class AdapterTask(ABC):
    """Noise the data, run the base with its adapter, compute the loss. `network` holds only what is trained.

    A task makes its network's conditions from a batch (`inputs`); `masks` selects the images that drop a part of them,
    with one mask per part.
    """

    network: nn.Module

    def __init__(self, config: AdapterConfig, device: torch.device) -> None:
        self.base = FrozenPipeline(config.base, config.precision, device)
        self.objective, self.sampling = config.objective.build(self.base.parts), config.sampling
        self.saved_dtype = DTYPES[config.saved_dtype]
        self.shown: Batch | None = None  # the first examples that this process met, for sample images

    @property
    def frozen(self) -> tuple[nn.Module, ...]:
        return tuple(networks_of(self.base.parts))

    @abstractmethod
    def inputs(self, batch: Batch, masks: Mapping[str, Tensor], draws: Draws | None) -> dict[str, Tensor]:
        """The network's conditions; a part is dropped where its mask (B,) is true. `draws` vary it, where given."""

    @abstractmethod
    def save(self, network: nn.Module, folder: Path) -> None: ...

    def masks(self, draws: Draws, device: torch.device) -> dict[str, Tensor]:
        """Which images drop which part: (B,) bool each."""
        return {"text": draws.uniform("dropout", (), device) < self.objective.dropout}

    @torch.no_grad()
    def prepare(self, batch: Batch, draws: Draws) -> dict[str, Tensor]:
        captions_of(batch)
        if self.shown is None:
            self.shown = _first_of(batch, _MAX_SHOWN)
        x0 = self.base.latents(batch.images, draws)
        return self.objective.draw(x0, draws) | self.all_inputs(batch, self.masks(draws, x0.device), draws, x0.shape)

    def all_inputs(
        self, batch: Batch, masks: Mapping[str, Tensor], draws: Draws | None, shape: torch.Size
    ) -> dict[str, Tensor]:
        height, width = (side * self.base.factor for side in shape[2:])
        return self.inputs(batch, masks, draws) | self.base.sizes(shape[0], height, width)

    def loss(self, network: nn.Module, asked: Mapping[str, Tensor]) -> BatchLoss:
        return self.objective.loss(network, asked)

    @torch.no_grad()
    def images(self, network: nn.Module, count: int, seed: int) -> Tensor | None:
        """Images for the first examples of the data, at most as many as there are in a part of a batch."""
        if self.shown is None:
            return None
        shown, base = _first_of(self.shown, count), self.base
        size = [side if base.takes(shown.images) else side // base.factor for side in shown.images.shape[2:]]
        shape = torch.Size((len(shown.images), base.network.config.in_channels, *size))
        names = self.masks(Draws(0, 0, shape[0]), base.device)
        with_all, without = (
            self.all_inputs(shown, {n: torch.full_like(m, full) for n, m in names.items()}, None, shape)
            for full in (False, True)
        )
        sampling = Sampling(self.objective.schedule, self.objective.target, self.sampling)
        made = sampling.guided(network, with_all, without, shape, seed, base.device)
        return torch.cat([base.images(part) for part in made.split(DECODED_AT_ONCE)])


def _first_of(batch: Batch, count: int) -> Batch:
    """The first examples of a batch, at most `count`."""
    images, hints = batch.images[:count], {name: hint[:count] for name, hint in batch.hints.items()}
    captions = None if batch.captions is None else batch.captions[:count]
    return replace(batch, images=images, labels=None, captions=captions, hints=hints, tokens=None)


def hint_of(batch: Batch, name: str) -> Tensor:
    """A hint that the data must have, (B, C, H, W)."""
    if name not in batch.hints:
        got = ", ".join(batch.hints) or "none"
        raise PellucidError(rule("hints of the data", f"with one that is called {name}", got), "data-hints")
    return batch.hints[name]
