"""A scene as data: one of them in words and numbers, and a batch of them as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.scenes import words as w

MOST = 3  # objects in a scene
# Radii as shares of the image's side. Between two sizes lies a gap of a quarter; the cut is in its middle.
RADII = {"small": (0.105, 0.12), "medium": (0.155, 0.175), "large": (0.215, 0.24)}
SIZE_CUTS = (0.1365, 0.194)
# A single object stands in one of nine places: the bands of its middle, and the cuts between them.
PLACE_CUTS = (0.43, 0.57)


@dataclass(frozen=True)
class SceneObject:
    """One object. `x`, `y` (downwards) and `radius` are shares of the image's side."""

    shape: str
    colour: str
    texture: str = "solid"
    x: float = 0.5
    y: float = 0.5
    radius: float = 0.165

    def __post_init__(self) -> None:
        for name, known in (("shape", w.SHAPE_NAMES), ("colour", w.COLOUR_NAMES), ("texture", w.TEXTURE_NAMES)):
            one_of(name, getattr(self, name), known)
        if not (0 < self.radius <= 1 and -1 <= self.x <= 2 and -1 <= self.y <= 2):
            raise PellucidError(rule("x, y, radius", "shares of the image", (self.x, self.y, self.radius)), "scene")

    @property
    def size(self) -> str:
        return w.SIZE_NAMES[sum(self.radius > cut for cut in SIZE_CUTS)]

    @property
    def place(self) -> str:
        return place_of(self.x, self.y)


@dataclass(frozen=True)
class Scene:
    """One image's truth. Later things stand in front of earlier ones."""

    things: tuple[SceneObject, ...]
    background: str = "white"
    kind: str = "plain"
    style: str = "flat"

    def __post_init__(self) -> None:
        if not 1 <= len(self.things) <= MOST:
            raise PellucidError(rule("things", f"1 to {MOST}", len(self.things)), "scene")
        for name, known in (("background", w.BACKGROUND_NAMES), ("kind", w.KIND_NAMES), ("style", w.STYLE_NAMES)):
            one_of(name, getattr(self, name), known)


def one_of(name: str, value: str, known: Sequence[str]) -> int:
    """The index of a name, or one line that helps."""
    if value not in known:
        raise PellucidError(rule(name, "one that the world has", value, nearest(str(value), known)), f"scene-{name}")
    return known.index(value)


def place_of(x: float, y: float) -> str:
    """The ninth of the image in which a point is."""
    column, row = (sum(v > cut for cut in PLACE_CUTS) for v in (x, y))
    return w.PLACE_NAMES[3 * row + column]


@dataclass(frozen=True)
class Scenes:
    """N scenes as tensors on one device. Objects beyond `count` repeat the first and are never drawn."""

    index: Tensor  # (N,) int64: what each was drawn from; captions are drawn from it too
    count: Tensor  # (N,) int64, 1 to 3
    shape: Tensor  # (N, 3) int64: index into w.SHAPE_NAMES
    colour: Tensor  # (N, 3) int64
    texture: Tensor  # (N, 3) int64
    radius: Tensor  # (N, 3) float32, share of the side
    x: Tensor  # (N, 3) float32
    y: Tensor  # (N, 3) float32
    background: Tensor  # (N,) int64
    kind: Tensor  # (N,) int64
    style: Tensor  # (N,) int64

    def __len__(self) -> int:
        return len(self.count)

    def __getitem__(self, rows: slice | Tensor | Sequence[int]) -> Scenes:
        """Some of the scenes, by a slice or by indices."""
        rows = rows if isinstance(rows, slice | Tensor) else torch.tensor(rows, device=self.count.device)
        return Scenes(*(getattr(self, field.name)[rows] for field in fields(self)))

    def to(self, device: torch.device | str) -> Scenes:
        return Scenes(*(getattr(self, field.name).to(device) for field in fields(self)))

    @property
    def present(self) -> Tensor:
        """(N, 3) bool: which objects exist."""
        return torch.arange(MOST, device=self.count.device) < self.count[:, None]

    @property
    def size(self) -> Tensor:
        """(N, 3) int64: index into w.SIZE_NAMES."""
        return torch.bucketize(self.radius, torch.tensor(SIZE_CUTS, device=self.radius.device))

    def scene(self, row: int) -> Scene:
        """One of them in words."""
        return self[row : row + 1].scenes()[0]

    def scenes(self) -> list[Scene]:
        """All of them in words."""
        columns = [getattr(self, name).tolist() for name in ("shape", "colour", "texture", "x", "y", "radius")]
        kinds = [getattr(self, name).tolist() for name in ("count", "background", "kind", "style")]
        found = []
        for count, back, kind, style, *own in zip(*kinds, *columns, strict=True):
            things = tuple(
                SceneObject(w.SHAPE_NAMES[s], w.COLOUR_NAMES[c], w.TEXTURE_NAMES[t], x, y, r)
                for s, c, t, x, y, r in list(zip(*own, strict=True))[:count]
            )
            found.append(Scene(things, w.BACKGROUND_NAMES[back], w.KIND_NAMES[kind], w.STYLE_NAMES[style]))
        return found

    @staticmethod
    def of(scenes: Sequence[Scene]) -> Scenes:
        """A batch of hand-made scenes."""
        whole = [[*scene.things, *[scene.things[0]] * (MOST - len(scene.things))] for scene in scenes]

        own = (("shape", w.SHAPE_NAMES), ("colour", w.COLOUR_NAMES), ("texture", w.TEXTURE_NAMES))
        frame = (("background", w.BACKGROUND_NAMES), ("kind", w.KIND_NAMES), ("style", w.STYLE_NAMES))
        return Scenes(
            torch.arange(len(scenes)),
            torch.tensor([len(scene.things) for scene in scenes]),
            *(torch.tensor([[known.index(getattr(t, n)) for t in row] for row in whole]) for n, known in own),
            *(torch.tensor([[float(getattr(t, n)) for t in row] for row in whole]) for n in ("radius", "x", "y")),
            *(torch.tensor([known.index(getattr(scene, n)) for scene in scenes]) for n, known in frame),
        )


def held_out(scenes: Scenes) -> Tensor:
    """(N,) bool: whether any object is a combination that training never sees."""
    return (w.held_out_combination(scenes.shape, scenes.colour, scenes.texture) & scenes.present).any(1)


def attributes(scenes: Scenes) -> list[dict[str, object]]:
    """The truth of each scene as plain data, for a metadata file."""
    return [
        {
            "background": scene.background,
            "background_kind": scene.kind,
            "style": scene.style,
            "objects": [
                {"shape": t.shape, "colour": t.colour, "texture": t.texture, "size": t.size, "place": t.place}
                | {"x": round(t.x, 5), "y": round(t.y, 5), "radius": round(t.radius, 5)}
                for t in scene.things
            ],
        }
        for scene in scenes.scenes()
    ]
