"""Out of memory: who owns the peak of the stage that failed, and what to turn on, from rehearsals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pellucid.core.errors import PellucidError
from pellucid.pipeline.memory import in_words, predict
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.request import Request

if TYPE_CHECKING:
    from pellucid.pipeline.pipeline import Pipeline

HELPS = 0.95  # advice must bring the peak below this share of what it was
TILE = 64
CHANGES: dict[str, tuple[dict[str, Any], ...]] = {
    "text": ({"offload": "component"},),
    "encode": ({"offload": "component"}, {"vae_tile": TILE}),
    "denoise": ({"offload": "component"}, {"offload": "block"}, {"attention": "auto"}),
    "decode": ({"offload": "component"}, {"vae_slicing": True}, {"vae_tile": TILE}, {"attention": "auto"}),
}


def explain(pipe: Pipeline, request: Request, stage: str) -> str:
    """Who owns the peak of a stage, and what would lower it by how much. All of it is predicted, nothing is run."""
    many = len(request.seeds()) > 1
    changes = {words(change): policy for change, policy in possible(pipe, stage, many)}
    try:
        now = predict(pipe, request, steps=1).stages[stage]
        found = cures(pipe, request, stage, changes)
    except Exception:  # advice must not hide what it is about
        fewer = ["fewer images at once"] if many else []
        return f"Use {', '.join(['a smaller size', *fewer, *changes])}."
    better = sorted((total, name) for name, total in found.items() if total < HELPS * now.total)
    advice = "; ".join(f"{name} brings it to {in_words(total)}" for total, name in better)
    owner, whole, held = now.owner or "The stage itself", in_words(now.total), in_words(now.weights)
    other = "Use a smaller size, or a device with more memory"
    return f"{owner} owns its peak: {whole} predicted, {held} of it weights. {advice or other}."


def words(change: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in change.items())


def possible(pipe: Pipeline, stage: str, many: bool) -> Iterator[tuple[dict[str, Any], Policy]]:
    """The changes of policy that act on a stage, on this device, with the rest of the policy."""
    for change in CHANGES.get(stage, ()):
        with suppress(PellucidError):
            policy = replace(pipe.policy, **change)
            policy.check(pipe.device)
            if policy != pipe.policy and (many or "vae_slicing" not in change):
                yield change, policy


def cures(pipe: Pipeline, request: Request, stage: str, changes: Mapping[str, Policy]) -> dict[str, int]:
    """What might help, and the stage's peak with it: changes of the policy, half precision, one image at a time."""

    def peak(of: Request = request, **goal: Any) -> int:
        return predict(pipe, of, steps=1, **goal).stages[stage].total

    found = {name: peak(policy=policy) for name, policy in changes.items()}
    if next(pipe.components.network.parameters()).dtype == torch.float32:
        found["dtype='bfloat16'"] = peak(dtype=torch.bfloat16)
    if len(request.seeds()) > 1:
        found["one image at a time"] = peak(alone(request))
    return found


def alone(request: Request) -> Request:
    """The same request for its first image."""
    label = request.label
    many = isinstance(label, list | tuple)
    return replace(
        request,
        n=1,
        seed=0,
        latents=None,
        prompt=request.prompts[0] if request.prompt is not None else None,
        negative_prompt=request.negatives[0] if request.negative_prompt is not None else None,
        label=label[0] if many else label,  # type: ignore[index]
    )
