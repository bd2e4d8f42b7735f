"""The manifest of a checkpoint: what was written, to the bit, so that damage is seen before it is loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from pellucid.core.errors import PellucidError
from pellucid.core.reader import parse_object, read_text
from pellucid.interop.atomic_files import settle as settle

MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 64 << 20
READ_BYTES = 1 << 20
KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
DTYPES = {str(kind).removeprefix("torch."): kind for kind in (*KINDS, torch.int8, torch.uint8, torch.bool)}


class Damage(Exception):  # noqa: N818
    """A checkpoint that is not what was written; the words say how."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the entry of a file that holds it."""

    file: str
    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Saved:
    """One tensor of a checkpoint, whole or in parts."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def to_plain(self) -> dict[str, Any]:
        chunks = [[c.file, c.key, list(c.offsets), list(c.shape)] for c in self.chunks]
        return {"dtype": str(self.dtype).removeprefix("torch."), "shape": list(self.shape), "chunks": chunks}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Saved:
        chunks = tuple(Chunk(file, key, tuple(at), tuple(shape)) for file, key, at, shape in plain["chunks"])
        return Saved(DTYPES[plain["dtype"]], tuple(plain["shape"]), chunks)


@dataclass(frozen=True)
class Sealed:
    """A file's size and SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint is: its step, what the run says of itself, its files, and where each tensor lies."""

    step: int
    meta: Mapping[str, Any]
    files: Mapping[str, Sealed]
    tensors: Mapping[str, Saved]

    def to_json(self) -> str:
        body = {
            "format": FORMAT,
            "step": self.step,
            "meta": dict(self.meta),
            "files": {name: [seal.size, seal.sha256] for name, seal in self.files.items()},
            "tensors": {name: saved.to_plain() for name, saved in self.tensors.items()},
        }
        return json.dumps({"sha256": digest_of(body), **body}, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        try:
            body = parse_object(text, MANIFEST)
            claimed = body.pop("sha256")
            if claimed != digest_of(body):
                raise Damage(f"{MANIFEST} differs from its checksum")
            files = {name: Sealed(size, sha256) for name, (size, sha256) in body["files"].items()}
            tensors = {name: Saved.from_plain(saved) for name, saved in body["tensors"].items()}
            manifest = Manifest(body["step"], body["meta"], files, tensors)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise Damage(f"{MANIFEST} is not readable") from None
        held = {chunk.file for saved in tensors.values() for chunk in saved.chunks}
        if body["format"] != FORMAT or held - set(files) or any(Path(name).name != name for name in files):
            raise Damage(f"{MANIFEST} is not of this version")
        return manifest


def digest_of(body: Mapping[str, Any]) -> str:
    """Of the values as JSON gives them back: there a key is always text."""
    plain = json.loads(json.dumps(body, allow_nan=False))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def sealed(path: Path) -> Sealed:
    """Reads a file through: its size and checksum."""
    found, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            found.update(part)
            size += len(part)
    return Sealed(size, found.hexdigest())


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        if not os.path.lexists(path):
            raise Damage(f"{MANIFEST} is missing")
        return Manifest.from_json(read_text(path, MANIFEST, MAX_MANIFEST_BYTES))
    except PellucidError as error:
        raise Damage(f"{MANIFEST} is not readable ({error})") from None


def verify(folder: Path) -> Manifest:
    """The manifest, when every file of it is there to the last bit; Damage otherwise."""
    manifest = read_manifest(folder)
    for name, claimed in manifest.files.items():
        path = folder / name
        try:
            if path.stat().st_size != claimed.size:
                raise Damage(f"{name} has {path.stat().st_size} bytes, {claimed.size} were written")
            if sealed(path) != claimed:
                raise Damage(f"{name} differs from its checksum")
        except FileNotFoundError:
            raise Damage(f"{name} is missing") from None
        except OSError as error:
            raise Damage(f"{name} is not readable ({why(error)})") from None
    return manifest


def why(error: BaseException) -> str:
    """An error of the system in its own few words, without paths."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What the system refuses, a full disk above all, as one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        line = f"checkpoint must be written; {folder.parent.name}/{folder.name} was not: {why(error)}."
        raise PellucidError(line, "checkpoint-write") from None
