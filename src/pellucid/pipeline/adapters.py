"""What a request may add to a model: LoRA files, ControlNets with their images, image prompts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pellucid.core.denoiser import split
from pellucid.core.errors import PellucidError, rule
from pellucid.core.loop import Prediction
from pellucid.core.plan import Plan
from pellucid.core.schedule import Level
from pellucid.models.controlnet import Controlled, ControlNet, Hint
from pellucid.models.guidance import steps_before, steps_of
from pellucid.models.guided import GuidedDenoiser, GuidedRun
from pellucid.models.ip_adapter import IPAdapter
from pellucid.models.lora import AdapterSet


def check_scale(what: str, scale: Any) -> None:
    values = scale.values() if isinstance(scale, Mapping) else [scale]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise PellucidError(rule(what, "a finite number", value), "scale")


@dataclass(frozen=True)
class Lora:
    """A LoRA file (or one that `pipe.load_lora` read) and its scale, for all layers or by name of layers."""

    source: AdapterSet | str | os.PathLike[str]
    scale: float | Mapping[str, float] = 1.0

    def __post_init__(self) -> None:
        check_scale("scale of a LoRA", self.scale)
        if not isinstance(self.source, AdapterSet | str | os.PathLike):
            raise PellucidError(rule("source of a LoRA", "a file or a loaded adapter", self.source), "lora")


@dataclass(frozen=True)
class Control:
    """A ControlNet, its image, how strong it is, and from which part of the run to which it acts.

    `guess` is diffusers' guess_mode: it acts only with the prompt, and more weakly at the first skips.
    """

    network: ControlNet | str | os.PathLike[str]
    image: Any
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0
    guess: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.guess, bool):
            raise PellucidError(rule("guess of a ControlNet", "True or False", self.guess), "control-guess")
        check_scale("scale of a ControlNet", self.scale)
        check_scale("start of a ControlNet", self.start)
        check_scale("end of a ControlNet", self.end)
        if not (0 <= self.start < self.end <= 1):
            raise PellucidError(
                rule("start, end of a ControlNet", "0 ≤ start < end ≤ 1", (self.start, self.end)), "scale"
            )

    def acts_at(self, step: int, steps: int) -> bool:
        """diffusers' count: step i of n acts where its whole share of the run lies between start and end."""
        return step / steps >= self.start and (step + 1) / steps <= self.end


@dataclass(frozen=True)
class ImagePrompt:
    """An IP-Adapter, the images that prompt through it, and where: one mask an image, white where it acts."""

    adapter: IPAdapter | str | os.PathLike[str]
    images: Any
    scale: float | Mapping[str, float] = 1.0
    masks: Any = None

    def __post_init__(self) -> None:
        check_scale("scale of an image prompt", self.scale)


@dataclass(frozen=True)
class ControlledDenoiser:
    """A guided denoiser whose ControlNets are asked only at the steps where they act."""

    guided: GuidedDenoiser
    controls: Sequence[Control]
    switch: HintSwitch

    def bind(self, plans: Sequence[Plan]) -> ControlledRun:
        run = self.guided.bind(list(plans))
        return ControlledRun(run, self.controls, self.switch, [steps_of(plan, True) for plan in plans])


@dataclass
class ControlledRun:
    """One run: it switches the hints of its network on and off before each call."""

    run: GuidedRun
    controls: Sequence[Control]
    switch: HintSwitch
    ratios: list[list[float]]  # of the distinct levels of each image's plan

    def __call__(self, x: Tensor, level: Any, time: Any) -> Prediction:
        levels = [level] * len(self.ratios) if isinstance(level, Level) else split(level)
        self.switch.on = tuple(
            tuple(acts(control, one, own) for one, own in zip(levels, self.ratios, strict=True))
            for control in self.controls
        )
        return self.run(x, level, time)

    def select(self, images: Sequence[int]) -> ControlledRun:
        return replace(self, run=self.run.select(images), ratios=[self.ratios[i] for i in images])


def acts(control: Control, level: Level, ratios: list[float]) -> bool:
    step = min(steps_before(ratios, level.ratio), len(ratios) - 1)
    return control.acts_at(step, len(ratios))


class HintSwitch:
    """The network of one run: a UNet with ControlNets, without the hints of those that do not act now."""

    def __init__(self, network: Controlled) -> None:
        self.network = network
        self.on: tuple[tuple[bool, ...], ...] = ()

    def forward(self, x: Tensor, time: Tensor, *, control: tuple[Hint, ...], **inputs: Any) -> Tensor:
        hints = tuple(self.hint(hint, on) for hint, on in zip(control, self.on, strict=True))
        return self.network(x, time, control=hints if any(h is not None for h in hints) else (), **inputs)

    __call__ = forward

    @staticmethod
    def hint(hint: Hint, on: tuple[bool, ...]) -> Hint | None:
        if all(on):
            return hint
        if not any(on):
            return None
        times = len(hint.scale) // len(on)  # cond and uncond of one batch
        mask = torch.tensor([float(o) for o in on] * times).to(hint.scale).reshape(-1, 1, 1, 1)
        return Hint(hint.embedded, hint.scale * mask)
