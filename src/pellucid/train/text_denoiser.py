"""Training a latent denoiser by text: a UNet or a PixArt over a frozen VAE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.components import Components
from pellucid.interop.family import check_fit
from pellucid.interop.save import save_components
from pellucid.models.clip import CLIPTextEncoder
from pellucid.models.dit import PixArt
from pellucid.models.unet import UNet
from pellucid.models.vae import AutoencoderKL
from pellucid.train.autoencoder import decoded, read_vae
from pellucid.train.config import ObjectiveConfig, check_beginning
from pellucid.train.denoiser import DenoisingTask, scheduler_of
from pellucid.train.draws import Draws, mixed
from pellucid.train.initial import begun
from pellucid.train.sampling import Sampling, SamplingConfig
from pellucid.train.source import Batch
from pellucid.train.text import CaptionIds, TextConfig, tokens

STABLE_DIFFUSION, PIXART = "StableDiffusionPipeline", "PixArtAlphaPipeline"


def default_sampling() -> SamplingConfig:
    return SamplingConfig("dpmpp_2m", "trailing", 20, 4.0)


@dataclass(frozen=True)
class TextDenoiserConfig:
    """`network` is a config of diffusers (UNet2DConditionModel or PixArtTransformer2DModel), or `start` the folder of a
    pipeline whose network is trained further. `vae` is the folder of a VAE.

    Data are images, which the VAE encodes as they are used, or latents from a cache. `prompts` are what the
    sample images show; `sampling` is also what the saved pipeline samples with unless a request says otherwise.
    """

    objective: ObjectiveConfig
    vae: str
    text: TextConfig
    network: Mapping[str, Any] = field(default_factory=dict)
    start: str = ""
    sampling: SamplingConfig = field(default_factory=default_sampling)
    prompts: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        check_beginning(self.network, self.start)
        if not self.prompts:
            raise PellucidError(rule("prompts", "a list with at least one", []), "config-value")

    def build(self, seed: int, device: torch.device) -> TextDenoiserTask:
        return TextDenoiserTask(self, seed, device)


class TextAndDenoiser(nn.Module):
    """A text encoder and the denoiser that reads it, trained as one network."""

    def __init__(self, text_encoder: CLIPTextEncoder, denoiser: nn.Module) -> None:
        super().__init__()
        self.text_encoder, self.denoiser = text_encoder, denoiser

    def forward(self, x: Tensor, time: Tensor, ids: Tensor) -> Tensor:
        """x (B, C, h, w), time (B,), ids (B, L) → what the denoiser predicts."""
        return self.denoiser(x, time, context=self.text_encoder(ids).last)


class TextDenoiserTask(DenoisingTask):
    """Noise latents, give the network their captions, grade its answer. Dropped captions become the empty prompt."""

    def __init__(self, config: TextDenoiserConfig, seed: int, device: torch.device) -> None:
        self.config, self.objective, self.device = config, config.objective.build(), device
        self.scheduler = scheduler_of(self.objective, config.sampling)  # refused now, and not after the last step
        denoiser = begun(config.network, config.start, seed)
        self.vae = read_vae(config.vae).to(device)
        self.text = config.text.build(mixed(seed, 1))
        self.text.encoder.to(device)
        self.ids, self.no_ids = CaptionIds(self.text.tokenizer), tokens(self.text.tokenizer, [""]).to(device)
        check_parts(denoiser, self.vae, self.text.encoder)
        side = denoiser.config.sample_size  # type: ignore[union-attr]
        self.shape = (self.vae.config.latent_channels, side, side)
        self.pixels = (self.vae.config.in_channels, side * self.vae.config.factor, side * self.vae.config.factor)
        self.network: nn.Module = TextAndDenoiser(self.text.encoder, denoiser) if self.text.trained else denoiser
        self.network.to(device)

    @property
    def frozen(self) -> tuple[nn.Module, ...]:
        return (self.vae,) if self.text.trained else (self.vae, self.text.encoder)

    # --- training

    def prepare(self, batch: Batch, draws: Draws) -> dict[str, Tensor]:
        dropped = (draws.uniform("dropout") < self.objective.dropout).to(self.device, non_blocking=True)
        conditions = self.read(torch.where(dropped[:, None], self.no_ids, self.ids.of(batch).to(self.device)))
        return self.objective.draw(self.diffused(batch.images, draws), draws) | conditions

    def conditions(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return self.read(tokens(self.text.tokenizer, captions).to(self.device))

    def read(self, ids: Tensor) -> dict[str, Tensor]:
        """The conditions of ids (B, L): themselves where the network holds the encoder, else the encoder's states."""
        return {"ids": ids} if self.text.trained else {"context": self.text.context(ids)}

    # --- what comes out

    @torch.no_grad()
    def images(self, network: nn.Module, count: int, seed: int) -> Tensor:
        """Guided samples of the prompts in turn."""
        prompts = [self.config.prompts[i % len(self.config.prompts)] for i in range(count)]
        sampling = Sampling(self.objective.schedule, self.objective.target, self.config.sampling)
        conditions, unconditional = self.conditions(prompts), self.conditions([""] * count)
        x0 = sampling.guided(network, conditions, unconditional, (count, *self.shape), seed, self.device)
        return decoded(self.vae, x0).add(1).div(2).clamp(0, 1)

    def save(self, network: nn.Module, folder: Path) -> None:
        """The folder of a StableDiffusionPipeline, or of a PixArtAlphaPipeline with CLIP for its text."""
        save_components(self.components(network, folder.name), folder, overwrite=True)

    def components(self, network: nn.Module, name: str) -> Components:
        trained = isinstance(network, TextAndDenoiser)
        denoiser = network.denoiser if trained else network
        kind = STABLE_DIFFUSION if isinstance(denoiser, UNet) else PIXART
        scheduler = dict(self.scheduler)
        if kind == STABLE_DIFFUSION and "steps_offset" in scheduler:
            scheduler["steps_offset"] = 1  # what diffusers' pipeline sets, with a warning, where it is not
        encoder = network.text_encoder if trained else self.text.encoder
        parts = self.pipeline_parts(name, kind, denoiser, scheduler)
        return replace(parts, text_encoders=(encoder,), tokenizers=(self.text.tokenizer,))


def check_parts(denoiser: nn.Module, vae: AutoencoderKL, encoder: CLIPTextEncoder) -> None:
    """The denoiser takes this text and these latents, and nothing else."""
    config: Any = denoiser.config
    if isinstance(denoiser, UNet):
        plain = config.cross_attention_dim is not None and config.addition_embed_type is None
        if not plain or denoiser.class_embedding is not None or config.time_cond_proj_dim is not None:
            got = f"a {config.class_name} that takes something else"
            raise PellucidError(rule("network", "one that takes a time and a text, nothing more", got), "condition")
    elif isinstance(denoiser, PixArt):
        width = config.caption_channels or config.cross_attention_dim
        if width != encoder.config.hidden_size:
            must = f"{encoder.config.hidden_size}, the text encoder's width"
            raise PellucidError(rule("network.caption_channels", must, width), "components-fit")
        if config.takes_sizes:
            raise PellucidError(rule("network.use_additional_conditions", "false", True), "condition")
    else:
        must = "UNet2DConditionModel or PixArtTransformer2DModel"
        raise PellucidError(rule("network._class_name", must, type(denoiser).__name__), "class")
    check_fit(denoiser, vae, (encoder,))
    if config.in_channels != vae.config.latent_channels:
        must = f"{vae.config.latent_channels}, the VAE's latent channels"
        raise PellucidError(rule("network.in_channels", must, config.in_channels), "components-fit")
    if not isinstance(config.sample_size, int):
        raise PellucidError(rule("network.sample_size", "a whole number", config.sample_size), "config-missing")
