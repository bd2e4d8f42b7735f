"""The recipe of each image of a run: everything that made it, as plain data."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from pellucid.core.noise import NoiseSource, Philox, TorchStream
from pellucid.core.plan import Plan
from pellucid.models.guidance import Guidance
from pellucid.models.lora import AdapterSet
from pellucid.pipeline import images as pictures
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
    weight = next(pipe.components.network.parameters())
    shared: dict[str, Any] = {
        "model": pipe.components.name,
        "weighting": request.weighting,
        "clip_skip": request.clip_skip,
        "sampler": plan.name,
        "grid": {k: v for k, v in plan.grid.items() if k not in ("steps", "skip", "stop", "between")},
        "steps": int(plan.grid["steps"]),
        "dialect": plan.dialect,
        "options": dict(plan.options),
        "plan": None if request.plan is None else plan.to_dict(),
        "guidance": guidance.to_dict(),
        "noise": noise_name(source),
        "size": size,
        "strength": request.strength,
        "denoising_start": request.denoising_start,
        "denoising_end": request.denoising_end,
        "adapters": adapters_of(request),
        "inputs": inputs_of(request),
        "policy": pipe.policy.to_dict(),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": weight.device.type,
        "torch": torch.__version__,
    }
    labels = labels_of(request, len(seeds))
    return [
        Recipe(prompt=p, negative_prompt=neg, seed=seed, conditioning=told(request, label), **shared)
        for p, neg, seed, label in zip(prompts, negatives, seeds, labels, strict=True)
    ]


def noise_name(source: NoiseSource) -> str:
    if isinstance(source, Philox):
        return "philox"
    return "torch" if isinstance(source, TorchStream) else type(source).__name__.lower()


def labels_of(request: Request, count: int) -> list[Any]:
    given = list(request.label) if isinstance(request.label, list | tuple) else [request.label] * len(request.prompts)
    return [label for label in given for _ in range(request.n)][:count]


def told(request: Request, label: Any) -> dict[str, Any]:
    """What the network is told besides text, where it was set."""
    found: dict[str, Any] = {} if label is None else {"label": label}
    for name in ("original_size", "target_size"):
        if getattr(request, name) is not None:
            found[name] = list(getattr(request, name))
    if tuple(request.crop) != (0, 0):
        found["crop"] = list(request.crop)
    return found


def adapters_of(request: Request) -> tuple[dict[str, Any], ...]:
    found = []
    for kind, items, get in (
        ("lora", request.loras, lambda a: a.source),
        ("controlnet", request.controls, lambda a: a.network),
        ("ip-adapter", request.image_prompts, lambda a: a.adapter),
    ):
        for item in items:
            held = get(item)
            name = held.name if isinstance(held, AdapterSet) else None
            if name is None:
                is_path = isinstance(held, str | os.PathLike)
                name = os.path.basename(os.fspath(held)) if is_path else type(held).__name__
            found.append({"name": name, "kind": kind, "scale": item.scale})
    return tuple(found)


def inputs_of(request: Request) -> dict[str, str]:
    """Hashes of the pictures that went in, by role."""
    found = {}
    for role, picture in (("image", request.image), ("mask", request.mask)):
        if picture is not None and not hasattr(picture, "recipes") and not isinstance(picture, list | tuple):
            found[role] = pictures.digest(picture) if not is_tensor_batch(picture) else "tensor"
    for i, control in enumerate(request.controls):
        if not is_tensor_batch(control.picture) and not isinstance(control.picture, list | tuple):
            found[f"control{i}"] = pictures.digest(control.picture)
    return found


def is_tensor_batch(picture: Any) -> bool:
    return isinstance(picture, torch.Tensor) and picture.ndim == 4
