"""Adapters without effect: a LoRA, ControlNet or IP-Adapter that changes nothing, by the change of the prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pellucid import scenes
from pellucid.core.errors import PellucidError
from pellucid.core.loop import StepSeen
from pellucid.evidence.doctor.checks import Finding, Unable, check
from pellucid.evidence.doctor.subject import Subject
from pellucid.models.controlnet import ControlNet
from pellucid.models.lora import Receipt
from pellucid.pipeline.encoders.conditions import takes_labels, takes_text
from pellucid.pipeline.images import to_images
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.request import Control, ImagePrompt, Lora, Request

Adapter = Lora | Control | ImagePrompt
STEPS = 4
PROMPT = "a large red star"
NOTHING = 1e-4  # a relative change of x0 below this is none
UNUSED = 0.05  # the share of a LoRA's keys that may fit nothing
WORDS = {Lora: "LoRA", Control: "ControlNet", ImagePrompt: "IP-Adapter"}


@dataclass
class PredictionObserver:
    """An observer: x0 of every row."""

    x0: list[Tensor] = field(default_factory=list)

    def __call__(self, seen: StepSeen) -> None:
        self.x0.append(seen.x0.detach().float().cpu().clone())


def beside(subject: Subject) -> tuple[Adapter, ...]:
    """The adapters that lie in a model's folder and are none of its parts, as in a bundle; with no images yet."""
    folder, parts = subject.folder, subject.index or {}
    if folder is None:
        return ()
    kinds: dict[str, Callable[[Path], Adapter]] = {
        "lora": Lora,
        "controlnet": lambda place: Control(place, None),
        "ip_adapter": lambda place: ImagePrompt(place, None),
    }
    return tuple(wear(folder / name) for name, wear in kinds.items() if (folder / name).is_dir() and name not in parts)


def shown_images(size: tuple[int, int]) -> Any:
    """A scene to follow or to resemble, and its outlines; square, of the width."""
    drawn = scenes.sample(torch.tensor([7]), 0, "any", ("flat",), (2,))
    side = max(size[0], 16)
    return to_images(scenes.render(drawn, side))[0], to_images(scenes.edges(drawn, side) * 2 - 1)[0]


def adapter_option(pipe: Pipeline, one: Adapter) -> dict[str, Any]:
    """The request's option for an adapter."""
    image, outlines = shown_images(pipe.size_of(Request()))
    if isinstance(one, Lora):
        return {"loras": [one]}
    if isinstance(one, Control):
        return {"controls": [one if one.image is not None else replace(one, image=outlines)]}
    shown = one if one.images is not None else replace(one, images=image)
    return {"image_prompts": [shown]}


def predictions(pipe: Pipeline, **extra: Any) -> tuple[list[Tensor], Receipt | None]:
    """x0 of every row of a short run."""
    network, watch = pipe.components.network, PredictionObserver()
    said: dict[str, Any] = {"prompt": PROMPT} if takes_text(network) else {}
    said |= {"label": 0} if takes_labels(network) else {}
    made = pipe(seed=0, sampler="dpmpp_2m", steps=STEPS, guidance=1.0, decode=False, observers=[watch], **said, **extra)
    return watch.x0, made.receipt


def relative_change(plain: Sequence[Tensor], worn: Sequence[Tensor]) -> float:
    """The largest relative change of x0 over the rows."""
    apart = [float((b - a).norm() / a.norm().clamp(min=1e-12)) for a, b in zip(plain, worn, strict=True)]
    return max(apart)


@check("adapters", needs=("pipeline",))
def adapters(subject: Subject) -> Iterable[Finding]:
    """Does every adapter change the prediction?"""
    assert subject.pipeline is not None
    given = subject.adapters or beside(subject)
    if not given:
        raise Unable("no adapter: give --lora, --controlnet or --ip-adapter")
    plain, _ = predictions(subject.pipeline)
    return [finding for one in given for finding in adapter_findings(subject.pipeline, one, plain)]


def adapter_findings(pipe: Pipeline, one: Adapter, plain: Sequence[Tensor]) -> Iterable[Finding]:
    """Findings of one adapter."""
    kind, name = WORDS[type(one)], name_of(one)
    try:
        worn, receipt = predictions(pipe, **adapter_option(pipe, one))
    except PellucidError as error:
        if error.code == "ip-encoder":
            raise Unable(f"the image encoder of {name} is not here") from None
        yield refused(kind, name, error)
        return
    moved = relative_change(plain, worn)
    if not moved > NOTHING:
        cause, fix = why(pipe, one)
        facts = (("adapter", name), ("relative change of the prediction", moved), ("rows", len(plain)))
        yield Finding("adapter-no-effect", "error", f"{kind} {name} changes nothing", facts, cause, fix)
    if receipt is not None and receipt.unused:
        total = len(receipt.unused) + len(receipt.read)
        share = len(receipt.unused) / total
        yield Finding(
            "adapter-keys-unused",
            "warning" if share > UNUSED else "note",
            f"{len(receipt.unused)} of {total} keys of {kind} {name} fit no layer",
            (("unused", ", ".join(receipt.unused[:4])), ("share", share), ("relative change", moved)),
            "They name layers that this model does not have: the file is for another base, or in another layout.",
            "Use the file that was made for this base, or convert its keys.",
        )


def refused(kind: str, name: str, error: PellucidError) -> Finding:
    """An adapter that cannot be worn: what the refusal says is the cause."""
    code = "adapter-no-effect" if error.code == "lora-nothing" else "adapter-misfit"
    title = f"{kind} {name} changes nothing" if code == "adapter-no-effect" else f"{kind} {name} does not fit the model"
    facts = (("adapter", name), ("relative change of the prediction", 0.0), ("code", error.code))
    return Finding(code, "error", title, facts, str(error), "Use an adapter that was made for this base, at scale 1.")


def why(pipe: Pipeline, one: Adapter) -> tuple[str, str]:
    """The cause of no change at all, and what to do."""
    if isinstance(one, Lora | Control | ImagePrompt) and is_zero(one.scale):
        return "Its scale is 0.", "Give it a scale above 0, such as 1.0."
    if isinstance(one, Control):
        net = pipe.controlnet_of(one)
        if silent(out_layers(net)):
            return "Its output layers are all zero: it is new and was never trained.", "Train it, or load its weights."
        return f"It acts only from {one.start:g} to {one.end:g} of the run, where no step lies.", "Widen start and end."
    if isinstance(one, ImagePrompt):
        held = pipe.ip_adapter_of(one)
        if silent([pair.to_v_ip for pair in held.pairs]):  # type: ignore[misc]
            return "The values that it adds are all zero: it is new and was never trained.", "Load its weights."
        return "The network's cross-attention does not read its tokens.", "Use an adapter that was made for this base."
    return (
        "Its differences are too small for the dtype of the base.",
        "Check that its weights are those of its training.",
    )


def out_layers(net: ControlNet) -> list[nn.Module]:
    return [*net.controlnet_down_blocks, net.controlnet_mid_block]


def silent(layers: Sequence[nn.Module]) -> bool:
    return all(not bool(parameter.any()) for layer in layers for parameter in layer.parameters())


def is_zero(scale: Any) -> bool:
    values = scale.values() if hasattr(scale, "values") else [scale]
    return all(value == 0 for value in values)


def name_of(one: Adapter) -> str:
    held = one.source if isinstance(one, Lora) else one.network if isinstance(one, Control) else one.adapter
    if isinstance(held, str | Path):
        return Path(held).name
    return str(getattr(held, "name", type(held).__name__))
