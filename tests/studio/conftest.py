"""What the tests of the studio share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import browser
from tiny_models import copied


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model of tiny images."""
    folder = copied("sd1", tmp_path_factory.mktemp("models"))
    config = folder / "unet" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text("utf-8")), "sample_size": 8}), "utf-8")
    return folder


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with browser() as found:
        yield found
