"""The demonstration: twelve prompts to images on the CPU, each read and graded, one step by step, on one sheet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from pellucid import scenes
from pellucid.core.batch import StepSeen
from pellucid.models.vae import from_diffusion
from pellucid.pipeline.images import to_images, to_tensor
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.sheet import Block, Face, face_for, wrap
from pellucid.scenes import Grade

MODEL = "scenes-128"
SAMPLER, GRID, GUIDANCE = "dpmpp_2m", "trailing", 4.0
_SEED = 7
_WORKERS = 2  # images at once, one thread each: that is quicker than two threads for one image
MOMENTS = 8
_TITLE = "Text to image, on a CPU"
NEW = "each thing is a shape, colour and texture that training never showed together"
PROMPTS = (
    "a large striped red heart on a pale pink background",
    "a large dotted purple star on a cream background",
    "a large gradient blue circle on a checkered grey background",
    "a large striped yellow crescent on a pale blue background",
    "a small orange heart above a large teal pentagon on a white background",
    "a small red ring inside a large black circle on a pale green background",
    "a medium checkered green diamond left of a medium pink cross on a grey background",
    "a medium dotted blue cross in front of a large striped orange square on a cream background",
    "a small yellow square next to a medium gradient green cross on a pale purple background",
    "a small brown star above a medium purple diamond, which is above a small green crescent",
    "a large checkered blue star on a pale pink background, in outlined style",
    "a large gradient red pentagon on a grey background, with soft shadows",
)
_FOLLOWED = 4  # of them, the one that is shown on its way


@dataclass(frozen=True)
class DemoImage:
    """An image, its prompt, and whether the reader found what the prompt says."""

    prompt: str
    image: Image.Image
    grade: Grade
    seconds: float

    @property
    def wrong(self) -> str:
        """What the prompt says and the image does not show, in words."""
        marks = [mark for mark in self.grade.marks if mark.verdict != "right"]
        faults = [f"{mark.what}: {mark.seen or 'unreadable'}, not {mark.wanted}" for mark in marks]
        return "; ".join(faults[:2]) or (self.grade.trouble or "")


@dataclass(frozen=True)
class Moment:
    """x and the x0 that the network expects of it, as images, where the share of noise is sigma (α² + σ² = 1)."""

    sigma: float
    x: Image.Image
    x0: Image.Image


def make_images(
    pipe: Pipeline, steps: int, watch: StepRecorder, done: Callable[[], None]
) -> tuple[list[Image.Image], list[float]]:
    """The image of every prompt and its seconds. One pipeline serves all threads."""

    def one(number: int) -> tuple[Image.Image, float]:
        began = time.perf_counter()
        settings: dict[str, Any] = {"sampler": SAMPLER, "grid": GRID, "steps": steps, "guidance": GUIDANCE}
        seen = [watch] if number == _FOLLOWED else []
        image = pipe(PROMPTS[number], seed=_SEED + number, observers=seen, **settings).images[0]
        done()
        return image, time.perf_counter() - began

    with ThreadPoolExecutor(workers()) as pool:
        pairs = list(pool.map(one, range(len(PROMPTS))))
    return [image for image, _ in pairs], [seconds for _, seconds in pairs]


def workers() -> int:
    return min(_WORKERS, os.cpu_count() or 1)


def grade_images(images: list[Image.Image], times: list[float]) -> list[DemoImage]:
    """What the reader of scenes finds in the images, against what their prompts ask for."""
    grades = scenes.grade(to_tensor(images), [scenes.parse(prompt) for prompt in PROMPTS])
    return [DemoImage(*row) for row in zip(PROMPTS, images, grades, times, strict=True)]


class StepRecorder:
    """An observer that keeps x and x0 of every row of the run that it is given to."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, Tensor, Tensor]] = []

    def __call__(self, step: StepSeen) -> None:
        level = step.row.level
        vp = level.to("vp")
        scale = (vp.alpha + vp.sigma) / (level.alpha + level.sigma)
        self.seen.append((vp.sigma, step.x * scale, step.x0))

    def moments(self, pipe: Pipeline) -> list[Moment]:
        """Some of the rows, the first and the last among them, decoded."""
        count = min(MOMENTS, len(self.seen))
        chosen = [self.seen[round(i * (len(self.seen) - 1) / max(count - 1, 1))] for i in range(count)]
        latents = torch.cat([torch.cat([x, x0]) for _, x, x0 in chosen])
        vae: Any = pipe.components.vae
        with torch.inference_mode():
            images = to_images(vae.decode(from_diffusion(vae.config, latents).to(next(vae.parameters()))).float())
        pairs = zip(images[::2], images[1::2], strict=True)
        return [Moment(sigma, x, x0) for (sigma, _, _), (x, x0) in zip(chosen, pairs, strict=True)]


# --- The sheet ------------------------------------------------------------------------------------------------------

_NIGHT, _LINE, _STAR, _DUST, _RIGHT, _WRONG = "#0b0f17", "#232c3b", "#eef2f8", "#8d99ad", "#4fd18b", "#ff6b6b"
_COLUMNS, _CELL, _GAP = 4, 256, 28
_SMALL, _NARROW = 128, 12  # 8 small images are as wide as 4 large ones: 4·256 + 3·28 = 8·128 + 7·12
_EDGE, _HEAD, _STRIP_HEAD, _LABEL = 44, 78, 88, 34  # margins, and room for words above images
WIDTH = 2 * _EDGE + _COLUMNS * _CELL + (_COLUMNS - 1) * _GAP
_CAPTION, _LINES, _UNDER = 15, 4, 12  # a caption's letters, its most lines, and its distance from the image
_TICK = 16


@dataclass(frozen=True)
class _Sheet:
    """An image on its way, and the letters for it."""

    image: Image.Image
    face: Face

    def say(self, text: str, size: int, colour: str, at: tuple[int, int], anchor: str = "l") -> None:
        Block([text], self.face(size), colour).draw(ImageDraw.Draw(self.image), *at, anchor)

    def paste(self, image: Image.Image, side: int, at: tuple[int, int]) -> None:
        self.image.paste(image.convert("RGB").resize((side, side), Image.Resampling.LANCZOS), at)


def draw_sheet(found: Sequence[DemoImage], moments: Sequence[Moment], settings: str) -> Image.Image:
    """Images over their prompts, and below them the way of one of them from noise."""
    face = face_for("σ" + "".join((_TITLE, NEW, settings, *(one.prompt for one in found))))
    captions = [Block(wrap(one.prompt, face(_CAPTION), _CELL - 24, _LINES), face(_CAPTION), _STAR) for one in found]
    starts = range(0, len(found), _COLUMNS)
    heights = [_CELL + _UNDER + max(caption.height for caption in captions[i : i + _COLUMNS]) for i in starts]
    below = _EDGE + _HEAD + sum(heights) + _GAP * len(heights)
    height = below + _STRIP_HEAD + 2 * _SMALL + _LABEL + _EDGE
    sheet = _Sheet(Image.new("RGB", (WIDTH, height), _NIGHT), face)
    _draw_title(sheet, found, settings)
    for i, (one, caption) in enumerate(zip(found, captions, strict=True)):
        row, column = divmod(i, _COLUMNS)
        top = _EDGE + _HEAD + sum(heights[:row]) + _GAP * row
        _draw_cell(sheet, one, caption, (_EDGE + column * (_CELL + _GAP), top))
    _draw_strip(sheet, moments, found[_FOLLOWED].prompt, below)
    return sheet.image


def _draw_title(sheet: _Sheet, found: Sequence[DemoImage], settings: str) -> None:
    right = sum(one.grade.right for one in found)
    sheet.say(_TITLE, 30, _STAR, (_EDGE, _EDGE - 12))
    sheet.say(f"{settings} · {NEW}", _CAPTION, _DUST, (_EDGE, _EDGE + 30))
    sheet.say(f"{right} of {len(found)} as asked", 20, _RIGHT, (WIDTH - _EDGE, _EDGE - 4), "r")


def _draw_cell(sheet: _Sheet, one: DemoImage, caption: Block, at: tuple[int, int]) -> None:
    """An image, and under it a mark (all as asked, or not) beside its prompt."""
    x, y = at
    sheet.paste(one.image, _CELL, at)
    drawn = _tick_or_cross(one.grade.right)
    sheet.image.paste(drawn, (x, y + _CELL + _UNDER + (caption.pitch - _TICK) // 2))
    caption.draw(ImageDraw.Draw(sheet.image), x + 24, y + _CELL + _UNDER)


def _tick_or_cross(right: bool) -> Image.Image:
    """A tick or a cross, drawn four times as large for smooth edges."""
    side = 4 * _TICK
    large = Image.new("RGB", (side, side), _NIGHT)
    pen = ImageDraw.Draw(large)
    ways = [[(0.1, 0.55), (0.38, 0.82), (0.9, 0.2)]] if right else [[(0.2, 0.2), (0.8, 0.8)], [(0.2, 0.8), (0.8, 0.2)]]
    for way in ways:
        pen.line([(x * side, y * side) for x, y in way], _RIGHT if right else _WRONG, side // 7, joint="curve")
    return large.resize((_TICK, _TICK), Image.Resampling.LANCZOS)


def _draw_strip(sheet: _Sheet, moments: Sequence[Moment], prompt: str, top: int) -> None:
    """Two lines of small images: x at falling noise, and the x0 that the network predicts from it."""
    ImageDraw.Draw(sheet.image).line([(_EDGE, top), (WIDTH - _EDGE, top)], _LINE, 2)
    sheet.say("From noise to the image", 22, _STAR, (_EDGE, top + 20))
    sheet.say(prompt, _CAPTION, _DUST, (WIDTH - _EDGE, top + 25), "r")
    first = top + _STRIP_HEAD
    second = first + _SMALL + _LABEL
    for column, moment in enumerate(moments):
        x = _EDGE + column * (_SMALL + _NARROW)
        sheet.paste(moment.x, _SMALL, (x, first))
        sheet.paste(moment.x0, _SMALL, (x, second))
        sheet.say(f"{'' if column else 'x at '}σ = {moment.sigma:.2f}", 14, _DUST, (x, first - 24))
    sheet.say("x0, as the network expects it at each of these steps", 14, _DUST, (_EDGE, second - 24))
