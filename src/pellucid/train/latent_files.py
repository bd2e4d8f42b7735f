"""The files of a latent cache: a manifest, and shards of tensors that are whole or absent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import parse_json, parse_object, table, typed
from pellucid.interop import weights
from pellucid.interop.atomic_files import digest_of, put

MANIFEST = "latents.json"
FORMAT = 1
MIRRORED = "mirrored/"
MAX_MANIFEST_BYTES = 64 * 2**20
LIMITS = {"count": (1, 10**9), "per_shard": (1, 10**9), "phrasings": (1, 10**4), "sizes": (0, 2**60)}


@dataclass(frozen=True)
class Scaling:
    """How the VAE's config wants raw latents scaled: what `models.vae.to_diffusion` asks of one."""

    scaling_factor: float = 1.0
    shift_factor: float | None = None
    latents_mean: tuple[float, ...] | None = None
    latents_std: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Cache:
    """The manifest: what the cache is of, how it is cut, and whether it is complete."""

    source: str  # fingerprints
    vae: str
    count: int
    per_shard: int
    scaling: Scaling
    mirrored: bool = False
    dtype: Literal["float32", "float16"] = "float32"
    precision: Literal["float32", "bf16"] = "float32"  # in which the VAE computed
    hints: Literal["exact", "bytes"] = "exact"
    phrasings: int = 1  # captions of each image
    tokenizer: str = ""  # fingerprint, where tokens are kept
    complete: bool = False
    sizes: tuple[int, ...] = ()  # bytes of each shard
    unreadable: Mapping[str, str] = field(default_factory=dict)  # name → why

    @property
    def shards(self) -> int:
        return -(-self.count // self.per_shard)

    @property
    def name(self) -> str:
        """A name that shards carry, so that none of another cache is taken for one of this."""
        plain = asdict(replace(self, complete=False, sizes=(), unreadable={}))
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]

    def file(self, number: int) -> str:
        return f"latents-{number:05d}-of-{self.shards:05d}.safetensors"

    def count_in(self, number: int) -> int:
        return min(self.per_shard, self.count - number * self.per_shard)

    def label(self, number: int, unreadable: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """What a shard says of itself: one entry, because safetensors writes several in any order."""
        digests = {name: digest_of(tensor) for name, tensor in tensors.items()}
        said = {"name": self.name, "number": number, "unreadable": dict(unreadable), "digests": digests}
        return {"latents": json.dumps(said, sort_keys=True)}

    def unreadable_in(self, path: Path, number: int) -> dict[str, str] | None:
        """What could not be read for a shard, by its label; None if it is not this cache's."""
        said = self.said_in(path)
        return said["unreadable"] if (said.get("name"), said.get("number")) == (self.name, number) else None

    @staticmethod
    def said_in(path: Path) -> dict[str, Any]:
        """The label of a shard. `digests` are of its tensors, by name; older ones have none."""
        said = parse_object(weights.metadata_of(path).get("latents", "{}"), f"label of {path.name}", "latents-damaged")
        for key in ("unreadable", "digests"):
            said[key] = dict(typed(Mapping[str, str], said.get(key, {}), f"{key} of {path.name}", code="latents"))
        return said

    def write(self, folder: Path) -> None:
        put(folder / MANIFEST, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @staticmethod
    def read(folder: Path) -> Cache:
        if not (folder / MANIFEST).is_file():
            advice = "Make it with `pellucid data latents CONFIG`."
            must = f"a folder with {MANIFEST}"
            raise PellucidError(rule("latent cache", must, str(folder), advice), "latents-missing")
        plain = weights.read_json(folder / MANIFEST, MAX_MANIFEST_BYTES)
        if plain.pop("format", None) != FORMAT:
            raise PellucidError(rule(MANIFEST, f"a manifest of format {FORMAT}", str(folder)), "latents-damaged")
        try:
            found = table(Cache, plain, MANIFEST, LIMITS)
        except PellucidError as error:
            raise PellucidError(f"{error} It is of {folder.name}: make the cache again.", "latents-damaged") from None
        if found.complete and len(found.sizes) != found.shards:
            must = f"of {found.shards} shards, {found.count} examples in all"
            raise PellucidError(rule(MANIFEST, must, f"{len(found.sizes)} in {folder.name}"), "latents-damaged")
        return found


def in_bytes(hint: Tensor, low: int) -> Tensor:
    """A hint as an image file would hold it."""
    return ((hint - low) / (1 - low) * 255.0).round().clamp(0, 255).to(torch.uint8)


def packed(hint: Tensor, low: int) -> Tensor:
    """A hint as bytes where that loses nothing, which is so for what was read from a file."""
    levels = in_bytes(hint, low)
    return levels if torch.equal(unpacked(levels, low), hint) else hint


def unpacked(hint: Tensor, low: int) -> Tensor:
    """Back to floats in [low, 1], by the same steps as an image that is read."""
    if hint.dtype != torch.uint8:
        return hint
    unit = hint.float() / 255.0
    return unit * 2.0 - 1.0 if low == -1 else unit


def caption_list(shard: Mapping[str, Tensor]) -> list[str]:
    if "captions" not in shard:
        return []
    found = parse_json(shard["captions"].numpy().tobytes(), "captions of a latent cache", "latents-damaged")
    return list(typed(tuple[str, ...], found, "captions of a latent cache", code="latents"))
