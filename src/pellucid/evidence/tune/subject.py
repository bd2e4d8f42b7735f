"""What is tuned for: a model with its schedule, target and guidance, as a denoiser of any pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.core.loop import Denoiser
from pellucid.core.noise import Philox
from pellucid.core.schedule import Schedule, Target
from pellucid.evidence.tune.pairs import Pairs
from pellucid.interop import diffusers_config
from pellucid.models.dit import DiT
from pellucid.models.guidance import Guidance
from pellucid.models.guided import GuidedDenoiser
from pellucid.models.unet import UNet
from pellucid.pipeline import fingerprint, image_inputs
from pellucid.pipeline.conditions import make_conditions, takes_labels, takes_text
from pellucid.pipeline.denoising import half_of
from pellucid.pipeline.pipeline import Pipeline, check_layers, told_scale
from pellucid.pipeline.request import MAX_BATCH, Request

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Subject:
    """`denoiser` of some pairs is for `run`; `shape` is that of one x."""

    name: str
    schedule: Schedule
    target: Target
    shape: tuple[int, ...]
    denoiser: Callable[[Pairs], Denoiser]
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32  # of x
    guidance: str = "off"
    fingerprint: str = ""
    takes_text: bool = False
    classes: int | None = None
    most: int = MAX_BATCH  # pairs of one call

    def noise(self, pairs: Pairs) -> Tensor:
        """Unit noise (B, …): that of `pellucid sample` with the same seeds."""
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return Philox(pairs.seeds).first(self.shape, like, range(len(pairs)))


def of_pipeline(pipe: Pipeline, guidance: Any = None) -> Subject:
    """A loaded model at the guidance that is asked for, or at its own."""
    parts, network = pipe.components, pipe.components.network
    asked = pipe.guidance_of(Request(guidance=guidance))
    check_layers(network, asked)
    if image_inputs.is_inpainting(parts):
        raise PellucidError(rule("--model", "one that begins with noise alone", parts.name), "model")
    if pipe.policy.offload != "none":
        raise PellucidError(rule("offload", "none: gradients need the weights", pipe.policy.offload), "policy")
    size = pipe.size_of(Request())
    text, classes = takes_text(network), classes_of(network)
    reading = diffusers_config.read(parts.scheduler, strict=False) if parts.scheduler else None
    embedded = isinstance(network, UNet) and network.config.time_cond_proj_dim is not None
    scale, guided = (told_scale(asked), Guidance(1.0)) if embedded else (1.0, asked)
    called = pipe.policy.ready(network)

    @lru_cache(maxsize=16)  # the watched pairs and those of a sweep are asked for again and again
    def conditions(prompts: tuple[str, ...] | None, labels: tuple[int, ...] | None) -> Any:
        with torch.no_grad():
            request = Request(prompt=prompts, label=labels)
            return make_conditions(parts, request, size, scale, guided.needs_uncond).to(pipe.device)

    def denoiser(pairs: Pairs) -> Denoiser:
        told = conditions(pairs.prompts, pairs.labels)
        cond, uncond = (None if one is None else filled(one, len(pairs)) for one in (told.cond, told.uncond))
        return GuidedDenoiser(
            called,
            parts.schedule,
            parts.target,  # type: ignore[arg-type]
            cond or {},
            uncond,
            guided,
            x0_filter=None if reading is None else reading.x0_filter,
            dtype=half_of(network),
        )

    return Subject(
        name=parts.name,
        schedule=parts.schedule,
        target=parts.target,  # type: ignore[arg-type]
        shape=(pipe.channels, size[1] // pipe.factor, size[0] // pipe.factor),
        denoiser=denoiser,
        device=pipe.device,
        guidance=asked.text(),
        fingerprint=fingerprint.of_model(parts),
        takes_text=text,
        classes=classes,
    )


def filled(inputs: dict[str, Any], count: int) -> dict[str, Any]:
    """Inputs of so many images: those of an unconditional model are made for one."""
    return {k: v.expand(count, *v.shape[1:]) if len(v) == 1 != count else v for k, v in inputs.items()}


def classes_of(network: Any) -> int | None:
    """How many classes a network makes images of; None where it has none."""
    if not takes_labels(network):
        return None
    return int(network.config.null_label if isinstance(network, DiT) else network.config.num_class_embeds)
