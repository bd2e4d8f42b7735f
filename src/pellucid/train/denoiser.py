"""Training a denoiser without text: on pixels or latents, unconditional or by class."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pellucid.core.dialect_diffusers import SPACINGS
from pellucid.core.errors import PellucidError, rule
from pellucid.core.filters import Clip
from pellucid.core.grid import named as grid_named
from pellucid.core.schedule import DiscreteVP
from pellucid.interop import diffusers_export
from pellucid.interop.components import Components
from pellucid.interop.diffusers_config import SchedulerSettings
from pellucid.interop.save import save_components
from pellucid.models.dit import DiT
from pellucid.models.unet import UNet
from pellucid.models.vae import AutoencoderKL
from pellucid.train.autoencoder import decoded, drawn_latents, read_vae
from pellucid.train.config import ObjectiveConfig, check_beginning
from pellucid.train.draws import Draws
from pellucid.train.initial import begun
from pellucid.train.objective import BatchLoss, Objective
from pellucid.train.sampling import Sampling, SamplingConfig
from pellucid.train.source import Batch

_log = logging.getLogger("pellucid.train")


@dataclass(frozen=True)
class DenoiserConfig:
    """`network` is a config of diffusers, with its `_class_name`; or `start` is the folder of a pipeline whose network
    is trained further. With `labels` it is conditioned on the class of an image; the null label, for images that drop
    theirs, is the last of its embeddings. `vae` is the folder of the VAE in whose latents a DiT works; without it, a
    DiT works on pixels, as UNets do."""

    objective: ObjectiveConfig
    network: Mapping[str, Any] = field(default_factory=dict)
    start: str = ""
    vae: str = ""
    condition: Literal["none", "labels"] = "none"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        check_beginning(self.network, self.start)

    def build(self, seed: int, device: torch.device) -> DenoiserTask:
        return DenoiserTask(self, seed, device)


class DenoisingTask:
    """What denoising with and without text share: images or latents go in, a pipeline with its scheduler comes out."""

    objective: Objective
    vae: AutoencoderKL | None
    shape: tuple[int, int, int]  # of what is diffused
    pixels: tuple[int, int, int]  # of an image

    @torch.no_grad()
    def diffused(self, images: Tensor, draws: Draws) -> Tensor:
        """What is noised: pixels; or latents, of images or as a cache has them."""
        if tuple(images.shape[1:]) == self.shape:
            return images
        if self.vae is None or tuple(images.shape[1:]) != self.pixels:
            must = f"of shape {self.pixels}" + ("" if self.vae is None else f", or latents of {self.shape}")
            raise PellucidError(rule("images of the data", must, tuple(images.shape[1:])), "data-shape")
        return drawn_latents(self.vae, images, draws)

    def loss(self, network: nn.Module, asked: Mapping[str, Tensor]) -> BatchLoss:
        return self.objective.loss(network, asked)

    def pipeline_parts(self, name: str, kind: str, network: nn.Module, scheduler: dict[str, Any]) -> Components:
        """Everything but the text side."""
        return Components(
            name=name,
            pipeline_class=kind,
            network=network,
            vae=self.vae,
            text_encoders=(),
            tokenizers=(),
            image_encoder=None,
            controlnets=(),
            scheduler=scheduler,
            schedule=self.objective.schedule,
            target=self.objective.target,
        )


def scheduler_of(objective: Objective, sampling: SamplingConfig) -> dict[str, Any]:
    """The config of the diffusers class that samples so from a network that was trained so."""
    grid = grid_named(sampling.grid)
    settings = SchedulerSettings("", sampling.sampler, objective.schedule, objective.target, grid, {}, None)
    return diffusers_export.write(settings)


class DenoiserTask(DenoisingTask):
    """The plain task: noise images, ask the network, grade its answer."""

    def __init__(self, config: DenoiserConfig, seed: int, device: torch.device) -> None:
        self.config, self.objective = config, config.objective.build()
        network = begun(config.network, config.start, seed)
        if not isinstance(network, UNet | DiT):
            must, got = "a UNet, or a DiT", type(network).__name__
            raise PellucidError(rule("network of a denoiser without text", must, got), "class")
        self.vae = read_vae(config.vae).to(device) if config.vae else None
        _check(config, network, self.vae)
        size, factor = network.config.sample_size, 1 if self.vae is None else self.vae.config.factor
        self.scheduler = self.exported()  # refused now, and not after the last step
        self.sampling().plan()
        self.shape = (network.config.in_channels, size, size)
        self.pixels = self.shape if self.vae is None else (self.vae.config.in_channels, size * factor, size * factor)
        self.null = _null_label(network)
        self.checked = False
        self.device = device
        self.network: nn.Module = network.to(device)

    @property
    def frozen(self) -> tuple[nn.Module, ...]:
        return () if self.vae is None else (self.vae,)

    def prepare(self, batch: Batch, draws: Draws) -> dict[str, Tensor]:
        images = self.diffused(batch.images, draws)
        asked = self.objective.draw(images, draws)
        if self.config.condition == "labels":
            if batch.labels is None:
                raise PellucidError(rule("data", "with labels for condition = labels", "none"), "data-labels")
            self.check_labels(batch.labels)
            dropped = draws.uniform("dropout", (), images.device) < self.objective.dropout
            asked["labels"] = torch.where(dropped, self.null, batch.labels)
        return asked

    def check_labels(self, labels: Tensor) -> None:
        """Refuses a class without an embedding, or with that of the null label; on a GPU only once, since it waits."""
        if self.checked and labels.is_cuda:
            return
        most, self.checked = int(labels.max()), True
        if most >= self.null:
            if isinstance(self.network, DiT):
                raise PellucidError(
                    rule("num_embeds_ada_norm", f"above the largest label, {most}", self.null), "condition"
                )
            must = f"above the largest label and the null label ({most} + 2)"
            raise PellucidError(rule("num_class_embeds", must, self.null + 1), "condition")

    def sampling(self, grid: str | None = None) -> Sampling:
        """As the config says, or on another grid."""
        config = self.config.sampling if grid is None else replace(self.config.sampling, grid=grid)
        return Sampling(self.objective.schedule, self.objective.target, config, self.clip)

    @property
    def clip(self) -> Clip | None:
        """Pixels end at ±1; latents do not."""
        return Clip() if self.vae is None else None

    def images(self, network: nn.Module, count: int, seed: int) -> Tensor:
        def labels(first: int, last: int) -> dict[str, Tensor]:
            return {"labels": torch.arange(first, last, device=self.device) % self.null}

        conditions = labels if self.config.condition == "labels" else None
        made = self.sampling().batches(
            network, self.shape, count, seed, device=self.device, batch=count, inputs=conditions
        )
        x0 = torch.cat(list(made))
        return (x0 if self.vae is None else decoded(self.vae, x0)).add(1).div(2).clamp(0, 1)

    def save(self, network: nn.Module, folder: Path) -> None:
        """The folder of a DiTPipeline; for a UNet of a DDIMPipeline, or of a DDPMPipeline, which keeps schedulers."""
        is_ddim = self.scheduler["_class_name"] == "DDIMScheduler"
        kind = "DiTPipeline" if isinstance(network, DiT) else "DDIMPipeline" if is_ddim else "DDPMPipeline"
        save_components(self.pipeline_parts(folder.name, kind, network, self.scheduler), folder, overwrite=True)

    def exported(self) -> dict[str, Any]:
        """The config of the scheduler that is saved: DDIM's where the schedule is a table, else that of `sampling`.

        diffusers' other schedulers do not clip. Where its DDIM does not have the grid, `leading` is saved.
        """
        config, schedule, target = self.config.sampling, self.objective.schedule, self.objective.target
        grid = grid_named(config.grid)
        if not isinstance(schedule, DiscreteVP):
            return scheduler_of(self.objective, config)
        shipped = grid if grid.name in SPACINGS else grid_named("leading")
        if shipped is not grid:
            _log.warning("the model is saved with the grid leading: diffusers' DDIM has no %s", grid.name)
        return diffusers_export.write(SchedulerSettings("", "ddim", schedule, target, shipped, {}, self.clip))


def _null_label(network: UNet | DiT) -> int:
    """The label of images that drop theirs: the last embedding of a UNet; a DiT has one more than classes."""
    config = network.config
    return config.null_label if isinstance(network, DiT) else (config.num_class_embeds or 1) - 1


def _check(config: DenoiserConfig, network: UNet | DiT, vae: AutoencoderKL | None) -> None:
    """Refuses parts that do not fit together, before the first step."""
    if isinstance(network, DiT):
        _check_dit(config, network, vae)
    else:
        _check_unet(config, network)
    if config.objective.dropout and config.condition == "none":
        raise PellucidError(rule("dropout", "0 without a condition", config.objective.dropout), "objective")
    if config.sampling.guidance != 1.0:
        raise PellucidError(rule("sampling.guidance", "1 without a text", config.sampling.guidance), "config-value")
    if not isinstance(network.config.sample_size, int):
        got = network.config.sample_size
        raise PellucidError(rule("network.sample_size", "a whole number", got), "config-missing")


def _check_unet(config: DenoiserConfig, network: UNet) -> None:
    classes = network.config.num_class_embeds
    if config.vae:
        advice = 'A UNet on latents takes a text: task.kind = "text_denoiser".'
        raise PellucidError(rule("vae", "left out for a UNet", config.vae, advice), "condition")
    if network.config.cross_attention_dim is not None:
        must = "one that takes a time, and a class at most"
        raise PellucidError(rule("network", must, f"a {network.config.class_name}, which takes a text"), "condition")
    if (config.condition == "labels") != (classes is not None):
        must = "labels exactly where the network has num_class_embeds"
        raise PellucidError(rule("condition", must, config.condition), "condition")
    if classes is not None and classes < 2:
        raise PellucidError(rule("num_class_embeds", "at least 2: a class and the null label", classes), "condition")


def _check_dit(config: DenoiserConfig, network: DiT, vae: AutoencoderKL | None) -> None:
    channels = network.config.in_channels
    if config.condition != "labels":
        raise PellucidError(rule("condition", "labels for a DiT, which takes a class", config.condition), "condition")
    if network.config.channels_out != channels:
        got = network.config.channels_out
        raise PellucidError(rule("network.out_channels", f"in_channels, {channels}", got), "components-fit")
    if vae is not None and vae.config.factor == 1:
        raise PellucidError(rule("vae", "one that makes images smaller", config.vae), "components-fit")
    if vae is not None and vae.config.latent_channels != channels:
        must = f"{vae.config.latent_channels}, the channels of its VAE's latents"
        raise PellucidError(rule("network.in_channels", must, channels), "components-fit")
