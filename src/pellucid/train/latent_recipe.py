"""The latent cache of a training config: its data, through its VAE, with the tokens of its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.tokenizer import Tokenizer
from pellucid.train.adapters import AdapterConfig, FrozenPipeline
from pellucid.train.autoencoder import read_vae
from pellucid.train.config import TrainConfig, chosen
from pellucid.train.kinds import DATA, TASKS
from pellucid.train.latent_cache import cache_latents
from pellucid.train.latent_source import LatentsConfig
from pellucid.train.scenes_source import ScenesConfig
from pellucid.train.source import Source
from pellucid.train.text_denoiser import TextDenoiserConfig

_BATCH, _PER_SHARD = 512, 16384  # images


def make_latents(
    config: TrainConfig,
    folder: str | Path | None = None,
    *,
    count: int | None = None,
    phrasings: int | None = None,
    device: torch.device | str = "cpu",
    tell: Callable[[int, int], None] | None = None,
) -> Path:
    """Makes the cache that a config with `kind = "latents"` names, of its `of`; or one of a config's own data.

    `count` is how many scenes, and `phrasings` how many captions of each, where the config does not say. Means and
    deviations are kept in float16; on a GPU the VAE computes in bfloat16, as in training.
    """
    data = chosen(config.data, DATA, "data")
    place = folder if folder is not None else data.folder if isinstance(data, LatentsConfig) else None
    if place is None:
        raise PellucidError(rule("--out", "given for data that are not latents", "none"), "latents")
    source, several = _source_of(data, count, phrasings)
    where = torch.device(device)
    vae, tokenizer = _parts_of(chosen(config.task, TASKS, "task"), where)
    return cache_latents(
        source,
        vae,
        place,
        mirrored=isinstance(data, LatentsConfig) and data.flip,
        dtype="float16",
        precision="bf16" if where.type == "cuda" else "float32",
        hints="bytes",
        phrasings=several,
        tokenizer=tokenizer,
        batch=_BATCH,
        per_shard=_PER_SHARD,
        tell=tell,
    )


def _source_of(data: Any, count: int | None, phrasings: int | None) -> tuple[Source, int]:
    """What is to be cached, and how many captions of each."""
    if isinstance(data, LatentsConfig):
        if not data.of:
            raise PellucidError(rule("data.of", "a table that says what the cache is made from", "none"), "latents")
        if count is not None or phrasings is not None:
            raise PellucidError("--count and --phrasings must be left to a config that has data.of.", "latents")
        phrasings, data = data.phrasings, chosen(data.of, DATA, "data.of")
    if count is not None:
        if not isinstance(data, ScenesConfig):
            raise PellucidError(rule("--count", "left out for data that have an end", count), "latents")
        data = replace(data, count=count)
    return data.open(), phrasings or 1


def _parts_of(task: Any, device: torch.device) -> tuple[nn.Module, Tokenizer | None]:
    """The VAE of a task, and its tokenizer if it has just one."""
    if isinstance(task, TextDenoiserConfig):
        return read_vae(task.vae).to(device), task.text.build(0).tokenizer
    if not isinstance(task, AdapterConfig):
        must = "one over a VAE: text_denoiser, lora, controlnet, ip_adapter"
        raise PellucidError(rule("task.kind", must, type(task).__name__), "latents")
    base = FrozenPipeline(task.base, "float32", device)
    if base.parts.vae is None:
        raise PellucidError(rule("base", "one with a VAE", base.parts.name), "latents")
    return base.parts.vae, base.text[0].tokenizer if len(base.text) == 1 else None
