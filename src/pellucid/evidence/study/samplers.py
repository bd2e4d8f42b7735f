"""The sampler study: which sampler, how many steps, for this model. Every image of every cell is kept at once.

Image n has prompt n // seeds and the seed `seed` + n in every cell, so that cells differ by the sampler alone. The
folder holds config.json, records of each shard, sheets of images, and the latents of converged runs.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from pellucid import scenes
from pellucid.core.errors import PellucidError, rule
from pellucid.core.noise import check_seed
from pellucid.evidence.adherence import sheets
from pellucid.evidence.adherence.judging import judge
from pellucid.evidence.metrics import image_text, inception
from pellucid.evidence.metrics.inception import Inception
from pellucid.evidence.metrics.inception import features as inception_features
from pellucid.evidence.study import kernel
from pellucid.evidence.study.kernel import CONFIG, ELSEWHERE, Records, one_process
from pellucid.evidence.study.setups import SamplerCell, SamplerSetup, Yardstick, half_run, lay_cells
from pellucid.evidence.study.subject import StudyImages, Subject
from pellucid.interop import weights
from pellucid.interop.atomic_files import file_digest, is_left, put
from pellucid.models.guidance import Guidance
from pellucid.pipeline import fingerprint
from pellucid.pipeline.images import to_tensor
from pellucid.pipeline.request import MAX_BATCH

# --- The folder -----------------------------------------------------------------------------------------------------

KIND, VERSION = "samplers", 1
KEYS = ("cell", "first", "what")
IMAGES, LATENTS, FEATURES = "pictures", "latents", "features"


def check_sampler_folder(folder: Path, config: Mapping[str, Any], fixed: Sequence[str]) -> None:
    """Refuses a folder of another study, version, model or config, and one that holds other things."""
    path = folder / CONFIG
    if not path.exists():
        if folder.exists() and not (folder.is_dir() and all(map(is_left, folder.iterdir()))):
            raise PellucidError(rule("--out", "empty, new, or a study of this config", str(folder)), "out-taken")
        return
    held = read_sampler_config(folder)
    if held.get("mark") != config["mark"]:
        raise PellucidError(rule("model", f"the one that began {folder}", config["model"], ELSEWHERE), "resume-model")
    other = [name for name in fixed if held.get(name) != config[name]]
    if other:
        got = f"another {', '.join(other)}"
        raise PellucidError(f"config must be the one that began {folder}; got {got}. {ELSEWHERE}", "resume-config")


def read_sampler_config(folder: Path) -> dict[str, Any]:
    """config.json of a sampler study of this version."""
    path = folder / CONFIG
    if not path.is_file():
        raise PellucidError(rule("study", "a folder of a sampler study", str(folder)), "study-folder")
    held = kernel.read_config(folder)
    kernel.check_kind(folder, held, KIND, VERSION)
    return held


class SamplerFiles:
    """What a study has so far: its own records and those of all other shards, which it reads and does not write."""

    def __init__(self, folder: Path, shard: tuple[int, int] = (0, 1)) -> None:
        self.folder = folder
        self.own = Records.shared(folder, KEYS, shard)
        self.rows = {(row["cell"], row["first"], row["what"]): row for row in self.own.rows}
        self.digests: dict[str, str] = {}  # of files, by their place in the folder
        for row in self.own.rows:
            files = row.get("files")
            self.digests |= {str(k): str(v) for k, v in files.items()} if isinstance(files, dict) else {}
        self.fresh: dict[str, str] = {}  # of those that no row has yet
        self.unchecked: set[str] = set()  # files that were read and have none

    def has(self, cell: str, first: int, what: str) -> bool:
        return (cell, first, what) in self.rows

    def row(self, cell: str, first: int, what: str) -> dict[str, Any]:
        return self.rows[cell, first, what]

    def add(self, cell: str, first: int, what: str, values: Mapping[str, Any]) -> None:
        row = {"cell": cell, "first": first, "what": what, **values, **({"files": self.fresh} if self.fresh else {})}
        self.fresh = {}
        self.own.add(row)
        self.rows[cell, first, what] = row

    def claim(self, config: Mapping[str, Any]) -> None:
        """The folder is this study's; samplers and steps of another call are added to what it says."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
        path = self.folder / CONFIG
        if not path.is_file() or path.read_text("utf-8") != text:
            put(path, text)

    # --- images, latents, features ------------------------------------------------------------------------------

    def place(self, kind: str, cell: SamplerCell, first: int, suffix: str) -> Path:
        return self.folder / kind / cell.folder / f"{first:06d}{suffix}"

    def write_images(self, cell: SamplerCell, first: int, images: Sequence[Image.Image]) -> None:
        path = self.place(IMAGES, cell, first, ".png")
        sheets.write_tiles([image.convert("RGB") for image in images], path)
        self.note(path)

    def images(self, cell: SamplerCell, first: int, count: int) -> list[Image.Image]:
        return sheets.read_tiles(self.checked(self.place(IMAGES, cell, first, ".png")), count)

    def write_latents(self, cell: SamplerCell, first: int, latents: Tensor) -> None:
        self.write_tensor(self.place(LATENTS, cell, first, ".safetensors"), latents)

    def latents(self, cell: SamplerCell, first: int) -> Tensor:
        return weights.read_safetensors(self.checked(self.place(LATENTS, cell, first, ".safetensors")))["held"]

    def write_features(self, cell: SamplerCell, first: int, what: str, features: Tensor) -> None:
        self.write_tensor(self.place(f"{FEATURES}/{what}", cell, first, ".safetensors"), features)

    def features(self, cell: SamplerCell, first: int, what: str) -> Tensor:
        path = self.place(f"{FEATURES}/{what}", cell, first, ".safetensors")
        return weights.read_safetensors(self.checked(path))["held"]

    def note(self, path: Path) -> None:
        """The next row says what is in this file."""
        name = path.relative_to(self.folder).as_posix()
        self.digests[name] = self.fresh[name] = file_digest(path)

    def checked(self, path: Path) -> Path:
        """A file that is as it was written: what changed since is refused by name."""
        name = path.relative_to(self.folder).as_posix()
        if not path.is_file() or self.digests.get(name, "") not in ("", file_digest(path)):
            got = "other bytes" if path.is_file() else "no file"
            advice = "Remove the lines that name it from records*.jsonl: its batch is then made again."
            line = f"{name} of {self.folder} must be as the study wrote it; got {got}. {advice}"
            raise PellucidError(line, "study-damaged")
        if name not in self.digests:
            self.unchecked.add(name)
        return path

    def write_tensor(self, path: Path, held: Tensor) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, partial(save_file, {"held": held.detach().to(torch.float32).cpu().contiguous()}))
        self.note(path)


# --- Scores of images -----------------------------------------------------------------------------------------------

DIGITS = 8


class Scorer(Protocol):
    """Something that looks at the images of one batch. `what` names its rows: another judge has another name."""

    @property
    def what(self) -> str: ...

    def __call__(
        self, images: Sequence[Image.Image], prompts: Sequence[str], files: SamplerFiles, cell: SamplerCell, first: int
    ) -> dict[str, Any]: ...


def pixels_of(images: Sequence[Image.Image]) -> Tensor:
    """(N, 3, H, W) uint8."""
    held = [torch.from_numpy(np.asarray(image.convert("RGB")).copy()) for image in images]
    return torch.stack(held).permute(0, 3, 1, 2).contiguous()


def distances(made: StudyImages, best: StudyImages) -> dict[str, list[float | None]]:
    """Root mean square differences of each image: of its pixels in [0, 1], in 8 bits as a person gets them, and of
    its latents (of a pixel model: x), which 8 bits do not round. None where a number is not finite."""
    a, b = (pixels_of(one.images).double() / 255 for one in (made, best))
    if a.shape != b.shape or made.latents.shape != best.latents.shape:
        raise PellucidError(rule("images", f"of the converged ones' shape, {tuple(b.shape)}", tuple(a.shape)), "shape")
    return {"distance": rms(a, b), "latent": rms(made.latents.double(), best.latents.double())}


def rms(a: Tensor, b: Tensor) -> list[float | None]:
    found = (a - b).flatten(1).square().mean(1).sqrt().tolist()
    return [value if math.isfinite(value) else None for value in found]


class InceptionScorer:
    """Features (N, 2048) for KID and FID, kept in files."""

    def __init__(self, network: Inception) -> None:
        self.network = network
        self.what = f"inception-{network.digest()[:DIGITS]}"

    def __call__(
        self, images: Sequence[Image.Image], prompts: Sequence[str], files: SamplerFiles, cell: SamplerCell, first: int
    ) -> dict[str, Any]:
        files.write_features(cell, first, self.what, inception_features(pixels_of(images), self.network, len(images)))
        return {}


class ClipScorer:
    """Cosines of images with their prompts; the embeddings of the images are kept too, of length √D, so that KID's
    kernel (x·y / D + 1)³ sees their cosines."""

    def __init__(self, judge: image_text.Judge) -> None:
        self.judge = judge
        self.what = f"clip-{fingerprint.of_network(judge.network).rpartition(':')[2][:DIGITS]}"

    def __call__(
        self, images: Sequence[Image.Image], prompts: Sequence[str], files: SamplerFiles, cell: SamplerCell, first: int
    ) -> dict[str, Any]:
        found = self.judge.image(pixels_of(images))  # (N, D) of length 1
        files.write_features(cell, first, self.what, found * math.sqrt(found.shape[1]))
        texts, cut = self.judge.text(prompts)
        return {"cosines": (found * texts).sum(-1).cpu().tolist(), "cut": cut}


class SceneScorer:
    """Whether an image shows the scene that its prompt describes, by attribute."""

    what = "scenes"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device

    def __call__(
        self, images: Sequence[Image.Image], prompts: Sequence[str], files: SamplerFiles, cell: SamplerCell, first: int
    ) -> dict[str, Any]:
        readings = scenes.read(to_tensor(images).to(self.device))
        found = [judge(reading, scenes.parse(prompt)) for reading, prompt in zip(readings, prompts, strict=True)]
        return {
            "right": [one.right for one in found],
            "marks": [one.marks for one in found],
            "bled": [one.bled for one in found],
            "readable": [one.readable for one in found],
        }


def find_inception(path: str | Path | None, device: torch.device | str) -> tuple[Inception | None, str]:
    """(the network, "") or (None, why not): what was not named and is not in the cache is not fetched in a study."""
    if path is None:
        folder = inception.cache_folder()
        held = [
            folder / name for name in ("inception.safetensors", inception.WEIGHTS_NAME) if (folder / name).is_file()
        ]
        if not held:
            return (
                None,
                f"no Inception weights: name them with --inception, or put {inception.WEIGHTS_NAME} into {folder}",
            )
        path = held[0]
    return inception.load_inception(path, device), ""


def find_clip(path: str | Path | None, own: Path | None, device: torch.device | str) -> image_text.Judge | None:
    """The CLIP that was named, or the model's own."""
    place = path if path is not None else own
    return None if place is None else image_text.Judge.load(place, device)


# --- The study ------------------------------------------------------------------------------------------------------

MOST_IMAGES = 1_000_000
DecidingMeasure = Literal["distance", "latent", "kid", "image_text", "right"]
# What makes images: a study of the same folder must agree on it. Samplers and steps may be added, scores too.
FIXED_KEYS = (
    "prompts", "seeds", "seed", "guidance", "size", "batch", "converged", "converged_steps", "path_steps", "dtype",
)  # fmt: skip


@dataclass(frozen=True)
class SamplerStudyConfig:
    """`samplers` are `NAME[:GRID][:KEY=VALUE…]` or plan files, each at each of `steps`. `converged` is the sampler of
    the yardstick with `converged_steps`; stochastic samplers have their own, with `path_steps`."""

    model: str
    samplers: tuple[str, ...]
    steps: tuple[int, ...]
    prompts: tuple[str, ...] = ()
    seeds: int = 1  # images of each prompt
    seed: int = 0
    guidance: str | float | None = None
    size: tuple[int, int] | None = None  # width and height; the model's own where None
    batch: int = 16
    converged: str = "dpmpp_3m:exponential"  # even in λ: Karras' grid of a cosine spends half its steps above σ/α 300
    converged_steps: int = 200
    path_steps: int = 500
    dtype: str | None = "float32"
    rounds: int = 5  # of latency
    by: DecidingMeasure = "distance"

    def __post_init__(self) -> None:
        for name in ("samplers", "steps"):
            if not getattr(self, name):
                raise PellucidError(rule(name, "at least one", "none"), "study-list")
        bounds = (("seeds", MOST_IMAGES), ("batch", MAX_BATCH), ("rounds", 1000))
        for name, high in (*bounds, ("converged_steps", 10_000), ("path_steps", 10_000)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
                raise PellucidError(rule(name, f"a whole number from 1 to {high:,}", value), "study-number")
        for count in self.steps:
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise PellucidError(rule("steps", "whole numbers from 1 on", count), "steps")
        if len(set(self.steps)) != len(self.steps):
            raise PellucidError(rule("steps", "different", list(self.steps)), "study-list")
        for name in ("converged_steps", "path_steps"):
            if getattr(self, name) < 2 * max(self.steps):
                must = f"at least twice the most steps, {2 * max(self.steps)}"
                raise PellucidError(rule(name, must, getattr(self, name)), "converged")
        if any(not isinstance(one, str) for one in self.prompts) or self.images > MOST_IMAGES:
            raise PellucidError(rule("prompts × seeds", f"texts, {MOST_IMAGES:,} at most", self.images), "prompts")
        if self.by not in get_args(DecidingMeasure):
            raise PellucidError(rule("by", f"one of {', '.join(get_args(DecidingMeasure))}", self.by), "by")
        check_seed(self.seed)
        if self.guidance is not None:
            Guidance.parse(self.guidance)
        self.setups()

    @property
    def images(self) -> int:
        return max(1, len(self.prompts)) * self.seeds

    @property
    def yardstick(self) -> Yardstick:
        return Yardstick(SamplerSetup.parse(self.converged), self.converged_steps, self.path_steps)

    def setups(self) -> list[SamplerSetup]:
        return [SamplerSetup.parse(text) for text in self.samplers]

    def prompt(self, number: int) -> str:
        return self.prompts[number // self.seeds] if self.prompts else ""

    @property
    def how(self) -> dict[str, Any]:
        """What every request says."""
        size = {} if self.size is None else {"width": self.size[0], "height": self.size[1]}
        return size if self.guidance is None else {**size, "guidance": self.guidance}

    def firsts(self, shard: tuple[int, int] = (0, 1)) -> list[int]:
        """The number of the first image of every batch, or of every so many-th."""
        index, count = shard
        return list(range(0, self.images, self.batch))[index::count]

    def numbers(self, first: int) -> range:
        return range(first, min(first + self.batch, self.images))

    def to_dict(self, mark: str) -> dict[str, Any]:
        """What config.json holds."""
        plain = json.loads(json.dumps(asdict(self)))
        if self.guidance is not None:  # 3, "3" and 3.0 are one
            plain["guidance"] = Guidance.parse(self.guidance).text()
        return {"study": KIND, "version": VERSION, "mark": mark, **plain}


class SamplerStudy:
    """A study in its folder. What is there is not made again; a folder of another model or config is refused."""

    def __init__(
        self, config: SamplerStudyConfig, subject: Subject, folder: Path, shard: tuple[int, int] = (0, 1)
    ) -> None:
        self.config, self.subject, self.shard = config, subject, shard
        check_prompts(config, subject)
        self.cells, self.converged = lay_cells(
            config.setups(), config.steps, config.yardstick, subject.schedule, subject.target
        )
        check_sampler_folder(folder, config.to_dict(subject.mark), FIXED_KEYS)
        self.files = SamplerFiles(folder, shard)

    @property
    def folder(self) -> Path:
        return self.files.folder

    @cached_property
    def halves(self) -> list[SamplerCell]:
        return [half_run(cell, self.subject.schedule, self.subject.target) for cell in self.converged]

    def todo(self) -> int:
        """Model calls per image that are still to be made, summed over batches: what a bar counts."""
        return sum(cell.nfe for first in self.config.firsts(self.shard) for cell in self.missing(first))

    def missing(self, first: int) -> list[SamplerCell]:
        own = [*self.converged, *self.cells]
        if first == 0:
            own += self.halves
        return [cell for cell in own if not self.files.has(cell.key, first, "pictures")]

    @one_process
    def run(
        self,
        scorers: Sequence[Scorer] = (),
        done: Callable[[int], object] = lambda count: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Makes and scores what is missing of this shard, batch by batch; `done` is told the model calls."""
        self.files.claim(self.config.to_dict(self.subject.mark))
        for first in self.config.firsts(self.shard):
            for cell in self.missing(first):
                if stopped():
                    return
                self.make(cell, first)
                done(cell.nfe)
            for scorer in scorers:
                self.score(scorer, first)

    # --- images -------------------------------------------------------------------------------------------------

    def make(self, cell: SamplerCell, first: int) -> None:
        """One batch of one cell: its images, and how far they are from the converged ones."""
        numbers = self.config.numbers(first)
        seeds = [self.config.seed + n for n in numbers]
        asked = [self.config.prompt(n) for n in numbers]
        began = time.perf_counter()
        try:
            made = self.subject.make(asked, seeds, **self.config.how, **cell.asks(), noise=cell.noise(seeds))
        except PellucidError as error:  # the images of other cells are kept
            raise PellucidError(f"{cell.key}: {error}", error.code) from None
        row: dict[str, Any] = {"seconds": time.perf_counter() - began}
        self.files.write_images(cell, first, made.images)
        if cell.mark:
            self.files.write_latents(cell, first, made.latents)
        against = self.against(cell)
        if against is not None:
            row |= distances(made, self.kept(against, first))
        self.files.add(cell.key, first, "pictures", {"numbers": len(numbers), **row})

    def against(self, cell: SamplerCell) -> SamplerCell | None:
        """The converged run that a cell is compared with; a half run with its whole one."""
        if not cell.mark:
            return next(one for one in self.converged if one.key == cell.against)
        pairs = zip(self.halves, self.converged, strict=True) if cell not in self.converged else ()
        return next((whole for part, whole in pairs if part == cell), None)

    def kept(self, cell: SamplerCell, first: int) -> StudyImages:
        """A converged batch from its files."""
        count = len(self.config.numbers(first))
        return StudyImages(self.files.images(cell, first, count), self.files.latents(cell, first))

    # --- scores ---------------------------------------------------------------------------------------------------

    def score(self, scorer: Scorer, first: int) -> None:
        """What one scorer sees in a batch of every cell, and in the converged images of the yardstick."""
        numbers = self.config.numbers(first)
        for cell in (self.converged[0], *self.cells):
            if not self.files.has(cell.key, first, scorer.what):
                images = self.files.images(cell, first, len(numbers))
                prompts = [self.config.prompt(n) for n in numbers]
                self.files.add(cell.key, first, scorer.what, scorer(images, prompts, self.files, cell, first))


def check_prompts(config: SamplerStudyConfig, subject: Subject) -> None:
    if subject.asks == "nothing" and config.prompts:
        must = f"left out: {subject.name} takes neither text nor labels"
        raise PellucidError(rule("prompts", must, len(config.prompts)), "no-text")
    if subject.asks != "nothing" and not config.prompts:
        what = "one per line" if subject.asks == "prompt" else "a class a line"
        raise PellucidError(rule("prompts", f"given to {subject.name}, {what}", "none"), "prompts")
