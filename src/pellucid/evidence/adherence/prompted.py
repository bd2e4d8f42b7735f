"""The study of adherence: prompts that training never saw, images of them, and what each image shows.

A folder holds config.json, one record per batch (what was asked for, what was read), and the images. Verdicts are made
of the records, so that a better rule needs no new images.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from pellucid import scenes
from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.adherence import tiles
from pellucid.evidence.adherence.making import Maker, Making, seen
from pellucid.evidence.adherence.opening import DTYPE, Part
from pellucid.evidence.adherence.verdict import Verdict, from_plain, judge, to_plain
from pellucid.evidence.study.records import Records, alone, claim, is_mine
from pellucid.interop.atomic_files import put, sealed
from pellucid.scenes.query import Query
from pellucid.scenes.reading import Reading

KEYS = ("first",)
MOST_PROMPTS = 100_000


@dataclass(frozen=True)
class Adherence:
    """`prompts` captions that say every attribute, of scenes whose objects are all combinations that training never
    saw; `objects` are their numbers of objects, drawn at random."""

    model: str
    part: Part = "unet"
    prompts: int = 1000
    objects: tuple[int, ...] = (1, 2, 3)
    making: Making = field(default_factory=Making)
    dtype: str = DTYPE

    def __post_init__(self) -> None:
        if not 1 <= self.prompts <= MOST_PROMPTS:
            raise PellucidError(rule("prompts", f"from 1 to {MOST_PROMPTS:,}", self.prompts), "adherence")
        if len(set(self.objects)) != len(self.objects):
            raise PellucidError(rule("objects", "numbers, none of them twice", list(self.objects)), "adherence")
        scenes.sample(torch.zeros(0, dtype=torch.int64), objects=self.objects)  # refuses what the world does not have

    def asked(self) -> list[tuple[str, Query]]:
        return scenes.prompts(self.prompts, self.objects, self.making.seed, split="held_out")


@dataclass(frozen=True)
class Shown:
    """One image of the study: what was asked for, and what was read in it."""

    number: int
    caption: str
    query: Query
    reading: Reading

    @property
    def verdict(self) -> Verdict:
        return judge(self.reading, self.query)

    def against(self, other: Shown) -> Verdict:
        """As if it had been asked for another caption."""
        return judge(self.reading, other.query)


class Study:
    """A study in its folder. Batches that are done are not done again; a folder of another model is refused."""

    def __init__(self, config: Adherence, folder: Path, model_hash: str = "") -> None:
        self.config, self.folder = config, folder
        self.text = json.dumps({**asdict(config), "model_hash": model_hash}, indent=1, sort_keys=True)
        is_mine(folder, self.text)
        self.records = Records(folder, KEYS)
        self.asked = config.asked()

    @property
    def missing(self) -> list[int]:
        return [first for first in self.config.making.firsts(len(self.asked)) if not self.records.has({"first": first})]

    @alone
    def run(
        self, pipe: Maker, device: torch.device | str = "cpu", done: Callable[[], object] = lambda: None
    ) -> list[Shown]:
        """Makes and reads what is missing; `done` is called after each batch."""
        for first in self.missing:
            batch = self.asked[first : first + self.config.making.batch]
            images = self.config.making.images(pipe, [caption for caption, _ in batch], first)
            claim(self.folder, self.text)  # only once there is an image to keep
            tiles.write(images, self.place(first))
            self.records.add(self.record(first, images, device))
            done()
        return self.shown()

    def record(self, first: int, images: Sequence[Image.Image], device: torch.device | str) -> dict[str, Any]:
        captions = [caption for caption, _ in self.asked[first : first + len(images)]]
        readings = scenes.read(seen(images, device))
        rows = [{"caption": c, "reading": to_plain(r)} for c, r in zip(captions, readings, strict=True)]
        return {"first": first, "pictures": rows}

    def read_again(self, device: torch.device | str = "cpu") -> list[Shown]:
        """Reads the images that are there once more: after a change of the reader."""
        rows = []
        for row in self.records.rows:
            images = tiles.read(self.place(row["first"]), len(row["pictures"]))
            rows.append(self.record(row["first"], images, device))
        put(self.records.path, "".join(map(sealed, rows)))
        self.records = Records(self.folder, KEYS)
        return self.shown()

    def place(self, first: int) -> Path:
        return self.folder / "pictures" / f"{first:05d}.png"

    def shown(self) -> list[Shown]:
        """The images so far, by their numbers."""
        found = [one for row in self.records.rows for one in self.of_batch(row)]
        return sorted(found, key=lambda one: one.number)

    def of_batch(self, row: Mapping[str, Any]) -> list[Shown]:
        first, batch = row["first"], self.asked[row["first"] : row["first"] + self.config.making.batch]
        if [image["caption"] for image in row["pictures"]] != [caption for caption, _ in batch]:
            must = "of this world's captions: they have changed since"
            raise PellucidError(rule("records", must, f"batch {first}", "Choose another --out."), "adherence-captions")
        pairs = zip(batch, row["pictures"], strict=True)
        return [
            Shown(first + i, caption, query, from_plain(image["reading"]))
            for i, ((caption, query), image) in enumerate(pairs)
        ]

    def images(self, wanted: list[Shown]) -> list[Image.Image]:
        """The images of some, in their order."""
        size = self.config.making.batch
        held: dict[int, list[Image.Image]] = {}
        for first in sorted({one.number // size * size for one in wanted}):
            held[first] = tiles.read(self.place(first), len(self.asked[first : first + size]))
        return [held[one.number // size * size][one.number % size] for one in wanted]
