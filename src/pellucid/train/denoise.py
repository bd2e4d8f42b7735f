"""Training a denoiser on pixels: unconditional, or told a class."""

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
from pellucid.core.schedule import Tabled
from pellucid.interop import diffusers_export, source
from pellucid.interop.components import KINDS, NETWORK_PARTS, Components
from pellucid.interop.diffusers_config import Reading
from pellucid.interop.save import save_components
from pellucid.models.unet import UNet
from pellucid.train.config import ObjectiveConfig, check_beginning
from pellucid.train.draws import Draws, seeded
from pellucid.train.initial import start_small
from pellucid.train.objective import Graded
from pellucid.train.sampling import Sampling, SamplingConfig
from pellucid.train.source import Batch

log = logging.getLogger("pellucid.train")


@dataclass(frozen=True)
class DenoiserConfig:
    """`network` is a config of diffusers, with its `_class_name`; or `start` is the folder of a pipeline whose network
    is trained further. `labels` tells it the class of a picture; the null label, for pictures that drop theirs, is the
    last of its embeddings."""

    objective: ObjectiveConfig
    network: Mapping[str, Any] = field(default_factory=dict)
    start: str = ""
    condition: Literal["none", "labels"] = "none"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        check_beginning(self.network, self.start)

    def build(self, seed: int, device: torch.device) -> DenoiserTask:
        return DenoiserTask(self, seed, device)


def fresh(raw: Mapping[str, Any], seed: int) -> nn.Module:
    """A network of a diffusers config, with random weights that a seed decides."""
    kind = raw.get("_class_name")
    if not isinstance(kind, str) or kind not in KINDS:
        raise PellucidError(rule("network._class_name", "one of " + ", ".join(KINDS), kind), "class")
    with seeded(seed):
        try:
            return start_small(KINDS[kind].build(KINDS[kind].read(raw)))
        except (ValueError, TypeError, ArithmeticError) as error:
            if isinstance(error, PellucidError):
                raise
            raise PellucidError(rule("network", f"a {kind} that can be built", str(error)), "network") from None


def begun(network: Mapping[str, Any], start: str, seed: int) -> nn.Module:
    """The denoiser as the first step finds it: fresh, or that of a pipeline's folder, in float32."""
    if not start:
        return fresh(network, seed)
    folder = source.locate(start)
    found = [folder / part for part in NETWORK_PARTS if (folder / part).is_dir()]
    if not found:
        raise PellucidError(rule("start", f"a folder with {' or '.join(NETWORK_PARTS)}", start), "not-a-component")
    return source.load_component(found[0], dtype=torch.float32).train().requires_grad_(True)


class DenoiserTask:
    """The plain task: noise pictures, ask the network, grade its answer."""

    def __init__(self, config: DenoiserConfig, seed: int, device: torch.device) -> None:
        self.config, self.objective = config, config.objective.build()
        network = begun(config.network, config.start, seed)
        if not isinstance(network, UNet):
            raise PellucidError(rule("network of a pixel denoiser", "a UNet", type(network).__name__), "class")
        check(config, network)
        size, classes = network.config.sample_size, network.config.num_class_embeds
        self.scheduler = self.exported()  # refused now, and not after the last step
        self.sampling().plan()
        self.shape = (network.config.in_channels, size, size)
        self.null = (classes or 1) - 1
        self.checked = False
        self.device = device
        self.network: nn.Module = network.to(device)

    def prepare(self, batch: Batch, draws: Draws) -> dict[str, Tensor]:
        if batch.images.shape[1:] != self.shape:
            got = tuple(batch.images.shape[1:])
            raise PellucidError(rule("pictures of the data", f"of shape {self.shape}", got), "data-shape")
        images = batch.images
        asked = self.objective.draw(images, draws)
        if self.config.condition == "labels":
            if batch.labels is None:
                raise PellucidError(rule("data", "with labels for condition = labels", "none"), "data-labels")
            self.check_labels(batch.labels)
            dropped = draws.uniform("dropout", (), images.device) < self.objective.dropout
            asked["labels"] = torch.where(dropped, self.null, batch.labels)
        return asked

    def check_labels(self, labels: Tensor) -> None:
        """Refuses a class that has no embedding, or has the null label's; a GPU is asked once, as it would wait."""
        if self.checked and labels.is_cuda:
            return
        most, self.checked = int(labels.max()), True
        if most >= self.null:
            must = f"above the largest label and the null label ({most} + 2)"
            raise PellucidError(rule("num_class_embeds", must, self.null + 1), "condition")

    def loss(self, network: nn.Module, asked: Mapping[str, Tensor]) -> Graded:
        return self.objective.loss(network, asked)

    def sampling(self, grid: str | None = None) -> Sampling:
        """As the config says, or on another grid."""
        config = self.config.sampling if grid is None else replace(self.config.sampling, grid=grid)
        return Sampling(self.objective.schedule, self.objective.target, config, Clip())

    def pictures(self, network: nn.Module, count: int, seed: int) -> Tensor:
        def labels(first: int, last: int) -> dict[str, Tensor]:
            return {"labels": torch.arange(first, last, device=self.device) % self.null}

        told = labels if self.config.condition == "labels" else None
        made = self.sampling().batches(network, self.shape, count, seed, device=self.device, batch=count, inputs=told)
        return torch.cat(list(made)).add(1).div(2).clamp(0, 1)

    def save(self, network: nn.Module, folder: Path) -> None:
        """The folder of a DDIMPipeline; of a DDPMPipeline, which keeps any scheduler, where it is not DDIM's."""
        is_ddim = self.scheduler["_class_name"] == "DDIMScheduler"
        parts = Components(
            name=folder.name,
            pipeline_class="DDIMPipeline" if is_ddim else "DDPMPipeline",
            network=network,
            vae=None,
            text_encoders=(),
            tokenizers=(),
            image_encoder=None,
            controlnets=(),
            scheduler=self.scheduler,
            schedule=self.objective.schedule,
            target=self.objective.target,
        )
        save_components(parts, folder, overwrite=True)

    def exported(self) -> dict[str, Any]:
        """The config of the scheduler to ship: DDIM's where the schedule is a table, else that of `sampling`.

        diffusers' other schedulers know no clipping. Where DDIM there has no such grid, `leading` is shipped.
        """
        config, schedule, target = self.config.sampling, self.objective.schedule, self.objective.target
        grid = grid_named(config.grid)
        if not isinstance(schedule, Tabled):
            return diffusers_export.write(Reading("", config.sampler, schedule, target, grid, {}, None))
        shipped = grid if grid.name in SPACINGS else grid_named("leading")
        if shipped is not grid:
            log.warning("the model is shipped with the grid leading: diffusers' DDIM has no %s", grid.name)
        return diffusers_export.write(Reading("", "ddim", schedule, target, shipped, {}, Clip()))


def check(config: DenoiserConfig, network: UNet) -> None:
    """Refuses parts that do not fit together, before the first step."""
    classes, size = network.config.num_class_embeds, network.config.sample_size
    if network.config.cross_attention_dim is not None:
        must = "told a time, and a class at most"
        raise PellucidError(rule("network", must, f"a {network.config.class_name}, which is told a text"), "condition")
    if (config.condition == "labels") != (classes is not None):
        must = "labels exactly where the network has num_class_embeds"
        raise PellucidError(rule("condition", must, config.condition), "condition")
    if classes is not None and classes < 2:
        raise PellucidError(rule("num_class_embeds", "at least 2: a class and the null label", classes), "condition")
    if config.objective.dropout and config.condition == "none":
        raise PellucidError(rule("dropout", "0 without a condition", config.objective.dropout), "objective")
    if config.sampling.guidance != 1.0:
        raise PellucidError(rule("sampling.guidance", "1 for pixels", config.sampling.guidance), "config-value")
    if not isinstance(size, int):
        raise PellucidError(rule("network.sample_size", "a whole number", size), "config-missing")
