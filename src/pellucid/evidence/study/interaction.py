"""Does the best sampler depend on how a model was trained: a sampler study of each of several models, and the change.

Every model is asked for the same images (seeds, prompts) by the same samplers at the same step counts, in a sampler
study of its own under `models/`. Models that share schedule, target and architecture are one group: runs of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.study.cells import Cell
from pellucid.evidence.study.prompts import read_prompts
from pellucid.evidence.study.records import CONFIG, alone, check_kind, read_config
from pellucid.evidence.study.samplers import By, SamplerStudy
from pellucid.evidence.study.samplers import Study as OneModel
from pellucid.evidence.study.samplers_figures import Figures, Judges
from pellucid.evidence.study.samplers_results import Column
from pellucid.evidence.study.samplers_run import Bar, no_bar
from pellucid.evidence.study.samplers_subject import Subject
from pellucid.interop import source
from pellucid.interop.atomic_files import is_left, put
from pellucid.train.config import parse, read

KIND, VERSION = "interaction", 1
MODELS = "models"  # the folder of the sampler studies
JUDGED = ("kid", "image_text", "right")  # measures for which somebody must look at the images


@dataclass(frozen=True)
class InteractionStudy:
    """`models` are what `pellucid.load` takes, with `names` where their folders have none that tells them apart; the
    rest is as in a sampler study. `by` is the measure that decides."""

    models: tuple[str, ...]
    samplers: tuple[str, ...]
    steps: tuple[int, ...]
    names: tuple[str, ...] = ()
    prompts: str | None = None  # a file, or scenes:N, for the models that take text
    seeds: int = 32  # images of each prompt; of a model that takes none, of all
    seed: int = 0
    guidance: str | None = None
    batch: int = 16
    converged: str = "dpmpp_3m:karras"
    converged_steps: int = 200
    path_steps: int = 500
    dtype: str | None = "float32"
    by: str = "distance"
    inception: str | None = None
    reference: str | None = None
    clip: str | None = None

    def __post_init__(self) -> None:
        """Refuses at once what the last model would refuse after hours of the first."""
        if not self.models:
            raise PellucidError(rule("models", "at least one", "none"), "study-list")
        if self.names and len(self.names) != len(self.models):
            raise PellucidError(rule("names", f"one a model, {len(self.models)}", len(self.names)), "study-names")
        if len(set(self.labels)) != len(self.models) or not all(map(is_plain, self.labels)):
            must = "different, of letters, digits, dots, dashes and underscores"
            raise PellucidError(rule("names", must, list(self.labels), "Give --names."), "study-names")
        if self.by not in get_args(By):
            raise PellucidError(rule("by", "one of " + ", ".join(get_args(By)), self.by), "by")
        read_prompts(self.prompts)
        self.of_model(self.models[0], "nothing")

    @staticmethod
    def load(path: str | Path) -> InteractionStudy:
        return read(InteractionStudy, parse(Path(path)), "config")

    @property
    def labels(self) -> tuple[str, ...]:
        return self.names or tuple(map(label_of, self.models))

    @property
    def text(self) -> str:
        """What config.json holds."""
        return json.dumps({"study": KIND, "version": VERSION, **dataclasses.asdict(self)}, indent=1) + "\n"

    def of_model(self, model: str, asks: str) -> SamplerStudy:
        """The sampler study of one model, with prompts only where it takes them."""
        shared = {field.name for field in dataclasses.fields(SamplerStudy)} & {f.name for f in dataclasses.fields(self)}
        given = {name: getattr(self, name) for name in shared - {"prompts"}}
        return SamplerStudy(model=model, **given, prompts=() if asks == "nothing" else read_prompts(self.prompts))


def label_of(model: str) -> str:
    """The folder that names a model: `linear-0` of `runs/linear-0/model`."""
    parts = [part for part in Path(model).parts if part not in ("/", ".", "..", "model")]
    return parts[-1] if parts else model


def is_plain(name: str) -> bool:
    return bool(name) and all(c.isalnum() or c in "._-" for c in name) and not name.startswith(".")


@dataclass(frozen=True)
class Seen:
    """One model of the study: how it was trained, what was run, and the measure that decides."""

    name: str
    schedule: str
    target: str
    architecture: str
    cells: tuple[Cell, ...]
    column: Column
    floor: float  # how far the converged run still moves, in the same measure; NaN where it has no such

    @property
    def group(self) -> str:
        return f"{self.schedule}, {self.target}, {self.architecture}"


def check_folder(folder: Path) -> None:
    """Refuses a folder of something else, or of another version. Models, samplers and steps may be added to a study:
    what makes a model's images is guarded by that model's own sampler study."""
    if not (folder / CONFIG).exists():
        if folder.exists() and not (folder.is_dir() and all(map(is_left, folder.iterdir()))):
            raise PellucidError(rule("--out", "empty, new, or an interaction study", str(folder)), "out-taken")
        return
    check_kind(folder, read_config(folder), KIND, VERSION)


class Study:
    """A study in its folder; each of its sampler studies goes on by itself."""

    def __init__(self, config: InteractionStudy, folder: Path) -> None:
        self.config, self.folder = config, folder
        check_folder(folder)

    @alone
    def run(
        self, pipes: Mapping[str, Any] | None = None, *, device: str | None = None, bar: Bar = no_bar
    ) -> list[Seen]:
        """Makes what is missing, model by model; `pipes` are used by name in place of loading."""
        named = list(zip(self.config.labels, self.config.models, strict=True))
        for name, model in named:
            if name not in (pipes or {}):
                source.locate(model)  # the last model's absence is known before the first one's hours
        self.folder.mkdir(parents=True, exist_ok=True)
        put(self.folder / CONFIG, self.config.text)
        found = []
        for name, model in named:
            given = (pipes or {}).get(name)
            subject = (
                Subject.open(model, dtype=self.config.dtype, device=device) if given is None else Subject.of(given)
            )
            found.append(self.one(name, model, subject, bar))
        return found

    def one(self, name: str, model: str, subject: Subject, bar: Bar) -> Seen:
        study = OneModel(self.config.of_model(model, subject.asks), subject, self.folder / MODELS / name)
        judges = self.judges(study)
        with bar(name, study.todo()) as done:
            study.run(judges.scorers, done)
        figures = Figures(study, judges)
        if self.config.by not in figures.columns:
            raise PellucidError(rule("by", f"measured for {name}: {', '.join(figures.columns)}", self.config.by), "by")
        column = figures.columns[self.config.by]
        floor = figures.results.floor(self.config.by) if self.config.by in ("distance", "latent") else {}
        return Seen(
            name=name,
            schedule=subject.schedule.name,
            target=str(subject.target),
            architecture=architecture_of(subject.pipe),
            cells=tuple(study.cells),
            column=column,
            floor=next(iter(floor.values()), float("nan")),
        )

    def judges(self, study: OneModel) -> Judges:
        """Nobody, where the distance decides and nothing was named: looking at images costs more than making them."""
        c = self.config
        if c.by not in JUDGED and not (c.inception or c.reference or c.clip):
            return Judges()
        return Judges.open(study, inception=c.inception, clip=c.clip, reference=c.reference)


def architecture_of(pipe: Any) -> str:
    """The class of the network: UNet, DiT, …"""
    holder = getattr(pipe, "components", None) or getattr(pipe, "peer", None)
    return type(getattr(holder, "network", pipe)).__name__
