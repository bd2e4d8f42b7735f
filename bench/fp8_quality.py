"""What fp8 costs in quality: the distance to the image in bfloat16, adherence on scenes-128, FID and KID on CIFAR-10.

    python bench/fp8_quality.py --images 1000 --out out/fp8
    python bench/fp8_quality.py --parts cifar --count 50000 --data data/cifar10 --inception data/inception.safetensors

Images of all dtypes have the same prompts and seeds. The distance of float32 to bfloat16, and of another seed, are
yardsticks. Layers from `--least` features on are in fp8: those of these small models are below the default. Without
compute capability 8.9 fp8 is emulated: the same rounding of inputs and weights, float32 sums. `--out` gets fp8.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pellucid
from pellucid import Pipeline, scenes
from pellucid.evidence.adherence.judging import judge
from pellucid.evidence.adherence.samples import ImageSettings
from pellucid.evidence.metrics.fid import Statistics, fid
from pellucid.evidence.metrics.inception import features, load_inception
from pellucid.evidence.metrics.kid import kid_exact
from pellucid.evidence.report.page import Table
from pellucid.evidence.statistics import Share
from pellucid.models import quantize
from pellucid.models.quantize import Fp8Linear
from pellucid.pipeline.images import to_tensor
from pellucid.pipeline.prepare import read_plan
from pellucid.scenes.grammar import Query
from pellucid.train.cifar10 import CIFAR10

DTYPES = ("float32", "bfloat16", "fp8")
REFERENCE, OTHER = "bfloat16", "bfloat16, another seed"
OTHER_SEED = 1_000_000  # further
MODELS = {"unet": "scenes-128", "dit": "scenes-128/dit"}
CIFAR = Path(__file__).parents[1] / "assets" / "cifar10-cosine"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=[*MODELS, "cifar"], default=list(MODELS))
    parser.add_argument("--images", type=int, default=1000, help="prompts of scenes-128")
    parser.add_argument("--count", type=int, default=10_000, help="images of CIFAR-10, of each dtype and true ones")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--least", type=int, default=64, help="features of the smallest layers in fp8")
    parser.add_argument("--data", default="data/cifar10", help="a folder with CIFAR-10's binary files")
    parser.add_argument("--inception", default="data/inception.safetensors", help="Inception's weights for FID")
    parser.add_argument("--plan", default=str(CIFAR / "plans" / "8.json"), help="how CIFAR-10's images are made")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("out/fp8"))
    asked = parser.parse_args()
    quantize.LEAST = asked.least
    asked.out.mkdir(parents=True, exist_ok=True)
    for part in asked.parts:
        found = of_cifar(asked) if part == "cifar" else of_scenes(part, asked.images, asked.batch, asked.device)
        about = {"device": asked.device, "torch": torch.__version__, "least": asked.least}
        (asked.out / f"{part}.json").write_text(json.dumps({**about, **found}, indent=1))


def share_in_fp8(pipe: Pipeline) -> float:
    """Of the network's weights."""
    network = pipe.components.network
    in_fp8 = sum(module.weight.numel() for module in network.modules() if isinstance(module, Fp8Linear))
    return in_fp8 / sum(weight.numel() for weight in network.parameters())


def distances(images: Tensor, others: Tensor) -> list[float]:
    """The mean absolute difference of each pair, in steps of 8 bits."""
    each: list[float] = (127.5 * (images - others).abs().mean((1, 2, 3))).tolist()
    return each


def spread(each: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(each), "median": statistics.median(each), "high": float(np.quantile(each, 0.95))}


# --- scenes-128 ---------------------------------------------------------------------------------------------------


@dataclass
class Series:
    """The images of one dtype so far: their distances to those in bfloat16, and whether they show what was asked."""

    apart: list[float]
    right: list[bool]


def of_scenes(part: str, count: int, size: int, device: str) -> dict[str, Any]:
    """Pairs of images of one prompt and seed."""
    asked = scenes.prompts(count, (1, 2, 3), 0, split="held_out")
    pipes = {dtype: pellucid.load(MODELS[part], dtype=dtype, device=device) for dtype in DTYPES}
    found = {name: Series([], []) for name in (*DTYPES, OTHER)}
    for first in range(0, count, size):
        here = asked[first : first + size]
        made = {dtype: images_of(pipe, here, first) for dtype, pipe in pipes.items()}
        made[OTHER] = images_of(pipes[REFERENCE], here, first + OTHER_SEED)
        for name, images in made.items():
            found[name].apart += distances(images, made[REFERENCE])
            readings = scenes.read(images)
            found[name].right += [judge(r, q).right for r, (_, q) in zip(readings, here, strict=True)]
        print(f"{part}: {first + len(here)} of {count}", flush=True)
    weights = share_in_fp8(pipes["fp8"])
    rows = {name: row_of(series, found[REFERENCE]) for name, series in found.items()}
    print(scenes_table(f"{part}, {count} images, {weights:.0%} of the weights in fp8", rows).markdown())
    return {"images": count, "weights in fp8": weights, "rows": rows}


def images_of(pipe: Pipeline, asked: Sequence[tuple[str, Query]], first: int) -> Tensor:
    made = ImageSettings(batch=len(asked)).images(pipe, [caption for caption, _ in asked], first)
    return to_tensor(made)


def row_of(series: Series, reference: Series) -> dict[str, Any]:
    pairs = list(zip(series.right, reference.right, strict=True))
    share = Share.of(series.right)
    low, high = share.interval
    return {
        **spread(series.apart),
        "right": {"value": share.value, "low": low, "high": high},
        "gained": pairs.count((True, False)),
        "lost": pairs.count((False, True)),
    }


def scenes_table(title: str, rows: Mapping[str, dict[str, Any]]) -> Table:
    columns = ("", "distance, mean", "median", "95 % below", "right", "interval", "right here alone", "in bf16 alone")
    cells = []
    for name, row in rows.items():
        right = row["right"]
        numbers = (f"{row['mean']:.2f}", f"{row['median']:.2f}", f"{row['high']:.1f}")
        share = (f"{right['value']:.1%}", f"{right['low']:.1%} to {right['high']:.1%}")
        cells.append((name, *numbers, *share, str(row["gained"]), str(row["lost"])))
    return Table(title, columns, tuple(cells))


# --- CIFAR-10 -----------------------------------------------------------------------------------------------------


def of_cifar(asked: argparse.Namespace) -> dict[str, Any]:
    """FID and KID of as many images of each dtype as there are true ones, and distances as of scenes-128."""
    inception = load_inception(asked.inception, asked.device)
    true = features(CIFAR10.read(asked.data).images[: asked.count], inception, asked.batch)
    plan, rows = read_plan(asked.plan), {}
    reference, weights = torch.empty(0), 0.0
    for dtype in (REFERENCE, "fp8", "float32"):
        pipe = pellucid.load(CIFAR, dtype=dtype, device=asked.device)
        weights = max(weights, share_in_fp8(pipe))
        images = pixels(pipe, plan, asked.count, asked.batch)
        reference = images if dtype == REFERENCE else reference
        seen = features(bytes_of(images), inception, asked.batch)
        value = fid(Statistics.of(seen), Statistics.of(true))
        rows[dtype] = {**spread(distances(images, reference)), "fid": value, "kid": kid_exact(seen, true)}
        print(f"cifar: {dtype}", flush=True)
    columns = ("", "distance, mean", "median", "95 % below", "FID", "KID · 10³")
    cells = tuple(
        (name, f"{r['mean']:.2f}", f"{r['median']:.2f}", f"{r['high']:.1f}", f"{r['fid']:.2f}", f"{1e3 * r['kid']:.2f}")
        for name, r in rows.items()
    )
    title = f"CIFAR-10, {asked.count} images against {len(true)}, {plan.nfe} calls, {weights:.0%} of the weights in fp8"
    print(Table(title, columns, cells).markdown())
    return {"images": asked.count, "calls": plan.nfe, "weights in fp8": weights, "rows": rows}


def pixels(pipe: Pipeline, plan: Any, count: int, size: int) -> Tensor:
    """(N, 3, 32, 32) in [−1, 1], as a PNG holds them; image n has the seed n."""
    made = []
    for first in range(0, count, size):
        seeds = list(range(first, min(first + size, count)))
        made.append(to_tensor(pipe(plan=plan, seed=seeds, n=len(seeds)).images))
    return torch.cat(made)


def bytes_of(images: Tensor) -> Tensor:
    return ((images + 1) * 127.5).round().to(torch.uint8)


if __name__ == "__main__":
    main()
