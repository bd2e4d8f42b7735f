"""The sampler study: which sampler, how many steps, for this model. Every image of every cell is kept at once.

Image n has prompt n // seeds and the seed `seed` + n in every cell, so that cells differ by the sampler alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from pellucid.core.errors import PellucidError, rule
from pellucid.core.noise import check_seed
from pellucid.evidence.study.cells import Cell, Setup, Yardstick, half, lay
from pellucid.evidence.study.records import alone
from pellucid.evidence.study.samplers_files import KIND, VERSION, Files, check_folder
from pellucid.evidence.study.samplers_scores import Scorer, distances
from pellucid.evidence.study.samplers_subject import Made, Subject
from pellucid.models.guidance import Guidance
from pellucid.pipeline.request import MAX_BATCH

MOST_IMAGES = 1_000_000
By = Literal["distance", "latent", "kid", "image_text", "right"]
# What makes images: a study of the same folder must agree on it. Samplers and steps may be added, scores too.
FIXED = (
    "prompts", "seeds", "seed", "guidance", "size", "batch", "converged", "converged_steps", "path_steps", "dtype",
)  # fmt: skip


@dataclass(frozen=True)
class SamplerStudy:
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
    by: By = "distance"

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
        if self.by not in get_args(By):
            raise PellucidError(rule("by", f"one of {', '.join(get_args(By))}", self.by), "by")
        check_seed(self.seed)
        if self.guidance is not None:
            Guidance.parse(self.guidance)
        self.setups()

    @property
    def images(self) -> int:
        return max(1, len(self.prompts)) * self.seeds

    @property
    def yardstick(self) -> Yardstick:
        return Yardstick(Setup.parse(self.converged), self.converged_steps, self.path_steps)

    def setups(self) -> list[Setup]:
        return [Setup.parse(text) for text in self.samplers]

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


class Study:
    """A study in its folder. What is there is not made again; a folder of another model or config is refused."""

    def __init__(self, config: SamplerStudy, subject: Subject, folder: Path, shard: tuple[int, int] = (0, 1)) -> None:
        self.config, self.subject, self.shard = config, subject, shard
        check_prompts(config, subject)
        self.cells, self.converged = lay(
            config.setups(), config.steps, config.yardstick, subject.schedule, subject.target
        )
        check_folder(folder, config.to_dict(subject.mark), FIXED)
        self.files = Files(folder, shard)

    @property
    def folder(self) -> Path:
        return self.files.folder

    @cached_property
    def halves(self) -> list[Cell]:
        return [half(cell, self.subject.schedule, self.subject.target) for cell in self.converged]

    def todo(self) -> int:
        """Model calls per image that are still to be made, summed over batches: what a bar counts."""
        return sum(cell.nfe for first in self.config.firsts(self.shard) for cell in self.missing(first))

    def missing(self, first: int) -> list[Cell]:
        own = [*self.converged, *self.cells]
        if first == 0:
            own += self.halves
        return [cell for cell in own if not self.files.has(cell.key, first, "pictures")]

    @alone
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

    def make(self, cell: Cell, first: int) -> None:
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

    def against(self, cell: Cell) -> Cell | None:
        """The converged run that a cell is compared with; a half run with its whole one."""
        if not cell.mark:
            return next(one for one in self.converged if one.key == cell.against)
        pairs = zip(self.halves, self.converged, strict=True) if cell not in self.converged else ()
        return next((whole for part, whole in pairs if part == cell), None)

    def kept(self, cell: Cell, first: int) -> Made:
        """A converged batch from its files."""
        count = len(self.config.numbers(first))
        return Made(self.files.images(cell, first, count), self.files.latents(cell, first))

    # --- scores ---------------------------------------------------------------------------------------------------

    def score(self, scorer: Scorer, first: int) -> None:
        """What one scorer sees in a batch of every cell, and in the converged images of the yardstick."""
        numbers = self.config.numbers(first)
        for cell in (self.converged[0], *self.cells):
            if not self.files.has(cell.key, first, scorer.what):
                images = self.files.images(cell, first, len(numbers))
                prompts = [self.config.prompt(n) for n in numbers]
                self.files.add(cell.key, first, scorer.what, scorer(images, prompts, self.files, cell, first))


def check_prompts(config: SamplerStudy, subject: Subject) -> None:
    if subject.asks == "nothing" and config.prompts:
        must = f"left out: {subject.name} takes neither text nor labels"
        raise PellucidError(rule("prompts", must, len(config.prompts)), "no-text")
    if subject.asks != "nothing" and not config.prompts:
        what = "one per line" if subject.asks == "prompt" else "a class a line"
        raise PellucidError(rule("prompts", f"given to {subject.name}, {what}", "none"), "prompts")
