"""The world of scenes: coloured shapes on a background, their captions and maps, and a reader of finished pictures."""

from pellucid.scenes.grammar import captions, described
from pellucid.scenes.parsing import parse
from pellucid.scenes.asking import prompts
from pellucid.scenes.query import Query, Wanted, satisfied
from pellucid.scenes.render import edges, render, segmentation
from pellucid.scenes.sampling import sample
from pellucid.scenes.scene import Scene, Scenes, Thing, attributes, held_out
from pellucid.scenes.words import LORA_STYLES, STYLE_NAMES, TRAIN_STYLES, vocabulary

__all__ = [
    "LORA_STYLES",
    "STYLE_NAMES",
    "TRAIN_STYLES",
    "Query",
    "Scene",
    "Scenes",
    "Thing",
    "Wanted",
    "attributes",
    "captions",
    "described",
    "edges",
    "held_out",
    "parse",
    "prompts",
    "render",
    "sample",
    "satisfied",
    "segmentation",
    "vocabulary",
]
