"""Out of memory: who owns the peak of the stage that failed, and what to turn on, from rehearsals."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pellucid.core.errors import PellucidError
from pellucid.pipeline.memory import in_words, predict
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
    try:
        now = predict(pipe, request).stages[stage]
        found = cures(pipe, request, stage)
    except Exception:  # advice must not hide what it is about
        return "Use a smaller size, fewer images at once, or offload='component'."
    better = sorted((total, words) for words, total in found.items() if total < HELPS * now.total)
    advice = "; ".join(f"{words} brings it to {in_words(total)}" for total, words in better)
    return (
        f"{now.owner or 'The loop'} owns its peak: {in_words(now.total)} predicted, {in_words(now.weights)} of it "
        f"weights. {advice or 'Use a smaller size, or a device with more memory'}."
    )


def cures(pipe: Pipeline, request: Request, stage: str) -> dict[str, int]:
    """What might help, and the stage's peak with it: changes of the policy, half precision, one image at a time."""
    found = {}
    for change in CHANGES.get(stage, ()):
        try:
            policy = replace(pipe.policy, **change)
            policy.check(pipe.device)
        except PellucidError:  # not on this device, or not with the rest of the policy
            continue
        if policy != pipe.policy:
            words = ", ".join(f"{name}={value!r}" for name, value in change.items())
            found[words] = predict(pipe, request, policy=policy).stages[stage].total
    if next(pipe.components.network.parameters()).dtype == torch.float32:
        found["dtype='bfloat16'"] = predict(pipe, request, dtype=torch.bfloat16).stages[stage].total
    if len(request.seeds()) > 1:
        found["one image at a time"] = predict(pipe, alone(request)).stages[stage].total
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
