"""What a trace costs: one run plain, with numbers, and with tensors too, side by side in one process.

    .venv/bin/python bench/trace_overhead.py            (--rounds 41 --threads 2 --batch 1 --device cpu)

The network is that of scenes-128: a UNet of 3.3 million parameters on latents of 4 × 16 × 16, with random weights; 20
steps of DPM++ 2M, guidance 7 with rescale, cond and uncond in one batch. A round makes the three runs one after the
other, in an order that turns; the first rounds are not counted. Shown are medians with quartiles, the median of the
ratios of each round to its own plain run.
The promise is at most 1.05 with numbers and 1.15 with tensors. On a machine that others use too, `--cpu` counts the
seconds of this process instead of those on the wall; take it with one thread, since waiting threads count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import pellucid
from pellucid.core import schedule as schedules
from pellucid.evidence.trace import Recorder
from pellucid.models import unet_config
from pellucid.models.guided import GuidedDenoiser
from pellucid.models.unet import UNet

UNET: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [80, 96],
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
    "layers_per_block": 1,
    "cross_attention_dim": 128,
    "attention_head_dim": [5, 6],
    "norm_num_groups": 16,
    "use_linear_projection": True,
}
SHAPE, WARM = (4, 16, 16), 3
WAYS = ("plain", "numbers", "tensors")


def denoiser_of(batch: int, device: str) -> tuple[GuidedDenoiser, int]:
    """The network of scenes-128 with random weights and a random prompt of 32 tokens."""
    torch.manual_seed(0)
    network = (
        UNet(unet_config.read({"_class_name": "UNet2DConditionModel", **UNET})).to(device).eval().requires_grad_(False)
    )
    cond, uncond = ({"context": torch.randn(batch, 32, 128, device=device)} for _ in range(2))
    made = GuidedDenoiser(network, schedules.make("cosine"), "v", cond, uncond, pellucid.guarded(7.0))
    return made, sum(weight.numel() for weight in network.parameters())


def runs(
    denoiser: GuidedDenoiser, plan: pellucid.Plan, asked: argparse.Namespace, folder: Path
) -> Callable[[str], float]:
    """Seconds of one run of a way, the opening and closing of its file included."""
    clock = time.process_time if asked.cpu else time.perf_counter

    def one(way: str) -> float:
        path = folder / f"{way}.safetensors"
        path.unlink(missing_ok=True)
        begun = clock()
        with nullcontext() if way == "plain" else Recorder(path, tensors=way == "tensors") as recorder:
            watching = [] if recorder is None else [recorder]
            pellucid.run(plan, denoiser, shape=SHAPE, seeds=range(asked.batch), observers=watching, device=asked.device)
        if asked.device != "cpu":
            torch.cuda.synchronize()
        return clock() - begun

    return one


def measure(one: Callable[[str], float], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds + WARM):
        for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
            took = one(way)
            if turn >= WARM:
                found[way].append(took)
    return found


def summary(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    out = {}
    for way, took in found.items():
        low, middle, high = statistics.quantiles(took, n=4)
        ratio = statistics.median(a / b for a, b in zip(took, found["plain"], strict=True))
        out[way] = {"ms": 1e3 * middle, "low": 1e3 * low, "high": 1e3 * high, "ratio": ratio, "best": 1e3 * min(took)}
    return out


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cpu", action="store_true", help="seconds of the process, not of the wall")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    denoiser, size = denoiser_of(asked.batch, asked.device)
    plan = pellucid.compile_plan("dpmpp_2m", schedule="cosine", target="v", steps=asked.steps)
    with tempfile.TemporaryDirectory() as folder:
        one = runs(denoiser, plan, asked, Path(folder))
        table = summary(measure(one, asked.rounds))
        size_on_disk = (Path(folder) / "tensors.safetensors").stat().st_size
    if asked.json:
        print(json.dumps({"parameters": size, "plan": plan.nfe, **table}))
        return
    print(f"UNet of {size / 1e6:.1f} M parameters, {asked.batch} × {SHAPE}, {plan.nfe} guided steps, {asked.device}, ")
    print(f"{asked.threads} threads; {asked.rounds} rounds; a file with tensors has {size_on_disk / 1e3:.0f} kB")
    print(f"{'':10}{'ms':>8}{'quartiles':>18}{'best':>8}{'ratio':>8}")
    for way, row in table.items():
        spread = f"{row['low']:.1f}–{row['high']:.1f}"
        print(f"{way:10}{row['ms']:8.1f}{spread:>18}{row['best']:8.1f}{row['ratio']:8.3f}")


if __name__ == "__main__":
    main()
