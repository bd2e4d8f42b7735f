"""Images a second of the CIFAR-10 UNet in training: our trainer against the plain loop that diffusers' example has.

    PYTHONPATH=src:FOLDER_WITH_DIFFUSERS python3 bench/train_throughput.py --data data/cifar10 --out DIR

Both sides: the same architecture, batch and dtype (bf16 autocast), torch.compile of the network, AdamW, clipping at 1,
one running mean of the weights, random mirroring. The plain loop is that of diffusers' unconditional example: a
DataLoader (here with worker processes and tensors in memory, which is faster than its default), add_noise, autocast,
clip_grad_norm_, AdamW, a rate scheduler, EMAModel.step, and the loss read each step for the progress bar.
Rounds of both alternate in one process; MFU is of the dense bf16 peak given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from pellucid.train.cifar10 import CIFAR10
from pellucid.train.config import TrainConfig, read
from pellucid.train.ranks import Ranks
from pellucid.train.trainer import Trainer

NETWORK = {
    "_class_name": "UNet2DModel",
    "sample_size": 32,
    "block_out_channels": [96, 128, 128],
    "layers_per_block": 2,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "AttnUpBlock2D", "UpBlock2D"],
    "attention_head_dim": 32,
    "norm_num_groups": 32,
}


class Mirrored(Dataset[Tensor]):
    """CIFAR-10 as an example's dataset would give it, but without decoding: one tensor an image."""

    def __init__(self, data: CIFAR10) -> None:
        self.images = data.images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        image = self.images[index].float() / 127.5 - 1.0
        return image.flip(2) if torch.rand(()) < 0.5 else image


def plain_loop(network: dict[str, Any], data: CIFAR10, batch: int, workers: int) -> Callable[[int], None]:
    """`run(steps)` of the example's loop, set up and running on."""
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel

    model = UNet2DModel(**{k: v for k, v in network.items() if not k.startswith("_")}).cuda()
    means = EMAModel(model.parameters(), decay=0.9999, use_ema_warmup=True)
    means.to("cuda")
    schedule = DDPMScheduler(num_train_timesteps=1000, beta_schedule="linear")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-8)
    rates = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=500, num_training_steps=100_000)
    loader: DataLoader[Tensor] = DataLoader(
        Mirrored(data), batch, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=workers > 0
    )
    compiled = torch.compile(model)

    def endless() -> Iterator[Tensor]:
        while True:
            yield from loader

    stream = endless()

    def run(steps: int) -> None:
        for _ in range(steps):
            clean = next(stream).to("cuda")
            noise = torch.randn_like(clean)
            times = torch.randint(0, 1000, (len(clean),), device="cuda")
            noisy = schedule.add_noise(clean, noise, times)
            with torch.autocast("cuda", torch.bfloat16):
                out = compiled(noisy, times).sample
            loss = F.mse_loss(out.float(), noise.float())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
            means.step(model.parameters())
            loss.detach().item()

    return run


def our_loop(data: str, batch: int, folder: Path) -> tuple[Callable[[int], None], Trainer]:
    """The same of our trainer, logging as it does."""
    objective = {"schedule": {"name": "linear"}, "target": "eps", "times": {"stratified": True}}
    raw = {
        "steps": 10_000_000,
        "batch": batch,
        "ema": [500_000],
        "task": {"kind": "denoiser", "network": NETWORK, "objective": objective},
        "data": {"kind": "cifar10", "folder": data},
        "optimizer": {"rate": 6e-4, "warmup": 500, "betas": [0.9, 0.99]},
        "engine": {"dtype": "bf16", "compile": True, "capture": True},
        "log": {"every": 100, "checkpoint_every": 0},
    }
    trainer = Trainer(read(TrainConfig, raw, "config"), folder, Ranks.join("ddp", "cuda"), quiet=True)
    done = 0

    def run(steps: int) -> None:
        nonlocal done
        trainer.save = lambda step: None  # type: ignore[method-assign]  # the peer writes no checkpoints either
        trainer.resume = lambda: done  # type: ignore[method-assign]
        trainer.run(until=done + steps)
        done += steps

    return run, trainer


def speed_of(run: Callable[[int], None], steps: int, batch: int) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run(steps)
    torch.cuda.synchronize()
    return steps * batch / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/cifar10")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--peak", type=float, default=989e12, help="dense bf16 FLOP/s of the device")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    ours, trainer = our_loop(args.data, args.batch, args.out / "ours")
    theirs = plain_loop(NETWORK, CIFAR10.read(args.data), args.batch, args.workers)
    with FlopCounterMode(display=False) as counter:
        trainer.network(torch.zeros(1, 3, 32, 32, device="cuda"), torch.zeros(1, device="cuda"))
    flops = 3 * counter.get_total_flops()  # forward, and twice that backward
    for run in (ours, theirs):
        begun = time.perf_counter()
        run(20)
        print(f"warm-up with compilation: {time.perf_counter() - begun:.0f} s", flush=True)
    speeds = [
        (speed_of(ours, args.steps, args.batch), speed_of(theirs, args.steps, args.batch)) for _ in range(args.rounds)
    ]
    ratios = [mine / other for mine, other in speeds]
    mine, other = (statistics.median(series) for series in zip(*speeds, strict=True))
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in trainer.network.parameters()),
        "gflop_per_image": flops / 1e9,
        "batch": args.batch,
        "ours_images_per_s": mine,
        "plain_images_per_s": other,
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "ours_mfu": mine * flops / args.peak,
        "plain_mfu": other * flops / args.peak,
    }
    print(json.dumps(found, indent=1))
    (args.out / "train_throughput.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
