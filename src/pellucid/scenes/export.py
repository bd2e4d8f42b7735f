"""Scenes in files: a contact sheet with captions, or a folder of images with their maps and metadata."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from pellucid import scenes as world
from pellucid.core.errors import PellucidError, rule
from pellucid.pipeline.sheet import Block, face_for, wrap
from pellucid.scenes.renderer import SIZES
from pellucid.scenes.sampling import OBJECTS

_MAX_SCENES, _MAX_ON_SHEET = 1_000_000, 400
_BATCH = 64  # scenes at a time
INK, PAPER = "#1c2530", "#ffffff"
_GAP, _LINES = 14, 7
_LEAST_CELL = 160  # smaller images are enlarged, so that a caption fits beneath
_MAPS = ("edges", "segmentation")


@dataclass(frozen=True)
class SceneOptions:
    """Which scenes. Without styles: those of training, by their weights."""

    count: int
    seed: int
    size: int
    split: str
    styles: tuple[str, ...]

    def check(self, sheet: bool) -> None:
        most = _MAX_ON_SHEET if sheet else _MAX_SCENES
        if not 1 <= self.count <= most:
            raise PellucidError(rule("--count", f"from 1 to {most:,}", self.count), "scenes-count")
        if not SIZES[0] <= self.size <= SIZES[1]:
            raise PellucidError(rule("--size", f"from {SIZES[0]} to {SIZES[1]} pixels", self.size), "scenes-size")
        self.scenes(0, 1)  # refuses what the world does not have

    @property
    def batches(self) -> int:
        return math.ceil(self.count / _BATCH)

    def scenes(self, start: int, stop: int) -> world.Scenes:
        split: Any = self.split
        return world.sample(torch.arange(start, stop), self.seed, split, self.styles or world.TRAIN_STYLES, OBJECTS)


@dataclass(frozen=True)
class SceneBatch:
    """Some scenes one after another: their images and maps (N, …) uint8, and a row of metadata each."""

    images: Tensor
    maps: dict[str, Tensor]
    rows: list[dict[str, Any]]


def batches(options: SceneOptions, *, drawn: bool = False) -> Iterator[SceneBatch]:
    """All scenes, a part at a time; images only where they are drawn."""
    for start in range(0, options.count, _BATCH):
        scenes = options.scenes(start, min(start + _BATCH, options.count))
        told = world.captions(scenes, options.seed)
        rows = [
            {"file_name": f"images/{i:06d}.png", "text": caption}
            | {name: f"{name}/{i:06d}.png" for name in _MAPS}
            | facts
            for i, caption, facts in zip(scenes.index.tolist(), told, world.attributes(scenes), strict=True)
        ]
        size = options.size if drawn else SIZES[0]
        images = ((world.render(scenes, size) + 1) * 127.5).round().byte().permute(0, 2, 3, 1)
        maps = {
            "edges": (world.edges(scenes, size)[:, 0] * 255).round().byte(),
            "segmentation": world.segmentation(scenes, size).byte(),
        }
        yield SceneBatch(images, maps, rows)


def check_folder(folder: Path) -> None:
    if os.path.lexists(folder):
        raise PellucidError(rule("--folder", "one that does not exist yet", str(folder)), "file")
    if not folder.absolute().parent.is_dir():
        raise PellucidError(rule("--folder", "in a folder that exists", str(folder)), "file")


def write_folder(options: SceneOptions, folder: Path, done: Callable[[], None]) -> None:
    """Images, edges and segmentation as PNG, and metadata.jsonl. The folder is whole or absent."""
    part_folder = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        for name in ("images", *_MAPS):
            (part_folder / name).mkdir(parents=True)
        with open(part_folder / "metadata.jsonl", "w", encoding="utf-8") as lines:
            for part in batches(options, drawn=True):
                _write_batch(part, part_folder)
                lines.writelines(json.dumps(row) + "\n" for row in part.rows)
                done()
            lines.flush()
            os.fsync(lines.fileno())
        os.replace(part_folder, folder)
    finally:
        shutil.rmtree(part_folder, ignore_errors=True)


def _write_batch(part: SceneBatch, folder: Path) -> None:
    for i, row in enumerate(part.rows):
        Image.fromarray(part.images[i].numpy()).save(folder / row["file_name"])
        for name in _MAPS:
            Image.fromarray(part.maps[name][i].numpy()).save(folder / row[name])


def contact_sheet(options: SceneOptions) -> Image.Image:
    """Images in rows, each with its caption beneath."""
    columns = min(options.count, max(4, math.ceil(math.sqrt(options.count))))
    side = max(_LEAST_CELL, options.size)
    font = face_for("")(12)
    cells = [
        (Image.fromarray(image.numpy()), row["text"])
        for part in batches(options, drawn=True)
        for image, row in zip(part.images, part.rows, strict=True)
    ]
    texts = [Block(wrap(text, font, side, _LINES), font, INK) for _, text in cells]
    tall = side + max(block.height for block in texts) + _GAP
    rows = math.ceil(len(cells) / columns)
    drawn = Image.new("RGB", (columns * (side + _GAP) + _GAP, rows * (tall + _GAP) + _GAP), PAPER)
    pen = ImageDraw.Draw(drawn)
    for i, ((image, _), block) in enumerate(zip(cells, texts, strict=True)):
        x, y = _GAP + i % columns * (side + _GAP), _GAP + i // columns * (tall + _GAP)
        drawn.paste(image.resize((side, side), Image.Resampling.LANCZOS), (x, y))
        block.draw(pen, x, y + side + 5)
    return drawn
