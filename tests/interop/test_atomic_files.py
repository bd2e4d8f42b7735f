"""Files that are whole or absent."""

from __future__ import annotations

import os

import pytest

from pellucid.interop.atomic_files import is_part, put


def test_a_failed_write_leaves_what_was_there(tmp_path):
    goal = tmp_path / "plan.json"
    goal.write_text("old")

    def fail(part):
        part.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        put(goal, fail)
    assert goal.read_text() == "old"
    assert list(tmp_path.iterdir()) == [goal]


def test_a_written_file_has_the_rights_of_any_file(tmp_path):
    put(tmp_path / "mine", "new")
    (tmp_path / "usual").write_text("new")
    assert (tmp_path / "mine").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_link_is_written_through(tmp_path):
    (tmp_path / "real.txt").write_text("old")
    os.symlink(tmp_path / "real.txt", tmp_path / "link.txt")
    put(tmp_path / "link.txt", "new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == "new"


def test_what_a_killed_process_leaves_is_known_and_has_the_suffix(tmp_path):
    seen = []

    def note(part):
        seen.append(part)
        part.write_text("new")

    for name in ("table.json", "no_suffix", ".hidden.txt"):
        put(tmp_path / name, note)
        assert seen[-1].suffix == (tmp_path / name).suffix or name == "no_suffix"
        assert is_part(seen[-1])
        assert not is_part(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden.txt", "no_suffix", "table.json"]
