"""One rank of an image-text step: its share of the batch, forward and backward, and the gradients that came out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from scene_cases import CPU, SCENES, built

from pellucid.train.draws import Draws
from pellucid.train.image_text import ImageTextConfig, ImageTextTask
from pellucid.train.ranks import Ranks

BATCH = 8


def table(words: Path | str, **changes: Any) -> dict[str, Any]:
    """An ImageTextConfig as a TOML file would say it."""
    half = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {
        "tokenizer": str(words),
        "width": 24,
        "text": {**half, "hidden_size": 32},
        "vision": {**half, "hidden_size": 32, "image_size": 16, "patch_size": 4},
        **changes,
    }


def task_of(words: Path | str, **changes: Any) -> ImageTextTask:
    task: ImageTextTask = built(ImageTextConfig, table(words, **changes))
    return task


def one_step(words: str, out: str) -> int:
    """Writes the loss, this rank's own errors, and the gradients after all ranks agreed on them."""
    with Ranks.join("ddp", "cpu") as ranks:
        task = task_of(words)
        share = BATCH // ranks.world
        indices = torch.arange(ranks.rank * share, (ranks.rank + 1) * share)
        draws = Draws(0, 0, BATCH, ranks.rank, ranks.world)
        given = SCENES.open().batch(indices, draws, CPU)
        network = ranks.wrap(task.network)
        graded = task.loss(network, task.prepare(given, draws))
        graded.loss.backward()
        found = {f"grad/{name}": p.grad for name, p in task.network.named_parameters() if p.grad is not None}
        save_file({"loss": graded.loss.detach(), "errors": graded.errors.contiguous(), **found}, f"{out}.{ranks.rank}")
    return 0
