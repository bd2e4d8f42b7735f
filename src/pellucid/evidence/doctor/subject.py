"""What the doctor examines: all that is known of a model, a config or a run, and why the rest is not.

What cannot be opened is no reason to stop: the checks that need it are skipped with the reason, and others may name the
cause. Only what is no subject at all is refused.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError, rule
from pellucid.core.grid import MAX_STEPS, Grid
from pellucid.core.plan import Plan
from pellucid.core.schedule import Flow
from pellucid.evidence.metrics.fid import Statistics
from pellucid.evidence.metrics.images import ImageSet, open_images
from pellucid.evidence.trace import Trace, read
from pellucid.interop import diffusers_config, folder, single_file, source, weights
from pellucid.interop.components import INDEX, KINDS, NETWORK_PARTS, named_classes, read_config
from pellucid.interop.diffusers_config import SchedulerSettings
from pellucid.interop.diffusers_plan import compile_reading
from pellucid.pipeline.load import default_device, load
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.prepare import STEPS
from pellucid.pipeline.recipe import Recipe, read_png
from pellucid.pipeline.request import Control, ImagePrompt, Lora, Request

if TYPE_CHECKING:
    from pellucid.evidence.doctor.probe import Probe

# What a check may need, and why it is skipped where that is missing; what begins with OTHER is not worth a line.
OTHER = "the subject is not "
NEEDS: dict[str, str] = {
    "components": "the subject is not a diffusers folder",
    "file": "the subject is not a single-file checkpoint",
    "scheduler": "the subject is not a scheduler",
    "reading": "the subject is not a scheduler",
    "plan": "the subject is not a plan",
    "plan_file": "the subject is not a plan",
    "recipe": "the subject is not a recipe",
    "pipeline": "the subject is not a model",
    "network": "the subject is not a model",
    "vae": "the subject is not a model with a VAE",
    "data": "no data: give --data FOLDER or --data scenes",
    "trace": "no trace: give --trace FILE",
    "images": "no images: give --images FOLDER",
}


Adapter = Lora | Control | ImagePrompt


class UnsupportedCheck(Exception):  # noqa: N818
    """Raised by a check that cannot judge this subject; its message says why."""


@dataclass(frozen=True)
class RunSpec:
    """How the subject is to be run; None leaves it to the subject."""

    steps: int | None = None
    strength: float | None = None
    sampler: str | None = None
    grid: str | Grid | None = None
    dialect: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and not 1 <= self.steps <= MAX_STEPS:
            raise PellucidError(rule("steps", f"from 1 to {MAX_STEPS}", self.steps), "request")
        if self.strength is not None and not 0 < self.strength <= 1:
            raise PellucidError(rule("strength", "above 0 and at most 1", self.strength), "request")

    @property
    def own(self) -> bool:
        """Whether the subject's own scheduler runs: nothing names another sampler or grid."""
        return self.sampler is None and self.grid is None

    @property
    def whole_steps(self) -> bool:
        """Whether a run is cut at whole steps, as diffusers does it."""
        return self.own or self.dialect == "diffusers"


@dataclass(frozen=True)
class KnownImages:
    """Images that are known to be of the model's kind, cut to the size that it makes."""

    pixels: Tensor = field(repr=False)  # (N, 3, H, W) in [0, 1]; of a network alone as it takes them
    captions: tuple[str, ...] | None = None  # one per image, where they are known
    labels: tuple[int, ...] | None = None  # the same for classes
    name: str = "data"

    def first(self, count: int) -> KnownImages:
        captions = None if self.captions is None else self.captions[:count]
        labels = None if self.labels is None else self.labels[:count]
        return KnownImages(self.pixels[:count], captions, labels, self.name)


# How a component's config is called, by what its class is; networks keep theirs in config.json.
_CONFIGS = {
    "Scheduler": folder.SCHEDULER,
    "Tokenizer": "tokenizer_config.json",
    "Processor": "preprocessor_config.json",
    "Extractor": "preprocessor_config.json",
}


@dataclass(frozen=True)
class Component:
    """A component of model_index.json."""

    part: str
    kind: str  # the class that the index names
    place: Path
    there: bool
    config: Mapping[str, Any] | None = None
    trouble: str = ""  # why there is no config

    @staticmethod
    def find(root: Path, part: str, kind: str) -> Component:
        place = folder.place_of(root, part)
        name = next((name for word, name in _CONFIGS.items() if word in kind), folder.CONFIG)
        there = place != root or (root / name).is_file()
        if part in NETWORK_PARTS and place == root:
            there = folder.class_in(root) == kind
        if not there or not (place / name).is_file():
            return Component(part, kind, place, there, trouble=f"{part}/{name} is not there")
        try:
            return Component(part, kind, place, there, weights.read_json(place / name))
        except PellucidError as error:
            return Component(part, kind, place, there, trouble=str(error))

    @property
    def own_kind(self) -> str | None:
        """The class that its own config names."""
        config = self.config or {}
        classes = config.get("architectures")
        named = config.get("_class_name") or (classes[0] if isinstance(classes, list) and classes else None)
        return None if named is None else str(named)

    @property
    def network_kind(self) -> str | None:
        """Which of our networks it is, if any."""
        kind = self.kind if self.kind in KINDS else self.own_kind
        return kind if kind in KINDS else None

    def sketch(self) -> nn.Module:
        """Its network on the meta device, from its config alone."""
        assert self.network_kind is not None
        return _sketched(self.network_kind, json.dumps(self.config), self.part)


@lru_cache(maxsize=16)  # several checks ask for the same
def _sketched(kind: str, config: str, name: str) -> nn.Module:
    settings = read_config(kind, json.loads(config), name)
    return weights.sketch(lambda: KINDS[kind].build(settings), name)


@dataclass(frozen=True)
class Subject:
    """All that is known; a field that is None is not, and `absent` says why where it is not obvious."""

    name: str
    run: RunSpec = RunSpec()
    folder: Path | None = None  # of a diffusers model
    file: Path | None = None  # a single-file checkpoint
    index: Mapping[str, Any] | None = None  # model_index.json
    scheduler: Mapping[str, Any] | None = None  # its config, as it is written
    reading: SchedulerSettings | None = None  # that config, understood
    plan: Plan | None = None  # of a plan file, or what the config runs as `run` says
    plan_file: Mapping[str, Any] | None = None  # a plan as it is written, whether it keeps its law or not
    recipe: Mapping[str, Any] | None = None  # how an image was made
    pipeline: Pipeline | None = None  # with weights
    vae: Any = None  # with weights; of the pipeline, or alone
    probe: Probe | None = None  # a network alone, with its data
    adapters: tuple[Adapter, ...] = ()
    data: KnownImages | None = None
    trace: Trace | None = None
    images: ImageSet | None = None
    refused: PellucidError | None = None  # why the model does not load
    quick: bool = False  # no weights are read
    absent: Mapping[str, str] = field(default_factory=dict)
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # measured once

    @property
    def components(self) -> dict[str, Component] | None:
        """What model_index.json lists, by part, of a folder."""
        if self.folder is not None and "components" not in self.memo:
            listed = named_classes(self.index or {}).items()
            self.memo["components"] = {part: Component.find(self.folder, part, kind) for part, kind in listed}
        return self.memo.get("components")

    @property
    def listed_network(self) -> Component | None:
        """The denoising network's component, of a folder."""
        return next(((self.components or {})[part] for part in NETWORK_PARTS if part in (self.components or {})), None)

    @property
    def network(self) -> Any:
        """The denoising network, of a pipeline or alone."""
        if self.probe is not None:
            return self.probe.network
        return None if self.pipeline is None else self.pipeline.components.network

    @property
    def is_model(self) -> bool:
        """Whether it is a model, or what says how to read one's output: target and schedule can be wrong."""
        return any(one is not None for one in (self.folder, self.file, self.scheduler, self.pipeline, self.probe))

    @property
    def is_run(self) -> bool:
        """Whether the plan is that of the recorded run, and not what a model would do."""
        return self.trace is not None and self.plan is self.trace.header.plans[0]

    def without(self, why: str, *names: str) -> Subject:
        """The same, with the reason why these fields are not known."""
        return replace(self, absent={**self.absent, **dict.fromkeys(names, why)})

    def lacks(self, needs: tuple[str, ...]) -> str | None:
        """Why a check that needs these cannot run, or None where it can."""
        missing = [need for need in needs if getattr(self, need) is None]
        return "; ".join(self.absent.get(need, NEEDS[need]) for need in missing) or None


# --- the plan that would run --------------------------------------------------------------------------------------

_LARGE_SHIFT = 1.15  # diffusers' shift of the largest images, where a config shifts by size and says no other


def steps_of(run: RunSpec) -> int:
    return STEPS if run.steps is None else run.steps


def make_plan(reading: SchedulerSettings, run: RunSpec) -> Plan:
    """What `pellucid sample` would run: the config in diffusers' dialect, or the sampler that was named, exactly."""
    try:
        if run.own:
            return compile_reading(reading, steps_of(run), **_shift_of(reading))
        options: dict[str, Any] = {"grid": run.grid, "steps": steps_of(run), "dialect": run.dialect or "exact"}
        schedule, target = reading.schedule, reading.target
        return compile_plan(run.sampler or reading.sampler, schedule=schedule, target=target, **options)
    except PellucidError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
        must = f"config of {reading.class_name} must have values of the right kind"
        raise PellucidError(f"{must}; got {error}.", "config-value") from None


def _shift_of(reading: SchedulerSettings) -> dict[str, Any]:
    """What a flow pipeline would take from the size of the image."""
    if not (reading.values.get("use_dynamic_shifting") and isinstance(reading.schedule, Flow)):
        return {}
    return {"mu": float(reading.values.get("max_shift", _LARGE_SHIFT))}


def exact_plan(reading: SchedulerSettings, run: RunSpec) -> Plan:
    """The same sampler, steps and grid without diffusers' rounding and habits."""
    return compile_reading(reading, steps_of(run), dialect="exact", **_shift_of(reading))


# --- opening ------------------------------------------------------------------------------------------------------

_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_PLAN_KIND = "pellucid-plan"
_MAX_PLAN_BYTES = 64 * 2**20
QUICK = "weights were not asked for (--quick)"


@dataclass(frozen=True)
class SubjectSpec:
    """What is examined, as the command line names it."""

    model: str | None = None
    config: str | None = None
    trace: str | None = None
    images: str | None = None
    data: str | None = None
    quick: bool = False  # files only: no weights are loaded
    tokenizer: str | None = None  # for single files, which hold none
    dtype: str | None = None
    loras: tuple[str, ...] = ()
    controlnets: tuple[str, ...] = ()
    ip_adapters: tuple[str, ...] = ()

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """As a request takes them; the images that two kinds follow are left open."""
        return (
            *(Lora(path) for path in self.loras),
            *(Control(path, None) for path in self.controlnets),
            *(ImagePrompt(path, None) for path in self.ip_adapters),
        )


def open_subject(spec: SubjectSpec, run: RunSpec | None = None) -> Subject:
    """The subject of all that was named together."""
    run = run or RunSpec()
    if spec.model is not None and spec.config is not None:
        raise PellucidError("MODEL must be left out with --config; got both.", "usage")
    if spec.model is spec.config is spec.trace is spec.images is None:
        raise PellucidError("MODEL, --config, --trace or --images must be given; got none of them.", "usage")
    if spec.model is not None:
        subject = of_name(spec.model, run, spec)
    elif spec.config is not None:
        subject = of_config(spec.config, run)
    else:
        subject = Subject(str(spec.trace or spec.images), run)
    if spec.adapters:
        subject = replace(subject, adapters=spec.adapters)
    if spec.trace is not None:
        subject = _with_trace(subject, read(spec.trace))
    if spec.images is not None:
        subject = replace(subject, images=_images_in(spec.images))
    return subject if spec.data is None else with_data(subject, spec.data)


def _with_trace(subject: Subject, trace: Trace) -> Subject:
    """With a recorded run; its plan and recipe too, except where a model or a config brings its own."""
    subject, header = replace(subject, trace=trace), trace.header
    if subject.plan is not None or subject.recipe is not None:
        return subject
    recipe = None if header.recipe is None else dict(vars(header.recipe))
    return replace(subject, recipe=recipe, plan=header.plans[0])


def _images_in(where: str) -> ImageSet:
    """The images of a folder, of which one at least can be read."""
    found = open_images(where)
    if isinstance(found, Statistics):
        raise PellucidError(rule("--images", "images", f"statistics in {where}"), "usage")
    unread: list[str] = []
    if next(found.chunks(lambda _, why: unread.append(why)), None) is None:
        why = unread[0] if unread else f"{where} holds none."
        raise PellucidError(f"--images must hold an image that can be read; {why}", "usage")
    return found


def of_name(name: str, run: RunSpec, spec: SubjectSpec) -> Subject:
    """A model; or a file that tells how one is run: a scheduler config, a plan, an image with its recipe."""
    path = source.bundled(source.expanded(name))
    if path.suffix == ".json" and path.is_file():
        return _of_json(path, run)
    if path.suffix.lower() in _IMAGE_SUFFIXES and path.is_file():
        return _of_image(path, run, spec)
    return of_model(name, run, spec)


# --- files that tell how a model is run ------------------------------------------------------------------------


def _of_json(path: Path, run: RunSpec) -> Subject:
    """A plan, whether its rows keep their law or not; a model's index; or a scheduler's config."""
    table = weights.read_json(path, _MAX_PLAN_BYTES)
    if path.name == INDEX and table.get("kind") != _PLAN_KIND:
        return of_model(str(path.parent), run, SubjectSpec(quick=True))
    if table.get("kind") != _PLAN_KIND:
        return of_config(str(path), run)
    subject = Subject(str(path), run, plan_file=table)
    try:
        return replace(subject, plan=Plan.from_dict(dict(table)))
    except PellucidError as error:
        return subject.without(str(error), "plan")


def of_config(where: str | Path | Mapping[str, Any], run: RunSpec) -> Subject:
    """A scheduler's config: a file, a folder that holds one, or a dict."""
    config = diffusers_config.load(where)
    if "_class_name" not in config:
        diffusers_config.class_of(config)  # refuses what is no scheduler's config at all
    name = "config" if isinstance(where, Mapping) else str(where)
    return _with_scheduler(Subject(name, run), config, config)


def _of_image(path: Path, run: RunSpec, spec: SubjectSpec) -> Subject:
    """An image that says how it was made; its model too, where it is here."""
    found = read_png(path)
    recipe: dict[str, Any] = (
        dict(vars(found))
        if isinstance(found, Recipe)
        else {**found.fields, "unread": found.unread, "notes": found.notes}
    )
    strength = run.strength or recipe.get("strength") or None
    run = replace(run, steps=run.steps or recipe.get("steps"), strength=strength)
    if run.own:  # what the recipe leaves open is the model's
        grid = recipe.get("grid")
        kept = Grid.from_dict(dict(grid)) if grid and grid["name"] != "explicit" else None
        run = replace(run, sampler=recipe.get("sampler"), grid=kept, dialect=recipe.get("dialect", "exact"))
    model, subject = str(recipe.get("model") or ""), Subject(str(path), run)
    with suppress(PellucidError):
        if "/" not in model or Path(model).exists():  # the hub is not asked
            subject = of_model(model, run, spec)
    plan = recipe.get("plan")
    if plan is not None:
        subject = replace(subject, plan=Plan.from_dict(plan), plan_file=plan)
    return replace(subject, name=str(path), recipe=recipe)


# --- models ----------------------------------------------------------------------------------------------------


def of_model(name: str, run: RunSpec, spec: SubjectSpec | None = None) -> Subject:
    """A model: its files first, then its weights where they can be loaded."""
    spec = spec or SubjectSpec()
    place = source.locate(name)
    subject = _of_file(place, name, run) if place.is_file() else _of_folder(place, name, run)
    if spec.quick:
        return replace(subject.without(QUICK, "pipeline", "network", "vae"), quick=True)
    return _with_weights(subject, place, spec)


def _of_folder(place: Path, name: str, run: RunSpec) -> Subject:
    index = folder.index_of(place)
    subject = Subject(name, run, folder=place, index=index)
    try:
        raw = diffusers_config.load(folder.place_of(place, "scheduler"))
    except PellucidError as error:
        return subject.without(str(error), "scheduler", "reading")
    kept = {key: value for key, value in raw.items() if key not in folder.INERT_KEYS}
    return _with_scheduler(subject, raw, folder.mended(kept, str(index.get("_class_name")))[0])


def _of_file(place: Path, name: str, run: RunSpec) -> Subject:
    """A single file: its scheduler is that of its family."""
    subject = Subject(name, run, file=place)
    try:
        tensors, layout, target, _ = read_single_file(place)
    except PellucidError as error:
        if error.code == "single-file-kind":  # a LoRA, an inversion, another family
            raise
        return replace(subject.without(str(error), "scheduler", "reading"), refused=error)
    config = single_file.scheduler_of(layout, target, zero_snr="ztsnr" in tensors)
    return _with_scheduler(subject, config, config)


def read_single_file(path: Path) -> tuple[Mapping[str, Tensor], Any, str, list[str]]:
    """The tensors of a checkpoint, its layout, what its network predicts, and what was said of that."""
    tensors = weights.read(path)
    sections = single_file.split(tensors, path.name)
    layout = single_file.layout_of(sections, path.name)
    return tensors, layout, *single_file.target_of(path, layout, tensors, sections, None)


def of_pipeline(pipe: Pipeline, run: RunSpec | None = None, **known: Any) -> Subject:
    """A model that is loaded already; `known` are further fields of the subject."""
    parts = pipe.components
    subject = Subject(parts.name, run or RunSpec(), pipeline=pipe, vae=parts.vae)
    if parts.scheduler:
        subject = _with_scheduler(subject, parts.scheduler, parts.scheduler)
    return replace(subject, **known)


def _with_scheduler(subject: Subject, config: Mapping[str, Any], mended: Mapping[str, Any]) -> Subject:
    """With its scheduler's config, how that reads once its pipeline has `mended` it, and the plan that follows."""
    subject = replace(subject, scheduler=config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the checks of its keys name what is passed over
            reading = diffusers_config.read(dict(mended), strict=False)
    except PellucidError as error:
        return subject.without(str(error), "reading", "plan")
    subject = replace(subject, reading=reading)
    try:
        return replace(subject, plan=make_plan(reading, subject.run))
    except PellucidError as error:
        return subject.without(str(error), "plan")


def _with_weights(subject: Subject, place: Path, spec: SubjectSpec) -> Subject:
    """With the pipeline and its VAE; with the VAE alone where the rest does not load.

    On a CPU the default is float32: float16 is thirty times as slow there.
    """
    device = source.place(subject.run.device) or default_device()
    dtype = weights.dtype_named(spec.dtype) or (torch.float32 if device.type == "cpu" else None)
    options = {"dtype": dtype, "device": device}
    try:
        pipe = load(place, **options, tokenizer=spec.tokenizer)  # type: ignore[arg-type]
    except PellucidError as error:
        vae = None
        if subject.folder is not None and (subject.folder / "vae").is_dir():
            with suppress(PellucidError):
                vae = source.load_component(subject.folder / "vae", **options)  # type: ignore[arg-type]
        subject = subject.without(f"the model does not load: {error}", "pipeline", "network")
        return replace(subject, refused=error, vae=vae)
    return replace(subject, pipeline=pipe, vae=pipe.components.vae)


def with_data(subject: Subject, where: str) -> Subject:
    """Known images of the size that the model makes, or that the images have."""
    from pellucid.evidence.doctor.probe import open_data  # the world of scenes takes a second to import

    if subject.pipeline is not None:
        size = min(subject.pipeline.size_of(Request()))
    elif subject.vae is not None:
        sample = subject.vae.config.sample_size  # the pixels of a side that it was made for
        size = int(sample if isinstance(sample, int) else min(sample))
    elif subject.images is not None:
        size = min(next(subject.images.chunks(lambda number, why: None)).shape[-2:])
    else:
        return subject.without("nothing is measured: no weights are loaded", "data")
    return replace(subject, data=open_data(where, size))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
