"""What a caption asks for, and whether a scene has it."""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.scenes.relations import NARROW, holding
from pellucid.scenes.scene import Scene, Scenes
from pellucid.scenes.words import RELATION_NAMES


@dataclass(frozen=True)
class Wanted:
    """One object as asked for; None is not said. A caption that names no texture asks for a solid one."""

    shape: str
    colour: str
    texture: str = "solid"
    size: str | None = None
    place: str | None = None


@dataclass(frozen=True)
class Query:
    """Objects in the order of their mention, relations as (which, relation, to which), and what else is said."""

    objects: tuple[Wanted, ...]
    relations: tuple[tuple[int, str, int], ...] = ()
    background: str | None = None
    kind: str | None = None
    style: str | None = None


def satisfied(scene: Scene, query: Query) -> bool:
    """Whether a scene is what a query asks for. Colours name the objects: a scene has each of them once."""
    if len(scene.things) != len(query.objects):
        return False
    order = [thing.colour for thing in scene.things]
    if sorted(order) != sorted(wanted.colour for wanted in query.objects):
        return False
    where = [order.index(wanted.colour) for wanted in query.objects]
    for wanted, i in zip(query.objects, where, strict=True):
        thing = scene.things[i]
        said = [(wanted.shape, thing.shape), (wanted.texture, thing.texture)]
        said += [(wanted.size, thing.size), (wanted.place, thing.place)]
        if any(asked not in (None, is_) for asked, is_ in said):
            return False
    frame = [(query.background, scene.background), (query.kind, scene.kind), (query.style, scene.style)]
    if any(asked not in (None, is_) for asked, is_ in frame):
        return False
    table = holding(Scenes.of([scene]), NARROW)[0]
    return all(bool(table[where[i], where[j], RELATION_NAMES.index(name)]) for i, name, j in query.relations)
