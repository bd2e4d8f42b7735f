"""Our networks against diffusers' on a GPU, bf16, one set of random weights, eager and compiled, in one run.

    PYTHONPATH=src:FOLDER_WITH_DIFFUSERS python3 bench/network_gpu.py --out DIR

Times are medians of interleaved rounds of several calls between CUDA events; peaks are what a call adds to the weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from networks import SD15, SDXL, Duel, Outcome, dit_duel, in_turns, table, unet_duel, vae_duel

CALLS = 5


def event_clock(call) -> float:
    """Milliseconds per call."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / CALLS


def peak_of(call) -> int:
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@torch.no_grad()
def fight(duel: Duel, rounds: int, compiled: bool) -> list[Outcome]:
    def ours():
        return duel.call_ours(duel.ours)

    def theirs():
        return duel.call_theirs(duel.theirs)

    for call in (ours, theirs, ours, theirs):
        call()
    eager = in_turns(f"{duel.name}, eager", ours, theirs, rounds, event_clock)
    found = [dataclasses.replace(eager, ours_peak=peak_of(ours), theirs_peak=peak_of(theirs))]
    print(table(found), flush=True)
    if compiled:
        fast = torch.compile(duel.ours, fullgraph=True, mode="reduce-overhead")
        slow = torch.compile(duel.theirs, fullgraph=True, mode="reduce-overhead")

        def fast_call():
            return duel.call_ours(fast).clone()

        def slow_call():
            return duel.call_theirs(slow).clone()

        for call in (fast_call, slow_call, fast_call, slow_call, fast_call, slow_call):
            call()
        found.append(in_turns(f"{duel.name}, compiled", fast_call, slow_call, rounds, event_clock))
        print(table(found[-1:]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    torch.manual_seed(0)
    like = torch.empty(0, device="cuda", dtype=torch.bfloat16)
    makers = {
        "sd15": lambda: unet_duel("SD 1.5 UNet 512², batch 2", SD15, 2, 64, like),
        "sdxl": lambda: unet_duel("SDXL UNet 1024², batch 2", SDXL, 2, 128, like),
        "dit": lambda: dit_duel("DiT-XL/2 256², batch 2", 2, like),
        "vae512": lambda: vae_duel("KL-VAE decode 512²", 1, 64, like),
        "vae1024": lambda: vae_duel("KL-VAE decode 1024²", 1, 128, like),
    }
    outcomes: list[Outcome] = []
    for name, make in makers.items():
        if asked.only and name not in asked.only.split(","):
            continue
        outcomes += fight(make(), asked.rounds, compiled=not name.startswith("vae"))
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        (asked.out / "networks.json").write_text(json.dumps([dataclasses.asdict(o) for o in outcomes], indent=1))
    device = torch.cuda.get_device_name()
    text = f"{device}, torch {torch.__version__}, bf16, {asked.rounds} rounds of {CALLS} calls\n\n{table(outcomes)}\n"
    (asked.out / "networks.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
