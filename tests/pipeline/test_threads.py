"""Threads of small networks where torch was imported first: one of them where several would wait for each other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from pellucid.pipeline import stages

CPU = torch.device("cpu")
SMALL = nn.Linear(4, 4)
BUSY = """
import torch  # first: too late to limit how long its threads spin
import pellucid
pipe = pellucid.load("scenes-128", device="cpu")
made = pipe("a red star", seed=1, steps=1, guidance=1)
print(torch.get_num_threads(), [note for note in made.notes if "threads" in note])
"""


@pytest.fixture(autouse=True)
def _undecided(monkeypatch: pytest.MonkeyPatch):
    for name in stages.THREAD_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("waits", "count"), [(True, 1), (False, 2)])
def test_the_faster_number_of_threads_runs(monkeypatch: pytest.MonkeyPatch, waits: bool, count: int) -> None:
    monkeypatch.setattr(stages, "_wait", lambda count: waits)
    with stages.faster_threads(SMALL, CPU) as notes:
        assert torch.get_num_threads() == count
        assert bool(notes) == waits
    assert torch.get_num_threads() == 2


def test_an_error_gives_the_threads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_wait", lambda count: True)
    with pytest.raises(ZeroDivisionError), stages.faster_threads(SMALL, CPU):
        _ = 1 / 0
    assert torch.get_num_threads() == 2


def test_who_has_decided_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_wait", lambda count: True)
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    with stages.faster_threads(SMALL, CPU) as notes:
        assert (torch.get_num_threads(), notes) == (2, [])
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setattr(stages, "SMALL_NETWORK", 3)
    with stages.faster_threads(SMALL, CPU) as notes:
        assert (torch.get_num_threads(), notes) == (2, [])


@pytest.mark.slow  # five tries at most, and every core is busy meanwhile
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has one thread")
def test_threads_that_cannot_run_are_measured() -> None:
    """Other processes keep every core busy: the pipeline runs on one thread, and says so. A few tries, since whether a
    thread is held up at the very moment of the measurement is a matter of chance."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "MKL_"))}
    cores = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * cores)]
    try:
        for _ in range(5):
            words = [sys.executable, "-c", BUSY]
            done = subprocess.run(words, env=clean, capture_output=True, text=True, timeout=120, check=True)
            count, _, notes = done.stdout.partition(" ")
            assert int(count) == cores
            if "ran on 1 of" in notes:
                return
    finally:
        for one in busy:
            one.kill()
            one.wait()
    pytest.fail("five measurements on a busy machine saw no thread wait")
