"""How well images fit their prompts: 100 × the cosine of CLIP's two embeddings (Hessel et al. 2021, unclipped)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import parse_object, read_text
from pellucid.evidence.metrics.images import Folder, ImageSet
from pellucid.evidence.statistics import RESAMPLES, Estimate, mean_interval
from pellucid.interop import source, weights
from pellucid.interop.components import LoadOptions
from pellucid.interop.folder import read_part
from pellucid.interop.hub import tokenizer_in
from pellucid.interop.tokenizer import Tokenizer
from pellucid.models.clip import CLIP
from pellucid.pipeline.encoders.image_inputs import DEVIATION, MEAN, clip_pixels

_BICUBIC = 3  # as PIL counts
_MAX_PROMPTS_BYTES = 256 * 2**20
_BATCH = 64


@dataclass(frozen=True)
class ImageText:
    """100 × the mean cosine, the cosine of every image that could be read, and what was cut or left."""

    estimate: Estimate
    cosines: Tensor  # (N,) float32
    cut: int = 0  # prompts that were longer than the encoder's window
    skipped: int = 0


@dataclass(frozen=True)
class Judge:
    """A CLIP with its tokenizer and what its preprocessor_config.json says of pixels."""

    network: CLIP
    tokenizer: Tokenizer
    mean: tuple[float, ...] = MEAN
    deviation: tuple[float, ...] = DEVIATION

    @staticmethod
    def load(where: str | Path, device: torch.device | str | None = None) -> Judge:
        """From the folder of a transformers CLIPModel; its tokenizer is there, in tokenizer/, or in ../tokenizer/."""
        folder = source.locate(where)
        if not folder.is_dir():
            raise PellucidError(rule("CLIP", "the folder of a CLIPModel", str(where)), "clip-folder")
        raw = weights.read_json(folder / "config.json")
        if "text_config" not in raw and "text_config_dict" not in raw:
            got = (raw.get("architectures") or [raw.get("model_type")])[0]
            must = "a CLIPModel, text and vision together"
            raise PellucidError(rule(f"config of {folder.name}", must, got), "clip-folder")
        network = read_part(folder, "CLIPModel", LoadOptions(torch.float32, source.place(device))).network
        return Judge(network, _tokenizer_of(folder, network), *pixels_of(folder, network))

    @torch.no_grad()
    def text(self, prompts: Sequence[str]) -> tuple[Tensor, int]:
        """Embeddings (B, P) of length 1, and how many prompts were cut at the window, as transformers cuts them."""
        room = self.tokenizer.room
        ids = [self.tokenizer.ids(prompt) for prompt in prompts]
        tokens = torch.tensor([self.tokenizer.window(one[:room]) for one in ids], device=self.device)
        return self.network.embed_text(tokens).float(), sum(len(one) > room for one in ids)

    @torch.no_grad()
    def image(self, images: Tensor) -> Tensor:
        """Embeddings (B, P) of length 1 of images (B, 3, H, W) uint8."""
        found = [Image.fromarray(np.ascontiguousarray(one)) for one in images.cpu().permute(0, 2, 3, 1).numpy()]
        pixels = clip_pixels(found, self.network.config.vision.image_size)
        if (self.mean, self.deviation) != (MEAN, DEVIATION):  # from CLIP's scale to this model's
            old, spread, mean, deviation = (_column(v) for v in (MEAN, DEVIATION, self.mean, self.deviation))
            pixels = (pixels * spread + old - mean) / deviation
        return self.network.embed_image(pixels.to(self.device)).float()

    @property
    def device(self) -> torch.device:
        return self.network.logit_scale.device


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values)[:, None, None]


def image_text(
    images: ImageSet,
    prompts: Sequence[str],
    judge: Judge,
    resamples: int = RESAMPLES,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> ImageText:
    """Of each image with the prompt of the same number. `resamples` 0 leaves the interval away."""
    if len(prompts) != len(images):
        raise PellucidError(rule("prompts", f"{len(images)}, one per image", len(prompts)), "prompts-count")
    skipped: set[int] = set()
    found: list[Tensor] = []
    number, cut = 0, 0
    for chunk in images.chunks(lambda index, _: skipped.add(index)):
        for part in chunk.split(_BATCH):
            texts = []
            while len(texts) < len(part):  # an image that was skipped takes its prompt with it
                if number not in skipped:
                    texts.append(prompts[number])
                number += 1
            embedded, long = judge.text(texts)
            found.append((judge.image(part) * embedded).sum(-1).cpu())
            cut += long
            if progress is not None:
                progress(len(part))
    if not found:
        raise PellucidError(rule(f"images of {images.name}", "readable, at least one", "none"), "pictures-empty")
    cosines = torch.cat(found)
    estimate = Estimate(100 * float(cosines.double().mean()))
    if resamples:
        estimate = replace(mean_interval(100 * cosines, resamples, seed), value=estimate.value)
    return ImageText(estimate, cosines, cut, len(skipped))


# Files


def _tokenizer_of(folder: Path, network: CLIP) -> Tokenizer:
    for place in (folder, folder / "tokenizer", folder.parent / "tokenizer"):
        if tokenizer_in(place):
            found = Tokenizer.load(place)
            break
    else:
        must = "in it, in its folder tokenizer, or in a folder tokenizer beside it"
        raise PellucidError(rule(f"tokenizer of {folder.name}", must, "none"), "tokenizer-missing")
    settings = network.config.text
    if found.size > settings.vocab_size:
        must = f"below {settings.vocab_size}, the size of the text encoder's table"
        raise PellucidError(rule(f"token ids of {folder.name}", must, found.size - 1), "token-id")
    return Tokenizer(**{**vars(found), "length": min(found.length, settings.max_position_embeddings)})


def pixels_of(folder: Path, network: CLIP) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of preprocessor_config.json, or CLIP's; another way of resizing is refused."""
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return MEAN, DEVIATION
    raw = weights.read_json(path)
    if raw.get("resample", _BICUBIC) != _BICUBIC:
        raise PellucidError(rule(f"resample of {path.name}", "3, bicubic", raw["resample"]), "clip-pixels")
    side = network.config.vision.image_size
    for key in ("size", "crop_size"):
        value = raw.get(key, side)
        sides = list(value.values()) if isinstance(value, dict) else [value]
        if not sides or any(one != side for one in sides):
            raise PellucidError(rule(f"{key} of {path.name}", f"{side}, the encoder's", value), "clip-pixels")
    return _three(raw, "image_mean", MEAN), _three(raw, "image_std", DEVIATION)


def _three(raw: dict[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    values = raw.get(key, default)
    triple = isinstance(values, list | tuple) and len(values) == 3
    if not triple or not all(isinstance(v, int | float) and 0 < v < 10 for v in values):
        raise PellucidError(rule(key, "three numbers above 0", values), "clip-pixels")
    return tuple(float(v) for v in values)


def read_prompts(path: str | Path, images: ImageSet) -> tuple[str, ...]:
    """One prompt per image: a text file, a line each in the order of the images, or the .jsonl of an image folder.

    A line of .jsonl is {"file_name": …, "text": …}, with file names as they are in the folder, in any order.
    """
    place = Path(path)
    if not place.is_file():
        raise PellucidError(rule("prompts", "a text file or a .jsonl that exists", str(place)), "file")
    lines = read_text(place, place.name, _MAX_PROMPTS_BYTES, "prompts").splitlines()
    if place.suffix == ".jsonl":
        return _by_name(lines, place, images)
    while lines and not lines[-1]:
        lines.pop()
    if len(lines) != len(images):
        must = f"{len(images)}, one for each image of {images.name}"
        raise PellucidError(rule(f"lines of {place.name}", must, len(lines)), "prompts-count")
    return tuple(lines)


def _by_name(lines: Sequence[str], place: Path, images: ImageSet) -> tuple[str, ...]:
    if not isinstance(images, Folder):
        must = "a text file with one prompt per line, for images without names"
        raise PellucidError(rule("prompts", must, place.name), "prompts")
    table: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_object(line, place.name, foreign=True)
            name, text = row["file_name"], row["text"]
        except (PellucidError, KeyError):
            name = text = None
        if not isinstance(name, str) or not isinstance(text, str):
            must = '{"file_name": …, "text": …}'
            raise PellucidError(rule(f"line {number} of {place.name}", must, line[:60]), "prompts")
        table[name] = text
    missing = [name for name in images.files if name not in table]
    if missing:
        words = f"{place.name} must have a text for every image; none for {weights.some(missing)}."
        raise PellucidError(words, "prompts-count")
    return tuple(table[name] for name in images.files)
