"""The folder of this process's studio: only its owner can read it, and it is removed when the process ends.

A lock in it, held as long as the process lives, tells the next studio which folders were left behind.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks: there, nothing that was left behind is removed
    fcntl = None  # type: ignore[assignment]

_PREFIX, LOCK = "pellucid-studio-", "lock"
_TRIES = 5  # at removing what a last thread may still write to
_held: dict[Path, int] = {}  # the folder and its open lock


def folder() -> Path:
    """Mode 0700; also gradio's folder for uploads and downloads. It is created when it is first needed."""
    if not _held:
        _remove_leftovers()
        while not _held:
            place = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
            lock = _lock(place)
            if lock is not None:
                _held[place] = lock
        atexit.register(remove)
    place = next(iter(_held))
    os.environ["GRADIO_TEMP_DIR"] = str(place)
    return place


def remove() -> None:
    """With all that is in it."""
    while _held:
        place, lock = _held.popitem()
        for _ in range(_TRIES):
            shutil.rmtree(place, ignore_errors=True)
            if not place.exists():
                break
            time.sleep(0.1)
        os.close(lock)


def _remove_leftovers() -> None:
    """Removes the folders of studios that were killed; those of other users and of running studios stay."""
    for place in Path(tempfile.gettempdir()).glob(_PREFIX + "*") if fcntl else ():
        with contextlib.suppress(OSError):
            if place.is_symlink() or not place.is_dir() or place.stat().st_uid != os.getuid():
                continue
            lock = _lock(place)
            if lock is not None:
                shutil.rmtree(place, ignore_errors=True)
                os.close(lock)


def _lock(place: Path) -> int | None:
    """The lock of a folder, or None where another process has it or took the folder away."""
    try:
        lock = os.open(place / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None
    try:
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(place / LOCK)):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None
