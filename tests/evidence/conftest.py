"""One thread a kernel, small stand-ins for Inception and CLIP, and the true weights where this machine has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stand_ins import Small, clip_model

WEIGHTS = Path(__file__).parents[2] / "data" / "inception.safetensors"
CIFAR = Path(__file__).parents[2] / "data" / "cifar10"
RUNS = Path(__file__).parents[2] / "data" / "studies" / "small_eps" / "runs"


@pytest.fixture
def small() -> Small:
    return Small()


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_model(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="session")
def true_weights() -> Path:
    if not WEIGHTS.is_file():
        pytest.skip("data/inception.safetensors is not here")
    return WEIGHTS


@pytest.fixture(scope="session")
def cifar() -> Path:
    if not CIFAR.is_dir():
        pytest.skip("data/cifar10 is not here")
    return CIFAR


@pytest.fixture(scope="session")
def small_denoisers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Denoisers that are trained when they are first asked for."""
    from small_denoisers import Small as Trained

    return Trained(tmp_path_factory.mktemp("denoisers"))


@pytest.fixture(scope="session")
def cifar_runs() -> list[Path]:
    """The runs of the schedule study on CIFAR-10 that are here, one per schedule."""
    found = [folder for folder in sorted(RUNS.glob("*-0")) if (folder / "model").is_dir()]
    if not found:
        pytest.skip("data/studies/small_eps is not here")
    return found
