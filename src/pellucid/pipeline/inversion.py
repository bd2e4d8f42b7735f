"""Textual inversion: words whose vectors were trained, read from a file and added to a tokenizer and its encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.interop import weights
from pellucid.interop.components import Components
from pellucid.interop.tokenizer import Tokenizer
from pellucid.models.clip import CLIPTextEncoder
from pellucid.models.lora import AdapterSet

SDXL_KEYS = ("clip_l", "clip_g")  # the first and the second encoder
UNNAMED = "emb_params"  # the key of files that leave the name to the file's own
FOLDER_FILES = ("learned_embeds.safetensors", "learned_embeds.bin")  # of a repository on the hub
MAX_VECTORS = 75  # what one window holds


@dataclass(frozen=True)
class Inversion:
    """A word and its vectors (count, D), for each text encoder in the order of the pipeline."""

    name: str
    vectors: tuple[Tensor, ...]

    @property
    def count(self) -> int:
        return len(self.vectors[0])


def read_inversion(source: str | Path | Mapping[str, Any], name: str | None = None) -> Inversion:
    """From a .safetensors, .pt or .bin file, a folder with learned_embeds, or what a file holds.

    `name` overrules the name that it carries. Layouts: {name: vectors} as diffusers writes it; emb_params, named
    like the file; clip_l and clip_g for SDXL; string_to_param in pickles, with the name in `name`.
    """
    if isinstance(source, Mapping):
        return named(source, name, stem=None)
    path = Path(source)
    if path.is_dir():
        path = next((path / file for file in FOLDER_FILES if (path / file).is_file()), path)
    if not path.is_file():
        raise PellucidError(rule("textual inversion", "a .safetensors, .pt or .bin file", path.name), "inversion-file")
    return named(held_in(path), name, stem=path.stem)


def held_in(path: Path) -> Mapping[str, Any]:
    """The tensors of a file by name; those of a pickle may be nested, or one without a name."""
    kind = weights.kind_of(path)
    if kind == "safetensors":
        return weights.read_safetensors(path)
    held = weights.read_pickle(path, zipped=kind == "zip", what="textual inversion")
    return held if isinstance(held, Mapping) else {UNNAMED: held}


def named(held: Mapping[str, Any], name: str | None, stem: str | None) -> Inversion:
    """The word and its vectors, whichever layout they came in."""
    if isinstance(held.get("string_to_param"), Mapping):
        found, tensors = held.get("name"), list(held["string_to_param"].values())[:1]
    elif set(held) == set(SDXL_KEYS):
        found, tensors = None, [held[key] for key in SDXL_KEYS]
    elif len(held) == 1:
        key, tensor = next(iter(held.items()))
        found, tensors = None if key == UNNAMED else key, [tensor]
    else:
        must = "{name: vectors}, emb_params, clip_l with clip_g, or string_to_param"
        raise PellucidError(
            f"keys of a textual inversion must be {must}; got {weights.some(map(str, held))}.", "inversion-keys"
        )
    word = name or found or stem
    if not isinstance(word, str):
        raise PellucidError("name of a textual inversion must be given; got vectors without one.", "inversion-name")
    return Inversion(word, tuple(matrix(tensor, word) for tensor in tensors))


def matrix(tensor: Any, name: str) -> Tensor:
    """(count, D) of finite numbers."""
    shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
    if not isinstance(tensor, Tensor) or tensor.ndim not in (1, 2) or not tensor.is_floating_point():
        raise PellucidError(rule(f"textual inversion {name!r}", "vectors (count, width)", shape), "inversion-shape")
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    if not 1 <= len(rows) <= MAX_VECTORS:
        must = f"1 to {MAX_VECTORS} vectors, which a window holds"
        raise PellucidError(rule(f"textual inversion {name!r}", must, len(rows)), "inversion-shape")
    if not rows.isfinite().all():
        raise PellucidError(rule(f"textual inversion {name!r}", "finite numbers", "NaN or infinity"), "inversion-nan")
    return rows


def add_inversions(
    encoders: Sequence[CLIPTextEncoder], tokenizers: Sequence[Tokenizer], inversions: Sequence[Inversion]
) -> tuple[tuple[CLIPTextEncoder, ...], tuple[Tokenizer, ...]]:
    """Encoders and tokenizers that know these words: new ones, that share every other tensor with the given."""
    for inversion in inversions:
        widths = [vectors.shape[-1] for vectors in inversion.vectors]
        wanted = [encoder.config.hidden_size for encoder in encoders]
        if widths != wanted or len({len(vectors) for vectors in inversion.vectors}) > 1:
            raise misfit(inversion, wanted)
    grown = [add(*pair) for pair in zip(encoders, tokenizers, by_encoder(inversions, len(encoders)), strict=True)]
    return tuple(encoder for encoder, _ in grown), tuple(tokenizer for _, tokenizer in grown)


def with_tokens(parts: Components, loras: Sequence[AdapterSet]) -> Components:
    """The components with the tokens that came with LoRAs, and a note that names them."""
    given = [
        Inversion(word, tuple(matrix(v, word) for v in held)) for one in loras for word, held in one.tokens.items()
    ]
    if not given:
        return parts
    encoders, tokenizers = add_inversions(parts.text_encoders, parts.tokenizers, given)
    notes = [f"LoRA {one.name} came with tokens for the prompt: {', '.join(one.tokens)}" for one in loras if one.tokens]
    return replace(parts, text_encoders=encoders, tokenizers=tokenizers, notes=(*parts.notes, *notes))


def by_encoder(inversions: Sequence[Inversion], count: int) -> list[list[tuple[str, Tensor]]]:
    return [[(inversion.name, inversion.vectors[n]) for inversion in inversions] for n in range(count)]


def misfit(inversion: Inversion, wanted: Sequence[int]) -> PellucidError:
    shapes = [tuple(vectors.shape) for vectors in inversion.vectors]
    must = " and ".join(str(width) for width in wanted) + " wide, as the text encoder" + "s" * (len(wanted) > 1)
    advice = "It was trained for another kind of model."
    if [width for _, width in shapes] == list(wanted):
        must, advice = "as many vectors for each text encoder", ""
    got = " and ".join(f"{count} × {width}" for count, width in shapes)
    return PellucidError(rule(f"textual inversion {inversion.name!r}", must, got, advice), "inversion-width")


def add(
    encoder: CLIPTextEncoder, tokenizer: Tokenizer, words: Sequence[tuple[str, Tensor]]
) -> tuple[CLIPTextEncoder, Tokenizer]:
    if not words:
        return encoder, tokenizer
    tokenizer = grown(tokenizer, tuple((name, len(vectors)) for name, vectors in words))
    ids = [i for name, _ in words for i in tokenizer.ids(name)]
    return encoder.with_tokens(ids, torch.cat([v.to("cpu", torch.float32) for _, v in words]), tokenizer.eos), tokenizer


@lru_cache(maxsize=8)
def grown(tokenizer: Tokenizer, words: tuple[tuple[str, int], ...]) -> Tokenizer:
    """A tokenizer that knows these words. CLIP's takes 0.1 s for each, and a LoRA brings them to every call."""
    for name, count in words:
        tokenizer = tokenizer.add(name, count)
    return tokenizer
