"""Where a model comes from: a folder, a file, a bundle of ours or a hub id → its components."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.core.reader import check_file
from pellucid.interop import folder as folders
from pellucid.interop import hub, single_file, weights
from pellucid.interop.components import INDEX, Components, LoadOptions
from pellucid.interop.weights import dtype_named
from pellucid.models.clip import CLIP, CLIPVisionEncoder

BUNDLES = Path(__file__).parents[1] / "bundles"
_PART = re.compile(r"\w[\w.-]*", re.ASCII)  # a word of a path inside of a bundle: no dots alone, no separators


def read_components(
    where: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    variant: str | None = None,
    revision: str | None = None,
    target: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> Components:
    """The components of a model: a diffusers folder, a single-file checkpoint, the name of a bundle, or a hub id.

    Without a `dtype` the weights keep that of their file. `target` overrules what the files say is predicted.
    """
    words = None if tokenizer is None else Path(tokenizer)
    wanted = LoadOptions(dtype_named(dtype), place(device), variant, target, words)
    path = locate(where, revision=revision, variant=variant)
    if path.is_file():
        return replace(single_file.read(path, wanted), name=str(where))
    return folders.read(path, wanted, name=str(where))


def load_component(
    where: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    variant: str | None = None,
    revision: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Any:
    """One network: a ControlNet, a VAE, an encoder from its folder, file or hub id; `config` overrules its keys."""
    wanted = LoadOptions(dtype_named(dtype), place(device), variant)
    path = locate(where, revision=revision, variant=variant)
    if path.is_file():
        return single_file.read_component(path, wanted, config)
    return folders.read_component(path, wanted, config).network


def load_image_encoder(
    where: str | os.PathLike[str], *, dtype: torch.dtype | str | None = None, device: torch.device | str | None = None
) -> CLIPVisionEncoder:
    """A CLIP vision encoder, or the vision half of a whole CLIP (transformers' CLIPModel) with its projection."""
    found = load_component(where, dtype=dtype, device=device)
    found = found.vision_encoder() if isinstance(found, CLIP) else found
    if not isinstance(found, CLIPVisionEncoder):
        must = "a CLIP vision encoder or a whole CLIP"
        raise PellucidError(rule("image_encoder", must, type(found).__name__), "component-kind")
    return found


def place(device: torch.device | str | None) -> torch.device | None:
    try:
        return None if device is None else torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError):  # torch asserts that it was built for the device
        raise PellucidError(rule("device", "one that torch has here", str(device)), "device") from None


def expanded(name: str | os.PathLike[str]) -> Path:
    """A path whose ~ is a home; as it is where there is no such user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def locate(where: str | os.PathLike[str], *, revision: str | None = None, variant: str | None = None) -> Path:
    """The folder or file that is meant: what exists locally first, then a bundle or a part of one, then the hub."""
    path, name = expanded(where), str(where)
    local = path if name and exists(path) else in_bundle(name)
    if local is not None:
        if revision is not None:
            raise PellucidError(rule("revision", "left out for what is not on the hub", revision), "revision")
        if not local.is_dir():
            check_file(local, "model", "not-found")
        return local
    if isinstance(where, str) and hub.is_id(name) and path.suffix != ".safetensors":
        return hub.fetch(name, revision=revision, variant=variant)
    hint = nearest(name, bundles()) if bundles() else ""
    raise PellucidError(
        rule("model", "a folder, a file, a bundle's name or a hub id (owner/name)", name, hint or "There is none."),
        "not-found",
    )


def is_model(name: str) -> bool:
    """Whether a name is a bundle's, a hub id's, or that of a file or folder here that looks like a model.

    Only these may be described to people who are not to learn what else lies on this machine.
    """
    path = expanded(name)
    if not exists(path):
        return name.split("/")[0] in bundles() or hub.is_id(name)
    scheduled = (path / folders.CONFIG).is_file() and (path / folders.SCHEDULER).is_file()
    return (path / INDEX).is_file() or scheduled or _is_weights(path)


def is_adapter(name: str) -> bool:
    """The same for a LoRA, a ControlNet or an IP-Adapter."""
    path = expanded(name)
    held = path.glob("*.safetensors") if exists(path) and path.is_dir() else ()
    return is_model(name) or any(map(_is_weights, held))


def _is_weights(path: Path) -> bool:
    """Whether a file begins as one with tensors does, and a pickle is named like one."""
    try:
        return path.is_file() and (weights.kind_of(path) == "safetensors" or path.suffix in weights.PICKLES)
    except PellucidError as error:
        return error.code == "weights-lfs"  # whose error helps


def exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def bundled(where: str | os.PathLike[str]) -> Path:
    """The file or folder of an adapter: as it is named, or the part of a bundle that has this name."""
    path = Path(where)
    return path if exists(path) else in_bundle(os.fspath(where)) or path


def in_bundle(name: str) -> Path | None:
    """Where `bundle` or `bundle/part/…` lies; None where the first word is no bundle's name."""
    bundle, *parts = name.split("/")
    if bundle not in bundles():
        return None
    place = BUNDLES.joinpath(bundle, *parts)
    if not all(_PART.fullmatch(part) for part in parts) or not exists(place):
        held = ", ".join(sorted(path.name for path in (BUNDLES / bundle).iterdir() if path.is_dir()))
        raise PellucidError(rule(f"part of {bundle}", f"one that it has: {held}", "/".join(parts)), "not-found")
    return place


def bundles() -> list[str]:
    """The models that come with Pellucid."""
    return sorted(path.name for path in BUNDLES.iterdir() if (path / INDEX).is_file()) if BUNDLES.is_dir() else []


def pipelines() -> list[str]:
    """The bundles, and the pipelines that lie in them, by name."""
    found = sorted(index.parent for name in bundles() for index in (BUNDLES / name).rglob(INDEX))
    return [place.relative_to(BUNDLES).as_posix() for place in found]
