"""What the doctor looks at: all that is known of a model, a config or a run, and why the rest is not."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError, rule
from pellucid.core.grid import MAX_STEPS, Grid
from pellucid.core.plan import Plan, landings
from pellucid.core.schedule import Flow
from pellucid.evidence.metrics.fid import Statistics
from pellucid.evidence.metrics.images import ImageSet, open_images
from pellucid.interop import diffusers_config, folder, single_file, source, weights
from pellucid.interop.components import INDEX
from pellucid.interop.diffusers_config import Reading
from pellucid.interop.diffusers_plan import compile_reading
from pellucid.pipeline.load import default_device, load
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.prepare import STEPS
from pellucid.pipeline.recipe import Recipe, read_png
from pellucid.pipeline.request import Control, ImagePrompt, Lora, Request

if TYPE_CHECKING:
    from pellucid.evidence.doctor.probe import Probe
    from pellucid.evidence.trace import Trace

# What a check may need, and what to say where it is not there; what begins with OTHER is no fault and no news.
OTHER = "the subject is not "
NEEDS: dict[str, str] = {
    "folder": "the subject is not a diffusers folder",
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


@dataclass(frozen=True)
class Subject:
    """All that is known; a field that is None is not, and `absent` says why where it is not obvious."""

    name: str
    asked: RunSpec = RunSpec()
    folder: Path | None = None  # of a diffusers model
    file: Path | None = None  # a single-file checkpoint
    index: Mapping[str, Any] | None = None  # model_index.json
    scheduler: Mapping[str, Any] | None = None  # its config, as it is written
    reading: Reading | None = None  # that config, understood
    plan: Plan | None = None  # what a run would do: a plan file's, or the config's at the asked steps
    plan_file: Mapping[str, Any] | None = None  # a plan as it is written, whether it keeps its law or not
    recipe: Mapping[str, Any] | None = None  # how an image was made
    pipeline: Pipeline | None = None  # with weights
    vae: Any = None  # with weights; of the pipeline, or alone
    probe: Probe | None = None  # a network alone, with its data
    adapters: tuple[Lora | Control | ImagePrompt, ...] = ()  # that are to be worn
    data: KnownImages | None = None
    trace: Trace | None = None  # of evidence/trace
    images: ImageSet | None = None
    refused: PellucidError | None = None  # why the model does not load
    quick: bool = False  # weights are not looked at
    absent: Mapping[str, str] = field(default_factory=dict)
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # measured once

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

    def lacks(self, needs: tuple[str, ...]) -> str | None:
        """Why a check that needs these cannot run, or None where it can."""
        missing = [need for need in needs if getattr(self, need) is None]
        return "; ".join(self.absent.get(need, NEEDS[need]) for need in missing) or None


# --- The plan it would run ------------------------------------------------------------------------------------------

IDENTITY = 1e-9  # how far from "x stays x" a row may be that does nothing
LARGE_SHIFT = 1.15  # diffusers' shift of the largest images, where a config shifts by size and says no other


@dataclass(frozen=True)
class Miss:
    """A call before which x is not at the level that the call is made for; the row after the last is the end."""

    row: int
    gap: float  # as a part of x


def steps_of(asked: RunSpec) -> int:
    """As many as were asked for, or what a run takes when nobody says."""
    return STEPS if asked.steps is None else asked.steps


def make_plan(reading: Reading, asked: RunSpec) -> Plan:
    """What `pellucid sample` would run: the config in diffusers' dialect, or the sampler that was named, exactly."""
    try:
        if asked.own:
            return compile_reading(reading, steps_of(asked), **shift_of(reading))
        return compile_plan(
            asked.sampler or reading.sampler,
            schedule=reading.schedule,
            target=reading.target,
            grid=asked.grid,
            steps=steps_of(asked),
            dialect=asked.dialect or "exact",
        )
    except PellucidError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
        must = f"config of {reading.class_name} must have values of the right kind"
        raise PellucidError(f"{must}; got {error}.", "config-value") from None


def shift_of(reading: Reading) -> dict[str, Any]:
    """What a flow pipeline would take from the size of the image."""
    if not (reading.values.get("use_dynamic_shifting") and isinstance(reading.schedule, Flow)):
        return {}
    return {"mu": float(reading.values.get("max_shift", LARGE_SHIFT))}


def exact_plan(reading: Reading, asked: RunSpec) -> Plan:
    """The same sampler, steps and grid without diffusers' rounding and habits."""
    return compile_reading(reading, steps_of(asked), dialect="exact", **shift_of(reading))


def null_rows(plan: Plan) -> list[int]:
    """Calls of the model after which x is what it was."""
    return [
        number
        for number, row in enumerate(plan.rows)
        if all(abs(weight - (register == 0)) <= IDENTITY for register, weight in row.x) and row.anchor is None
    ]


def misses(plan: Plan, least: float) -> list[Miss]:
    """Where x is off its level by more than `least`."""
    return [Miss(row, gap) for row, (gap, _) in enumerate(landings(plan)) if gap > least]


def repeated_times(plan: Plan) -> int:
    """Calls that tell the network a time that it was told at another level before."""
    seen: dict[float, float] = {}
    count = 0
    for row in plan.rows:
        known = seen.setdefault(row.time, row.level.ratio)
        count += abs(known - row.level.ratio) > IDENTITY * known
    return count


# --- Opening --------------------------------------------------------------------------------------------------------

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
PLAN_KIND = "pellucid-plan"
MAX_PLAN_BYTES = 64 * 2**20


@dataclass(frozen=True)
class SubjectSpec:
    """What was named on the command line, or in Python."""

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
    def adapters(self) -> tuple[Lora | Control | ImagePrompt, ...]:
        """Adapters as a request takes them; the images that two kinds follow are left open."""
        return (
            *(Lora(path) for path in self.loras),
            *(Control(path, None) for path in self.controlnets),
            *(ImagePrompt(path, None) for path in self.ip_adapters),
        )


def open_subject(given: SubjectSpec, asked: RunSpec | None = None) -> Subject:
    """The subject of all that was named together."""
    asked = asked or RunSpec()
    if given.model is not None and given.config is not None:
        raise PellucidError("MODEL must be left out with --config; got both.", "usage")
    if all(name is None for name in (given.model, given.config, given.trace, given.images)):
        raise PellucidError("MODEL, --config, --trace or --images must be given; got none of them.", "usage")
    if given.model is not None:
        subject = of_name(given.model, asked, given)
    elif given.config is not None:
        subject = of_config(given.config, asked)
    else:
        subject = Subject(str(given.trace or given.images), asked)
    if given.adapters:
        subject = replace(subject, adapters=given.adapters)
    if given.trace is not None:
        subject = with_trace(subject, read_trace(given.trace))
    if given.images is not None:
        subject = replace(subject, images=images_in(given.images))
    return subject if given.data is None else with_data(subject, given.data)


def read_trace(path: str) -> Any:
    from pellucid.evidence import trace  # which is large, and few subjects need it

    return trace.read(path)


def with_trace(subject: Subject, trace: Any) -> Subject:
    """A run that was recorded, with the plan and the recipe that its header holds, but beside a model or a config,
    which have a plan of their own."""
    subject, header = replace(subject, trace=trace), trace.header
    if subject.plan is not None or subject.recipe is not None:
        return subject
    recipe = None if header.recipe is None else recipe_fields(header.recipe)
    return replace(subject, recipe=recipe, plan=header.plans[0])


def images_in(where: str) -> Any:
    """The images of a folder, of which one at least can be read."""
    found = open_images(where)
    if isinstance(found, Statistics):
        raise PellucidError(rule("--images", "images", f"statistics in {where}"), "usage")
    unread: list[str] = []
    if next(found.chunks(lambda _, why: unread.append(why)), None) is None:
        why = unread[0] if unread else f"{where} holds none."
        raise PellucidError(f"--images must hold an image that can be read; {why}", "usage")
    return found


def of_name(name: str, asked: RunSpec, given: SubjectSpec) -> Subject:
    """A model; or a file that tells how one is run: a scheduler config, a plan, an image with its recipe."""
    path = source.bundled(source.expanded(name))
    if path.suffix == ".json" and path.is_file():
        return of_json(path, asked)
    if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file():
        return of_image(path, asked, given)
    return of_model(name, asked, given)


# --- files that tell how a model is run ------------------------------------------------------------------------


def of_json(path: Path, asked: RunSpec) -> Subject:
    held = weights.read_json(path, MAX_PLAN_BYTES)
    if held.get("kind") == PLAN_KIND:
        return of_plan(path, held, asked)
    if path.name == INDEX:
        return of_model(str(path.parent), asked, SubjectSpec(quick=True))
    return of_config(str(path), asked)


def of_plan(path: Path, held: Mapping[str, Any], asked: RunSpec) -> Subject:
    """A plan file; one whose rows do not keep their law is a subject too."""
    try:
        return Subject(str(path), asked, plan=Plan.from_dict(dict(held)), plan_file=held)
    except PellucidError as error:
        return Subject(str(path), asked, plan_file=held, absent={"plan": str(error)})


def of_config(where: str | Path | Mapping[str, Any], asked: RunSpec) -> Subject:
    """A scheduler's config: a file, a folder that holds one, or a dict."""
    config = diffusers_config.load(where)
    if "_class_name" not in config:
        diffusers_config.class_of(config)  # refuses what is no scheduler's config at all
    name = "config" if isinstance(where, Mapping) else str(where)
    return with_scheduler(Subject(name, asked), config, config)


def of_image(path: Path, asked: RunSpec, given: SubjectSpec) -> Subject:
    """An image that says how it was made; its model too, where it is here."""
    found = read_png(path)
    told = (
        recipe_fields(found)
        if isinstance(found, Recipe)
        else {**found.fields, "unread": found.unread, "notes": found.notes}
    )
    asked = replace(
        asked,
        steps=asked.steps or told.get("steps"),
        strength=asked.strength or told.get("strength") or None,
        **({} if not asked.own else sampler_of(told)),
    )
    try:
        model = str(told.get("model") or "")
        place = source.locate(model) if "/" not in model or Path(model).exists() else None  # the hub is not asked
        subject = of_model(model, asked, given) if place is not None else Subject(str(path), asked)
    except PellucidError:
        subject = Subject(str(path), asked)
    plan = told.get("plan")
    if plan is not None:
        subject = replace(subject, plan=Plan.from_dict(plan), plan_file=plan)
    return replace(subject, name=str(path), recipe=told)


def recipe_fields(recipe: Recipe) -> dict[str, Any]:
    return {f.name: getattr(recipe, f.name) for f in fields(Recipe)}


def sampler_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's sampler, as a plan is asked for; what it leaves open is the model's."""
    grid = told.get("grid")
    return {
        "sampler": told.get("sampler"),
        "grid": Grid.from_dict(dict(grid)) if grid and grid["name"] != "explicit" else None,
        "dialect": told.get("dialect", "exact"),
    }


# --- models ----------------------------------------------------------------------------------------------------


def of_model(name: str, asked: RunSpec, given: SubjectSpec | None = None) -> Subject:
    """A model: its files first, then its weights where they can be loaded."""
    given = given or SubjectSpec()
    place = source.locate(name)
    subject = of_file(place, name, asked) if place.is_file() else of_folder(place, name, asked)
    if given.quick:
        why = "weights were not asked for (--quick)"
        return replace(subject, quick=True, absent={**subject.absent, "pipeline": why, "network": why, "vae": why})
    return with_weights(subject, place, given)


def of_folder(place: Path, name: str, asked: RunSpec) -> Subject:
    index = folder.index_of(place)
    subject = Subject(name, asked, folder=place, index=index)
    try:
        raw = diffusers_config.load(folder.place_of(place, "scheduler"))
    except PellucidError as error:
        return replace(subject, absent={"scheduler": str(error), "reading": str(error)})
    kept = {key: value for key, value in raw.items() if key not in folder.INERT_KEYS}
    return with_scheduler(subject, raw, folder.mended(kept, str(index.get("_class_name")))[0])


def of_file(place: Path, name: str, asked: RunSpec) -> Subject:
    """A single file: its scheduler is that of its family."""
    subject = Subject(name, asked, file=place)
    try:
        tensors = weights.read(place)
        sections = single_file.split(tensors, place.name)
        layout = single_file.layout_of(sections, place.name)
        target, _ = single_file.target_of(place, layout, tensors, sections, None)
    except PellucidError as error:
        if error.code == "single-file-kind":  # a LoRA, an inversion, another family
            raise
        return replace(subject, refused=error, absent={"scheduler": str(error), "reading": str(error)})
    config = single_file.scheduler_of(layout, target, zero_snr="ztsnr" in tensors)
    return with_scheduler(subject, config, config)


def of_pipeline(pipe: Pipeline, asked: RunSpec | None = None, **known: Any) -> Subject:
    """A model that is loaded already; `known` are further fields of the subject."""
    parts = pipe.components
    subject = Subject(parts.name, asked or RunSpec(), pipeline=pipe, vae=parts.vae)
    if parts.scheduler:
        subject = with_scheduler(subject, parts.scheduler, parts.scheduler)
    return replace(subject, **known)


def with_scheduler(subject: Subject, config: Mapping[str, Any], run: Mapping[str, Any]) -> Subject:
    """The subject with its scheduler's config, as it is `run`, and its plan; what is not understood is left open."""
    subject = replace(subject, scheduler=config)
    try:
        reading = read_leniently(run)
    except PellucidError as error:
        return replace(subject, absent={**subject.absent, "reading": str(error), "plan": str(error)})
    subject = replace(subject, reading=reading)
    try:
        return replace(subject, plan=make_plan(reading, subject.asked))
    except PellucidError as error:
        return replace(subject, absent={**subject.absent, "plan": str(error)})


def read_leniently(config: Mapping[str, Any]) -> Reading:
    """The config without what stands in its way; the checks of its keys name that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return diffusers_config.read(dict(config), strict=False)


def with_weights(subject: Subject, place: Path, given: SubjectSpec) -> Subject:
    """The pipeline and its VAE; the VAE alone where the rest does not load.

    On a CPU they work in float32 where no dtype is asked for: float16 is thirty times as slow there.
    """
    device = source.place(subject.asked.device) or default_device()
    dtype = weights.dtype_named(given.dtype) or (torch.float32 if device.type == "cpu" else None)
    options = {"dtype": dtype, "device": device}
    try:
        pipe = load(place, **options, tokenizer=given.tokenizer)  # type: ignore[arg-type]
    except PellucidError as error:
        why = f"the model does not load: {error}"
        absent = {**subject.absent, "pipeline": why, "network": why}
        subject = replace(subject, refused=error, absent=absent)
        return replace(subject, vae=vae_alone(subject, options))
    return replace(subject, pipeline=pipe, vae=pipe.components.vae)


def vae_alone(subject: Subject, options: Mapping[str, Any]) -> Any:
    if subject.folder is None or not (subject.folder / "vae").is_dir():
        return None
    try:
        return source.load_component(subject.folder / "vae", **options)
    except PellucidError:
        return None


def with_data(subject: Subject, where: str) -> Subject:
    """Known images of the size that the model makes, or that the images have."""
    from pellucid.evidence.doctor.probe import open_data  # the world of scenes takes a second to import

    if subject.pipeline is not None:
        size = min(subject.pipeline.size_of(Request()))
    elif subject.vae is not None:
        size = side_of(subject)
    elif subject.images is not None:
        size = min(next(subject.images.chunks(lambda number, why: None)).shape[-2:])
    else:
        why = "nothing is measured: no weights are loaded"
        return replace(subject, absent={**subject.absent, "data": why})
    return replace(subject, data=open_data(where, size))


def side_of(subject: Subject) -> int:
    """The pixels of a side that a VAE was made for."""
    sample = subject.vae.config.sample_size
    return int(sample if isinstance(sample, int) else min(sample))
