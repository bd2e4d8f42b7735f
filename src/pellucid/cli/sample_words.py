"""The words of `pellucid sample` → what they mean: seeds, sizes, prompts, images, adapters, fields of a request."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from pellucid.cli import plan_words
from pellucid.core.errors import PellucidError, rule
from pellucid.core.noise import check_seed
from pellucid.core.reader import read_lines
from pellucid.core.samplers import resolve
from pellucid.models.guidance import Guidance
from pellucid.pipeline import images
from pellucid.pipeline.request import read_label, read_size

MAX_IMAGES = 10_000
MAX_PROMPTS_BYTES = 4 * 2**20
# Words that are fields of a request as they stand, by the name of the word.
PLAIN = {
    "negative": "negative_prompt",
    "sampler": "sampler",
    "grid": "grid",
    "steps": "steps",
    "dialect": "dialect",
    "plan": "plan",
    "noise": "noise",
    "strength": "strength",
    "denoising_start": "denoising_start",
    "denoising_end": "denoising_end",
    "clip_skip": "clip_skip",
}
LOADING = ("vae", "image_encoder", "tokenizer", "target", "variant", "revision", "dtype", "device")
POLICY = ("attention", "vae_tile", "vae_slicing", "channels_last", "offload", "compile")


@dataclass(frozen=True)
class AdapterWords:
    """An adapter in words: its file, its image, and its strength and span where they were said."""

    path: str
    image: Image.Image | None = None
    scale: float | None = None
    span: tuple[float, float] | None = None
    guess: bool = False  # of a recipe's ControlNet: there is no word for it


@dataclass(frozen=True)
class SampleWords:
    """All that was said, read. `fields` are those of a request that were given, and no others."""

    model: str | None
    prompts: list[str] | None
    labels: list[int | str] | None
    n: int | None
    seeds: int | list[int] | None
    fields: dict[str, Any]
    loras: list[AdapterWords]
    controls: list[AdapterWords]
    image_prompts: list[AdapterWords]
    loading: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    weak: str | None = None
    batch: int = 1

    @staticmethod
    def of(params: dict[str, Any]) -> SampleWords:
        for name, least in (("n", 1), ("batch", 1)):
            if params[name] is not None and params[name] < least:
                raise PellucidError(rule(f"--{name}".replace("--n", "-n"), f"at least {least}", params[name]), "usage")
        given = {k: v for k, v in params.items() if v is not None and v is not False and v not in ([], ())}
        return SampleWords(
            model=params["model"],
            prompts=None if params["prompt"] is None else prompts(params["prompt"]),
            labels=[read_label(text) for text in params["label"]] if params["label"] else None,
            n=params["n"],
            seeds=None if params["seed"] is None else seeds(params["seed"]),
            fields=fields_of(given),
            loras=[lora(text) for text in params["lora"] or ()],
            controls=[with_image("--control", text, True) for text in params["control"] or ()],
            image_prompts=[with_image("--image-prompt", text, False) for text in params["image_prompt"] or ()],
            loading={
                **{name: given[name] for name in LOADING if name in given},
                **({"inversions": params["inversion"]} if params["inversion"] else {}),
            },
            policy={name: given[name] for name in POLICY if name in given},
            weak=params["weak"],
            batch=params["batch"] or 1,
        )


def fields_of(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that words set directly."""
    found = {PLAIN[name]: value for name, value in given.items() if name in PLAIN}
    if "size" in given:
        found["width"], found["height"] = read_size("--size", given["size"])
    for name in ("original_size", "target_size"):
        if name in given:
            found[name] = read_size(f"--{name.replace('_', '-')}", given[name])
    if "crop" in given:
        found["crop"] = tuple(int(part) for part in numbers("--crop", given["crop"], r"\d{1,6}"))
    if "aesthetic" in given:
        scores = numbers("--aesthetic", given["aesthetic"], r"\d{1,2}(?:\.\d+)?")
        found["aesthetic"] = tuple(float(part) for part in scores)
    for name in ("image", "mask"):
        if name in given:
            found[name] = images.read(given[name], name)
    if "weighting" in given:
        found["weighting"] = True
    if "guidance" in given:
        found["guidance"] = Guidance.parse(given["guidance"])
    if "option" in given:
        found["options"] = dict(options(given["option"]))
    return found


# --- numbers ---------------------------------------------------------------------------------------------------


def seeds(text: str) -> int | list[int]:
    """`7`, `1,2,3` or `1..4`, also mixed."""
    found: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"\s*(\d{1,20})(?:\.\.(\d{1,20}))?\s*", part)
        if span is None:
            raise PellucidError(rule("--seed", "a whole number, a list 1,2,3 or a range 1..4", text[:80]), "seed")
        first, last = check_seed(int(span[1])), check_seed(int(span[2] or span[1]))
        if not 0 <= last - first < MAX_IMAGES:
            raise PellucidError(rule("--seed", f"a range of 1 to {MAX_IMAGES} seeds", part.strip()), "seed")
        found += range(first, last + 1)
    return found if "," in text or ".." in text else found[0]


def numbers(name: str, text: str, form: str) -> tuple[str, str]:
    match = re.fullmatch(rf"\s*({form})\s*,\s*({form})\s*", text)
    if match is None:
        raise PellucidError(rule(name, "two numbers, as 0,0", text[:80]), "usage")
    return match[1], match[2]


def number(text: str) -> float | None:
    """The number that a text is, NaN too: who takes it refuses that by name."""
    try:
        return float(text)
    except ValueError:
        return None


# --- text ------------------------------------------------------------------------------------------------------


def prompts(text: str) -> list[str]:
    """The prompt itself, or the lines of a file (`@FILE`) that are not empty; `@@` begins a prompt with `@`."""
    if text.startswith("@@") or not text.startswith("@"):
        return [text.removeprefix("@") if text.startswith("@@") else text]
    return list(read_lines(Path(text[1:]), "prompts", MAX_PROMPTS_BYTES, empty="prompt-file"))


def options(texts: list[str]) -> list[tuple[str, str]]:
    pairs = [plan_words.pair_of(text) for text in texts]
    twice = next((key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i])), None)
    if twice is not None:
        raise PellucidError(rule("option", "given once", twice), "option")
    return pairs


def typed_options(sampler: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """Options as the sampler's own types; without a sampler, as they are."""
    if sampler is None:
        return given
    entry, _ = resolve(sampler)
    return {key: plan_words.value_of(entry, key, value) for key, value in given.items()}


# --- adapters --------------------------------------------------------------------------------------------------


def lora(text: str) -> AdapterWords:
    """`FILE` or `FILE:SCALE`; a file whose own name holds the colon comes first."""
    path, colon, tail = text.rpartition(":")
    scale = number(tail)
    if Path(text).exists() or not colon or scale is None:
        return AdapterWords(text)
    return AdapterWords(path, scale=scale)


def with_image(name: str, text: str, spans: bool) -> AdapterWords:
    """`NET,FILE[,SCALE[,A-B]]`, read from its end; commas inside of paths are found by which files exist."""
    parts = text.split(",")
    span = scale = None
    if spans and len(parts) > 3 and (match := re.fullmatch(r"\s*([\d.]+)\s*-\s*([\d.]+)\s*", parts[-1])):
        span = tuple(number(part) for part in match.groups())
        parts.pop()
    if len(parts) > 2 and (scale := number(parts[-1])) is not None:
        parts.pop()
    if len(parts) < 2 or not all(part.strip() for part in (parts[0], parts[-1])) or (span and None in span):
        form = "NET,FILE,SCALE,A-B" if spans else "ADAPTER,FILE,SCALE"
        raise PellucidError(rule(name, f"{form}, the last ones optional", text[:200]), "usage")
    cuts = [(",".join(parts[:i]).strip(), ",".join(parts[i:]).strip()) for i in range(1, len(parts))]
    net, image = next((cut for cut in cuts if Path(cut[0]).exists() and Path(cut[1]).is_file()), cuts[0])
    return AdapterWords(net, images.read(image, f"image of {name}"), scale, span)  # type: ignore[arg-type]
