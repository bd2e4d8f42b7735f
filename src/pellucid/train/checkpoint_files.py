"""The files of a checkpoint: each rank writes its share into one safetensors file, and reads what it needs from any.

This is a storage of torch.distributed.checkpoint, whose planner says which rank writes which part of which tensor, and
which parts make up a tensor on another number of ranks. Its own storages write pickles, or no checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pellucid.core.errors import PellucidError
from pellucid.interop.atomic_files import settle
from pellucid.train.manifest import Chunk, Manifest, Saved, Sealed, sealed, why, writing

Saves = Mapping[str, Saved]


class Writer(StorageWriter):
    """Writes into a folder that does not count yet: the first rank calls `begin` before all, and `end` after all."""

    def __init__(
        self, folder: Path, begin: Callable[[], None], end: Callable[[dict[str, Sealed], Saves], None]
    ) -> None:
        self.folder, self.begin, self.end = folder, begin, end

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            with writing(self.folder):
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
        chunks = {item.index: chunk_of(item, name) for item, _ in kept}
        # Copies, made here: the planner may give views, and safetensors writes no tensors that share memory.
        tensors = {chunks[item.index].key: t.detach().to("cpu", copy=True).contiguous() for item, t in kept}
        seal = None
        if tensors:
            with writing(self.folder):
                save_file(tensors, self.folder / name, metadata={"format": "pt"})
                settle(self.folder / name)
                seal = sealed(self.folder / name)
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(index, 0, (chunk, seal)) for index, chunk in chunks.items()])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, when all have written."""
        chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
        files: dict[str, Sealed] = {}
        for result in (r for of_rank in results for r in of_rank):
            chunk, seal = result.storage_data
            chunks[result.index.fqn].append(chunk)
            files[chunk.file] = seal
        tensors = {
            name: Saved(entry.properties.dtype, tuple(entry.size), tuple(chunks[name]))
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        with writing(self.folder):
            self.end(files, tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class Reader(StorageReader):
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
                        target.copy_(box(file, chunk.key, item))
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


def chunk_of(item: WriteItem, file: str) -> Chunk:
    """Where a part of a tensor goes. A whole tensor keeps its name, so that any reader of safetensors finds it."""
    chunk = item.tensor_data.chunk
    whole = chunk.sizes == item.tensor_data.size
    key = item.index.fqn if whole else f"{item.index.fqn}@{','.join(map(str, chunk.offsets))}"
    return Chunk(file, key, tuple(chunk.offsets), tuple(chunk.sizes))


def box(file: Any, key: str, item: ReadItem) -> torch.Tensor:
    """The part of an entry that an item asks for."""
    if not len(item.lengths):
        return file.get_tensor(key)  # a number has no slices
    pairs = zip(item.storage_offsets, item.lengths, strict=True)
    return file.get_slice(key)[tuple(slice(first, first + length) for first, length in pairs)]
