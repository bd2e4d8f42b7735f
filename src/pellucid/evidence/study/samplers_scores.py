"""What a sampler study sees in images: how far they are from converged ones, how they fit their prompts, their
features, and in scenes whether they show what was asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pellucid import scenes
from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.adherence.making import seen
from pellucid.evidence.adherence.verdict import judge
from pellucid.evidence.metrics import image_text, weights
from pellucid.evidence.metrics.inception import Inception
from pellucid.evidence.metrics.inception import features as inception_features
from pellucid.evidence.study.cells import Cell
from pellucid.evidence.study.samplers_files import Files
from pellucid.evidence.study.samplers_subject import Made
from pellucid.pipeline import fingerprint

DIGITS = 8


class Scorer(Protocol):
    """Something that looks at the images of one batch. `what` names its rows: another judge has another name."""

    @property
    def what(self) -> str: ...

    def __call__(
        self, images: Sequence[Image.Image], prompts: Sequence[str], files: Files, cell: Cell, first: int
    ) -> dict[str, Any]: ...


def pixels(images: Sequence[Image.Image]) -> Tensor:
    """(N, 3, H, W) uint8."""
    held = [torch.from_numpy(np.asarray(image.convert("RGB")).copy()) for image in images]
    return torch.stack(held).permute(0, 3, 1, 2).contiguous()


def distances(made: Made, best: Made) -> dict[str, list[float | None]]:
    """Root mean square differences of each image: of its pixels in [0, 1], in 8 bits as a person gets them, and of
    its latents (of a pixel model: x), which 8 bits do not round. None where a number is not finite."""
    a, b = (pixels(one.images).double() / 255 for one in (made, best))
    if a.shape != b.shape or made.latents.shape != best.latents.shape:
        raise PellucidError(rule("images", f"of the converged ones' shape, {tuple(b.shape)}", tuple(a.shape)), "shape")
    return {"distance": rms(a, b), "latent": rms(made.latents.double(), best.latents.double())}


def rms(a: Tensor, b: Tensor) -> list[float | None]:
    found = (a - b).flatten(1).square().mean(1).sqrt().tolist()
    return [value if math.isfinite(value) else None for value in found]


class InceptionScorer:
    """Features (N, 2048) for KID and FID, kept in files."""

    def __init__(self, network: Inception) -> None:
        self.network = network
        self.what = f"inception-{network.digest()[:DIGITS]}"

    def __call__(
        self, images: Sequence[Image.Image], prompts: Sequence[str], files: Files, cell: Cell, first: int
    ) -> dict[str, Any]:
        files.write_features(cell, first, self.what, inception_features(pixels(images), self.network, len(images)))
        return {}


class ClipScorer:
    """Cosines of images with their prompts; the embeddings of the images are kept too, of length √D, so that KID's
    kernel (x·y / D + 1)³ sees their cosines."""

    def __init__(self, judge: image_text.Judge) -> None:
        self.judge = judge
        self.what = f"clip-{fingerprint.of_network(judge.network).rpartition(':')[2][:DIGITS]}"

    def __call__(
        self, images: Sequence[Image.Image], prompts: Sequence[str], files: Files, cell: Cell, first: int
    ) -> dict[str, Any]:
        found = self.judge.image(pixels(images))  # (N, D) of length 1
        files.write_features(cell, first, self.what, found * math.sqrt(found.shape[1]))
        texts, cut = self.judge.text(prompts)
        return {"cosines": (found * texts).sum(-1).cpu().tolist(), "cut": cut}


class SceneScorer:
    """Whether an image shows the scene that its prompt describes, by attribute."""

    what = "scenes"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device

    def __call__(
        self, images: Sequence[Image.Image], prompts: Sequence[str], files: Files, cell: Cell, first: int
    ) -> dict[str, Any]:
        readings = scenes.read(seen(images, self.device))
        found = [judge(reading, scenes.parse(prompt)) for reading, prompt in zip(readings, prompts, strict=True)]
        return {
            "right": [one.right for one in found],
            "marks": [one.marks for one in found],
            "bled": [one.bled for one in found],
            "readable": [one.readable for one in found],
        }


def find_inception(path: str | Path | None, device: torch.device | str) -> tuple[Inception | None, str]:
    """(the network, "") or (None, why not): what was not named and is not in the cache is not fetched in a study."""
    if path is None:
        folder = weights.cache_folder()
        held = [folder / name for name in ("inception.safetensors", weights.NAME) if (folder / name).is_file()]
        if not held:
            return None, f"no Inception weights: name them with --inception, or put {weights.NAME} into {folder}"
        path = held[0]
    return weights.load_inception(path, device), ""


def find_clip(path: str | Path | None, own: Path | None, device: torch.device | str) -> image_text.Judge | None:
    """The CLIP that was named, or the model's own."""
    place = path if path is not None else own
    return None if place is None else image_text.Judge.load(place, device)
