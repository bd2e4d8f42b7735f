"""The models of a studio: named by their people, loaded once, at most a few held at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.source import pipelines
from pellucid.pipeline.load import load
from pellucid.pipeline.pipeline import Pipeline

HELD = 2  # models in memory


@dataclass
class Shelf:
    """`names` are offered; any other that `load` takes may be asked for. Runs share a pipeline: it has no state."""

    names: Sequence[str] = ()
    device: str | None = None
    held: OrderedDict[str, Pipeline] = field(default_factory=OrderedDict)
    loading: dict[str, threading.Lock] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def choices(self) -> list[str]:
        """What is offered: what the studio was started with, then the bundles."""
        return list(dict.fromkeys([*self.names, *pipelines()]))

    def pipe(self, name: str | None) -> Pipeline:
        """The model of a name. Who asks for the same while it loads waits for it; who asks for another does not."""
        name = named(name)
        with self.lock:
            loading = self.loading.setdefault(name, threading.Lock())
        with loading:
            pipe = self.held.get(name) or load(name, device=self.device)
            with self.lock:
                self.held[name] = pipe
                self.held.move_to_end(name)
                while len(self.held) > HELD:
                    self.held.popitem(last=False)
        return pipe


def named(name: str | None) -> str:
    """The name of a model, as somebody wrote it."""
    name = (name or "").strip()
    if not name:
        raise PellucidError(rule("model", "a folder, a file, a bundle's name or a hub id", "none"), "not-found")
    return name
