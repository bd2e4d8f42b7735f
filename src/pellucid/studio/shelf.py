"""The models of a studio: named by their people, loaded once, at most a few held at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.interop.source import bundles, is_adapter, is_model, pipelines
from pellucid.pipeline.load import load
from pellucid.pipeline.pipeline import Pipeline

HELD = 2  # models in memory
_MOST_NAME = 200  # characters that are said again


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
        name = name if name in self.held else named(name)
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
    """The name of a model, as somebody wrote it. Of what is none, not even whether it is there is told."""
    name = (name or "").strip()
    if not name or not is_model(name):
        must = "a folder or file of a model, a bundle's name or a hub id (owner/name)"
        raise PellucidError(rule("model", must, name[:_MOST_NAME] or "none", nearest(name, bundles())), "not-found")
    return name


def adapter(name: str | None, what: str) -> str:
    """The name of an adapter in the same way; empty where none was asked for."""
    name = (name or "").strip()
    if name and not is_adapter(name):
        must = "a folder or file of one, a part of a bundle or a hub id (owner/name)"
        raise PellucidError(rule(what, must, name[:_MOST_NAME]), "not-found")
    return name
