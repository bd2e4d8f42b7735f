"""Images known to be of a model's kind, and its network as the detectors call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.core import target as targets
from pellucid.core.denoiser import input_scale, read_output
from pellucid.core.errors import PellucidError, rule
from pellucid.core.noise import Philox
from pellucid.core.schedule import Level, Schedule, Target
from pellucid.evidence.doctor.subject import KnownImages, Subject, UnsupportedCheck
from pellucid.evidence.metrics.fid import Statistics
from pellucid.evidence.metrics.images import ImageSet, open_images
from pellucid.interop.source import expanded
from pellucid.models.dit import DiT
from pellucid.models.guided import read
from pellucid.models.vae import to_diffusion
from pellucid.pipeline.encoders.conditions import make_conditions, takes_labels, takes_text
from pellucid.pipeline.encoders.image_inputs import is_inpainting
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.prepare import working_dtype
from pellucid.pipeline.request import Request
from pellucid.train.draws import Draws
from pellucid.train.image_folder import ImageFolder
from pellucid.train.scenes_source import ScenesConfig
from pellucid.train.source import Batch, Source

# --- known images -------------------------------------------------------------------------------------------------

_MOST_IMAGES = 64
_SCENES = "scenes"


def open_data(where: str, size: int, count: int = _MOST_IMAGES) -> KnownImages:
    """At most `count` images of a folder (with its captions or classes), of a file of arrays, or of scenes."""
    if where == _SCENES:
        return _from_source(ScenesConfig(size=size, split="any").open(), count, _SCENES)
    if expanded(where).is_dir():
        return _from_source(ImageFolder(expanded(where), size), count, where)
    found = open_images(where)
    if isinstance(found, Statistics):
        raise PellucidError(rule("data", "images", f"statistics in {where}"), "data")
    return KnownImages(_first_images(found, size, count), name=where)


def _from_source(source: Source, count: int, name: str) -> KnownImages:
    """Images spread over all that a source has."""
    count = min(count, len(source))
    at = torch.arange(count) if source.endless else torch.linspace(0, len(source) - 1, count).round().long()
    batch: Batch = source.batch(at, Draws(0, 0, count), torch.device("cpu"))
    labels = None if batch.labels is None else tuple(int(label) for label in batch.labels)
    return KnownImages(batch.images.float() / 2 + 0.5, batch.captions, labels, name)


def _first_images(found: ImageSet, size: int, count: int) -> Tensor:
    """(N, 3, size, size) in [0, 1]: the shorter side resized, the longer one cut at its centre."""
    kept: list[Tensor] = []
    for chunk in found.chunks(lambda number, why: None):
        pixels = chunk[: count - sum(map(len, kept))].float() / 255
        high, wide = pixels.shape[-2:]
        side = min(high, wide)
        top, left = (high - side) // 2, (wide - side) // 2
        square = pixels[..., top : top + side, left : left + side]
        if side != size:
            square = F.interpolate(square, (size, size), mode="bicubic", antialias=True).clamp(0, 1)
        kept.append(square)
        if sum(map(len, kept)) >= count:
            break
    return torch.cat(kept)


# --- the network --------------------------------------------------------------------------------------------------

_AT_ONCE = 16  # images in one call
_STREAMS = 1 << 20  # seeds that are kept apart for the noise of one level


@dataclass(frozen=True)
class Probe:
    """A network, what its files say of it, and N known clean x0 with the network's other inputs for each."""

    network: Callable[..., Tensor]
    schedule: Schedule
    target: Target
    clean: Tensor = field(repr=False)  # (N, C, H, W), as the diffusion sees them
    inputs: Mapping[str, Tensor] = field(default_factory=dict, repr=False)  # one row per image
    dtype: torch.dtype | None = None
    few: bool = False  # calls are slow: ask less

    def __len__(self) -> int:
        return len(self.clean)

    def noise(self, index: int, images: range) -> Tensor:
        """The noise of some images at the level of this number: the same for every caller."""
        source = Philox([_STREAMS * (index + 1) + i for i in images])
        return source.first(self.clean.shape[1:], self.clean, range(len(images)))

    @torch.no_grad()
    def ask(self, x: Tensor, time: float, images: range) -> Tensor:
        """The raw output for x, which is already scaled as the network takes it, at a time."""
        outs = []
        for start in range(0, len(x), _AT_ONCE):
            part = x[start : start + _AT_ONCE]
            rows = slice(images.start + start, images.start + start + len(part))
            inputs = {name: value[rows] for name, value in self.inputs.items()}
            kind = self.dtype or part.dtype
            out = self.network(part.to(kind), torch.full((len(part),), time, device=x.device), **inputs)
            outs.append(read(out, part).float())
        return torch.cat(outs)

    def x0(self, x: Tensor, level: Level, time: float, images: range) -> Tensor:
        """The network's x0 for x at a level, when it is passed this time."""
        out = self.ask(x * input_scale(self.schedule, level), time, images)
        k_x, k_out = read_output(self.schedule, self.target, "x0", level)
        return x * k_x + out * k_out


def probe_of(subject: Subject, most: int = _MOST_IMAGES) -> Probe:
    """The probe of a subject with a network and data."""
    assert subject.data is not None
    if subject.probe is not None:
        return replace(subject.probe, clean=subject.probe.clean[:most])
    assert subject.pipeline is not None
    return pipeline_probe(subject.pipeline, subject.data.first(most))


def pipeline_probe(pipe: Pipeline, data: KnownImages) -> Probe:
    """The probe of a pipeline whose output can be read, with all of the data."""
    check_callable(pipe)
    if is_inpainting(pipe.components):
        raise UnsupportedCheck("an inpainting network takes a mask and an image beside x")
    if getattr(pipe.components.network.config, "time_cond_proj_dim", None) is not None:
        raise UnsupportedCheck("a guidance-distilled network predicts no plain target")
    return any_probe(pipe, data)


def any_probe(pipe: Pipeline, data: KnownImages) -> Probe:
    parts = pipe.components
    clean, inputs = _clean_latents(pipe, data.pixels), _conditions_of(pipe, data)
    return Probe(
        parts.network, parts.schedule, targets.named(parts.target), clean, inputs, working_dtype(parts.network)
    )


def check_callable(pipe: Pipeline) -> None:
    """Refuses a pipeline whose networks cannot be called here and now, or take no images in colour."""
    if pipe.policy.offload != "none":
        raise UnsupportedCheck("the networks are offloaded; load the model without")
    network: Any = pipe.components.network
    channels = network.config.in_channels
    if pipe.components.vae is None and channels not in (1, 3):
        raise UnsupportedCheck(f"the network takes {channels} channels, and images have 3, or 1 in grey")


@torch.no_grad()
def _clean_latents(pipe: Pipeline, pixels: Tensor) -> Tensor:
    """(N, C, H, W) float32: images (N, 3, H, W) in [0, 1] as the diffusion sees them; the posterior's mean."""
    x = pixels.to(pipe.device, torch.float32) * 2 - 1
    vae, network = pipe.components.vae, pipe.components.network
    if vae is None:
        return x if network.config.in_channels != 1 else x.mean(1, keepdim=True)
    weight = next(vae.parameters())
    means = [vae.encode(x[i : i + _AT_ONCE].to(weight)).mean for i in range(0, len(x), _AT_ONCE)]
    return to_diffusion(vae.config, torch.cat(means).float())


def _conditions_of(pipe: Pipeline, data: KnownImages) -> dict[str, Tensor]:
    """The network's inputs beside x and time: captions and classes where they are known, else empty ones."""
    parts, count = pipe.components, len(data.pixels)
    network: Any = parts.network
    options: dict[str, Any] = {}
    if takes_text(network):
        if not parts.text_encoders:
            raise UnsupportedCheck("the model's text encoder is not here, so its network cannot be called")
        options["prompt"] = list(data.captions) if data.captions is not None else [""] * count
    unlabelled = takes_labels(network) and data.labels is None
    if takes_labels(network):
        null = (network.config.num_class_embeds or 1) - 1 if not isinstance(network, DiT) else 0
        options["label"] = [null] * count if unlabelled else list(data.labels or ())
    high, wide = data.pixels.shape[-2:]
    conditions = make_conditions(parts, Request(**options), (wide, high), 1.0, True).to(pipe.device)
    if unlabelled and isinstance(network, DiT):
        assert conditions.uncond is not None
        return dict(conditions.uncond)
    return {name: value.expand(count, *value.shape[1:]) for name, value in conditions.cond.items()}
