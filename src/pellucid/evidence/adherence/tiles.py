"""The images of a batch in one lossless file: side by side without a gap, to look at and to cut out again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.atomic_files import put
from pellucid.pipeline import images

COLUMNS = 10


def save(image: Image.Image, path: Path) -> Path:
    """A PNG that is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    put(path, image.save)
    return path


def write(images: Sequence[Image.Image], path: Path) -> Path:
    width, height = images[0].size
    columns = min(COLUMNS, len(images))
    whole = Image.new("RGB", (columns * width, math.ceil(len(images) / columns) * height), "white")
    for i, image in enumerate(images):
        whole.paste(image, (i % columns * width, i // columns * height))
    return save(whole, path)


def read(path: Path, count: int) -> list[Image.Image]:
    """The first `count` images of a file that `write` wrote with that many."""
    whole = images.read(path, "images of a batch").convert("RGB")
    columns = min(COLUMNS, count)
    rows = math.ceil(count / columns)
    if whole.width % columns or whole.height % rows:
        got = f"{whole.width}×{whole.height}"
        raise PellucidError(rule(path.name, f"{columns} × {rows} images of one size", got), "tiles")
    width, height = whole.width // columns, whole.height // rows
    corners = ((i % columns * width, i // columns * height) for i in range(count))
    return [whole.crop((x, y, x + width, y + height)) for x, y in corners]
