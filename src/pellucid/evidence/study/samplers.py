"""The sampler study: which sampler, how many steps, for this model. Every image of every cell is kept at once.

Image n has prompt n // seeds and the seed `seed` + n in every cell, so that cells differ by the sampler alone. The
folder holds config.json, records of each shard, sheets of images, and the latents of converged runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

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
from pellucid.evidence.study.kernel import ProgressBar, Records, ShardNumber, Study, check_whole
from pellucid.evidence.study.setups import SamplerCell, SamplerSetup, Yardstick, half_run, lay_cells
from pellucid.evidence.study.subject import StudyImages, Subject, queries_of
from pellucid.interop import weights
from pellucid.interop.atomic_files import file_digest, put
from pellucid.models.guidance import Guidance
from pellucid.pipeline import fingerprint
from pellucid.pipeline.images import to_tensor
from pellucid.pipeline.request import MAX_BATCH

if TYPE_CHECKING:
    from pellucid.evidence.study.samplers_verdict import SamplerFigures

# --- The folder -----------------------------------------------------------------------------------------------------

IMAGES, _LATENTS, _FEATURES = "pictures", "latents", "features"


class SamplerFiles:
    """Images, latents and features of a study, with what its records say of them."""

    def __init__(self, folder: Path, records: Records) -> None:
        self.folder, self.records = folder, records
        self.digests: dict[str, str] = {}  # of files, by their place in the folder
        for row in records.rows:
            files = row.get("files")
            self.digests |= {str(k): str(v) for k, v in files.items()} if isinstance(files, dict) else {}
        self.fresh: dict[str, str] = {}  # of those that no row has yet
        self.unchecked: set[str] = set()  # files that were read and have none

    def has(self, cell: str, first: int, what: str) -> bool:
        return (cell, first, what) in self.records.by_name

    def row(self, cell: str, first: int, what: str) -> dict[str, Any]:
        return self.records.by_name[cell, first, what]

    def take_digests(self) -> dict[str, dict[str, str]]:
        """What the next row says of the files that were written for it."""
        taken, self.fresh = self.fresh, {}
        return {"files": taken} if taken else {}

    # --- images, latents, features ------------------------------------------------------------------------------

    def place(self, kind: str, cell: SamplerCell, first: int, suffix: str) -> Path:
        return self.folder / kind / cell.folder / f"{first:06d}{suffix}"

    def write_images(self, cell: SamplerCell, first: int, images: Sequence[Image.Image]) -> None:
        path = self.place(IMAGES, cell, first, ".png")
        sheets.write_tiles([image.convert("RGB") for image in images], path)
        self.note(path)

    def images(self, cell: SamplerCell, first: int, count: int) -> list[Image.Image]:
        return sheets.read_tiles(self.checked(self.place(IMAGES, cell, first, ".png")), count)

    def latents(self, cell: SamplerCell, first: int) -> Tensor:
        return self.tensor(_LATENTS, cell, first)

    def features(self, cell: SamplerCell, first: int, what: str) -> Tensor:
        return self.tensor(f"{_FEATURES}/{what}", cell, first)

    def tensor(self, kind: str, cell: SamplerCell, first: int) -> Tensor:
        return weights.read_safetensors(self.checked(self.place(kind, cell, first, ".safetensors")))["held"]

    def write_tensor(self, kind: str, cell: SamplerCell, first: int, tensor: Tensor) -> None:
        path = self.place(kind, cell, first, ".safetensors")
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, partial(save_file, {"held": tensor.detach().to(torch.float32).cpu().contiguous()}))
        self.note(path)

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


# --- Scores of images -----------------------------------------------------------------------------------------------

_DIGITS = 8


# A scorer measures the images of one batch. `what` names its rows: another judge has another name.
ScorerOutput = tuple[dict[str, Any], Tensor | None]  # what the record says, and features (N, D) that are kept in files


def pixels_of(images: Sequence[Image.Image]) -> Tensor:
    """(N, 3, H, W) uint8."""
    held = [torch.from_numpy(np.asarray(image.convert("RGB")).copy()) for image in images]
    return torch.stack(held).permute(0, 3, 1, 2).contiguous()


def _distances(images: StudyImages, best: StudyImages) -> dict[str, list[float | None]]:
    """Root mean square differences of each image: of its pixels in [0, 1], in 8 bits as a person gets them, and of
    its latents (of a pixel model: x), which 8 bits do not round. None where a number is not finite."""
    a, b = (pixels_of(one.images).double() / 255 for one in (images, best))
    if a.shape != b.shape or images.latents.shape != best.latents.shape:
        raise PellucidError(rule("images", f"of the converged ones' shape, {tuple(b.shape)}", tuple(a.shape)), "shape")
    return {"distance": _rms(a, b), "latent": _rms(images.latents.double(), best.latents.double())}


def _rms(a: Tensor, b: Tensor) -> list[float | None]:
    found = (a - b).flatten(1).square().mean(1).sqrt().tolist()
    return [value if math.isfinite(value) else None for value in found]


class InceptionScorer:
    """Features (N, 2048) for KID and FID."""

    def __init__(self, network: Inception) -> None:
        self.network = network
        self.what = f"inception-{network.digest()[:_DIGITS]}"

    def __call__(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> ScorerOutput:
        return {}, inception_features(pixels_of(images), self.network, len(images))


class ClipScorer:
    """Cosines of images with their prompts; the embeddings of the images are kept too, of length √D, so that KID's
    kernel (x·y / D + 1)³ sees their cosines."""

    def __init__(self, judge: image_text.Judge) -> None:
        self.judge = judge
        self.what = f"clip-{fingerprint.of_network(judge.network).rpartition(':')[2][:_DIGITS]}"

    def __call__(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> ScorerOutput:
        found = self.judge.image(pixels_of(images))  # (N, D) of length 1
        texts, cut = self.judge.text(prompts)
        row = {"cosines": (found * texts).sum(-1).cpu().tolist(), "cut": cut}
        return row, found * math.sqrt(found.shape[1])


class SceneScorer:
    """Whether an image shows the scene that its prompt describes, by attribute."""

    what = "scenes"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device

    def __call__(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> ScorerOutput:
        readings = scenes.read(to_tensor(images).to(self.device))
        found = [judge(reading, scenes.parse(prompt)) for reading, prompt in zip(readings, prompts, strict=True)]
        return {name: [getattr(one, name) for one in found] for name in ("right", "marks", "bled", "readable")}, None


Scorer = InceptionScorer | ClipScorer | SceneScorer


def _find_inception(path: str | Path | None, device: torch.device | str) -> tuple[Inception | None, str]:
    """(the network, "") or (None, why not): what was not named and is not in the cache is not fetched in a study."""
    path = path or inception.cached_weights()
    if path is None:
        put_it = f"put {inception.WEIGHTS_NAME} into {inception.cache_folder()}"
        return None, f"no Inception weights: name them with --inception, or {put_it}"
    return inception.load_inception(path, device), ""


@dataclass(frozen=True)
class Judges:
    """The scorers of the images, and `reasons` for what is left out, by measure."""

    scorers: tuple[Scorer, ...] = ()
    inception: Inception | None = None
    reference: str | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def open(
        study: SamplerStudy,
        *,
        inception: str | Path | None = None,
        clip: str | Path | None = None,
        reference: str | None = None,
    ) -> Judges:
        """What was named, what comes with the model, and what needs nothing."""
        config, subject = study.config, study.subject
        scorers: list[Scorer] = []
        reasons: dict[str, str] = {}
        network, why = _find_inception(inception, subject.device)
        if network is not None:
            scorers.append(InceptionScorer(network))
        place = subject.image_text if clip is None else clip
        judge = None if place is None else image_text.Judge.load(place, subject.device)
        if judge is not None and subject.asks == "prompt":
            scorers.append(ClipScorer(judge))
        elif judge is not None:
            reasons["image_text"] = f"{subject.name} takes no text"
        else:
            reasons["image_text"] = "no CLIP: name one with --clip"
        if reference is not None and network is None:
            must = "given with Inception weights"
            raise PellucidError(rule("--reference", must, reference, f"There are {why}."), "reference")
        if network is None:
            reasons["fid"] = why
            if judge is None or "image_text" in reasons:
                reasons["kid"] = why
        if queries_of(config.prompts) is not None and subject.asks == "prompt":
            scorers.append(SceneScorer(subject.device))
        else:
            reasons["right"] = "the prompts are no captions of scenes"
        if config.by in reasons:
            raise PellucidError(rule("--by", "a measure that can be taken", config.by, reasons[config.by] + "."), "by")
        return Judges(tuple(scorers), network, reference, reasons)


# --- The study ------------------------------------------------------------------------------------------------------

_MOST_IMAGES = 1_000_000
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
        bounds = (("seeds", _MOST_IMAGES), ("batch", MAX_BATCH), ("rounds", 1000))
        for name, high in (*bounds, ("converged_steps", 10_000), ("path_steps", 10_000)):
            check_whole(name, getattr(self, name), 1, high, "study-number")
        for count in self.steps:
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise PellucidError(rule("steps", "whole numbers from 1 on", count), "steps")
        if len(set(self.steps)) != len(self.steps):
            raise PellucidError(rule("steps", "different", list(self.steps)), "study-list")
        for name in ("converged_steps", "path_steps"):
            if getattr(self, name) < 2 * max(self.steps):
                must = f"at least twice the most steps, {2 * max(self.steps)}"
                raise PellucidError(rule(name, must, getattr(self, name)), "converged")
        if any(not isinstance(one, str) for one in self.prompts) or self.images > _MOST_IMAGES:
            raise PellucidError(rule("prompts × seeds", f"texts, {_MOST_IMAGES:,} at most", self.images), "prompts")
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

    def firsts(self) -> range:
        """The number of the first image of every batch."""
        return range(0, self.images, self.batch)

    def numbers(self, first: int) -> range:
        return range(first, min(first + self.batch, self.images))

    def plain(self) -> dict[str, Any]:
        guidance = None if self.guidance is None else Guidance.parse(self.guidance).text()  # 3, "3" and 3.0 are one
        return {**asdict(self), "guidance": guidance}


class SamplerBatch(NamedTuple):
    """One batch of a cell, by the number of its first image: the images themselves, or what a scorer sees in them."""

    cell: str
    first: int
    what: str


class SamplerStudy(Study[SamplerStudyConfig, SamplerBatch]):
    """`table` are the set-ups that are compared at their step counts, `converged` the runs they are compared with."""

    kind = "samplers"
    cell = SamplerBatch
    fixed = FIXED_KEYS
    parts = "batches"
    progress = "making and scoring images"

    def __init__(
        self,
        config: SamplerStudyConfig,
        folder: Path,
        subject: Subject,
        shard: ShardNumber = (0, 1),
        judges: Judges | None = None,
    ) -> None:
        self.subject, self.judges = subject, judges or Judges()
        _check_prompts(config, subject)
        process = subject.schedule, subject.target
        self.table, self.converged = lay_cells(config.setups(), config.steps, config.yardstick, *process)
        self.parts_advice = f"Use a --batch below {config.batch}."
        super().__init__(config, folder, shard)

    @classmethod
    def open(
        cls,
        config: SamplerStudyConfig,
        folder: Path,
        shard: ShardNumber = (0, 1),
        *,
        pipe: Any = None,
        device: str | None = None,
        **judges: Any,
    ) -> Self:
        """`pipe` is used in place of loading the model by its name; `judges` is what `Judges.open` takes."""
        subject = Subject.open(config.model, dtype=config.dtype, device=device) if pipe is None else Subject.of(pipe)
        study = cls(config, folder, subject, shard)
        study.judges = Judges.open(study, **judges)
        return study

    def settings(self) -> dict[str, Any]:
        return {"mark": self.subject.mark, **self.config.plain()}

    def reload(self) -> None:
        super().reload()
        self.files = SamplerFiles(self.folder, self.records)

    # --- the cells ------------------------------------------------------------------------------------------------

    @cached_property
    def halves(self) -> list[SamplerCell]:
        return [half_run(cell, self.subject.schedule, self.subject.target) for cell in self.converged]

    @cached_property
    def by_key(self) -> dict[str, SamplerCell]:
        return {cell.key: cell for cell in (*self.converged, *self.table, *self.halves)}

    def cells(self) -> Iterator[SamplerBatch]:
        """Batch by batch: the images of all cells, then what each scorer sees in them."""
        for first in self.config.firsts():
            for cell in (*self.converged, *self.table, *(self.halves if first == 0 else ())):
                yield SamplerBatch(cell.key, first, IMAGES)
            for scorer in self.judges.scorers:
                for cell in (self.converged[0], *self.table):
                    yield SamplerBatch(cell.key, first, scorer.what)

    def part(self, cell: SamplerBatch) -> int:
        return cell.first

    def cost(self, cell: SamplerBatch) -> int:
        """Model calls per image."""
        return self.by_key[cell.cell].nfe if cell.what == IMAGES else 0

    def make(self, cell: SamplerBatch) -> dict[str, Any]:
        found = self.sample(cell) if cell.what == IMAGES else self.score(cell)
        return {**found, **self.files.take_digests()}

    # --- images -------------------------------------------------------------------------------------------------

    def sample(self, batch: SamplerBatch) -> dict[str, Any]:
        """One batch of one cell: its images, and how far they are from the converged ones."""
        cell, numbers = self.by_key[batch.cell], self.config.numbers(batch.first)
        seeds = [self.config.seed + n for n in numbers]
        inputs = [self.config.prompt(n) for n in numbers]
        began = time.perf_counter()
        try:
            output = self.subject.make(inputs, seeds, **self.config.how, **cell.asks(), noise=cell.noise(seeds))
        except PellucidError as error:  # the images of other cells are kept
            raise PellucidError(f"{cell.key}: {error}", error.code) from None
        row: dict[str, Any] = {"numbers": len(numbers), "seconds": time.perf_counter() - began}
        self.claim()
        self.files.write_images(cell, batch.first, output.images)
        if cell.mark:
            self.files.write_tensor(_LATENTS, cell, batch.first, output.latents)
        if (other := self.against(cell)) is None:
            return row
        best = StudyImages(self.files.images(other, batch.first, len(numbers)), self.files.latents(other, batch.first))
        return row | _distances(output, best)

    def against(self, cell: SamplerCell) -> SamplerCell | None:
        """The converged run that a cell is compared with; a half run with its whole one."""
        full_runs = {part.key: one for part, one in zip(self.halves, self.converged, strict=True)}
        return full_runs.get(cell.key) if cell.mark else self.by_key[cell.against]

    def score(self, batch: SamplerBatch) -> dict[str, Any]:
        cell, numbers = self.by_key[batch.cell], self.config.numbers(batch.first)
        scorer = next(one for one in self.judges.scorers if one.what == batch.what)
        images = self.files.images(cell, batch.first, len(numbers))
        row, features = scorer(images, [self.config.prompt(n) for n in numbers])
        if features is not None:
            self.files.write_tensor(f"{_FEATURES}/{scorer.what}", cell, batch.first, features)
        return row

    # --- what follows ---------------------------------------------------------------------------------------------

    def finish(self, bar: ProgressBar) -> None:
        """Times, alone."""
        from pellucid.evidence.study.samplers_results import LatencyClock

        clock = LatencyClock(self)
        with bar("timing", sum(cell.nfe for _, cell in clock.missing())) as done:
            clock.run(done)

    def results(self) -> SamplerFigures:
        from pellucid.evidence.study.samplers_verdict import SamplerFigures

        return SamplerFigures(self, self.judges)

    def report(self) -> SamplerFigures:
        from pellucid.evidence.study import samplers_report

        found = self.results()
        samplers_report.write(found)
        return found


def _check_prompts(config: SamplerStudyConfig, subject: Subject) -> None:
    if subject.asks == "nothing" and config.prompts:
        must = f"left out: {subject.name} takes neither text nor labels"
        raise PellucidError(rule("prompts", must, len(config.prompts)), "no-text")
    if subject.asks != "nothing" and not config.prompts:
        what = "one per line" if subject.asks == "prompt" else "a class a line"
        raise PellucidError(rule("prompts", f"given to {subject.name}, {what}", "none"), "prompts")
