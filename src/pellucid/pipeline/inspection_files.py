"""Weights as they lie on disk: bytes, dtypes and files of each component. Headers are read, tensors only mapped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from pellucid.interop import single_file, weights
from pellucid.interop.components import TEXT_PARTS, named_classes
from pellucid.interop.folder import index_of, place_of, reads
from pellucid.pipeline.inspection import Stored


def stored_in(path: Path, variant: str | None = None) -> dict[str, Stored]:
    """What a model's folder or file holds, by the names of its components."""
    return in_file(path) if path.is_file() else in_folder(path, variant)


def in_folder(folder: Path, variant: str | None) -> dict[str, Stored]:
    listed = named_classes(index_of(folder))
    parts = {part: place_of(folder, part) for part, kind in listed.items() if reads(part, kind)}
    if "controlnet" in parts:
        parts |= {place.name: place for place in sorted(folder.glob("controlnet_[0-9]*")) if place.is_dir()}
    return {part: stored_component(place, variant) for part, place in parts.items()}


def in_file(path: Path) -> dict[str, Stored]:
    """A single file by its sections."""
    sections = single_file.split(weights.read(path), path.name)
    encoders = [prefix for prefix, _ in single_file.layout_of(sections, path.name).encoders]
    refiner = encoders == [single_file.REFINER_OPEN_CLIP]
    names = dict(zip(encoders, TEXT_PARTS[1:] if refiner else TEXT_PARTS, strict=False))
    names |= {single_file.UNET: "unet", single_file.VAE: "vae", single_file.CONTROL: "controlnet"}
    return {names[prefix]: sum_of(held.values(), [path]) for prefix, held in sections.items() if prefix in names}


def stored_component(path: Path, variant: str | None = None) -> Stored:
    """One component in its folder, or in a file of its own."""
    if path.is_file():
        return sum_of(weights.read(path).values(), [path])
    tensors, found = weights.read_folder(path, variant)
    files = [found.path]
    if found.path.name.endswith(".json"):
        index: Mapping[str, str] = weights.read_json(found.path)["weight_map"]
        files = [path / shard for shard in sorted(set(index.values()))]
    return sum_of(tensors.values(), files)


def sum_of(tensors: Iterable[Tensor], files: Iterable[Path]) -> Stored:
    held = list(tensors)
    sizes: dict[str, int] = {}
    for tensor in held:
        name = str(tensor.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    widest_first = sorted(sizes, key=lambda name: -sizes[name])
    return Stored(sum(sizes.values()), tuple(widest_first), tuple(path.name for path in files))
