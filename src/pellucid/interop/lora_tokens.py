"""Tokens in a LoRA file: words whose vectors were trained together with it (pivotal tuning)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

_EMBED = "<embed>"  # what the metadata of cloneofsimo's files say of the key of a token
_ENCODERS = {"clip_l": 0, "clip_g": 1, "text_encoders_0": 0, "text_encoders_1": 1}
_UNNAMED = "emb_params"  # a token that is named like its file
_BUNDLED = re.compile(rf"bundle_emb\.(?P<word>[^.]+)\.(?P<part>string_to_param\..+|{'|'.join(_ENCODERS)}|{_UNNAMED})")
_TOKEN = re.compile(r"<[^<>\s]+>")
FILES = ("embeddings.safetensors", "*_emb.safetensors")  # beside a LoRA, of diffusers' advanced training scripts


class _Vector(NamedTuple):
    """The vectors of one word for one text encoder."""

    word: str
    encoder: int
    tensor: Tensor


def tokens(
    name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[dict[str, tuple[Tensor, ...]], set[str]]:
    """The vectors (count, D) or (D,) of each word, for each text encoder in turn, and the keys that held them."""
    found: dict[str, dict[int, Tensor]] = {}
    keys: set[str] = set()
    for key, tensor in tensors.items():
        for vector in _vectors(name, key, tensor, metadata.get(key) == _EMBED):
            found.setdefault(vector.word, {}).setdefault(vector.encoder, vector.tensor)
            keys.add(key)
    return {word: tuple(by[n] for n in sorted(by)) for word, by in found.items()}, keys


def _vectors(name: str, key: str, tensor: Tensor, embed: bool) -> Iterator[_Vector]:
    """What a key holds, if it is one of a token: A1111's bundles, diffusers' and replicate's rows, cloneofsimo's."""
    bundled = _BUNDLED.fullmatch(key)
    if bundled is not None:
        yield _Vector(bundled["word"], _ENCODERS.get(bundled["part"], 0), tensor)
    elif key in _ENCODERS and tensor.ndim == 2:  # a row for each of <s0>, <s1>, …
        for n, row in enumerate(tensor):
            yield _Vector(f"<s{n}>", _ENCODERS[key], row)
    elif key == _UNNAMED:
        yield _Vector(name, 0, tensor)
    elif embed or _TOKEN.fullmatch(key):
        yield _Vector(key, 0, tensor)
