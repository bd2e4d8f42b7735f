"""Runs a page in a process forked from one that has torch, matplotlib and the engine imported: a start costs nothing.

How `process.run_page` starts one of its own is tested in test_lab_running.py, on pages that take no time.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import matplotlib.pyplot  # noqa: F401
import torch
import torch._subclasses.fake_tensor

import pellucid.evidence.tune
import pellucid.train.trainer  # noqa: F401
from pellucid.labs import SMOKE, process
from pellucid.labs.process import BlockResult
from pellucid.pipeline import load, memory  # noqa: F401

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["page_run"])


def run(page: Path, folder: Path) -> list[BlockResult]:
    """Every block of a page in its small size; what it leaves in temporary files goes into the folder."""
    # The server reads no sys.path, and would then preload nothing.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)), OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    ours, theirs = FORKS.Pipe(duplex=False)
    child = FORKS.Process(target=enter, args=(page, folder, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        return list(ours.recv())
    finally:
        child.join()


def enter(page: Path, folder: Path, results: Connection) -> None:
    torch.set_num_threads(1)
    process.DPI = 30  # that there is a figure is looked at, and not the figure
    os.environ |= {SMOKE: "1", "TMPDIR": str(folder)}
    tempfile.tempdir = None
    os.chdir(folder)
    results.send(list(process.run_here(page)))
