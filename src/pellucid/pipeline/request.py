"""A request: every option of one call of a pipeline, declared once. The command line is made of its fields.

torch is not imported before a request is made, so that `pellucid sample --help` answers at once.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from pellucid.core.errors import PellucidError, rule
from pellucid.pipeline.peer_words import CALL, option_error

if TYPE_CHECKING:  # what torch or numpy comes with
    from torch import Tensor

    from pellucid.core.batch import Constraint, Observer
    from pellucid.core.grid import Grid
    from pellucid.core.noise import NoiseSource
    from pellucid.core.plan import Plan
    from pellucid.models.controlnet import ControlNet
    from pellucid.models.ip_adapter import IPAdapter
    from pellucid.models.lora import AdapterSet
    from pellucid.pipeline.encoders.text import Embedding, Prompt

# --- Fields and their flags -----------------------------------------------------------------------------------------

WHAT, _HOW, _IMAGE, _TEXT, ADAPTERS = "What", "How", "From an image", "Text", "Adapters"  # panels of the help
SPEED = "Memory and speed"


class Flag(NamedTuple):
    """How a field is given on the command line; `kind` is what one word of it is read as, a list where it repeats."""

    names: tuple[str, ...]
    metavar: str
    help: str
    panel: str | None
    kind: Any = str
    names_of: str = ""  # what the shell completes it with: samplers, grids


def flag(names: str, metavar: str, help: str, panel: str, default: Any = None, kind: Any = str, **more: Any) -> Any:
    """A field with a flag; `names` are separated by blanks."""
    held = Flag(tuple(names.split()), metavar, help, panel, kind, **more)
    factory = {"default_factory": default} if default is dict else {"default": default}
    return field(**factory, metadata={"flag": held})


def flags_of(dataclass: type) -> dict[str, Flag]:
    """The flags of a dataclass by the names of their fields."""
    return {f.name: f.metadata["flag"] for f in fields(dataclass) if "flag" in f.metadata}


# --- Words for sizes and classes ------------------------------------------------------------------------------------


def read_size(name: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(\d{1,5})(?:\s*[x×]\s*(\d{1,5}))?\s*", text)
    if match is None or not int(match[1]) or match[2] == "0":
        raise PellucidError(rule(name, "WIDTHxHEIGHT in pixels, as 768x512", text[:80]), "size")
    return int(match[1]), int(match[2] or match[1])


def read_label(text: str) -> int | str:
    return int(text) if re.fullmatch(r"\d{1,9}", text) else text


# --- Adapters -------------------------------------------------------------------------------------------------------


def _check_scale(what: str, scale: Any) -> None:
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
        _check_scale("scale of a LoRA", self.scale)
        from pellucid.models.lora import AdapterSet  # torch comes with it: not before a request is made

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
        _check_scale("scale of a ControlNet", self.scale)
        _check_scale("start of a ControlNet", self.start)
        _check_scale("end of a ControlNet", self.end)
        if not (0 <= self.start < self.end <= 1):
            raise PellucidError(
                rule("start, end of a ControlNet", "0 ≤ start < end ≤ 1", (self.start, self.end)), "scale"
            )

    def acts_at(self, step: int, steps: int) -> bool:
        """diffusers' count: step i of n acts where its whole share of the run lies between start and end."""
        return step / steps >= self.start and (step + 1) / steps <= self.end


@dataclass(frozen=True)
class ImagePrompt:
    """An IP-Adapter, the images that prompt through it, and where: one mask per image, white where it acts."""

    adapter: IPAdapter | str | os.PathLike[str]
    images: Any
    scale: float | Mapping[str, float] = 1.0
    masks: Any = None

    def __post_init__(self) -> None:
        _check_scale("scale of an image prompt", self.scale)


# --- The request ----------------------------------------------------------------------------------------------------

MAX_BATCH = 256
SECOND = ("prompt_2", "negative_prompt_2")
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Request:
    """What to make. Every field has a default; what a model cannot use is refused, never ignored."""

    # what
    prompt: str | Sequence[str] | None = None
    _: KW_ONLY
    negative_prompt: str | Sequence[str] | None = flag("--negative", "TEXT", "What the image should not show.", WHAT)
    prompt_2: str | Sequence[str] | None = None  # for SDXL's second text encoder, which reads the prompt otherwise
    negative_prompt_2: str | Sequence[str] | None = None
    label: int | str | Sequence[int | str] | None = flag(
        "--label", "CLASS", "A class by number or name; may be repeated, one image per class.", WHAT, kind=list[str]
    )
    n: int = flag("-n", "N", "Images per prompt, with consecutive seeds.", WHAT, 1, int)
    seed: int | Sequence[int] | None = flag("--seed", "SEED", "7, or 1,2,3, or 1..4: one per image.", WHAT)
    width: int | None = flag("--size", "WxH", "Pixels, as 768x512 or 512.", WHAT)
    height: int | None = None
    # how
    sampler: str | None = flag(
        "--sampler", "NAME", "The sampler, by any of its names (default: the model's own).", _HOW, names_of="samplers"
    )
    grid: str | Grid | Mapping[str, Any] | None = flag(
        "--grid", "NAME", "Where the model is called: karras, trailing, …", _HOW, names_of="grids"
    )
    steps: int | None = flag("--steps", "N", "Steps (default: 30).", _HOW, kind=int)
    dialect: str | None = flag(
        "--dialect --as", "DIALECT", "exact, or the conventions of diffusers, k-diffusion or comfyui.", _HOW
    )
    options: Mapping[str, Any] = flag(
        "--option", "KEY=VALUE", "An option of the sampler; may be repeated.", _HOW, dict, list[str]
    )
    plan: Plan | str | os.PathLike[str] | None = flag(
        "--plan", "FILE", "A whole plan (pellucid plan --save).", _HOW, kind=Path
    )
    guidance: Any = flag(
        "--guidance",
        "TEXT",
        "4, off, linear:7:2, 5 + apg, guarded 9 (capped at 7 and rescaled), … (default: guarded 7).",
        _HOW,
    )
    weak: Any = flag("--weak", "MODEL", "The worse model that autoguidance leads away from.", _HOW)
    noise: NoiseSource | str | None = flag(
        "--noise", "SOURCE", "philox (the same in any batch) or torch (as diffusers draws it).", _HOW
    )
    # from an image
    image: Any = flag("--image", "FILE", "The image to start from.", _IMAGE, kind=Path)
    mask: Any = flag("--mask", "FILE", "White areas are regenerated; the same size as the image.", _IMAGE, kind=Path)
    strength: float | None = flag(
        "--strength", "S", "How much of the image changes: above 0, at most 1.", _IMAGE, kind=float
    )
    denoising_start: float | None = flag(
        "--denoising-start", "S", "Continue an unfinished run from this fraction of it.", _IMAGE, kind=float
    )
    denoising_end: float | None = flag(
        "--denoising-end", "S", "Stop after this fraction of the run.", _IMAGE, kind=float
    )
    latents: Tensor | None = None
    # text
    prompt_embeds: Embedding | Tensor | None = None
    negative_prompt_embeds: Embedding | Tensor | None = None
    clip_skip: int = flag("--clip-skip", "N", "Skip this many last layers of the text encoder.", _TEXT, 0, int)
    weighting: bool = flag("--weighting", "", "Read (word:1.3) and [word] as weights.", _TEXT, False, bool)
    # width, height; diffusers' is height, width
    original_size: tuple[int, int] | None = flag("--original-size", "WxH", "SDXL: the original size.", _TEXT)
    # left, top; diffusers' crops_coords_top_left is top, left
    crop: tuple[int, int] = flag("--crop", "LEFT,TOP", "SDXL: what was cropped.", _TEXT, (0, 0))
    target_size: tuple[int, int] | None = flag("--target-size", "WxH", "SDXL: the size after the crop.", _TEXT)
    aesthetic: tuple[float, float] = flag(
        "--aesthetic", "A,B", "SDXL refiner: scores with and without the prompt.", _TEXT, (6.0, 2.5)
    )
    # adapters
    loras: Sequence[Lora | AdapterSet | str | os.PathLike[str]] = flag(
        "--lora", "FILE[:SCALE]", "A LoRA; may be repeated, and several add up.", ADAPTERS, (), list[str]
    )
    controls: Sequence[Control] = flag(
        "--control",
        "NET,FILE[,SCALE[,A-B]]",
        "A ControlNet, its image, its scale, and the part of the run where it acts; may be repeated.",
        ADAPTERS,
        (),
        list[str],
    )
    image_prompts: Sequence[ImagePrompt] = flag(
        "--image-prompt",
        "ADAPTER,FILE[,SCALE]",
        "An IP-Adapter and its image; may be repeated.",
        ADAPTERS,
        (),
        list[str],
    )
    # observers and what may stop or change the run
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
        from pellucid.models.lora import AdapterSet

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
        from torch import Tensor

        from pellucid.core.plan import Plan
        from pellucid.pipeline.encoders.text import Embedding

        for name, kind in (("loras", Lora), ("controls", Control), ("image_prompts", ImagePrompt)):
            held = getattr(self, name)
            if not isinstance(held, Sequence) or not all(isinstance(one, kind) for one in held):
                raise PellucidError(rule(name, f"a list of {kind.__name__}", held), "request")
        for name in ("original_size", "target_size", "crop", "aesthetic"):
            held = getattr(self, name)
            if held is not None or name in ("crop", "aesthetic"):
                _check_pair(name, held)
        for name in ("observers", "constraints"):
            held = getattr(self, name)
            if not isinstance(held, Sequence) or not all(callable(one) for one in held):
                raise PellucidError(rule(name, "a list of functions", held), "request")
        others: tuple[tuple[str, Any, str], ...] = (
            ("latents", Tensor, "a tensor"),
            ("prompt_embeds", Embedding | Tensor, "a tensor or an Embedding"),
            ("negative_prompt_embeds", Embedding | Tensor, "a tensor or an Embedding"),
            ("options", Mapping, "names and values"),
            ("plan", Plan | str | os.PathLike, "a plan or its file"),
            ("cancelled", Callable, "a function"),
        )
        for name, must_be, must in others:
            held = getattr(self, name)
            if held is not None and not isinstance(held, must_be):
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
        """One per image of the batch before `n`."""
        if self.prompt is not None:
            return _listed("prompt", self.prompt)
        if isinstance(self.label, Sequence) and not isinstance(self.label, str):
            return [""] * len(self.label)
        held: Any = self.prompt_embeds
        return [""] if held is None else [""] * len(getattr(held, "context", held))

    @property
    def named_loras(self) -> list[Lora]:
        """`loras`, of which each is a `Lora` once the request is made."""
        return list(self.loras)  # type: ignore[arg-type]

    @property
    def negatives(self) -> list[str]:
        return self.spread("negative_prompt", "" if self.negative_prompt is None else self.negative_prompt)

    def spread(self, name: str, given: Any) -> list[str]:
        """A text for each prompt: one for all of them, or as listed."""
        found, count = _listed(name, given), len(self.prompts)
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
        """One per image: consecutive from the one given, or as listed; drawn where none is given."""
        from pellucid.core.noise import seed_list

        count = len(self.prompts) * self.n
        if count > MAX_BATCH:
            raise PellucidError(rule("prompts × n", f"at most {MAX_BATCH} images", count), "request")
        return seed_list(random_seed() if self.seed is None else self.seed, count)


def random_seed() -> int:
    return secrets.randbelow(2**32)


def _check_pair(name: str, given: Any) -> None:
    good = isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 2
    if not good or not all(isinstance(v, int | float) and math.isfinite(v) and v >= 0 for v in given):
        raise PellucidError(rule(name, "two numbers", given), "sizes")


def _listed(name: str, given: Any) -> list[str]:
    found = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else [given]
    if not found or not all(isinstance(text, str) for text in found):
        raise PellucidError(rule(name, "text, or a list of texts", given), "prompt")
    return found


def takes(dataclass: Callable[_P, Any]) -> Callable[[Callable[..., _R]], Callable[Concatenate[Any, _P], _R]]:
    """Gives a method the signature of a dataclass: its fields are the method's arguments, for people and for tools."""

    def typed(method: Callable[..., _R]) -> Callable[Concatenate[Any, _P], _R]:
        own = signature(dataclass)
        first = Parameter("self", Parameter.POSITIONAL_ONLY)
        returns = method.__annotations__.get("return", Parameter.empty)
        method.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[first, *own.parameters.values()], return_annotation=returns
        )
        return method

    return typed
