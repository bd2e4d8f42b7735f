"""A job: one image that somebody asked for, as plain data that can cross to another process and be run again."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from pellucid.core.errors import PellucidError, rule
from pellucid.core.plan import Plan
from pellucid.pipeline.request import Lora, Request

MAX_PIXELS = 4096 * 4096  # of an image that is uploaded


@dataclass(frozen=True)
class Job:
    """`fields` are those of a `Request`, as in JSON; `uploads` are files by field; times are of a monotonic clock."""

    id: str
    model: str
    fields: Mapping[str, Any]
    uploads: Mapping[str, bytes] = field(default_factory=dict)
    loras: tuple[tuple[str, float], ...] = ()  # files, by the paths that the server was started with, and their scales
    arrived: float = 0.0
    deadline: float | None = None
    previews: int = 0
    progress: bool = False
    trace: bool = False  # the numbers of each step in the answer


def request_of(job: Job) -> Request:
    """The request of a job: its plan is read, its files are opened."""
    fields = dict(job.fields)
    if fields.get("plan") is not None:
        fields["plan"] = Plan.from_json(fields["plan"])
    for name, data in job.uploads.items():
        fields[name] = opened(name, data)
    if "mask" in job.uploads:
        fields["mask"] = white_where_edited(fields["mask"])
    loras = [Lora(path, scale) for path, scale in job.loras]
    return Request.of(**fields, loras=loras)


def opened(name: str, data: bytes) -> Image.Image:
    """An uploaded image, whose size is known before its pixels are read."""
    try:
        image = Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP"))
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise PellucidError(rule(name, f"an image of at most {MAX_PIXELS} pixels", f"{width}x{height}"), name)
        image.load()
    except PellucidError:
        raise
    except Exception:  # Pillow raises much for what is no image
        raise PellucidError(rule(name, "a PNG, JPEG or WebP image", "something else"), name) from None
    return image


def white_where_edited(mask: Image.Image) -> Image.Image:
    """A mask as `Request` takes it. OpenAI's API edits transparent areas; without transparency, white ones are."""
    if mask.mode in ("RGBA", "LA") or "transparency" in mask.info:
        alpha = mask.convert("RGBA").getchannel("A")
        return alpha.point(lambda a: 255 - a)
    return mask.convert("L")
