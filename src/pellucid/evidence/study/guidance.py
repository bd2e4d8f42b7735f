"""The guidance study: scale × rule, each cell from the same prompts and the same noise, measured image by image.

A folder holds config.json, one record for each few prompts of a cell, and some images of every cell. Figures, ranges
and the recommendation are made of the records.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.adherence import tiles
from pellucid.evidence.adherence.making import Maker, Making
from pellucid.evidence.adherence.opening import DTYPE, PARTS, Part
from pellucid.evidence.metrics.image_text import Judge
from pellucid.evidence.study import guidance_measures as measures
from pellucid.evidence.study import guidance_prompts as prompts
from pellucid.evidence.study.guidance_prompts import SCENES, Asked
from pellucid.evidence.study.guidance_rules import NAMES, Nature, check, guidance_of
from pellucid.evidence.study.records import Records, alone, claim, is_mine

VERSION = 1
KEYS = ("guidance", "first")
TRUE = "true"  # the record of the true images, among those of guidances
MOST_SEEDS, MOST_CELLS = 256, 400
SHOWN = 16  # prompts whose first image is kept, for the report


@dataclass(frozen=True)
class GuidanceStudy:
    """Every scale under every rule. `prompts` is `scenes`, `scenes:N` or a file; each has `seeds` images.

    `clip` is an image-text encoder, `reference` a folder of true images; `tolerance` is how far, as a share,
    colourfulness and sharpness may be from the reference's.
    """

    model: str
    scales: tuple[float, ...] = (1.0, 2.0, 4.0, 7.0, 10.0, 15.0)
    rules: tuple[str, ...] = NAMES
    prompts: str = SCENES
    seeds: int = 4
    sampler: str = "dpmpp_2m"
    steps: int = 20
    batch: int = 32
    seed: int = 0
    part: Part = "unet"
    dtype: str = DTYPE
    clip: str | None = None
    reference: str | None = None
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        for name in ("scales", "rules"):
            held = getattr(self, name)
            if not held or len(set(held)) != len(held):
                raise PellucidError(rule(name, "at least one, none of them twice", list(held)), "study-list")
        if list(self.scales) != sorted(self.scales):
            raise PellucidError(rule("scales", "numbers that grow", list(self.scales)), "study-list")
        if len(self.scales) * len(self.rules) > MOST_CELLS:
            got = len(self.scales) * len(self.rules)
            raise PellucidError(rule("scales × rules", f"at most {MOST_CELLS}", got), "study-list")
        if isinstance(self.seeds, bool) or not isinstance(self.seeds, int) or not 1 <= self.seeds <= MOST_SEEDS:
            raise PellucidError(rule("seeds", f"a whole number from 1 to {MOST_SEEDS}", self.seeds), "study-seeds")
        if not 0 < self.tolerance < 1:
            raise PellucidError(rule("tolerance", "above 0 and below 1", self.tolerance), "study-tolerance")
        if self.part not in PARTS:
            raise PellucidError(rule("part", " or ".join(PARTS), self.part), "part")
        for scale in self.scales:
            self.making(guidance_of("plain", scale, Nature()).text())
        for words in self.rules:
            check(words, self.scales[-1])
        if not prompts.of_world(self.prompts) and self.reference is None and 1 not in self.scales:
            advice = "Unguided images are what others are compared with where no --reference is given."
            raise PellucidError(rule("scales", "with 1 among them", list(self.scales), advice), "study-scales")

    def making(self, guidance: str) -> Making:
        return Making(self.sampler, self.steps, guidance, self.batch, self.seed)

    @cached_property
    def asked(self) -> Asked:
        """The prompts; by the reader where they are captions of scenes, unless a file comes with an encoder."""
        found = prompts.asked(self.prompts, self.seed)
        return Asked(found.texts) if self.clip is not None and found.truth is None else found


def writable(folder: Path) -> None:
    """Refuses a folder that could not be written to, before the long work."""
    place = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise PellucidError(rule("--out", "a folder that can be written to", str(folder)), "out-unwritable")


class Study:
    """A study in its folder. What is done is not done again; a folder of another study is refused."""

    def __init__(self, config: GuidanceStudy, folder: Path, nature: Nature | None = None, model_hash: str = "") -> None:
        self.config, self.folder = config, folder
        self.nature = nature or Nature()
        self.asked = config.asked
        if self.asked.queries is None and config.clip is None:
            must = "given for prompts that are no captions of scenes"
            raise PellucidError(f"--clip must be {must}; got none.", "study-clip")
        if config.reference is not None:
            measures.opened(config.reference)
        words = {
            "study": "guidance",
            "version": VERSION,
            **asdict(config),
            "texts": self.asked.texts,
            "nature": asdict(self.nature),
        }
        del words["tolerance"]  # another one judges the same images anew
        self.text = json.dumps({**words, "model_hash": model_hash}, indent=1, sort_keys=True)
        self.guidances = self.all_guidances()
        is_mine(folder, self.text)
        writable(folder)
        self.records = Records(folder, KEYS)

    # --- what is to be done ---------------------------------------------------------------------------------------

    def guidance(self, words: str, scale: float) -> str:
        """The guidance of a cell as text, which is its name."""
        return guidance_of(words, scale, self.nature).text()

    def all_guidances(self) -> list[str]:
        """Every guidance once: at scale 1 most rules are the same."""
        found = [self.guidance(words, scale) for scale in self.config.scales for words in self.config.rules]
        return list(dict.fromkeys(found))

    @property
    def together(self) -> int:
        """Prompts of one record: whole ones, about a batch of images."""
        return max(1, self.config.batch // self.config.seeds)

    @property
    def firsts(self) -> range:
        return range(0, len(self.asked), self.together)

    @property
    def missing(self) -> list[tuple[str, int]]:
        cells = [(guidance, first) for guidance in self.guidances for first in self.firsts]
        return [(g, first) for g, first in cells if not self.records.has({"guidance": g, "first": first})]

    @alone
    def run(
        self,
        pipe: Maker,
        judge: Judge | None = None,
        device: torch.device | str = "cpu",
        done: Callable[[], object] = lambda: None,
    ) -> None:
        """Makes and measures what is missing; `done` is called after each record."""
        if (judge is None) != (self.config.clip is None):
            raise PellucidError(rule("judge", "given with clip, and only then", judge), "study-clip")
        self.look_at_truth(pipe)
        for guidance, first in self.missing:
            made = self.images(pipe, guidance, first)
            claim(self.folder, self.text)  # only once there is an image to keep
            self.keep(made, guidance, first)
            self.records.add(self.record(made, guidance, first, judge, device))
            self.look_at_truth(pipe)  # at once: what is wrong with it is not found by the last cell
            done()

    def images(self, pipe: Maker, guidance: str, first: int) -> list[Image.Image]:
        """All images of a record, `seeds` for each prompt in turn, in batches that the machine can hold."""
        seeds, making = self.config.seeds, self.config.making(guidance)
        texts = [text for text in self.asked.texts[first : first + self.together] for _ in range(seeds)]
        made: list[Image.Image] = []
        for start in making.firsts(len(texts)):
            made += making.images(pipe, texts[start : start + making.batch], first * seeds + start)
        return made

    def record(
        self, made: list[Image.Image], guidance: str, first: int, judge: Judge | None, device: torch.device | str
    ) -> dict[str, Any]:
        seeds, last = self.config.seeds, first + self.together
        texts = [text for text in self.asked.texts[first:last] for _ in range(seeds)]
        queries = self.asked.queries
        own = None if queries is None else [query for query in queries[first:last] for _ in range(seeds)]
        row = measures.measured(made, texts, own, judge, seeds, device)
        return {"guidance": guidance, "first": first, "size": list(made[0].size), "figures": row}

    def look_at_truth(self, pipe: Maker) -> None:
        """The true images, once: those that were given, or of the scenes that were asked for."""
        if self.records.has({"guidance": TRUE, "first": 0}) or not self.records.rows:
            return
        width, height = self.records.rows[0]["size"]
        if self.config.reference is not None:
            row = measures.of_folder(self.config.reference, (width, height))
        elif self.asked.truth is not None:
            row = measures.of_scenes(self.asked.truth, (width, height), pipe)
        else:
            return
        self.records.add({"guidance": TRUE, "first": 0, "size": [width, height], "figures": row})

    # --- images for the report ----------------------------------------------------------------------------------

    def keep(self, made: list[Image.Image], guidance: str, first: int) -> None:
        """The first image of each of the first prompts."""
        chosen = made[:: self.config.seeds][: max(0, SHOWN - first)]
        if chosen:
            tiles.write(chosen, self.place(guidance, first))

    def place(self, guidance: str, first: int) -> Path:
        return self.folder / "pictures" / f"{self.guidances.index(guidance):03d}-{first:05d}.png"

    def shown(self, guidance: str) -> list[Image.Image]:
        """Images of a cell, one per prompt."""
        found: list[Image.Image] = []
        for first in self.firsts:
            count = min(self.together, len(self.asked) - first, SHOWN - first)
            if count > 0:
                found += tiles.read(self.place(guidance, first), count)
        return found

    # --- what is known --------------------------------------------------------------------------------------------

    def rows(self, guidance: str) -> list[Mapping[str, Any]]:
        """The records of a cell in order; none where some are missing."""
        own = {row["first"]: row for row in self.records.rows if row["guidance"] == guidance}
        return [own[first] for first in self.firsts] if set(own) == set(self.firsts) else []
