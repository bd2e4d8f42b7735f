"""`pellucid demo`: twelve prompts to images on the CPU, each read and graded, and one of them step by step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.cli import output

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from pellucid.core.loop import StepSeen
    from pellucid.pipeline.pipeline import Pipeline
    from pellucid.scenes import Grade

MODEL = "scenes-128"
SAMPLER, GRID, STEPS, GUIDANCE = "dpmpp_2m", "trailing", 20, 4.0
SEED = 7
WORKERS = 2  # images at once, one thread each: that is quicker than two threads for one image
MOMENTS = 8
TITLE = "Text to image, on a CPU"
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
FOLLOWED = 4  # of them, the one that is shown on its way


@dataclass(frozen=True)
class DemoImage:
    """An image, what it was asked to be, and whether the reader found that."""

    prompt: str
    image: Image.Image
    grade: Grade
    seconds: float

    @property
    def wrong(self) -> str:
        """What was asked for and is not there, in words."""
        marks = [mark for mark in self.grade.marks if mark.verdict != "right"]
        told = [f"{mark.what}: {mark.seen or 'unreadable'}, not {mark.wanted}" for mark in marks]
        return "; ".join(told[:2]) or (self.grade.trouble or "")


@dataclass(frozen=True)
class Moment:
    """x and the x0 that the network expects of it, as images, where the share of noise is sigma (α² + σ² = 1)."""

    sigma: float
    x: Image.Image
    x0: Image.Image


def show(out: Path, steps: int, overwrite: bool, as_json: bool) -> None:
    """Makes, reads and draws the images; prints what was found."""
    from pellucid.cli import draw_scenes

    goal = output.destination(out, "--out", (".png",), overwrite=overwrite)
    with output.progress("noise to images", len(PROMPTS) + 2) as done, one_thread():
        pipe, seconds = timed_load()
        done()
        watch = StepRecorder()
        images, times = make_images(pipe, steps, watch, done)
        found = grade_images(images, times)
        moments = watch.moments(pipe)
        board = draw_scenes.draw_sheet(
            found, moments, draw_scenes.SheetText(TITLE, f"{settings_line(steps)} · {NEW}", PROMPTS[FOLLOWED])
        )
        goal.write(board.save)
        done()
    if as_json:
        rows = [{"prompt": m.prompt, "right": m.grade.right, "wrong": m.wrong, "seconds": m.seconds} for m in found]
        output.print_json({"out": str(out), "model": MODEL, "steps": steps, "load_seconds": seconds, "pictures": rows})
    else:
        print_table(found, steps, seconds, out)


def settings_line(steps: int) -> str:
    return f"{MODEL} · DPM++ 2M, {steps} steps, guidance {GUIDANCE:g}"


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch uses one thread a kernel: small work is quicker so, and images run side by side."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def timed_load() -> tuple[Pipeline, float]:
    from pellucid.pipeline.load import load

    began = time.perf_counter()
    pipe = load(MODEL, device="cpu")
    return pipe, time.perf_counter() - began


def make_images(
    pipe: Pipeline, steps: int, watch: StepRecorder, done: Callable[[], None]
) -> tuple[list[Any], list[float]]:
    """The image of every prompt and its seconds. One pipeline serves all threads."""

    def one(number: int) -> tuple[Any, float]:
        began = time.perf_counter()
        asked: dict[str, Any] = {"sampler": SAMPLER, "grid": GRID, "steps": steps, "guidance": GUIDANCE}
        seen = [watch] if number == FOLLOWED else []
        image = pipe(PROMPTS[number], seed=SEED + number, observers=seen, **asked).images[0]
        done()
        return image, time.perf_counter() - began

    with ThreadPoolExecutor(workers()) as pool:
        pairs = list(pool.map(one, range(len(PROMPTS))))
    return [image for image, _ in pairs], [seconds for _, seconds in pairs]


def workers() -> int:
    return min(WORKERS, os.cpu_count() or 1)


def grade_images(images: list[Any], times: list[float]) -> list[DemoImage]:
    """What the reader of scenes finds in the images, against what their prompts ask for."""
    from pellucid import scenes
    from pellucid.pipeline.images import to_tensor

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
        import torch

        from pellucid.models.vae import from_diffusion
        from pellucid.pipeline.images import to_images

        count = min(MOMENTS, len(self.seen))
        chosen = [self.seen[round(i * (len(self.seen) - 1) / max(count - 1, 1))] for i in range(count)]
        latents = torch.cat([torch.cat([x, x0]) for _, x, x0 in chosen])
        vae: Any = pipe.components.vae
        with torch.inference_mode():
            images = to_images(vae.decode(from_diffusion(vae.config, latents).to(next(vae.parameters()))).float())
        pairs = zip(images[::2], images[1::2], strict=True)
        return [Moment(sigma, x, x0) for (sigma, _, _), (x, x0) in zip(chosen, pairs, strict=True)]


def print_table(found: list[DemoImage], steps: int, load: float, out: Path) -> None:
    columns = ("prompt", "as asked", "seconds")
    table = output.table(*columns, right=columns[2:])
    for one in found:
        verdict = "[green]yes[/]" if one.grade.right else f"[red]no[/] [dim]{one.wrong}[/]"
        table.add_row(one.prompt, verdict, f"{one.seconds:.2f}")
    screen = output.console()
    screen.print(settings_line(steps), style="bold")
    screen.print(table)
    right, busy = sum(one.grade.right for one in found), sum(one.seconds for one in found)
    for words in (
        f"{right} of {len(found)} have all that was asked for, by the reader of pellucid.scenes; {NEW}.",
        f"{busy / len(found) / workers():.2f} s per image on the CPU, {workers()} at once; loaded in {load:.2f} s.",
        f"wrote {out}",
    ):
        screen.print(words, soft_wrap=True, markup=False)
