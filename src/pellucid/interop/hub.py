"""Hub ids: `owner/name` → a local snapshot. What is cached is used; only what is missing and needed is fetched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pellucid.core.errors import PellucidError, rule
from pellucid.interop import weights
from pellucid.interop.components import INDEX, PARTS, named_classes

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
ANCHORS = (INDEX, "config.json", "vocab.json", "tokenizer.json")  # one of them lies in every repository that we read
WORDS = (".json", ".txt")


def is_id(where: str) -> bool:
    return ID.fullmatch(where) is not None and ".." not in where


def fetch(repo: str, *, revision: str | None = None, variant: str | None = None) -> Path:
    """The snapshot of a repository: the cached one where it is whole, else it is downloaded."""
    if not is_id(repo):
        raise PellucidError(rule("hub id", "owner/name", repo), "hub-id")
    folder = cached(repo, revision)
    if folder is not None and not lacks(folder, variant):
        return folder
    with explained(repo, revision):
        from huggingface_hub import HfApi, hf_hub_download, snapshot_download

        names = HfApi().list_repo_files(repo, revision=revision)
        index = None
        if INDEX in names:
            index = weights.read_json(Path(hf_hub_download(repo, INDEX, revision=revision)))
        needed = wanted(names, index, variant)
        return Path(snapshot_download(repo, revision=revision, allow_patterns=needed))


def cached(repo: str, revision: str | None = None) -> Path | None:
    """The snapshot that the local cache holds, whole or not."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    for name in ANCHORS:
        found = try_to_load_from_cache(repo, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def lacks(folder: Path, variant: str | None = None) -> list[str]:
    """The parts of a snapshot that are not there."""
    if not (folder / INDEX).is_file():
        found = weights.choose((path.name for path in folder.iterdir()), variant)
        return [] if found and (variant is None or found[1] == variant) else ["weights"]
    missing = []
    for part, kind in named_classes(weights.read_json(folder / INDEX)).items():
        place = folder / part if (folder / part).is_dir() else folder
        names = [path.name for path in place.iterdir()]
        if part.startswith(("tokenizer", "scheduler")):
            there = any(name.endswith(WORDS) for name in names) and place != folder or "scheduler_config.json" in names
        else:
            there = not PARTS.reads(kind) or ("config.json" in names and weights.choose(names, variant) is not None)
        if not there:
            missing.append(part)
    return missing


def wanted(names: Iterable[str], index: Mapping[str, Any] | None, variant: str | None = None) -> list[str]:
    """The files of a repository that its components are read from: of the weights, one precision and one format."""
    there = sorted(names)
    parts = {part: kind for part, kind in named_classes(index or {}).items() if PARTS.reads(kind)}
    folders = {part for part in parts if any(name.startswith(f"{part}/") for name in there)}
    folders |= {match[0] for name in there if (match := re.match(r"controlnet_\d+(?=/)", name)) and "controlnet" in parts}
    if index is None or len(folders) < len(parts):
        folders.add("")  # a network of its own, at the root
    chosen = []
    for folder in sorted(folders):
        prefix = f"{folder}/" if folder else ""
        inside = [n.removeprefix(prefix) for n in there if n.startswith(prefix) and "/" not in n.removeprefix(prefix)]
        words = [name for name in inside if name.endswith(WORDS)]
        chosen += [prefix + name for name in (*words, *shards_of(weights.choose(inside, variant), inside))]
    return sorted({*chosen, *(name for name in there if name in (INDEX, "scheduler_config.json"))})


def shards_of(choice: tuple[str, str | None] | None, names: Iterable[str]) -> list[str]:
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
def explained(repo: str, revision: str | None) -> Iterator[None]:
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
        text = rule("model", "a folder, a file or a repository on the hub", repo, "No such repository, or it is private.")
        raise PellucidError(text, "hub-missing") from None
    except errors.RevisionNotFoundError:
        raise PellucidError(rule(f"revision of {repo}", "one that it has", revision), "hub-revision") from None
    except (OSError, errors.HTTPError) as error:
        words = (str(error) or type(error).__name__).splitlines()[0][:120]
        raise PellucidError(
            f"{repo} must be in the local cache, or the hub within reach; it is neither ({words}). "
            "Give a folder, or try again with a network.",
            "hub-network",
        ) from None
