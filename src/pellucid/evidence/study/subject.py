"""What a study asks for images: prompts, and a model that is loaded, wrapped from diffusers, or a stand-in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from pellucid import scenes
from pellucid.core import schedule as schedules
from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import read_lines, whole
from pellucid.core.schedule import Schedule
from pellucid.interop import source
from pellucid.pipeline import fingerprint
from pellucid.pipeline.encoders.conditions import takes_labels, takes_text
from pellucid.pipeline.load import load
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.request import Request
from pellucid.pipeline.wrapped import WrappedPipeline, read_scheduler
from pellucid.scenes.grammar import Query

# --- Prompts --------------------------------------------------------------------------------------------------------

_MAX_BYTES = 64 * 2**20  # of a file
_MAX_PROMPTS = 1_000_000
SCENES = "scenes"


def scene_count(where: str, most: int = _MAX_PROMPTS, default: int | None = None) -> int | None:
    """How many captions of scenes are meant: N of `scenes:N`, `default` of `scenes`; None where a file is named."""
    name, colon, count = where.partition(":")
    if name != SCENES or not (colon or default) or Path(where).exists():
        return None
    if colon and not whole(count, most):
        raise PellucidError(rule("prompts", f"scenes:N, N from 1 to {most:,}", where), "prompts")
    return int(count) if colon else default


def read_prompts(where: str | Path | None) -> tuple[str, ...]:
    """The lines of a text file that are not empty; `scenes:200`: 200 prompts of scenes that training never saw."""
    if where is None:
        return ()
    if (count := scene_count(str(where))) is not None:
        return tuple(caption for caption, _ in scenes.prompts(count))
    return read_lines_of(Path(where), "scenes:N")


def read_lines_of(path: Path, other: str) -> tuple[str, ...]:
    """The lines of a text file that are not empty; `other` is what may be named in place of a file."""
    if not path.is_file():
        raise PellucidError(rule("prompts", f"a text file that exists, or {other}", str(path)), "file")
    return read_lines(path, "prompts", _MAX_BYTES, "prompts")


def queries_of(prompts: Sequence[str]) -> tuple[Query, ...] | None:
    """What the prompts ask for where all of them are captions of scenes; None where one is not."""
    try:
        return tuple(scenes.parse(prompt) for prompt in prompts) or None
    except PellucidError:
        return None


# --- The model ------------------------------------------------------------------------------------------------------

InputKind = Literal["prompt", "label", "nothing"]
_IMAGE_TEXT = "image_text"  # the folder of a bundle in which its CLIP lies


@dataclass(frozen=True)
class StudyImages:
    """Images as a person sees them, and x at the end of the run in the frame of clean data, (B, C, H, W) float32."""

    images: list[Image.Image]
    latents: Tensor


@dataclass(frozen=True)
class Subject:
    """Something that is called as a pipeline is, and what a study must know of it. `mark` names its weights."""

    pipe: Any
    name: str
    schedule: Schedule
    target: str
    mark: str
    asks: InputKind = "prompt"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    image_text: Path | None = None
    guidance: str = "the model's own"  # where a study names none

    @staticmethod
    def open(model: str, *, dtype: str | None = None, device: str | None = None) -> Subject:
        """By whatever name `pellucid.load` takes."""
        return Subject.of(load(model, dtype=dtype, device=device))

    @staticmethod
    def of(pipe: Any) -> Subject:
        if isinstance(pipe, Subject):
            return pipe
        if isinstance(pipe, Pipeline):
            parts = pipe.components
            mark, beside = fingerprint.of_model(parts), _clip_beside(parts.name)
            asks: InputKind = (
                "prompt" if takes_text(parts.network) else "label" if takes_labels(parts.network) else "nothing"
            )
            own = pipe.guidance_of(Request()).text()
            return Subject(pipe, parts.name, parts.schedule, parts.target, mark, asks, pipe.device, beside, own)
        if isinstance(pipe, WrappedPipeline):
            return _wrapped_subject(pipe)
        must = "a loaded pipeline, or a diffusers one in pellucid.wrap"
        raise PellucidError(rule("model", must, type(pipe).__name__), "study-model")

    def make(self, inputs: list[str], seeds: list[int], **how: Any) -> StudyImages:
        """One image for each of `asked`, with these seeds."""
        if self.asks == "prompt":
            found = self.pipe(inputs, seed=seeds, **how)
        elif self.asks == "label":
            labels = [one if (number := whole(one)) is None else number for one in inputs]
            found = self.pipe(label=labels, seed=seeds, **how)
        else:
            found = self.pipe(n=len(seeds), seed=seeds, **how)
        if len(found.images) != len(seeds):
            raise PellucidError(rule("images", f"{len(seeds)}, one per seed", len(found.images)), "study-pictures")
        end = found.plan.end.alpha if found.plan.dialect == "exact" else 1.0
        return StudyImages(list(found.images), (found.latents / (end or 1.0)).float().cpu())


def _wrapped_subject(pipe: WrappedPipeline) -> Subject:
    reading, peer = read_scheduler(pipe.peer.pipeline), pipe.peer
    process = {"schedule": schedules.to_dict(reading.schedule), "target": reading.target}
    words = hashlib.sha256(json.dumps(process, sort_keys=True, default=str).encode()).hexdigest()[:16]
    name = str(getattr(getattr(peer.pipeline, "config", None), "_name_or_path", "") or peer.kind)
    mark = f"{fingerprint.of_network(peer.network)}-{words}"
    device = torch.device(getattr(peer.pipeline, "device", "cpu"))
    return Subject(pipe, name, reading.schedule, str(reading.target), mark, "prompt", device)


def _clip_beside(name: str) -> Path | None:
    """The image-text encoder of a bundle, in its folder or in that of the model whose part this is."""
    place = source.bundled(name)
    folders = (place / _IMAGE_TEXT, place.parent / _IMAGE_TEXT)
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)
