"""The recipe of each image of a run: everything that made it, as plain data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pellucid.core.noise import NoiseSource, Philox, TorchStream
from pellucid.core.plan import Plan
from pellucid.models.guidance import Guidance
from pellucid.pipeline import fingerprint, image_inputs, images
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.request import Request

if TYPE_CHECKING:
    from pellucid.pipeline.pipeline import Pipeline


def recipes_of(
    pipe: Pipeline,
    request: Request,
    plan: Plan,
    guidance: Guidance,
    seeds: list[int],
    size: tuple[int, int],
    source: NoiseSource,
) -> list[Recipe]:
    """One recipe an image, in the order of the batch."""
    prompts = [text for text in request.prompts for _ in range(request.n)]
    negatives = [text for text in request.negatives for _ in range(request.n)]
    seconds = request.seconds
    shared: dict[str, Any] = {
        "model": pipe.components.name,
        "model_hash": fingerprint.of_model(pipe.components),
        "weighting": request.weighting,
        "clip_skip": request.clip_skip,
        **run_of(plan, request, guidance, source, next(pipe.components.network.parameters())),
        "size": size,
        "strength": request.strength,
        "denoising_start": request.denoising_start,
        "denoising_end": request.denoising_end,
        "adapters": adapters_of(pipe, request),
        "inputs": inputs_of(request),
        "policy": pipe.policy.to_dict(),
        "device": pipe.device.type,  # with offload the weights wait elsewhere
    }
    labels = labels_of(request, len(seeds))
    beside = [
        {**told(pipe, request, label, negative), **{name: texts[i // request.n] for name, texts in seconds.items()}}
        for i, (label, negative) in enumerate(zip(labels, negatives, strict=True))
    ]
    return [
        Recipe(prompt=p, negative_prompt=neg, seed=seed, conditioning=conditioning, **shared)
        for p, neg, seed, conditioning in zip(prompts, negatives, seeds, beside, strict=True)
    ]


def run_of(plan: Plan, request: Request, guidance: Guidance, source: NoiseSource, weight: Tensor) -> dict[str, Any]:
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


def labels_of(request: Request, count: int) -> list[Any]:
    given = list(request.label) if isinstance(request.label, list | tuple) else [request.label] * len(request.prompts)
    return [label for label in given for _ in range(request.n)][:count]


def told(pipe: Pipeline, request: Request, label: Any, negative: str) -> dict[str, Any]:
    """What the network is told besides text, where it was set."""
    found: dict[str, Any] = {} if label is None else {"label": label}
    for name in ("original_size", "target_size"):
        if getattr(request, name) is not None:
            found[name] = list(getattr(request, name))
    for name in ("crop", "aesthetic"):
        if tuple(getattr(request, name)) != getattr(Request, name):
            found[name] = list(getattr(request, name))
    zeros = bool(pipe.components.extra.get("force_zeros_for_empty_prompt"))
    if zeros and request.negative_prompt is not None and not negative:
        found["empty_negative"] = True  # encoded; without a negative prompt there would be zeros
    return found


def adapters_of(pipe: Pipeline, request: Request) -> tuple[dict[str, Any], ...]:
    """Each adapter by name, kind, fingerprint and strength."""
    found: list[dict[str, Any]] = []
    for lora in request.loras:
        adapter = pipe.lora_of(lora)
        entry = {"name": adapter.name, "kind": "lora", "hash": fingerprint.of_adapter(adapter)}
        found.append({**entry, "scale": plain_scale(lora.scale)})
    for control in request.controls:
        seen = fingerprint.of_network(image_inputs.controlnet_of(pipe, control))
        entry: dict[str, Any] = {"name": name_of(control.network), "kind": "controlnet", "hash": seen}
        entry |= {"guess": True} if control.guess else {}
        found.append({**entry, "scale": control.scale, "start": control.start, "end": control.end})
    for prompt in request.image_prompts:
        networks = [image_inputs.adapter_of(pipe, prompt), pipe.components.image_encoder]
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
