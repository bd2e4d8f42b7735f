"""What a request made, and the observers that are shown it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from PIL import Image
from torch import Tensor

from pellucid.core.batch import StepSeen
from pellucid.core.errors import PellucidError, rule
from pellucid.core.plan import Plan
from pellucid.models.lora import Receipt
from pellucid.pipeline.recipe import Recipe, RecipeImage, write_png
from pellucid.pipeline.stages import Stage


@dataclass(frozen=True)
class Result:
    """What a request made. `recipes` repeat each image; `latents` are x at the plan's end.

    `plain` counts the steps that ran operation by operation, not as a captured graph, by why in a word: "device" on a
    CPU, "hooks" where something watches the network. It is empty where all were captured.
    """

    images: list[Image.Image]
    latents: Tensor
    plan: Plan
    recipes: list[Recipe]
    stages: tuple[Stage, ...] = ()
    receipt: Receipt | None = None
    notes: tuple[str, ...] = ()
    plain: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for image, recipe in zip(self.images, self.recipes, strict=False):
            if type(image) is Image.Image:
                RecipeImage.of(image, recipe)

    @property
    def recipe(self) -> Recipe:
        return self.recipes[0]

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> list[Path]:
        """Writes the images as PNGs that carry their recipes, and returns the files.

        `star.png` is the file of a single image; several are written as `star-SEED.png`, with a number where a seed
        comes twice. Files that exist are refused unless `overwrite` is given.
        """
        goal = Path(path)
        if goal.suffix.lower() != ".png":
            raise PellucidError(rule("path", "a file that ends in .png", str(path)), "file-type")
        if not self.images:
            raise PellucidError("images must be decoded before they are saved; got latents alone.", "no-images")
        names = [goal] if len(self.images) == 1 else _numbered(goal, [recipe.seed for recipe in self.recipes])
        for name in names:
            check_new(name, "path", overwrite)
        for image, name, recipe in zip(self.images, names, self.recipes, strict=True):
            write_png(image, name, recipe)
        return names


def check_new(path: Path, what: str, overwrite: bool) -> None:
    """Refuses a file that exists, unless it may be replaced, and one in a folder that does not."""
    if not path.parent.is_dir():
        raise PellucidError(rule(what, "in a folder that exists", str(path)), "file")
    if not overwrite and os.path.lexists(path):
        advice = "Name another, or pass overwrite=True."
        raise PellucidError(rule(what, "a file that does not exist yet", str(path), advice), "file-exists")


def _numbered(goal: Path, seeds: list[int]) -> list[Path]:
    """One name per seed, all different."""
    counts = [seeds[:at].count(seed) for at, seed in enumerate(seeds)]
    ends = [f"{seed}-{count + 1}" if count else f"{seed}" for seed, count in zip(seeds, counts, strict=True)]
    return [goal.with_name(f"{goal.stem}-{end}{goal.suffix}") for end in ends]


# --- Observers ------------------------------------------------------------------------------------------------------


@runtime_checkable
class _RequestObserver(Protocol):
    """An observer that is also shown what a request is, and what it made. A wrapped pipeline shows the latter only."""

    def __call__(self, seen: StepSeen) -> None: ...

    def begin_request(self, recipes: Sequence[Recipe]) -> None: ...

    def end_request(self, result: Result) -> None: ...


def show_recipes(observers: Sequence[Any], recipes: Callable[[], Sequence[Recipe]]) -> None:
    """Shows the recipes to the observers that want them; to name the weights reads all of them."""
    for observe in observers:
        if isinstance(observe, _RequestObserver):
            observe.begin_request(recipes())


def show_result(observers: Sequence[Any], result: Result) -> Result:
    """The result, shown."""
    for observe in observers:
        if isinstance(observe, _RequestObserver):
            observe.end_request(result)
    return result
