"""What a request made."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from pellucid.core.plan import Plan
from pellucid.models.lora import Receipt
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.stages import Stage


@dataclass(frozen=True)
class Result:
    """What a request made. `recipes` repeat each image; `latents` are x at the plan's end."""

    images: list[Image.Image]
    latents: Tensor
    plan: Plan
    recipes: list[Recipe]
    stages: tuple[Stage, ...] = ()
    receipt: Receipt | None = None
    notes: tuple[str, ...] = ()

    @property
    def recipe(self) -> Recipe:
        return self.recipes[0]
