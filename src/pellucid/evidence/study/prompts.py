"""What a study asks for: the lines of a text file, or captions of scenes that training never saw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pellucid import scenes
from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import read_text, whole
from pellucid.scenes.query import Query

MAX_BYTES = 64 * 2**20  # of a file
MOST = 1_000_000
SCENES = "scenes:"


def read_prompts(where: str | Path | None) -> tuple[str, ...]:
    """The lines of a text file that are not empty; `scenes:200`: so many prompts of scenes that training never saw."""
    if where is None:
        return ()
    text = str(where)
    if text.startswith(SCENES) and not Path(text).exists():
        count = text.removeprefix(SCENES)
        if not whole(count, MOST):
            raise PellucidError(rule("prompts", f"scenes:N, N from 1 to {MOST:,}", text), "prompts")
        return tuple(caption for caption, _ in scenes.prompts(int(count)))
    return lines_of(Path(where), "scenes:N")


def lines_of(path: Path, other: str) -> tuple[str, ...]:
    """The lines of a text file that are not empty; `other` is what may be named in place of a file."""
    if not path.is_file():
        raise PellucidError(rule("prompts", f"a text file that exists, or {other}", str(path)), "file")
    lines = read_text(path, "prompts", MAX_BYTES, "prompts").splitlines()
    found = tuple(line.strip() for line in lines if line.strip())
    if not found:
        raise PellucidError(rule("prompts", "at least one line", str(path)), "prompts")
    return found


def queries(prompts: Sequence[str]) -> tuple[Query, ...] | None:
    """What the prompts ask for where all of them are captions of scenes; None where one is not."""
    try:
        return tuple(scenes.parse(prompt) for prompt in prompts) or None
    except PellucidError:
        return None
