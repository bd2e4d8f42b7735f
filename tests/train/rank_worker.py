"""One rank of a small run, in a process of its own, for the tests that start several or kill some.

    python rank_worker.py FOLDER '{"engine": {…}, …}' [--die WHERE COUNT RANK]

WHERE is a point of the program (see `POINTS`): at its COUNT-th passing that rank kills itself, as the kernel would.
After an elastic restart it does not.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it when it is made; here it is there before the fork
from torch import Tensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pellucid.core.errors import PellucidError
from pellucid.train import checkpoint
from pellucid.train.config import TrainConfig, read
from pellucid.train.draws import Draws
from pellucid.train.ranks import Ranks
from pellucid.train.source import Batch
from pellucid.train.trainer import Trainer

NETWORK = {
    "_class_name": "UNet2DModel",
    "sample_size": 8,
    "in_channels": 1,
    "out_channels": 1,
    "block_out_channels": [8, 8],
    "layers_per_block": 1,
    "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}
CONFIG: dict[str, Any] = {
    "task": {
        "kind": "denoiser",
        "network": NETWORK,
        "objective": {"schedule": {"name": "cosine"}, "target": "v"},
    },
    "data": {"kind": "given"},
    "steps": 10,
    "batch": 8,
    "seed": 3,
    "ema": [20.0, 60.0],
    # With the usual eps of 1e-8, Adam takes full steps along gradients that are zero but for their rounding (the bias
    # of the keys in attention), and two sums in different orders part there.
    "optimizer": {"rate": 1e-2, "warmup": 4, "decay": "cosine", "weight_decay": 0.01, "eps": 1e-4},
    "log": {"every": 1, "checkpoint_every": 2, "tensorboard": False},
}
POINTS: dict[str, tuple[Any, str]] = {
    "step": (Trainer, "step"),
    "write": (checkpoint, "save_file"),
    "settle": (checkpoint, "settle"),
    "rename": (os, "rename"),
}


class Images:
    """Thirty images, made once from a seed: stripes of different pitch."""

    endless = False

    def __init__(self) -> None:
        waves = torch.linspace(0.2, 2.0, 30)[:, None, None, None] * torch.arange(64.0).view(1, 1, 8, 8)
        self.images = waves.sin()

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: Tensor, draws: Draws, device: torch.device) -> Batch:
        return Batch(self.images[indices].to(device))


def config_of(changes: dict[str, Any]) -> TrainConfig:
    merged = {**CONFIG, **{k: {**CONFIG.get(k, {}), **v} if isinstance(v, dict) else v for k, v in changes.items()}}
    return read(TrainConfig, merged, "config")


def die_at(where: str, count: int) -> None:
    """Half of a write, and the whole of anything else, is done when the process dies."""
    owner, name = POINTS[where]
    real: Callable[..., Any] = getattr(owner, name)
    passed = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal passed
        passed += 1
        if passed < count:
            return real(*args, **kwargs)
        if where == "write":
            real(*args, **kwargs)
            os.truncate(args[1], os.path.getsize(args[1]) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, counted)


def main(folder: str, changes: str, *rest: str) -> int:
    torch.set_num_threads(1)
    if rest and os.environ.get("RANK", "0") == rest[3] and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        die_at(rest[1], int(rest[2]))
    wanted = json.loads(changes)
    until = wanted.pop("until", None)
    config = config_of(wanted)
    try:
        with Ranks.join(config.engine.strategy, "cpu", timeout=60) as ranks:
            Trainer(config, Path(folder), ranks, source=Images()).run(until)
    except PellucidError as error:
        print(f"error[{error.code}]: {error}", file=sys.stderr)
        return 2
    return 0


def elastic(folder: str, changes: str, *rest: str) -> int:
    """As `torchrun --standalone --nproc-per-node=2 --max-restarts=2`, with ranks that are forked and import nothing."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=2,
        start_method="fork",
    )
    elastic_launch(launch, main)(folder, changes, *rest)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
