"""What one step costs without the network: Pellucid, diffusers and k-diffusion side by side in one run.

    .venv/bin/python bench/scheduler_overhead.py            (or: make bench)

Latents 1×4×64×64, float32, on the CPU, one thread. A step is `scale_model_input` plus `step` (k-diffusion: one turn of
its loop). The model output is a tensor made beforehand. The table shows the median of the rounds in µs, the spread
(quartiles), and the ratio to Pellucid in the same round. Then: the time to compile a 50-step plan of every sampler, and
how the time and the memory of `run` grow with rows and images.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import pellucid
from pellucid.core.samplers import REGISTRY

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "parity"))

from peers import k_diffusion

SHAPE = (1, 4, 64, 64)
STEPS = 50


def scheduler_round(make: Callable[[], Any]) -> float:
    """µs a step of a scheduler with the three-call API."""
    scheduler = make()
    scheduler.set_timesteps(STEPS)
    times = list(scheduler.timesteps)
    x, out = torch.randn(SHAPE), torch.randn(SHAPE)
    begin = time.perf_counter()
    for t in times:
        scheduler.scale_model_input(x, t)
        x = scheduler.step(out, t, x, return_dict=False)[0]
    return (time.perf_counter() - begin) / len(times) * 1e6


def k_round(sample: Callable[..., Any], model_out: torch.Tensor) -> float:
    """µs a step of a k-diffusion sampler: its loop with a model that costs nothing."""
    sigmas = torch.cat([torch.logspace(1, -1.5, STEPS), torch.zeros(1)])
    x = torch.randn(SHAPE)
    begin = time.perf_counter()
    sample(lambda x, sigma: model_out, x, sigmas, disable=True)
    return (time.perf_counter() - begin) / STEPS * 1e6


def contenders() -> dict[str, dict[str, Callable[[], float]]]:
    import diffusers

    k = k_diffusion()
    still = torch.randn(SHAPE)
    rows: dict[str, dict[str, Callable[[], float]]] = {}
    for label, class_name, k_name, config in (
        ("Euler", "EulerDiscreteScheduler", "sample_euler", {}),
        ("DPM++ 2M", "DPMSolverMultistepScheduler", "sample_dpmpp_2m", {}),
        ("DDIM", "DDIMScheduler", None, {"clip_sample": False}),
        ("Heun", "HeunDiscreteScheduler", None, {}),
        ("UniPC", "UniPCMultistepScheduler", None, {}),
        ("Euler a", "EulerAncestralDiscreteScheduler", "sample_euler_ancestral", {}),
    ):
        peer_class = getattr(diffusers, class_name)
        ours = {"_class_name": class_name, **config}
        rows[label] = {
            "pellucid": lambda ours=ours: scheduler_round(lambda: pellucid.Scheduler.from_config(ours)),
            "diffusers": lambda c=peer_class, g=config: scheduler_round(lambda: c(**g)),
        }
        if k_name is not None:
            sample = getattr(k, k_name)
            rows[label]["k-diffusion"] = lambda f=sample: k_round(f, still)
    return rows


def measure(rounds: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for label, who in contenders().items():
        for call in who.values():  # warm up
            call()
        seen: dict[str, list[float]] = {name: [] for name in who}
        gc.disable()
        for _ in range(rounds):
            for name, call in who.items():
                seen[name].append(call())
        gc.enable()
        result[label] = {
            name: {
                "us": statistics.median(values),
                "quartiles": [
                    round(q, 2) for q in (statistics.quantiles(values, n=4)[0], statistics.quantiles(values, n=4)[2])
                ],
                "times_pellucid": statistics.median(v / p for v, p in zip(values, seen["pellucid"], strict=True)),
            }
            for name, values in seen.items()
        }
    return result


def compile_times() -> dict[str, float]:
    """ms to compile 50 steps, the median of 9, for every sampler."""
    out = {}
    for name in REGISTRY:
        values = []
        for _ in range(9):
            begin = time.perf_counter()
            pellucid.compile_plan(name, steps=STEPS)
            values.append((time.perf_counter() - begin) * 1e3)
        out[name] = statistics.median(values)
    return out


class Peak:
    """The most bytes of tensors alive at once, seen by an observer between rows."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, _: pellucid.StepSeen) -> None:
        alive = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if isinstance(t, torch.Tensor)
        }
        self.bytes = max(self.bytes, sum(alive.values()))


def growth() -> dict[str, Any]:
    """Memory and time of `run` against rows and images."""

    def denoise(x: torch.Tensor, level: Any, time: Any) -> torch.Tensor:
        return x * 0.5

    out: dict[str, Any] = {"rows": {}, "images": {}}
    for rows in (10, 100, 1000):
        plan = pellucid.compile_plan("dpmpp_2m", steps=rows)
        begin = time.perf_counter()
        pellucid.run(plan, denoise, torch.randn(SHAPE))
        seconds = time.perf_counter() - begin
        peak = Peak()
        short = pellucid.compile_plan("dpmpp_2m", steps=rows)
        pellucid.run(short, denoise, torch.randn(SHAPE), observers=[peak] if rows <= 100 else [every(100, peak)])
        out["rows"][rows] = {"us_a_row": seconds / rows * 1e6, "peak_bytes": peak.bytes}
    plan = pellucid.compile_plan("dpmpp_2m", steps=50)
    for images in (1, 4, 16, 64):
        x = torch.randn(images, *SHAPE[1:])
        pellucid.run(plan, denoise, x)
        begin = time.perf_counter()
        pellucid.run(plan, denoise, x)
        out["images"][images] = {"us_a_row_an_image": (time.perf_counter() - begin) / 50 / images * 1e6}
    return out


def every(count: int, observer: Peak) -> Callable[[pellucid.StepSeen], None]:
    return lambda seen: observer(seen) if seen.index % count == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    result = {"step": measure(args.rounds), "compile_ms": compile_times(), "growth": growth()}
    if args.json:
        print(json.dumps(result, indent=1))
        return
    print(f"one step without the network, latents {SHAPE} float32, {args.rounds} rounds of {STEPS} steps")
    print(f"{'sampler':10} {'who':12} {'median µs':>10} {'quartiles µs':>20} {'× pellucid':>11}")
    for label, who in result["step"].items():
        for name, row in who.items():
            low, high = row["quartiles"]
            print(
                f"{label:10} {name:12} {row['us']:10.1f} {f'{low:.1f} – {high:.1f}':>20} {row['times_pellucid']:11.2f}"
            )
    slowest = max(result["compile_ms"], key=result["compile_ms"].get)
    print(
        f"\ncompiling {STEPS} steps: slowest {slowest} {result['compile_ms'][slowest]:.1f} ms, "
        f"median {statistics.median(result['compile_ms'].values()):.1f} ms"
    )
    for rows, row in result["growth"]["rows"].items():
        print(
            f"run of {rows:5} rows: {row['us_a_row']:8.1f} µs a row, peak of live tensors {row['peak_bytes']:,} bytes"
        )
    for images, row in result["growth"]["images"].items():
        print(f"run of {images:5} images: {row['us_a_row_an_image']:8.1f} µs a row and image")


if __name__ == "__main__":
    main()
