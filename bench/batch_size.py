"""How far an image of a batch is from the same image made alone: scenes-128, the same seed and prompt.

    .venv/bin/python bench/batch_size.py            (--device cuda --dtype float32 bfloat16)

The noise has an address, so that it is equal to the bit at any batch size. Kernels of another batch size may add up in
another order, and a run of many steps carries that rounding on. Printed: whether the first noise is equal, the largest
difference of latents (whose standard deviation is about 1), the share of 8-bit pixel values that differ, and by how
much at most.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

import pellucid
from pellucid.core.noise import Philox

SAMPLERS = ("ddim", "dpmpp_2m", "euler_a")
SIZES = (2, 4, 8, 16)


def equal_noise(count: int, device: str) -> bool:
    like = torch.empty(0, device=device)
    batch = Philox(range(count)).first((4, 16, 16), like, range(count))
    return all(torch.equal(batch[i], Philox([i]).first((4, 16, 16), like, [0])[0]) for i in range(count))


def main() -> None:
    words = argparse.ArgumentParser(description="An image alone and in a batch.")
    words.add_argument("--device", default="cpu")
    words.add_argument("--dtype", nargs="+", default=["float32"])
    words.add_argument("--images", type=int, default=16)
    asked = words.parse_args()
    name = torch.cuda.get_device_name() if asked.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"scenes-128 on {name}, torch {torch.__version__}, {asked.images} images, 20 steps, guidance 4")
    print(f"first noise equal to the bit: {equal_noise(asked.images, asked.device)}")
    print(f"{'dtype':10}{'sampler':10}{'batch':>6}{'latents, largest':>18}{'pixels differ':>15}{'by at most':>12}")
    prompts = [f"a {color} star on a white background" for color in ("red", "blue", "green", "yellow")]
    for dtype in asked.dtype:
        pipe = pellucid.load("scenes-128", device=asked.device, dtype=dtype)
        for sampler in SAMPLERS:
            how = {"sampler": sampler, "grid": "trailing", "steps": 20, "guidance": 4}
            told = [prompts[i % len(prompts)] for i in range(asked.images)]
            alone = [pipe(text, seed=i, **how) for i, text in enumerate(told)]
            for size in (size for size in SIZES if size <= asked.images):
                far, other, most = 0.0, 0, 0
                for first in range(0, asked.images, size):
                    seeds = list(range(first, first + size))
                    made = pipe([told[i] for i in seeds], seed=seeds, **how)
                    for k, i in enumerate(seeds):
                        far = max(far, float((made.latents[k] - alone[i].latents[0]).abs().max()))
                        apart = np.abs(np.asarray(made.images[k], int) - np.asarray(alone[i].images[0], int))
                        other, most = other + int((apart > 0).sum()), max(most, int(apart.max()))
                share = other / (asked.images * 3 * 128 * 128)
                print(f"{dtype:10}{sampler:10}{size:6}{far:18.1e}{share:15.2%}{most:12}", flush=True)


if __name__ == "__main__":
    main()
