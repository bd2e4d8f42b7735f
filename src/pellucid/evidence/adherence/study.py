"""The study of adherence: prompts that training never saw, images of them, and what each image shows.

A folder holds config.json, one record per batch (the captions, and what was read in the images), and the images.
Verdicts are made of the records, so that a better rule needs no new images.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from PIL import Image

from pellucid import scenes
from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.adherence import sheets
from pellucid.evidence.adherence.judging import ATTRIBUTES, Verdict, judge, reading_from_json, reading_to_json
from pellucid.evidence.adherence.samples import DTYPE, ImageSettings, Maker, Part, open_pipe
from pellucid.evidence.adherence.sheets import Card, contact_sheet
from pellucid.evidence.report.page import Table
from pellucid.evidence.statistics import Share
from pellucid.evidence.study.kernel import ShardNumber, Study
from pellucid.interop.atomic_files import put, sealed
from pellucid.models.guidance import Guidance
from pellucid.pipeline import fingerprint
from pellucid.pipeline.images import to_tensor
from pellucid.scenes.grammar import Query
from pellucid.scenes.reading import Reading
from pellucid.train.trainer import MODEL

_MOST_PROMPTS = 100_000


@dataclass(frozen=True)
class AdherenceConfig:
    """`prompts` captions that say every attribute, of scenes whose objects are all combinations that training never
    saw; `objects` are their numbers of objects, drawn at random."""

    model: str
    part: Part = "unet"
    prompts: int = 1000
    objects: tuple[int, ...] = (1, 2, 3)
    making: ImageSettings = field(default_factory=ImageSettings)
    dtype: str = DTYPE

    def __post_init__(self) -> None:
        if not 1 <= self.prompts <= _MOST_PROMPTS:
            raise PellucidError(rule("prompts", f"from 1 to {_MOST_PROMPTS:,}", self.prompts), "adherence")
        if len(set(self.objects)) != len(self.objects):
            raise PellucidError(rule("objects", "numbers, none of them twice", list(self.objects)), "adherence")
        scenes.sample(torch.zeros(0, dtype=torch.int64), objects=self.objects)  # refuses what the world does not have

    def asked(self) -> list[tuple[str, Query]]:
        return scenes.prompts(self.prompts, self.objects, self.making.seed, split="held_out")


@dataclass(frozen=True)
class GradedImage:
    """One image of the study: its caption, and what was read in it."""

    number: int
    caption: str
    query: Query
    reading: Reading

    @property
    def verdict(self) -> Verdict:
        return judge(self.reading, self.query)

    def against(self, other: GradedImage) -> Verdict:
        """As if it had been asked for another caption."""
        return judge(self.reading, other.query)


class AdherenceBatch(NamedTuple):
    """The images from this number on."""

    first: int


class AdherenceStudy(Study[AdherenceConfig, AdherenceBatch]):
    """`pipe` makes the images; what was made can be read without it."""

    kind = "adherence"
    cell = AdherenceBatch
    parts = "batches"
    progress = "making and reading images"
    charts = False

    def __init__(
        self,
        config: AdherenceConfig,
        folder: Path,
        pipe: Maker | None = None,
        device: torch.device | str = "cpu",
        shard: ShardNumber = (0, 1),
        model_hash: str = "",
    ) -> None:
        self.pipe, self.device, self.model_hash = pipe, device, model_hash
        self.asked = config.asked()
        super().__init__(config, folder, shard)

    @classmethod
    def open(cls, config: AdherenceConfig, folder: Path, shard: ShardNumber = (0, 1), **resources: Any) -> Self:
        """`resources` is the `device`."""
        pipe = open_pipe(config.model, config.part, dtype=config.dtype, **resources)
        return cls(config, folder, pipe, pipe.device, shard, fingerprint.of_model(pipe.components))

    @property
    def text(self) -> str:
        """Without kind and version, which its folders never had."""
        return json.dumps({**asdict(self.config), "model_hash": self.model_hash}, indent=1, sort_keys=True)

    def cells(self) -> list[AdherenceBatch]:
        return list(map(AdherenceBatch, self.config.making.firsts(len(self.asked))))

    def make(self, cell: AdherenceBatch) -> dict[str, Any]:
        assert self.pipe is not None
        batch = self.asked[cell.first : cell.first + self.config.making.batch]
        images = self.config.making.images(self.pipe, [caption for caption, _ in batch], cell.first)
        self.claim()  # only once there is an image to keep
        sheets.write_tiles(images, self.place(cell.first))
        return self.read_images(cell.first, images)

    def read_images(self, first: int, images: Sequence[Image.Image]) -> dict[str, Any]:
        captions = [caption for caption, _ in self.asked[first : first + len(images)]]
        readings = scenes.read(to_tensor(images).to(self.device))
        rows = [{"caption": c, "reading": reading_to_json(r)} for c, r in zip(captions, readings, strict=True)]
        return {"pictures": rows}

    def results(self) -> dict[str, AdherenceFigures]:
        return figures(self.shown(), self.config.making.seed)

    def report(self) -> dict[str, AdherenceFigures]:
        return write_report(self)

    def read_again(self) -> list[GradedImage]:
        """Reads the images that are there once more: after a change of the reader."""
        rows = []
        for row in self.records.rows:
            images = sheets.read_tiles(self.place(row["first"]), len(row["pictures"]))
            rows.append({"first": row["first"], **self.read_images(row["first"], images)})
        put(self.records.path, "".join(map(sealed, rows)))
        self.reload()
        return self.shown()

    def place(self, first: int) -> Path:
        return self.folder / "pictures" / f"{first:05d}.png"

    def shown(self) -> list[GradedImage]:
        """The images so far, by their numbers."""
        found = [one for row in self.records.rows for one in self.of_batch(row)]
        return sorted(found, key=lambda one: one.number)

    def of_batch(self, row: Mapping[str, Any]) -> list[GradedImage]:
        first, batch = row["first"], self.asked[row["first"] : row["first"] + self.config.making.batch]
        if [image["caption"] for image in row["pictures"]] != [caption for caption, _ in batch]:
            must = "of this world's captions: they have changed since"
            raise PellucidError(rule("records", must, f"batch {first}", "Choose another --out."), "adherence-captions")
        pairs = zip(batch, row["pictures"], strict=True)
        return [
            GradedImage(first + i, caption, query, reading_from_json(image["reading"]))
            for i, ((caption, query), image) in enumerate(pairs)
        ]

    def images(self, chosen: list[GradedImage]) -> list[Image.Image]:
        """The images of some, in their order."""
        size = self.config.making.batch
        held: dict[int, list[Image.Image]] = {}
        for first in sorted({one.number // size * size for one in chosen}):
            held[first] = sheets.read_tiles(self.place(first), len(self.asked[first : first + size]))
        return [held[one.number // size * size][one.number % size] for one in chosen]


# --- Figures --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdherenceFigures:
    """Of some images. `attributes`: the share of images that have all of it right, of those whose caption says it;
    `bled` of those with several shapes; `shuffled`: right by the caption of another image with as many objects."""

    right: Share
    attributes: dict[str, Share]
    unreadable: Share
    bled: Share
    shuffled: Share

    @staticmethod
    def of(verdicts: Sequence[Verdict], shuffled: Sequence[Verdict]) -> AdherenceFigures:
        by = {name: Share.of(verdict.marks.get(name) for verdict in verdicts) for name in ATTRIBUTES}
        return AdherenceFigures(
            right=Share.of(verdict.right for verdict in verdicts),
            attributes={name: share for name, share in by.items() if share.count},
            unreadable=Share.of(not verdict.readable for verdict in verdicts),
            bled=Share.of(verdict.bled for verdict in verdicts),
            shuffled=Share.of(verdict.right for verdict in shuffled),
        )

    def plain(self) -> dict[str, Any]:
        own = {name: getattr(self, name).plain() for name in ("right", "unreadable", "bled", "shuffled")}
        return {**own, "attributes": {name: share.plain() for name, share in self.attributes.items()}}


def figures(shown: Sequence[GradedImage], seed: int = 0) -> dict[str, AdherenceFigures]:
    """By number of objects, and of all."""
    verdicts = {one.number: one.verdict for one in shown}
    chance = shuffled(shown, seed)

    groups = {"all": [one.number for one in shown]}
    for number in sorted({len(one.query.objects) for one in shown}, reverse=True):
        groups = {str(number): [one.number for one in shown if len(one.query.objects) == number], **groups}
    return {
        name: AdherenceFigures.of([verdicts[n] for n in own], [chance[n] for n in own if n in chance])
        for name, own in groups.items()
    }


def shuffled(shown: Sequence[GradedImage], seed: int = 0) -> dict[int, Verdict]:
    """Each image by the caption of another with as many objects: a random ring, so that none keeps its own."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[int, Verdict] = {}
    for number in {len(one.query.objects) for one in shown}:
        group = [one for one in shown if len(one.query.objects) == number]
        ring = [group[i] for i in torch.randperm(len(group), generator=generator).tolist()]
        if len(ring) > 1:
            found |= {one.number: one.against(ring[i - 1]) for i, one in enumerate(ring)}
    return found


def adherence_table(found: dict[str, AdherenceFigures], title: str = "Adherence") -> Table:
    """A column for each number of objects."""
    names = [name for name in ATTRIBUTES if any(name in one.attributes for one in found.values())]
    rows: list[tuple[str, ...]] = [("images", *(f"{one.right.count:,}" for one in found.values()))]
    rows.append(("**all right**", *(f"**{one.right.words}**" for one in found.values())))
    for name in names:
        rows.append((name, *(one.attributes.get(name, Share(0, 0)).words for one in found.values())))
    rows.append(("not readable", *(one.unreadable.words for one in found.values())))
    rows.append(("colour of another object", *(one.bled.words for one in found.values())))
    rows.append(("all right by another's caption", *(one.shuffled.words for one in found.values())))
    columns = ("", *(f"{key} object{'' if key == '1' else 's'}" if key != "all" else "all" for key in found))
    note = (
        "Shares of images, with Wilson's 95 % interval. An attribute is right where all objects have it right; it is "
        "a share of the captions that say it. What cannot be read is not right. "
        "'Colour of another object' is a share of the captions with different shapes."
    )
    return Table(title, columns, tuple(rows), note)


# --- Report ---------------------------------------------------------------------------------------------------------

_ON_A_SHEET = 100


def write_report(study: AdherenceStudy) -> dict[str, AdherenceFigures]:
    """figures.json, table.md, random.png and, where there are any, failures.png, of the images so far."""
    shown = study.shown()
    found = figures(shown, study.config.making.seed)
    put(study.folder / "figures.json", json.dumps(_figures_json(study.config, found), indent=1, allow_nan=False) + "\n")
    put(study.folder / "table.md", adherence_table(found, _headline(study.config)).markdown())
    generator = torch.Generator().manual_seed(study.config.making.seed)
    picks = torch.randperm(len(shown), generator=generator)[:_ON_A_SHEET].sort().values.tolist()
    right = found["all"].right
    _write_sheet(study, [shown[i] for i in picks], f"{_headline(study.config)}: random images", "random.png")
    failures = [one for one in shown if not one.verdict.right]
    title = f"{_headline(study.config)}: {right.count - right.right} of {right.count:,} images are not right"
    if failures:
        _write_sheet(study, failures[:_ON_A_SHEET], title, "failures.png")
    else:
        (study.folder / "failures.png").unlink(missing_ok=True)
    return found


def _headline(config: AdherenceConfig) -> str:
    making = config.making
    place = Path(config.model)
    model = place.parent.name if place.name == MODEL and place.parent.name else place.name
    model += "/dit" if config.part == "dit" else ""
    guidance = Guidance.parse(making.guidance).text()
    return f"{model}, {making.sampler}, {making.steps} steps, guidance {guidance}"


def _write_sheet(study: AdherenceStudy, shown: Sequence[GradedImage], title: str, name: str) -> None:
    cards = []
    for one, image in zip(shown, study.images(list(shown)), strict=True):
        verdict = one.verdict
        cards.append(Card(image, f"{one.number}: {one.caption}", verdict.words, verdict.right))
    sheets.save_png(contact_sheet(cards, title), study.folder / name)


def _figures_json(config: AdherenceConfig, found: dict[str, AdherenceFigures]) -> dict[str, Any]:
    making = {name: getattr(config.making, name) for name in ("sampler", "steps", "guidance", "seed")}
    return {
        "model": config.model,
        "part": config.part,
        "dtype": config.dtype,
        **making,
        "prompts": config.prompts,
        "objects": {key: one.plain() for key, one in found.items()},
    }
