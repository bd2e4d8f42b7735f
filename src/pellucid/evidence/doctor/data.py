"""Images that are known to be of a model's kind: what detectors noise, and what a VAE is judged by."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.doctor.subject import Data
from pellucid.evidence.metrics.fid import Statistics
from pellucid.evidence.metrics.images import ImageSet, open_images
from pellucid.interop.source import expanded
from pellucid.train.draws import Draws
from pellucid.train.image_folder import ImageFolder
from pellucid.train.scenes_source import ScenesConfig
from pellucid.train.source import Batch, Source

COUNT = 64  # images that are looked at
SCENES = "scenes"


def open_data(where: str, size: int, count: int = COUNT) -> Data:
    """At most `count` images of a folder (with its captions or classes), of a file of arrays, or of scenes."""
    if where == SCENES:
        return from_source(ScenesConfig(size=size, split="any").open(), count, SCENES)
    if expanded(where).is_dir():
        return from_source(ImageFolder(expanded(where), size), count, where)
    found = open_images(where)
    if isinstance(found, Statistics):
        raise PellucidError(rule("data", "images", f"statistics in {where}"), "data")
    return Data(first(found, size, count), name=where)


def from_source(source: Source, count: int, name: str) -> Data:
    """Images that are spread over all that a source has."""
    wanted = min(count, len(source))
    at = torch.arange(wanted) if source.endless else torch.linspace(0, len(source) - 1, wanted).round().long()
    seen: Batch = source.batch(at, Draws(0, 0, wanted), torch.device("cpu"))
    labels = None if seen.labels is None else tuple(int(label) for label in seen.labels)
    return Data(seen.images.float() / 2 + 0.5, seen.captions, labels, name)


def first(found: ImageSet, size: int, count: int) -> Tensor:
    """(N, 3, size, size) in [0, 1]: the shorter side resized, the longer one cut at its centre."""
    kept: list[Tensor] = []
    for chunk in found.chunks(lambda number, why: None):
        square = cut(chunk[: count - sum(map(len, kept))].float() / 255, size)
        kept.append(square)
        if sum(map(len, kept)) >= count:
            break
    return torch.cat(kept)


def cut(pixels: Tensor, size: int) -> Tensor:
    high, wide = pixels.shape[-2:]
    side = min(high, wide)
    top, left = (high - side) // 2, (wide - side) // 2
    square = pixels[..., top : top + side, left : left + side]
    if side == size:
        return square
    return F.interpolate(square, (size, size), mode="bicubic", antialias=True).clamp(0, 1)
