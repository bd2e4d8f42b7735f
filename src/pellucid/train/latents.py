"""A source of latents that were made before: see `latent_cache`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.interop import weights
from pellucid.models.vae import to_diffusion
from pellucid.pipeline import fingerprint
from pellucid.train.draws import Draws
from pellucid.train.latent_cache import fingerprint_of
from pellucid.train.latent_files import MIRRORED, Cache, caption_list, unpacked
from pellucid.train.pictures import hint_kind
from pellucid.train.source import Batch, Source


class LatentSource:
    """A cache of latents as a source: fresh samples of each picture's Gaussian, scaled as the diffusion sees them.

    `source` and `vae`, where given, are those that it must have been made of. `flip` takes those of the mirrored
    picture for every other example by chance; a cache that was made with `mirrored` has them.
    """

    endless = False

    def __init__(
        self, folder: str | Path, *, flip: bool = False, source: Source | None = None, vae: nn.Module | None = None
    ) -> None:
        self.folder, self.flip = Path(folder), flip
        self.cache = Cache.read(self.folder)
        check_fresh(self.cache, self.folder, source, vae)
        if flip and not self.cache.mirrored:
            advice = "Make it again with mirrored=True."
            must = "one with mirrored pictures, to flip"
            raise PellucidError(rule("latent cache", must, str(folder), advice), "latents-mirrored")
        self.shards = [self.opened(number) for number in range(self.cache.shards)]
        self.captions = [caption for shard in self.shards for caption in caption_list(shard)]
        kinds = {
            tuple(sorted((name, t.dtype, t.shape[1:]) for name, t in shard.items() if name != "captions"))
            for shard in self.shards
        }
        if len(self.captions) not in (0, len(self)) or len(kinds) > 1:
            raise self.damaged("its shards are not alike")

    def __len__(self) -> int:
        return self.cache.count

    @property
    def skipped(self) -> int:
        """Pictures that could not be read when the cache was made."""
        return len(self.cache.unreadable)

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

    def damaged(self, why: str) -> PellucidError:
        return PellucidError(
            f"latent cache must be whole; {self.folder.name} is not: {why}. Delete it and make it again.",
            "latents-damaged",
        )

    def batch(self, indices: Tensor, draws: Draws, device: torch.device | str = "cpu") -> Batch:
        """Latents (B, C, h, w) float32 at indices (B,), with their labels, captions and hints."""
        place, asked = torch.device(device), indices.cpu()
        if len(asked) and not 0 <= int(asked.min()) <= int(asked.max()) < len(self):
            raise PellucidError(rule("indices", f"from 0 to {len(self) - 1}", asked.tolist()[:8]), "data-indices")
        mirrored = draws.uniform("flip") < 0.5 if self.flip else torch.zeros(len(asked), dtype=torch.bool)
        mean = self.either("mean", asked, mirrored, place)
        if "std" in self.shards[0]:
            noise = draws.normal("posterior", mean.shape[1:], place)
            mean = mean + self.either("std", asked, mirrored, place) * noise
        held = self.shards[0]
        hints = {}
        for key in (key for key in held if key.startswith("hints/")):
            name = key.removeprefix("hints/")
            hint = unpacked(self.rows(key, asked, place), hint_kind(name).low)
            turned = mirrored.to(place)[:, None, None, None] & torch.tensor(hint_kind(name).aligned, device=place)
            hints[name] = torch.where(turned, hint.flip(3), hint)
        return Batch(
            to_diffusion(self.cache.scaling, mean),
            self.rows("labels", asked, place) if "labels" in held else None,
            tuple(self.captions[i] for i in asked.tolist()) if self.captions else None,
            hints,
        )

    def either(self, name: str, asked: Tensor, mirrored: Tensor, device: torch.device) -> Tensor:
        """(B, C, h, w) float32: of the picture, or of the picture mirrored."""
        found = self.rows(name, asked, device).float()
        if bool(mirrored.any()):
            turned = mirrored.to(device)
            found[turned] = self.rows(MIRRORED + name, asked[mirrored], device).float()
        return found

    def rows(self, name: str, asked: Tensor, device: torch.device) -> Tensor:
        """The rows (B, …) of a tensor that lies in shards."""
        first = self.shards[0][name]
        found = torch.empty((len(asked), *first.shape[1:]), dtype=first.dtype, pin_memory=device.type == "cuda")
        numbers = asked // self.cache.per_shard
        for number in numbers.unique().tolist():
            here = numbers == number
            found[here] = self.shards[number][name][asked[here] % self.cache.per_shard]
        return found.to(device, non_blocking=True)


@dataclass(frozen=True)
class LatentsConfig:
    """`kind = "latents"` of a config: the folder of a cache."""

    folder: str
    flip: bool = False

    def open(self) -> LatentSource:
        return LatentSource(self.folder, flip=self.flip)


def check_fresh(cache: Cache, folder: Path, source: Source | None, vae: nn.Module | None) -> None:
    """Refuses a cache of other data or of another VAE, or one that was never finished."""
    if not cache.complete:
        advice = "Run cache_latents again: it goes on where it was."
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
