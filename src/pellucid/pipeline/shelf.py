"""Which files a name means, and what they hold: adapters are read once for a model, and again when they change."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pellucid.interop import folder, hub, source

ADAPTER_FILE, ADAPTER_EYES = "ip_adapter.safetensors", "image_encoder"  # in an IP-Adapter's folder
ENCODER_NOTE, SHARED_ENCODER = "image_encoder.json", "../image_text"  # in the place of image_encoder/, in a bundle
_MAX_KEPT = 16  # adapters that a model holds in memory

PathLike = str | os.PathLike[str]
_T = TypeVar("_T")


class AdapterShelf:
    """What the files of adapters hold. Threads may share it; the oldest of many is let go."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, int], Any] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._kept)

    def read(self, kind: str, path: PathLike, read: Callable[[str], _T]) -> _T:
        """What a file or folder holds, read unless it is here already."""
        place = os.fspath(path)
        stamp = os.stat(place).st_mtime_ns if os.path.exists(place) else 0  # a hub id has no file of that name
        key = (kind, place, stamp)
        with self._lock:
            if key not in self._kept:
                found = read(place)
                while len(self._kept) >= _MAX_KEPT:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[key] = found
            held: _T = self._kept[key]
            return held


def adapter_file(path: PathLike) -> Path:
    """The file of an IP-Adapter: itself, or the one in its folder."""
    place = source.bundled(path)
    return place / ADAPTER_FILE if place.is_dir() else place


def adapter_encoder(path: PathLike) -> Path | None:
    """The image encoder that an IP-Adapter was trained with: in its folder, or the CLIP of the bundle around it."""
    place = source.bundled(path)
    if (place / ADAPTER_EYES).is_dir():
        return place / ADAPTER_EYES
    around = folder.outer(place, ENCODER_NOTE, SHARED_ENCODER)
    return None if around is None else around / Path(SHARED_ENCODER).name


# --- What a recipe names --------------------------------------------------------------------------------------------


def local_model(name: str, beside: Path) -> str | None:
    """The model of a name where it is on this machine: a path, also below `beside`; a bundle; the hub's cache."""
    for place in (source.expanded(name), beside / name):
        if source.exists(place):
            return str(place)
    return name if source.in_bundle(name) is not None or (hub.is_id(name) and hub.cached(name) is not None) else None


def find_lora(name: str, beside: Path) -> str | None:
    """The part of a bundle, or the file of a LoRA's name here or in `beside`; other paths are not looked for."""
    if source.in_bundle(name) is not None:
        return name
    if name != os.path.basename(name) or name in ("", ".", ".."):
        return None
    places = [folder / f"{name}.safetensors" for folder in (Path(), beside)]
    return next((str(place) for place in places if place.is_file()), None)
