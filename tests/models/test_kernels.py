"""The kernels in Triton's interpreter: the code that a GPU runs, on CPU tensors. tests/gpu/test_kernels_gpu.py runs the compiled ones.

Triton decides when it is imported whether it interprets, so the checks run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import CHECKS, Draw

from pellucid.models import kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SEEDS = 12


@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
@pytest.mark.skipif(not kernels.available(), reason="needs triton")
def test_in_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert f"{len(CHECKS) * SEEDS} passed" in run.stdout


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", CHECKS)
def test_equals_plain_torch(name: str, seed: int) -> None:
    CHECKS[name](Draw(seed, "cpu", large=False))


def test_triton_is_imported_by_the_first_launch_only() -> None:
    code = "import sys, pellucid, pellucid.models.kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
