"""From latents to images, and to the recipe of each: everything that made it, as plain data."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from pellucid.core.errors import PellucidError
from pellucid.core.noise import NoiseSource, Philox, TorchStream
from pellucid.core.plan import Plan
from pellucid.models import tiles
from pellucid.models.guidance import Guidance
from pellucid.models.quantize import dtype_name
from pellucid.models.vae import from_diffusion
from pellucid.pipeline import fingerprint, images
from pellucid.pipeline.model import Model, RunSettings
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.request import Request
from pellucid.pipeline.result import Result
from pellucid.pipeline.stages import Stages


@dataclass(frozen=True)
class Latents:
    """x at the end of a run, and what its decoding and its result need: no inputs of the denoiser are held."""

    x: Tensor
    settings: RunSettings
    stages: Stages
    recipes: Callable[[], list[Recipe]]
    notes: tuple[str, ...] = ()
    plain: Mapping[str, int] = field(default_factory=dict)


@torch.no_grad()
def decode(latents: Latents) -> Result:
    """The images of a run, unless its request wants latents alone."""
    made = _decode_images(latents) if latents.settings.request.decode else []
    return _result(latents, made)


@torch.no_grad()
def decode_together(runs: Sequence[Latents]) -> list[Result | PellucidError]:
    """The images of several runs of one model and one size by one call of its autoencoder.

    A run whose latents are no finite numbers has the error in its place, and is left out of the call.
    """
    first, found = runs[0], dict[int, Result | PellucidError]()
    vae, policy = first.settings.components.vae, first.settings.model.policy
    good, scaled = [], []
    with first.stages.run("decode", vae):
        for k, one in enumerate(runs):
            try:
                scaled.append(_scaled(one, vae))
                good.append(k)
            except PellucidError as error:
                found[k] = error
        if good:
            pixels = torch.cat(scaled) if vae is None else _pixels(torch.cat(scaled), vae, policy)
            for k, own in zip(good, torch.split(pixels.float(), [len(one) for one in scaled]), strict=True):
                try:
                    found[k] = _result(runs[k], images.to_images(own))
                except PellucidError as error:
                    found[k] = error
    return [found[k] for k in range(len(runs))]


def _result(latents: Latents, made: list[Image.Image]) -> Result:
    settings = latents.settings
    return Result(
        images=made,
        latents=latents.x,
        plan=settings.plan,
        recipes=latents.recipes(),
        stages=tuple(latents.stages.taken),
        receipt=settings.receipt,
        notes=latents.notes,
        plain=latents.plain,
    )


def _decode_images(latents: Latents) -> list[Image.Image]:
    vae, policy = latents.settings.components.vae, latents.settings.model.policy
    with latents.stages.run("decode", vae):
        scaled = _scaled(latents, vae)
        return images.to_images(scaled if vae is None else _pixels(scaled, vae, policy).float())


def _scaled(latents: Latents, vae: Any) -> Tensor:
    """x as the autoencoder reads it; pixels where there is none."""
    x, plan = latents.x, latents.settings.plan
    if plan.dialect == "exact" and plan.end.alpha > 0:  # an end with noise left: x0 has alpha 1
        x = x / plan.end.alpha
    if vae is None:
        return x
    images.check_finite("latents", x, "The network overflowed: run it in float32 or bfloat16.")
    return from_diffusion(vae.config, x).to(next(vae.parameters()))


def _pixels(scaled: Tensor, vae: Any, policy: Policy) -> Tensor:
    if policy.vae_tile is not None:
        return tiles.decode_tiled(vae, scaled, policy.vae_tile)
    decoded: Tensor = tiles.decode_sliced(vae, scaled) if policy.vae_slicing else vae.decode(scaled)
    return decoded


# --- Recipes ----------------------------------------------------------------------------------------------------------


def recipes_of(run: RunSettings) -> list[Recipe]:
    """One recipe per image, in the order of the batch."""
    model, request = run.model, run.request
    prompts, negatives, labels = (
        [one for one in each for _ in range(request.n)]
        for each in (request.prompts, request.negatives, _listed_labels(request))
    )
    shared: dict[str, Any] = {
        "model": model.components.name,
        "model_hash": fingerprint.of_model(model.components),
        "weighting": request.weighting,
        "clip_skip": request.clip_skip,
        **run_fields(run.plan, request, run.guidance, run.noise, dtype_name(model.components.network)),
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
            **_condition_fields(model, request, label, negative),
            **{name: texts[i // request.n] for name, texts in request.seconds.items()},
        }
        for i, (label, negative) in enumerate(zip(labels, negatives, strict=True))
    ]
    return [
        Recipe(prompt=prompt, negative_prompt=negative, seed=seed, conditioning=conditioning, **shared)
        for prompt, negative, seed, conditioning in zip(prompts, negatives, run.seeds, own, strict=True)
    ]


def run_fields(plan: Plan, request: Request, guidance: Guidance, source: NoiseSource, dtype: str) -> dict[str, Any]:
    """What a recipe says of a run of any network, ours or wrapped."""
    return {
        "sampler": plan.name,
        "grid": {k: v for k, v in plan.grid.items() if k not in ("steps", "skip", "stop", "between")},
        "steps": int(plan.grid["steps"]),
        "dialect": plan.dialect,
        "options": dict(plan.options),
        "plan": None if request.plan is None else plan.to_dict(),
        "guidance": guidance.to_dict(),
        "noise": _noise_name(source),
        "dtype": dtype,
        "torch": torch.__version__,
    }


def _noise_name(source: NoiseSource) -> str:
    if isinstance(source, Philox):
        return "philox"
    return "torch" if isinstance(source, TorchStream) else type(source).__name__.lower()


def _listed_labels(request: Request) -> list[Any]:
    """A label for each prompt."""
    return list(request.label) if isinstance(request.label, list | tuple) else [request.label] * len(request.prompts)


def _condition_fields(model: Model, request: Request, label: Any, negative: str) -> dict[str, Any]:
    """What is passed to the network besides text, where it was set."""
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
    for lora in request.named_loras:
        adapter = model.lora_of(lora)
        entry: dict[str, Any] = {"name": adapter.name, "kind": "lora", "hash": fingerprint.of_adapter(adapter)}
        found.append({**entry, "scale": _plain_scale(lora.scale)})
    for control in request.controls:
        seen = fingerprint.of_network(model.controlnet_of(control))
        entry = {"name": _name_of(control.network), "kind": "controlnet", "hash": seen}
        entry |= {"guess": True} if control.guess else {}
        found.append({**entry, "scale": control.scale, "start": control.start, "end": control.end})
    for prompt in request.image_prompts:
        networks = [model.ip_adapter_of(prompt), model.components.image_encoder]
        seen = "-".join(fingerprint.of_network(net) for net in networks if net is not None)
        entry = {"name": _name_of(prompt.adapter), "kind": "ip-adapter", "hash": seen}
        found.append({**entry, "scale": _plain_scale(prompt.scale)})
    if request.weak is not None:
        weak = request.weak.components
        seen = fingerprint.of_network(weak.network)
        found.append({"name": weak.name, "kind": "weak", "hash": seen, "scale": 1.0})
    return tuple(found)


def _name_of(held: Any) -> str:
    """The name of an adapter's file or folder, or else what it is."""
    return Path(held).name if isinstance(held, str | os.PathLike) else type(held).__name__


def _plain_scale(scale: Any) -> Any:
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
    return {role: _hash_of(held) for role, held in given.items() if held is not None}


def _hash_of(held: Any) -> str:
    """The hash of an image, of several, of a tensor, of an embedding, or of the run whose end is taken up."""
    if hasattr(held, "recipes"):
        return "run:" + images.digest(held.latents).removeprefix("sha256:")
    return images.digest(held.context if hasattr(held, "context") else held)
