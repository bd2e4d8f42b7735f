"""The kernels in Triton's interpreter: the code that a GPU runs, on CPU tensors. tests/gpu runs them compiled.

Triton decides when it is imported whether it interprets, so the checks run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import CHECKS, Draw

from pellucid.models import kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SEEDS = 6
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}


@pytest.fixture
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions as a GPU's, to the nearest: the interpreter's own truncate to bf16 and lose a carry in fp8."""
    from triton.runtime import interpreter

    def converted(values: np.ndarray, source: Any, target: Any, _: object) -> np.ndarray:
        numbers = torch.from_numpy(np.array(values).view(f"int{source.primitive_bitwidth}"))
        held = numbers.view(TYPES[str(source)]).to(TYPES[str(target)])
        return held.view(getattr(torch, f"int{target.primitive_bitwidth}")).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)


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
    assert f"{len(CHECKS) * SEEDS + 1} passed" in run.stdout  # and the last test


if INTERPRETED:

    @pytest.mark.usefixtures("_rounding")
    # the interpreter's loops; and a GPU gives infinity, which is right
    @pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
    @pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
    @pytest.mark.parametrize("seed", range(SEEDS))
    @pytest.mark.parametrize("name", CHECKS)
    def test_equals_plain_torch(name: str, seed: int) -> None:
        CHECKS[name](Draw(seed, "cpu", large=False))


def test_triton_is_imported_by_the_first_launch_only() -> None:
    code = "import sys, pellucid, pellucid.models.kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
