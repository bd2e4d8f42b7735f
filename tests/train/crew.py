"""Starts ranks as processes of their own, waits for them, and kills them.

They are forked from a server that has torch imported already, so that a start takes milliseconds; each is a process
like any other, with its own environment, and dies of SIGKILL like any other.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

_T = TypeVar("_T")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["rank_worker"])
PATIENCE = 60.0  # seconds until a rank that hangs says where, and ends


def start(world: int, job: Callable[..., Any], *args: Any, says: Path | None = None) -> list[BaseProcess]:
    """`job(*args)` on every rank; what they print goes to the files says.0, says.1, …"""
    # The server reads no sys.path, and would then preload nothing.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)), TORCH_CPP_LOG_LEVEL="ERROR"):
        forkserver.ensure_running()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = [
        FORKS.Process(target=enter, args=(rank, world, port, job, args, says), daemon=True) for rank in range(world)
    ]
    for process in made:
        process.start()
    return made


def wait(processes: list[BaseProcess]) -> list[int | None]:
    """Their exit codes; −9 is a SIGKILL."""
    for process in processes:
        process.join(PATIENCE + 30)
        if process.exitcode is None:
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def run(world: int, job: Callable[..., Any], *args: Any, says: Path | None = None) -> list[int | None]:
    return wait(start(world, job, *args, says=says))


def from_all(value: _T) -> list[_T]:
    """In a rank: the value of every rank, in their order."""
    held = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(held, value)
    return held


def enter(rank: int, world: int, port: int, job: Callable[..., Any], args: tuple[Any, ...], says: Path | None) -> None:
    """What the process does. With one rank there is no torchrun, and so none of its variables."""
    if says is not None:
        handle = os.open(f"{says}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
    if world > 1:
        told = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in told.items()})
    torch.set_num_threads(1)  # threads of the server, if an import made some, are not there after the fork
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        code = job(*args)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def said(says: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(says.parent.glob(says.name + ".*")))
