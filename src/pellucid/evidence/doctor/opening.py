"""From what a user names to a subject: a model, a config, a plan or an image, with all that it tells of itself.

What cannot be opened is no reason to stop: the checks that need it are skipped with the reason, and others may name the
cause. Only what is no subject at all is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from pellucid.core.errors import PellucidError, rule
from pellucid.core.grid import Grid
from pellucid.core.plan import Plan
from pellucid.evidence.doctor import plans
from pellucid.evidence.doctor.subject import Asked, Subject
from pellucid.evidence.metrics.fid import Statistics
from pellucid.evidence.metrics.images import open_images
from pellucid.interop import diffusers_config, folder, single_file, source, weights
from pellucid.interop.components import INDEX
from pellucid.interop.diffusers_config import Reading
from pellucid.pipeline.adapters import Control, ImagePrompt, Lora
from pellucid.pipeline.load import default_device, load
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.recipe import Recipe, read_png
from pellucid.pipeline.request import Request

IMAGES = (".png", ".jpg", ".jpeg", ".webp")
PLAN_KIND = "pellucid-plan"
MAX_PLAN_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Given:
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


def open_subject(given: Given, asked: Asked | None = None) -> Subject:
    """The subject of all that was named together."""
    asked = asked or Asked()
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
    recipe = None if header.recipe is None else told_by(header.recipe)
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


def of_name(name: str, asked: Asked, given: Given) -> Subject:
    """A model; or a file that tells how one is run: a scheduler config, a plan, an image with its recipe."""
    path = source.bundled(source.expanded(name))
    if path.suffix == ".json" and path.is_file():
        return of_json(path, asked)
    if path.suffix.lower() in IMAGES and path.is_file():
        return of_image(path, asked, given)
    return of_model(name, asked, given)


# --- files that tell how a model is run ------------------------------------------------------------------------


def of_json(path: Path, asked: Asked) -> Subject:
    held = weights.read_json(path, MAX_PLAN_BYTES)
    if held.get("kind") == PLAN_KIND:
        return of_plan(path, held, asked)
    if path.name == INDEX:
        return of_model(str(path.parent), asked, Given(quick=True))
    return of_config(str(path), asked)


def of_plan(path: Path, held: Mapping[str, Any], asked: Asked) -> Subject:
    """A plan file; one whose rows do not keep their law is a subject too."""
    try:
        return Subject(str(path), asked, plan=Plan.from_dict(dict(held)), plan_file=held)
    except PellucidError as error:
        return Subject(str(path), asked, plan_file=held, absent={"plan": str(error)})


def of_config(where: str | Path | Mapping[str, Any], asked: Asked) -> Subject:
    """A scheduler's config: a file, a folder that holds one, or a dict."""
    config = diffusers_config.load(where)
    if "_class_name" not in config:
        diffusers_config.class_of(config)  # refuses what is no scheduler's config at all
    name = "config" if isinstance(where, Mapping) else str(where)
    return with_scheduler(Subject(name, asked), config, config)


def of_image(path: Path, asked: Asked, given: Given) -> Subject:
    """An image that says how it was made; its model too, where it is here."""
    found = read_png(path)
    told = (
        told_by(found) if isinstance(found, Recipe) else {**found.fields, "unread": found.unread, "notes": found.notes}
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


def told_by(recipe: Recipe) -> dict[str, Any]:
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


def of_model(name: str, asked: Asked, given: Given | None = None) -> Subject:
    """A model: its files first, then its weights where they can be loaded."""
    given = given or Given()
    place = source.locate(name)
    subject = of_file(place, name, asked) if place.is_file() else of_folder(place, name, asked)
    if given.quick:
        why = "weights were not asked for (--quick)"
        return replace(subject, quick=True, absent={**subject.absent, "pipeline": why, "network": why, "vae": why})
    return with_weights(subject, place, given)


def of_folder(place: Path, name: str, asked: Asked) -> Subject:
    index = folder.index_of(place)
    subject = Subject(name, asked, folder=place, index=index)
    try:
        raw = diffusers_config.load(folder.place_of(place, "scheduler"))
    except PellucidError as error:
        return replace(subject, absent={"scheduler": str(error), "reading": str(error)})
    kept = {key: value for key, value in raw.items() if key not in folder.INERT_KEYS}
    return with_scheduler(subject, raw, folder.mended(kept, str(index.get("_class_name")))[0])


def of_file(place: Path, name: str, asked: Asked) -> Subject:
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


def of_pipeline(pipe: Pipeline, asked: Asked | None = None, **known: Any) -> Subject:
    """A model that is loaded already; `known` are further fields of the subject."""
    parts = pipe.components
    subject = Subject(parts.name, asked or Asked(), pipeline=pipe, vae=parts.vae)
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
        return replace(subject, plan=plans.make(reading, subject.asked))
    except PellucidError as error:
        return replace(subject, absent={**subject.absent, "plan": str(error)})


def read_leniently(config: Mapping[str, Any]) -> Reading:
    """The config without what stands in its way; the checks of its keys name that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return diffusers_config.read(dict(config), strict=False)


def with_weights(subject: Subject, place: Path, given: Given) -> Subject:
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
    from pellucid.evidence.doctor.data import open_data  # the world of scenes takes a second to import

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
