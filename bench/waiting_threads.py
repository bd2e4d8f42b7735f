"""What waiting threads cost: seconds per image of scenes-128, alone and with a second process beside it.

    .venv/bin/python bench/waiting_threads.py            (--seconds 6)

torch's OpenMP threads spin while they wait for each other. When two processes share the cores, a thread spins for one
that cannot run until the first gives up: an image then takes many times as long. `import pellucid` limits the spinning
where torch is not imported yet; where it is, the pipeline measures whether several threads wait and takes one then.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

# name → (what the environment sets, what is imported first); "as torch comes" leaves out the measurement too
AS_IS = "as torch comes"
WAYS = {
    AS_IS: ({"AS_IS": "1"}, "torch"),
    "import pellucid": ({}, "pellucid"),
    "import torch, then pellucid": ({}, "torch"),
    "OMP_WAIT_POLICY=PASSIVE": ({"OMP_WAIT_POLICY": "PASSIVE"}, "torch"),
    "OMP_NUM_THREADS=1": ({"OMP_NUM_THREADS": "1"}, "torch"),
}
CODE = """
import os, sys, time
__import__(sys.argv[2])
import pellucid, pellucid.pipeline.stages
if "AS_IS" in os.environ:
    pellucid.pipeline.stages._wait = lambda count: False
pipe = pellucid.load("scenes-128", device="cpu")
asked = {"sampler": "dpmpp_2m", "grid": "trailing", "steps": 20, "guidance": 4.0}
pipe("a red star", seed=0, **asked)
count, began = 0, time.perf_counter()
while time.perf_counter() - began < float(sys.argv[1]):
    pipe("a red star", seed=count, **asked)
    count += 1
print((time.perf_counter() - began) / count)
"""


def seconds(way: dict[str, str], first: str, processes: int, limit: float) -> float:
    """Per image, in so many processes at once."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    words = [sys.executable, "-c", CODE, str(limit), first]
    started = [subprocess.Popen(words, env={**clean, **way}, stdout=subprocess.PIPE) for _ in range(processes)]
    return sum(float(one.communicate()[0]) for one in started) / processes


def main() -> None:
    words = argparse.ArgumentParser(description="What waiting threads cost.")
    words.add_argument("--seconds", type=float, default=6.0)
    limit = words.parse_args().seconds
    print(f"seconds per image, {os.cpu_count()} cores   alone   two processes")
    for name, way in WAYS.items():
        print(f"{name:30} {seconds(*way, 1, limit):7.2f} {seconds(*way, 2, limit):15.2f}", flush=True)


if __name__ == "__main__":
    main()
