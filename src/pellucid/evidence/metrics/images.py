"""Sets of images to score: folders of files, arrays in a file, CIFAR-10."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import open_file
from pellucid.evidence.metrics.fid import FORMAT, Statistics
from pellucid.interop import weights
from pellucid.interop.source import expanded
from pellucid.pipeline import images
from pellucid.train.cifar10 import CIFAR10

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_SPLITS: tuple[Literal["train"], Literal["test"]] = ("train", "test")
MAX_IMAGES = 1_000_000
MAX_BYTES = 32 * 2**30  # of an array in a file, unpacked
_READERS = 4  # threads that decode files
_CHUNK = 256  # files, or images of an array, at once
_KINDS = "a folder of images, FOLDER:train or FOLDER:test of CIFAR-10, an .npz or .safetensors file"
_A = TypeVar("_A")
Skip = Callable[[int, str], object]  # the number of an image that could not be read, and why


class ImageSet(Protocol):
    """Images in a fixed order."""

    name: str

    def __len__(self) -> int: ...

    def chunks(self, skip: Skip) -> Iterator[Tensor]:
        """(B, 3, H, W) uint8, one size in each; those that cannot be read are passed to `skip` and left out."""

    def digest(self) -> str:
        """A name for what is in it: SHA-256."""


@dataclass(frozen=True)
class Pixels:
    """Images (N, 3, H, W) uint8 in memory."""

    images: Tensor = field(repr=False)
    name: str = "images"

    def __len__(self) -> int:
        return len(self.images)

    def chunks(self, skip: Skip) -> Iterator[Tensor]:
        yield from self.images.split(_CHUNK)

    def digest(self) -> str:
        found = hashlib.sha256(repr(tuple(self.images.shape)).encode())
        for part in self.images.split(_CHUNK):
            found.update(part.cpu().contiguous().numpy().tobytes())
        return found.hexdigest()


@dataclass(frozen=True)
class Folder:
    """Image files in the order of their names, folders within folders included."""

    root: Path
    files: tuple[str, ...] = field(repr=False)  # relative to the root, with / between the parts

    @property
    def name(self) -> str:
        return str(self.root)

    def __len__(self) -> int:
        return len(self.files)

    def chunks(self, skip: Skip) -> Iterator[Tensor]:
        with ThreadPoolExecutor(_READERS) as pool:
            for start in range(0, len(self.files), _CHUNK):
                run: list[Tensor] = []
                for number, found in enumerate(pool.map(self.read, self.files[start : start + _CHUNK]), start):
                    if isinstance(found, str):
                        skip(number, found)
                        continue
                    if run and run[0].shape != found.shape:
                        yield torch.stack(run)
                        run = []
                    run.append(found)
                if run:
                    yield torch.stack(run)

    def read(self, file: str) -> Tensor | str:
        """(3, H, W) uint8, what is transparent on white; or why it cannot be read."""
        try:
            image = images.flatten(images.read(self.root / file, file))
        except PellucidError as error:
            return str(error)
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).contiguous()

    def digest(self) -> str:
        found = hashlib.sha256()
        for file in self.files:
            with open_file(self.root / file, file) as opened:
                inner = hashlib.file_digest(opened, "sha256").hexdigest()
            found.update(f"{file}\0{inner}\n".encode())
        return found.hexdigest()


def open_images(where: str | Path) -> ImageSet | Statistics:
    """The set that a path means, or the statistics that it holds."""
    name = str(where)
    path = expanded(name)
    if path.is_dir():
        return folder_of(path)
    if path.is_file():
        return _array_of(path)
    base, colon, split = name.rpartition(":")
    if colon and split in _SPLITS and expanded(base).is_dir():
        return Pixels(CIFAR10.read(expanded(base), split).images, name)  # type: ignore[arg-type]
    raise PellucidError(rule("images", _KINDS, name, "There is none of that name."), "not-found")


def folder_of(root: Path) -> Folder:
    """All images in a folder. What is hidden is left out; links to folders are not followed."""
    found: list[str] = []
    for place, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = Path(place).relative_to(root)
        named = (name for name in files if name.lower().endswith(SUFFIXES) and not name.startswith("."))
        found += [(inside / name).as_posix() for name in named]
        if len(found) > MAX_IMAGES:
            raise PellucidError(rule(f"images in {root}", f"at most {MAX_IMAGES}", len(found)), "pictures-many")
    if not found:
        cifar = any((base / "test_batch.bin").is_file() for base in (root, root / "cifar-10-batches-bin"))
        advice = f"It is CIFAR-10: name {root}:train or {root}:test." if cifar else ""
        must = f"a folder that holds {', '.join(SUFFIXES)}"
        raise PellucidError(rule("images", must, str(root), advice), "pictures-empty")
    return Folder(root, tuple(sorted(found)))


def _array_of(path: Path) -> Pixels | Statistics:
    """The array in a file, or the statistics that a safetensors file holds."""
    if path.suffix == ".npz":
        return Pixels(_as_images(_npz_array(path), path), str(path))
    if path.suffix != ".safetensors":
        raise PellucidError(rule("images", _KINDS, str(path)), "pictures-file")
    if weights.metadata_of(path).get("format") == FORMAT:
        return Statistics.load(path)
    tensors = weights.read_safetensors(path)
    found = _only({name: tensor for name, tensor in tensors.items() if tensor.ndim == 4}, path)
    _check_dtype(str(found.dtype).removeprefix("torch."), path)
    return Pixels(_as_images(found, path), str(path))


def _npz_array(path: Path) -> Tensor:
    """The only array of four dimensions, or the one called images or arr_0; nothing pickled is read."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_BYTES:
            raise PellucidError(rule(path.name, f"at most {MAX_BYTES} bytes unpacked", size), "pictures-many")
        with np.load(path, allow_pickle=False) as held:
            arrays = {name: array for name in held.files if (array := held[name]).ndim == 4}
    except (zipfile.BadZipFile, zipfile.LargeZipFile, OSError, ValueError, EOFError, KeyError) as error:
        if isinstance(error, PellucidError):
            raise
        words = f"{path.name} must be a whole .npz file of plain arrays. {images.first_line(error)}"
        raise PellucidError(words, "pictures-file") from None
    found = _only(arrays, path)
    _check_dtype(found.dtype.name, path)
    return torch.from_numpy(found)


def _only(arrays: dict[str, _A], path: Path) -> _A:
    for name in ("images", "arr_0"):
        if name in arrays:
            return arrays[name]
    if len(arrays) != 1:
        must = "one array of four dimensions, or one called images"
        raise PellucidError(rule(f"arrays in {path.name}", must, sorted(arrays) or "none"), "pictures-file")
    return next(iter(arrays.values()))


def _as_images(array: Tensor, path: Path) -> Tensor:
    """(N, 3, H, W) from that or from (N, H, W, 3)."""
    shape = tuple(array.shape)
    first, last = shape[1] == 3, shape[3] == 3
    if first == last or 0 in shape:
        must = "(N, H, W, 3) or (N, 3, H, W), and not both"
        raise PellucidError(rule(f"shape of {path.name}", must, shape), "picture-shape")
    if len(array) > MAX_IMAGES:
        raise PellucidError(rule(f"images in {path.name}", f"at most {MAX_IMAGES}", len(array)), "pictures-many")
    return array if first else array.permute(0, 3, 1, 2)


def _check_dtype(dtype: str, path: Path) -> None:
    if dtype != "uint8":
        raise PellucidError(rule(f"dtype of {path.name}", "uint8, 0 to 255", dtype), "picture-dtype")
