"""diffusers folders: model_index.json and a folder a component → Components. Every file is read, nothing is run."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.core import target as targets
from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import naming
from pellucid.interop import diffusers_config, weights
from pellucid.interop.components import (
    INDEX,
    NETWORK_PARTS,
    TEXT_PARTS,
    TOKENIZER_PARTS,
    Components,
    LoadOptions,
    build,
    named_classes,
    read_config,
)
from pellucid.interop.diffusers_classes import CLASSES
from pellucid.interop.diffusers_config import SchedulerSettings
from pellucid.interop.diffusers_export import TARGET_NAMES
from pellucid.interop.family import check_fit, contradictions
from pellucid.interop.tokenizer import Tokenizer
from pellucid.interop.weights import some

CONFIG = "config.json"
SHARED, OUTER = "_pellucid_shared_parts", ".."  # in an index: what is not in this folder is in the one around it
SCHEDULER = diffusers_config.FILE_NAME
STABLE_DIFFUSION = re.compile(r"StableDiffusion(XL)?(ControlNet)?(PAG)?(Img2Img|Inpaint)?(PAG)?Pipeline")
_MENDING = re.compile(r"StableDiffusion(PAG)?(Img2Img|Inpaint)?(PAG)?Pipeline")
OTHERS = (
    "LatentConsistencyModelPipeline",
    "LatentConsistencyModelImg2ImgPipeline",
    "DDPMPipeline",
    "DDIMPipeline",
    "PNDMPipeline",
    "DiTPipeline",
    "PixArtAlphaPipeline",
    "PixArtSigmaPipeline",
)
_REFUSED = {
    "LDMPipeline": "its autoencoder is a VQModel, which is not here",
    "LDMTextToImagePipeline": "its text encoder is LDMBert, which is not here",
    "ScoreSdeVePipeline": "its sampler is a predictor with a corrector, and its UNet is the NCSN++",
    "KarrasVePipeline": "its sampler is a class of its own",
}
IGNORED = {
    "safety_checker": "it judges images and makes none",
    "feature_extractor": "images are prepared here",
    "image_processor": "images are prepared here",
}
INERT_KEYS = ("tensor_format", "timestep_values")  # of the first schedulers; no later class reads them
_CLASSES_OF: dict[str, tuple[str, ...]] = {
    "unet": ("UNet2DConditionModel", "UNet2DModel"),
    "transformer": ("DiTTransformer2DModel", "PixArtTransformer2DModel", "Transformer2DModel"),
    "vae": ("AutoencoderKL", "AutoencoderTiny"),
    **dict.fromkeys(TEXT_PARTS, ("CLIPTextModel", "CLIPTextModelWithProjection")),
    "image_encoder": ("CLIPVisionModelWithProjection", "CLIPVisionModel"),
    "controlnet": ("ControlNetModel", "MultiControlNetModel"),
}
_LONE = {"UNet2DModel": "DDPMPipeline", "DiTTransformer2DModel": "DiTPipeline"}  # networks that run without other parts


@dataclass(frozen=True)
class Part:
    """A component that was read, the variant that its weights are, and what is to be said of it."""

    network: Any
    variant: str | None = None
    notes: tuple[str, ...] = ()


def read(folder: Path, wanted: LoadOptions, name: str | None = None) -> Components:
    """The components of a diffusers folder, or of a folder that holds one network with its scheduler."""
    index = index_of(folder)
    listed = named_classes(index)
    check_pipeline(str(index.get("_class_name")))
    check_parts(folder, listed)
    scheduler, reading, notes = _read_scheduler(folder, str(index["_class_name"]), wanted.target)
    tokenizers = _read_tokenizers(folder, listed, wanted)
    parts = {
        part: read_part(place_of(folder, part), kind, wanted) for part, kind in listed.items() if reads(part, kind)
    }
    _check_variant(parts, wanted)
    network = next(parts[part].network for part in NETWORK_PARTS if part in parts)
    vae = parts["vae"].network if "vae" in parts else None
    encoders = tuple(parts[part].network for part in TEXT_PARTS if part in parts)
    check_fit(network, vae, encoders)
    return Components(
        name=name or folder.name,
        pipeline_class=str(index["_class_name"]),
        network=network,
        vae=vae,
        text_encoders=encoders,
        tokenizers=tokenizers,
        image_encoder=parts["image_encoder"].network if "image_encoder" in parts else None,
        controlnets=_read_controlnets(folder, parts, wanted),
        scheduler=scheduler,
        schedule=reading.schedule,
        target=reading.target,
        labels=labels_of(index),
        extra={k: v for k, v in index.items() if not k.startswith("_") and not isinstance(v, list | dict)},
        notes=(
            *(note for part in parts.values() for note in part.notes),
            *_left_out(listed),
            *notes,
            *contradictions(network, vae, scheduler, reading.target),
        ),
    )


# What a folder is


def index_of(folder: Path) -> dict[str, Any]:
    """model_index.json, or what it would say of a folder that holds a single network and its scheduler."""
    if (folder / INDEX).is_file():
        return weights.read_json(folder / INDEX)
    kind = class_in(folder)
    if kind in _LONE and (folder / SCHEDULER).is_file():
        part = "unet" if kind.startswith("UNet") else "transformer"
        return {"_class_name": _LONE[kind], part: ["diffusers", kind]}
    raise PellucidError(
        f"model folder must hold {INDEX} (a diffusers pipeline), or {CONFIG} and {SCHEDULER} (a network of its own); "
        f"got {some(sorted(path.name for path in folder.iterdir()), 6) or 'an empty folder'} in {folder.name}."
        + _advice_for(folder, kind),
        "not-a-model",
    )


def class_in(folder: Path) -> str | None:
    """The class that a component's config.json names."""
    if not (folder / CONFIG).is_file():
        return None
    raw = weights.read_json(folder / CONFIG)
    architectures = raw.get("architectures")
    named = raw.get("_class_name") or (architectures[0] if isinstance(architectures, list) and architectures else None)
    return None if named is None else str(named)


def _advice_for(folder: Path, kind: str | None) -> str:
    """What the reader of the error may have meant."""
    if kind is not None:
        return f" It is one component ({kind}): load it with load_component."
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        if (inner / INDEX).is_file():
            return f" A pipeline lies in {inner.name}: load that folder."
    files = [path.name for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".ckpt")]
    return f" To load a single-file checkpoint, name the file: {files[0]}." if files else ""


def check_pipeline(name: str) -> None:
    if STABLE_DIFFUSION.fullmatch(name) or name in OTHERS:
        return
    why = _REFUSED.get(name, "it is not among those that Pellucid reads")
    raise PellucidError(
        f"pipeline must be Stable Diffusion 1, 2 or XL, ControlNet, LCM, DDPM, DDIM, DiT or PixArt; got {name}: {why}. "
        "Open it with diffusers and give the pipeline to pellucid.wrap.",
        "pipeline-class",
    )


def place_of(folder: Path, part: str) -> Path:
    """A component's folder, its own or a shared one; early repositories with one network keep it at the root."""
    if (folder / part).is_dir():
        return folder / part
    around = outer(folder)
    return around / part if around is not None and (around / part).is_dir() else folder


def outer(folder: Path, file: str = INDEX, only: str = OUTER) -> Path | None:
    """The pipeline around this folder, where a file of it says that they share parts. No other place can be named."""
    named = weights.read_json(folder / file).get(SHARED) if (folder / file).is_file() else None
    if named is None:
        return None
    around = folder.resolve().parent
    if named != only or not (around / INDEX).is_file():
        must = f"{only!r}, in a folder with {INDEX} around it"
        raise PellucidError(rule(f"{SHARED} of {folder.name}", must, named), "shared-parts")
    return around


def check_parts(folder: Path, listed: Mapping[str, str]) -> None:
    """Every component that is needed is listed, known and there, before any weight is read."""
    if not any(part in listed for part in NETWORK_PARTS):
        raise PellucidError(rule(f"{INDEX} of {folder.name}", "with a unet or a transformer", [*listed]), "parts")
    for part, kind in listed.items():
        if part in IGNORED or foreign_text(part, kind):
            continue
        if not (reads(part, kind) or part in (*TOKENIZER_PARTS, "scheduler")):
            raise PellucidError(
                f"{part} of {folder.name} must be a component that Pellucid has; got {kind}. "
                "Open the model with diffusers and give the pipeline to pellucid.wrap.",
                "class",
            )
        needs = CONFIG if reads(part, kind) else SCHEDULER if part == "scheduler" else None
        place = place_of(folder, part)
        there = place != folder if needs is None else (place / needs).is_file()
        if not there or (place == folder and needs == CONFIG and class_in(folder) != kind):
            raise PellucidError(
                f"{INDEX} lists {part} ({kind}), so {part}/{needs or ''} must be there; it is missing. "
                "Download the whole model.",
                "component-missing",
            )


def reads(part: str, kind: str) -> bool:
    """Whether a part is a network of ours."""
    return kind in _CLASSES_OF.get(part, ())


def foreign_text(part: str, kind: str) -> bool:
    """PixArt's T5: not here; the rest of the pipeline takes prompt_embeds."""
    return part in (*TEXT_PARTS, *TOKENIZER_PARTS) and kind.startswith("T5")


def _left_out(listed: Mapping[str, str]) -> list[str]:
    notes = [f"{part} ({kind}) is not read: {IGNORED[part]}." for part, kind in listed.items() if part in IGNORED]
    for part, kind in listed.items():
        if foreign_text(part, kind) and part in TEXT_PARTS:
            notes.append(
                f"{part} ({kind}) is not read: Pellucid has no T5. Give prompt_embeds, or open the model with "
                "diffusers and give the pipeline to pellucid.wrap."
            )
    return notes


# Its parts


def read_part(folder: Path, kind: str, wanted: LoadOptions, config: Mapping[str, Any] | None = None) -> Part:
    """One network from its folder."""
    raw = weights.read_json(folder / CONFIG)
    kind = str(raw.get("_class_name", kind)) if kind == "MultiControlNetModel" else kind
    with naming(f"{folder.name}/{CONFIG}"):
        settings = read_config(kind, {**raw, **(config or {})}, folder.name)
    tensors, found = weights.read_folder(folder, wanted.variant)
    network = build(kind, settings, tensors, name=folder.name, dtype=wanted.dtype, device=wanted.device)
    notes = []
    if found.variant != wanted.variant:
        which = "the plain ones" if found.variant is None else f"of the variant {found.variant}"
        notes.append(f"{folder.name} has no {wanted.variant or 'plain'} weights: they are {which} ({found.path.name}).")
    return Part(network, found.variant, tuple(notes))


def _check_variant(parts: Mapping[str, Part], wanted: LoadOptions) -> None:
    if wanted.variant is not None and all(part.variant != wanted.variant for part in parts.values()):
        raise PellucidError(
            rule("variant", "one that the model has", wanted.variant, "Leave it out for the plain weights."), "variant"
        )


def _read_controlnets(folder: Path, parts: Mapping[str, Part], wanted: LoadOptions) -> tuple[Any, ...]:
    """The ControlNet of a pipeline; several lie in controlnet, controlnet_1, controlnet_2, …"""
    if "controlnet" not in parts:
        return ()
    found, number = [parts["controlnet"].network], 1
    while (folder / f"controlnet_{number}").is_dir():
        found.append(read_part(folder / f"controlnet_{number}", "ControlNetModel", wanted).network)
        number += 1
    return tuple(found)


def _read_tokenizers(folder: Path, listed: Mapping[str, str], wanted: LoadOptions) -> tuple[Tokenizer, ...]:
    if wanted.tokenizer is not None:
        raise PellucidError(
            rule("tokenizer", "left out for a folder, which has its own", str(wanted.tokenizer)), "tokenizer"
        )
    named = [part for part in TOKENIZER_PARTS if part in listed and not foreign_text(part, listed[part])]
    return tuple(Tokenizer.load(place_of(folder, part)) for part in named)


def _read_scheduler(
    folder: Path, pipeline: str, target: str | None
) -> tuple[dict[str, Any], SchedulerSettings, list[str]]:
    """The scheduler's config, what it means, and what is to be said of it; `target` overrules it."""
    raw = diffusers_config.load(place_of(folder, "scheduler"))
    config, notes = mended({key: value for key, value in raw.items() if key not in INERT_KEYS}, pipeline)
    if target is not None:
        named = targets.named(target)
        stated = str(config.get("prediction_type", "epsilon"))
        config["prediction_type"] = TARGET_NAMES[named]
        if targets.named(stated) != named:
            notes.append(f"the scheduler says {stated}; target={named!r} was asked for and is used.")
    try:
        with naming(SCHEDULER):
            reading = diffusers_config.read(config)
    except PellucidError as error:
        if error.code != "config-key":
            raise
        reading = _lenient(config, error)
        notes.append(f"the folder's own sampler does not run here, so name another: {error}")
    return config, reading, [*notes, *(f"scheduler: {note}." for note in reading.notes)]


def mended(config: dict[str, Any], pipeline: str) -> tuple[dict[str, Any], list[str]]:
    """The config as the pipeline runs it: diffusers' first ones set these keys right when they open a folder."""
    if not _MENDING.fullmatch(pipeline):
        return config, []
    known = CLASSES.get(str(config.get("_class_name")), ("", {}))[1]
    right = {"steps_offset": 1, **({"skip_prk_steps": True} if "Inpaint" in pipeline else {"clip_sample": False})}
    wrong = {key: config.get(key, known[key]) for key in right if key in known}
    wrong = {key: value for key, value in wrong.items() if value != right[key]}
    notes = [f"the scheduler says {key}={value!r}; {pipeline} sets {right[key]!r}." for key, value in wrong.items()]
    return {**config, **{key: right[key] for key in wrong}}, notes


def _lenient(config: dict[str, Any], error: PellucidError) -> SchedulerSettings:
    """Schedule and target of a scheduler whose way of sampling is refused; its other parts may still be used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they repeat `error`, which the notes say
        try:
            return diffusers_config.read(config, strict=False)
        except PellucidError:
            raise error from None


def labels_of(index: Mapping[str, Any]) -> dict[int, str]:
    """The names of a class-conditional model's classes."""
    named = index.get("id2label")
    if named is None:
        return {}
    if not isinstance(named, dict) or not all(re.fullmatch(r"[0-9]{1,9}", str(key)) for key in named):
        raise PellucidError(rule(f"id2label of {INDEX}", "class numbers to names", named), "labels")
    return {int(key): str(value) for key, value in named.items()}


def read_component(folder: Path, wanted: LoadOptions, config: Mapping[str, Any] | None = None) -> Part:
    """A folder that holds one component: a ControlNet, a VAE, an encoder."""
    kind = class_in(folder)
    if kind is None or (folder / INDEX).is_file():
        got = "a whole pipeline" if (folder / INDEX).is_file() else some(sorted(p.name for p in folder.iterdir()), 6)
        must = f"a folder with {CONFIG} that names its class, and weights"
        raise PellucidError(rule(f"component in {folder.name}", must, got or "an empty folder"), "not-a-component")
    part = read_part(folder, kind, wanted, config)
    _check_variant({"it": part}, wanted)
    return part
