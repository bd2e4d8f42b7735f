"""A sampler study over several processes, here or on a Ray cluster: each makes every so many-th batch of all cells and
writes records of its own. Times are not measured in them: they would disturb each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.study.kernel import MAX_SHARDS
from pellucid.evidence.study.samplers import SamplerStudy, SamplerStudyConfig
from pellucid.evidence.study.samplers_verdict import Judges
from pellucid.evidence.study.subject import Subject

POLL_SECONDS = 1.0  # seconds


@dataclass(frozen=True)
class Share:
    """What one process is told; all of it can be sent to another machine. `folder` must be the same place there."""

    config: SamplerStudyConfig
    folder: str
    index: int
    count: int
    judges: Mapping[str, Any] = field(default_factory=dict)
    device: str | None = None
    threads: int = 0  # of torch; 0 leaves them
    parent: int = 0  # process whose end is this one's too; 0 for none


def make_share(share: Share) -> int:
    """Makes one share; the number of its batches."""
    if share.threads:
        torch.set_num_threads(share.threads)
    subject = Subject.open(share.config.model, dtype=share.config.dtype, device=share.device)
    study = SamplerStudy(share.config, subject, Path(share.folder), (share.index, share.count))
    orphaned = (lambda: os.getppid() != share.parent) if share.parent else (lambda: False)
    study.run(Judges.open(study, **share.judges).scorers, stopped=orphaned)
    if orphaned():
        os._exit(1)  # a pool's process would wait for work for ever
    return len(share.config.firsts((share.index, share.count)))


def over_processes(
    config: SamplerStudyConfig,
    folder: Path,
    count: int,
    *,
    judges: Mapping[str, Any],
    device: str | None = None,
    seen: Callable[[int], object] = lambda batches: None,
) -> None:
    """Runs `count` processes on this machine and waits; `seen` is told how many batches of cells there are."""
    if not 1 <= count <= MAX_SHARDS:
        raise PellucidError(rule("--processes", f"from 1 to {MAX_SHARDS}", count), "shard")
    threads = max(1, (os.cpu_count() or 1) // count)
    shares = [Share(config, str(folder), i, count, dict(judges), device, threads, os.getpid()) for i in range(count)]
    try:
        with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
            waiting = [pool.submit(make_share, share) for share in shares]
            wait_for(waiting, folder, seen)
    except BrokenProcessPool:
        words = "a process of the study must live to its end; one was killed. Run the same again: it goes on."
        raise PellucidError(words, "shard-killed") from None


def wait_for(waiting: list[Future[int]], folder: Path, seen: Callable[[int], object]) -> None:
    """Until all have ended or one has failed, whose error is raised; batches are counted in the records."""
    pending: set[Future[int]] = set(waiting)
    while pending:
        ended, pending = wait(pending, POLL_SECONDS, FIRST_EXCEPTION)
        seen(batches_in(folder))
        for future in ended:
            future.result()


def batches_in(folder: Path) -> int:
    """Batches of cells whose images are there, of all processes."""
    return sum(path.read_bytes().count(b'"what": "pictures"') for path in folder.glob("records*.jsonl"))


def over_ray(
    config: SamplerStudyConfig, folder: Path, count: int, *, judges: Mapping[str, Any], device: str | None = None
) -> None:
    """The same as tasks of Ray. The folder and the model must be in reach of every machine under these names."""
    try:
        import ray
    except ImportError:
        advice = "Install it: pip install ray. Or use --processes."
        raise PellucidError(f"ray must be installed to work over it; got none. {advice}", "missing-extra") from None
    if not 1 <= count <= MAX_SHARDS:
        raise PellucidError(rule("--ray", f"from 1 to {MAX_SHARDS}", count), "shard")
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    gpus = 1 if device is not None and device.startswith("cuda") else 0
    task = ray.remote(num_gpus=gpus)(make_share) if gpus else ray.remote(make_share)
    place = str(folder.resolve())
    ray.get([task.remote(Share(config, place, i, count, dict(judges), device)) for i in range(count)])
