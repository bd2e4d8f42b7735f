"""The models that are on this machine: bundles, the hub's cache, folders and single files. No weights are read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import check_file
from pellucid.interop import diffusers_config, folder, single_file, source, weights
from pellucid.interop.components import INDEX

MAX_SEEN = 20_000  # files and folders that a search looks at
_MAX_DEPTH = 4  # folders below the one that is searched
_ADAPTERS = ("lora", "controlnet", "ip_adapter", "image_text")  # of a bundle, by their folders
_KEPT = "models--"  # how the hub's cache names a model's folder: models--owner--name


@dataclass(frozen=True)
class Model:
    """A model by the name that `load` takes. `target` and `schedule` are what its files say, where they say it."""

    name: str
    where: str  # bundle, hub cache, folder, file
    kind: str
    target: str | None = None
    schedule: str | None = None
    bytes: int = 0
    parts: tuple[str, ...] = ()


def models(folders: Sequence[str | Path] = ()) -> list[Model]:
    """The bundles, what the hub's cache holds, and what is in these folders."""
    found = [in_folder(source.BUNDLES / name, name, "bundle") for name in source.pipelines()]
    found += [in_folder(place, name, "hub cache") for name, place in _hub_cache()]
    for place in folders:
        found += _below(source.expanded(place))
    return found


def in_folder(place: Path, name: str, where: str) -> Model:
    """A diffusers folder by its index and its scheduler's config; what cannot be read of them is left out."""
    kind, target, schedule = "unknown", None, None
    with suppress(PellucidError, OSError):
        kind = str(folder.index_of(place).get("_class_name", kind))
        reading = diffusers_config.read(place / "scheduler", strict=False)
        target, schedule = reading.target, reading.schedule.name
    parts = tuple(part for part in _ADAPTERS if where == "bundle" and (place / part).is_dir())
    size = sum(path.stat().st_size for path in place.rglob("*") if path.suffix in (".safetensors", *weights.PICKLES))
    return Model(name, where, kind, target, schedule, size, parts)


def _hub_cache() -> Iterator[tuple[str, Path]]:
    """The ids in the hub's local cache whose newest snapshot is a pipeline, and where it lies."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return
    for kept in sorted(Path(HF_HUB_CACHE).glob(f"{_KEPT}*")):
        snapshots = [path for path in (kept / "snapshots").glob("*") if (path / INDEX).is_file()]
        if snapshots:
            yield (
                kept.name.removeprefix(_KEPT).replace("--", "/", 1),
                max(snapshots, key=lambda path: path.stat().st_mtime),
            )


def _below(top: Path) -> Iterator[Model]:
    """What is in a folder or below it: diffusers folders and single-file checkpoints. Links are not followed."""
    if not top.is_dir():
        raise PellucidError(rule("folder", "one that exists", str(top)), "not-found")
    seen = 0
    for here, inner, files in os.walk(top):
        place = Path(here)
        inner.sort()
        seen += len(inner) + len(files)
        if seen > MAX_SEEN:
            raise PellucidError(
                rule("folder", f"one with at most {MAX_SEEN} files below it", str(top), "Name a folder in it."),
                "too-many",
            )
        if INDEX in files:
            yield in_folder(place, str(place), "folder")
            inner.clear()
            continue
        if len(place.relative_to(top).parts) >= _MAX_DEPTH:
            inner.clear()
        for file in sorted(files):
            if file.endswith(".safetensors") and (kind := kind_of(place / file)):
                yield Model(str(place / file), "file", kind, bytes=(place / file).stat().st_size)


def kind_of(file: Path) -> str | None:
    """The family of a single-file checkpoint by the names of its tensors; None where it is no whole model."""
    try:
        check_file(file, file.name)
        with safe_open(file, "pt") as held:
            names = list(held.keys())
    except (OSError, SafetensorError, PellucidError):
        return None
    if not any(name.startswith(single_file.UNET) for name in names):
        return None
    layouts = (
        layout.name for prefix, layout in single_file.LAYOUTS.items() if any(n.startswith(prefix) for n in names)
    )
    return next(layouts, None)
