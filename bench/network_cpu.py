"""Our networks against diffusers' on this CPU, float32, one set of random weights, in one process.

    .venv/bin/python bench/network_cpu.py

SD 1.5's UNet at 512² (batch 1) and the decoder of its VAE at 256². Medians of interleaved rounds; peaks are the largest
sum of live tensors beyond the weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from networks import SD15, Duel, Outcome, in_turns, table, unet_duel, vae_duel
from pellucid.pipeline.tracker import Tracker


def clock(call) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def peak_of(call) -> int:
    """Bytes of living tensors at the fullest moment, beyond what lived before."""
    with Tracker(["cpu"]) as tracker:
        call()
    return tracker.peak.total


@torch.no_grad()
def fight(duel: Duel, rounds: int) -> Outcome:
    def ours():
        return duel.call_ours(duel.ours)

    def theirs():
        return duel.call_theirs(duel.theirs)

    ours(), theirs()
    found = in_turns(duel.name, ours, theirs, rounds, clock)
    return dataclasses.replace(found, ours_peak=peak_of(ours), theirs_peak=peak_of(theirs))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=11)
    asked = parser.parse_args()
    torch.manual_seed(0)
    like = torch.empty(0)
    outcomes = [
        fight(unet_duel("SD 1.5 UNet 512², batch 1", SD15, 1, 64, like), asked.rounds),
        fight(vae_duel("KL-VAE decode 256²", 1, 32, like), asked.rounds),
    ]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, {asked.rounds} rounds\n")
    print(table(outcomes))


if __name__ == "__main__":
    main()
