"""From a recipe back to a request: what it sets, what it needs that it does not hold, and whether that is the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pellucid.core import grid as grids
from pellucid.core.errors import PellucidError, rule
from pellucid.core.grid import Grid
from pellucid.core.plan import Plan
from pellucid.core.samplers import resolve
from pellucid.pipeline import fingerprint
from pellucid.pipeline.parameters import Foreign
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.request import SECOND

# Fields of a request that a recipe has under the same name.
SAME = ("prompt", "seed", "strength", "denoising_start", "denoising_end", "clip_skip", "weighting")
HOW = ("sampler", "grid", "steps", "dialect", "options")
TOLD = ("label", "original_size", "target_size", "crop", "aesthetic", *SECOND)
TENSORS = ("latents", "prompt_embeds", "negative_prompt_embeds")
NOISES = ("philox", "torch")
EITHER = (("strength", "denoising_start"),)  # both say where to start


@dataclass(frozen=True)
class Needs:
    """What a recipe names and does not hold: images by their hash, adapters by theirs."""

    images: dict[str, str | None]
    adapters: tuple[dict[str, Any], ...]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [adapter for adapter in self.adapters if adapter["kind"] == kind]


def known_fields(source: Recipe | Foreign) -> Mapping[str, Any]:
    """A recipe's fields: all of ours; of another program's, those that were understood."""
    return source.fields if isinstance(source, Foreign) else vars(source)


def request_fields(source: Recipe | Foreign) -> dict[str, Any]:
    """The fields of a `Request` that a recipe sets, without its images and adapters."""
    known = known_fields(source)
    found = {name: known[name] for name in SAME if known.get(name) is not None}
    told = known.get("conditioning", {})
    found |= {name: told_value(name, value) for name, value in told.items() if name in TOLD}
    if known.get("negative_prompt") or told.get("empty_negative") or "negative_prompt_2" in told:
        found["negative_prompt"] = known["negative_prompt"]
    if known.get("size") is not None:
        found["width"], found["height"] = known["size"]
    if known.get("guidance"):
        found["guidance"] = known["guidance"]
    if known.get("plan") is not None:
        found["plan"] = Plan.from_dict(known["plan"])
    else:
        found |= {name: known[name] for name in HOW if known.get(name)}
        if "grid" in found:
            found["grid"] = grid_of(found["grid"])
    if isinstance(source, Recipe):
        found["noise"] = noise_of(source)
    return found


def told_value(name: str, value: Any) -> Any:
    """A class, a text, or a pair of numbers: a recipe may come from anybody."""
    if name == "label":
        good = isinstance(value, int | str) and not isinstance(value, bool)
        wanted = "a class number or name"
    elif name in SECOND:
        good, wanted = isinstance(value, str), "text"
    else:
        good = isinstance(value, list) and len(value) == 2 and all(isinstance(v, int | float) for v in value)
        wanted = "two numbers"
    if not good:
        raise PellucidError(rule(f"{name} of the recipe", wanted, value), "recipe-value")
    return tuple(value) if isinstance(value, list) else value


def grid_of(table: Mapping[str, Any]) -> Grid:
    try:
        return grids.named(Grid.from_dict(dict(table)))
    except PellucidError as error:
        if error.code not in ("grid", "grid-type", "grid-value"):
            raise
        raise PellucidError(f"grid of the recipe: {error}", "recipe-value") from None


def noise_of(recipe: Recipe) -> str:
    if recipe.noise not in NOISES:
        advice = "It was made with a noise source of its own, which has to be given again in Python."
        raise PellucidError(rule("noise of the recipe", " or ".join(NOISES), recipe.noise, advice), "recipe-noise")
    return recipe.noise


def needs_of(source: Recipe | Foreign) -> Needs:
    """The images and adapters that must be given again. Another program's strength belongs to an image."""
    known = known_fields(source)
    images = dict(known.get("inputs", {}))
    for name in TENSORS:
        if name in images:
            advice = "It was made from Python: give them there again."
            raise PellucidError(
                f"{name} must be given to repeat this recipe; it holds their hash only. {advice}", "missing"
            )
    if known.get("strength") is not None:
        images.setdefault("image", None)
    return Needs(images, tuple(known.get("adapters", ())))


def other_parts(recipe: Recipe, components: Any) -> tuple[str, ...]:
    """The parts in which a loaded model is not the recipe's."""
    if recipe.model_hash is None:
        return ()
    return fingerprint.differing(recipe.model_hash, fingerprint.of_model(components))


def over(base: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Fields said now over those of a recipe, which give way where both cannot be."""
    kept = dict(base)
    if "plan" in said:
        kept = {name: value for name, value in kept.items() if name not in HOW}
    if "sampler" in said:
        kept.pop("plan", None)
        entry, grid = resolve(said["sampler"])
        if entry.name != kept.get("sampler"):
            kept.pop("options", None)
        if grid is not None:  # as in "DPM++ 2M Karras"
            kept.pop("grid", None)
    for first, second in EITHER:
        for name, other in ((first, second), (second, first)):
            if name in said:
                kept.pop(other, None)
    for name in SECOND:  # it belonged to the recipe's own prompt
        if name.removesuffix("_2") in said:
            kept.pop(name, None)
    options = {**kept.get("options", {}), **said.get("options", {})}
    return {**kept, **said, **({"options": options} if options else {})}
