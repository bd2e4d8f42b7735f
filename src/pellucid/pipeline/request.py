"""A request: all that one call of a pipeline may be asked, declared once. The command line reads its defaults here."""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from inspect import Parameter, signature
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.core.grid import Grid
from pellucid.core.loop import Constraint, Observer
from pellucid.core.noise import NoiseSource, seed_list
from pellucid.core.plan import Plan
from pellucid.models.lora import AdapterSet
from pellucid.pipeline.adapters import Control, ImagePrompt, Lora
from pellucid.pipeline.encoders.text import Embedding, Prompt
from pellucid.pipeline.peer_words import CALL, option_error

# --- Words for sizes and classes ------------------------------------------------------------------------------------


def read_size(name: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(\d{1,5})(?:\s*[x×]\s*(\d{1,5}))?\s*", text)
    if match is None or not int(match[1]) or match[2] == "0":
        raise PellucidError(rule(name, "WIDTHxHEIGHT in pixels, as 768x512", text[:80]), "size")
    return int(match[1]), int(match[2] or match[1])


def read_label(text: str) -> int | str:
    return int(text) if re.fullmatch(r"\d{1,9}", text) else text


# --- The request ----------------------------------------------------------------------------------------------------

MAX_BATCH = 256
SECOND = ("prompt_2", "negative_prompt_2")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Request:
    """What to make. Every field has a default; what a model cannot use is refused, never ignored."""

    # what
    prompt: str | Sequence[str] | None = None
    _: KW_ONLY
    negative_prompt: str | Sequence[str] | None = None
    prompt_2: str | Sequence[str] | None = None  # for SDXL's second text encoder, which reads the prompt otherwise
    negative_prompt_2: str | Sequence[str] | None = None
    label: int | str | Sequence[int | str] | None = None
    n: int = 1
    seed: int | Sequence[int] | None = None
    width: int | None = None
    height: int | None = None
    # how
    sampler: str | None = None
    grid: str | Grid | Mapping[str, Any] | None = None
    steps: int | None = None
    dialect: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    plan: Plan | str | os.PathLike[str] | None = None
    guidance: Any = None
    weak: Any = None
    noise: NoiseSource | str | None = None
    # from an image
    image: Any = None
    mask: Any = None
    strength: float | None = None
    denoising_start: float | None = None
    denoising_end: float | None = None
    latents: Tensor | None = None
    # text
    prompt_embeds: Embedding | Tensor | None = None
    negative_prompt_embeds: Embedding | Tensor | None = None
    clip_skip: int = 0
    weighting: bool = False
    original_size: tuple[int, int] | None = None  # width, height; diffusers' is height, width
    crop: tuple[int, int] = (0, 0)  # left, top; diffusers' crops_coords_top_left is top, left
    target_size: tuple[int, int] | None = None  # width, height
    aesthetic: tuple[float, float] = (6.0, 2.5)
    # adapters
    loras: Sequence[Lora | AdapterSet | str | os.PathLike[str]] = ()
    controls: Sequence[Control] = ()
    image_prompts: Sequence[ImagePrompt] = ()
    # who watches
    observers: Sequence[Observer] = ()
    constraints: Sequence[Constraint] = ()
    cancelled: Callable[[], bool] | None = None
    decode: bool = True

    @staticmethod
    def of(*prompt: Any, **options: Any) -> Request:
        """A request from the arguments of a call; names that are not there are refused with the right ones."""
        known = [f.name for f in fields(Request)]
        for name, value in options.items():
            if name not in known:
                raise option_error(name, value, known, CALL)
        if len(prompt) > 1 or (prompt and "prompt" in options):
            raise PellucidError("prompt must be given once, and every other option by its name; got more.", "prompt")
        return Request(*prompt, **options)

    def __post_init__(self) -> None:
        if isinstance(self.loras, list | tuple):
            named = [Lora(one) if isinstance(one, AdapterSet | str | os.PathLike) else one for one in self.loras]
            object.__setattr__(self, "loras", tuple(named))
        for name, low, high in (("n", 1, MAX_BATCH), ("clip_skip", 0, 64)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise PellucidError(rule(name, f"a whole number from {low} to {high}", value), "request")
        for name in ("strength", "denoising_start", "denoising_end"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value <= 1 and math.isfinite(value)):
                raise PellucidError(rule(name, "above 0 and at most 1", value), "request")
        for name in ("width", "height"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise PellucidError(rule(name, "a whole number of pixels", value), "size")
        self.check_kinds()
        self.check_together()

    def check_kinds(self) -> None:
        """What would otherwise fail in the middle of a run."""
        for name, kind in (("loras", Lora), ("controls", Control), ("image_prompts", ImagePrompt)):
            held = getattr(self, name)
            if not isinstance(held, Sequence) or not all(isinstance(one, kind) for one in held):
                raise PellucidError(rule(name, f"a list of {kind.__name__}", held), "request")
        for name in ("original_size", "target_size", "crop", "aesthetic"):
            held = getattr(self, name)
            if held is not None or name in ("crop", "aesthetic"):
                check_pair(name, held)
        for name in ("observers", "constraints"):
            held = getattr(self, name)
            if not isinstance(held, Sequence) or not all(callable(one) for one in held):
                raise PellucidError(rule(name, "a list of functions", held), "request")
        given = (
            ("latents", Tensor, "a tensor"),
            ("prompt_embeds", Embedding | Tensor, "a tensor or an Embedding"),
            ("negative_prompt_embeds", Embedding | Tensor, "a tensor or an Embedding"),
            ("options", Mapping, "names and values"),
            ("plan", Plan | str | os.PathLike, "a plan or its file"),
            ("cancelled", Callable, "a function"),
        )
        for name, kind, must in given:
            held = getattr(self, name)
            if held is not None and not isinstance(held, kind):
                raise PellucidError(rule(name, must, type(held).__name__), "request")

    def check_together(self) -> None:
        """What only makes sense with something else."""
        for name, needs in (("mask", "image"), ("strength", "image"), ("denoising_start", "image")):
            if getattr(self, name) is not None and getattr(self, needs) is None:
                raise PellucidError(f"{name} must come with {needs}; got {name} alone.", "request")
        if self.denoising_start is not None and self.strength is not None:
            raise PellucidError("strength must be left out with denoising_start; both say where to start.", "request")
        for name in ("prompt", "negative_prompt"):
            if getattr(self, name) is not None and getattr(self, f"{name}_embeds") is not None:
                raise PellucidError(f"{name} must be left out with {name}_embeds; got both.", "prompt")
            if getattr(self, f"{name}_2") is not None and getattr(self, name) is None:
                raise PellucidError(f"{name}_2 must come with {name}; got {name}_2 alone.", "prompt")
        ends = (self.denoising_start, self.denoising_end)
        if None not in ends and not ends[0] < ends[1]:  # type: ignore[operator]
            raise PellucidError(rule("denoising_start", f"below denoising_end {ends[1]}", ends[0]), "request")
        if self.plan is not None:
            named = [k for k in ("sampler", "grid", "steps", "dialect") if getattr(self, k) is not None]
            named += ["options"] if self.options else []
            if named:
                raise PellucidError(
                    rule(", ".join(named), "left out with a plan, which is all of it", "both"), "request"
                )

    @property
    def prompts(self) -> list[str]:
        """One an image of the batch before `n`."""
        if self.prompt is not None:
            return listed("prompt", self.prompt)
        if isinstance(self.label, Sequence) and not isinstance(self.label, str):
            return [""] * len(self.label)
        held = self.prompt_embeds
        if held is not None:
            return [""] * len(held if isinstance(held, Tensor) else held.context)
        return [""]

    @property
    def negatives(self) -> list[str]:
        return self.spread("negative_prompt", "" if self.negative_prompt is None else self.negative_prompt)

    def spread(self, name: str, given: Any) -> list[str]:
        """A text for each prompt: one for all of them, or as listed."""
        found, count = listed(name, given), len(self.prompts)
        if len(found) not in (1, count):
            raise PellucidError(rule(name, f"one, or one for each of {count} prompts", len(found)), "request")
        return found * (count // len(found))

    @property
    def seconds(self) -> dict[str, list[str]]:
        """`prompt_2` and `negative_prompt_2` where they are given, a text for each prompt."""
        given = {name: getattr(self, name) for name in SECOND}
        return {name: self.spread(name, texts) for name, texts in given.items() if texts is not None}

    def by_encoder(self, name: Literal["prompt", "negative_prompt"]) -> list[Prompt]:
        """The prompts or their negatives as they are encoded: one text for all encoders, or one for each of two."""
        first, second = self.prompts if name == "prompt" else self.negatives, self.seconds.get(f"{name}_2")
        return list(first) if second is None else list(zip(first, second, strict=True))

    def seeds(self) -> list[int]:
        """One an image: consecutive from the one given, or as listed; drawn where none is given."""
        count = len(self.prompts) * self.n
        if count > MAX_BATCH:
            raise PellucidError(rule("prompts × n", f"at most {MAX_BATCH} images", count), "request")
        seed = secrets.randbelow(2**32) if self.seed is None else self.seed
        return seed_list(seed, count)


def check_pair(name: str, given: Any) -> None:
    good = isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 2
    if not good or not all(isinstance(v, int | float) and math.isfinite(v) and v >= 0 for v in given):
        raise PellucidError(rule(name, "two numbers", given), "sizes")


def listed(name: str, given: Any) -> list[str]:
    found = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else [given]
    if not found or not all(isinstance(text, str) for text in found):
        raise PellucidError(rule(name, "text, or a list of texts", given), "prompt")
    return found


def takes(dataclass: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Gives a method the signature of a dataclass: its fields are the method's arguments, for people and for tools."""

    def typed(method: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        own = signature(dataclass)
        first = Parameter("self", Parameter.POSITIONAL_ONLY)
        returns = method.__annotations__.get("return", Parameter.empty)
        method.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[first, *own.parameters.values()], return_annotation=returns
        )
        return method

    return typed
