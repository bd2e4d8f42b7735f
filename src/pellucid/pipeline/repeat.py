"""From a recipe back to a run: what it sets, what has to be given again, and whether the image is the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pellucid.core import grid as grids
from pellucid.core.errors import PellucidError, rule
from pellucid.core.grid import Grid
from pellucid.core.plan import Plan
from pellucid.core.samplers import resolve
from pellucid.models.guidance import Guidance
from pellucid.models.quantize import dtype_name
from pellucid.pipeline import fingerprint, images
from pellucid.pipeline.decode import adapters_of, inputs_of
from pellucid.pipeline.load import load
from pellucid.pipeline.model import Model
from pellucid.pipeline.parameters import ForeignRecipe
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.recipe import Recipe, read_png, read_sheet
from pellucid.pipeline.request import SECOND, Control, ImagePrompt, Lora, Request, flags_of
from pellucid.pipeline.shelf import find_lora, local_model

# --- A recipe → a request -------------------------------------------------------------------------------------------

# Fields of a request that a recipe has under the same name.
_SAME_FIELDS = ("prompt", "seed", "strength", "denoising_start", "denoising_end", "clip_skip", "weighting")
_PLAN_FIELDS = ("sampler", "grid", "steps", "dialect", "options")
_CONDITIONS = ("label", "original_size", "target_size", "crop", "aesthetic", *SECOND)
_TENSORS = ("latents", "prompt_embeds", "negative_prompt_embeds")
NOISES = ("philox", "torch")
_EITHER = (("strength", "denoising_start"),)  # both say where to start


@dataclass(frozen=True)
class Needs:
    """What a recipe names and does not hold: images by their hash, adapters by theirs."""

    images: dict[str, str | None]
    adapters: tuple[dict[str, Any], ...]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [adapter for adapter in self.adapters if adapter["kind"] == kind]


def _known_fields(source: Recipe | ForeignRecipe) -> Mapping[str, Any]:
    """A recipe's fields: all of ours; of another program's, those that were understood."""
    return source.fields if isinstance(source, ForeignRecipe) else vars(source)


def request_fields(source: Recipe | ForeignRecipe) -> dict[str, Any]:
    """The fields of a `Request` that a recipe sets, without its images and adapters."""
    known = _known_fields(source)
    found = {name: known[name] for name in _SAME_FIELDS if known.get(name) is not None}
    conditions = known.get("conditioning", {})
    found |= {name: _condition_value(name, value) for name, value in conditions.items() if name in _CONDITIONS}
    if known.get("negative_prompt") or conditions.get("empty_negative") or "negative_prompt_2" in conditions:
        found["negative_prompt"] = known["negative_prompt"]
    if known.get("size") is not None:
        found["width"], found["height"] = known["size"]
    if known.get("guidance"):
        found["guidance"] = known["guidance"]
    if known.get("plan") is not None:
        found["plan"] = Plan.from_dict(known["plan"])
    else:
        found |= {name: known[name] for name in _PLAN_FIELDS if known.get(name)}
        if "grid" in found:
            found["grid"] = _grid_of(found["grid"])
    if isinstance(source, Recipe):
        found["noise"] = _noise_of(source)
    return found


def _condition_value(name: str, value: Any) -> Any:
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


def _grid_of(table: Mapping[str, Any]) -> Grid:
    try:
        return grids.named(Grid.from_dict(dict(table)))
    except PellucidError as error:
        if error.code not in ("grid", "grid-type", "grid-value"):
            raise
        raise PellucidError(f"grid of the recipe: {error}", "recipe-value") from None


def _noise_of(recipe: Recipe) -> str:
    if recipe.noise not in NOISES:
        advice = "It was made with a noise source of its own, which has to be given again in Python."
        raise PellucidError(rule("noise of the recipe", " or ".join(NOISES), recipe.noise, advice), "recipe-noise")
    return recipe.noise


def needs_of(source: Recipe | ForeignRecipe) -> Needs:
    """The images and adapters that must be given again. Another program's strength belongs to an image."""
    known = _known_fields(source)
    images = dict(known.get("inputs", {}))
    for name in _TENSORS:
        if name in images:
            advice = "It was made from Python: give them there again."
            raise PellucidError(
                f"{name} must be given to repeat this recipe; it holds their hash only. {advice}", "missing"
            )
    if known.get("strength") is not None:
        images.setdefault("image", None)
    return Needs(images, tuple(known.get("adapters", ())))


def _other_parts(recipe: Recipe, components: Any) -> tuple[str, ...]:
    """The parts in which a loaded model is not the recipe's."""
    if recipe.model_hash is None:
        return ()
    return fingerprint.differing(recipe.model_hash, fingerprint.of_model(components))


def override(base: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Fields said now over those of a recipe, which give way where both cannot be."""
    kept = dict(base)
    if "plan" in said:
        kept = {name: value for name, value in kept.items() if name not in _PLAN_FIELDS}
    if "sampler" in said:
        kept.pop("plan", None)
        entry, grid = resolve(said["sampler"])
        if entry.name != kept.get("sampler"):
            kept.pop("options", None)
        if grid is not None:  # as in "DPM++ 2M Karras"
            kept.pop("grid", None)
    for first, second in _EITHER:
        for name, other in ((first, second), (second, first)):
            if name in said:
                kept.pop(other, None)
    for name in SECOND:  # it belonged to the recipe's own prompt
        if name.removesuffix("_2") in said:
            kept.pop(name, None)
    options = {**kept.get("options", {}), **said.get("options", {})}
    return {**kept, **said, **({"options": options} if options else {})}


# --- The options of a run -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdapterFile:
    """An adapter by its file, with its image, and its strength and span where they are set."""

    path: str
    image: Image.Image | None = None
    scale: float | None = None
    span: tuple[float, float] | None = None
    guess: bool = False

    @property
    def strength(self) -> float:
        return 1.0 if self.scale is None else self.scale


@dataclass(frozen=True)
class RunOptions:
    """What was set for a run. The rest is left to a recipe or to the model.

    `fields` are those of a request, without its adapters and its weak model; `prompt` and `label` may be lists.
    `loading` are options of `load`, `policy` fields of a `Policy`.
    """

    model: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    loras: tuple[AdapterFile, ...] = ()
    controls: tuple[AdapterFile, ...] = ()
    image_prompts: tuple[AdapterFile, ...] = ()
    weak: str | None = None
    loading: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)

    def adapters(self) -> dict[str, Any]:
        """The adapters as fields of a request. A model reads each file once."""
        found = {
            "loras": [Lora(one.path, one.strength) for one in self.loras],
            "controls": [
                Control(one.path, one.image, one.strength, *(one.span or (0.0, 1.0)), one.guess)
                for one in self.controls
            ],
            "image_prompts": [ImagePrompt(one.path, one.image, one.strength) for one in self.image_prompts],
        }
        return {name: adapters for name, adapters in found.items() if adapters}

    def load(self) -> Pipeline:
        assert self.model is not None
        return load(self.model, **self.loading, policy=Policy(**self.policy))

    def load_weak(self) -> Pipeline | None:
        """The worse model of autoguidance, in the same precision and on the same device."""
        same = {name: self.loading[name] for name in ("dtype", "device") if name in self.loading}
        return None if self.weak is None else load(self.weak, **same)


# --- A recipe, completed --------------------------------------------------------------------------------------------

_MAX_ENLARGEMENT = 10  # times the pixels of the image that a recipe may make unasked
_MAX_CALLS = 1000  # steps that it may take
_MAX_SHOWN = 60  # characters of a value


@dataclass(frozen=True)
class RecipeSource:
    """A file and the recipe in it. `axes` are those of a sheet."""

    path: Path
    recipe: Recipe | ForeignRecipe
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
    """The recipe inside an image; refuses one that holds tensors which only Python can give again."""
    sheet = read_sheet(path)
    axes, recipe = (None, read_png(path)) if sheet is None else sheet
    needs_of(recipe)
    return RecipeSource(path, recipe, axes)


def complete(origin: RecipeSource, options: RunOptions) -> tuple[RunOptions, list[str]]:
    """What to run: the recipe, and over it the options that are set; and in words what these change."""
    base, recipe = request_fields(origin.recipe), origin.exact
    whole = ("prompt", "label", "seed")  # said last
    order = [*(name for name in base if name not in whole), *(name for name in whole if name in base)]
    fields = options.fields
    changed = _differences({name: base[name] for name in order if name in fields}, fields)
    given = {*base, *needs_of(origin.recipe).images, "n"}
    changed += [f"{name} added" for name in fields if name not in given]
    loading, policy = options.loading, options.policy
    if recipe is not None:
        loading = {**({"dtype": recipe.dtype} if recipe.dtype else {}), **loading}
        policy = {**_policy_of(recipe), **policy}
    done = replace(
        options,
        model=options.model or model_of(origin),
        fields=override(base, fields),
        loading=loading,
        policy=policy,
        **_find_adapters(origin, options),
    )
    return done, changed


def _policy_of(recipe: Recipe) -> dict[str, Any]:
    """The recipe's memory policy, as it differs from the default."""
    try:
        return Policy(**recipe.policy).to_dict()
    except TypeError as error:
        raise PellucidError(f"policy of the recipe must be one that is known; got {error}.", "recipe-value") from None


def model_of(origin: RecipeSource) -> str:
    """The model that the recipe names, where it is on this machine: nothing is fetched because an image says so."""
    name = str(_known_fields(origin.recipe).get("model", ""))
    found = local_model(name, origin.path.parent) if origin.exact is not None and name else None
    if found is None:
        words = f"the recipe names {name!r}, which is not here" if name else "the recipe names none"
        raise PellucidError(f"MODEL must be given: {words}.", "missing")
    return found


def _find_adapters(origin: RecipeSource, options: RunOptions) -> dict[str, Any]:
    """The adapters of the run: those given, or those of the recipe that lie in this folder or beside the image."""
    needs, flags, missing = needs_of(origin.recipe), flags_of(Request), []

    def lack(name: str, words: str, needed: Mapping[str, Any] | None = None) -> None:
        missing.append(f"{flags[name].names[0]} {words}" + ("" if needed is None else f" for {needed['name']}"))

    loras = [_with_scale(one, needs.of("lora")) for one in options.loras]
    for need in needs.of("lora") if not loras else ():
        path = find_lora(need["name"], origin.path.parent)
        if path is None:
            lack("loras", "FILE", need)
        else:
            loras.append(AdapterFile(path, scale=need.get("scale", 1.0)))
    found = {"loras": tuple(loras)}
    for name, kind, words in (("controls", "controlnet", "NET,FILE"), ("image_prompts", "ip-adapter", "NET,FILE")):
        found[name] = _with_spans(getattr(options, name), needs.of(kind))
        for need in needs.of(kind) if not found[name] else ():
            lack(name, words, need)
    for name in ("image", "mask"):
        if name in needs.images and name not in options.fields:
            lack(name, "FILE")
    for need in needs.of("weak") if options.weak is None else ():
        lack("weak", "MODEL", need)
    if missing:
        why = "the recipe holds names and hashes, not the files."
        raise PellucidError(f"{', '.join(missing)} must be given again: {why}", "missing")
    return found


def _with_scale(given: AdapterFile, needs: list[dict[str, Any]]) -> AdapterFile:
    """A given LoRA, at the recipe's scale where none is set."""
    own = next((need for need in needs if need["name"] == Path(given.path).stem), None)
    return given if own is None or given.scale is not None else replace(given, scale=own.get("scale", 1.0))


def _with_spans(given: tuple[AdapterFile, ...], needs: list[dict[str, Any]]) -> tuple[AdapterFile, ...]:
    """Given adapters with images, in the recipe's order, at its scales and spans where none are set."""
    out = []
    for i, adapter in enumerate(given):
        own: Mapping[str, Any] = needs[i] if i < len(needs) else {}
        scale = adapter.scale if adapter.scale is not None else own.get("scale")
        span = adapter.span or ((own["start"], own["end"]) if "start" in own and "end" in own else None)
        out.append(replace(adapter, scale=scale, span=span, guess=own.get("guess") is True))
    return tuple(out)


def surprises(origin: RecipeSource, options: RunOptions) -> Iterator[tuple[str, str]]:
    """(the question, the refusal) of each thing that a recipe makes far larger than its image shows."""
    base, name = request_fields(origin.recipe), origin.path.name
    size = base.get("width", 0), base.get("height", 0)
    calls = base["plan"].nfe if "plan" in base else base.get("steps") or 0
    if all(size) and not {"width", "height"} & options.fields.keys():
        with images.open_bounded(origin.path) as image:
            carrier = image.size
        times = size[0] * size[1] / (carrier[0] * carrier[1])
        if times > _MAX_ENLARGEMENT:
            made, own = images.words(size), images.words(carrier)
            question = f"{name} is {own}, and its recipe makes {made}, {times:,.0f} times as many pixels. Run it?"
            must, got = f"at most {_MAX_ENLARGEMENT} times the pixels of its image", f"{made} for {name} of {own}"
            yield question, f"size of the recipe must be {must}; got {got}. Give --size {size[0]}x{size[1]} to run it."
    if calls > _MAX_CALLS and not {"steps", "plan"} & options.fields.keys():
        question = f"the recipe in {name} takes {calls:,} steps. Run it?"
        must = f"at most {_MAX_CALLS}; got {calls} for {name}. Give --steps {calls} to run it."
        yield question, f"steps of the recipe must be {must}"


# --- Values in words ------------------------------------------------------------------------------------------------


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`steps 30 → 20`, for each of the old that is new."""
    changed = {name: value for name, value in old.items() if not _same_rules(value, new[name])}
    pairs = {name: (_value_text(value), _value_text(new[name])) for name, value in changed.items()}
    return [f"{name} {before} → {after}" for name, (before, after) in pairs.items() if before != after]


def _same_rules(old: Any, new: Any) -> bool:
    """Whether two are guidances with the same rules."""
    if not isinstance(new, Guidance) or not isinstance(old, Mapping | Guidance):
        return False
    return Guidance.parse(old).same_rules(new)


def _value_text(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, Grid):
        return value.name
    if isinstance(value, Plan):
        return f"a plan ({value.name})"
    if isinstance(value, Mapping) and "scale" in value:
        value = Guidance.parse(value)
    if isinstance(value, Guidance):
        return value.text()
    text = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"


def understood_text(found: ForeignRecipe) -> dict[str, str]:
    """What was read of another program's text, in words."""
    names = {name: value for name, value in found.fields.items() if value not in ("", None) and name != "adapters"}
    words = {name: value["name"] if name == "grid" else _value_text(value) for name, value in names.items()}
    loras = [f"{a['name']} at {a['scale']:g}" for a in found.fields.get("adapters", ())]
    return {**words, **({"lora": ", ".join(loras)} if loras else {})}


# --- Is it the same image? ------------------------------------------------------------------------------------------


def check_same(recipe: Recipe, model: Model, request: Request, named: bool) -> list[str]:
    """What of the model, the images and the adapters is not the recipe's. A model that was not named must be."""
    found: list[str] = []
    other = _other_parts(recipe, model.components)
    dtype = dtype_name(model.components.network)
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
    given = inputs_of(request)
    found += [f"{role} is another image" for role, seen in recipe.inputs.items() if given.get(role, seen) != seen]
    return found + _adapter_differences(recipe.adapters, adapters_of(model, request))


def _adapter_differences(old: tuple[dict[str, Any], ...], new: tuple[dict[str, Any], ...]) -> list[str]:
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


def compare_pixels(path: Path, old_recipe: Recipe, image: Image.Image, recipe: Recipe) -> str:
    """Whether the new image is that of a file, and where not, how far it is and what may be why."""
    old = images.read(path)
    if old.size != image.size or old.mode != image.mode:
        return f"the new image has another size: {image.size[0]}×{image.size[1]}"
    apart = np.abs(np.asarray(old).astype(int) - np.asarray(image).astype(int))
    if not apart.any():
        return f"same pixels as {path}"
    names = ("torch", "device", "dtype", "pellucid")
    before = vars(old_recipe)
    why = [f"{name} {before[name]} → {now}" for name in names if (now := getattr(recipe, name)) != before[name]]
    return f"differs from {path}: {apart.mean():.2g} of 255 in the mean, {apart.max()} at most" + (
        f" ({', '.join(why)})" if why else ""
    )
