"""What must not change when the code is rearranged: images, studies, a trace, a tuned plan, the doctor's findings.

    python bench/golden.py make OUT [--data FOLDER --inception FILE]    # run the commands of this checkout
    python bench/golden.py make OUT --only samplers,tune                # some of them, by the names of their outputs
    python bench/golden.py compare BEFORE AFTER                         # exits 1 where a number differs

`make` runs everything through the command line, one thread each, so that it works on any two checkouts. `compare` wants
images bit by bit, tensors bit by bit and numbers of JSON files exactly; times and memory are left out, and wording
is counted apart, because sentences may be improved where numbers may not ("picture" is "image"). --data is a folder of
CIFAR-10 in its binary form: without it the schedule study is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ONLY: set[str] = set()  # outputs that are made; all where it is empty
STAR = "a small striped red star above a large blue square on a grey background"
# Keys whose values are times, sizes of a process or names of this run.
VOLATILE = re.compile(
    r"second|_ms$|\bms\b|latency|peak|rss|memory|elapsed|created|date|version|digest|hash|stage|path|folder"
)

SAMPLES = {
    "default": "",
    "sampler": "--sampler dpmpp_2m --grid trailing --steps 12 --guidance 4",
    "sde": "--sampler dpmpp_2m_sde --grid trailing --steps 8 --guidance 4 --noise torch",
    "rules": "--sampler ddim --steps 8 --guidance '5 + apg' --negative 'a blue circle'",
    "dialect": "--sampler euler --as diffusers --steps 8 --guidance 'guarded 9'",
    "img2img": "--image {image} --strength 0.6 --steps 12 --guidance 4",
    "inpaint": "--image {image} --mask {mask} --steps 12 --guidance 4",
    "lora": "--lora scenes-128/lora:0.8 --steps 8 --guidance 4",
    "control": "--control scenes-128/controlnet,{image},0.9,0-0.8 --steps 8 --guidance 4",
    "image_prompt": "--image-prompt scenes-128/ip_adapter,{image},0.7 --steps 8 --guidance 4",
    "plan": "--plan scenes-128/plans/8.json --guidance 4",
    "batch": "-n 3 --batch 3 --sampler unipc --steps 8 --guidance linear:7:2",
}
STUDIES = {
    "samplers": "--model scenes-128 --samplers ddim,dpmpp_2m:karras,euler_a --steps 5,10 --prompts scenes:6"
    " --guidance 4 --converged-steps 30 --path-steps 30 --rounds 1 --batch 3 --processes 2",
    "guidance": "--model scenes-128 --scales 1,4,10 --rules plain,apg --prompts scenes:4 --seeds 2 --steps 6",
    "oracle": "--samplers ddim,heun,dpmpp_2m,euler_a --schedules edm,cosine --grids karras,trailing --nfe 4,8"
    " --points 64",
    "interaction": "--models scenes-128,scenes-128/dit --names unet,dit --samplers ddim,dpmpp_2m:karras --steps 5,10"
    " --prompts scenes:3 --seeds 2 --guidance 4 --converged-steps 20 --path-steps 20",
    "adherence": "--model scenes-128 --prompts 8 --steps 6",
}
TUNE = (
    "tune --model scenes-128 --prompts scenes --guidance 4 --steps 5 --pairs 4 --held-out 4 --iterations 4 --teacher 20"
    " --start dpmpp_2m:ays --json"
)


def run(out: Path, command: str, *words: str, python: str = "-m pellucid.cli") -> None:
    """One command, its output kept beside what it made. Exit 1 is an answer (doctor, diff), above it a failure."""
    if ONLY and out.stem not in ONLY:
        return
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "200"}
    line = [sys.executable, *shlex.split(python), *shlex.split(command), *words]
    env = os.environ | one_thread | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(line, env=env, capture_output=True, text=True, cwd=ROOT)
    out.write_text(done.stdout)
    print(f"{out.name}: exit {done.returncode}", flush=True)
    if done.returncode > 1:
        raise SystemExit(f"{shlex.join(line)}\n{done.stderr[-3000:]}")


def make(out: Path, data: Path | None, inception: Path | None) -> None:
    from PIL import Image, ImageDraw

    images = out / "images"
    images.mkdir(parents=True)
    image, mask = out / "image.png", out / "mask.png"
    run(out / "image.json", f"sample scenes-128 'a large green circle' --seed 3 --out {image} --json")
    drawn = Image.new("L", (128, 128))
    ImageDraw.Draw(drawn).rectangle((32, 32, 96, 96), fill=255)
    drawn.save(mask)
    for name, words in SAMPLES.items():
        given = words.format(image=image, mask=mask)
        run(out / f"{name}.json", f"sample scenes-128 '{STAR}' {given} --seed 7 --out {images / name} --json")
    run(out / "dit.json", f"sample scenes-128/dit '{STAR}' --seed 7 --out {images / 'dit'} --json")
    rules = next((images / "rules").glob("*"), None)
    run(out / "again.json", f"sample --from {rules} --out {images / 'again'} --json")
    traces = [out / "a.safetensors", out / "b.safetensors"]
    for path, guidance in zip(traces, ("4", "'4 + apg'"), strict=True):
        words = f"--seed 5 --steps 8 --guidance {guidance} --trace {path} --trace-tensors --out {images / path.stem}"
        run(out / f"{path.stem}.json", f"sample scenes-128 '{STAR}' {words} --json")
    run(out / "trace_show.json", f"trace show {traces[0]} --json")
    run(out / "trace_diff.json", f"trace diff {traces[0]} {traces[1]} --json")
    run(out / "plan.json", "plan dpmpp_2m --schedule cosine --grid karras --steps 8 --json")
    run(out / "inspect.json", "inspect scenes-128 --json")
    for name, words in STUDIES.items():
        run(out / f"{name}.json", f"study {name} {words} --out {out / name} --json")
    if data is not None and inception is not None:
        text = (ROOT / "configs/cifar10_schedules_smoke.toml").read_text("utf-8")
        text = text.replace("data/cifar10", str(data.resolve()))
        config = out / "schedules.toml"
        config.write_text(text.replace("data/inception.safetensors", str(inception.resolve())))
        run(out / "schedules.json", f"study schedules {config} --out {out / 'schedules'} --device cpu --json")
    run(out / "tune.json", f"{TUNE} --out {out / 'tuned.json'}")
    run(out / "doctors.log", f"doctors {out}", python=str(Path(__file__)))


def doctors(out: Path) -> None:
    """The sabotages of the tests on the shipped weights, and what is healthy."""
    sys.path[:0] = [str(ROOT / "tests/evidence")]
    import torch
    from test_doctor_scenes_128 import HEALTHY, SABOTAGES, doctor

    torch.set_num_threads(1)
    cases = {name: words for name, (_, words) in SABOTAGES.items()} | HEALTHY
    for name, words in cases.items():
        place = out / "sabotage"
        place.mkdir()
        found = json.dumps(doctor(*words(place)), indent=1)
        (out / "doctor").mkdir(exist_ok=True)
        (out / "doctor" / f"{name.replace(' ', '_')}.json").write_text(found)
        shutil.rmtree(place)
        print(name, flush=True)


# --- compare ------------------------------------------------------------------------------------------------------


def leaves(held: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(held, dict):
        for key, value in held.items():
            if key in ("checked", "skipped"):  # the doctor's checks run in no promised order
                value = sorted(value, key=str)
            if not VOLATILE.search(str(key).lower()):
                yield from leaves(value, f"{place}.{key}")
    elif isinstance(held, list):
        for i, value in enumerate(held):
            yield from leaves(value, f"{place}[{i}]")
    else:
        yield place, held


def in_one_word(text: str) -> str:
    return text.replace("a picture", "an image").replace("a_picture", "an_image").replace("picture", "image")


def json_differences(a: str, b: str) -> tuple[list[str], int]:
    """Places whose numbers or names differ, and how many sentences do."""
    try:
        one, two = (dict(leaves(json.loads(in_one_word(text)))) for text in (a, b))
    except json.JSONDecodeError:
        return ([] if a == b else ["not JSON, and different"]), 0
    found = [f"{place}: only on one side" for place in one.keys() ^ two.keys()]
    both = [(place, one[place], two[place]) for place in one if place in two]
    differ = [(place, x, y) for place, x, y in both if x != y and not (x != x and y != y)]
    texts = [place for place, x, y in differ if isinstance(x, str) and isinstance(y, str) and (" " in x or "/" in x)]
    return found + [f"{place}: {x!r} → {y!r}" for place, x, y in differ if place not in texts], len(texts)


def differences(a: Path, b: Path) -> tuple[list[str], int]:
    if a.suffix == ".png":
        from PIL import Image

        one, two = Image.open(a), Image.open(b)
        return ([] if one.mode == two.mode and one.tobytes() == two.tobytes() else ["other pixels"]), 0
    if a.suffix == ".safetensors":
        import torch
        from safetensors.torch import load_file

        x, y = (
            {k: v for k, v in load_file(p).items() if not k.endswith((".clock", ".memory", ".check"))} for p in (a, b)
        )
        same = x.keys() == y.keys() and all(torch.equal(x[k].nan_to_num(), y[k].nan_to_num()) for k in x)
        return ([] if same else ["other tensors"]), 0
    if a.suffix == ".jsonl":
        rows = [sorted(path.read_text("utf-8").splitlines()) for path in (a, b)]
        found = [json_differences(x, y) for x, y in zip(*rows, strict=False)]
        return [line for lines, _ in found for line in lines] + ([] if len(rows[0]) == len(rows[1]) else ["rows"]), 0
    return json_differences(a.read_text("utf-8"), b.read_text("utf-8"))


def compare(before: Path, after: Path) -> int:
    kept = (".png", ".safetensors", ".json", ".jsonl")
    names = sorted(
        p.relative_to(before)
        for p in before.rglob("*")
        if p.suffix in kept and "charts" not in p.parts and "runs" not in p.parts
    )
    equal, worse, texts, missing = 0, 0, 0, []
    for name in names:
        twin = after / (name if (after / name).is_file() else in_one_word(str(name)))
        if not twin.is_file():
            missing.append(str(name))
            continue
        found, wording = differences(before / name, twin)
        texts += wording
        equal, worse = (equal, worse + 1) if found else (equal + 1, worse)
        for line in found[:8]:
            print(f"{name}: {line}")
    if missing:
        print(f"missing: {', '.join(missing)}")
    print(
        f"{equal} of {len(names)} files equal, {worse} differ, {len(missing)} missing; {texts} texts worded otherwise"
    )
    return 1 if worse or missing else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "doctors", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--inception", type=Path)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    ONLY.update(name for name in given.only.split(",") if name)
    if given.what == "compare":
        return compare(*given.folders)
    if given.what == "doctors":
        doctors(given.folders[0])
    else:
        make(given.folders[0].resolve(), given.data, given.inception)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
