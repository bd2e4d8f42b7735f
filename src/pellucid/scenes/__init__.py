"""The world of scenes: coloured shapes on a background, their captions and maps, and a reader of finished images.

The names below are what most callers need; other rooms also use `grading`, `grammar`, `reading`, `renderer`,
`sampling`, `scene` and `export`. The rest is this room's own.
"""

from pellucid.scenes.grading import Grade, Mark, grade
from pellucid.scenes.grammar import ObjectQuery, Query, captions, described, parse, prompts, satisfied
from pellucid.scenes.labels import edge_f1, outlines
from pellucid.scenes.reading import ObjectReading, Reading, read, style_of
from pellucid.scenes.renderer import edges, render, segmentation
from pellucid.scenes.sampling import sample
from pellucid.scenes.scene import Scene, SceneObject, Scenes, attributes, held_out
from pellucid.scenes.words import LORA_STYLES, STYLE_NAMES, TRAIN_STYLES, vocabulary

__all__ = [
    "LORA_STYLES", "STYLE_NAMES", "TRAIN_STYLES", "Grade", "Mark", "ObjectQuery", "ObjectReading", "Query", "Reading",
    "Scene", "SceneObject", "Scenes", "attributes", "captions", "described", "edge_f1", "edges", "grade", "held_out",
    "outlines", "parse", "prompts", "read", "render", "sample", "satisfied", "segmentation", "style_of", "vocabulary",
]  # fmt: skip
