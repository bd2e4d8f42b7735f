"""A trace run again: with its model by its recipes, with a given denoiser, or from its own predictions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pellucid.core import loop as engine
from pellucid.core.batch import Denoiser, Observer
from pellucid.core.errors import PellucidError, rule
from pellucid.core.noise import NoiseSource
from pellucid.core.plan import Plan
from pellucid.evidence.trace import header as headers
from pellucid.evidence.trace import measures
from pellucid.evidence.trace.diff import Comparison, compare
from pellucid.evidence.trace.reading import Trace, read
from pellucid.evidence.trace.recorder import Recorder
from pellucid.pipeline import repeat
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.repeat import RecipeSource, RunOptions
from pellucid.pipeline.request import SECOND, Request

Way = Literal["model", "denoiser", "predictions"]
_ADAPTERS = {"lora": "loras", "controlnet": "controls", "ip-adapter": "image_prompts", "weak": "weak"}  # kind → field


@dataclass(frozen=True)
class Replay:
    """A trace run again, and how the second run compares; `predictions` of the trace may replace the network."""

    way: Way
    comparison: Comparison

    @property
    def same(self) -> bool:
        return self.comparison.same


def rerun(trace: Trace, run: Callable[[Recorder], object], way: Way = "denoiser") -> Replay:
    """Calls `run` with a recorder to observe it, and compares what it saw with the trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "again.safetensors"
        with Recorder(path, bool(trace.header.kept), trace.header.every, limit=trace.header.limit) as recorder:
            run(recorder)
        return Replay(way, compare(trace, read(path), parts=way != "predictions"))


# --- a bare denoiser -------------------------------------------------------------------------------------------


def replay(
    trace: Trace,
    denoiser: Denoiser | None = None,
    *,
    x: Tensor | None = None,
    noise: NoiseSource | None = None,
    device: torch.device | str = "cpu",
) -> Replay:
    """Runs a trace again with a denoiser; without one, from the predictions that the trace holds.

    The second way needs no model: it shows that the plan, the noise and the loop give the same x. `x` and `noise` are
    needed where the run was given an x of its own and no tensors were kept, or a noise source of its own.
    """
    way: Way = "denoiser"
    if denoiser is None:
        denoiser, way = _RecordedDenoiser(trace), "predictions"
    start, source = _beginning(trace, x, noise, torch.device(device))
    plans = trace.header.plans
    return rerun(trace, lambda seen: engine.loop(plans, denoiser, start, source, [seen], (), None), way)


def _beginning(
    trace: Trace, x: Tensor | None, noise: NoiseSource | None, device: torch.device
) -> tuple[Tensor, NoiseSource]:
    """The first x and the noise: drawn again by seed where that gives the recorded bits, else as given or kept."""
    header = trace.header
    like = torch.empty(0, dtype=getattr(torch, header.dtype), device=device)
    if x is not None:
        return x.to(like), noise or headers.noise_source(header.noise)
    source = noise or headers.noise_source(header.noise)
    noises = source.first(header.shape, like, range(header.images))
    drawn = torch.stack([one * plan.initial_scale for one, plan in zip(noises, header.plans, strict=True)])
    if measures.digests_of(drawn) == list(header.start):
        return drawn, source
    if not trace.has("start"):
        advice = "Its first x was given to the run, or drawn elsewhere, and no tensors were kept."
        raise PellucidError(f"x must be given to run this trace again. {advice}", "trace-start")
    fresh = source if noise is not None else headers.noise_source(header.noise)  # a stream has moved on
    return trace.tensor("start").to(like), fresh


@dataclass
class _RecordedDenoiser:
    """The predictions of a trace as a denoiser; each run of it begins at the first step."""

    trace: Trace
    images: tuple[int, ...] = ()
    steps: list[int] = field(default_factory=lambda: [0])  # shared by what is left of a run

    def __post_init__(self) -> None:
        header = self.trace.header
        if any(plan.guided for plan in header.plans):
            must = "of a sampler that uses x0 alone, to run it without its model"
            raise PellucidError(rule("trace", must, header.plans[0].name, "Give the model."), "trace-model")
        if len(self.trace.has_images) < header.steps:
            advice = "Give the model, or record with tensors of every step."
            got = f"{len(self.trace.has_images)} of {header.steps}"
            raise PellucidError(rule("predictions of the trace", "kept at every step", got, advice), "trace-tensor")

    def bind(self, plans: Sequence[Plan]) -> _RecordedDenoiser:
        return _RecordedDenoiser(self.trace, tuple(range(len(plans))))

    def __call__(self, x: Tensor, level: Any, time: Any) -> Tensor:
        index = self.steps[0]
        self.steps[0] += 1
        step = self.trace.steps[index]
        return self.trace.tensor("x0", index)[[step.of(image) for image in self.images]].to(x)

    def select(self, images: Sequence[int]) -> _RecordedDenoiser:
        return replace(self, images=tuple(self.images[k] for k in images))


# --- a pipeline ------------------------------------------------------------------------------------------------


def _recipes_of(trace: Trace) -> list[Recipe]:
    if not trace.header.recipes:
        advice = "It is of a bare denoiser: replay(trace, denoiser) runs it again in Python."
        raise PellucidError(rule("trace", "of a pipeline's run", "one without a recipe", advice), "trace-recipe")
    return [Recipe.from_dict(table) for table in trace.header.recipes]


def request_of(trace: Trace, fields: Mapping[str, Any] | None = None) -> Request:
    """The request that a trace records; `fields` are what a recipe does not hold: images and adapters."""
    recipes = _recipes_of(trace)
    extra = dict(fields or {})
    needs = repeat.needs_of(recipes[0])
    missing = [name for name in needs.images if name in ("image", "mask") and name not in extra]
    missing += [adapter["name"] for adapter in needs.adapters if _ADAPTERS.get(adapter["kind"]) not in extra]
    if missing:
        why = "the trace holds their hashes, not the files"
        raise PellucidError(f"{', '.join(missing)} must be given to run this trace again: {why}.", "missing")
    base = repeat.request_fields(replace(recipes[0], noise="philox"))
    base |= {"seed": [recipe.seed for recipe in recipes], "noise": _noise_of(trace), **_words_of(recipes)}
    return Request(**{**base, **extra})


def _noise_of(trace: Trace) -> NoiseSource | str:
    kind = trace.header.noise.get("kind")
    return kind if kind in ("philox", "torch") else headers.noise_source(trace.header.noise)


def _words_of(recipes: Sequence[Recipe]) -> dict[str, Any]:
    """The texts and labels of a batch, one per image. A model without text takes empty ones."""
    prompts, negatives = [r.prompt for r in recipes], [r.negative_prompt for r in recipes]
    labels = [r.conditioning.get("label") for r in recipes]
    seconds = {name: [r.conditioning.get(name) for r in recipes] for name in SECOND}
    spoken = any(prompts) or len(set(negatives)) > 1 or any(any(texts) for texts in seconds.values())
    found: dict[str, Any] = {"prompt": prompts if spoken else "", "n": 1 if spoken else len(recipes)}
    if any(negatives):
        found["negative_prompt"] = negatives if spoken else negatives[0]
    found |= {name: texts if spoken else texts[0] for name, texts in seconds.items() if None not in texts}
    if labels[0] is not None:
        found["label"] = labels if spoken or len(set(labels)) > 1 else labels[0]
    return {**found, "prompt": None, "n": 1} if isinstance(found.get("label"), list) and not spoken else found


def replay_recipe(trace: Trace, options: RunOptions, observers: Sequence[Observer] = ()) -> Replay:
    """Runs a trace again with the model that its recipe names; `options` complete the recipe, as in `sample --from`."""
    recipe = _recipes_of(trace)[0]
    known = recipe if recipe.noise in repeat.NOISES else replace(recipe, noise="philox")
    options, _ = repeat.complete(RecipeSource(trace.path, known), options)
    fields = {name: options.fields[name] for name in ("image", "mask") if name in options.fields}
    pipe, weak = options.load(), options.load_weak()
    fields |= options.adapters() | ({} if weak is None else {"weak": weak})
    return replay_with(trace, pipe, {**fields, "observers": observers})


def replay_with(trace: Trace, pipe: Any, fields: Mapping[str, Any] | None = None) -> Replay:
    """Runs a trace again with a pipeline; `fields` as for `request_of`. Nothing is decoded: the trace ends with x."""
    request = replace(request_of(trace, fields), decode=False)
    return rerun(trace, lambda seen: pipe.run(replace(request, observers=(seen, *request.observers))), "model")
