"""Adapters without effect: a LoRA, ControlNet or IP-Adapter that changes nothing, by the change of the prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pellucid import scenes
from pellucid.core.batch import StepSeen
from pellucid.core.errors import PellucidError
from pellucid.evidence.doctor.checks import Finding, check
from pellucid.evidence.doctor.subject import Adapter, Subject, UnsupportedCheck
from pellucid.models.lora import Receipt
from pellucid.pipeline.encoders.conditions import takes_labels, takes_text
from pellucid.pipeline.images import to_images
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.request import Control, ImagePrompt, Lora, Request

_STEPS = 4
_PROMPT = "a large red star"
_NOTHING = 1e-4  # a relative change of x0 below this counts as none
_UNUSED = 0.05  # the share of a LoRA's keys that may fit nothing
_WORDS = {Lora: "LoRA", Control: "ControlNet", ImagePrompt: "IP-Adapter"}


def _beside(subject: Subject) -> tuple[Adapter, ...]:
    """The adapters in a model's folder that are none of its parts, as in a bundle; with no images yet."""
    folder, parts = subject.folder, subject.index or {}
    kinds: dict[str, Callable[[Path], Adapter]] = {
        "lora": Lora,
        "controlnet": lambda place: Control(place, None),
        "ip_adapter": lambda place: ImagePrompt(place, None),
    }
    places = {} if folder is None else {name: folder / name for name in kinds if name not in parts}
    return tuple(kinds[name](place) for name, place in places.items() if place.is_dir())


def _adapter_option(pipe: Pipeline, one: Adapter) -> dict[str, Any]:
    """The request's option for an adapter; where it has no image, with a scene or its outlines."""
    if isinstance(one, Lora):
        return {"loras": [one]}
    scene, side = scenes.sample(torch.tensor([7]), 0, "any", ("flat",), (2,)), max(pipe.size_of(Request())[0], 16)
    if isinstance(one, Control):
        outlines = to_images(scenes.edges(scene, side) * 2 - 1)[0]
        return {"controls": [one if one.image is not None else replace(one, image=outlines)]}
    image = to_images(scenes.render(scene, side))[0]
    return {"image_prompts": [one if one.images is not None else replace(one, images=image)]}


def _predictions(pipe: Pipeline, **options: Any) -> tuple[list[Tensor], Receipt | None]:
    """x0 of every row of a short run."""
    network, found = pipe.components.network, []

    def keep(seen: StepSeen) -> None:
        found.append(seen.x0.detach().float().cpu().clone())

    options |= {"prompt": _PROMPT} if takes_text(network) else {}
    options |= {"label": 0} if takes_labels(network) else {}
    result = pipe(seed=0, sampler="dpmpp_2m", steps=_STEPS, guidance=1.0, decode=False, observers=[keep], **options)
    return found, result.receipt


def _relative_change(plain: Sequence[Tensor], adapted: Sequence[Tensor]) -> float:
    """The largest relative change of x0 over the rows."""
    return max(float((b - a).norm() / a.norm().clamp(min=1e-12)) for a, b in zip(plain, adapted, strict=True))


@check("adapters")
def adapters(subject: Subject, pipeline: Pipeline) -> Iterable[Finding]:
    """Does every adapter change the prediction?"""
    worn = subject.adapters or _beside(subject)
    if not worn:
        raise UnsupportedCheck("no adapter: give --lora, --controlnet or --ip-adapter")
    plain, _ = _predictions(pipeline)
    return [finding for one in worn for finding in _adapter_findings(pipeline, one, plain)]


def _adapter_findings(pipe: Pipeline, one: Adapter, plain: Sequence[Tensor]) -> Iterable[Finding]:
    """Findings of one adapter."""
    kind, name = _WORDS[type(one)], _name_of(one)
    try:
        adapted, receipt = _predictions(pipe, **_adapter_option(pipe, one))
    except PellucidError as error:
        if error.code == "ip-encoder":
            raise UnsupportedCheck(f"the image encoder of {name} is not here") from None
        yield _refused(kind, name, error)
        return
    moved = _relative_change(plain, adapted)
    if not moved > _NOTHING:
        cause, fix = _why(pipe, one)
        facts = (("adapter", name), ("relative change of the prediction", moved), ("rows", len(plain)))
        yield Finding("adapter-no-effect", "error", f"{kind} {name} changes nothing", facts, cause, fix)
    if receipt is not None and receipt.unused:
        total = len(receipt.unused) + len(receipt.read)
        share = len(receipt.unused) / total
        yield Finding(
            "adapter-keys-unused",
            "warning" if share > _UNUSED else "note",
            f"{len(receipt.unused)} of {total} keys of {kind} {name} fit no layer",
            (("unused", ", ".join(receipt.unused[:4])), ("share", share), ("relative change", moved)),
            "They name layers that this model does not have: the file is for another base, or in another layout.",
            "Use the file that was made for this base, or convert its keys.",
        )


def _refused(kind: str, name: str, error: PellucidError) -> Finding:
    """An adapter that cannot be put on the model; the refusal says why."""
    nothing = error.code == "lora-nothing"
    code = "adapter-no-effect" if nothing else "adapter-misfit"
    title = f"{kind} {name} {'changes nothing' if nothing else 'does not fit the model'}"
    facts = (("adapter", name), ("relative change of the prediction", 0.0), ("code", error.code))
    return Finding(code, "error", title, facts, str(error), "Use an adapter that was made for this base, at scale 1.")


def _why(pipe: Pipeline, one: Adapter) -> tuple[str, str]:
    """The cause of no change at all, and what to do."""
    scales = one.scale.values() if hasattr(one.scale, "values") else [one.scale]
    if all(scale == 0 for scale in scales):
        return "Its scale is 0.", "Give it a scale above 0, such as 1.0."
    if isinstance(one, Control):
        net = pipe.controlnet_of(one)
        if _all_zero([*net.controlnet_down_blocks, net.controlnet_mid_block]):
            return "Its output layers are all zero: it is new and was never trained.", "Train it, or load its weights."
        return (
            f"It is active only from {one.start:g} to {one.end:g} of the run, and no step falls there.",
            "Widen start and end.",
        )
    if isinstance(one, ImagePrompt):
        if _all_zero([pair.to_v_ip for pair in pipe.ip_adapter_of(one).pairs]):  # type: ignore[misc]
            return "The values that it adds are all zero: it is new and was never trained.", "Load its weights."
        return "The network's cross-attention does not read its tokens.", "Use an adapter that was made for this base."
    cause = "Its differences are too small for the dtype of the base."
    return cause, "Check that its weights are those of its training."


def _all_zero(layers: Sequence[nn.Module]) -> bool:
    return all(not bool(parameter.any()) for layer in layers for parameter in layer.parameters())


def _name_of(one: Adapter) -> str:
    source = one.source if isinstance(one, Lora) else one.network if isinstance(one, Control) else one.adapter
    return Path(source).name if isinstance(source, str | Path) else str(getattr(source, "name", type(source).__name__))
