"""The shipped model on a CPU, ours and diffusers' in one process: seconds to load, seconds per image, and how far apart
the images are.

    .venv/bin/python bench/scenes_128_cpu.py            (--rounds 9 --threads 2)

One image of 128 × 128: DPM++ 2M, 20 steps, guidance 4, float32, from the same noise. A round makes one image with
each, in an order that turns; the first is not counted. Loading is timed in processes of their own, imports not counted,
files in the page cache. The promise is at most 1.0 s per image and 1.5 s to load on two cores, images within 2/255.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pellucid.interop.source import BUNDLES

FOLDER = BUNDLES / "scenes-128"
PROMPT = "a small striped red star above a large blue square on a grey background"
STEPS, GUIDANCE = 20, 4.0
OPENED = {
    "pellucid": "import pellucid.pipeline.load as opening; began = now(); opening.load('scenes-128', device='cpu')",
    "diffusers": "import transformers; from diffusers import StableDiffusionPipeline as Peer; "
    f"began = now(); Peer.from_pretrained({str(FOLDER)!r}, dtype=torch.float32)",
}


def load_seconds(name: str) -> float:
    code = f"import torch; from time import perf_counter as now; {OPENED[name]}; print('took', now() - began)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.rsplit("took", 1)[1])


def makers() -> dict[str, Callable[[torch.Tensor], Any]]:
    import diffusers

    import pellucid

    mine = pellucid.load("scenes-128", device="cpu")
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(FOLDER, dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    return {
        "pellucid": lambda x: mine(PROMPT, latents=x, steps=STEPS, guidance=GUIDANCE).images[0],
        "diffusers": lambda x: theirs(
            PROMPT, latents=x, num_inference_steps=STEPS, guidance_scale=GUIDANCE, generator=None
        ).images[0],
    }


def main() -> None:
    words = argparse.ArgumentParser(description="The shipped model on a CPU, beside diffusers.")
    words.add_argument("--rounds", type=int, default=9)
    words.add_argument("--threads", type=int, default=2)
    words.add_argument("--json", action="store_true")
    asked = words.parse_args()
    torch.set_num_threads(asked.threads)
    made = makers()
    seconds: dict[str, list[float]] = {name: [] for name in made}
    apart = []
    for turn in range(asked.rounds + 1):
        x = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(turn))
        images = {}
        for name in list(made)[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            images[name] = np.asarray(made[name](x), dtype=int)
            seconds[name] += [time.perf_counter() - began] if turn else []
        apart.append(int(np.abs(images["pellucid"] - images["diffusers"]).max()))
    opened = {name: statistics.median(load_seconds(name) for _ in range(3)) for name in OPENED}
    found = {
        "threads": asked.threads,
        "seconds_a_picture": {name: statistics.median(held) for name, held in seconds.items()},
        "ratio": statistics.median(b / a for a, b in zip(seconds["pellucid"], seconds["diffusers"], strict=True)),
        "load_seconds": opened,
        "largest_difference_of_255": max(apart),
    }
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    print(f"scenes-128, 128 × 128, DPM++ 2M, {STEPS} steps, guidance {GUIDANCE:g}; {asked.threads} threads")
    for name in made:
        print(f"{name:10} {found['seconds_a_picture'][name]:6.3f} s per image   loads in {opened[name]:5.2f} s")
    print(f"diffusers takes {found['ratio']:.2f} times as long; images at most {max(apart)}/255 apart")


if __name__ == "__main__":
    main()
