"""What an adapter adds: images with it and images of the base without it, from the same noise, measured alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pellucid import scenes
from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.adherence.making import Maker, Making, seen
from pellucid.evidence.adherence.shares import Share
from pellucid.evidence.adherence.sheets import Card
from pellucid.evidence.metrics.bootstrap import mean_interval
from pellucid.evidence.study.significance import Estimate
from pellucid.interop import weights
from pellucid.models import ip_adapter
from pellucid.models.ip_adapter import IPAdapter
from pellucid.models.unet import UNet
from pellucid.pipeline import images
from pellucid.pipeline.adapters import Control, ImagePrompt, Lora
from pellucid.scenes.reading import Reading
from pellucid.scenes.sampling import OBJECTS
from pellucid.scenes.scene import Scenes, Thing
from pellucid.scenes.words import STYLE_NAMES
from pellucid.train.scenes_source import alone

NEUTRAL = ""  # a prompt that says nothing: the reference alone decides
ON_A_SHEET = 30
MOST = 100_000


@dataclass(frozen=True)
class Exam:
    """How many images, of which scenes, made how."""

    count: int = 200
    objects: tuple[int, ...] = OBJECTS
    making: Making = field(default_factory=Making)
    device: str = "cpu"  # where images are read

    def __post_init__(self) -> None:
        if not 2 <= self.count <= MOST:
            raise PellucidError(rule("count", f"from 2 to {MOST:,}", self.count), "exam")

    def batches(self) -> Iterator[tuple[int, Scenes]]:
        """Held-out scenes, and the number of the first of each batch."""
        for first in self.making.firsts(self.count):
            indices = torch.arange(first, min(first + self.making.batch, self.count))
            yield first, scenes.sample(indices, self.making.seed, "held_out", ("flat",), self.objects)


@dataclass(frozen=True)
class Compared:
    """One figure with an adapter and without it; `more` holds figures beside it, `cards` images to look at."""

    adapter: str
    figure: str
    count: int
    adapted: Estimate
    base: Estimate
    more: dict[str, float] = field(default_factory=dict)
    cards: tuple[Card, ...] = field(default=(), repr=False)

    def plain(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("adapter", "figure", "count", "more")}
        return {**kept, "adapted": asdict(self.adapted), "base": asdict(self.base)}


# ControlNet


def follows_edges(pipe: Maker, network: Any, exam: Exam) -> Compared:
    """The exact outlines of a scene and its caption: F1 of the image's own outlines, within one pixel."""
    scores: dict[bool, list[Tensor]] = {True: [], False: []}
    cards: list[Card] = []
    for first, drawn in exam.batches():
        captions = [caption for caption, _ in scenes.described(drawn, exam.making.seed, full=True, style=False)]
        exact = scenes.edges(drawn)  # (B, 1, 128, 128)
        extra: dict[bool, dict[str, Any]] = {True: {"controls": [Control(network, exact)]}, False: {}}
        made = {on: exam.making.images(pipe, captions, first, **extra[on]) for on in (True, False)}
        for on in (True, False):
            scores[on].append(scenes.edge_f1(seen(made[on], exam.device), exact.to(exam.device)).cpu())
        hints = images.to_images(exact * 2 - 1)
        for i, caption in enumerate(captions[: ON_A_SHEET - len(cards) // 3]):
            cards.append(Card(hints[i], f"{first + i}: {caption}", "edges", None))
            cards += [Card(made[on][i], name(on), f"F1 {scores[on][-1][i]:.3f}", None) for on in (False, True)]
    values = {on: torch.cat(parts).double() for on, parts in scores.items()}
    more = {
        "share of 0.9 or more": Share.of((values[True] >= 0.9).tolist()).value,
        "median": float(values[True].median()),
    }
    figure = "edge F1 within 1 pixel"
    return Compared("ControlNet", figure, exam.count, mean(values[True]), mean(values[False]), more, tuple(cards))


def name(on: bool) -> str:
    return "with the adapter" if on else "without it"


def mean(values: Tensor) -> Estimate:
    interval = mean_interval(values)
    return Estimate(float(values.mean()), interval.low, interval.high)


def share(marks: Sequence[bool]) -> Estimate:
    found = Share.of(marks)
    return Estimate(found.value, *found.interval)


# IP-Adapter


class EachItsOwn(IPAdapter):
    """An adapter for a batch of as many images: image n is prompted by image n alone."""

    def tokens(self, unet: UNet, states: Tensor, **options: Any) -> Any:
        """`states` (B, N, …) say the same of N images to each of B images; N is B here."""
        if states.shape[0] != states.shape[1]:
            raise PellucidError(
                rule("images that prompt", f"{states.shape[0]}, one per image", states.shape[1]), "exam"
            )
        own = torch.stack([states[i, i] for i in range(len(states))])[:, None]  # (B, 1, …)
        return super().tokens(unet, own, **options)


def read_adapter(file: str | Path, like: Tensor) -> EachItsOwn:
    """An IP-Adapter from its file, in the dtype and on the device of `like`."""
    found = ip_adapter.from_state(weights.read(Path(file)))
    return EachItsOwn(found.kind, found.image_proj, list(found.pairs)).to(like).eval()  # type: ignore[arg-type]


def carries_reference(pipe: Maker, adapter: EachItsOwn, exam: Exam) -> Compared:
    """An image of one object alone, and a prompt that says nothing of it: an object of that colour and shape."""
    marks: dict[bool, list[Likeness]] = {True: [], False: []}
    counts: list[int] = []
    cards: list[Card] = []
    for first, drawn in replace(exam, objects=(1,)).batches():
        shown = scenes.render(alone(drawn))  # (B, 3, H, W)
        references = images.to_images(shown)
        wanted = [scene.things[0] for scene in drawn.scenes()]
        extra: dict[bool, dict[str, Any]] = {True: {"image_prompts": [ImagePrompt(adapter, references)]}, False: {}}
        prompts = [NEUTRAL] * len(wanted)
        made = {on: exam.making.images(pipe, prompts, first, **extra[on]) for on in (True, False)}
        readings = {on: scenes.read(seen(made[on], exam.device)) for on in (True, False)}
        for on in (True, False):
            marks[on] += [likeness(r, t) for r, t in zip(readings[on], wanted, strict=True)]
        counts += [len(reading.objects) for reading in readings[True]]
        for i, thing in enumerate(wanted[: ON_A_SHEET - len(cards) // 3]):
            cards.append(Card(references[i], f"{first + i}: {thing.colour} {thing.shape}", "reference", None))
            for on in (False, True):
                right = marks[on][first + i].both if on else None
                cards.append(Card(made[on][i], name(on), told(readings[on][i]), right))
    both = {on: [mark.both for mark in marks[on]] for on in marks}
    more = {
        "colour": Share.of(mark.colour for mark in marks[True]).value,
        "shape": Share.of(mark.shape for mark in marks[True]).value,
        "objects a picture": sum(counts) / len(counts),
    }
    figure = "an object has the reference's colour and shape"
    return Compared("IP-Adapter", figure, exam.count, share(both[True]), share(both[False]), more, tuple(cards))


class Likeness(NamedTuple):
    """Whether an object has both, whether any has the colour, and whether any has the shape."""

    both: bool
    colour: bool
    shape: bool


def likeness(reading: Reading, thing: Thing) -> Likeness:
    """What of a thing is in an image."""
    pairs = [(one.colour, one.shape) for one in reading.objects]
    colours, shapes = [c for c, _ in pairs], [s for _, s in pairs]
    return Likeness((thing.colour, thing.shape) in pairs, thing.colour in colours, thing.shape in shapes)


def told(reading: Reading) -> str:
    """What was read, in words."""
    return ", ".join(f"{one.colour or 'unclear'} {one.shape or 'shape'}" for one in reading.objects) or "nothing"


# LoRA


def has_style(pipe: Maker, lora: Any, style: str, exam: Exam) -> Compared:
    """Captions that name no style: the share of images whose style is the LoRA's."""
    if style not in STYLE_NAMES:
        raise PellucidError(rule("style", "one of " + ", ".join(STYLE_NAMES), style), "exam")
    styles: dict[bool, list[str | None]] = {True: [], False: []}
    cards: list[Card] = []
    for first, drawn in exam.batches():
        captions = [caption for caption, _ in scenes.described(drawn, exam.making.seed, full=True, style=False)]
        extra: dict[bool, dict[str, Any]] = {True: {"loras": [Lora(lora)]}, False: {}}
        made = {on: exam.making.images(pipe, captions, first, **extra[on]) for on in (True, False)}
        for on in (True, False):
            styles[on] += scenes.style_of(seen(made[on], exam.device))
        for i, caption in enumerate(captions[: ON_A_SHEET - len(cards) // 2]):
            for on in (False, True):
                found = styles[on][first + i]
                words = name(on) if on else f"{first + i}: {caption}"
                cards.append(Card(made[on][i], words, found or "unclear", found == style if on else None))
    marks = {on: [found == style for found in styles[on]] for on in styles}
    figure = f"style is {style}"
    return Compared("LoRA", figure, exam.count, share(marks[True]), share(marks[False]), {}, tuple(cards))
