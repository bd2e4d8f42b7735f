"""The folder of a sampler study: config.json, records a shard, sheets of images, the latents of converged runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.adherence import tiles
from pellucid.evidence.study import records
from pellucid.evidence.study.cells import Cell
from pellucid.evidence.study.records import CONFIG, ELSEWHERE, Records
from pellucid.interop import weights
from pellucid.interop.atomic_files import file_digest, is_left, put

KIND, VERSION = "samplers", 1
KEYS = ("cell", "first", "what")
IMAGES, LATENTS, FEATURES = "pictures", "latents", "features"


def check_folder(folder: Path, config: Mapping[str, Any], fixed: Sequence[str]) -> None:
    """Refuses a folder of another study, version, model or config, and one that holds other things."""
    path = folder / CONFIG
    if not path.exists():
        if folder.exists() and not (folder.is_dir() and all(map(is_left, folder.iterdir()))):
            raise PellucidError(rule("--out", "empty, new, or a study of this config", str(folder)), "out-taken")
        return
    held = read_config(folder)
    if held.get("mark") != config["mark"]:
        raise PellucidError(rule("model", f"the one that began {folder}", config["model"], ELSEWHERE), "resume-model")
    other = [name for name in fixed if held.get(name) != config[name]]
    if other:
        got = f"another {', '.join(other)}"
        raise PellucidError(f"config must be the one that began {folder}; got {got}. {ELSEWHERE}", "resume-config")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a sampler study of this version."""
    path = folder / CONFIG
    if not path.is_file():
        raise PellucidError(rule("study", "a folder of a sampler study", str(folder)), "study-folder")
    held = records.read_config(folder)
    records.check_kind(folder, held, KIND, VERSION)
    return held


class Files:
    """What a study has so far: its own records and those of all other shards, which it reads and does not write."""

    def __init__(self, folder: Path, shard: tuple[int, int] = (0, 1)) -> None:
        self.folder = folder
        self.own = Records.shared(folder, KEYS, shard)
        self.rows = {(row["cell"], row["first"], row["what"]): row for row in self.own.rows}
        self.digests: dict[str, str] = {}  # of files, by their place in the folder
        for row in self.own.rows:
            files = row.get("files")
            self.digests |= {str(k): str(v) for k, v in files.items()} if isinstance(files, dict) else {}
        self.fresh: dict[str, str] = {}  # of those that no row has yet
        self.unchecked: set[str] = set()  # files that were read and have none

    def has(self, cell: str, first: int, what: str) -> bool:
        return (cell, first, what) in self.rows

    def row(self, cell: str, first: int, what: str) -> dict[str, Any]:
        return self.rows[cell, first, what]

    def add(self, cell: str, first: int, what: str, values: Mapping[str, Any]) -> None:
        row = {"cell": cell, "first": first, "what": what, **values, **({"files": self.fresh} if self.fresh else {})}
        self.fresh = {}
        self.own.add(row)
        self.rows[cell, first, what] = row

    def claim(self, config: Mapping[str, Any]) -> None:
        """The folder is this study's; samplers and steps of another call are added to what it says."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
        path = self.folder / CONFIG
        if not path.is_file() or path.read_text("utf-8") != text:
            put(path, text)

    # --- images, latents, features ------------------------------------------------------------------------------

    def place(self, kind: str, cell: Cell, first: int, suffix: str) -> Path:
        return self.folder / kind / cell.folder / f"{first:06d}{suffix}"

    def write_images(self, cell: Cell, first: int, images: Sequence[Image.Image]) -> None:
        path = self.place(IMAGES, cell, first, ".png")
        tiles.write([image.convert("RGB") for image in images], path)
        self.note(path)

    def images(self, cell: Cell, first: int, count: int) -> list[Image.Image]:
        return tiles.read(self.checked(self.place(IMAGES, cell, first, ".png")), count)

    def write_latents(self, cell: Cell, first: int, latents: Tensor) -> None:
        self.write_tensor(self.place(LATENTS, cell, first, ".safetensors"), latents)

    def latents(self, cell: Cell, first: int) -> Tensor:
        return weights.read_safetensors(self.checked(self.place(LATENTS, cell, first, ".safetensors")))["held"]

    def write_features(self, cell: Cell, first: int, what: str, features: Tensor) -> None:
        self.write_tensor(self.place(f"{FEATURES}/{what}", cell, first, ".safetensors"), features)

    def features(self, cell: Cell, first: int, what: str) -> Tensor:
        path = self.place(f"{FEATURES}/{what}", cell, first, ".safetensors")
        return weights.read_safetensors(self.checked(path))["held"]

    def note(self, path: Path) -> None:
        """The next row says what is in this file."""
        name = path.relative_to(self.folder).as_posix()
        self.digests[name] = self.fresh[name] = file_digest(path)

    def checked(self, path: Path) -> Path:
        """A file that is as it was written: what changed since is refused by name."""
        name = path.relative_to(self.folder).as_posix()
        if not path.is_file() or self.digests.get(name, "") not in ("", file_digest(path)):
            got = "other bytes" if path.is_file() else "no file"
            advice = "Remove the lines that name it from records*.jsonl: its batch is then made again."
            line = f"{name} of {self.folder} must be as the study wrote it; got {got}. {advice}"
            raise PellucidError(line, "study-damaged")
        if name not in self.digests:
            self.unchecked.add(name)
        return path

    def write_tensor(self, path: Path, held: Tensor) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, partial(save_file, {"held": held.detach().to(torch.float32).cpu().contiguous()}))
        self.note(path)
