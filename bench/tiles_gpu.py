"""Decoding in tiles on a GPU: time, memory and difference, ours and diffusers', bf16, one set of random weights.

PYTHONPATH=src:FOLDER_WITH_DIFFUSERS python3 bench/tiles_gpu.py --out DIR
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from network_gpu import event_clock, peak_of
from networks import vae_duel
from pellucid.models.tiles import decode_tiled


@torch.no_grad()
def rows(side: int, rounds: int) -> list[str]:
    duel = vae_duel("vae", 1, side, torch.empty(0, device="cuda", dtype=torch.bfloat16))
    latents = torch.randn(1, 4, side, side, device="cuda", dtype=torch.bfloat16)
    duel.theirs.tile_latent_min_size, duel.theirs.tile_sample_min_size = 64, 512  # as with Stable Diffusion's config
    exact = duel.ours.float().decode(latents.float())  # the yardstick, in float32
    duel.ours.bfloat16()
    calls = {
        "Pellucid, whole": lambda: duel.ours.decode(latents),
        **{
            f"Pellucid, tile 64, keep {keep}": lambda keep=keep: decode_tiled(duel.ours, latents, 64, keep=keep)
            for keep in (2, 1, 0)
        },
        "diffusers, whole": lambda: duel.theirs.decode(latents, return_dict=False)[0],
        "diffusers, tiled": lambda: duel.theirs.tiled_decode(latents, return_dict=False)[0],
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(event_clock(call))
    spread = float(exact.std())
    lines = []
    for name, call in calls.items():
        gap = float((call().float() - exact).abs().mean()) / spread
        peak = peak_of(call) / 2**20
        lines.append(f"| {side * 8}² | {name} | {statistics.median(times[name]):.1f} | {peak:.0f} | {gap:.4f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.manual_seed(0)
    lines = [
        "| image | decoder | ms | peak MiB beyond weights | mean difference to float32 / deviation of the image |",
        "|---|---|---|---|---|",
        *rows(64, asked.rounds),
        *rows(128, asked.rounds),
    ]
    text = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16\n\n" + "\n".join(lines) + "\n"
    (asked.out / "tiles.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
