"""Checkpoints of a run: whole or absent, the newest undamaged one is found, and any number of ranks loads it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import parse_object, read_text
from pellucid.interop.atomic_files import settle

# --- Manifest -------------------------------------------------------------------------------------------------------

_MANIFEST = "manifest.json"
_FORMAT = 1
_MAX_MANIFEST_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
_DTYPES = {str(kind).removeprefix("torch."): kind for kind in (*_KINDS, torch.int8, torch.uint8, torch.bool)}


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
class TensorEntry:
    """One tensor of a checkpoint, whole or in parts."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def to_plain(self) -> dict[str, Any]:
        chunks = [[c.file, c.key, list(c.offsets), list(c.shape)] for c in self.chunks]
        return {"dtype": str(self.dtype).removeprefix("torch."), "shape": list(self.shape), "chunks": chunks}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> TensorEntry:
        chunks = tuple(Chunk(file, key, tuple(at), tuple(shape)) for file, key, at, shape in plain["chunks"])
        return TensorEntry(_DTYPES[plain["dtype"]], tuple(plain["shape"]), chunks)


@dataclass(frozen=True)
class FileSeal:
    """A file's size and SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint: its step, the run's metadata, its files, and where each tensor is stored."""

    step: int
    meta: Mapping[str, Any]
    files: Mapping[str, FileSeal]
    tensors: Mapping[str, TensorEntry]

    def to_json(self) -> str:
        body = {
            "format": _FORMAT,
            "step": self.step,
            "meta": dict(self.meta),
            "files": {name: [seal.size, seal.sha256] for name, seal in self.files.items()},
            "tensors": {name: saved.to_plain() for name, saved in self.tensors.items()},
        }
        return json.dumps({"sha256": _digest_of(body), **body}, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        try:
            body = parse_object(text, _MANIFEST)
            claimed = body.pop("sha256")
            if claimed != _digest_of(body):
                raise Damage(f"{_MANIFEST} differs from its checksum")
            files = {name: FileSeal(size, sha256) for name, (size, sha256) in body["files"].items()}
            tensors = {name: TensorEntry.from_plain(saved) for name, saved in body["tensors"].items()}
            manifest = Manifest(body["step"], body["meta"], files, tensors)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise Damage(f"{_MANIFEST} is not readable") from None
        held = {chunk.file for saved in tensors.values() for chunk in saved.chunks}
        if body["format"] != _FORMAT or held - set(files) or any(Path(name).name != name for name in files):
            raise Damage(f"{_MANIFEST} is not of this version")
        return manifest


def _digest_of(body: Mapping[str, Any]) -> str:
    """Of the values as JSON gives them back: there a key is always text."""
    plain = json.loads(json.dumps(body, allow_nan=False))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _seal_of(path: Path) -> FileSeal:
    """Reads a file through: its size and checksum."""
    found, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            found.update(part)
            size += len(part)
    return FileSeal(size, found.hexdigest())


def read_manifest(folder: Path) -> Manifest:
    path = folder / _MANIFEST
    try:
        if not os.path.lexists(path):
            raise Damage(f"{_MANIFEST} is missing")
        return Manifest.from_json(read_text(path, _MANIFEST, _MAX_MANIFEST_BYTES))
    except PellucidError as error:
        raise Damage(f"{_MANIFEST} is not readable ({error})") from None


def _verify(folder: Path) -> Manifest:
    """The manifest, when every file of it is there to the last bit; Damage otherwise."""
    manifest = read_manifest(folder)
    for name, claimed in manifest.files.items():
        path = folder / name
        try:
            if path.stat().st_size != claimed.size:
                raise Damage(f"{name} has {path.stat().st_size} bytes, {claimed.size} were written")
            if _seal_of(path) != claimed:
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
def _writing(folder: Path) -> Iterator[None]:
    """What the system refuses, a full disk above all, as one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        line = f"checkpoint must be written; {folder.parent.name}/{folder.name} was not: {why(error)}."
        raise PellucidError(line, "checkpoint-write") from None


# --- Files of a checkpoint ------------------------------------------------------------------------------------------

_Saves = Mapping[str, TensorEntry]


class _Writer(StorageWriter):
    """Writes into a folder that does not count yet: the first rank calls `begin` before all, and `end` after all."""

    def __init__(
        self, folder: Path, begin: Callable[[], None], end: Callable[[dict[str, FileSeal], _Saves], None]
    ) -> None:
        self.folder, self.begin, self.end = folder, begin, end

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            with _writing(self.folder):
                self.begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"rank-{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = str(plan.storage_data)
        kept = [(item, planner.resolve_data(item)) for item in plan.items]
        # The empty share of a tensor with fewer rows than ranks is no entry of a file.
        kept = [(item, tensor) for item, tensor in kept if tensor.numel() or not item.tensor_data.size.numel()]
        chunks = {item.index: _chunk_of(item, name) for item, _ in kept}
        # Copies, made here: the planner may give views, and safetensors writes no tensors that share memory.
        tensors = {chunks[item.index].key: t.detach().to("cpu", copy=True).contiguous() for item, t in kept}
        seal = None
        if tensors:
            with _writing(self.folder):
                save_file(tensors, self.folder / name, metadata={"format": "pt"})
                settle(self.folder / name)
                seal = _seal_of(self.folder / name)
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(index, 0, (chunk, seal)) for index, chunk in chunks.items()])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, when all have written."""
        chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
        files: dict[str, FileSeal] = {}
        for result in (r for of_rank in results for r in of_rank):
            chunk, seal = result.storage_data
            chunks[result.index.fqn].append(chunk)
            files[chunk.file] = seal
        tensors = {
            name: TensorEntry(entry.properties.dtype, tuple(entry.size), tuple(chunks[name]))
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        with _writing(self.folder):
            self.end(files, tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _Reader(StorageReader):
    """Each rank reads the boxes that it needs, from whichever files hold them."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.places = {(name, c.offsets): c for name, saved in manifest.tensors.items() for c in saved.chunks}

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries: dict[str, Any] = {}
        for name, saved in self.manifest.tensors.items():
            boxes = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.shape)) for c in saved.chunks]
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=saved.dtype), torch.Size(saved.shape), boxes)
        return Metadata(entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[ReadItem, Chunk]]] = {}
        for item in plan.items:
            chunk = self.places[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            by_file.setdefault(chunk.file, []).append((item, chunk))
        for name, wanted in by_file.items():
            try:
                with safe_open(self.folder / name, framework="pt") as file:
                    for item, chunk in wanted:
                        target = planner.resolve_tensor(item).detach()
                        target.copy_(_box(file, chunk.key, item))
                        planner.commit_tensor(item, target)
            except (OSError, SafetensorError) as error:
                raise PellucidError(
                    f"checkpoint must be readable; {name} is not: {why(error)}.", "checkpoint-read"
                ) from None
        read: Future[None] = Future()
        read.set_result(None)
        return read

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _chunk_of(item: WriteItem, file: str) -> Chunk:
    """Where a part of a tensor goes. A whole tensor keeps its name, so that any reader of safetensors finds it."""
    chunk = item.tensor_data.chunk
    whole = chunk.sizes == item.tensor_data.size
    key = item.index.fqn if whole else f"{item.index.fqn}@{','.join(map(str, chunk.offsets))}"
    return Chunk(file, key, tuple(chunk.offsets), tuple(chunk.sizes))


def _box(file: Any, key: str, item: ReadItem) -> torch.Tensor:
    """The part of an entry that an item asks for."""
    if not len(item.lengths):
        return file.get_tensor(key)  # a number has no slices
    pairs = zip(item.storage_offsets, item.lengths, strict=True)
    return file.get_slice(key)[tuple(slice(first, first + length) for first, length in pairs)]


# --- Checkpoints of a run -------------------------------------------------------------------------------------------

_T = TypeVar("_T")
_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(part|old)")


class Checkpoints:
    """The checkpoints in one folder, which all ranks see. Every method is called by all ranks together.

    A state is a flat dict of tensors: plain ones are the same on all ranks and written once, DTensors by shards.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise PellucidError(rule("keep", "at least 1", keep), "checkpoint-keep")
        self.folder, self.keep = folder, keep
        self.damaged: list[str] = []  # "step-00001234: rank-00000.safetensors is missing"
        self.known: dict[int, Manifest] = {}  # verified by this process

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, whole or damaged, the newest first."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir() if entry.is_dir())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def latest(self) -> int | None:
        """The newest step whose checkpoint is whole and undamaged; what was passed over is in `damaged`."""
        found, self.damaged = from_first(self.search)
        return found

    def search(self) -> tuple[int | None, list[str]]:
        damaged: list[str] = []
        for step in self.steps():
            try:
                self.known[step] = self.checked(step)
                return step, damaged
            except Damage as damage:
                damaged.append(f"{self.path(step).name}: {damage}")
        return None, damaged

    def checked(self, step: int) -> Manifest:
        manifest = _verify(self.path(step))
        if manifest.step != step:
            raise Damage(f"{_MANIFEST} is of step {manifest.step}")
        return manifest

    def save(self, step: int, state: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
        """Writes a checkpoint: it is there when this returns, and until then only those before it are."""
        if not 0 <= step < 10**12:
            raise PellucidError(rule("step", "from 0 to 10^12", step), "checkpoint-step")
        part = self.folder / f".step-{step:08d}.part"

        def end(files: Mapping[str, FileSeal], tensors: Mapping[str, TensorEntry]) -> None:
            self.place(part, Manifest(step, meta, files, tensors))
            self.known.pop(step, None)
            self.forget(step)

        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        try:
            with _together("written"):
                dcp.save(dict(state), storage_writer=_Writer(part, lambda: self.begin(part), end), planner=planner)
        except PellucidError:
            shutil.rmtree(part, ignore_errors=True)  # a full disk is given its room back
            raise
        return self.path(step)

    def begin(self, part: Path) -> None:
        """Takes away what killed runs left, and makes room for a new one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clear()
        part.mkdir()

    def clear(self) -> None:
        """Takes away what killed runs left."""
        for entry in self.folder.iterdir() if self.folder.is_dir() else ():
            if _LEFTOVER.fullmatch(entry.name):
                shutil.rmtree(entry)

    def place(self, part: Path, manifest: Manifest) -> None:
        """The manifest last, then the name: a checkpoint has its name only when all of it is on the disk."""
        for name, seal in manifest.files.items():
            if not (part / name).is_file() or (part / name).stat().st_size != seal.size:
                line = f"checkpoint folder must be one that all ranks share; {name} of another rank is not in it."
                raise PellucidError(line, "checkpoint-shared")
        (part / _MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        settle(part / _MANIFEST)
        settle(part)
        final = self.path(manifest.step)
        if final.exists():  # a damaged one: no run comes to a step for which it has a good one
            os.rename(final, self.folder / f".{final.name}.old")
        os.rename(part, final)
        settle(self.folder)

    def forget(self, newest: int) -> None:
        """Removes the damaged and the oldest. Each loses its name first, so that none is ever half there."""
        bad = {line.split(":")[0] for line in self.damaged}
        good = [step for step in self.steps() if self.path(step).name not in bad or step == newest]
        for step in set(self.steps()) - set(good[: self.keep]) - {newest}:
            os.rename(self.path(step), self.folder / f".{self.path(step).name}.old")
        self.clear()

    def load(self, step: int, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fills the tensors of a state in place, on any number of ranks; returns the `meta` given to `save`."""
        manifest = from_first(lambda: self.readable(step))
        _together_check(manifest, state)
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _together("read"):
            dcp.load(dict(state), storage_reader=_Reader(self.path(step), manifest), planner=planner)
        return dict(manifest.meta)

    def readable(self, step: int) -> Manifest:
        try:
            return self.known.get(step) or self.checked(step)
        except Damage as damage:
            raise PellucidError(
                f"checkpoint must be whole; {self.path(step).name} is not: {damage}.", "checkpoint-damaged"
            ) from None


def _together_check(manifest: Manifest, state: Mapping[str, Tensor]) -> None:
    """Refuses a state with other names, shapes or dtypes, before anything is written into it."""
    if set(state) != set(manifest.tensors):
        missing, extra = sorted(set(state) - set(manifest.tensors)), sorted(set(manifest.tensors) - set(state))
        words = [
            f"{len(names)} {what} ({names[0]}, …)" for names, what in ((missing, "missing"), (extra, "extra")) if names
        ]
        raise PellucidError(
            rule("checkpoint", "of the same network and optimizer", ", ".join(words)), "checkpoint-state"
        )
    for name, tensor in state.items():
        saved = manifest.tensors[name]
        if tuple(tensor.shape) != saved.shape or tensor.dtype != saved.dtype:
            must = f"{saved.dtype} {saved.shape}, as in the checkpoint"
            raise PellucidError(rule(name, must, f"{tensor.dtype} {tuple(tensor.shape)}"), "checkpoint-state")


def from_first(make: Callable[[], _T]) -> _T:
    """What the first rank makes, on every rank; when it fails, all fail with its line."""
    held: list[Any] = [None, None]
    alone = not dist.is_initialized()
    if alone or dist.get_rank() == 0:
        try:
            held[0] = make()
        except OSError as error:
            held[1] = PellucidError(f"checkpoints must be readable; they are not: {why(error)}.", "checkpoint-read")
        except PellucidError as error:
            held[1] = error
    if not alone:
        dist.broadcast_object_list(held, src=0)
    if held[1] is not None:
        raise held[1]
    return held[0]


@contextmanager
def _together(done: str) -> Iterator[None]:
    """What went wrong on any rank, as one line on all of them."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        if isinstance(error, PellucidError | KeyboardInterrupt):
            raise error from None
        line = f"checkpoint must be {done} by all ranks; rank {rank} failed: {type(error).__name__}: {why(error)}."
        raise PellucidError(line, "checkpoint-failed") from None
