"""Servers for tests: one that all share, and fresh ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers import RunningServer


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """One server for the tests that leave it as it was."""
    made = RunningServer("--capacity", "4", "--queue", "64").wait_ready()
    yield made
    assert made.stop() == 0


@pytest.fixture
def fresh() -> Iterator[Callable[..., RunningServer]]:
    """Servers of a test's own."""
    made: list[RunningServer] = []

    def start(*words: str, **more: Any) -> RunningServer:
        made.append(RunningServer(*words, **more))
        return made[-1]

    yield start
    for one in made:
        one.stop()
