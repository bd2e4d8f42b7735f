"""`pellucid sample`: its flags, made of the fields of `Request` and `Policy`, and what the words behind them mean.

Nothing heavy is imported before there is work, so that `pellucid sample --help` answers at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli.options import MODEL_HELP, model_names, with_flags
from pellucid.core.errors import PellucidError, rule
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.request import ADAPTERS, SPEED, WHAT, Flag, Request, flags_of, read_label, read_size

if TYPE_CHECKING:
    from pellucid.pipeline.repeat import AdapterFile, RunOptions

MAX_IMAGES = 10_000
_MAX_PROMPTS_BYTES = 4 * 2**20
_LOAD, _OUT = "Loading", "Output"  # panels of the help
LOADING = {
    "inversions": Flag(("--inversion",), "FILE", "A textual inversion; may be repeated.", ADAPTERS, list[Path]),
    "vae": Flag(("--vae",), "FOLDER", "Use another autoencoder, for example a tiny one.", _LOAD),
    "image_encoder": Flag(("--image-encoder",), "FOLDER", "The encoder that image prompts need.", _LOAD),
    "tokenizer": Flag(("--tokenizer",), "FOLDER", "The tokenizer of a single file, which contains none.", _LOAD, Path),
    "target": Flag(("--target",), "NAME", "What the network predicts, if its files are wrong: eps, v, …", _LOAD),
    "variant": Flag(("--variant",), "NAME", "The variant of the weight files, such as fp16.", _LOAD),
    "revision": Flag(("--revision",), "NAME", "A revision on the hub.", _LOAD),
    "dtype": Flag(
        ("--dtype",),
        "NAME",
        "float32, float16, bfloat16, fp8, auto, or stored: the files' own (default: stored, no float16 on a CPU).",
        SPEED,
    ),
    "device": Flag(("--device",), "NAME", "cpu, cuda, …", SPEED),
}
_OUTPUT = {
    "batch": Flag(("--batch",), "N", "Images at once (default: 1, which repeats bit by bit).", SPEED, int),
    "out": Flag(("--out",), "PATH", "A .png or a folder (default: out-SEED.png).", _OUT, Path),
    "overwrite": Flag(("--overwrite",), "", "Replace existing files.", _OUT, bool),
    "grid_of": Flag(("--grid-of",), "AXES", 'A labelled sheet: "steps=10,20,50 x guidance=3,5,7".', _OUT),
    "keep_cells": Flag(("--keep-cells",), "", "Also keep each image of the sheet, in a folder next to it.", _OUT, bool),
    "trace": Flag(
        ("--trace",), "FILE", "Record every step (see pellucid trace); several runs write FILE-001, ….", _OUT, Path
    ),
    "trace_tensors": Flag(
        ("--trace-tensors",), "", "Also record x, x0, eps and the guidance delta of each step.", _OUT, bool
    ),
    "as_json": Flag(("--json",), "", "Print files, seeds, stages, notes and recipes as JSON.", _OUT, bool),
}
_FROM = Flag(("--from",), "FILE", "Repeat an image from the recipe stored in it, Pellucid's or A1111's.", WHAT, Path)
_EXAMPLES = (
    'Example: pellucid sample ./sd15 "a red star" --seed 7 --out star.png',
    '  pellucid sample ./sd15 @prompts.txt -n 2 --sampler "DPM++ 2M Karras" --steps 20 --out images/',
    '  pellucid sample ./sd15 "a red star" --image sketch.png --strength 0.6 --lora ink.safetensors:0.8',
    '  pellucid sample ./sd15 "a red star" --seed 7 --grid-of "steps=10,20,50 x guidance=3,5,7" --out sheet.png',
    "  pellucid sample --from star.png",
)
EPILOG = "\n\n".join(line.replace("[", r"\[") for line in _EXAMPLES)


# --- The command ----------------------------------------------------------------------------------------------------


@with_flags({"from_file": _FROM, **flags_of(Request), **LOADING, **flags_of(Policy), **_OUTPUT})
def command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False, autocompletion=model_names),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="What to make; @FILE takes one prompt per line.", show_default=False),
    ] = None,
    **words: Any,
) -> None:
    """Make images. Each PNG stores its recipe, in Pellucid's format and as A1111's `parameters` text.

    Without --sampler the model keeps its own scheduler; without --guidance it gets the guarded default.
    """
    if model is None and words["from_file"] is None:  # said before torch is imported
        raise PellucidError("MODEL must be given, or an image with --from; got neither.", "usage")
    from pellucid.cli import sample_run

    sample_run.sample({"model": model, "prompt": prompt, **words})


# --- Words ----------------------------------------------------------------------------------------------------------


def read_options(words: Mapping[str, Any]) -> RunOptions:
    """What the words of a command set; words that are missing are left open."""
    from pellucid.pipeline.repeat import RunOptions

    set_words = {k: v for k, v in words.items() if v is not None and v is not False and v not in ([], ())}
    if set_words.get("n", 1) < 1:
        raise PellucidError(rule("-n", "at least 1", set_words["n"]), "usage")
    return RunOptions(
        model=set_words.get("model"),
        fields=read_fields(set_words),
        loras=tuple(lora(text) for text in set_words.get("loras", ())),
        controls=tuple(with_image("--control", text, True) for text in set_words.get("controls", ())),
        image_prompts=tuple(with_image("--image-prompt", text, False) for text in set_words.get("image_prompts", ())),
        weak=set_words.get("weak"),
        loading={name: set_words[name] for name in LOADING if name in set_words},
        policy={name: set_words[name] for name in flags_of(Policy) if name in set_words},
    )


def read_fields(words: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request that words set, without its adapters and its weak model."""
    from pellucid.cli.plan_words import sampler_options
    from pellucid.models.guidance import Guidance
    from pellucid.pipeline import images

    readers: dict[str, Callable[[Any], Any]] = {
        "prompt": prompts,
        "label": lambda texts: [read_label(text) for text in texts],
        "seed": _seeds,
        "options": sampler_options,
        "guidance": Guidance.parse,
        "image": lambda path: images.read(path, "image"),
        "mask": lambda path: images.read(path, "mask"),
        "original_size": lambda text: read_size("--original-size", text),
        "target_size": lambda text: read_size("--target-size", text),
        "crop": lambda text: tuple(int(part) for part in _numbers("--crop", text, r"\d{1,6}")),
        "aesthetic": lambda text: tuple(float(part) for part in _numbers("--aesthetic", text, r"\d{1,2}(?:\.\d+)?")),
    }
    own = {"prompt": None, **flags_of(Request)}
    apart = ("width", "weak", "loras", "controls", "image_prompts")
    found = {n: readers.get(n, lambda v: v)(v) for n, v in words.items() if n in own and n not in apart}
    if "width" in words:
        found["width"], found["height"] = read_size("--size", words["width"])
    return found


def _seeds(text: str) -> int | list[int]:
    """`7`, `1,2,3` or `1..4`, also mixed."""
    from pellucid.core.noise import check_seed

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


def _numbers(name: str, text: str, form: str) -> tuple[str, str]:
    match = re.fullmatch(rf"\s*({form})\s*,\s*({form})\s*", text)
    if match is None:
        raise PellucidError(rule(name, "two numbers, as 0,0", text[:80]), "usage")
    return match[1], match[2]


def _number(text: str) -> float | None:
    """The number that a text is, NaN too: who takes it refuses that by name."""
    try:
        return float(text)
    except ValueError:
        return None


def prompts(text: str) -> list[str]:
    """The prompt itself, or the lines of a file (`@FILE`) that are not empty; `@@` begins a prompt with `@`."""
    from pellucid.core.reader import read_lines

    if text.startswith("@@") or not text.startswith("@"):
        return [text.removeprefix("@") if text.startswith("@@") else text]
    return list(read_lines(Path(text[1:]), "prompts", _MAX_PROMPTS_BYTES, empty="prompt-file"))


def lora(text: str) -> AdapterFile:
    """`FILE` or `FILE:SCALE`; a file whose own name holds the colon comes first."""
    from pellucid.pipeline.repeat import AdapterFile

    path, colon, tail = text.rpartition(":")
    scale = _number(tail)
    if Path(text).exists() or not colon or scale is None:
        return AdapterFile(text)
    return AdapterFile(path, scale=scale)


def with_image(name: str, text: str, spans: bool) -> AdapterFile:
    """`NET,FILE[,SCALE[,A-B]]`, read from its end; commas inside of paths are found by which files exist."""
    from pellucid.pipeline import images
    from pellucid.pipeline.repeat import AdapterFile

    parts = text.split(",")
    span = scale = None
    if spans and len(parts) > 3 and (match := re.fullmatch(r"\s*([\d.]+)\s*-\s*([\d.]+)\s*", parts[-1])):
        span = tuple(_number(part) for part in match.groups())
        parts.pop()
    if len(parts) > 2 and (scale := _number(parts[-1])) is not None:
        parts.pop()
    if len(parts) < 2 or not all(part.strip() for part in (parts[0], parts[-1])) or (span and None in span):
        form = "NET,FILE,SCALE,A-B" if spans else "ADAPTER,FILE,SCALE"
        raise PellucidError(rule(name, f"{form}, the last ones optional", text[:200]), "usage")
    cuts = [(",".join(parts[:i]).strip(), ",".join(parts[i:]).strip()) for i in range(1, len(parts))]
    net, image = next((cut for cut in cuts if Path(cut[0]).exists() and Path(cut[1]).is_file()), cuts[0])
    return AdapterFile(net, images.read(image, f"image of {name}"), scale, span)  # type: ignore[arg-type]
