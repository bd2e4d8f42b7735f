"""All that a model of scenes carries beside its denoiser, measured: each part's figures, and a sheet to look at.

    python recipes/parts.py scenes-128 --count 500 --batch 250 --device cuda --out out/parts

Adapter and base start from the same noise. A part whose figures are there already, asked for alike, is not measured
again. `PART.json` and `suite.md` hold the figures, `PART.png` the images side by side.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from pellucid import scenes
from pellucid.cli import trouble
from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import read_json
from pellucid.evidence.adherence import sheets
from pellucid.evidence.adherence.judging import Verdict, judge
from pellucid.evidence.adherence.samples import DTYPE, ImageSettings, Maker, through
from pellucid.evidence.adherence.sheets import Card, contact_sheet
from pellucid.evidence.metrics.image_text import Judge
from pellucid.evidence.metrics.inception import to_bytes
from pellucid.evidence.report.page import Table
from pellucid.evidence.statistics import Estimate, Share, mean_interval, percent
from pellucid.interop import source, weights
from pellucid.interop.atomic_files import put
from pellucid.models import ip_adapter
from pellucid.models.ip_adapter import IPAdapter
from pellucid.models.unet import UNet
from pellucid.pipeline import images
from pellucid.pipeline.load import load
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.request import Control, ImagePrompt, Lora, Request
from pellucid.pipeline.shelf import adapter_encoder, adapter_file
from pellucid.scenes.grammar import Query
from pellucid.scenes.reading import Reading
from pellucid.scenes.sampling import OBJECTS
from pellucid.scenes.scene import SceneObject, Scenes
from pellucid.scenes.words import STYLE_NAMES
from pellucid.train.scenes_source import alone

# --- VAE ------------------------------------------------------------------------------------------------------------

WORST = 0.01  # the share of images that are called the worst
MOST_RENDERS = 1_000_000


@dataclass(frozen=True)
class RoundTrip:
    """Decibels over `count` images: the mean with its interval, and the mean of the worst hundredth. `before` and
    `after`: the share that is read right in all attributes, of the true images and of what the VAE made of them."""

    count: int
    psnr: Estimate
    worst: float
    before: Share
    after: Share
    by_style: dict[str, float]

    def plain(self) -> dict[str, Any]:
        shares = {"before": self.before.plain(), "after": self.after.plain()}
        psnr = {"psnr": self.psnr.value, "interval": [self.psnr.low, self.psnr.high]}
        return {"count": self.count, **psnr, "worst": self.worst, **shares, "by_style": self.by_style}


def round_trip(
    vae: Any,
    count: int = 1000,
    *,
    size: int = 128,
    batch: int = 50,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> RoundTrip:
    """True renders of held-out scenes, through the mean of the encoder's posterior and back, in 8 bits as a person
    would see them."""
    if not 2 <= count <= MOST_RENDERS:
        raise PellucidError(rule("count", f"from 2 to {MOST_RENDERS:,}", count), "round-trip")
    psnr, manner, before, after = [], [], [], []
    for first in range(0, count, batch):
        indices = torch.arange(first, min(first + batch, count))
        drawn = scenes.sample(indices, seed, "held_out", scenes.TRAIN_STYLES, OBJECTS)
        queries = [query for _, query in scenes.described(drawn, seed, full=True, style=False)]
        true = scenes.render(drawn.to(device), size)
        made = through(vae, true)
        psnr.append(decibels(true, made).cpu())
        manner += [scene.style for scene in drawn.scenes()]
        before += judged(true, queries)
        after += judged(made, queries)
    values = torch.cat(psnr).double()
    least = values.sort().values[: max(1, round(WORST * count))]
    return RoundTrip(
        count=count,
        psnr=mean_interval(values, seed=seed),
        worst=float(least.mean()),
        before=Share.of(verdict.right for verdict in before),
        after=Share.of(verdict.right for verdict in after),
        by_style={name: mean_of(values, manner, name) for name in dict.fromkeys(scenes.TRAIN_STYLES) if name in manner},
    )


def judged(images: Tensor, queries: Sequence[Query]) -> list[Verdict]:
    return [judge(reading, query) for reading, query in zip(scenes.read(images), queries, strict=True)]


def decibels(true: Tensor, made: Tensor) -> Tensor:
    """(B,): 10·log₁₀(peak² / mean square error), the peak being the whole range of pixels."""
    error = ((true - made) / 2).square().flatten(1).mean(1).clamp(min=1e-12)
    return -10 * error.log10()


def mean_of(values: Tensor, manner: Sequence[str], name: str) -> float:
    own = torch.tensor([one == name for one in manner])
    return float(values[own].mean())


def pairs(vae: Any, count: int = 12, *, size: int = 128, device: str = "cpu") -> list[Image.Image]:
    """True images and what the VAE made of each, in turn, to look at."""
    true = scenes.render(scenes.sample(torch.arange(count), 0, "held_out").to(device), size)
    both = torch.stack([true, through(vae, true)], 1).flatten(0, 1)
    return images.to_images(both)


# --- Image-text encoder ---------------------------------------------------------------------------------------------

AMONG = 32


@dataclass(frozen=True)
class Matching:
    """Mean cosines of true images with their own caption and with another image's; `told`: how often the own one is
    the nearer of the two; `by_image`: how often an image's own caption is the nearest of 32, `by_text`: how often a
    caption's own image is."""

    count: int
    right: float
    shuffled: float
    told: Share
    by_image: Share
    by_text: Share

    def plain(self) -> dict[str, Any]:
        shares = {"told": self.told, "by_picture": self.by_image, "by_text": self.by_text}
        means = {"count": self.count, "right": self.right, "shuffled": self.shuffled}
        return means | {name: share.plain() for name, share in shares.items()}


def matching(judge: Judge, count: int = 1024, *, seed: int = 0, device: torch.device | str = "cpu") -> Matching:
    """Over true images of scenes that no denoiser was trained on, in groups of 32."""
    if count < AMONG or count % AMONG or count > MOST_RENDERS:
        raise PellucidError(rule("count", f"a multiple of {AMONG}, at most {MOST_RENDERS:,}", count), "matching")
    cosines = []
    for first in range(0, count, AMONG):
        drawn = scenes.sample(torch.arange(first, first + AMONG), seed, "held_out", scenes.TRAIN_STYLES, OBJECTS)
        captions = scenes.captions(drawn, seed, full=True)
        images = to_bytes((scenes.render(drawn.to(device), judge.network.config.vision.image_size) + 1) / 2)
        cosines.append((judge.image(images) @ judge.text(captions)[0].T).cpu())
    return summed(torch.stack(cosines))


def summed(cosines: Tensor) -> Matching:
    """Of cosines (groups, images, texts), the own ones on the diagonal; another's caption is the next one's."""
    right = cosines.diagonal(dim1=1, dim2=2)  # (G, 32)
    other = cosines.roll(-1, dims=2).diagonal(dim1=1, dim2=2)
    place = torch.arange(cosines.shape[1])
    return Matching(
        count=right.numel(),
        right=float(right.double().mean()),
        shuffled=float(other.double().mean()),
        told=Share.of((right > other).flatten().tolist()),
        by_image=Share.of((cosines.argmax(2) == place).flatten().tolist()),
        by_text=Share.of((cosines.argmax(1) == place).flatten().tolist()),
    )


# --- Adapters -------------------------------------------------------------------------------------------------------

NEUTRAL = ""  # a prompt that says nothing: the reference alone decides
ON_A_SHEET = 30
MOST_IMAGES = 100_000


@dataclass(frozen=True)
class Exam:
    """How many images, of which scenes, made how."""

    count: int = 200
    objects: tuple[int, ...] = OBJECTS
    making: ImageSettings = field(default_factory=ImageSettings)
    device: str = "cpu"  # where images are read

    def __post_init__(self) -> None:
        if not 2 <= self.count <= MOST_IMAGES:
            raise PellucidError(rule("count", f"from 2 to {MOST_IMAGES:,}", self.count), "exam")

    def batches(self) -> Iterator[tuple[int, Scenes]]:
        """Held-out scenes, and the number of the first of each batch."""
        for first in self.making.firsts(self.count):
            indices = torch.arange(first, min(first + self.making.batch, self.count))
            yield first, scenes.sample(indices, self.making.seed, "held_out", ("flat",), self.objects)


@dataclass(frozen=True)
class AdapterEffect:
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
        return {**kept, "adapted": self.adapted.plain(), "base": self.base.plain()}


# ControlNet


def follows_edges(pipe: Maker, network: Any, exam: Exam) -> AdapterEffect:
    """The exact outlines of a scene and its caption: F1 of the image's own outlines, within one pixel."""
    scores: dict[bool, list[Tensor]] = {True: [], False: []}
    cards: list[Card] = []
    for first, drawn in exam.batches():
        captions = [caption for caption, _ in scenes.described(drawn, exam.making.seed, full=True, style=False)]
        exact = scenes.edges(drawn)  # (B, 1, 128, 128)
        extra: dict[bool, dict[str, Any]] = {True: {"controls": [Control(network, exact)]}, False: {}}
        made = {on: exam.making.images(pipe, captions, first, **extra[on]) for on in (True, False)}
        for on in (True, False):
            scores[on].append(scenes.edge_f1(images.to_tensor(made[on]).to(exam.device), exact.to(exam.device)).cpu())
        hints = images.to_images(exact * 2 - 1)
        for i, caption in enumerate(captions[: ON_A_SHEET - len(cards) // 3]):
            cards.append(Card(hints[i], f"{first + i}: {caption}", "edges", None))
            cards += [Card(made[on][i], condition(on), f"F1 {scores[on][-1][i]:.3f}", None) for on in (False, True)]
    values = {on: torch.cat(parts).double() for on, parts in scores.items()}
    more = {
        "share of 0.9 or more": Share.of((values[True] >= 0.9).tolist()).value,
        "median": float(values[True].median()),
    }
    figure = "edge F1 within 1 pixel"
    both = (mean_interval(values[on]) for on in (True, False))
    return AdapterEffect("ControlNet", figure, exam.count, *both, more, tuple(cards))


def condition(on: bool) -> str:
    return "with the adapter" if on else "without it"


# IP-Adapter


class PerImageAdapter(IPAdapter):
    """An adapter for a batch of as many images: image n is prompted by image n alone."""

    def tokens(self, unet: UNet, states: Tensor, **options: Any) -> Any:
        """`states` (B, N, …) say the same of N images to each of B images; N is B here."""
        if states.shape[0] != states.shape[1]:
            raise PellucidError(
                rule("images that prompt", f"{states.shape[0]}, one per image", states.shape[1]), "exam"
            )
        own = torch.stack([states[i, i] for i in range(len(states))])[:, None]  # (B, 1, …)
        return super().tokens(unet, own, **options)


def read_adapter(file: str | Path, like: Tensor) -> PerImageAdapter:
    """An IP-Adapter from its file, in the dtype and on the device of `like`."""
    found = ip_adapter.from_state(weights.read(Path(file)))
    return PerImageAdapter(found.kind, found.image_proj, list(found.pairs)).to(like).eval()  # type: ignore[arg-type]


def carries_reference(pipe: Maker, adapter: PerImageAdapter, exam: Exam) -> AdapterEffect:
    """An image of one object alone, and a prompt that says nothing about it: an object of that colour and shape."""
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
        readings = {on: scenes.read(images.to_tensor(made[on]).to(exam.device)) for on in (True, False)}
        for on in (True, False):
            marks[on] += [likeness(r, t) for r, t in zip(readings[on], wanted, strict=True)]
        counts += [len(reading.objects) for reading in readings[True]]
        for i, thing in enumerate(wanted[: ON_A_SHEET - len(cards) // 3]):
            cards.append(Card(references[i], f"{first + i}: {thing.colour} {thing.shape}", "reference", None))
            for on in (False, True):
                right = marks[on][first + i].both if on else None
                cards.append(Card(made[on][i], condition(on), reading_words(readings[on][i]), right))
    both = {on: [mark.both for mark in marks[on]] for on in marks}
    more = {
        "colour": Share.of(mark.colour for mark in marks[True]).value,
        "shape": Share.of(mark.shape for mark in marks[True]).value,
        "objects a picture": sum(counts) / len(counts),
    }
    figure = "an object has the reference's colour and shape"
    shares = (Share.of(both[on]).estimate for on in (True, False))
    return AdapterEffect("IP-Adapter", figure, exam.count, *shares, more, tuple(cards))


class Likeness(NamedTuple):
    """Whether an object has both, whether any has the colour, and whether any has the shape."""

    both: bool
    colour: bool
    shape: bool


def likeness(reading: Reading, thing: SceneObject) -> Likeness:
    """What of a thing is in an image."""
    pairs = [(one.colour, one.shape) for one in reading.objects]
    colours, shapes = [c for c, _ in pairs], [s for _, s in pairs]
    return Likeness((thing.colour, thing.shape) in pairs, thing.colour in colours, thing.shape in shapes)


def reading_words(reading: Reading) -> str:
    """What was read, in words."""
    return ", ".join(f"{one.colour or 'unclear'} {one.shape or 'shape'}" for one in reading.objects) or "nothing"


# LoRA


def has_style(pipe: Maker, lora: Any, style: str, exam: Exam) -> AdapterEffect:
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
            styles[on] += scenes.style_of(images.to_tensor(made[on]).to(exam.device))
        for i, caption in enumerate(captions[: ON_A_SHEET - len(cards) // 2]):
            for on in (False, True):
                found = styles[on][first + i]
                words = condition(on) if on else f"{first + i}: {caption}"
                cards.append(Card(made[on][i], words, found or "unclear", found == style if on else None))
    marks = {on: [found == style for found in styles[on]] for on in styles}
    figure = f"style is {style}"
    shares = (Share.of(marks[on]).estimate for on in (True, False))
    return AdapterEffect("LoRA", figure, exam.count, *shares, {}, tuple(cards))


# --- Suite ----------------------------------------------------------------------------------------------------------

BESIDE = ("controlnet", "ip_adapter", "lora", "image_text")  # what may lie beside a base, by its folder in a bundle
Say = Callable[[str], object]
Found = RoundTrip | AdapterEffect | Matching


@dataclass(frozen=True)
class Suite:
    """`model` is the base; the other parts are folders or files, as `pellucid train` writes them, and may be left out.
    `count` images are made of each, `true` renders go through the VAE and to the image-text encoder."""

    model: str
    controlnet: str | None = None
    ip_adapter: str | None = None
    lora: str | None = None
    style: str = "sketch"  # of the LoRA
    image_text: str | None = None
    count: int = 200
    true: int = 1024
    making: ImageSettings = field(default_factory=ImageSettings)
    dtype: str = DTYPE
    device: str | None = None

    def __post_init__(self) -> None:
        if self.true < AMONG or self.true % AMONG:
            raise PellucidError(rule("true", f"a multiple of {AMONG}", self.true), "suite")
        self.exam("cpu")

    @staticmethod
    def of(model: str, **changes: Any) -> Suite:
        """The suite of a bundle, with the parts that it has."""
        place = source.locate(model)
        return Suite(model, **{name: f"{model}/{name}" for name in BESIDE if (place / name).is_dir()} | changes)

    @property
    def parts(self) -> list[str]:
        return ["vae", *(name for name in BESIDE if getattr(self, name))]

    def exam(self, device: str) -> Exam:
        return Exam(self.count, making=self.making, device=device)

    @cached_property
    def pipe(self) -> Pipeline:
        eyes = adapter_encoder(self.ip_adapter) if self.ip_adapter else None
        return load(self.model, dtype=self.dtype, device=self.device, image_encoder=eyes)


def measure(
    suite: Suite, folder: Path, say: Say = print, only: Sequence[str] | None = None
) -> dict[str, dict[str, Any]]:
    """Writes PART.json and PART.png for each part, and suite.md for all of them; returns the figures. `only` names the
    parts that are measured now."""
    wanted = suite.parts if only is None else list(only)
    for name in wanted:
        if name not in suite.parts:
            raise PellucidError(rule("only", f"parts that are given: {', '.join(suite.parts)}", name), "suite")
    folder.mkdir(parents=True, exist_ok=True)
    asked = json.loads(json.dumps(asdict(suite)))
    found: dict[str, dict[str, Any]] = {}
    for part in wanted:
        path = folder / f"{part}.json"
        kept = read_figures(path, asked)
        if kept is None:
            say(f"measuring {part}")
            kept, cards = PARTS[part](suite)
            if cards:
                columns = 10 if part in ("vae", "lora") else 9  # pairs, or a hint and two images
                sheets.save_png(
                    contact_sheet(cards, f"{Path(suite.model).name}: {part}", columns), folder / f"{part}.png"
                )
            put(path, json.dumps({"asked": asked, "figures": kept}, indent=1, allow_nan=False) + "\n")
        found[part] = kept
    put(folder / "suite.md", suite_table(found).markdown())
    return found


def read_figures(path: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The figures of a part that was measured with the same settings."""
    try:
        held = read_json(path)
    except PellucidError:
        return None
    figures = held.get("figures")
    return figures if isinstance(figures, dict) and held.get("asked") == asked else None


PartFigures = tuple[dict[str, Any], tuple[Card, ...]]


def measure_vae(suite: Suite) -> PartFigures:
    pipe = suite.pipe
    vae, device, size = pipe.components.vae, str(pipe.device), pipe.size_of(Request())[0]
    making = suite.making
    found = round_trip(vae, suite.true, size=size, batch=making.batch, seed=making.seed, device=device)
    names = ("true", "after the VAE")
    cards = tuple(Card(one, "", names[i % 2], None) for i, one in enumerate(pairs(vae, 30, size=size, device=device)))
    return found.plain(), cards


def measure_controlnet(suite: Suite) -> PartFigures:
    found = follows_edges(suite.pipe, suite.controlnet, suite.exam(str(suite.pipe.device)))
    return found.plain(), found.cards


def measure_ip_adapter(suite: Suite) -> PartFigures:
    assert suite.ip_adapter is not None
    like = next(suite.pipe.components.network.parameters())
    adapter = read_adapter(adapter_file(suite.ip_adapter), like)
    found = carries_reference(suite.pipe, adapter, suite.exam(str(suite.pipe.device)))
    return found.plain(), found.cards


def measure_lora(suite: Suite) -> PartFigures:
    loaded = suite.pipe.load_lora(suite.lora)
    found = has_style(suite.pipe, loaded, suite.style, suite.exam(str(suite.pipe.device)))
    return found.plain(), found.cards


def measure_image_text(suite: Suite) -> PartFigures:
    assert suite.image_text is not None
    judge = Judge.load(suite.image_text, suite.pipe.device)
    return matching(judge, suite.true, seed=suite.making.seed, device=suite.pipe.device).plain(), ()


PARTS: dict[str, Callable[[Suite], PartFigures]] = {
    "vae": measure_vae,
    "controlnet": measure_controlnet,
    "ip_adapter": measure_ip_adapter,
    "lora": measure_lora,
    "image_text": measure_image_text,
}


def suite_table(found: dict[str, dict[str, Any]]) -> Table:
    """Every figure, and what it is without the part."""
    rows: list[tuple[str, ...]] = []
    for part, one in found.items():
        if part == "vae":
            psnr = Estimate(one["psnr"], *one["interval"])
            rows.append(("VAE", "PSNR of the round trip, dB", psnr.words("{:.2f}".format), "–"))
            rows.append(("VAE", "PSNR of the worst hundredth, dB", f"{one['worst']:.2f}", "–"))
            rows.append(("VAE", "read right in all attributes", share_words(one["after"]), share_words(one["before"])))
        elif part == "image_text":
            rows.append(("image-text", "cosine", f"{one['right']:.3f}", f"{one['shuffled']:.3f}, another's caption"))
            for key, words in (("by_picture", "caption found among 32"), ("by_text", "image found among 32")):
                rows.append(("image-text", words, share_words(one[key]), f"{100 / AMONG:.1f} % by chance"))
        else:
            both = [Estimate(**one[key]) for key in ("adapted", "base")]
            form, unit = ("{:.3f}".format, "") if part == "controlnet" else (percent, " %")
            rows.append((one["adapter"], one["figure"], *(estimate.words(form, unit) for estimate in both)))
    note = "Brackets are 95 % intervals. Without: the base from the same noise; for the VAE, the true images."
    return Table("Parts of the model", ("part", "figure", "with", "without"), tuple(rows), note)


def share_words(one: dict[str, Any]) -> str:
    return Share(one["right"], one["count"]).words


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a bundle, by its folder or its name")
    parser.add_argument("--count", type=int, default=200, help="images for each adapter")
    parser.add_argument("--true", type=int, default=1024, help="true renders for the VAE and the image-text encoder")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--only", nargs="+", help="some of the parts")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(words)
    try:
        making = ImageSettings(steps=given.steps, batch=given.batch)
        suite = Suite.of(given.model, count=given.count, true=given.true, making=making, device=given.device)
        measure(suite, given.out, only=given.only)
    except PellucidError as error:
        return trouble(error.code, str(error))
    print(given.out / "suite.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
