"""Checkpoints of a run: whole or absent, the newest undamaged one is found, and any number of ranks loads it."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.atomic_files import settle
from pellucid.train.checkpoint_files import Reader, Writer
from pellucid.train.manifest import MANIFEST, Damage, Manifest, Saved, Sealed, verify, why

T = TypeVar("T")
NAME = re.compile(r"step-(\d{8,})")
LEFTOVER = re.compile(r"\.step-\d{8,}\.(part|old)")


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
        found = (NAME.fullmatch(entry.name) for entry in self.folder.iterdir() if entry.is_dir())
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
        manifest = verify(self.path(step))
        if manifest.step != step:
            raise Damage(f"{MANIFEST} is of step {manifest.step}")
        return manifest

    def save(self, step: int, state: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
        """Writes a checkpoint: it is there when this returns, and until then only those before it are."""
        if not 0 <= step < 10**12:
            raise PellucidError(rule("step", "from 0 to 10^12", step), "checkpoint-step")
        part = self.folder / f".step-{step:08d}.part"

        def end(files: Mapping[str, Sealed], tensors: Mapping[str, Saved]) -> None:
            self.place(part, Manifest(step, meta, files, tensors))
            self.known.pop(step, None)
            self.forget(step)

        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        try:
            with together("written"):
                dcp.save(dict(state), storage_writer=Writer(part, lambda: self.begin(part), end), planner=planner)
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
            if LEFTOVER.fullmatch(entry.name):
                shutil.rmtree(entry)

    def place(self, part: Path, manifest: Manifest) -> None:
        """The manifest last, then the name: a checkpoint has its name only when all of it is on the disk."""
        for name, seal in manifest.files.items():
            if not (part / name).is_file() or (part / name).stat().st_size != seal.size:
                line = f"checkpoint folder must be one that all ranks share; {name} of another rank is not in it."
                raise PellucidError(line, "checkpoint-shared")
        (part / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        settle(part / MANIFEST)
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
        """Fills the tensors of a state in place, on any number of ranks; returns what `save` was told as `meta`."""
        manifest = from_first(lambda: self.readable(step))
        together_check(manifest, state)
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with together("read"):
            dcp.load(dict(state), storage_reader=Reader(self.path(step), manifest), planner=planner)
        return dict(manifest.meta)

    def readable(self, step: int) -> Manifest:
        try:
            return self.known.get(step) or self.checked(step)
        except Damage as damage:
            raise PellucidError(
                f"checkpoint must be whole; {self.path(step).name} is not: {damage}.", "checkpoint-damaged"
            ) from None


def together_check(manifest: Manifest, state: Mapping[str, Tensor]) -> None:
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


def from_first(make: Callable[[], T]) -> T:
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
def together(done: str) -> Iterator[None]:
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
