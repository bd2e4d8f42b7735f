"""One process at a time in a folder: a lock that the system gives back when its owner ends, however it ends."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from pellucid.core.errors import PellucidError
from pellucid.interop.atomic_files import LOCK, writing

try:
    import fcntl
except ImportError:  # not on POSIX: nothing is locked
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(folder: Path, work: str, share: tuple[int, int] = (0, 1)) -> Iterator[None]:
    """Inside, no other process is in here with the same folder and share; `work` is what is done with the folder
    ("trained"). The folder is made, and removed again if nothing was put into it.

    On a network file system locks may not be known, or only to processes of one machine: there nothing is refused.
    """
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (LOCK if share[1] == 1 else f"{LOCK}-{share[0]}of{share[1]}")
    handle = _taken(path, work)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: who waits for it sees below that it is gone
        os.close(handle)
        if new:
            with suppress(OSError):
                folder.rmdir()


def _taken(path: Path, work: str) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            error = _busy(path.parent, work, os.pread(handle, 4096, 0))
            os.close(handle)
            raise error from None
        except OSError:
            pass  # a file system without locks
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                break
        os.close(handle)  # its owner ended and removed it between the two lines above
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    owner = {"host": socket.gethostname(), "process": os.getpid(), "since": since}
    try:
        with writing(path):
            os.ftruncate(handle, 0)
            os.write(handle, json.dumps(owner).encode())
    except OSError:
        os.close(handle)
        raise
    return handle


def _busy(folder: Path, work: str, said: bytes) -> PellucidError:
    try:
        held: dict[str, Any] = json.loads(said)
        who = f"process {held['process']} on {held['host']} since {held['since']}"
    except (ValueError, KeyError, TypeError):
        who = "another process"
    rule = f"--out must be a folder that no other process works in; {folder} is being {work} by {who}."
    return PellucidError(f"{rule} Wait for it, or choose another --out.", "folder-busy")
