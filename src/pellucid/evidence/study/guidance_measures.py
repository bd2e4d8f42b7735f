"""What is measured of every image of a guidance study: whether it is what was asked for, and how it looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from pellucid import scenes
from pellucid.core.errors import PellucidError, rule
from pellucid.evidence import qualities
from pellucid.evidence.adherence.making import seen
from pellucid.evidence.adherence.round_trip import through
from pellucid.evidence.adherence.verdict import judge as judged
from pellucid.evidence.metrics.fid import Statistics
from pellucid.evidence.metrics.image_text import Judge
from pellucid.evidence.metrics.images import ImageSet, open_images
from pellucid.evidence.metrics.inception import to_bytes
from pellucid.pipeline.pipeline import Pipeline
from pellucid.scenes.query import Query
from pellucid.scenes.scene import Scenes

LOOKS = ("saturation", "colourfulness", "sharpness")
DIGITS = 6  # of a number in the records
AT_ONCE = 32  # true images
MOST_TRUE = 1000  # images of a reference that are looked at
Row = dict[str, list[Any]]  # by figure, one value an image; of diversity one per prompt


def looks(pixels: Tensor) -> Row:
    """How images (N, 3, H, W) in [0, 1] look, whatever they were asked to show."""
    return {name: rounded(getattr(qualities, name)(pixels)) for name in LOOKS}


def rounded(values: Tensor) -> list[float]:
    return [round(value, DIGITS) for value in values.tolist()]


def measured(
    images: Sequence[Image.Image],
    texts: Sequence[str],
    queries: Sequence[Query] | None,
    judge: Judge | None,
    seeds: int,
    device: torch.device | str = "cpu",
) -> Row:
    """All figures of the images of some prompts, `seeds` of each in turn."""
    given = seen(images, device)
    pixels = (given + 1) / 2
    found = looks(pixels)
    if queries is not None:
        found |= adherence(given, queries)
    if judge is not None:
        cosines = (judge.image(to_bytes(pixels)) * judge.text(texts)[0]).sum(-1)
        found["image_text"] = rounded(100 * cosines)
    if seeds > 1:
        groups = [i // seeds for i in range(len(images))]
        found["diversity"] = rounded(qualities.diversity(pixels, groups).reshape(-1, seeds).mean(1))
    return found


def adherence(given: Tensor, queries: Sequence[Query]) -> Row:
    """By the reader: all right, the share of attributes that are right, and whether colours bled (None: not told)."""
    verdicts = [judged(reading, query) for reading, query in zip(scenes.read(given), queries, strict=True)]
    return {
        "right": [int(one.right) for one in verdicts],
        "attributes": [round(sum(one.marks.values()) / len(one.marks), DIGITS) for one in verdicts],
        "bled": [None if one.bled is None else int(one.bled) for one in verdicts],
    }


# True images


def of_scenes(truth: Scenes, size: tuple[int, int], pipe: Any) -> Row:
    """Renders of the scenes that were asked for, through the model's own VAE where it has one: the best it could do."""
    vae = pipe.components.vae if isinstance(pipe, Pipeline) else None
    rows = []
    for first in range(0, len(truth), AT_ONCE):
        images = scenes.render(truth[first : first + AT_ONCE], min(size))
        rows.append(looks((images if vae is None else through(vae, images)).add(1).div(2)))
    return joined(rows)


def of_folder(where: str, size: tuple[int, int]) -> Row:
    """Of true images that were given, of the size of the model's: else their sharpness would say nothing."""
    rows: list[Row] = []
    left = MOST_TRUE
    for chunk in chunks(where):
        if tuple(chunk.shape[2:]) != size[::-1]:
            got = f"{chunk.shape[3]}×{chunk.shape[2]}"
            raise PellucidError(rule("images of --reference", f"{size[0]}×{size[1]}, as the model's", got), "reference")
        rows.append(looks(chunk[:left]))
        left -= len(chunk)
        if left <= 0:
            break
    return joined(rows)


def opened(where: str) -> ImageSet:
    found = open_images(where)
    if isinstance(found, Statistics):
        raise PellucidError(rule("--reference", "images", "statistics"), "reference")
    return found


def chunks(where: str) -> Iterator[Tensor]:
    """Images (B, 3, H, W) uint8; one that cannot be read is refused."""

    def refuse(_: int, why: str) -> None:
        raise PellucidError(why, "reference")

    yield from opened(where).chunks(refuse)


def joined(rows: Sequence[Row]) -> Row:
    return {name: [value for row in rows for value in row[name]] for name in rows[0]}
