"""Makes the images of the README again, with the commands that stand beside them.

.venv/bin/python docs/readme_images.py        (a minute on two cores)
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from pellucid.interop.source import BUNDLES

IMAGES = Path(__file__).parent / "images"
PROMPT = "a small striped red star above a large blue square on a grey background"
DARK, LIGHT, DIM = "#0b0f17", "#e6edf3", "#8b98a5"
COLOURS = {"error": "#ff7b72", "evidence": "#79c0ff", "cause": "#d2a8ff", "fix": "#7ee787"}
SIDE, GAP, LINE, COLUMNS = 256, 24, 21, 104


def pellucid(*words: str) -> str:
    """What a command prints; the doctor ends with 1 where it finds something."""
    done = subprocess.run([sys.executable, "-m", "pellucid.cli", *words], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    return done.stdout


def trace(folder: Path) -> None:
    run = str(folder / "run.safetensors")
    asked = ["--sampler", "dpmpp_2m", "--grid", "trailing", "--guidance", "4", "--steps", "12", "--seed", "5"]
    pellucid(
        "sample", "scenes-128", PROMPT, *asked, "--trace", run, "--trace-tensors", "--out", str(folder / "star.png")
    )
    pellucid("trace", "show", run, "--plot", str(IMAGES / "trace.png"), "--overwrite")


def plan(folder: Path) -> None:
    asked = ["--schedule", "cosine", "--target", "v", "--grid", "karras", "--steps", "8"]
    pellucid("plan", "dpmpp_2m", *asked, "--plot", str(IMAGES / "plan.png"), "--overwrite")


def broken_model(folder: Path) -> Path:
    """scenes-128, which predicts v, under a config that says eps: the commonest way to break a model."""
    place = Path(shutil.copytree(BUNDLES / "scenes-128", folder / "broken"))
    config = place / "scheduler/scheduler_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "prediction_type": "epsilon"}))
    return place


def sampled(file: Path, model: str, *more: str) -> Image.Image:
    asked = ["--guidance", "4", "--steps", "20", "--seed", "5", "--dtype", "float32"]
    pellucid("sample", model, PROMPT, *asked, *more, "--out", str(file))
    return Image.open(file).resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def diff(folder: Path) -> None:
    """The same but for the rule that guides: whose number is seen first, and by how much."""
    ways = {"guidance 4": (), "guidance 4, by APG": ("--guidance", "4 + apg")}
    traces = [folder / "a.safetensors", folder / "b.safetensors"]
    images = {}
    for (words, more), file in zip(ways.items(), traces, strict=True):
        images[words] = sampled(file.with_suffix(".png"), "scenes-128", *more, "--trace", str(file))
    said = pellucid("trace", "diff", *map(str, traces)).replace(f"{folder}/", "")
    board(images, "pellucid trace diff a.safetensors b.safetensors", said).save(IMAGES / "diff.png")


def doctor(folder: Path) -> None:
    broken = broken_model(folder)
    shown = {"as it is": "scenes-128", "its config says eps": str(broken)}
    images = {words: sampled(folder / f"{n}.png", model) for n, (words, model) in enumerate(shown.items())}
    said = pellucid("doctor", str(broken), "--only", "target").replace(str(broken), "broken")
    board(images, "pellucid doctor broken --only target", said).save(IMAGES / "doctor.png")


def board(images: dict[str, Image.Image], command: str, said: str) -> Image.Image:
    """The images side by side, and what was said below them, as a terminal shows it."""
    small, mono = ImageFont.truetype(font("DejaVuSans"), 15), ImageFont.truetype(font("DejaVuSansMono"), 14)
    lines = [f"$ {command}"]
    for line in said.strip().splitlines():
        lines += textwrap.wrap(line, COLUMNS, subsequent_indent=" " * 11) or [""]
    wide = max(int(mono.getlength(line)) for line in lines) + 2 * GAP
    high = GAP + SIDE + 2 * GAP + LINE * len(lines) + GAP
    sheet = Image.new("RGB", (max(wide, len(images) * (SIDE + GAP) + GAP), high), DARK)
    pen = ImageDraw.Draw(sheet)
    for number, (words, image) in enumerate(images.items()):
        left = GAP + number * (SIDE + GAP)
        sheet.paste(image, (left, GAP))
        pen.text((left, GAP + SIDE + 5), words, DIM, small)
    word = ""
    for number, line in enumerate(lines):
        begun = line.strip().split("[")[0].split(" ")[0]
        word = word if line.startswith(" " * 11) else begun
        at = (GAP, SIDE + 3 * GAP + LINE * number)
        pen.text(at, line, DIM if number == 0 else COLOURS.get(word, LIGHT), mono)
    return sheet


def font(name: str) -> str:
    import matplotlib

    return str(Path(matplotlib.get_data_path()) / "fonts/ttf" / f"{name}.ttf")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for make in (trace, plan, diff, doctor):
            make(Path(folder))


if __name__ == "__main__":
    main()
