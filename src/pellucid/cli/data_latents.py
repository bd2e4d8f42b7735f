"""What `pellucid data latents` does: a cache with a bar on the way, and what was made."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from pellucid.cli import output
from pellucid.train.config import TrainConfig
from pellucid.train.latent_files import Cache
from pellucid.train.latent_recipe import make_latents


@dataclass(frozen=True)
class Made:
    folder: Path
    count: int
    bytes: int
    unreadable: int
    seconds: float


def make(config: Path, out: Path | None, *, count: int | None, phrasings: int | None, device: str | None) -> Made:
    read = TrainConfig.load(config)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    begun = time.perf_counter()
    with output.progress("encoding", 100) as advance:
        shown = 0

        def tell(done: int, total: int) -> None:
            nonlocal shown
            for _ in range(shown, 100 * done // total):
                advance()
            shown = 100 * done // total

        folder = make_latents(read, out, count=count, phrasings=phrasings, device=place, tell=tell)
    found = Cache.read(folder)
    return Made(folder, found.count, sum(found.sizes), len(found.unreadable), time.perf_counter() - begun)
