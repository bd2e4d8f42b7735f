"""One process at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pellucid.core.errors import PellucidError
from pellucid.interop.atomic_files import LOCK, is_left
from pellucid.interop.lock import locked

HOLD = """
import sys, time
from pathlib import Path
from pellucid.interop.lock import locked
with locked(Path(sys.argv[1]), "trained"):
    print("held", flush=True)
    time.sleep(60)
"""


def refusal(folder: Path) -> str:
    with pytest.raises(PellucidError) as caught, locked(folder, "trained"):
        pass
    assert caught.value.code == "folder-busy"
    return str(caught.value)


def test_the_second_is_told_who_is_in_there_and_a_dead_owner_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        told = refusal(folder)
        who = rf"is being trained by process {owner.pid} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d\."
        assert re.search(rf"; {re.escape(str(folder))} {who} Wait for it, or choose another --out\.$", told)
    finally:
        owner.kill()  # SIGKILL: it cannot tidy up
        owner.communicate()
    assert (folder / LOCK).is_file()
    assert is_left(folder / LOCK)
    with locked(folder, "trained"):
        assert f'"process": {os.getpid()}' in (folder / LOCK).read_text()
    assert list(folder.iterdir()) == []


def test_it_ends_with_the_block_and_an_empty_folder_with_it(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path / "new", "trained"):
            refusal(tmp_path / "new")
        assert not (tmp_path / "new").exists()
    with locked(tmp_path / "new", "trained"):
        (tmp_path / "new" / "kept").touch()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["kept"]


def test_shares_are_apart_and_each_is_alone(tmp_path: Path) -> None:
    with locked(tmp_path, "written", (0, 2)), locked(tmp_path, "written", (1, 2)), locked(tmp_path, "written"):
        for share in ((0, 2), (1, 2)):
            with pytest.raises(PellucidError, match="is being written"), locked(tmp_path, "written", share):
                pass
        assert all(map(is_left, tmp_path.iterdir()))


def test_a_lock_that_was_removed_while_it_was_waited_for_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner ends between our open and our flock: we hold a file that has no name any more."""
    real, gone = fcntl.flock, []

    def late(handle: int, how: int) -> None:
        real(handle, how)
        if not gone:
            gone.append((tmp_path / LOCK).unlink())

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path, "trained"):
        assert gone
        refusal(tmp_path)


def test_a_file_system_without_locks_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with locked(tmp_path, "trained"), locked(tmp_path, "trained"):
        pass
    assert list(tmp_path.iterdir()) == []
