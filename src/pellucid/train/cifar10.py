"""CIFAR-10 in its official binary form: records of one label byte and 3,072 pixel bytes, red plane first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.train.draws import Draws
from pellucid.train.source import Batch

_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FILES = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)}
_SIDE, RECORD, IN_FILE = 32, 1 + 3 * 32 * 32, 10_000


@dataclass(frozen=True)
class CIFAR10:
    """All images of a split in memory, as bytes: 154 MB of training data."""

    images: Tensor  # (N, 3, 32, 32) uint8
    labels: Tensor  # (N,) int64

    def to(self, device: torch.device) -> CIFAR10:
        return CIFAR10(self.images.to(device), self.labels.to(device))

    @staticmethod
    def read(folder: str | Path, split: Literal["train", "test"] = "train") -> CIFAR10:
        """The split from a folder that holds its .bin files, or holds cifar-10-batches-bin."""
        if split not in FILES:
            raise PellucidError(rule("split", "train or test", split), "data-split")
        base = Path(folder)
        inner = base / "cifar-10-batches-bin"
        base = inner if inner.is_dir() else base
        records = np.concatenate([_records_of(base / name) for name in FILES[split]])
        images = torch.from_numpy(records[:, 1:].reshape(-1, 3, _SIDE, _SIDE).copy())
        return CIFAR10(images, torch.from_numpy(records[:, 0].astype(np.int64)))

    def __len__(self) -> int:
        return len(self.images)


class CIFAR10Source:
    """The images as a source, on the device that trains; with `flip`, half of them are mirrored at random."""

    endless = False

    def __init__(self, data: CIFAR10, flip: bool = True) -> None:
        self.data, self.flip = data, flip

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Tensor, draws: Draws, device: torch.device) -> Batch:
        self.data = self.data.to(device)
        indices = indices.to(device, non_blocking=True)
        images = self.data.images[indices].float() / 127.5 - 1.0  # (B, 3, 32, 32)
        if self.flip:
            mirrored = draws.uniform("flip", (1, 1, 1), device) < 0.5
            images = torch.where(mirrored, images.flip(3), images)
        return Batch(images, self.data.labels[indices])


def _records_of(path: Path) -> np.ndarray:
    """The records of one file, which must be whole."""
    if not path.is_file():
        raise PellucidError(rule("CIFAR-10 folder", f"one that holds {path.name}", str(path.parent)), "data-missing")
    size, wanted = path.stat().st_size, RECORD * IN_FILE
    if size != wanted:
        raise PellucidError(rule(f"size of {path.name}", f"{wanted} bytes", size, "It is cut off."), "data-damaged")
    records = np.fromfile(path, np.uint8).reshape(-1, RECORD)
    if records[:, 0].max() >= len(_CLASSES):
        got = int(records[:, 0].max())
        raise PellucidError(rule(f"labels of {path.name}", f"below {len(_CLASSES)}", got), "data-damaged")
    return records
