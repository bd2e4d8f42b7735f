"""From what the page holds to a model and a request: every value is checked, and named when it is wrong."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from pellucid.core import grid as grids
from pellucid.core import samplers
from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.interop.source import bundles, is_adapter, is_model, pipelines
from pellucid.models.guidance import Guidance, guarded
from pellucid.pipeline import images
from pellucid.pipeline.load import load
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.request import Control, ImagePrompt, Lora, Request

# --- Models ---------------------------------------------------------------------------------------------------------

HELD = 2  # models in memory
_MOST_NAME = 200  # characters that are said again


@dataclass
class Shelf:
    """`names` are offered; any other that `load` takes can be used too. Runs share a pipeline: it has no state."""

    names: Sequence[str] = ()
    device: str | None = None
    held: OrderedDict[str, Pipeline] = field(default_factory=OrderedDict)
    loading: dict[str, threading.Lock] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def choices(self) -> list[str]:
        """What is offered: what the studio was started with, then the bundles."""
        return list(dict.fromkeys([*self.names, *pipelines()]))

    def pipe(self, name: str | None) -> Pipeline:
        """The model of a name. While it loads, requests for it wait; requests for another model do not."""
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
    """The name of a model, checked. The error does not reveal whether another path exists."""
    name = (name or "").strip()
    if not name or not is_model(name):
        must = "a folder or file of a model, a bundle's name or a hub id (owner/name)"
        raise PellucidError(rule("model", must, name[:_MOST_NAME] or "none", nearest(name, bundles())), "not-found")
    return name


def adapter(name: str | None, what: str) -> str:
    """The name of an adapter, checked in the same way; empty if none is given."""
    name = (name or "").strip()
    if name and not is_adapter(name):
        must = "a folder or file of one, a part of a bundle or a hub id (owner/name)"
        raise PellucidError(rule(what, must, name[:_MOST_NAME]), "not-found")
    return name


# --- Requests -------------------------------------------------------------------------------------------------------

OWN = "the model's own"
_MOST_STEPS = 1000
MOST_SCALE = 20.0  # where the slider ends without the guard
MOST_PIXELS = 16 * 2**20  # of an upload
_MOST_PROMPT = 4000  # characters


def sampler_choices() -> list[str]:
    return [OWN, *samplers.names()]


def grid_choices() -> list[str]:
    return [OWN, *(name for name in grids.names() if name != "explicit")]


@dataclass(frozen=True)
class ImageStart:
    """An image to start from; with a mask only its white part is regenerated."""

    image: Image.Image
    mask: Image.Image | None = None
    strength: float = 0.7


@dataclass(frozen=True)
class Form:
    """The values of the page's controls for one request."""

    prompt: str = ""
    negative: str = ""
    sampler: str = OWN
    grid: str = OWN
    steps: Any = 20
    guidance: float = 4.0
    guarded: bool = False
    seed: Any = ""
    image: ImageStart | None = None
    loras: tuple[Lora, ...] = ()
    controls: tuple[Control, ...] = ()
    image_prompts: tuple[ImagePrompt, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def request(self, **watching: Any) -> Request:
        fields: dict[str, Any] = {"seed": seed_of(self.seed), "steps": steps_of(self.steps)}
        fields |= {"prompt": prompt_of(self.prompt), "negative_prompt": self.negative.strip() or None}
        fields |= {name: value for name in ("sampler", "grid") if (value := getattr(self, name)) != OWN}
        scale = float(self.guidance)
        fields["guidance"] = guarded(scale) if self.guarded else Guidance.parse(scale)
        if self.image is not None:
            fields |= {"image": self.image.image, "mask": self.image.mask, "strength": self.image.strength}
        for name in ("loras", "controls", "image_prompts"):
            fields[name] = getattr(self, name)
        return Request(**fields, **self.extra, **watching)


def needed(path: str | None, adapter: str) -> Image.Image:
    """The image that an adapter requires."""
    if path is None:
        raise PellucidError(f"{adapter} must come with an image; got none.", "adapter-picture")
    return upload(path)


def prompt_of(words: str | None) -> str:
    words = (words or "").strip()
    if not words:
        raise PellucidError("prompt must not be empty; got none. Describe the image.", "prompt")
    if len(words) > _MOST_PROMPT:
        raise PellucidError(rule("prompt", f"at most {_MOST_PROMPT:,} characters", f"{len(words):,}"), "prompt")
    return words


def steps_of(given: Any) -> int:
    return whole(given, "steps", _MOST_STEPS, "steps")


def whole(given: Any, what: str, most: int, code: str) -> int:
    """A number of the page as a whole number from 1."""
    try:
        found = float(given)
    except (TypeError, ValueError):
        found = 0.0
    if not 1 <= found <= most or found != int(found):
        raise PellucidError(rule(what, f"a whole number from 1 to {most:,}", given), code)
    return int(found)


def seed_of(given: Any) -> int:
    """A whole number; a random one if the field is empty."""
    words = str(given if given is not None else "").strip()
    if not words:
        return secrets.randbelow(2**32)
    try:
        return int(words.replace(",", "").replace("_", ""))
    except ValueError:
        must = "a whole number, or left empty for a random one"
        raise PellucidError(rule("seed", must, words[:40]), "seed") from None


def upload(path: str | Path, what: str = "image") -> Image.Image:
    """An uploaded image: its size is checked before its pixels are read."""
    with images.open_bounded(path, what) as found:
        if found.width * found.height > MOST_PIXELS:
            must, got = f"at most {MOST_PIXELS // 2**20} megapixels", f"{found.width} × {found.height}"
            raise PellucidError(rule(what, must, got, "Make it smaller first."), "image-pixels")
        return images.upright(found, what)
