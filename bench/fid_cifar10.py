"""FID between parts of CIFAR-10: a check of the whole measure against a number that an independent Inception gave.

    PYTHONPATH=src python3 bench/fid_cifar10.py --data data/cifar10 --inception data/inception.safetensors

Expected with the FID weights of 2015-12-05: 3.151 for the train against the test set, 2.108 for the even against the
odd images of the train set.
"""

from __future__ import annotations

import argparse
import time

import torch

from pellucid.evidence.metrics.fid import Statistics, fid
from pellucid.evidence.metrics.inception import features, load_inception
from pellucid.train.cifar10 import CIFAR10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/cifar10")
    parser.add_argument("--inception", default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, default=None, help="only so many images of each set")
    args = parser.parse_args()
    network = load_inception(args.inception, args.device)
    begun = time.perf_counter()
    train, test = (
        features(CIFAR10.read(args.data, split).images[: args.limit], network, 256) for split in ("train", "test")
    )
    print(f"{len(train) + len(test)} images in {time.perf_counter() - begun:.1f} s on {args.device}")
    print(f"FID train against test: {fid(Statistics.of(train), Statistics.of(test)):.4f}")
    print(f"FID even against odd of train: {fid(Statistics.of(train[0::2]), Statistics.of(train[1::2])):.4f}")


if __name__ == "__main__":
    main()
