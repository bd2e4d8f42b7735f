"""`pellucid demo`: images from prompts by the model that Pellucid brings with it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pellucid.cli import output
from pellucid.cli.options import AsJson, Overwrite, option

if TYPE_CHECKING:
    from pellucid.evidence.demo import DemoImage

_STEPS = 20


def command(
    out: Annotated[Path, option("FILE", "The image.")] = Path("demo.png"),
    steps: Annotated[int, option("N", "Steps of each image.", min=2, max=100)] = _STEPS,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Make images of twelve prompts on the CPU, and show one of them on its way from noise.

    Example: [bold]pellucid demo --steps 10 --out images.png[/]
    """
    goal = output.destination(out, "--out", (".png",), overwrite=overwrite)
    from pellucid.evidence import demo
    from pellucid.evidence.study.kernel import one_thread
    from pellucid.pipeline.load import load

    settings = f"{demo.MODEL} · DPM++ 2M, {steps} steps, guidance {demo.GUIDANCE:g}"
    with output.progress("making images", len(demo.PROMPTS) + 2) as done, one_thread():
        began = time.perf_counter()
        pipe = load(demo.MODEL, device="cpu")
        seconds = time.perf_counter() - began
        done()
        recorder = demo.StepRecorder()
        found = demo.grade_images(*demo.make_images(pipe, steps, recorder, done))
        goal.write(demo.draw_sheet(found, recorder.moments(pipe), settings).save)
        done()
    if as_json:
        rows = [{"prompt": m.prompt, "right": m.grade.right, "wrong": m.wrong, "seconds": m.seconds} for m in found]
        about = {"out": str(out), "model": demo.MODEL, "steps": steps, "load_seconds": seconds}
        output.print_json({**about, "pictures": rows})
    else:
        _show(found, settings, seconds, out)


def _show(found: list[DemoImage], settings: str, load: float, out: Path) -> None:
    from pellucid.evidence.demo import NEW, workers

    rows = []
    for one in found:
        verdict = "[green]yes[/]" if one.grade.right else f"[red]no[/] [dim]{one.wrong}[/]"
        rows.append((one.prompt, verdict, f"{one.seconds:.2f}"))
    screen = output.console()
    screen.print(settings, style="bold")
    screen.print(output.table("prompt", "as asked", "seconds", right=("seconds",), rows=rows))
    right, busy = sum(one.grade.right for one in found), sum(one.seconds for one in found)
    for words in (
        f"{right} of {len(found)} match their prompts, as read by pellucid.scenes; {NEW}.",
        f"{busy / len(found) / workers():.2f} s per image on the CPU, {workers()} in parallel; loaded in {load:.2f} s.",
        f"wrote {out}",
    ):
        output.say(words)
