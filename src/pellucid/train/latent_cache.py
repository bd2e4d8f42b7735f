"""Latents made once: every image of a source encoded by a VAE, stored as Gaussians."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import parse_json, parse_object, table, typed
from pellucid.interop import weights
from pellucid.interop.atomic_files import digest_of, is_part, put
from pellucid.interop.tokenizer import Tokenizer
from pellucid.pipeline import fingerprint
from pellucid.train.autoencoder import posterior_of
from pellucid.train.checkpoint import why
from pellucid.train.draws import Draws
from pellucid.train.image_source import hint_kind
from pellucid.train.source import Batch, Feed, Source
from pellucid.train.text import tokens

# --- Files of a cache -------------------------------------------------------------------------------------------------

_MANIFEST = "latents.json"
_FORMAT = 1
MIRRORED = "mirrored/"
_MAX_MANIFEST_BYTES = 64 * 2**20
_LIMITS = {"count": (1, 10**9), "per_shard": (1, 10**9), "phrasings": (1, 10**4), "sizes": (0, 2**60)}


@dataclass(frozen=True)
class Scaling:
    """How raw latents are scaled: the fields of a VAE's config that `models.vae.to_diffusion` reads."""

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
        put(folder / _MANIFEST, json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n")

    @staticmethod
    def read(folder: Path) -> Cache:
        if not (folder / _MANIFEST).is_file():
            advice = "Make it with `pellucid data latents CONFIG`."
            must = f"a folder with {_MANIFEST}"
            raise PellucidError(rule("latent cache", must, str(folder), advice), "latents-missing")
        plain = weights.read_json(folder / _MANIFEST, _MAX_MANIFEST_BYTES)
        if plain.pop("format", None) != _FORMAT:
            raise PellucidError(rule(_MANIFEST, f"a manifest of format {_FORMAT}", str(folder)), "latents-damaged")
        try:
            found = table(Cache, plain, _MANIFEST, _LIMITS)
        except PellucidError as error:
            raise PellucidError(f"{error} It is of {folder.name}: make the cache again.", "latents-damaged") from None
        if found.complete and len(found.sizes) != found.shards:
            must = f"of {found.shards} shards, {found.count} examples in all"
            raise PellucidError(rule(_MANIFEST, must, f"{len(found.sizes)} in {folder.name}"), "latents-damaged")
        return found


def _in_bytes(hint: Tensor, low: int) -> Tensor:
    """A hint as an image file would hold it."""
    return ((hint - low) / (1 - low) * 255.0).round().clamp(0, 255).to(torch.uint8)


def _packed(hint: Tensor, low: int) -> Tensor:
    """A hint as bytes where that loses nothing, which is so for what was read from a file."""
    levels = _in_bytes(hint, low)
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


# --- Making a cache ---------------------------------------------------------------------------------------------------

_PROBES = 16  # examples that stand for a source that has no fingerprint of its own


@runtime_checkable
class _PhrasingSource(Protocol):
    """A source that can say a caption in several ways."""

    def phrased(
        self, indices: Tensor, count: int, device: torch.device | str
    ) -> tuple[Batch, list[tuple[str, ...]]]: ...


def cache_latents(
    source: Source,
    vae: nn.Module,
    folder: str | Path,
    *,
    mirrored: bool = False,
    dtype: Literal["float32", "float16"] = "float32",
    precision: Literal["float32", "bf16"] = "float32",
    hints: Literal["exact", "bytes"] = "exact",
    phrasings: int = 1,
    tokenizer: Tokenizer | None = None,
    batch: int = 16,
    per_shard: int = 1024,
    tell: Callable[[int, int], None] | None = None,
) -> Path:
    """Encodes every image of a source once, on the VAE's device; a run that was killed resumes.

    `mirrored` also encodes each image flipped. A random crop is drawn once and stays. An image that cannot be read
    has the next one's latents in its place, as it would in training. `tell(done, count)` is called on the way.

    The VAE computes in `precision`; `hints` are stored as they are, or as bytes, like an image file. For a source that
    can phrase captions (scenes), `phrasings` captions per image are stored; with a `tokenizer` their tokens too.
    """
    _check_source(source, batch, per_shard, phrasings)
    keys = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")
    scaling = Scaling(**{key: getattr(vae.config, key) for key in keys if hasattr(vae.config, key)})
    cache = Cache(
        fingerprint_of(source),
        fingerprint.of_network(vae),
        len(source),
        per_shard,
        scaling,
        mirrored,
        dtype,
        precision,
        hints,
        phrasings,
        "" if tokenizer is None else _fingerprint_of_tokenizer(tokenizer),
    )
    place = Path(folder)
    try:
        _claim(cache, place)
        for number in range(cache.shards):
            if not _is_whole(cache, place, number):
                tensors, unreadable = made(cache, number, source, vae, batch, tokenizer)
                words = cache.label(number, unreadable, tensors)
                put(place / cache.file(number), partial(save_file, tensors, metadata=words))
            if tell is not None:
                tell(min((number + 1) * per_shard, cache.count), cache.count)
        _finish(cache, place)
    except (OSError, SafetensorError) as error:
        raise PellucidError(f"latent cache must be written; {place.name} was not: {why(error)}.", "latents") from None
    return place


def _check_source(source: Source, batch: int, per_shard: int, phrasings: int) -> None:
    if source.endless:
        advice = "Give it a count."
        raise PellucidError(f"source must have an end to be cached; got one without. {advice}", "latents")
    if getattr(source, "flip", False):
        advice = "Open it with flip=False, and pass mirrored=True here."
        raise PellucidError(f"source must not flip by chance while it is cached; got flip. {advice}", "latents")
    counts = (("batch", batch), ("per_shard", per_shard), ("phrasings", phrasings), ("examples", len(source)))
    for name, value in counts:
        if value < 1:
            raise PellucidError(rule(name, "at least 1", value), "latents")
    if phrasings > 1 and not isinstance(source, _PhrasingSource):
        raise PellucidError(rule("phrasings", "1 for data whose captions are given", phrasings), "latents")


def _claim(cache: Cache, folder: Path) -> None:
    """Begins a cache in a new folder, or resumes the same one."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / _MANIFEST).exists():
        found = Cache.read(folder)
        if found.name != cache.name:
            pairs = {name: (getattr(cache, name), getattr(found, name)) for name in asdict(cache)}
            kept = ("complete", "sizes", "unreadable")
            differing = [name for name, (ours, theirs) in pairs.items() if ours != theirs and name not in kept]
            advice = "Delete it, or name another folder."
            must = f"new, or a cache of this data and VAE; {', '.join(differing)} differ"
            raise PellucidError(rule("folder", must, str(folder), advice), "latents-stale")
    elif not all(map(is_part, folder.iterdir())):
        raise PellucidError(rule("folder", "new or empty", str(folder)), "latents")
    else:
        cache.write(folder)


def _is_whole(cache: Cache, folder: Path, number: int) -> bool:
    """Whether a shard is there, and all of it is as it was written."""
    path = folder / cache.file(number)
    try:
        if not path.is_file() or cache.unreadable_in(path, number) is None:
            return False
        digests = cache.said_in(path)["digests"]
        return not digests or digests == {name: digest_of(tensor) for name, tensor in weights.read(path).items()}
    except PellucidError:
        return False


def _finish(cache: Cache, folder: Path) -> None:
    """All shards are there: the manifest says so."""
    paths = [folder / cache.file(number) for number in range(cache.shards)]
    unreadable: dict[str, str] = {}
    for number, path in enumerate(paths):
        unreadable |= cache.unreadable_in(path, number) or {}
    sizes = tuple(path.stat().st_size for path in paths)
    replace(cache, complete=True, sizes=sizes, unreadable=unreadable).write(folder)
    for left in filter(is_part, list(folder.iterdir())):
        left.unlink(missing_ok=True)


def made(
    cache: Cache, number: int, source: Source, vae: nn.Module, batch: int, tokenizer: Tokenizer | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of one shard, and what could not be read on the way. Batches are made while the encoder works."""
    device = next(vae.parameters()).device
    first, last = number * cache.per_shard, number * cache.per_shard + cache.count_in(number)
    parts: list[dict[str, Tensor]] = []
    captions: list[str] = []
    known = set(getattr(source, "unreadable", {}))

    def seen(step: int) -> tuple[Batch, list[str]]:
        start = first + step * batch
        return _examples(source, torch.arange(start, min(start + batch, last)), cache.phrasings, device)

    with Feed(seen, 0, -(-(last - first) // batch), device=device) as feed:
        for shown, said in feed:
            captions += said
            parts.append(_encoded(shown, vae, cache))
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    for name in (name for name in tensors if name.startswith("hints/") and cache.hints == "exact"):
        tensors[name] = _packed(tensors[name], hint_kind(name.removeprefix("hints/")).low)
    if captions:
        tensors["captions"] = torch.frombuffer(bytearray(json.dumps(captions).encode("ascii")), dtype=torch.uint8)
        if tokenizer is not None:
            kind = torch.int16 if tokenizer.size <= 2**15 else torch.int32
            windows = tokens(tokenizer, captions).to(kind)
            tensors["tokens"] = windows.reshape(last - first, cache.phrasings, tokenizer.length)
    unreadable = {name: text for name, text in getattr(source, "unreadable", {}).items() if name not in known}
    return tensors, unreadable


def _examples(source: Source, asked: Tensor, phrasings: int, device: torch.device) -> tuple[Batch, list[str]]:
    """A batch, and all captions of its images: those of the first, then those of the second, …"""
    if phrasings > 1:
        assert isinstance(source, _PhrasingSource)
        seen, said = source.phrased(asked, phrasings, device)
        return seen, [caption for captions in said for caption in captions]
    seen = source.batch(asked, Draws(0, int(asked[0]), len(asked)), device)
    return seen, list(seen.captions or ())


@torch.no_grad()
def _encoded(seen: Batch, vae: nn.Module, cache: Cache) -> dict[str, Tensor]:
    """What is kept of a batch, on the CPU: mean and standard deviation of each Gaussian, labels and hints."""
    found: dict[str, Tensor] = {}
    for prefix, images in (("", seen.images), (MIRRORED, seen.images.flip(3) if cache.mirrored else None)):
        if images is None:
            continue
        posterior = posterior_of(vae, images, bf16=cache.precision == "bf16")
        found[f"{prefix}mean"] = posterior.mean
        if posterior.logvar is not None:
            found[f"{prefix}std"] = torch.exp(0.5 * posterior.logvar)
    kind = weights.dtype_named(cache.dtype)
    found = {name: tensor.to("cpu", kind).contiguous() for name, tensor in found.items()}
    if not all(bool(tensor.isfinite().all()) for tensor in found.values()):
        raise PellucidError(
            f"latents must be finite in {cache.dtype}; got some that are not. Encode in float32.", "latents-finite"
        )
    if seen.labels is not None:
        found["labels"] = seen.labels.cpu()
    for name, hint in seen.hints.items():
        kept = _in_bytes(hint, hint_kind(name).low) if cache.hints == "bytes" else hint.float()
        found[f"hints/{name}"] = kept.cpu().contiguous()
    return found


def _fingerprint_of_tokenizer(tokenizer: Tokenizer) -> str:
    said = [tokenizer.core.to_str(), tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.length]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def fingerprint_of(source: Source) -> str:
    """A source's own fingerprint, or that of some of its examples, spread over all."""
    own = getattr(source, "fingerprint", None)
    if own is not None:
        return str(own())
    asked = torch.linspace(0, len(source) - 1, min(_PROBES, len(source))).round().long()
    seen = source.batch(asked, Draws(0, 0, len(asked)), torch.device("cpu"))
    found = hashlib.sha256(json.dumps([len(source), list(seen.images.shape), seen.captions]).encode())
    found.update(seen.images.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:32]
