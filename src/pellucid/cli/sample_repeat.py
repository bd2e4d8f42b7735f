"""`pellucid sample --from`: the recipe inside an image, completed by what was said and what was found beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from pellucid.cli.sample_words import AdapterWords, SampleWords
from pellucid.core.errors import PellucidError
from pellucid.core.grid import Grid
from pellucid.core.plan import Plan
from pellucid.interop import hub, source
from pellucid.models.guidance import Guidance
from pellucid.pipeline import images, repeat
from pellucid.pipeline import recipe as recipes
from pellucid.pipeline.parameters import ForeignRecipe
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.repeat import Needs

if TYPE_CHECKING:
    from rich.progress import Progress

    from pellucid.pipeline.pipeline import Pipeline
    from pellucid.pipeline.request import Request

SHOWN = 60  # characters of a value
ORDER = 10  # times the pixels of the image that a recipe may make unasked
MANY = 1000  # steps that it may take


@dataclass(frozen=True)
class RecipeSource:
    """An image and its recipe. `axes` are those of a sheet."""

    path: Path
    recipe: Recipe | ForeignRecipe
    needs: Needs
    axes: str | None = None

    @property
    def exact(self) -> Recipe | None:
        """The recipe where it is ours."""
        return self.recipe if isinstance(self.recipe, Recipe) else None

    @property
    def kind(self) -> str:
        if self.exact is None:
            return "A1111's text"
        return f"a recipe of pellucid {self.exact.pellucid}" + ("" if self.axes is None else ", a sheet")


def open_source(path: Path) -> RecipeSource:
    sheet = recipes.read_sheet(path)
    axes, found = (None, recipes.read_png(path)) if sheet is None else sheet
    return RecipeSource(path, found, repeat.needs_of(found), axes)


# --- nothing large unasked -------------------------------------------------------------------------------------


def agree(origin: RecipeSource, asked: SampleWords, progress: Progress) -> None:
    """Asks before a recipe of another order of size than its image is run, or refuses where nobody can answer.

    Nobody sees in an image what its recipe asks for. What is said on the command line is agreed to.
    """
    for question, refusal in surprises(origin, asked):
        if not on_terminal():
            raise PellucidError(refusal, "recipe-size")
        progress.stop()
        if not typer.confirm(question, err=True):
            raise typer.Abort
        progress.start()


def surprises(origin: RecipeSource, asked: SampleWords) -> Iterator[tuple[str, str]]:
    """(the question, the refusal) of each thing that a recipe makes far larger than its image shows."""
    base, name = repeat.request_fields(origin.recipe), origin.path.name
    size = base.get("width"), base.get("height")
    calls = base["plan"].nfe if "plan" in base else base.get("steps") or 0
    if None not in size and not {"width", "height"} & asked.fields.keys():
        with images.open_bounded(origin.path) as image:
            carrier = image.size
        times = size[0] * size[1] / (carrier[0] * carrier[1])
        if times > ORDER:
            made, own = images.words(size), images.words(carrier)
            question = f"{name} is {own}, and its recipe makes {made}, {times:,.0f} times as many pixels. Run it?"
            must, got = f"at most {ORDER} times the pixels of its image", f"{made} for {name} of {own}"
            yield question, f"size of the recipe must be {must}; got {got}. Give --size {size[0]}x{size[1]} to run it."
    if calls > MANY and not {"steps", "plan"} & asked.fields.keys():
        question = f"the recipe in {name} takes {calls:,} steps. Run it?"
        yield (
            question,
            f"steps of the recipe must be at most {MANY}; got {calls} for {name}. Give --steps {calls} to run it.",
        )


def on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


# --- the recipe, completed -------------------------------------------------------------------------------------


def complete(origin: RecipeSource, asked: SampleWords) -> tuple[SampleWords, list[str]]:
    """What to run: the recipe's words, and over them those that were said; and which of them were said otherwise."""
    base = repeat.request_fields(origin.recipe)
    seed, prompt, label = (base.pop(name, None) for name in ("seed", "prompt", "label"))
    fields = repeat.override(base, asked.fields)
    changed = differences({k: v for k, v in base.items() if k in asked.fields}, asked.fields)
    for name, old, new in (
        ("prompt", prompt, asked.prompts),
        ("label", label, asked.labels),
        ("seed", seed, asked.seeds),
    ):
        changed += [] if new is None else differences({name: old}, {name: new[0] if one(new) else new})
    changed += [f"{name} added" for name in asked.fields if name not in base and name not in origin.needs.images]
    loading, policy = dict(asked.loading), dict(asked.policy)
    if origin.exact is not None:
        loading = {**({"dtype": origin.exact.dtype} if origin.exact.dtype else {}), **loading}
        policy = {**own_policy(origin.exact), **policy}
    done = replace(
        asked,
        model=asked.model or local_model(origin),
        prompts=asked.prompts if asked.prompts is not None else None if prompt is None else [prompt],
        labels=asked.labels if asked.labels is not None else None if label is None else [label],
        seeds=asked.seeds if asked.seeds is not None else seed,
        fields=fields,
        loading=loading,
        policy=policy,
        **find_adapters(origin, asked),
    )
    return done, changed


def one(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 1


def own_policy(recipe: Recipe) -> dict[str, Any]:
    """The recipe's memory policy, as it differs from the default."""
    try:
        return Policy(**recipe.policy).to_dict()
    except TypeError as error:
        raise PellucidError(f"policy of the recipe must be one that is known; got {error}.", "recipe-value") from None


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`steps 30 → 20`, for each of the old that is new."""
    pairs = {
        name: (value_text(value), value_text(new[name])) for name, value in old.items() if not alike(value, new[name])
    }
    return [f"{name} {before} → {after}" for name, (before, after) in pairs.items() if before != after]


def alike(old: Any, new: Any) -> bool:
    """Whether two are guidances with the same rules."""
    if not isinstance(new, Guidance) or not isinstance(old, Mapping | Guidance):
        return False
    return Guidance.parse(old).same_rules(new)


def value_text(value: Any) -> str:
    if isinstance(value, Grid):
        return value.name
    if isinstance(value, Plan):
        return f"a plan ({value.name})"
    if isinstance(value, Mapping) and "scale" in value:
        value = Guidance.parse(value)
    if isinstance(value, Guidance):
        return value.text()
    text = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def understood(found: ForeignRecipe) -> dict[str, str]:
    """What was read of another program's text, in words."""
    names = {name: value for name, value in found.fields.items() if value not in ("", None) and name != "adapters"}
    words = {name: value["name"] if name == "grid" else value_text(value) for name, value in names.items()}
    loras = [f"{a['name']} at {a['scale']:g}" for a in found.fields.get("adapters", ())]
    return {**words, **({"lora": ", ".join(loras)} if loras else {})}


# --- what a recipe does not hold -------------------------------------------------------------------------------


def local_model(origin: RecipeSource) -> str:
    """The model that the recipe names, where it is on this machine: nothing is fetched because an image says so."""
    name = str(repeat.known_fields(origin.recipe).get("model", ""))
    if origin.exact is not None and name:
        for place in (source.expanded(name), origin.path.parent / name):
            if source.exists(place):
                return str(place)
        if source.in_bundle(name) is not None or (hub.is_id(name) and hub.cached(name) is not None):
            return name
    told = f"the recipe names {name!r}, which is not here" if name else "the recipe names none"
    raise PellucidError(f"MODEL must be given: {told}.", "missing")


def find_adapters(origin: RecipeSource, asked: SampleWords) -> dict[str, list[AdapterWords]]:
    """The adapters of the run: those given, or those of the recipe that lie in this folder or beside the image."""
    needs, missing = origin.needs, []
    loras = [with_scale(given, needs.of("lora")) for given in asked.loras] or [
        found if found is not None else AdapterWords("")
        for found in (find_lora(need, origin.path.parent) for need in needs.of("lora"))
    ]
    missing += [
        f"--lora FILE for {need['name']}"
        for need, found in zip(needs.of("lora"), loras, strict=False)
        if not found.path
    ]
    controls = with_spans(asked.controls, needs.of("controlnet"))
    prompts = with_spans(asked.image_prompts, needs.of("ip-adapter"))
    for flag, given, kind in (("--control", controls, "controlnet"), ("--image-prompt", prompts, "ip-adapter")):
        if not given:
            missing += [f"{flag} NET,FILE for {need['name']}" for need in needs.of(kind)]
    missing += [f"--{name} FILE" for name in ("image", "mask") if name in needs.images and name not in asked.fields]
    if asked.weak is None:
        missing += [f"--weak MODEL for {need['name']}" for need in needs.of("weak")]
    if missing:
        told = "the recipe holds names and hashes, not the files."
        raise PellucidError(f"{', '.join(missing)} must be given again: {told}", "missing")
    return {"loras": loras, "controls": controls, "image_prompts": prompts}


def with_scale(given: AdapterWords, needs: list[dict[str, Any]]) -> AdapterWords:
    """A given LoRA, at the recipe's scale where none is said."""
    own = next((need for need in needs if need["name"] == Path(given.path).stem), None)
    return given if own is None or given.scale is not None else replace(given, scale=own.get("scale", 1.0))


def find_lora(need: Mapping[str, Any], beside: Path) -> AdapterWords | None:
    """The file that a recipe's LoRA names, or the part of a bundle; no other name with a path in it is looked for."""
    name = str(need["name"])
    if source.in_bundle(name) is not None:
        return AdapterWords(name, scale=need.get("scale", 1.0))
    if name != os.path.basename(name) or name in ("", ".", ".."):
        return None
    places = [folder / f"{name}.safetensors" for folder in (Path(), beside)]
    return next((AdapterWords(str(p), scale=need.get("scale", 1.0)) for p in places if p.is_file()), None)


def with_spans(given: list[AdapterWords], needs: list[dict[str, Any]]) -> list[AdapterWords]:
    """Given adapters with images, in the recipe's order, at its scales and spans where none are said."""
    out = []
    for i, adapter in enumerate(given):
        own: Mapping[str, Any] = needs[i] if i < len(needs) else {}
        scale = adapter.scale if adapter.scale is not None else own.get("scale")
        span = adapter.span or ((own["start"], own["end"]) if "start" in own and "end" in own else None)
        out.append(replace(adapter, scale=scale, span=span, guess=own.get("guess") is True))
    return out


# --- is it the same? -------------------------------------------------------------------------------------------


def check_same(origin: RecipeSource, pipe: Pipeline, request: Request, named: bool) -> list[str]:
    """What of the model, the images and the adapters is not the recipe's. A model that nobody named must be."""
    recipe = origin.exact
    if recipe is None:
        return []
    found: list[str] = []
    other = repeat.other_parts(recipe, pipe.components)
    dtype = str(next(pipe.components.network.parameters()).dtype).removeprefix("torch.")
    if dtype != recipe.dtype:
        found.append(f"dtype {recipe.dtype} → {dtype}")
    elif other and not named:
        raise PellucidError(
            f"model must be the recipe's; {recipe.model} has another {', '.join(other)} now. "
            "Give --vae, --inversion, --tokenizer or --target again if it had them, or name MODEL to use it as it is.",
            "model-hash",
        )
    elif other:
        found.append(f"the model is another: {', '.join(other)}")
    given = repeat.inputs_of(request)
    found += [f"{role} is another image" for role, seen in recipe.inputs.items() if given.get(role, seen) != seen]
    return found + adapter_differences(recipe.adapters, repeat.adapters_of(pipe, request))


def adapter_differences(old: tuple[dict[str, Any], ...], new: tuple[dict[str, Any], ...]) -> list[str]:
    """What differs between two lists of adapters, in words."""
    found = []
    left = list(new)
    for need in old:
        same = [a for a in left if a["kind"] == need["kind"]]
        match = next((a for a in same if a["hash"] == need.get("hash")), None)
        match = match or next((a for a in same if a["name"] == need["name"]), None)
        what = f"{need['kind']} {need['name']}"
        if match is None:
            found.append(f"{what} left out")
            continue
        left.remove(match)
        if need.get("hash") not in (None, match["hash"]):
            found.append(f"{what} has other weights")
        if any(match.get(key) != need.get(key) for key in ("scale", "start", "end", "guess")):
            found.append(f"{what} at {match['scale']}, not {need.get('scale')}")
    return found + [f"{a['kind']} {a['name']} added" for a in left]


def compare_pixels(origin: RecipeSource, image: Any, recipe: Recipe) -> str:
    """Whether the new image is the old one, and where not, how far it is and what may be why."""
    if origin.exact is None:
        return ""
    old = images.read(origin.path)
    if old.size != image.size or old.mode != image.mode:
        return f"the new image has another size: {image.size[0]}×{image.size[1]}"
    apart = np.abs(np.asarray(old).astype(int) - np.asarray(image).astype(int))
    if not apart.any():
        return f"same pixels as {origin.path}"
    names = ("torch", "device", "dtype", "pellucid")
    before = vars(origin.exact)
    why = [f"{name} {before[name]} → {now}" for name in names if (now := getattr(recipe, name)) != before[name]]
    return f"differs from {origin.path}: {apart.mean():.2g} of 255 in the mean, {apart.max()} at most" + (
        f" ({', '.join(why)})" if why else ""
    )
