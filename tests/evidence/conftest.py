"""One thread a kernel, small stand-ins for Inception and CLIP, and the true weights where this machine has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from stand_ins import Small, clip_model

WEIGHTS = Path(__file__).parents[2] / "data" / "inception.safetensors"
CIFAR = Path(__file__).parents[2] / "data" / "cifar10"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
