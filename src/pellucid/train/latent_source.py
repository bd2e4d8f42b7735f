"""A source of latents that were made before: see `latent_cache`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.interop import weights
from pellucid.interop.atomic_files import digest_of
from pellucid.models.vae import to_diffusion
from pellucid.pipeline import fingerprint
from pellucid.train.config import chosen
from pellucid.train.draws import Draws
from pellucid.train.image_source import hint_kind
from pellucid.train.latent_cache import MIRRORED, Cache, caption_list, fingerprint_of, unpacked
from pellucid.train.source import Batch, Source

Rows = Callable[[str], Tensor]


class LatentSource:
    """A cache of latents as a source: fresh samples of each image's Gaussian, scaled as the diffusion sees them.

    If `source` and `vae` are given, the cache must have been made from them. With `flip` half of the examples, at
    random, use the latents of the mirrored image, which a cache made with `mirrored` has. Of several phrasings of a
    caption one is drawn. `on_device` keeps the whole cache in the memory of the device that asks first, so that batches
    are gathered there and nothing is read or sent.
    """

    endless = False

    def __init__(
        self,
        folder: str | Path,
        *,
        flip: bool = False,
        on_device: bool = False,
        source: Source | None = None,
        vae: nn.Module | None = None,
    ) -> None:
        self.folder, self.flip, self.on_device = Path(folder), flip, on_device
        self.near: dict[str, Tensor] = {}  # what lies on the device
        self.cache = Cache.read(self.folder)
        _check_fresh(self.cache, self.folder, source, vae)
        if flip and not self.cache.mirrored:
            advice = "Make it again with mirrored=True."
            must = "one with mirrored images, to flip"
            raise PellucidError(rule("latent cache", must, str(folder), advice), "latents-mirrored")
        self.shards = [self.opened(number) for number in range(self.cache.shards)]
        self.digests = [
            self.cache.said_in(self.folder / self.cache.file(n))["digests"] for n in range(len(self.shards))
        ]
        self.checked: set[tuple[int, str]] = set()  # (shard, tensor) that was found to be what was written
        for number, shard in enumerate(self.shards):
            if "captions" in shard:
                self.tensor(number, "captions")
        self.captions = [caption for shard in self.shards for caption in caption_list(shard)]
        kinds = {
            tuple(sorted((name, t.dtype, t.shape[1:]) for name, t in shard.items() if name != "captions"))
            for shard in self.shards
        }
        if len(self.captions) not in (0, len(self) * self.cache.phrasings) or len(kinds) > 1:
            raise self.damaged("its shards are not alike")

    def __len__(self) -> int:
        return self.cache.count

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Images that could not be read when the cache was made: name → why."""
        return self.cache.unreadable

    def inventory(self) -> dict[str, Any]:
        return {"header": self.cache.name, "sizes": self.cache.sizes}

    def opened(self, number: int) -> dict[str, Tensor]:
        """The tensors of one shard, mapped and not read, and checked to be those that were written."""
        path, count = self.folder / self.cache.file(number), self.cache.count_in(number)
        try:
            size = path.stat().st_size
            if size != self.cache.sizes[number] or self.cache.unreadable_in(path, number) is None:
                raise self.damaged(f"{path.name} is not the file that was written")
            found = weights.read(path)
        except (OSError, IndexError):
            raise self.damaged(f"{path.name} is missing") from None
        wrong = [name for name, tensor in found.items() if name != "captions" and len(tensor) != count]
        if wrong or "mean" not in found:
            raise self.damaged(f"{path.name} does not hold {count} examples")
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about it."""
        old = "was made by an older version without digests: it is read as it is, unchecked. Make it again to have them"
        return () if all(self.digests) else (f"latent cache {self.folder.name} {old}.",)

    def tensor(self, number: int, name: str) -> Tensor:
        """A tensor of a shard, checked against its digest when it is first used."""
        found = self.shards[number][name]
        if (number, name) not in self.checked:
            if self.digests[number].get(name, "") not in ("", digest_of(found)):
                raise self.damaged(f"{name} in {self.cache.file(number)} is not what was written")
            self.checked.add((number, name))
        return found

    def damaged(self, why: str) -> PellucidError:
        return PellucidError(
            f"latent cache must be intact; {self.folder.name} is not: {why}. Make it again; intact shards are kept.",
            "latents-damaged",
        )

    def batch(self, indices: Tensor, draws: Draws, device: torch.device | str = "cpu") -> Batch:
        """Latents (B, C, h, w) float32 at indices (B,), with their labels, captions, tokens and hints."""
        place, asked = torch.device(device), indices.cpu()
        if len(asked) and not 0 <= int(asked.min()) <= int(asked.max()) < len(self):
            raise PellucidError(rule("indices", f"from 0 to {len(self) - 1}", asked.tolist()[:8]), "data-indices")
        if self.on_device:
            self.settle(place)
        held = self.shards[0]
        rows = self.gatherer(asked, place)
        mirrored = (draws.uniform("flip") < 0.5).to(place, non_blocking=True) if self.flip else None
        mean = _either(rows, "mean", mirrored)
        if "std" in held:
            mean = mean + _either(rows, "std", mirrored) * draws.normal("posterior", mean.shape[1:], place)
        hints = {}
        for key in (key for key in held if key.startswith("hints/")):
            kind = hint_kind(key.removeprefix("hints/"))
            hint = unpacked(rows(key), kind.low)
            if mirrored is not None and kind.aligned:
                hint = _turned(hint, hint.flip(3), mirrored)
            hints[key.removeprefix("hints/")] = hint
        captions, tokens = self.phrased(asked, draws, rows)
        labels = rows("labels") if "labels" in held else None
        return Batch(to_diffusion(self.cache.scaling, mean), labels, captions, hints, tokens)

    def phrased(self, asked: Tensor, draws: Draws, rows: Rows) -> tuple[tuple[str, ...] | None, Tensor | None]:
        """One caption of each image, and its tokens (B, L), where there are any."""
        if not self.captions:
            return None, None
        count = self.cache.phrasings
        which = (draws.uniform("phrasing") * count).long() if count > 1 else torch.zeros_like(asked)
        captions = tuple(self.captions[i] for i in (asked * count + which).tolist())
        if "tokens" not in self.shards[0]:
            return captions, None
        every = rows("tokens")  # (B, phrasings, L)
        own = which.to(every.device, non_blocking=True)[:, None, None].expand(-1, 1, every.shape[2])
        return captions, every.gather(1, own)[:, 0].long()

    def gatherer(self, asked: Tensor, device: torch.device) -> Rows:
        """Gives the rows (B, …) of a tensor by its name, from the device or from the shards."""
        if self.on_device:
            there = asked.to(device, non_blocking=True)
            return lambda name: self.near[name].index_select(0, there)
        return lambda name: self.rows(name, asked, device)

    def rows(self, name: str, asked: Tensor, device: torch.device) -> Tensor:
        """The rows (B, …) of a tensor stored in shards."""
        first = self.shards[0][name]
        found = torch.empty((len(asked), *first.shape[1:]), dtype=first.dtype, pin_memory=device.type == "cuda")
        numbers = asked // self.cache.per_shard
        for number in numbers.unique().tolist():
            here = numbers == number
            found[here] = self.tensor(number, name)[asked[here] % self.cache.per_shard]
        return found.to(device, non_blocking=True)

    def settle(self, device: torch.device) -> None:
        """Brings everything that a batch needs to the device, once."""
        if self.near:
            lies = self.near["mean"].device
            if lies != torch.empty(0, device=device).device:  # "cuda" is one of several
                raise PellucidError(rule("device", f"{lies}, where the latents lie", str(device)), "latents-device")
            return
        names = [n for n in self.shards[0] if n != "captions" and (self.flip or not n.startswith(MIRRORED))]
        size = sum(shard[name].nbytes for shard in self.shards for name in names)
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else size
        if size > free:
            must, got = f"at most {free / 1e9:.1f} GB, what {device} has free", f"{size / 1e9:.1f} GB"
            raise PellucidError(rule("latents with on_device", must, got), "latents-memory")
        for name in names:
            first = self.shards[0][name]
            whole = torch.empty((len(self), *first.shape[1:]), dtype=first.dtype, device=device)
            for number, part in enumerate(whole.split(self.cache.per_shard)):
                part.copy_(self.tensor(number, name))
            self.near[name] = whole
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # other streams will read it


def _either(rows: Rows, name: str, mirrored: Tensor | None) -> Tensor:
    """(B, C, h, w) float32: of the image, or of the image mirrored."""
    found = rows(name).float()
    return found if mirrored is None else _turned(found, rows(MIRRORED + name).float(), mirrored)


def _turned(plain: Tensor, other: Tensor, mirrored: Tensor) -> Tensor:
    return torch.where(mirrored[:, None, None, None], other, plain)


@dataclass(frozen=True)
class LatentsConfig:
    """`kind = "latents"` of a config: the folder of a cache and, in `of`, the data that it is made from (a table
    with its own `kind`), with `phrasings` captions per image: `pellucid data latents` makes it."""

    folder: str
    flip: bool = False
    on_device: bool = False
    of: Mapping[str, Any] = field(default_factory=dict)
    phrasings: int = 1

    def open(self) -> LatentSource:
        found = LatentSource(self.folder, flip=self.flip, on_device=self.on_device, source=self.made_of())
        if self.of and found.cache.phrasings != self.phrasings:
            advice = "Delete it and make it again, or name another folder."
            got = found.cache.phrasings
            raise PellucidError(rule("phrasings", f"{got}, as in the cache", self.phrasings, advice), "latents-stale")
        return found

    def made_of(self) -> Source | None:
        from pellucid.train.kinds import DATA  # which knows this file

        return chosen(self.of, DATA, "data.of").open() if self.of else None


def _check_fresh(cache: Cache, folder: Path, source: Source | None, vae: nn.Module | None) -> None:
    """Refuses a cache of other data or of another VAE, or one that was never finished."""
    if not cache.complete:
        advice = "Run cache_latents again: it continues where it stopped."
        raise PellucidError(f"latent cache must be complete; {folder.name} is not. {advice}", "latents-incomplete")
    now: Mapping[str, Any] = {
        "data": None if source is None else fingerprint_of(source),
        "VAE": None if vae is None else fingerprint.of_network(vae),
    }
    for what, then in (("data", cache.source), ("VAE", cache.vae)):
        if now[what] not in (None, then):
            advice = "Delete it and make it again, or name another folder."
            must = f"of this {what} ({now[what]})"
            raise PellucidError(rule(f"latent cache {folder.name}", must, f"one of {then}", advice), "latents-stale")
