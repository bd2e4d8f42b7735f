"""Recipes of a run, and from a recipe back to a request: what it sets, what it needs that it does not hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pellucid.core import grid as grids
from pellucid.core.errors import PellucidError, rule
from pellucid.core.grid import Grid
from pellucid.core.noise import NoiseSource, Philox, TorchStream
from pellucid.core.plan import Plan
from pellucid.core.samplers import resolve
from pellucid.models.guidance import Guidance
from pellucid.pipeline import fingerprint, images
from pellucid.pipeline.model import Model, RunSettings
from pellucid.pipeline.parameters import ForeignRecipe
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.request import SECOND, Request

# --- A run → recipes ------------------------------------------------------------------------------------------------


def recipes_of(run: RunSettings) -> list[Recipe]:
    """One recipe per image, in the order of the batch."""
    model, request = run.model, run.request
    prompts, negatives, labels = (
        [one for one in each for _ in range(request.n)]
        for each in (request.prompts, request.negatives, listed_labels(request))
    )
    shared: dict[str, Any] = {
        "model": model.components.name,
        "model_hash": fingerprint.of_model(model.components),
        "weighting": request.weighting,
        "clip_skip": request.clip_skip,
        **run_fields(run.plan, request, run.guidance, run.noise, next(model.components.network.parameters())),
        "size": run.size,
        "strength": request.strength,
        "denoising_start": request.denoising_start,
        "denoising_end": request.denoising_end,
        "adapters": adapters_of(model, request),
        "inputs": inputs_of(request),
        "policy": model.policy.to_dict(),
        "device": model.device.type,  # with offload the weights wait elsewhere
    }
    own = [
        {
            **condition_fields(model, request, label, negative),
            **{name: texts[i // request.n] for name, texts in request.seconds.items()},
        }
        for i, (label, negative) in enumerate(zip(labels, negatives, strict=True))
    ]
    return [
        Recipe(prompt=prompt, negative_prompt=negative, seed=seed, conditioning=conditioning, **shared)
        for prompt, negative, seed, conditioning in zip(prompts, negatives, run.seeds, own, strict=True)
    ]


def run_fields(plan: Plan, request: Request, guidance: Guidance, source: NoiseSource, weight: Tensor) -> dict[str, Any]:
    """What a recipe says of a run of any network, ours or wrapped; `weight` is one of the network's."""
    return {
        "sampler": plan.name,
        "grid": {k: v for k, v in plan.grid.items() if k not in ("steps", "skip", "stop", "between")},
        "steps": int(plan.grid["steps"]),
        "dialect": plan.dialect,
        "options": dict(plan.options),
        "plan": None if request.plan is None else plan.to_dict(),
        "guidance": guidance.to_dict(),
        "noise": noise_name(source),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }


def noise_name(source: NoiseSource) -> str:
    if isinstance(source, Philox):
        return "philox"
    return "torch" if isinstance(source, TorchStream) else type(source).__name__.lower()


def listed_labels(request: Request) -> list[Any]:
    """A label for each prompt."""
    return list(request.label) if isinstance(request.label, list | tuple) else [request.label] * len(request.prompts)


def condition_fields(model: Model, request: Request, label: Any, negative: str) -> dict[str, Any]:
    """What the network is told besides text, where it was set."""
    found: dict[str, Any] = {} if label is None else {"label": label}
    for name in ("original_size", "target_size"):
        if getattr(request, name) is not None:
            found[name] = list(getattr(request, name))
    for name in ("crop", "aesthetic"):
        if tuple(getattr(request, name)) != getattr(Request, name):
            found[name] = list(getattr(request, name))
    zeros = bool(model.components.extra.get("force_zeros_for_empty_prompt"))
    if zeros and request.negative_prompt is not None and not negative:
        found["empty_negative"] = True  # encoded; without a negative prompt there would be zeros
    return found


def adapters_of(model: Model, request: Request) -> tuple[dict[str, Any], ...]:
    """Each adapter by name, kind, fingerprint and strength."""
    found: list[dict[str, Any]] = []
    for lora in request.loras:
        adapter = model.lora_of(lora)
        entry = {"name": adapter.name, "kind": "lora", "hash": fingerprint.of_adapter(adapter)}
        found.append({**entry, "scale": plain_scale(lora.scale)})
    for control in request.controls:
        seen = fingerprint.of_network(model.controlnet_of(control))
        entry: dict[str, Any] = {"name": name_of(control.network), "kind": "controlnet", "hash": seen}
        entry |= {"guess": True} if control.guess else {}
        found.append({**entry, "scale": control.scale, "start": control.start, "end": control.end})
    for prompt in request.image_prompts:
        networks = [model.ip_adapter_of(prompt), model.components.image_encoder]
        seen = "-".join(fingerprint.of_network(net) for net in networks if net is not None)
        entry = {"name": name_of(prompt.adapter), "kind": "ip-adapter", "hash": seen}
        found.append({**entry, "scale": plain_scale(prompt.scale)})
    if request.weak is not None:
        weak = request.weak.components
        seen = fingerprint.of_network(weak.network)
        found.append({"name": weak.name, "kind": "weak", "hash": seen, "scale": 1.0})
    return tuple(found)


def name_of(held: Any) -> str:
    """The name of an adapter's file or folder, or else what it is."""
    return Path(held).name if isinstance(held, str | os.PathLike) else type(held).__name__


def plain_scale(scale: Any) -> Any:
    return dict(scale) if isinstance(scale, Mapping) else scale


def inputs_of(request: Request) -> dict[str, str]:
    """Hashes of the images and tensors that went in, by role."""
    given = {
        "image": request.image,
        "mask": request.mask,
        "latents": request.latents,
        "prompt_embeds": request.prompt_embeds,
        "negative_prompt_embeds": request.negative_prompt_embeds,
        **{f"control{i}": control.image for i, control in enumerate(request.controls)},
        **{f"image_prompt{i}": prompt.images for i, prompt in enumerate(request.image_prompts)},
        **{f"image_prompt_mask{i}": prompt.masks for i, prompt in enumerate(request.image_prompts)},
    }
    return {role: hash_of(held) for role, held in given.items() if held is not None}


def hash_of(held: Any) -> str:
    """The hash of an image, of several, of a tensor, of an embedding, or of the run whose end is taken up."""
    if hasattr(held, "recipes"):
        return "run:" + images.digest(held.latents).removeprefix("sha256:")
    return images.digest(held.context if hasattr(held, "context") else held)


# --- A recipe → a request -------------------------------------------------------------------------------------------

# Fields of a request that a recipe has under the same name.
SAME_FIELDS = ("prompt", "seed", "strength", "denoising_start", "denoising_end", "clip_skip", "weighting")
PLAN_FIELDS = ("sampler", "grid", "steps", "dialect", "options")
CONDITIONS = ("label", "original_size", "target_size", "crop", "aesthetic", *SECOND)
TENSORS = ("latents", "prompt_embeds", "negative_prompt_embeds")
NOISES = ("philox", "torch")
EITHER = (("strength", "denoising_start"),)  # both say where to start


@dataclass(frozen=True)
class Needs:
    """What a recipe names and does not hold: images by their hash, adapters by theirs."""

    images: dict[str, str | None]
    adapters: tuple[dict[str, Any], ...]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [adapter for adapter in self.adapters if adapter["kind"] == kind]


def known_fields(source: Recipe | ForeignRecipe) -> Mapping[str, Any]:
    """A recipe's fields: all of ours; of another program's, those that were understood."""
    return source.fields if isinstance(source, ForeignRecipe) else vars(source)


def request_fields(source: Recipe | ForeignRecipe) -> dict[str, Any]:
    """The fields of a `Request` that a recipe sets, without its images and adapters."""
    known = known_fields(source)
    found = {name: known[name] for name in SAME_FIELDS if known.get(name) is not None}
    told = known.get("conditioning", {})
    found |= {name: condition_value(name, value) for name, value in told.items() if name in CONDITIONS}
    if known.get("negative_prompt") or told.get("empty_negative") or "negative_prompt_2" in told:
        found["negative_prompt"] = known["negative_prompt"]
    if known.get("size") is not None:
        found["width"], found["height"] = known["size"]
    if known.get("guidance"):
        found["guidance"] = known["guidance"]
    if known.get("plan") is not None:
        found["plan"] = Plan.from_dict(known["plan"])
    else:
        found |= {name: known[name] for name in PLAN_FIELDS if known.get(name)}
        if "grid" in found:
            found["grid"] = grid_of(found["grid"])
    if isinstance(source, Recipe):
        found["noise"] = noise_of(source)
    return found


def condition_value(name: str, value: Any) -> Any:
    """A class, a text, or a pair of numbers: a recipe may come from anybody."""
    if name == "label":
        good = isinstance(value, int | str) and not isinstance(value, bool)
        wanted = "a class number or name"
    elif name in SECOND:
        good, wanted = isinstance(value, str), "text"
    else:
        good = isinstance(value, list) and len(value) == 2 and all(isinstance(v, int | float) for v in value)
        wanted = "two numbers"
    if not good:
        raise PellucidError(rule(f"{name} of the recipe", wanted, value), "recipe-value")
    return tuple(value) if isinstance(value, list) else value


def grid_of(table: Mapping[str, Any]) -> Grid:
    try:
        return grids.named(Grid.from_dict(dict(table)))
    except PellucidError as error:
        if error.code not in ("grid", "grid-type", "grid-value"):
            raise
        raise PellucidError(f"grid of the recipe: {error}", "recipe-value") from None


def noise_of(recipe: Recipe) -> str:
    if recipe.noise not in NOISES:
        advice = "It was made with a noise source of its own, which has to be given again in Python."
        raise PellucidError(rule("noise of the recipe", " or ".join(NOISES), recipe.noise, advice), "recipe-noise")
    return recipe.noise


def needs_of(source: Recipe | ForeignRecipe) -> Needs:
    """The images and adapters that must be given again. Another program's strength belongs to an image."""
    known = known_fields(source)
    images = dict(known.get("inputs", {}))
    for name in TENSORS:
        if name in images:
            advice = "It was made from Python: give them there again."
            raise PellucidError(
                f"{name} must be given to repeat this recipe; it holds their hash only. {advice}", "missing"
            )
    if known.get("strength") is not None:
        images.setdefault("image", None)
    return Needs(images, tuple(known.get("adapters", ())))


def other_parts(recipe: Recipe, components: Any) -> tuple[str, ...]:
    """The parts in which a loaded model is not the recipe's."""
    if recipe.model_hash is None:
        return ()
    return fingerprint.differing(recipe.model_hash, fingerprint.of_model(components))


def override(base: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Fields said now over those of a recipe, which give way where both cannot be."""
    kept = dict(base)
    if "plan" in said:
        kept = {name: value for name, value in kept.items() if name not in PLAN_FIELDS}
    if "sampler" in said:
        kept.pop("plan", None)
        entry, grid = resolve(said["sampler"])
        if entry.name != kept.get("sampler"):
            kept.pop("options", None)
        if grid is not None:  # as in "DPM++ 2M Karras"
            kept.pop("grid", None)
    for first, second in EITHER:
        for name, other in ((first, second), (second, first)):
            if name in said:
                kept.pop(other, None)
    for name in SECOND:  # it belonged to the recipe's own prompt
        if name.removesuffix("_2") in said:
            kept.pop(name, None)
    options = {**kept.get("options", {}), **said.get("options", {})}
    return {**kept, **said, **({"options": options} if options else {})}
