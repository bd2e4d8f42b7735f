"""What lies in a model's folder: each listed component, where it is, and what its own config says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from pellucid.core.errors import PellucidError
from pellucid.evidence.doctor.subject import Subject
from pellucid.interop import folder, weights
from pellucid.interop.components import KINDS, NETWORK_PARTS, named_classes, read_config

# How a component's config is called, by what its class is; networks keep theirs in config.json.
CONFIGS = {
    "Scheduler": folder.SCHEDULER,
    "Tokenizer": "tokenizer_config.json",
    "Processor": "preprocessor_config.json",
    "Extractor": "preprocessor_config.json",
}


@dataclass(frozen=True)
class Listed:
    """A component of model_index.json."""

    part: str
    kind: str  # the class that the index names
    place: Path
    there: bool
    config: Mapping[str, Any] | None = None
    trouble: str = ""  # why there is no config

    @property
    def own_kind(self) -> str | None:
        """The class that its own config names."""
        if self.config is None:
            return None
        made = self.config.get("architectures")
        named = self.config.get("_class_name") or (made[0] if isinstance(made, list) and made else None)
        return None if named is None else str(named)

    @property
    def needs_config(self) -> bool:
        """Whether nothing can be made of it without a config: our networks, and schedulers."""
        return self.kind in KINDS or self.kind.endswith("Scheduler")

    @property
    def network_kind(self) -> str | None:
        """The class of ours that it is, where we have it."""
        kind = self.kind if self.kind in KINDS else self.own_kind
        return kind if kind in KINDS else None


def inventory(subject: Subject) -> dict[str, Listed]:
    """Every component that the index lists, by its part."""
    assert subject.folder is not None
    assert subject.index is not None
    root = subject.folder
    return {part: find(root, part, kind) for part, kind in named_classes(subject.index).items()}


def find(root: Path, part: str, kind: str) -> Listed:
    place = folder.place_of(root, part)
    name = next((name for word, name in CONFIGS.items() if word in kind), folder.CONFIG)
    there = place != root or (root / name).is_file()
    if part in NETWORK_PARTS and place == root:
        there = folder.class_in(root) == kind
    if not there or not (place / name).is_file():
        return Listed(part, kind, place, there, trouble=f"{part}/{name} is not there")
    try:
        return Listed(part, kind, place, there, weights.read_json(place / name))
    except PellucidError as error:
        return Listed(part, kind, place, there, trouble=str(error))


def sketch(listed: Listed) -> nn.Module:
    """The network of a component on the meta device, from its config alone."""
    assert listed.network_kind is not None
    return sketched(listed.network_kind, json.dumps(listed.config), listed.part)


@lru_cache(maxsize=16)  # several checks ask for the same
def sketched(kind: str, config: str, name: str) -> nn.Module:
    settings = read_config(kind, json.loads(config), name)
    return weights.sketch(lambda: KINDS[kind].build(settings), name)


def network_of(subject: Subject) -> nn.Module | None:
    """The denoising network: loaded, or sketched from its config."""
    if subject.pipeline is not None:
        return subject.pipeline.components.network
    if subject.folder is None:
        return None
    parts = inventory(subject)
    listed = next((parts[part] for part in NETWORK_PARTS if part in parts), None)
    if listed is None or listed.config is None or listed.network_kind is None:
        return None
    try:
        return sketch(listed)
    except PellucidError:
        return None
