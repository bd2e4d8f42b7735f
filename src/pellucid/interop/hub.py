"""Hub ids: `owner/name` → a local snapshot. What is cached is used; only what is missing and needed is fetched."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pellucid.core.errors import PellucidError, rule
from pellucid.interop import weights
from pellucid.interop.components import INDEX, TOKENIZER_PARTS, named_classes
from pellucid.interop.folder import CONFIG, SCHEDULER, foreign_text, place_of, reads

_ID = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
_ANCHORS = (INDEX, CONFIG, "vocab.json", "tokenizer.json")  # one of them lies in every repository that we read
_WORDS = (".json", ".txt")


def is_id(where: str) -> bool:
    """Whether this reads as owner/name, by the hub's own rules."""
    marks = any(mark in where for mark in ("..", "--", "-/", "./")) or where.endswith((".", "-", ".git"))
    return _ID.fullmatch(where) is not None and not marks


def fetch(repo: str, *, revision: str | None = None, variant: str | None = None) -> Path:
    """The snapshot of a repository: the cached one where it is whole, else it is downloaded."""
    if not is_id(repo):
        raise PellucidError(rule("hub id", "owner/name", repo), "hub-id")
    folder = cached(repo, revision)
    missing = [] if folder is None else lacks(folder, variant)
    if folder is not None and not missing:
        return folder
    with _explained(repo, revision, missing), _quiet("huggingface_hub"):
        from huggingface_hub import HfApi, hf_hub_download, snapshot_download

        names = HfApi().list_repo_files(repo, revision=revision)
        index = None
        if INDEX in names:
            index = weights.read_json(Path(hf_hub_download(repo, INDEX, revision=revision)))
        elif CONFIG not in names:
            raise PellucidError(
                rule(
                    repo, f"a repository with {INDEX} or {CONFIG}", weights.some(names), "Download a file and name it."
                ),
                "not-a-model",
            )
        return Path(snapshot_download(repo, revision=revision, allow_patterns=wanted(names, index, variant)))


def fetch_file(repo: str, name: str, *, revision: str | None = None) -> Path:
    """One file of a repository: the cached one, else it is downloaded."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    found = try_to_load_from_cache(repo, name, revision=revision)
    if isinstance(found, str):
        return Path(found)
    with _explained(repo, revision, [name]), _quiet("huggingface_hub"):
        return Path(hf_hub_download(repo, name, revision=revision))


def cached(repo: str, revision: str | None = None) -> Path | None:
    """The snapshot that the local cache holds, whole or not."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    for name in _ANCHORS:
        found = try_to_load_from_cache(repo, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def lacks(folder: Path, variant: str | None = None) -> list[str]:
    """The parts of a snapshot that are not there, or not in the variant that was asked for."""
    if not (folder / INDEX).is_file():
        return [] if _whole(folder, variant) or tokenizer_in(folder) else ["weights"]
    missing = []
    for part, kind in named_classes(weights.read_json(folder / INDEX)).items():
        place = place_of(folder, part)
        if part in TOKENIZER_PARTS:
            there = tokenizer_in(place) or foreign_text(part, kind)
        elif part == "scheduler":
            there = (place / SCHEDULER).is_file()
        else:
            there = not reads(part, kind) or _whole(place, variant)
        missing += [] if there else [part]
    return missing


def _whole(folder: Path, variant: str | None) -> bool:
    """Whether a component has its config and its weights, all shards of them."""
    names = [path.name for path in folder.iterdir()]
    choice = weights.choose(names, variant)
    if CONFIG not in names or choice is None or (variant is not None and choice[1] != variant):
        return False
    if not choice[0].endswith(".json"):
        return True
    shards = weights.read_json(folder / choice[0]).get("weight_map")
    return isinstance(shards, dict) and set(shards.values()) <= set(names)


def tokenizer_in(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("vocab.json", "tokenizer.json"))


def wanted(names: Iterable[str], index: Mapping[str, Any] | None, variant: str | None = None) -> list[str]:
    """The files of a repository that its components are read from: of the weights, one precision and one format."""
    there = sorted(names)
    parts = {part for part, kind in named_classes(index or {}).items() if _needed(part, kind)}
    folders = {part for part in parts if any(name.startswith(f"{part}/") for name in there)}
    if "controlnet" in parts:
        folders |= {match[0] for name in there if (match := re.match(r"controlnet_\d+(?=/)", name))}
    if index is None or len(folders) < len(parts):
        folders.add("")  # a network of its own, at the root
    chosen = {name for name in there if name in (INDEX, SCHEDULER)}
    for folder in folders:
        prefix = f"{folder}/" if folder else ""
        inside = [n.removeprefix(prefix) for n in there if n.startswith(prefix) and "/" not in n.removeprefix(prefix)]
        words = [name for name in inside if name.endswith(_WORDS)]
        chosen |= {prefix + name for name in (*words, *_shards_of(weights.choose(inside, variant), inside))}
    return sorted(chosen)


def _needed(part: str, kind: str) -> bool:
    return reads(part, kind) or part == "scheduler" or (part in TOKENIZER_PARTS and not foreign_text(part, kind))


def _shards_of(choice: tuple[str, str | None] | None, names: Iterable[str]) -> list[str]:
    """A chosen file, or all the shards of a chosen index."""
    if choice is None:
        return []
    name, variant = choice
    if not name.endswith(".json"):
        return [name]
    stem, mark = name.split(".")[0], "" if variant is None else rf"\.{re.escape(variant)}"
    shard = re.compile(rf"{stem}(?:{mark}-\d+-of-\d+|-\d+-of-\d+{mark})\.safetensors")
    return [other for other in names if shard.fullmatch(other)]


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without a library's warnings: each retry would be a line, and the end is said by `_explained`."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _explained(repo: str, revision: str | None, missing: list[str]) -> Iterator[None]:
    """What the hub answers, as one line."""
    try:
        from huggingface_hub import errors
    except ImportError:
        raise PellucidError(
            rule("a hub id", "used with huggingface_hub installed", repo, "Run: pip install huggingface_hub."), "hub"
        ) from None
    try:
        yield
    except errors.GatedRepoError:
        text = f"{repo} must be opened to you first: it is gated. Accept its terms on its page, then `hf auth login`."
        raise PellucidError(text, "hub-gated") from None
    except errors.RepositoryNotFoundError:
        text = rule(
            "model", "a folder, a file or a repository on the hub", repo, "No such repository, or it is private."
        )
        raise PellucidError(text, "hub-missing") from None
    except errors.RevisionNotFoundError:
        raise PellucidError(rule(f"revision of {repo}", "one that it has", revision), "hub-revision") from None
    except (OSError, getattr(errors, "HTTPError", OSError)) as error:  # the client's own errors are no OSErrors
        words = (str(error) or type(error).__name__).splitlines()[0][:120]
        held = f"the copy there lacks {', '.join(missing)}" if missing else "it is not there"
        raise PellucidError(
            f"{repo} must be in the local cache, or the hub within reach; {held}, and the hub did not answer ({words})."
            " Give a folder, or try again with a network.",
            "hub-network",
        ) from None
